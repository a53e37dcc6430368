#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* clock_gettime, nanosleep */
#endif
#include "csrc/nccl/nccl_comm.h"

#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "csrc/core/status.h"
#include "csrc/core/text.h"

static double now(void) {
  struct timespec t;
  (void)clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* When to start sleeping while polling. Most operations complete at once, and the shortest sleep takes longer than they
 * do, so the poll does not sleep until both this time and this number of polls are exceeded. On a busy machine the time
 * may be over before the first poll. */
#define TX_AWAKE_SECONDS 50e-6
#define TX_AWAKE_POLLS 16

/* Sleeps, from a microsecond up to a millisecond, doubling each time: a rank that is late is usually very late. */
static void nap(long *nanoseconds) {
  const struct timespec t = {0, *nanoseconds};
  (void)nanosleep(&t, NULL);
  if (*nanoseconds < 1000000) *nanoseconds *= 2;
}

static bool is_alive(const tx_nccl_comm *comm) {
  return comm->comms[TX_NCCL_REDUCTIONS] != NULL;
}

/* Under the lock. */
static ncclComm_t *used_for(tx_nccl_comm *comm, int which) {
  return &comm->comms[which < comm->n_comms ? which : TX_NCCL_REDUCTIONS];
}

/* Under the lock. */
static void abort_all(tx_nccl_comm *comm, const char *why) {
  const tx_nccl_table *call = &comm->library->call;
  if (!is_alive(comm)) return;
  (void)snprintf(comm->why, sizeof comm->why, "%s", why);
  const bool together = comm->comms[TX_NCCL_GATHERS] != NULL; /* Note [gathers of their own] */
  if (together) (void)call->ncclGroupStart();
  for (int i = 0; i < comm->n_comms; i++) {
    if (comm->comms[i]) (void)call->ncclCommAbort(comm->comms[i]);
    comm->comms[i] = NULL;
  }
  if (together) (void)call->ncclGroupEnd();
}

static tx_status fail_aborted(const tx_nccl_comm *comm, const char *what, tx_error *error) {
  return tx_fail(error, TX_ERROR_BAD_STATE,
                 "%s: this communicator was aborted and cannot be used any more; end the process on every rank. The "
                 "reason: %s",
                 what, comm->why);
}

/* Under the lock: aborts the communicator with the message, and returns a failure with it. */
static tx_status abort_with(tx_nccl_comm *comm, tx_error *error, const char *message) {
  abort_all(comm, message);
  return tx_fail(error, TX_ERROR_UNAVAILABLE, "%s", message);
}

static tx_status fail_with(tx_nccl_comm *comm, int which, int result, const char *what, tx_error *error) {
  const tx_nccl_table *call = &comm->library->call;
  char message[768];
  (void)snprintf(message, sizeof message, "%s on rank %d of %d: NCCL says: %s (%s)", what, comm->rank, comm->n_ranks,
                 call->ncclGetErrorString(result), call->ncclGetLastError(*used_for(comm, which)));
  return abort_with(comm, error, message);
}

/* Under the lock: the state of a communicator after a call that returned `result`.
 *
 * Note [success that is not]
 *
 * Problem. A call on a non-blocking communicator may return ncclSuccess while NCCL's thread still works on it:
 * ncclCommWindowRegister of 2.27 and 2.28 returns its own result, not that of the group in which it registers. The next
 * call is then rejected ("Attempt to use communicator before the previous operation returned ncclSuccess"), and the
 * window, which the thread writes when it is done, is not there yet. So no result but an error is taken for the end of
 * a call: the communicator is asked after each. */
static int state_after(tx_nccl_comm *comm, int which, int result) {
  int state = TX_NCCL_IN_PROGRESS;
  if (result != TX_NCCL_SUCCESS && result != TX_NCCL_IN_PROGRESS) return result;
  const int asked = comm->library->call.ncclCommGetAsyncError(*used_for(comm, which), &state);
  return asked != TX_NCCL_SUCCESS ? asked : state;
}

/* Under the lock: polls until NCCL has completed what it began. result: what the call returned. */
static tx_status poll_until_done(tx_nccl_comm *comm, int which, int result, const char *what, tx_error *error) {
  const double begin = now(), deadline = begin + comm->timeout_seconds;
  long nanoseconds = 1000;
  int state = state_after(comm, which, result);
  for (long question = 0; state == TX_NCCL_IN_PROGRESS; question++) {
    if (now() > deadline) {
      char message[512];
      (void)tx_text_format(
          message, sizeof message,
          "%s on rank %d of %d: not done after %g s. A rank did not make this call, or is that far behind", what,
          comm->rank, comm->n_ranks, comm->timeout_seconds);
      return abort_with(comm, error, message);
    }
    (void)pthread_mutex_unlock(&comm->lock);
    if (question < TX_AWAKE_POLLS || now() < begin + TX_AWAKE_SECONDS) {
      (void)sched_yield();
    } else {
      nap(&nanoseconds);
    }
    (void)pthread_mutex_lock(&comm->lock);
    if (!is_alive(comm)) return fail_aborted(comm, what, error);
    state = state_after(comm, which, TX_NCCL_IN_PROGRESS);
  }
  return state == TX_NCCL_SUCCESS ? TX_OK : fail_with(comm, which, state, what, error);
}

tx_status tx_nccl_run(tx_nccl_comm *comm, int which, tx_nccl_step step, void *arg, const char *what, tx_error *error) {
  (void)pthread_mutex_lock(&comm->lock);
  tx_status status;
  if (is_alive(comm)) {
    const int result = step ? step(comm, *used_for(comm, which), arg) : TX_NCCL_SUCCESS;
    status = poll_until_done(comm, which, result, what, error);
  } else {
    status = fail_aborted(comm, what, error);
  }
  (void)pthread_mutex_unlock(&comm->lock);
  return status;
}

static tx_status check_args(const tx_nccl_comm_args *args, tx_nccl_comm **comm, tx_error *error) {
  if (!args || !comm || args->size != sizeof *args || !args->library || !args->id)
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "tx_nccl_comm_new: args, comm, args.library or args.id is NULL, or args.size is not "
                   "TX_NCCL_COMM_ARGS_INIT's");
  if (args->n_ranks < 1 || args->rank < 0 || args->rank >= args->n_ranks)
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_nccl_comm_new: rank %d of %d; legal is 0 <= rank < n_ranks",
                   args->rank, args->n_ranks);
  if (!(args->timeout_seconds > 0))
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_nccl_comm_new: timeout_seconds is %g; > 0 is legal",
                   args->timeout_seconds);
  return TX_OK;
}

