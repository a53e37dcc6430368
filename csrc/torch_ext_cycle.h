/* The gradient protocol: a state machine for a model's gradients during and between backwards. It is for authors of
 * training engines; torch_ext's own parallelize, register_comm_hook and FSDP2 reducer run on it.
 *
 * Each rank has one machine. It has no I/O, threads, clock or torch, and allocates nothing. The driver tells it what
 * happened (events); it answers what to do next (actions); the driver reports when an action is done. So the same code
 * runs under Python with real communicators, and a thousand times in one process under a simulator
 * (tests/core/cycle_simulation_test.cc), which injects more faults than processes see in a year.
 *
 * Note [the cycle]
 *
 * A cycle ends with one reduction: any number of backwards that only accumulate (no_sync), then one that reduces.
 *
 *   IDLE -- begin(sync 0) --> ACCUMULATING -- end --> IDLE
 *   IDLE -- begin(sync 1) --> REDUCING -- end --> CLOSING -- nothing left to do --> IDLE
 *   REDUCING, CLOSING -- died --> RECOVERING -- nothing left to do --> IDLE
 *   ACCUMULATING -- died --> IDLE
 *
 * In REDUCING a bucket is sent as soon as its last gradient is ready; buckets are sent in ascending order. CLOSING
 * inspects the parameters that got no gradient, sends the remaining buckets, exchanges reports, waits for the sums, and
 * installs them. A report says what one rank knows and all ranks need: which cycle it is in, which gradients it had,
 * and whether one was not finite. From the same reports every rank reaches the same verdict, in the same words.
 * RECOVERING follows a backward that raised: it sends the buckets that were complete then, because the other ranks sent
 * them too, and waits for everything that was sent. (A backward that dies in CLOSING once all sums are complete stays
 * in CLOSING and installs them.)
 *
 * Between backwards a step writes weights, bucket by bucket, and starts their all-gathers (tx_cycle_stepping). They are
 * waited for at the end of the step or, if the step is interrupted there, before the next forward.
 *
 * An event in the wrong state is rejected with a message that names it. After a failure of the exchange (tx_cycle_fail)
 * every backward and step is rejected with the text of that failure.
 *
 * A machine is used by one thread at a time. Events are answered at once. Ask for actions with tx_cycle_next until
 * there is none, and acknowledge each with tx_cycle_done. An action that was not acknowledged (an exception, Ctrl-C) is
 * handed out again; after tx_cycle_died it is void. */
#ifndef TORCH_EXT_CYCLE_H
#define TORCH_EXT_CYCLE_H

#include "torch_ext_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What is reduced, and who decides the order. The first three have the numbers of data_parallel_sharding_strategy. */
typedef enum tx_cycle_kind {
  TX_CYCLE_NO_SHARD = 0,    /* buckets; every rank gets the mean */
  TX_CYCLE_OPTIM = 1,       /* buckets; each rank gets its own part of the sum */
  TX_CYCLE_OPTIM_GRADS = 2, /* as TX_CYCLE_OPTIM, but every backward reduces and adds to the shard */
  TX_CYCLE_UNITS = 3,       /* FSDP2 hands over units, in its order */
  TX_CYCLE_DDP_HOOK = 4     /* DistributedDataParallel hands over buckets, in its order */
} tx_cycle_kind;

typedef struct tx_cycle_args {
  uint64_t size;
  int64_t n_params;
  int64_t n_buckets;        /* or units; TX_CYCLE_DDP_HOOK: at most n_params */
  const int64_t *bucket_of; /* [n_params], copied. TX_CYCLE_UNITS and TX_CYCLE_DDP_HOOK: NULL */
  const int64_t *buffer_of; /* [n_buckets], ascending, copied: buckets of one buffer may be sent as one message. NULL
                               for the same kinds */
  const char *const *names; /* [n_params], for error messages; must outlive the machine */
  const char *const *units; /* [n_buckets], for error messages of TX_CYCLE_UNITS; must outlive the machine. Else NULL */
  int64_t cycle;            /* number of the first cycle: 0, or that of the machine which this one replaces */
  int64_t slots; /* messages in flight at a time, >= 1, of TX_CYCLE_OPTIM_GRADS and TX_CYCLE_UNITS; other kinds have no
                    limit */
  int32_t kind;  /* tx_cycle_kind */
  int32_t rank;
  int32_t world;
  int32_t check_for_nan; /* 1: TX_DO_CHECK for every bucket, and a verdict if a gradient was not finite */
  int32_t find_unused;   /* 1: a parameter without a gradient counts as zero; 0: it is an error on every rank */
  int32_t reorder;       /* 1: the first cycle that reduces sends all buckets at its end, after TX_DO_ORDER */
  int32_t scales_sums;   /* no_shard: 1: sums are not divided by the number of ranks but by something else */
  int32_t reserved;
} tx_cycle_args;
#define TX_CYCLE_ARGS_INIT \
  { .size = sizeof(tx_cycle_args), .slots = 1, .world = 1 }

