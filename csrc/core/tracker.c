#include "csrc/core/tracker.h"

#include <inttypes.h>

#include "csrc/core/status.h"

/* One block of the caller's memory: this struct, then the arrays that it points to. */
struct tx_tracker {
  int64_t n_params;
  int64_t n_buckets;
  int64_t n_learnt;      /* entries of `learnt` */
  int64_t next;          /* the bucket that tx_tracker_next returns next */
  int64_t finished;      /* this backward is over */
  int64_t has_learnt;    /* a backward was finished: `learnt` is fixed */
  int64_t *bucket_of;    /* [n_params] */
  int64_t *ready;        /* [n_params] 0 or 1 */
  int64_t *learnt;       /* [n_params] parameters in the order in which they were ready */
  int64_t *expected;     /* [n_buckets] number of parameters of each bucket */
  int64_t *remaining;    /* [n_buckets] number of these that are not ready */
  int64_t *completed_by; /* [n_buckets] the parameter that was ready last, or -1 */
};

int64_t tx_tracker_bytes(int64_t n_params, int64_t n_buckets) {
  const int64_t limit = INT64_MAX / 64;
  if (n_params < 0 || n_buckets < 0 || n_params > limit || n_buckets > limit) return -1;
  return (int64_t)sizeof(tx_tracker) + (3 * n_params + 3 * n_buckets) * (int64_t)sizeof(int64_t);
}

tx_status tx_tracker_init(void *memory, int64_t bytes, int64_t n_params, const int64_t *bucket_of, int64_t n_buckets,
                          tx_tracker **tracker, tx_error *error) {
  const int64_t needed = tx_tracker_bytes(n_params, n_buckets);
  if (needed < 0 || !memory || bytes < needed || (n_params > 0 && !bucket_of) ||
      (uintptr_t)memory % sizeof(int64_t) != 0) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "tx_tracker_init: %" PRId64 " parameters, %" PRId64 " buckets, %" PRId64
                   " bytes at %p; needed: %" PRId64 " bytes, aligned to %d, and bucket_of",
                   n_params, n_buckets, bytes, memory, needed, (int)sizeof(int64_t));
  }
  for (int64_t i = 0; i < n_params; i++) {
    if (bucket_of[i] < 0 || bucket_of[i] >= n_buckets) {
      return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                     "parameter %" PRId64 " is in bucket %" PRId64 "; legal: 0 ... %" PRId64, i, bucket_of[i],
                     n_buckets - 1);
    }
  }
  tx_tracker *t = memory;
  int64_t *arrays = (int64_t *)(t + 1);
  *t = (tx_tracker){.n_params = n_params,
                    .n_buckets = n_buckets,
                    .bucket_of = arrays,
                    .ready = arrays + n_params,
                    .learnt = arrays + 2 * n_params,
                    .expected = arrays + 3 * n_params,
                    .remaining = arrays + 3 * n_params + n_buckets,
                    .completed_by = arrays + 3 * n_params + 2 * n_buckets};
  for (int64_t b = 0; b < n_buckets; b++) {
    t->expected[b] = 0;
    t->completed_by[b] = -1;
  }
  for (int64_t i = 0; i < n_params; i++) {
    t->bucket_of[i] = bucket_of[i];
    t->expected[bucket_of[i]]++;
  }
  tx_tracker_reset(t);
  *tracker = t;
  return TX_OK;
}

void tx_tracker_reset(tx_tracker *t) {
  t->next = 0;
  t->finished = 0;
  if (!t->has_learnt) t->n_learnt = 0; /* discard the order of a backward that raised */
  for (int64_t i = 0; i < t->n_params; i++)
    t->ready[i] = 0;
  for (int64_t b = 0; b < t->n_buckets; b++)
    t->remaining[b] = t->expected[b];
}

int tx_tracker_mark(tx_tracker *t, int64_t param) {
  if (t->finished || t->ready[param]) return -1;
  t->ready[param] = 1;
  if (!t->has_learnt) t->learnt[t->n_learnt++] = param;
  const int64_t bucket = t->bucket_of[param];
  if (--t->remaining[bucket] > 0) return 0;
  t->completed_by[bucket] = param;
  return 1;
}

const int64_t *tx_tracker_completed_by(const tx_tracker *t) {
  return t->completed_by;
}

void tx_tracker_expect(tx_tracker *t, const int64_t *order) {
  for (int64_t k = 0; k < t->n_params; k++)
    t->completed_by[t->bucket_of[order[k]]] = order[k];
}

int64_t tx_tracker_bucket(const tx_tracker *t, int64_t param) {
  return t->bucket_of[param];
}

int tx_tracker_is_ready(const tx_tracker *t, int64_t param) {
  return t->ready[param] != 0;
}

int64_t tx_tracker_next(tx_tracker *t) {
  if (t->next >= t->n_buckets || (t->remaining[t->next] > 0 && !t->finished)) return -1;
  return t->next++;
}

void tx_tracker_finish(tx_tracker *t) {
  if (t->finished) return;
  t->finished = 1;
  if (t->has_learnt) return;
  for (int64_t i = t->n_params - 1; i >= 0; i--) {
    if (!t->ready[i]) t->learnt[t->n_learnt++] = i;
  }
  t->has_learnt = 1;
}

const int64_t *tx_tracker_order(const tx_tracker *t) {
  return t->learnt;
}
