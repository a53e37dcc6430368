#include <inttypes.h>
#include <string.h>

#include "csrc/core/status.h"
#include "csrc/core/text.h"
#include "csrc/torch_ext_advanced.h"

/* One block of the caller's memory: this, then the arrays that it points into. */
struct tx_tracker {
  int64_t n_params;
  int64_t n_buckets;
  int64_t n_waited;   /* parameters that have a bucket */
  int64_t n_arrived;  /* of them, in this cycle */
  int64_t n_learnt;   /* entries of `learnt` */
  int64_t next;       /* the bucket that tx_tracker_next hands out next */
  int64_t finished;   /* this cycle is over */
  int64_t has_learnt; /* a cycle has been finished: `learnt` is fixed */
  int64_t allow_unused;
  const char *const *names; /* borrowed; may be NULL */
  int64_t *bucket_of;       /* [n_params] */
  int64_t *arrived;         /* [n_params] 0 or 1 */
  int64_t *learnt;          /* [n_params] parameters in the order of their first arrivals */
  int64_t *expected;        /* [n_buckets] parameters of each bucket */
  int64_t *remaining;       /* [n_buckets] of them, still to come */
};

int64_t tx_tracker_bytes(int64_t n_params, int64_t n_buckets) {
  const int64_t limit = INT64_MAX / 64;
  if (n_params < 0 || n_buckets < 0 || n_params > limit || n_buckets > limit) return -1;
  return (int64_t)sizeof(tx_tracker) + (3 * n_params + 2 * n_buckets) * (int64_t)sizeof(int64_t);
}

static void add_name(tx_text *text, const tx_tracker *t, int64_t param) {
  if (t->names && t->names[param]) {
    tx_text_add(text, "'%s'", t->names[param]);
  } else {
    tx_text_add(text, "%" PRId64, param);
  }
}

tx_status tx_tracker_init(void *memory, int64_t bytes, int64_t n_params, const int64_t *bucket_of, int64_t n_buckets,
                          const char *const *names, int32_t allow_unused, tx_tracker **tracker, tx_error *error) {
  const int64_t needed = tx_tracker_bytes(n_params, n_buckets);
  if (needed < 0) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_tracker_init: %" PRId64 " parameters, %" PRId64 " buckets",
                   n_params, n_buckets);
  }
  if (!memory || !tracker || (n_params > 0 && !bucket_of) || bytes < needed ||
      (uintptr_t)memory % sizeof(int64_t) != 0) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "tx_tracker_init: %" PRId64 " bytes at %p; needed: %" PRId64 " bytes, aligned to %d, and bucket_of",
                   bytes, memory, needed, (int)sizeof(int64_t));
  }
  for (int64_t i = 0; i < n_params; i++) {
    if (bucket_of[i] < -1 || bucket_of[i] >= n_buckets) {
      return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                     "tx_tracker_init: parameter %" PRId64 " is in bucket %" PRId64 "; legal: -1 ... %" PRId64, i,
                     bucket_of[i], n_buckets - 1);
    }
  }
  tx_tracker *t = memory;
  int64_t *arrays = (int64_t *)(t + 1);
  *t = (tx_tracker){.n_params = n_params,
                    .n_buckets = n_buckets,
                    .allow_unused = allow_unused != 0,
                    .names = names,
                    .bucket_of = arrays,
                    .arrived = arrays + n_params,
                    .learnt = arrays + 2 * n_params,
                    .expected = arrays + 3 * n_params,
                    .remaining = arrays + 3 * n_params + n_buckets};
  for (int64_t b = 0; b < n_buckets; b++)
    t->expected[b] = 0;
  for (int64_t i = 0; i < n_params; i++) {
    t->bucket_of[i] = bucket_of[i];
    if (bucket_of[i] < 0) continue;
    t->expected[bucket_of[i]]++;
    t->n_waited++;
  }
  tx_tracker_reset(t);
  *tracker = t;
  return TX_OK;
}