/* The machine, in memory that the caller provides (aligned as for int64_t). */
typedef struct tx_cycle tx_cycle;

/* Bytes that a machine needs; -1 for negative counts and for more bytes than int64_t holds. */
TX_API int64_t tx_cycle_bytes(const tx_cycle_args *args);

/* Initialises a machine, in IDLE. TX_ERROR_INVALID_ARGUMENT for illegal arguments. */
TX_API tx_status tx_cycle_init(void *memory, int64_t bytes, const tx_cycle_args *args, tx_cycle **cycle,
                               tx_error *error);

/* Replaces the machine `from` by one with other buckets for the same parameters. `from` must be waiting for TX_DO_ORDER
 * to be done, and is not used afterwards. As tx_cycle_init, but the new machine continues where `from` was. */
TX_API tx_status tx_cycle_rebuild(void *memory, int64_t bytes, const tx_cycle_args *args, const tx_cycle *from,
                                  tx_cycle **cycle, tx_error *error);

/* -- events: what happened ---------------------------------------------------------------------------------------- */

/* The result of an event: 1 if tx_cycle_next has an action, 0 if not, and -1 if the event was rejected, with nothing
 * changed; tx_cycle_refusal says why. */
typedef int32_t tx_cycle_answer;

/* The content of a parameter's `.grad`. */
typedef enum tx_cycle_grad {
  TX_GRAD_NONE = 0,
  TX_GRAD_IN_PLACE = 1, /* the tensor into which a reduction writes its sum */
  TX_GRAD_OTHER = 2     /* any other tensor: assigned by the user, or of a micro-batch */
} tx_cycle_grad;

/* What the driver must do with a gradient before it counts in the next sum: bits, to be done in their order. */
typedef enum tx_cycle_prepare {
  TX_PREPARE_COPY = 1,      /* keep a copy: TX_DO_INSTALL restores it if tx_cycle_left says so */
  TX_PREPARE_MULTIPLY = 2,  /* multiply an earlier mean by gradient_divide_factor on rank 0, by 0 on others */
  TX_PREPARE_ZERO = 4,      /* zero the bucket's range: there is no gradient */
  TX_PREPARE_SET_ASIDE = 8, /* set aside this rank's part of an earlier sum, to add the next one to; zero the rest */
  TX_PREPARE_FORGET = 16,   /* discard what was set aside */
  TX_PREPARE_TAKE = 32      /* `.grad` is this rank's whole gradient: take it as a hook does when a gradient is ready */
} tx_cycle_prepare;

/* Event: the first gradient of a backward is about to be ready. sync: 0 under no_sync(); ignored by kinds that reduce
 * in every backward. steps: 1: buckets are stepped as soon as they are reduced. Rejected if nothing can be reduced any
 * more, or if another backward has not ended (call tx_cycle_died first). */
TX_API tx_cycle_answer tx_cycle_begin(tx_cycle *cycle, int32_t sync, int32_t steps);

/* Event: autograd is about to accumulate into the `.grad` of a parameter. grad: tx_cycle_grad. Returns
 * tx_cycle_prepare. */
TX_API int32_t tx_cycle_accumulate(tx_cycle *cycle, int64_t param, int32_t grad);

/* Event: the gradient of a parameter is ready. Rejected if it was already ready in this backward, or if no backward has
 * begun. This is the call per gradient, and cheap. */
TX_API tx_cycle_answer tx_cycle_ready(tx_cycle *cycle, int64_t param);

/* tx_cycle_ready for several parameters, in the order in which they were ready; for drivers to which a call per
 * gradient is expensive. The driver may report any of them late, at the cost of overlap, except for two: the parameters
 * of tx_cycle_completed_by must be reported in time; and all that were ready before tx_cycle_died must be reported
 * before it, so that ranks that raise at the same place have sent the same buckets. If one is rejected, those before it
 * are ready. */
TX_API tx_cycle_answer tx_cycle_ready_several(tx_cycle *cycle, const int64_t *params, int64_t n);

