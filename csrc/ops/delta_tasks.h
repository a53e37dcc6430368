/* Items of a call shared out among threads: whoever is free takes the next one. */
#ifndef TX_OPS_DELTA_TASKS_H
#define TX_OPS_DELTA_TASKS_H

#include "csrc/torch_ext.h"

/* task: numbered from 0, less than the threads; an item is one task's. Floating point is in tx_fp_enter's mode. */
typedef void (*tx_delta_item_fn)(void *ctx, int64_t task, int64_t item);
void tx_delta_each(const tx_parallel *parallel, int64_t n, tx_delta_item_fn item, void *ctx);

#endif
