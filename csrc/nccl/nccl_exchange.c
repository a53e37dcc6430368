/* All-to-all and all-gather of bytes, in groups that NCCL runs as one operation. */
#include <stdbool.h>
#include <stdio.h>

#include "csrc/core/status.h"
#include "csrc/nccl/nccl_comm.h"

typedef struct {
  int64_t n;
  const tx_nccl_message *messages;
  cudaStream_t stream;
} operation;

/* Whether NCCL accepted an operation. A non-blocking communicator may return "in progress" inside a group too: the
 * operation was accepted, and others may follow. */
static bool took(int result) {
  return result == TX_NCCL_SUCCESS || result == TX_NCCL_IN_PROGRESS;
}

/* Sends every part to its rank and receives a part from every rank, this rank included. */
static int exchange_parts(const tx_nccl_comm *comm, ncclComm_t used, const tx_nccl_message *m, cudaStream_t stream) {
  const tx_nccl_table *call = &comm->library->call;
  const size_t bytes = (size_t)m->bytes;
  if (call->ncclAlltoAll) return call->ncclAlltoAll(m->send, m->receive, bytes, TX_NCCL_UINT8, used, stream);
  int result = TX_NCCL_SUCCESS;
  for (int32_t i = 0; i < comm->n_ranks && took(result); i++) {
    const int32_t peer = (comm->rank + i) % comm->n_ranks; /* so that not all ranks send to rank 0 first */
    const char *from = (const char *)m->send + (size_t)peer * bytes;
    char *to = (char *)m->receive + (size_t)peer * bytes;
    result = call->ncclSend(from, bytes, TX_NCCL_UINT8, peer, used, stream);
    if (took(result)) result = call->ncclRecv(to, bytes, TX_NCCL_UINT8, peer, used, stream);
  }
  return result;
}

static int gather_parts(const tx_nccl_comm *comm, ncclComm_t used, const tx_nccl_message *m, cudaStream_t stream) {
  return comm->library->call.ncclAllGather(m->send, m->receive, (size_t)m->bytes, TX_NCCL_UINT8, used, stream);
}

static int in_one_group(const tx_nccl_comm *comm, ncclComm_t used, const operation *op,
                        int (*one)(const tx_nccl_comm *, ncclComm_t, const tx_nccl_message *, cudaStream_t)) {
  const tx_nccl_table *call = &comm->library->call;
  int result = call->ncclGroupStart();
  for (int64_t i = 0; i < op->n && took(result); i++)
    if (op->messages[i].bytes) result = one(comm, used, &op->messages[i], op->stream);
  const int ended = call->ncclGroupEnd(); /* also if an operation was rejected: the group belongs to this thread */
  return took(result) ? ended : result;
}

static int all_to_all(tx_nccl_comm *comm, ncclComm_t used, void *arg) {
  return in_one_group(comm, used, arg, exchange_parts);
}

static int all_gather(tx_nccl_comm *comm, ncclComm_t used, void *arg) {
  return in_one_group(comm, used, arg, gather_parts);
}

static tx_status issue(tx_nccl_comm *comm, int which, const char *kind, tx_nccl_step step, const char *bucket,
                       int64_t n, const tx_nccl_message *messages, void *stream, tx_error *error) {
  if (!comm || !bucket || n < 0 || (n > 0 && !messages))
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "%s: comm, bucket or messages is NULL, or n is negative", kind);
  for (int64_t i = 0; i < n; i++)
    if (messages[i].bytes < 0 || (messages[i].bytes > 0 && (!messages[i].send || !messages[i].receive)))
      return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                     "%s of %s: message %lld has %lld bytes, or NULL for memory; bytes >= 0 is legal", kind, bucket,
                     (long long)i, (long long)messages[i].bytes);
  tx_nccl_note(comm, kind, bucket, n, messages);
  operation op = {n, messages, stream};
  char what[256];
  (void)snprintf(what, sizeof what, "%s of %s (operation %lld)", kind, bucket, (long long)comm->count);
  return tx_nccl_run(comm, which, step, &op, what, error);
}

tx_status tx_nccl_all_to_all(tx_nccl_comm *comm, const char *bucket, int64_t n, const tx_nccl_message *messages,
                             void *stream, tx_error *error) {
  return issue(comm, TX_NCCL_REDUCTIONS, "all-to-all", all_to_all, bucket, n, messages, stream, error);
}

tx_status tx_nccl_all_gather(tx_nccl_comm *comm, const char *bucket, int64_t n, const tx_nccl_message *messages,
                             void *stream, tx_error *error) {
  return issue(comm, TX_NCCL_GATHERS, "all-gather", all_gather, bucket, n, messages, stream, error);
}