/* Event: torch hands over the gradients of a unit or bucket, `numel` elements (TX_CYCLE_UNITS, TX_CYCLE_DDP_HOOK).
 * message: 0 if one rank has all of it, so that nothing is sent. last: 1 if it is the last of this backward, as
 * DistributedDataParallel knows. Rejected outside of a backward, if the previous gradients have not been sent, and for
 * numel < 0 or >= 2^48. */
TX_API tx_cycle_answer tx_cycle_given(tx_cycle *cycle, int64_t bucket, int64_t numel, int32_t message, int32_t last);

/* Event: the backward has ended; the outermost one if several are nested. Rejected in IDLE. */
TX_API tx_cycle_answer tx_cycle_end(tx_cycle *cycle);

/* The answer to TX_DO_INSPECT: the content of `.grad` (tx_cycle_grad), and requires_grad. Returns tx_cycle_prepare. */
TX_API int32_t tx_cycle_missing(tx_cycle *cycle, int64_t param, int32_t grad, int32_t requires_grad);

/* Event: the backward raised or was interrupted, perhaps before its first gradient was ready. modified: NULL, or
 * [n_params], 1 for gradients that may have been modified since the last cycle. */
TX_API void tx_cycle_died(tx_cycle *cycle, const uint8_t *modified);

/* Event: a backward that died had already added sums of these parameters to their shards. No step is legal until
 * tx_cycle_zero. params: [n_params], 1 for these parameters. */
TX_API void tx_cycle_broken(tx_cycle *cycle, const uint8_t *params);

/* Event: zero_grad() of these n parameters. */
TX_API void tx_cycle_zero(tx_cycle *cycle, const int64_t *params, int64_t n);

/* Event: the exchange has failed permanently. The text of the first failure is kept. */
TX_API void tx_cycle_fail(tx_cycle *cycle, const char *text);

/* Checks that gradients may be read by a step, or before it (to be clipped or unscaled). grads: [n_params], 1 for
 * gradients that are this rank's own if they were ready since the last reduction; NULL: none are. call: the user's
 * call, with which the refusal begins: "clip_grad_norm_()" for instance; NULL: "step()". Returns 0, or -1 if: the
 * exchange failed; a backward has not ended; a backward raised after sums had been added; gradients are not finite
 * (tx_cycle_nonfinite); no rank has reduced the gradients; or the all-gathers of the last step's weights are not
 * complete. */
TX_API tx_cycle_answer tx_cycle_check_step(tx_cycle *cycle, const uint8_t *grads, const char *call);

/* Event: a step is about to write the first weight or state. If it raises or is interrupted before tx_cycle_stepped,
 * this rank alone has a mixture of weights from two steps. If there are other ranks, the next tx_cycle_begin or
 * tx_cycle_check_step then fails permanently and says so (tx_cycle_partly_stepped). */
TX_API void tx_cycle_stepping(tx_cycle *cycle);

/* Event: the all-gather of a bucket's weights has begun. TX_DO_WEIGHTS follows for each all-gather, in this order.
 * Returns its `message`. */
TX_API int64_t tx_cycle_gathering(tx_cycle *cycle);

/* Event: the step has written everything and begun all all-gathers, or was rejected before it wrote anything. */
TX_API void tx_cycle_stepped(tx_cycle *cycle);

/* -- actions: what to do ------------------------------------------------------------------------------------------ */

typedef enum tx_cycle_do {
  TX_DO_NOTHING = 0,
  TX_DO_CHECK = 1,      /* bucket `first` is complete: check it for gradients that are not finite */
  TX_DO_SEND = 2,       /* send buckets [first, end) as message `message`; flags: TX_SEND_STEP */
  TX_DO_INSPECT = 3,    /* parameter `first` got no gradient: call tx_cycle_missing, and do what it returns */
  TX_DO_ORDER = 4,      /* exchange tx_cycle_order; for a better plan call tx_cycle_rebuild instead of tx_cycle_done */
  TX_DO_REPORT = 5,     /* start to exchange what tx_cycle_report writes; do not wait */
  TX_DO_WAIT = 6,       /* wait for message `message`; flags: TX_WAIT_DISCARD, TX_WAIT_IF_SENT */
  TX_DO_READ = 7,       /* wait for the reports, and pass them to tx_cycle_read */
  TX_DO_INSTALL = 8,    /* install the sums of the parameters that tx_cycle_anywhere and tx_cycle_left name */
  TX_DO_RAISE = 9,      /* raise `text`, the verdict, which is the same on every rank. Needs no tx_cycle_done */
  TX_DO_RECOVERED = 10, /* nothing of the backward that died is in flight any more */
  TX_DO_WEIGHTS = 11    /* wait for all-gather `message` of weights, counted since all were complete */
} tx_cycle_do;

