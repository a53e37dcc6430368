/* Weights of dense blocks of a segment: an entropy-coded message of planes within that of the delta. */
#ifndef TX_OPS_DELTA_DENSE_H
#define TX_OPS_DELTA_DENSE_H

#include "csrc/core/delta_segment.h"
#include "csrc/ops/planes_block.h"

/* What reading them takes: the last block of planes that was decoded. Memory of one task, so that none is asked for
 * where weights are already being written. */
typedef struct tx_delta_dense_room {
  const uint8_t *block; /* whose values are in work.values; NULL: of none */
  tx_planes_work work;
} tx_delta_dense_room;

/* Whether the segment's dense weights are a message of `numel` values of this dtype. */
int tx_delta_dense_open(const tx_delta_segment *segment, int64_t numel, tx_dtype dtype, tx_planes_message *message);

/* Values [at, at + n), which are of one block of planes, in the room; NULL where its bytes are none. */
const void *tx_delta_dense_at(tx_delta_dense_room *room, const tx_planes_message *message, int64_t at, int64_t n);

#endif