static int begin(tx_nccl_comm *comm, int which, const tx_nccl_comm_args *args) {
  tx_nccl_config config = TX_NCCL_CONFIG_INIT;
  config.blocking = 0;
  if (args->copy_engines && comm->library->version >= TX_NCCL_CODE(2, 28)) config.cta_policy = TX_NCCL_CTA_POLICY_ZERO;
  if (args->gather_id && args->multiprocessors > 0)
    config.max_ctas = args->multiprocessors < 4 ? 1 : args->multiprocessors / 4; /* Note [gathers of their own] */
  tx_nccl_id id;
  memcpy(id.internal, which == TX_NCCL_GATHERS ? args->gather_id : args->id, sizeof id.internal);
  return comm->library->call.ncclCommInitRankConfig(&comm->comms[which], args->n_ranks, id, args->rank, &config);
}

tx_status tx_nccl_comm_new(const tx_nccl_comm_args *args, tx_nccl_comm **comm, tx_error *error) {
  TX_FORWARD(check_args(args, comm, error));
  *comm = NULL;
  tx_nccl_comm *made = calloc(1, sizeof *made);
  if (!made) return tx_fail(error, TX_ERROR_OUT_OF_MEMORY, "tx_nccl_comm_new: out of memory");
  made->library = args->library;
  made->rank = args->rank;
  made->n_ranks = args->n_ranks;
  made->timeout_seconds = args->timeout_seconds;
  made->n_comms = args->gather_id ? 2 : 1;
  (void)pthread_mutex_init(&made->lock, NULL);
  (void)pthread_mutex_lock(&made->lock);
  tx_status status = TX_OK;
  for (int i = 0; i < made->n_comms && status == TX_OK; i++)
    status = poll_until_done(made, i, begin(made, i, args),
                             i ? "making the gathers' communicator" : "making a communicator", error);
  (void)pthread_mutex_unlock(&made->lock);
  if (status != TX_OK) {
    tx_nccl_comm_free(made);
    return status;
  }
  *comm = made;
  return TX_OK;
}

static int finalize(tx_nccl_comm *comm, ncclComm_t used, void *arg) {
  (void)arg;
  return comm->library->call.ncclCommFinalize(used);
}

void tx_nccl_comm_free(tx_nccl_comm *comm) {
  if (!comm) return;
  for (int i = 0; i < comm->n_comms && is_alive(comm); i++)
    (void)tx_nccl_run(comm, i, finalize, NULL, "ending a communicator", NULL); /* a failure aborts all of them */
  for (int i = 0; i < comm->n_comms; i++)
    if (comm->comms[i]) (void)comm->library->call.ncclCommDestroy(comm->comms[i]);
  (void)pthread_mutex_destroy(&comm->lock);
  free(comm);
}

void tx_nccl_comm_abort(tx_nccl_comm *comm, const char *why) {
  if (!comm) return;
  (void)pthread_mutex_lock(&comm->lock);
  abort_all(comm, why ? why : "no reason given");
  (void)pthread_mutex_unlock(&comm->lock);
}

tx_status tx_nccl_comm_check(tx_nccl_comm *comm, tx_error *error) {
  if (!comm) return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_nccl_comm_check: comm is NULL");
  for (int i = 0; i < comm->n_comms; i++)
    TX_FORWARD(tx_nccl_run(comm, i, NULL, NULL, "communication under way", error));
  return TX_OK;
}
