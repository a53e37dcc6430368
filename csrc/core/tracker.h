/* Which bucket of a backward is complete, and the order in which gradients were ready in the first one. */
#ifndef TX_CORE_TRACKER_H
#define TX_CORE_TRACKER_H

#include "csrc/torch_ext.h"

/* Lives in memory of the caller; no function of it allocates. One thread at a time. A cycle is: mark each parameter
 * when its gradient is ready, finish, reset. */
typedef struct tx_tracker tx_tracker;

/* Bytes of memory (aligned as for int64_t) that a tracker needs; -1 for negative counts or more than int64_t holds. */
int64_t tx_tracker_bytes(int64_t n_params, int64_t n_buckets);

/* bucket_of: the bucket of each parameter (copied). *tracker points into `memory`, and dies with it. */
tx_status tx_tracker_init(void *memory, int64_t bytes, int64_t n_params, const int64_t *bucket_of, int64_t n_buckets,
                          tx_tracker **tracker, tx_error *error);

/* The gradient of parameter `param` is ready. 1 where its bucket is complete now, else 0; -1 where it was ready before
 * in this backward, or the backward has ended: something may be reading the bucket already. */
int tx_tracker_mark(tx_tracker *tracker, int64_t param);

int64_t tx_tracker_bucket(const tx_tracker *tracker, int64_t param);

int tx_tracker_is_ready(const tx_tracker *tracker, int64_t param);

/* The next bucket to send, or -1 while it is not complete. Buckets are handed out in ascending order, each once per
 * backward, whatever the order in which they complete: ranks must enter collectives in the same order. */
int64_t tx_tracker_next(tx_tracker *tracker);

/* [n_buckets]: the parameter whose gradient completed each bucket when that happened last, or -1. */
const int64_t *tx_tracker_completed_by(const tx_tracker *tracker);

/* Until that has happened, the last of each bucket in this order of all parameters is its parameter. */
void tx_tracker_expect(tx_tracker *tracker, const int64_t *order);

/* The end of backward: every bucket is complete now. */
void tx_tracker_finish(tx_tracker *tracker);

/* Another backward: nothing is ready yet. */
void tx_tracker_reset(tx_tracker *tracker);

/* The order of the first backward that was finished, for tx_layout_args.order: a permutation of all parameters; those
 * without a gradient are last, in reverse order. Valid from then on. */
const int64_t *tx_tracker_order(const tx_tracker *tracker);

#endif
