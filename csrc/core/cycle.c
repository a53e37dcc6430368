/* The state machine of torch_ext_cycle.h (Note [the cycle]): its memory, events and queries. */
#include "csrc/core/cycle.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "csrc/core/status.h"

static const tx_cycle_row kRows[] = {
    [TX_CYCLE_NO_SHARD] = {.reports = TX_REPORTS_LAST, .in_grad = 1, .tells_states = 1, .names_by_rank = 1},
    [TX_CYCLE_OPTIM] = {.reports = TX_REPORTS_LAST, .in_grad = 1, .sharded = 1, .tells_states = 1, .names_by_rank = 1},
    [TX_CYCLE_OPTIM_GRADS] = {.reports = TX_REPORTS_LAST,
                              .every_backward = 1,
                              .bounded = 1,
                              .sharded = 1,
                              .tells_states = 1,
                              .names_by_rank = 1},
    [TX_CYCLE_UNITS] = {.reports = TX_REPORTS_FIRST,
                        .every_backward = 1,
                        .given = 1,
                        .bounded = 1,
                        .sharded = 1,
                        .tells_states = 1,
                        .parts_are_final = 1},
    [TX_CYCLE_DDP_HOOK] = {.reports = TX_REPORTS_BEFORE_LAST, .every_backward = 1, .given = 1},
};
enum { N_KINDS = sizeof kRows / sizeof kRows[0] };

int32_t tx_cycle_refuse(tx_cycle *c, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  tx_text_message(c->refusal, sizeof c->refusal, format, arguments);
  va_end(arguments);
  return -1;
}

/* -- memory ------------------------------------------------------------------------------------------------------- */

int64_t tx_cycle_bytes(const tx_cycle_args *args) {
  const int64_t limit = INT64_MAX / 256;
  if (!args || args->n_params > limit || args->n_buckets > limit || args->slots > limit) return -1;
  const int64_t tracker = tx_tracker_bytes(args->n_params, args->n_buckets);
  if (tracker < 0) return -1;
  const int64_t words = args->n_params + 2 * args->n_buckets;
  const int64_t bytes = 6 * args->n_params + args->n_buckets + 4 * tx_cycle_ring(args);
  return (int64_t)sizeof(tx_cycle) + 8 * words + tracker + (bytes + 7) / 8 * 8;
}

static tx_status check_args(const void *memory, int64_t bytes, const tx_cycle_args *args, tx_error *error) {
  if (!memory || !args || args->size != sizeof *args || (uintptr_t)memory % sizeof(int64_t) != 0) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "tx_cycle_init: memory aligned to %d and a tx_cycle_args of %d bytes are legal",
                   (int)sizeof(int64_t), (int)sizeof *args);
  }
  const int64_t needed = tx_cycle_bytes(args);
  if (needed < 0 || bytes < needed) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "tx_cycle_init: %" PRId64 " bytes for %" PRId64 " parameters in %" PRId64
                   " buckets; needed: %" PRId64,
                   bytes, args->n_params, args->n_buckets, needed);
  }
  if (args->kind < 0 || args->kind >= N_KINDS || args->world < 1 || args->rank < 0 || args->rank >= args->world ||
      args->slots < 1 || args->cycle < 0) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "tx_cycle_init: kind %d, rank %d of %d, %" PRId64 " slots, cycle %" PRId64
                   "; legal: a tx_cycle_kind, 0 <= rank < world, at least one slot, cycle >= 0",
                   (int)args->kind, (int)args->rank, (int)args->world, args->slots, args->cycle);
  }
  const int given = kRows[args->kind].given;
  if ((args->n_params > 0 && (!args->names || (!given && !args->bucket_of))) ||
      (args->n_buckets > 0 && ((!given && !args->buffer_of) || (args->kind == TX_CYCLE_UNITS && !args->units)))) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "tx_cycle_init: names, or what kind %d needs of bucket_of, buffer_of and units, are NULL",
                   (int)args->kind);
  }
  for (int64_t b = 1; b < args->n_buckets && !given; b++) {
    if (args->buffer_of[b] < args->buffer_of[b - 1]) {
      return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_cycle_init: buffer_of[%" PRId64 "] descends", b);
    }
  }
  return TX_OK;
}

/* Makes every bucket a message of its own. */
static void send_each(tx_cycle *c) {
  if (c->args.n_buckets > 0) memset(c->ends, 1, (size_t)c->args.n_buckets);
}

