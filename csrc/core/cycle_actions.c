/* The actions that a machine (Note [the cycle]) asks its driver to do, one at a time, and its reactions to the
 * acknowledgements. */
#include <string.h>

#include "csrc/core/cycle.h"

static int32_t hand_out(tx_cycle *c, int32_t kind, int64_t first) {
  c->current = (tx_cycle_action){.kind = kind, .first = first};
  return kind;
}

static int32_t wait_for_oldest(tx_cycle *c, int32_t flags) {
  c->current = (tx_cycle_action){.kind = TX_DO_WAIT, .message = c->n_answered, .flags = flags};
  return TX_DO_WAIT;
}

/* The number of slots that a message of buckets [first, end) takes: joined buckets need more memory than one bucket. */
static int64_t slots_of(const tx_cycle *c, int64_t first, int64_t end) {
  const int64_t all = c->args.slots, n = c->args.n_buckets;
  if (c->row->given || end - first == 1) return 1;
  const int whole = (first == 0 || c->buffer_of[first - 1] != c->buffer_of[first]) &&
                    (end == n || c->buffer_of[end] != c->buffer_of[first]);
  return whole ? all : all / 2 > 0 ? all / 2 : 1;
}

static int32_t send(tx_cycle *c, int64_t first, int64_t end) {
  const int64_t slots = slots_of(c, first, end);
  if (c->row->bounded && c->n_answered < c->n_messages && c->slots_taken + slots > c->args.slots) {
    return wait_for_oldest(c, 0);
  }
  c->slots[c->n_messages % tx_cycle_ring(&c->args)] = (int32_t)slots;
  c->slots_taken += slots;
  c->current = (tx_cycle_action){.kind = TX_DO_SEND,
                                 .first = first,
                                 .end = end,
                                 .message = c->n_messages++,
                                 .flags = c->steps_in_backward ? TX_SEND_STEP : 0};
  if (c->row->given) {
    c->given = -1;
  } else {
    c->sent = end;
  }
  return TX_DO_SEND;
}

/* The next action that sends: gradients that torch handed over, or buckets that are complete. */
static int32_t next_of_sending(tx_cycle *c) {
  if (c->checking >= 0) return hand_out(c, TX_DO_CHECK, c->checking);
  if (c->row->given) return c->given < 0 ? TX_DO_NOTHING : send(c, c->given, c->given + 1);
  for (;;) {
    if (c->complete > c->sent && c->ends[c->complete - 1]) return send(c, c->sent, c->complete);
    const int64_t bucket = tx_tracker_next(c->tracker);
    if (bucket < 0) return TX_DO_NOTHING;
    c->complete = bucket + 1;
    if (c->args.check_for_nan) return hand_out(c, TX_DO_CHECK, c->checking = bucket);
  }
}

static int32_t next_of_inspecting(tx_cycle *c) {
  for (; c->cursor < c->args.n_params; c->cursor++) {
    if (!tx_tracker_is_ready(c->tracker, c->cursor)) return hand_out(c, TX_DO_INSPECT, c->cursor);
  }
  tx_tracker_finish(c->tracker);
  memcpy(c->order, tx_tracker_order(c->tracker), (size_t)c->args.n_params * sizeof *c->order);
  return TX_DO_NOTHING;
}

/* Ends the cycle once its sums are complete or invalid: the next backward begins another cycle. */
static void end_cycle(tx_cycle *c) {
  const size_t n = (size_t)c->args.n_params;
  c->number++;
  if (n > 0) memset(c->state, 0, n);
  if (n > 0) memset(c->already, 1, n);
  if (c->args.n_buckets > 0) memset(c->units, 0, (size_t)c->args.n_buckets * sizeof *c->units);
}

static int32_t raise_verdict(tx_cycle *c) {
  c->phase = TX_PHASE_IDLE;
  if (!c->verdict[0]) return TX_DO_NOTHING;
  tx_cycle_notice_partly_stepped(c);
  c->current = (tx_cycle_action){.kind = TX_DO_RAISE, .text = c->verdict};
  return TX_DO_RAISE;
}

/* The next action of the current step of CLOSING; TX_DO_NOTHING if the step has no (more) actions. */
static int32_t next_in_step(tx_cycle *c) {
  const int before_last = c->row->reports == TX_REPORTS_BEFORE_LAST;
  switch (c->step) {
    case TX_STEP_INSPECT:
      return next_of_inspecting(c);
    case TX_STEP_ORDER:
      return c->may_reorder ? hand_out(c, TX_DO_ORDER, 0) : TX_DO_NOTHING;
    case TX_STEP_SEND:
      return c->verdict[0] ? TX_DO_NOTHING : next_of_sending(c);
    case TX_STEP_REPORT:
      return before_last ? TX_DO_NOTHING : hand_out(c, TX_DO_REPORT, 0);
    case TX_STEP_READ_FIRST:
      return c->row->reports == TX_REPORTS_FIRST ? hand_out(c, TX_DO_READ, 0) : TX_DO_NOTHING;
    case TX_STEP_WAIT:
      if (tx_cycle_has_failed(c) && c->verdict[0])
        return TX_DO_NOTHING; /* other ranks sent different messages, which never complete */
      return c->n_answered < c->n_messages ? wait_for_oldest(c, 0) : TX_DO_NOTHING;
    case TX_STEP_READ:
      return c->row->reports == TX_REPORTS_LAST ? hand_out(c, TX_DO_READ, 0) : TX_DO_NOTHING;
    default:
      if (c->step == TX_STEP_INSTALL && !(tx_cycle_has_failed(c) && c->verdict[0]))
        return hand_out(c, TX_DO_INSTALL, 0);
      return TX_DO_NOTHING;
  }
}

