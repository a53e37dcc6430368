/* The protocol of a model's gradients between and during backwards, as a machine: for the author of an engine, and for
 * torch_ext's own parallelize, register_comm_hook and FSDP2 reducer, which drive it.
 *
 * A machine is one rank's part. It has no I/O, thread, clock or torch, and allocates nothing: it is told what happened
 * (events), says what to do next (actions), and is told when that is done. So the same code runs under Python with real
 * communicators, and a thousand times in one process under a simulator (tests/core/cycle_simulation_test.cc), through
 * more faults than processes see in a year.
 *
 * Note [the cycle]
 *
 * A cycle is what ends in one reduction: any number of backwards that only accumulate (no_sync), then one that reduces.
 *
 *   IDLE -- begin(sync 0) --> ACCUMULATING -- end --> IDLE
 *   IDLE -- begin(sync 1) --> REDUCING -- end --> CLOSING -- nothing left to do --> IDLE
 *   any of them but IDLE -- died --> RECOVERING -- nothing left to do --> IDLE
 *
 * In REDUCING a bucket is sent as soon as its last gradient is ready, in ascending order. CLOSING inspects the
 * parameters that got no gradient, sends the rest, exchanges reports, waits for the sums, and installs them. A report
 * says what one rank knows and all must share: in which cycle it is, which gradients it had, whether one was not
 * finite. From the same reports every rank comes to the same verdict, in the same words. RECOVERING sends what was
 * complete when a backward raised, and waits for all that it has sent, as the other ranks sent it too.
 *
 * Between backwards a step writes weights, bucket by bucket, and gathers of them begin (tx_cycle_stepping); they are
 * waited for in its end, and where that is interrupted, before the next forward.
 *
 * What a machine is asked in the wrong state it refuses by name; after a failure of the exchange (tx_cycle_fail) it
 * refuses every backward and step with the text of that failure.
 *
 * One thread at a time. Events are answered at once; actions are asked for with tx_cycle_next, until there is none, and
 * acknowledged with tx_cycle_done. An action that was not acknowledged (an exception, Ctrl-C) is handed out again, or
 * is void after tx_cycle_died. */
#ifndef TORCH_EXT_CYCLE_H
#define TORCH_EXT_CYCLE_H

#include "torch_ext_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What is reduced, by whose order. The first three are numbered as the policy's data_parallel_sharding_strategy. */
typedef enum tx_cycle_kind {
  TX_CYCLE_NO_SHARD = 0,    /* buckets; every rank gets the mean */
  TX_CYCLE_OPTIM = 1,       /* buckets; each rank gets its own part of the sum */
  TX_CYCLE_OPTIM_GRADS = 2, /* the same, added to a shard in every backward */
  TX_CYCLE_UNITS = 3,       /* FSDP2 hands over units, in its own order */
  TX_CYCLE_DDP_HOOK = 4     /* DistributedDataParallel hands over buckets, in its own order */
} tx_cycle_kind;

typedef struct tx_cycle_args {
  uint64_t size;
  int64_t n_params;
  int64_t n_buckets;        /* or units; TX_CYCLE_DDP_HOOK: at most as many as parameters */
  const int64_t *bucket_of; /* [n_params], copied. TX_CYCLE_UNITS and TX_CYCLE_DDP_HOOK: NULL */
  const int64_t
      *buffer_of; /* [n_buckets], ascending, copied: buckets of one buffer may be sent as one. NULL likewise */
  const char *const *names; /* [n_params], for texts; borrowed for the life of the machine */
  const char *const *units; /* [n_buckets], for texts of TX_CYCLE_UNITS; borrowed. Else NULL */
  int64_t cycle;            /* the number of the first cycle: 0, or that of the machine whose place this one takes */
  int64_t slots;            /* messages under way at a time, >= 1, where the machine bounds them (below) */
  int32_t kind;             /* tx_cycle_kind */
  int32_t rank;
  int32_t world;
  int32_t check_for_nan; /* TX_DO_CHECK for every bucket, and the verdict about what was found */
  int32_t find_unused;   /* 1: a parameter without a gradient counts as zero; 0: that is an error on every rank */
  int32_t reorder;       /* 1: the first cycle that reduces sends all buckets at its end, after TX_DO_ORDER */
  int32_t scales_sums;   /* no_shard: sums are divided by something else than the number of ranks */
  int32_t reserved;
} tx_cycle_args;
#define TX_CYCLE_ARGS_INIT \
  { .size = sizeof(tx_cycle_args), .slots = 1, .world = 1 }