tx_status tx_cycle_init(void *memory, int64_t bytes, const tx_cycle_args *args, tx_cycle **cycle, tx_error *error) {
  if (!cycle) return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_cycle_init: cycle is NULL");
  TX_FORWARD(check_args(memory, bytes, args, error));
  const int64_t n = args->n_params, buckets = args->n_buckets;
  tx_cycle *c = memory;
  memset(c, 0, (size_t)tx_cycle_bytes(args));
  int64_t *words = (int64_t *)(c + 1);
  c->row = &kRows[args->kind];
  c->args = *args;
  c->order = words;
  c->units = words + n;
  c->buffer_of = words + n + buckets;
  void *tracker = words + n + 2 * buckets;
  c->slots = (int32_t *)((char *)tracker + tx_tracker_bytes(n, buckets));
  c->ends = (uint8_t *)(c->slots + tx_cycle_ring(args));
  c->state = c->ends + buckets;
  c->already = c->state + n;
  c->broken = c->already + n;
  c->nonfinite = c->broken + n;
  c->anywhere = c->nonfinite + n;
  c->left = c->anywhere + n;
  c->number = args->cycle;
  c->may_reorder = args->reorder && !c->row->given;
  c->given = c->checking = c->unacknowledged = -1;
  send_each(c);
  if (!c->row->given) {
    if (buckets > 0) memcpy(c->buffer_of, args->buffer_of, (size_t)buckets * sizeof *c->buffer_of);
    TX_FORWARD(tx_tracker_init(tracker, tx_tracker_bytes(n, buckets), n, args->bucket_of, buckets, &c->tracker, error));
  }
  *cycle = c;
  return TX_OK;
}

tx_status tx_cycle_rebuild(void *memory, int64_t bytes, const tx_cycle_args *args, const tx_cycle *from,
                           tx_cycle **cycle, tx_error *error) {
  if (!from || !args || from->phase != TX_PHASE_CLOSING || from->step != TX_STEP_ORDER ||
      args->n_params != from->args.n_params || args->kind != from->args.kind) {
    return tx_fail(error, TX_ERROR_BAD_STATE,
                   "tx_cycle_rebuild: legal while TX_DO_ORDER is to be done, for as many parameters of the same kind");
  }
  TX_FORWARD(tx_cycle_init(memory, bytes, args, cycle, error));
  tx_cycle *c = *cycle;
  const size_t n = (size_t)args->n_params;
  c->number = from->number;
  c->n_steps = from->n_steps;
  c->phase = TX_PHASE_CLOSING;
  c->step = TX_STEP_SEND;
  c->may_reorder = 0;
  c->steps_in_backward = from->steps_in_backward;
  if (n > 0) {
    memcpy(c->state, from->state, n);
    memcpy(c->already, from->already, n);
    memcpy(c->broken, from->broken, n);
    memcpy(c->nonfinite, from->nonfinite, n);
    memcpy(c->order, from->order, n * sizeof *c->order);
  }
  tx_tracker_expect(c->tracker, c->order);
  tx_tracker_finish(c->tracker);
  return TX_OK;
}

/* -- events ------------------------------------------------------------------------------------------------------- */

static int is_param(const tx_cycle *c, int64_t i) {
  return i >= 0 && i < c->args.n_params;
}

tx_cycle_answer tx_cycle_begin(tx_cycle *c, int32_t sync, int32_t steps) {
  tx_cycle_notice_unfinished_step(c);
  if (tx_cycle_has_failed(c)) return tx_cycle_refuse(c, "gradients cannot be reduced any more: %s", c->failure);
  if (c->n_gathered < c->n_gathers)
    return tx_cycle_refuse(c, "a backward begins before the all-gather of the last step's weights has ended");
  if (c->phase != TX_PHASE_IDLE) return tx_cycle_refuse(c, "a backward begins in another that has not ended");
  c->phase = sync || c->row->every_backward ? TX_PHASE_REDUCING : TX_PHASE_ACCUMULATING;
  c->steps_in_backward = steps && c->phase == TX_PHASE_REDUCING && !c->may_reorder;
  c->current.kind = TX_DO_NOTHING;
  c->complete = c->sent = c->n_given = c->n_messages = c->n_answered = c->slots_taken = 0;
  c->given = c->checking = c->unacknowledged = -1;
  c->reported = c->held_back = c->is_last = 0;
  c->verdict[0] = '\0';
  if (c->tracker) tx_tracker_reset(c->tracker);
  return 0;
}