static int32_t next_of_closing(tx_cycle *c) {
  for (; c->step < TX_STEP_VERDICT; c->step++) {
    const int32_t kind = next_in_step(c);
    if (kind) return kind;
    if (c->step == TX_STEP_READ) end_cycle(c);
  }
  return raise_verdict(c);
}

/* DDP hook: the reports are exchanged when the last bucket is complete, before it is sent. */
static int32_t next_of_last(tx_cycle *c) {
  if (c->checking >= 0) return next_of_sending(c);
  if (c->args.check_for_nan && !c->reported) return hand_out(c, TX_DO_REPORT, 0);
  if (c->args.check_for_nan && c->reported == 1) return hand_out(c, TX_DO_READ, 0);
  c->phase = TX_PHASE_CLOSING;
  c->step = TX_STEP_SEND;
  return next_of_closing(c);
}

/* Before it recovers, a machine sends the buckets that were complete when the backward died: ranks that were told of
 * each gradient at once have sent them too. */
static int32_t next_of_recovering(tx_cycle *c) {
  if (!tx_cycle_has_failed(c)) {
    const int sends = !c->row->given && !c->may_reorder && c->unacknowledged < 0;
    const int32_t kind = sends ? next_of_sending(c) : TX_DO_NOTHING;
    if (kind) return kind;
    const int32_t unsure = c->n_answered == c->unacknowledged ? TX_WAIT_IF_SENT : 0;
    if (c->n_answered < c->n_messages) return wait_for_oldest(c, TX_WAIT_DISCARD | unsure);
    if (c->reported == 1) return hand_out(c, TX_DO_READ, 0);
  }
  const int64_t n = c->args.n_params;
  if (c->row->every_backward && n > 0) {
    memset(c->state, 0, (size_t)n);
    if (c->n_messages > 0 && !c->row->given) memset(c->broken, 1, (size_t)n);
  }
  if (c->args.n_buckets > 0) memset(c->units, 0, (size_t)c->args.n_buckets * sizeof *c->units);
  tx_cycle_notice_partly_stepped(c);
  for (int64_t i = 0; i < n && !c->row->given; i++)
    c->already[i] |= tx_tracker_bucket(c->tracker, i) < c->sent; /* buckets are sent in ascending order */
  c->number++;
  c->verdict[0] = '\0';
  c->phase = TX_PHASE_IDLE;
  return hand_out(c, TX_DO_RECOVERED, 0);
}

/* Between backwards: waits for the all-gathers that a step did not wait for, in the order in which they began. */
static void next_of_stepping(tx_cycle *c) {
  if (c->n_gathered == c->n_gathers || tx_cycle_has_failed(c)) return;
  c->current = (tx_cycle_action){.kind = TX_DO_WEIGHTS, .message = c->n_gathered};
}

/* Whether nothing more can be sent or waited for, after a failure of the exchange, until this backward has died. */
static int is_stuck(const tx_cycle *c) {
  const int sends = c->phase == TX_PHASE_REDUCING || (c->phase == TX_PHASE_CLOSING && c->step < TX_STEP_INSTALL);
  return sends && tx_cycle_has_failed(c) && !c->verdict[0];
}

int32_t tx_cycle_next(tx_cycle *c, tx_cycle_action *action) {
  if (c->current.kind == TX_DO_RAISE) c->current.kind = TX_DO_NOTHING;
  if (is_stuck(c)) c->current.kind = TX_DO_NOTHING;
  if (c->current.kind == TX_DO_NOTHING && !is_stuck(c)) {
    switch (c->phase) {
      case TX_PHASE_REDUCING:
        if (c->is_last) {
          next_of_last(c);
        } else if (!c->may_reorder) {
          next_of_sending(c);
        }
        break;
      case TX_PHASE_CLOSING:
        next_of_closing(c);
        break;
      case TX_PHASE_RECOVERING:
        next_of_recovering(c);
        break;
      case TX_PHASE_IDLE:
        next_of_stepping(c);
        break;
      default:
        break;
    }
  }
  *action = c->current;
  return c->current.kind;
}

void tx_cycle_done(tx_cycle *c, int32_t answered) {
  switch (c->current.kind) {
    case TX_DO_CHECK:
      c->checking = -1;
      break;
    case TX_DO_SEND:
      if (answered && c->n_answered == c->n_messages - 1) {
        c->slots_taken -= c->slots[c->n_answered++ % tx_cycle_ring(&c->args)];
      }
      break;
    case TX_DO_INSPECT:
      c->cursor++;
      break;
    case TX_DO_ORDER:
      c->may_reorder = 0;
      break;
    case TX_DO_REPORT:
      c->reported = 1;
      if (c->phase == TX_PHASE_CLOSING) c->step++;
      break;
    case TX_DO_WAIT:
      c->slots_taken -= c->slots[c->n_answered++ % tx_cycle_ring(&c->args)];
      break;
    case TX_DO_READ:
      c->reported = 2;
      if (c->phase == TX_PHASE_CLOSING) {
        if (c->step == TX_STEP_READ) end_cycle(c);
        c->step++;
      }
      break;
    case TX_DO_INSTALL:
      c->step++;
      break;
    case TX_DO_WEIGHTS:
      c->n_gathered++;
      break;
    default:
      break;
  }
  c->current.kind = TX_DO_NOTHING;
}

void tx_cycle_set_messages(tx_cycle *c, const uint8_t *ends) {
  for (int64_t b = 0; b < c->args.n_buckets; b++) {
    const int last = b + 1 == c->args.n_buckets || c->row->given || c->buffer_of[b] != c->buffer_of[b + 1];
    c->ends[b] = ends[b] || last;
  }
}
