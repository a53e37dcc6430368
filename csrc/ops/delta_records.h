/* What segments change, kept between looking at it and writing it. */
#ifndef TX_OPS_DELTA_RECORDS_H
#define TX_OPS_DELTA_RECORDS_H

#include "csrc/cpu/coding_kernels.h"
#include "csrc/ops/delta_receiver.h"

/* The weights that one segment changes, block after block. */
typedef struct tx_delta_record {
  uint16_t *at;     /* in the block; NULL: it is not kept, but decoded again */
  uint32_t *weight; /* what they become */
  int32_t n_of[TX_DELTA_BLOCKS];
} tx_delta_record;

typedef struct tx_delta_records {
  tx_delta_record *of_group; /* of the plan */
  void *memory;
} tx_delta_records;

/* Space for what the plan's groups change, of those that are one segment without dense blocks: as many of them as a
 * quarter of the receiver's weights (in bytes) has room for. 0: no memory. */
int tx_delta_records_make(tx_delta_records *records, const tx_delta_receiver *receiver, const tx_delta_plan *plan);
void tx_delta_records_free(tx_delta_records *records);

/* The changes of `n` weights of the parameter from `begin` on into their memory. */
void tx_delta_record_write(const tx_delta_piece *pieces, int64_t n_pieces, int64_t begin, int64_t n, int64_t item,
                           const uint16_t *at, const uint32_t *weight, int32_t n_at);

#endif