/* The machine, in memory of the caller (aligned as for int64_t). */
typedef struct tx_cycle tx_cycle;

/* Bytes that a machine needs; -1 for counts that are negative or more than int64_t holds. */
TX_API int64_t tx_cycle_bytes(const tx_cycle_args *args);

/* Begins in IDLE. TX_ERROR_INVALID_ARGUMENT for what is never legal. */
TX_API tx_status tx_cycle_init(void *memory, int64_t bytes, const tx_cycle_args *args, tx_cycle **cycle,
                               tx_error *error);

/* Takes the place of `from`, which waits for TX_DO_ORDER to be done and is not used any more, with other buckets for
 * the same parameters: as tx_cycle_init, but goes on where `from` was. */
TX_API tx_status tx_cycle_rebuild(void *memory, int64_t bytes, const tx_cycle_args *args, const tx_cycle *from,
                                  tx_cycle **cycle, tx_error *error);

/* -- events: what happened ---------------------------------------------------------------------------------------- */

/* Those that return tx_cycle_answer return 1 where tx_cycle_next has something to do, 0 where not, and -1 where they
 * were refused, with nothing changed: tx_cycle_refusal says why. */
typedef int32_t tx_cycle_answer;

/* What lies in a parameter's `.grad`. */
typedef enum tx_cycle_grad {
  TX_GRAD_NONE = 0,
  TX_GRAD_IN_PLACE = 1, /* the tensor in which a reduction leaves its sum */
  TX_GRAD_OTHER = 2     /* any other: assigned by the user, or of a micro-batch */
} tx_cycle_grad;

/* What is to be done with a gradient before it counts in the next sum, in the order of the bits. */
typedef enum tx_cycle_prepare {
  TX_PREPARE_COPY = 1,     /* keep a copy: TX_DO_INSTALL restores it where tx_cycle_left says so */
  TX_PREPARE_MULTIPLY = 2, /* by gradient_divide_factor: an earlier mean that rank 0 alone counts */
  TX_PREPARE_ZERO = 4,     /* such a mean on any other rank; or no gradient, so that the bucket's range is zero */
  TX_PREPARE_SET_ASIDE =
      8,                  /* this rank's part of an earlier sum goes where the next sum is added to it; zero the rest */
  TX_PREPARE_FORGET = 16, /* whatever was set aside */
  TX_PREPARE_TAKE = 32    /* `.grad` is this rank's whole gradient, as in a hook that says that it is ready */
} tx_cycle_prepare;

/* The first gradient of a backward is about to be ready. sync: 0 under no_sync(); kinds that reduce in every backward
 * ignore it. steps: buckets are stepped as soon as they are reduced. Refused where nothing can be reduced any more, or
 * another backward has not ended (tx_cycle_died first). */
TX_API tx_cycle_answer tx_cycle_begin(tx_cycle *cycle, int32_t sync, int32_t steps);

/* Autograd is about to accumulate into `.grad` of a parameter. Returns tx_cycle_prepare. */
TX_API int32_t tx_cycle_accumulate(tx_cycle *cycle, int64_t param, int32_t grad);

/* The gradient of a parameter is ready. Refused where it was ready before in this backward, or no backward has begun.
 * Cheap: this is the call per gradient. */
TX_API tx_cycle_answer tx_cycle_ready(tx_cycle *cycle, int64_t param);

/* The same of several, in the order in which they were ready: for a driver to which a call per gradient is dear. It may
 * be told late of any of them, at the cost of overlap: what matters is that tx_cycle_completed_by's are not, and that
 * it is told of all that were ready before tx_cycle_died: ranks that raise at the same place have sent the same then.
 * Where one is refused, those before it are ready. */
TX_API tx_cycle_answer tx_cycle_ready_several(tx_cycle *cycle, const int64_t *params, int64_t n);