/* What must be done with `.grad` before it counts in the next sum. reduced: whether an earlier reduction left it. */
static int32_t prepare(const tx_cycle *c, int reduced, int32_t grad) {
  if (!c->row->in_grad) return 0;
  if (!c->row->sharded) return reduced && c->args.scales_sums ? TX_PREPARE_MULTIPLY : 0;
  if (grad != TX_GRAD_IN_PLACE) return TX_PREPARE_FORGET; /* an assigned tensor is the whole gradient */
  return reduced ? TX_PREPARE_SET_ASIDE : 0;
}

/* Whether an earlier reduction left `.grad`. From now on it counts as this rank's own gradient. */
static int take_reduced(tx_cycle *c, int64_t i, int32_t grad) {
  const int reduced = c->already[i] && c->row->in_grad && grad == TX_GRAD_IN_PLACE;
  c->already[i] = 0;
  return reduced;
}

int32_t tx_cycle_accumulate(tx_cycle *c, int64_t i, int32_t grad) {
  if (!is_param(c, i)) return 0;
  return prepare(c, grad != TX_GRAD_NONE && take_reduced(c, i, grad), grad);
}

tx_cycle_answer tx_cycle_ready(tx_cycle *c, int64_t i) {
  if (!is_param(c, i)) {
    return tx_cycle_refuse(c, "parameter %" PRId64 " is ready; legal: 0 ... %" PRId64, i, c->args.n_params - 1);
  }
  int completes = 0;
  if (c->phase == TX_PHASE_REDUCING) {
    if (!c->row->given && (completes = tx_tracker_mark(c->tracker, i)) < 0) {
      return tx_cycle_refuse(c, "the gradient of parameter '%s' was ready twice in one backward", c->args.names[i]);
    }
  } else if (c->phase != TX_PHASE_ACCUMULATING) {
    return tx_cycle_refuse(c, "the gradient of parameter '%s' is ready after the end of backward", c->args.names[i]);
  }
  c->state[i] = TX_STATE_READY;
  c->already[i] = 0;
  return completes && !c->may_reorder;
}

tx_cycle_answer tx_cycle_ready_several(tx_cycle *c, const int64_t *params, int64_t n) {
  tx_cycle_answer something = 0;
  for (int64_t k = 0; k < n; k++) {
    const tx_cycle_answer answer = tx_cycle_ready(c, params[k]);
    if (answer < 0) return answer;
    something |= answer;
  }
  return something;
}

tx_cycle_answer tx_cycle_given(tx_cycle *c, int64_t bucket, int64_t numel, int32_t message, int32_t last) {
  if (!c->row->given) return tx_cycle_refuse(c, "gradients are handed over, but buckets are planned");
  if (bucket < 0 || bucket >= c->args.n_buckets) {
    return tx_cycle_refuse(c, "bucket %" PRId64 " is handed over; legal: 0 ... %" PRId64, bucket,
                           c->args.n_buckets - 1);
  }
  if (c->phase != TX_PHASE_REDUCING || c->given >= 0 || c->is_last) {
    return tx_cycle_refuse(c, "gradients are handed over %s",
                           c->given >= 0 ? "before the last ones were sent" : "when no backward runs");
  }
  if (numel < 0 || numel >= TX_CYCLE_CALL) {
    return tx_cycle_refuse(c, "%" PRId64 " elements are handed over; legal: 0 ... %" PRId64, numel, TX_CYCLE_CALL - 1);
  }
  c->n_given++;
  /* Both numbers may wrap: they are only compared for equality. */
  c->units[bucket] = (int64_t)((uint64_t)c->units[bucket] + (uint64_t)(TX_CYCLE_CALL + numel));
  c->is_last = last;
  if (message) {
    c->given = bucket;
    if (c->args.check_for_nan && !c->row->tells_states) c->checking = bucket;
  }
  return 1;
}

