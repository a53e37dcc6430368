/* Device memory that every rank's NCCL may read and write directly. */
#include "csrc/core/status.h"
#include "csrc/nccl/nccl_comm.h"

typedef struct {
  tx_nccl_memory *memory;
  void *window; /* NCCL may write it after the call has returned */
} registration;

static int allocate(tx_nccl_comm *comm, ncclComm_t used, void *arg) {
  tx_nccl_memory *memory = arg;
  (void)used;
  return comm->library->call.ncclMemAlloc(&memory->data, (size_t)memory->bytes);
}

static int enter(tx_nccl_comm *comm, ncclComm_t used, void *arg) {
  registration *r = arg;
  return comm->library->call.ncclCommWindowRegister(used, r->memory->data, (size_t)r->memory->bytes, &r->window,
                                                    TX_NCCL_WIN_COLL_SYMMETRIC);
}

static int leave(tx_nccl_comm *comm, ncclComm_t used, void *arg) {
  return comm->library->call.ncclCommWindowDeregister(used, arg);
}

/* The field of `memory` that has the window of this communicator. */
static void **window_of(tx_nccl_memory *memory, int which) {
  return which == TX_NCCL_GATHERS ? &memory->gather_window : &memory->window;
}

static tx_status enter_all(tx_nccl_comm *comm, tx_nccl_memory *memory, tx_error *error) {
  for (int i = 0; i < comm->n_comms; i++) {
    registration r = {memory, NULL};
    const tx_status status = tx_nccl_run(comm, i, enter, &r, "registering memory", error);
    *window_of(memory, i) = r.window;
    if (status != TX_OK) return status;
  }
  return TX_OK;
}

tx_status tx_nccl_memory_new(tx_nccl_comm *comm, tx_nccl_memory *memory, tx_error *error) {
  if (!comm || !memory || memory->size != sizeof *memory || memory->bytes < 1)
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "tx_nccl_memory_new: comm or memory is NULL, memory.size is not TX_NCCL_MEMORY_INIT's, or "
                   "memory.bytes is not > 0");
  memory->data = memory->window = memory->gather_window = NULL;
  TX_FORWARD(tx_nccl_run(comm, TX_NCCL_REDUCTIONS, allocate, memory, "allocating memory", error));
  if (!tx_nccl_has_windows(comm->library)) return TX_OK;
  const tx_status status = enter_all(comm, memory, error);
  if (status != TX_OK) tx_nccl_memory_free(comm, memory);
  return status;
}

void tx_nccl_memory_free(tx_nccl_comm *comm, tx_nccl_memory *memory) {
  if (!comm || !memory || !memory->data) return;
  /* An aborted communicator has no windows any more, but the memory still has to be freed. */
  for (int i = 0; i < comm->n_comms; i++)
    if (*window_of(memory, i)) (void)tx_nccl_run(comm, i, leave, *window_of(memory, i), "unregistering memory", NULL);
  (void)comm->library->call.ncclMemFree(memory->data);
  memory->data = memory->window = memory->gather_window = NULL;
}