/* torch hands over gradients (TX_CYCLE_UNITS, TX_CYCLE_DDP_HOOK): of a unit or bucket, `numel` elements. message: 0
 * where one rank has all of it, so that nothing is sent. last: of this backward, as DistributedDataParallel knows.
 * Refused out of a backward, before the last ones were sent, and for less than 0 or 2^48 elements and more. */
TX_API tx_cycle_answer tx_cycle_given(tx_cycle *cycle, int64_t bucket, int64_t numel, int32_t message, int32_t last);

/* The backward has ended, the outermost one where several are nested. Refused in IDLE. */
TX_API tx_cycle_answer tx_cycle_end(tx_cycle *cycle);

/* The answer to TX_DO_INSPECT: what lies in `.grad`, and requires_grad. Returns tx_cycle_prepare. */
TX_API int32_t tx_cycle_missing(tx_cycle *cycle, int64_t param, int32_t grad, int32_t requires_grad);

/* The backward raised, or was interrupted, perhaps before its first gradient was ready. modified: NULL, or [n_params],
 * 1 where a gradient may have been modified since the last cycle. */
TX_API void tx_cycle_died(tx_cycle *cycle, const uint8_t *modified);

/* Sums of these parameters were added to their shards by a backward that died: until tx_cycle_zero no step is legal. */
TX_API void tx_cycle_broken(tx_cycle *cycle, const uint8_t *params);

/* zero_grad() of these parameters. */
TX_API void tx_cycle_zero(tx_cycle *cycle, const int64_t *params, int64_t n);

/* The exchange has failed for good. The first text stays. */
TX_API void tx_cycle_fail(tx_cycle *cycle, const char *text);

/* Before a step reads gradients. grads: [n_params], 1 where a gradient is this rank's own if one was ready since the
 * last reduction (NULL: none is). Returns 0, or -1: the exchange failed, a backward has not ended, one raised when sums
 * had been added, gradients are not finite (tx_cycle_nonfinite), no rank has reduced them, or the last step's weights
 * have not come. */
TX_API tx_cycle_answer tx_cycle_check_step(tx_cycle *cycle, const uint8_t *grads);

/* A step is about to write the first weight or state. One that raises, or is interrupted, before tx_cycle_stepped
 * leaves weights of two steps, on this rank alone: where there are others, the next tx_cycle_begin or
 * tx_cycle_check_step fails for good and says so (tx_cycle_partly_stepped). */
TX_API void tx_cycle_stepping(tx_cycle *cycle);

/* The gather of a bucket's weights has begun: TX_DO_WEIGHTS comes for each, in this order. Returns its `message`. */
TX_API int64_t tx_cycle_gathering(tx_cycle *cycle);

/* The step has written everything and begun all gathers, or was refused before it wrote. */
TX_API void tx_cycle_stepped(tx_cycle *cycle);

/* -- actions: what to do ------------------------------------------------------------------------------------------ */

typedef enum tx_cycle_do {
  TX_DO_NOTHING = 0,
  TX_DO_CHECK = 1,      /* bucket `first` is complete: look for gradients that are not finite */
  TX_DO_SEND = 2,       /* buckets [first, end) as message `message`; flags: TX_SEND_STEP */
  TX_DO_INSPECT = 3,    /* parameter `first` got no gradient: tx_cycle_missing, and what that returns */
  TX_DO_ORDER = 4,      /* exchange tx_cycle_order; where another plan is better, tx_cycle_rebuild instead of done */
  TX_DO_REPORT = 5,     /* exchange what tx_cycle_report writes: only start to */
  TX_DO_WAIT = 6,       /* for message `message`; flags: TX_WAIT_DISCARD, TX_WAIT_IF_SENT */
  TX_DO_READ = 7,       /* wait for the reports, and give them to tx_cycle_read */
  TX_DO_INSTALL = 8,    /* the sums are there: tx_cycle_anywhere and tx_cycle_left say of which parameters */
  TX_DO_RAISE = 9,      /* `text`: the verdict, the same on every rank. Needs no tx_cycle_done */
  TX_DO_RECOVERED = 10, /* nothing of the backward that died is under way any more */
  TX_DO_WEIGHTS = 11    /* wait for weights that are gathered: the `message`-th since all had come. Between backwards */
} tx_cycle_do;