#define TX_SEND_STEP 1    /* step each bucket as soon as this rank's part of it is reduced */
#define TX_WAIT_DISCARD 1 /* its sums are invalid: do not add them */
#define TX_WAIT_IF_SENT 2 /* its TX_DO_SEND was not acknowledged: wait only if it was sent nevertheless */

typedef struct tx_cycle_action {
  int64_t first;
  int64_t end;
  int64_t message; /* counted from 0 in each backward */
  const char *text;
  int32_t kind; /* tx_cycle_do */
  int32_t flags;
} tx_cycle_action;

/* Writes the action to do now; the same one until tx_cycle_done. Returns action->kind. */
TX_API int32_t tx_cycle_next(tx_cycle *cycle, tx_cycle_action *action);

/* Acknowledges the last action. answered: for TX_DO_SEND: 1 if the message was already waited for. */
TX_API void tx_cycle_done(tx_cycle *cycle, int32_t answered);

/* Sets which buckets are sent as one message, from the next backward on. ends: [n_buckets], copied: ends[b] is 1 if a
 * message ends with bucket b (the last bucket of a buffer always ends one). */
TX_API void tx_cycle_set_messages(tx_cycle *cycle, const uint8_t *ends);

/* -- reports ------------------------------------------------------------------------------------------------------ */

/* Bytes of a report; equal on every rank. */
TX_API int64_t tx_cycle_report_bytes(const tx_cycle *cycle);

/* Writes this rank's report. nonfinite: the first parameter whose gradient is not finite, or -1. requires_grad:
 * [n_params]. */
TX_API void tx_cycle_report(tx_cycle *cycle, int64_t nonfinite, const uint8_t *requires_grad, uint8_t *report);

/* Reads the reports of all ranks, by rank, and decides the verdict, which TX_DO_RAISE returns. scratch: [world],
 * written. held_back: for TX_CYCLE_UNITS: 1 if FSDP2 keeps some gradients for a later backward, so that none counts as
 * missing. */
TX_API void tx_cycle_read(tx_cycle *cycle, const uint8_t *const *reports, const uint8_t **scratch, int32_t held_back);

/* -- queries ------------------------------------------------------------------------------------------------------ */

typedef enum tx_cycle_phase {
  TX_PHASE_IDLE = 0,
  TX_PHASE_ACCUMULATING = 1,
  TX_PHASE_REDUCING = 2,
  TX_PHASE_CLOSING = 3,
  TX_PHASE_RECOVERING = 4
} tx_cycle_phase;

TX_API int32_t tx_cycle_phase_of(const tx_cycle *cycle);

/* The number of the current cycle, or of the next one if none has begun. */
TX_API int64_t tx_cycle_number(const tx_cycle *cycle);

/* Why nothing can be reduced any more; NULL if there was no failure. */
TX_API const char *tx_cycle_failure(const tx_cycle *cycle);

/* 1 if the failure is a backward that raised after some of its buckets had been stepped, or a step that did not end. */
TX_API int32_t tx_cycle_partly_stepped(const tx_cycle *cycle);

/* The reason of the last call that returned -1. */
TX_API const char *tx_cycle_refusal(const tx_cycle *cycle);

/* [n_buckets]: the parameter whose gradient completed each bucket last time, or is expected to after tx_cycle_rebuild;
 * -1 if not known. NULL for kinds without planned buckets. */
TX_API const int64_t *tx_cycle_completed_by(const tx_cycle *cycle);

/* Flags, [n_params] each. anywhere: 1 if any rank has a gradient after the last cycle. left: 1 if every rank has what
 * an earlier reduction left, and got no gradient since. nonfinite: 1 if the check named this parameter's gradient,
 * until tx_cycle_zero or until the caller sets it to 0. */
TX_API const uint8_t *tx_cycle_anywhere(const tx_cycle *cycle);
TX_API const uint8_t *tx_cycle_left(const tx_cycle *cycle);
TX_API uint8_t *tx_cycle_nonfinite(tx_cycle *cycle);

/* [n_params]: the parameters in the order in which their gradients were ready in the first cycle that reduced; those
 * without a gradient last, in reverse order. */
TX_API const int64_t *tx_cycle_order(const tx_cycle *cycle);

#ifdef __cplusplus
}
#endif

#endif
