/* A communicator: alive, or aborted for a reason that every later call repeats. */
#ifndef TX_NCCL_COMM_H
#define TX_NCCL_COMM_H

#include <pthread.h>

#include "csrc/nccl/nccl_table.h"

struct tx_nccl_comm {
  const tx_nccl *library;
  int32_t rank, n_ranks;
  double timeout_seconds;

  /* Held for the length of one call of NCCL, none of which blocks: a watchdog may abort from another thread, after
   * which NCCL's communicator is gone. */
  pthread_mutex_t lock;
  ncclComm_t comm; /* NULL: gone */
  char why[768];   /* it was aborted */

  int64_t count;                           /* operations so far */
  uint64_t digest;                         /* of all of them */
  tx_nccl_record records[TX_NCCL_RECORDS]; /* the last ones, operation i at i % TX_NCCL_RECORDS */
};

/* One call of NCCL, on a communicator that is alive and locked; its result. */
typedef int (*tx_nccl_step)(tx_nccl_comm *comm, void *arg);

/* Makes the call and polls until NCCL has done its part; an error of NCCL, or none of its answers before the timeout,
 * aborts. what: for messages. */
tx_status tx_nccl_run(tx_nccl_comm *comm, tx_nccl_step step, void *arg, const char *what, tx_error *error);

/* Notes an operation before it is issued. */
void tx_nccl_note(tx_nccl_comm *comm, const char *kind, const char *bucket, int64_t n, const tx_nccl_message *messages);

#endif