#define TX_SEND_STEP 1    /* each bucket is stepped as soon as this rank's part of it is reduced */
#define TX_WAIT_DISCARD 1 /* its sums are worth nothing: they are not to be added */
#define TX_WAIT_IF_SENT 2 /* its TX_DO_SEND was not acknowledged: only where it was sent all the same */

typedef struct tx_cycle_action {
  int64_t first;
  int64_t end;
  int64_t message; /* counted from 0 in each backward */
  const char *text;
  int32_t kind; /* tx_cycle_do */
  int32_t flags;
} tx_cycle_action;

/* What is to be done now, until tx_cycle_done says that it was. Returns action->kind. */
TX_API int32_t tx_cycle_next(tx_cycle *cycle, tx_cycle_action *action);

/* The last action is done. answered: TX_DO_SEND: 1 where the message was waited for already. */
TX_API void tx_cycle_done(tx_cycle *cycle, int32_t answered);

/* Which buckets are sent as one, from the next backward on: ends[b] 1 where a message ends with bucket b ([n_buckets],
 * copied; the last one of a buffer always ends one). */
TX_API void tx_cycle_set_messages(tx_cycle *cycle, const uint8_t *ends);

/* -- reports ------------------------------------------------------------------------------------------------------ */

/* Bytes of a report, equal on every rank. */
TX_API int64_t tx_cycle_report_bytes(const tx_cycle *cycle);

/* Writes this rank's report. nonfinite: the first parameter with a gradient that is not finite, or -1. requires_grad:
 * [n_params]. */
TX_API void tx_cycle_report(tx_cycle *cycle, int64_t nonfinite, const uint8_t *requires_grad, uint8_t *report);

/* Every rank's, by rank: decides the verdict, which TX_DO_RAISE brings. scratch: [world], written. held_back:
 * TX_CYCLE_UNITS: FSDP2 keeps some gradients for a later backward, so that none is missing. */
TX_API void tx_cycle_read(tx_cycle *cycle, const uint8_t *const *reports, const uint8_t **scratch, int32_t held_back);

/* -- what it knows ------------------------------------------------------------------------------------------------ */

typedef enum tx_cycle_phase {
  TX_PHASE_IDLE = 0,
  TX_PHASE_ACCUMULATING = 1,
  TX_PHASE_REDUCING = 2,
  TX_PHASE_CLOSING = 3,
  TX_PHASE_RECOVERING = 4
} tx_cycle_phase;

TX_API int32_t tx_cycle_phase_of(const tx_cycle *cycle);

/* The number of the cycle that is under way, or comes next. */
TX_API int64_t tx_cycle_number(const tx_cycle *cycle);

/* NULL, or why nothing can be reduced any more. */
TX_API const char *tx_cycle_failure(const tx_cycle *cycle);

/* 1 where that is a backward that raised when some of its buckets had been stepped, or a step that did not end. */
TX_API int32_t tx_cycle_partly_stepped(const tx_cycle *cycle);

/* Of the last call that returned -1. */
TX_API const char *tx_cycle_refusal(const tx_cycle *cycle);

/* [n_buckets]: the parameter whose gradient completed each bucket when that happened last, or is expected to after
 * tx_cycle_rebuild; -1 where that is not known. NULL where no bucket is planned. */
TX_API const int64_t *tx_cycle_completed_by(const tx_cycle *cycle);

/* [n_params], 1 where: a rank has a gradient after the last cycle; every rank has what an earlier reduction left, and
 * got no gradient since; the check named this parameter's gradient (until tx_cycle_zero, or until it is set to 0). */
TX_API const uint8_t *tx_cycle_anywhere(const tx_cycle *cycle);
TX_API const uint8_t *tx_cycle_left(const tx_cycle *cycle);
TX_API uint8_t *tx_cycle_nonfinite(tx_cycle *cycle);

/* [n_params]: the parameters in the order in which their gradients were ready in the first cycle that reduced; those
 * without one last, in reverse order. */
TX_API const int64_t *tx_cycle_order(const tx_cycle *cycle);

#ifdef __cplusplus
}
#endif

#endif