void tx_tracker_reset(tx_tracker *t) {
  t->n_arrived = 0;
  t->next = 0;
  t->finished = 0;
  if (!t->has_learnt) t->n_learnt = 0; /* a cycle that was given up teaches nothing */
  for (int64_t i = 0; i < t->n_params; i++)
    t->arrived[i] = 0;
  for (int64_t b = 0; b < t->n_buckets; b++)
    t->remaining[b] = t->expected[b];
}

tx_status tx_tracker_mark(tx_tracker *t, int64_t param, int64_t *complete, tx_error *error) {
  if (!t || !complete) return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_tracker_mark: an argument is NULL");
  if (param < 0 || param >= t->n_params || t->bucket_of[param] < 0) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "tx_tracker_mark: parameter %" PRId64 " is not waited for; %" PRId64 " parameters have a bucket",
                   param, t->n_waited);
  }
  if (t->finished || t->arrived[param]) {
    char name[256];
    tx_text text = tx_text_in(name, sizeof name);
    add_name(&text, t, param);
    return tx_fail(error, TX_ERROR_BAD_STATE,
                   t->finished ? "the gradient of parameter %s came after the end of backward; tx_tracker_reset first"
                               : "the gradient of parameter %s came twice in one backward",
                   name);
  }
  t->arrived[param] = 1;
  t->n_arrived++;
  if (!t->has_learnt) t->learnt[t->n_learnt++] = param;
  const int64_t bucket = t->bucket_of[param];
  *complete = --t->remaining[bucket] == 0 ? bucket : -1;
  return TX_OK;
}

int64_t tx_tracker_next(tx_tracker *t) {
  if (t->next >= t->n_buckets || (t->remaining[t->next] > 0 && !t->finished)) return -1;
  return t->next++;
}

/* "'a', 'b', 'c' and 7 more", ascending. */
static void add_missing(tx_text *text, const tx_tracker *t, int64_t n_missing) {
  const int64_t shown = n_missing > 8 ? 7 : n_missing;
  int64_t k = 0;
  for (int64_t i = 0; k < shown; i++) {
    if (t->bucket_of[i] < 0 || t->arrived[i]) continue;
    if (k++ > 0) tx_text_add(text, ", ");
    add_name(text, t, i);
  }
  if (shown < n_missing) tx_text_add(text, " and %" PRId64 " more", n_missing - shown);
}

tx_status tx_tracker_finish(tx_tracker *t, int64_t *missing, int64_t *n_missing, tx_error *error) {
  if (!t) return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_tracker_finish: tracker must not be NULL");
  if (t->finished) {
    return tx_fail(error, TX_ERROR_BAD_STATE, "this cycle is finished already; tx_tracker_reset first");
  }
  const int64_t n = t->n_waited - t->n_arrived;
  if (n_missing) *n_missing = n;
  if (missing) {
    int64_t k = 0;
    for (int64_t i = 0; i < t->n_params; i++) {
      if (t->bucket_of[i] >= 0 && !t->arrived[i]) missing[k++] = i;
    }
  }
  if (n > 0 && !t->allow_unused) {
    char names[768];
    tx_text text = tx_text_in(names, sizeof names);
    add_missing(&text, t, n);
    return tx_fail(error, TX_ERROR_BAD_STATE,
                   "%" PRId64 " of %" PRId64
                   " gradients never came: parameter %s; use the parameter in the loss, freeze "
                   "it, or allow unused parameters",
                   n, t->n_waited, names);
  }
  t->finished = 1;
  if (!t->has_learnt) {
    for (int64_t i = t->n_params - 1; i >= 0; i--) {
      if (!t->arrived[i]) t->learnt[t->n_learnt++] = i;
    }
    t->has_learnt = 1;
  }
  return TX_OK;
}

tx_status tx_tracker_order(const tx_tracker *t, int64_t *order, tx_error *error) {
  if (!t || (!order && t->n_params > 0)) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_tracker_order: an argument is NULL");
  }
  if (!t->has_learnt) {
    return tx_fail(error, TX_ERROR_BAD_STATE, "no order is known before tx_tracker_finish has ended a first cycle");
  }
  if (t->n_params > 0) memcpy(order, t->learnt, (size_t)t->n_params * sizeof *order);
  return TX_OK;
}