tx_cycle_answer tx_cycle_end(tx_cycle *c) {
  if (c->phase == TX_PHASE_ACCUMULATING || (c->row->given && c->phase == TX_PHASE_REDUCING && c->n_given == 0)) {
    c->phase = TX_PHASE_IDLE; /* the second case: a backward that computes gradients of inputs only */
    return 0;
  }
  if (c->phase != TX_PHASE_REDUCING) return tx_cycle_refuse(c, "a backward ends that has not begun");
  c->phase = TX_PHASE_CLOSING;
  c->step = c->row->given ? TX_STEP_SEND : TX_STEP_INSPECT;
  c->cursor = 0;
  return 1;
}

int32_t tx_cycle_missing(tx_cycle *c, int64_t i, int32_t grad, int32_t requires_grad) {
  if (!is_param(c, i)) return 0;
  const int held = grad != TX_GRAD_NONE, reduced = take_reduced(c, i, grad);
  if (!held && !c->row->every_backward)
    c->state[i] = TX_STATE_MISSING; /* an earlier gradient of this cycle was dropped */
  if (!c->state[i] && !requires_grad) c->state[i] = TX_STATE_FROZEN;
  if (held) c->state[i] |= reduced ? TX_STATE_REDUCED : TX_STATE_HELD;
  if (!c->row->in_grad) return held ? TX_PREPARE_TAKE : 0;
  if (!held) return TX_PREPARE_ZERO | (c->row->sharded ? TX_PREPARE_FORGET : 0);
  return (reduced && !c->row->sharded ? TX_PREPARE_COPY : 0) | prepare(c, reduced, grad) | TX_PREPARE_TAKE;
}

void tx_cycle_fail(tx_cycle *c, const char *text) {
  if (tx_cycle_has_failed(c)) return;
  (void)snprintf(c->failure, sizeof c->failure, "%s", text && text[0] ? text : "an error");
  tx_text_repair(c->failure);
}

void tx_cycle_died(tx_cycle *c, const uint8_t *modified) {
  /* Only the driver knows whether the message was sent. */
  if (c->current.kind == TX_DO_SEND) c->unacknowledged = c->current.message;
  c->current.kind = TX_DO_NOTHING;
  if (c->phase == TX_PHASE_RECOVERING) return;
  if (c->phase == TX_PHASE_CLOSING && c->step >= TX_STEP_INSTALL) {
    /* All sums are complete, and will be installed. If the other ranks raised a verdict, this rank learns of it before
     * it steps. */
    if (c->verdict[0]) tx_cycle_notice_partly_stepped(c);
    c->verdict[0] = '\0';
    return;
  }
  for (int64_t i = 0; modified && i < c->args.n_params; i++) {
    if (modified[i]) c->state[i] = TX_STATE_READY;
  }
  c->phase = c->phase >= TX_PHASE_REDUCING ? TX_PHASE_RECOVERING : TX_PHASE_IDLE;
}

void tx_cycle_broken(tx_cycle *c, const uint8_t *params) {
  for (int64_t i = 0; i < c->args.n_params; i++)
    c->broken[i] |= params[i];
}

void tx_cycle_zero(tx_cycle *c, const int64_t *params, int64_t n) {
  for (int64_t k = 0; k < n; k++) {
    if (is_param(c, params[k])) c->state[params[k]] = c->broken[params[k]] = c->nonfinite[params[k]] = 0;
  }
}

/* -- queries ------------------------------------------------------------------------------------------------------ */

int32_t tx_cycle_phase_of(const tx_cycle *c) {
  return c->phase;
}

int64_t tx_cycle_number(const tx_cycle *c) {
  return c->number;
}

const char *tx_cycle_failure(const tx_cycle *c) {
  return tx_cycle_has_failed(c) ? c->failure : NULL;
}

int32_t tx_cycle_partly_stepped(const tx_cycle *c) {
  return c->partly_stepped;
}

const char *tx_cycle_refusal(const tx_cycle *c) {
  return c->refusal;
}

const int64_t *tx_cycle_completed_by(const tx_cycle *c) {
  return c->tracker ? tx_tracker_completed_by(c->tracker) : NULL;
}

const uint8_t *tx_cycle_anywhere(const tx_cycle *c) {
  return c->anywhere;
}

const uint8_t *tx_cycle_left(const tx_cycle *c) {
  return c->left;
}

uint8_t *tx_cycle_nonfinite(tx_cycle *c) {
  return c->nonfinite;
}

const int64_t *tx_cycle_order(const tx_cycle *c) {
  return c->order;
}
