/* The tracker: which buckets of a backward are complete, and the order in which gradients were ready in the first
 * backward. */
#ifndef TX_CORE_TRACKER_H
#define TX_CORE_TRACKER_H

#include "csrc/torch_ext.h"

/* In memory of the caller; none of its functions allocates. One thread at a time. A cycle is: mark each parameter when
 * its gradient is ready, finish, reset. */
typedef struct tx_tracker tx_tracker;

/* Bytes of memory (aligned as for int64_t) that a tracker needs; -1 for negative counts or more than int64_t holds. */
int64_t tx_tracker_bytes(int64_t n_params, int64_t n_buckets);

/* Initialises a tracker in `memory`; *tracker points into it. bucket_of: the bucket of each parameter (copied). */
tx_status tx_tracker_init(void *memory, int64_t bytes, int64_t n_params, const int64_t *bucket_of, int64_t n_buckets,
                          tx_tracker **tracker, tx_error *error);

/* Marks the gradient of parameter `param` as ready. Returns 1 if its bucket is complete now, else 0. Returns -1 if it
 * was ready before in this backward, or if the backward has ended: something may already be reading the bucket. */
int tx_tracker_mark(tx_tracker *tracker, int64_t param);

int64_t tx_tracker_bucket(const tx_tracker *tracker, int64_t param);

int tx_tracker_is_ready(const tx_tracker *tracker, int64_t param);

/* Returns the next bucket to send, or -1 while that is not complete. Buckets are returned in ascending order, each once
 * per backward, whatever the order in which they complete: ranks must enter collectives in the same order. */
int64_t tx_tracker_next(tx_tracker *tracker);

/* [n_buckets]: the parameter whose gradient completed each bucket last time, or -1. */
const int64_t *tx_tracker_completed_by(const tx_tracker *tracker);

/* Presets completed_by: for each bucket its last parameter in this order of all parameters. */
void tx_tracker_expect(tx_tracker *tracker, const int64_t *order);

/* Ends a backward: every bucket counts as complete from now on. */
void tx_tracker_finish(tx_tracker *tracker);

/* Begins another backward: no gradient is ready. */
void tx_tracker_reset(tx_tracker *tracker);

/* The order in which gradients were ready in the first backward that was finished, for tx_layout_args.order: a
 * permutation of all parameters; those without a gradient are last, in reverse order. Valid once a backward was
 * finished. */
const int64_t *tx_tracker_order(const tx_tracker *tracker);

#endif
