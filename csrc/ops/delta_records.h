/* Keeps the decoded changes of segments between verifying and writing them. */
#ifndef TX_OPS_DELTA_RECORDS_H
#define TX_OPS_DELTA_RECORDS_H

#include "csrc/cpu/coding_kernels.h"
#include "csrc/ops/delta_receiver.h"

/* The changes of one segment, block after block. */
typedef struct tx_delta_record {
  uint16_t *at;     /* positions in the block; NULL: not kept, decoded again */
  uint32_t *weight; /* new weights */
  int32_t n_of[TX_DELTA_BLOCKS];
} tx_delta_record;

typedef struct tx_delta_records {
  tx_delta_record *of_group; /* one per group of the plan */
  void *memory;
} tx_delta_records;

/* Allocates records for groups of the plan that are a single segment without dense blocks: for as many as fit into a
 * quarter of the receiver's weights (in bytes). Returns 0 if out of memory. */
int tx_delta_records_make(tx_delta_records *records, const tx_delta_receiver *receiver, const tx_delta_plan *plan);
void tx_delta_records_free(tx_delta_records *records);

/* Writes changes of `n` weights of the parameter, from `begin` on, into their memory. n_at: the number of changes. */
void tx_delta_record_write(const tx_delta_piece *pieces, int64_t n_pieces, int64_t begin, int64_t n, int64_t item,
                           const uint16_t *at, const uint32_t *weight, int32_t n_at);

#endif
