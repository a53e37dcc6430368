/* The inside of a machine of torch_ext_cycle.h: cycle.c has its memory and what it is told, cycle_actions.c what it
 * asks for, cycle_step.c what it knows of steps, cycle_report.c what ranks tell each other. */
#ifndef TX_CORE_CYCLE_H
#define TX_CORE_CYCLE_H

#include "csrc/core/text.h"
#include "csrc/core/tracker.h"
#include "csrc/torch_ext_cycle.h"

/* The state of a gradient at the end of a backward that reduces, as it travels. READY | FROZEN: it was ready, and its
 * parameter was frozen afterwards. REDUCED, HELD: it was not ready in this backward, and there is a `.grad` all the
 * same: what an earlier reduction left, or anything else. */
enum { TX_STATE_MISSING = 0, TX_STATE_READY = 1, TX_STATE_FROZEN = 2, TX_STATE_REDUCED = 4, TX_STATE_HELD = 8 };

/* When the reports are exchanged and read. */
typedef enum tx_cycle_reports {
  TX_REPORTS_BEFORE_LAST, /* before the last message is sent, which a bad verdict prevents */
  TX_REPORTS_FIRST,       /* read before the sums are waited for: ranks may have sent different messages */
  TX_REPORTS_LAST         /* read after that: it travels beside the last sums */
} tx_cycle_reports;

/* What differs between the kinds. */
typedef struct tx_cycle_row {
  tx_cycle_reports reports;
  uint8_t every_backward;  /* reduces under no_sync(), too, and adds to what is there */
  uint8_t given;           /* torch says what is sent, and when: no bucket is planned */
  uint8_t bounded;         /* at most `slots` messages are under way; else the communicator queues them */
  uint8_t in_grad;         /* a sum lies in `.grad`, where the next backward adds to it */
  uint8_t sharded;         /* and only this rank's part of it does */
  uint8_t tells_states;    /* reports say which gradients there were */
  uint8_t names_by_rank;   /* a missing gradient is named with the ranks that miss it */
  uint8_t parts_are_final; /* ranks that train, or reduced, different parameters cannot go on */
} tx_cycle_row;

/* The steps of CLOSING, and RECOVERING, in order. */
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

/* One block of the caller's memory: this, then the arrays that it points into, then the tracker. */
struct tx_cycle {
  const tx_cycle_row *row;
  tx_cycle_args args; /* without what it points to, but for the names */
  tx_cycle_action current;
  int32_t phase;
  int32_t step;
  int32_t steps_in_backward; /* in this backward */
  int32_t may_reorder;
  int32_t partly_stepped;
  int32_t reported;  /* this backward's report: 1 it is exchanged, 2 every rank's was read */
  int32_t held_back; /* see tx_cycle_read */
  int32_t is_last;   /* what was given is the last of this backward */
  int32_t stepping;  /* a step writes weights */
  int64_t number;
  int64_t n_steps;        /* that were legal: ranks that reduce together have stepped equally often */
  int64_t cursor;         /* of TX_STEP_INSPECT */
  int64_t complete;       /* buckets that were checked, if they are */
  int64_t checking;       /* the bucket that is to be checked before, or -1 */
  int64_t sent;           /* buckets that were sent */
  int64_t given;          /* the unit or bucket that was handed over and not sent yet, or -1 */
  int64_t n_given;        /* in this backward */
  int64_t n_messages;     /* sent in this backward */
  int64_t n_answered;     /* waited for */
  int64_t unacknowledged; /* the message whose TX_DO_SEND was handed out when the backward died, or -1 */
  int64_t slots_taken;
  int64_t n_gathers;  /* of weights, that steps have begun since all of them had come */
  int64_t n_gathered; /* that have come */
  tx_tracker *tracker;
  int64_t *buffer_of; /* [n_buckets] */
  int64_t *units;     /* [n_buckets] of TX_CYCLE_UNITS: what was reduced, see cycle_report.c */
  int64_t *order;     /* [n_params] */
  int32_t *slots;     /* [n_buckets or slots] of each message under way, by its number */
  uint8_t *ends;      /* [n_buckets] */
  uint8_t *state;     /* [n_params] of gradients in this cycle */
  uint8_t *already;   /* [n_params] the last cycle left a sum over ranks, which must count once */
  uint8_t *broken;    /* [n_params] */
  uint8_t *nonfinite; /* [n_params] */
  uint8_t *anywhere;  /* [n_params] */
  uint8_t *left;      /* [n_params] */
  char failure[TX_CYCLE_TEXT];
  char refusal[TX_CYCLE_TEXT];
  char verdict[TX_CYCLE_TEXT];
};

/* Elements below, reductions above, in a unit's word. */
#define TX_CYCLE_CALL (INT64_C(1) << 48)

/* The cycle below, steps above, in the first word of a report. */
#define TX_CYCLE_STEP (INT64_C(1) << 32)

static inline int tx_cycle_has_failed(const tx_cycle *c) {
  return c->failure[0] != '\0';
}

/* Messages that may be under way: a ring of so many. */
static inline int64_t tx_cycle_ring(const tx_cycle_args *args) {
  const int64_t most = args->n_buckets > args->slots ? args->n_buckets : args->slots;
  return most > 0 ? most : 1;
}

/* A backward that ends in an error cannot be undone where its first buckets were stepped. */
void tx_cycle_notice_partly_stepped(tx_cycle *c);

/* A step that wrote some weights and never the others (tx_cycle_stepping) is a failure for good. */
void tx_cycle_notice_unfinished_step(tx_cycle *c);

/* A refused event: its text, and -1. */
int32_t tx_cycle_refuse(tx_cycle *c, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* "'a', 'b' and 7 more": of the parameters with chosen[i] != 0. */
void tx_cycle_add_names(tx_text *text, const tx_cycle *c, const uint8_t *chosen);

#endif
