/* The weights of dense blocks of a segment: a message of planes (entropy-coded) inside the delta's message. */
#ifndef TX_OPS_DELTA_DENSE_H
#define TX_OPS_DELTA_DENSE_H

#include "csrc/core/delta_segment.h"
#include "csrc/ops/planes_block.h"

/* Workspace for reading them: the last block of planes that was decoded. Allocated per task, so that nothing is
 * allocated once weights are being written. */
typedef struct tx_delta_dense_room {
  const uint8_t *block; /* the block whose values are in work.values; NULL: none */
  tx_planes_work work;
} tx_delta_dense_room;

/* Opens the segment's dense weights; returns 0 if they are not a message of `numel` values of this dtype. */
int tx_delta_dense_open(const tx_delta_segment *segment, int64_t numel, tx_dtype dtype, tx_planes_message *message);

/* Returns values [at, at + n), which must be in one block of planes, decoded in the room; NULL if the block's bytes are
 * invalid. */
const void *tx_delta_dense_at(tx_delta_dense_room *room, const tx_planes_message *message, int64_t at, int64_t n);

#endif
