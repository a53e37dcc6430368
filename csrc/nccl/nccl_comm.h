/* A communicator: alive, or aborted for a reason that every later call repeats.
 *
 * Note [gathers of their own]
 *
 * NCCL runs the operations of one communicator one after the other, so a gather of weights waits for every reduction
 * that was issued before it. With args.gather_id there are two of NCCL's communicators behind one of ours: all-to-all
 * goes to one, all-gather to the other, and the caller gives each a stream. NCCL's kernels wait for other ranks while
 * they hold multiprocessors, so two communicators may wait for each other for ever: where one rank runs the one's
 * kernel, another rank the other's, and neither has room for both. None of that can happen here:
 *
 * - Both are issued by one thread, in an order that is the same on all ranks, and recorded as one sequence: ranks whose
 *   orders differ are told. What an operation waits for on the device was queued before it, on every rank; so whatever
 *   is first among the operations that are not done may run everywhere, also where a device has one queue for all
 *   streams (CUDA_DEVICE_MAX_CONNECTIONS=1).
 * - And it has room: each communicator's kernels have at most a quarter of the device's multiprocessors (max_ctas).
 *   NCCL 2.26 and newer with NCCL_LAUNCH_ORDER_IMPLICIT=1 would start kernels in the order of issue and needs no room;
 *   it is an environment variable, which is the user's, and not needed here.
 * - Both are made before either is used, since making one allocates device memory, which may wait for kernels.
 * - Both are aborted in one group: an abort waits for kernels of the device, which may be the other's.
 *
 * The second is made with an id of its own, not by ncclCommSplit: a communicator that shares its parent's resources
 * falls with it, but is not aborted by it, and one that shares none is what this is. */
#ifndef TX_NCCL_COMM_H
#define TX_NCCL_COMM_H

#include <pthread.h>

#include "csrc/nccl/nccl_table.h"

enum { TX_NCCL_REDUCTIONS, TX_NCCL_GATHERS, TX_NCCL_COMMS };

struct tx_nccl_comm {
  const tx_nccl *library;
  int32_t rank, n_ranks;
  double timeout_seconds;

  /* Held for the length of one call of NCCL, none of which blocks: a watchdog may abort from another thread, after
   * which NCCL's communicator is gone. */
  pthread_mutex_t lock;
  int32_t n_comms;                 /* 2: gathers have their own */
  ncclComm_t comms[TX_NCCL_COMMS]; /* NULL: gone, all of them */
  char why[768];                   /* they were aborted */

  int64_t count;                           /* operations so far */
  uint64_t digest;                         /* of all of them */
  tx_nccl_record records[TX_NCCL_RECORDS]; /* the last ones, operation i at i % TX_NCCL_RECORDS */
};

/* One call of NCCL, on `used` of a communicator that is alive and locked; its result. */
typedef int (*tx_nccl_step)(tx_nccl_comm *comm, ncclComm_t used, void *arg);

/* Makes the call and polls until NCCL has done its part; an error of NCCL, or none of its answers before the timeout,
 * aborts. which: TX_NCCL_REDUCTIONS, or TX_NCCL_GATHERS, which may be the same. what: for messages. */
tx_status tx_nccl_run(tx_nccl_comm *comm, int which, tx_nccl_step step, void *arg, const char *what, tx_error *error);

/* Notes an operation before it is issued. */
void tx_nccl_note(tx_nccl_comm *comm, const char *kind, const char *bucket, int64_t n, const tx_nccl_message *messages);

#endif
