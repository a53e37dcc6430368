/* A communicator: alive, or aborted for a reason that every later call repeats.
 *
 * Note [gathers of their own]
 *
 * Problem. NCCL runs the operations of one communicator one after the other, so an all-gather of weights would wait for
 * every reduction that was issued before it. With args.gather_id one of our communicators consists of two of NCCL's:
 * one for all-to-all, one for all-gather, and the caller gives each a stream of its own. But NCCL's kernels wait for
 * other ranks while they occupy SMs. So two communicators could wait for each other forever: one rank runs the kernel
 * of one of them, another rank that of the other, and neither has room for both. That cannot happen here:
 *
 *   - Both are issued by one thread, in an order that is the same on all ranks, and recorded as one sequence: a
 *     difference in order is reported. What an operation waits for on the device was queued before it, on every rank.
 *     So the first operation that is not done can run on all ranks, even where a device has a single queue for all
 *     streams (CUDA_DEVICE_MAX_CONNECTIONS=1).
 *   - There is room: the kernels of each communicator use at most a quarter of the device's SMs (max_ctas). NCCL 2.26
 *     and newer with NCCL_LAUNCH_ORDER_IMPLICIT=1 would start kernels in the order of issue and would not need that,
 *     but it is an environment variable, which is for the user to set, and is not needed here.
 *   - Both are created before either is used, since creating one allocates device memory, which may wait for kernels.
 *   - Both are aborted in one group: an abort waits for kernels of the device, which may be the other communicator's.
 *
 * The second communicator is created with an id of its own, not by ncclCommSplit: a communicator that shares its
 * parent's resources fails together with it, but is not aborted by it; and one that shares none is the same as this
 * one. */
#ifndef TX_NCCL_COMM_H
#define TX_NCCL_COMM_H

#include <pthread.h>

#include "csrc/nccl/nccl_table.h"

enum { TX_NCCL_REDUCTIONS, TX_NCCL_GATHERS, TX_NCCL_COMMS };

struct tx_nccl_comm {
  const tx_nccl *library;
  int32_t rank, n_ranks;
  double timeout_seconds;

  /* Held during each call of NCCL, none of which blocks. A watchdog may abort from another thread, after which NCCL's
   * communicator no longer exists. */
  pthread_mutex_t lock;
  int32_t n_comms;                 /* 2: all-gathers have a communicator of their own */
  ncclComm_t comms[TX_NCCL_COMMS]; /* NULL: aborted, all of them */
  char why[768];                   /* why they were aborted */

  int64_t count;                           /* operations so far */
  uint64_t digest;                         /* digest of all operations */
  tx_nccl_record records[TX_NCCL_RECORDS]; /* the last operations; operation i is at (i - 1) % TX_NCCL_RECORDS */
};

/* Makes one call of NCCL on `used`, a communicator of `comm`, which is alive and locked; returns NCCL's result. */
typedef int (*tx_nccl_step)(tx_nccl_comm *comm, ncclComm_t used, void *arg);

/* Makes the call and polls until NCCL has completed it on the host. An error of NCCL, or no completion before the
 * timeout, aborts the communicator. which: TX_NCCL_REDUCTIONS, or TX_NCCL_GATHERS, which may be the same communicator.
 * step: NULL: makes no call, only polls. what: for messages. */
tx_status tx_nccl_run(tx_nccl_comm *comm, int which, tx_nccl_step step, void *arg, const char *what, tx_error *error);

/* Records an operation before it is issued. */
void tx_nccl_note(tx_nccl_comm *comm, const char *kind, const char *bucket, int64_t n, const tx_nccl_message *messages);

#endif
