/* Distributes the items of a call over threads; a thread that is free takes the next item. */
#ifndef TX_OPS_DELTA_TASKS_H
#define TX_OPS_DELTA_TASKS_H

#include "csrc/torch_ext.h"

/* Processes one item. task: in [0, number of threads); each item is processed by one task. Floating point is in
 * tx_fp_enter's mode. */
typedef void (*tx_delta_item_fn)(void *ctx, int64_t task, int64_t item);
void tx_delta_each(const tx_parallel *parallel, int64_t n, tx_delta_item_fn item, void *ctx);

#endif
