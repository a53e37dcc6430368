/* tx_copy_ops with two streams of a device: copies run on the device's copy engines, marks are events. */
#include <stdlib.h>

#include "cuda/current_device.h"
#include "cuda/launch.h"

enum { TX_DOWN, TX_UP, TX_WAYS };

typedef struct tx_cuda_copies {
  cudaStream_t streams[TX_WAYS];
  int64_t slots;
  int32_t device;
  cudaEvent_t *marks[TX_WAYS]; /* by slot; NULL: not created yet */
} tx_cuda_copies;

/* Makes the device current, which waits need, too: a thread of torch's pool may have another device or none. */
static tx_status enter(const tx_cuda_copies *copy_ops, int32_t *before, tx_error *error) {
  return tx_cuda_make_current(copy_ops->device, before, error);
}
static tx_status leave(const tx_cuda_copies *copy_ops, int32_t before, tx_status status) {
  tx_cuda_put_back(copy_ops->device, before);
  return status;
}

static tx_status copy(void *ctx, int32_t up, void *to, const void *from, int64_t bytes, tx_error *error) {
  const tx_cuda_copies *copy_ops = (const tx_cuda_copies *)ctx;
  int32_t before = 0;
  TX_FORWARD(enter(copy_ops, &before, error));
  const cudaMemcpyKind kind = up ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
  const cudaError_t answer = cudaMemcpyAsync(to, from, (size_t)bytes, kind, copy_ops->streams[up ? TX_UP : TX_DOWN]);
  return leave(copy_ops, before, tx_cuda_answered(answer, up ? "copying to the device" : "copying to the host", error));
}

/* A slot, and so its mark, is used by one thread only. */
static tx_status mark_of(const tx_cuda_copies *copy_ops, int32_t up, int64_t slot, cudaEvent_t **mark,
                         tx_error *error) {
  if (slot < 0 || slot >= copy_ops->slots)
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "slot %lld of copy_ops; slots in [0, %lld) are legal",
                   (long long)slot, (long long)copy_ops->slots);
  *mark = &copy_ops->marks[up ? TX_UP : TX_DOWN][slot];
  return TX_OK;
}

static tx_status mark(void *ctx, int32_t up, int64_t slot, tx_error *error) {
  const tx_cuda_copies *copy_ops = (const tx_cuda_copies *)ctx;
  cudaEvent_t *mark = NULL;
  int32_t before = 0;
  TX_FORWARD(mark_of(copy_ops, up, slot, &mark, error));
  TX_FORWARD(enter(copy_ops, &before, error));
  cudaError_t answer = cudaSuccess;
  /* Waiting threads sleep instead of spinning: a copy takes long compared with a wake-up, and another thread or rank
   * can use the core meanwhile. */
  if (!*mark) answer = cudaEventCreateWithFlags(mark, cudaEventDisableTiming | cudaEventBlockingSync);
  if (answer == cudaSuccess) answer = cudaEventRecord(*mark, copy_ops->streams[up ? TX_UP : TX_DOWN]);
  return leave(copy_ops, before, tx_cuda_answered(answer, "recording an event", error));
}

static tx_status wait(void *ctx, int32_t up, int64_t slot, tx_error *error) {
  const tx_cuda_copies *copy_ops = (const tx_cuda_copies *)ctx;
  cudaEvent_t *mark = NULL;
  int32_t before = 0;
  TX_FORWARD(mark_of(copy_ops, up, slot, &mark, error));
  if (!*mark) return TX_OK;
  TX_FORWARD(enter(copy_ops, &before, error));
  return leave(copy_ops, before, tx_cuda_answered(cudaEventSynchronize(*mark), "waiting for a copy", error));
}

static tx_status follow(void *ctx, int64_t slot, tx_error *error) {
  const tx_cuda_copies *copy_ops = (const tx_cuda_copies *)ctx;
  cudaEvent_t *mark = NULL;
  int32_t before = 0;
  TX_FORWARD(mark_of(copy_ops, TX_UP, slot, &mark, error));
  if (!*mark) return TX_OK;
  TX_FORWARD(enter(copy_ops, &before, error));
  const cudaError_t answer = cudaStreamWaitEvent(copy_ops->streams[TX_DOWN], *mark, 0);
  return leave(copy_ops, before, tx_cuda_answered(answer, "making a stream wait for a copy", error));
}

tx_status tx_cuda_copies_make(int32_t device, void *down, void *up, int64_t slots, tx_copy_ops *copy_ops,
                              tx_error *error) {
  if (!copy_ops || slots < 1)
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "copy_ops is %s and slots is %lld; not NULL and >= 1 are legal",
                   copy_ops ? "given" : "NULL", (long long)slots);
  TX_FORWARD(tx_cuda_check_device(device, error));
  char *memory = (char *)calloc(1, sizeof(tx_cuda_copies) + (size_t)(TX_WAYS * slots) * sizeof(cudaEvent_t));
  if (!memory) return tx_fail(error, TX_ERROR_OUT_OF_MEMORY, "no memory for %lld slots", (long long)slots);
  tx_cuda_copies *made = (tx_cuda_copies *)(void *)memory;
  made->streams[TX_DOWN] = (cudaStream_t)down;
  made->streams[TX_UP] = (cudaStream_t)up;
  made->slots = slots;
  made->device = device;
  for (int way = 0; way < TX_WAYS; way++)
    made->marks[way] = (cudaEvent_t *)(void *)(memory + sizeof *made) + way * slots;
  tx_copy_ops filled = TX_COPY_OPS_INIT;
  filled.ctx = made;
  filled.copy = copy;
  filled.mark = mark;
  filled.wait = wait;
  filled.follow = follow;
  *copy_ops = filled;
  return TX_OK;
}

void tx_cuda_copies_free(tx_copy_ops *copy_ops) {
  if (!copy_ops || !copy_ops->ctx) return;
  tx_cuda_copies *made = (tx_cuda_copies *)copy_ops->ctx;
  int32_t before = 0;
  const tx_status entered = enter(made, &before, NULL);
  for (int way = 0; way < TX_WAYS; way++)
    for (int64_t slot = 0; slot < made->slots; slot++)
      if (made->marks[way][slot]) (void)cudaEventDestroy(made->marks[way][slot]);
  if (entered == TX_OK) (void)leave(made, before, TX_OK);
  free(made);
  *copy_ops = tx_copy_ops{};
}
