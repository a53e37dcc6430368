/* The internals of the state machine of torch_ext_cycle.h. cycle.c has its memory, events and queries; cycle_actions.c
 * the actions; cycle_step.c what it knows about steps; cycle_report.c the reports and verdicts. */
#ifndef TX_CORE_CYCLE_H
#define TX_CORE_CYCLE_H

#include "csrc/core/text.h"
#include "csrc/core/tracker.h"
#include "csrc/torch_ext_cycle.h"

/* The state of a gradient at the end of a backward that reduces, as sent in reports. READY | FROZEN: it was ready, and
 * its parameter was frozen afterwards. REDUCED, HELD: it was not ready in this backward, but there is a `.grad`:
 * REDUCED if an earlier reduction left it, HELD if it is anything else. */
enum { TX_STATE_MISSING = 0, TX_STATE_READY = 1, TX_STATE_FROZEN = 2, TX_STATE_REDUCED = 4, TX_STATE_HELD = 8 };

/* When the reports are exchanged and read. */
typedef enum tx_cycle_reports {
  TX_REPORTS_BEFORE_LAST, /* before the last message is sent, so that a bad verdict prevents it */
  TX_REPORTS_FIRST,       /* read before waiting for the sums, because ranks may have sent different messages */
  TX_REPORTS_LAST         /* read after waiting for the sums: reports are exchanged at the same time as the last sums */
} tx_cycle_reports;

/* The properties in which kinds (tx_cycle_kind) differ. */
typedef struct tx_cycle_row {
  tx_cycle_reports reports;
  uint8_t every_backward;  /* every backward reduces, also under no_sync(), and adds to the previous sum */
  uint8_t given;           /* torch decides what is sent and when; there are no planned buckets */
  uint8_t bounded;         /* at most `slots` messages are in flight; for other kinds the communicator queues them */
  uint8_t in_grad;         /* the sum is in `.grad`, and the next backward adds to it */
  uint8_t sharded;         /* this rank gets only its own part of the sum */
  uint8_t tells_states;    /* reports contain the state of each gradient */
  uint8_t names_by_rank;   /* messages name the ranks on which a gradient is missing */
  uint8_t parts_are_final; /* a mismatch in which parameters ranks train or reduced is a permanent failure */
} tx_cycle_row;

/* The steps of CLOSING and RECOVERING, in order. */
typedef enum tx_cycle_step {
  TX_STEP_INSPECT,
  TX_STEP_ORDER,
  TX_STEP_SEND,
  TX_STEP_REPORT,
  TX_STEP_READ_FIRST,
  TX_STEP_WAIT,
  TX_STEP_READ,
  TX_STEP_INSTALL,
  TX_STEP_VERDICT
} tx_cycle_step;

#define TX_CYCLE_TEXT 8192

/* One block of the caller's memory: this struct, the arrays that it points to, the tracker. */
struct tx_cycle {
  const tx_cycle_row *row;
  tx_cycle_args args; /* its pointers are not valid later, except names and units */
  tx_cycle_action current;
  int32_t phase;
  int32_t step;
  int32_t steps_in_backward; /* buckets are stepped as soon as they are reduced, in this backward */
  int32_t may_reorder;
  int32_t partly_stepped;
  int32_t reported;  /* this backward's reports: 1: being exchanged; 2: all were read */
  int32_t held_back; /* see tx_cycle_read */
  int32_t is_last;   /* what was handed over last is the last of this backward */
  int32_t stepping;  /* a step is writing weights */
  int64_t number;
  int64_t n_steps;  /* counts steps, when they are checked and when they are done; ranks that reduce together must have
                       the same count */
  int64_t cursor;   /* next parameter of TX_STEP_INSPECT */
  int64_t complete; /* buckets that are complete, and checked if check_for_nan is set */
  int64_t checking; /* the bucket to check before it counts as complete, or -1 */
  int64_t sent;     /* buckets that were sent */
  int64_t given;    /* the unit or bucket that was handed over and not yet sent, or -1 */
  int64_t n_given;  /* units or buckets handed over in this backward */
  int64_t n_messages;     /* messages sent in this backward */
  int64_t n_answered;     /* messages of this backward that were waited for */
  int64_t unacknowledged; /* the message whose TX_DO_SEND was handed out when the backward died, or -1 */
  int64_t slots_taken;
  int64_t n_gathers;  /* all-gathers of weights that were begun since all were complete */
  int64_t n_gathered; /* of these, the complete ones */
  tx_tracker *tracker;
  int64_t *buffer_of; /* [n_buckets] */
  int64_t *units;     /* [n_buckets], for TX_CYCLE_UNITS: what was reduced (see cycle_report.c) */
  int64_t *order;     /* [n_params] */
  int32_t *slots;     /* ring of tx_cycle_ring entries: slots taken by each message in flight */
  uint8_t *ends;      /* [n_buckets] */
  uint8_t *state;     /* [n_params] TX_STATE_* of each gradient in this cycle */
  uint8_t *already;   /* [n_params] 1: the last cycle left a sum over ranks, which must count only once */
  uint8_t *broken;    /* [n_params] */
  uint8_t *nonfinite; /* [n_params] */
  uint8_t *anywhere;  /* [n_params] */
  uint8_t *left;      /* [n_params] */
  char failure[TX_CYCLE_TEXT];
  char refusal[TX_CYCLE_TEXT];
  char verdict[TX_CYCLE_TEXT];
};

/* A unit's word in a report: elements + TX_CYCLE_CALL * number of reductions. */
#define TX_CYCLE_CALL (INT64_C(1) << 48)

/* The first word of a report: cycle + TX_CYCLE_STEP * number of steps. */
#define TX_CYCLE_STEP (INT64_C(1) << 32)

static inline int tx_cycle_has_failed(const tx_cycle *c) {
  return c->failure[0] != '\0';
}

/* The length of the ring `slots`: the most messages that may be in flight. */
static inline int64_t tx_cycle_ring(const tx_cycle_args *args) {
  const int64_t most = args->n_buckets > args->slots ? args->n_buckets : args->slots;
  return most > 0 ? most : 1;
}

/* Fails permanently if a backward ends in an error after its first buckets were stepped, which cannot be undone. */
void tx_cycle_notice_partly_stepped(tx_cycle *c);

/* Fails permanently if a step has written some weights but will not write the rest (tx_cycle_stepping). */
void tx_cycle_notice_unfinished_step(tx_cycle *c);

/* Rejects an event: stores the text for tx_cycle_refusal and returns -1. */
int32_t tx_cycle_refuse(tx_cycle *c, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Appends the names of the parameters with chosen[i] != 0: "'a', 'b' and 7 more". */
void tx_cycle_add_names(tx_text *text, const tx_cycle *c, const uint8_t *chosen);

#endif
