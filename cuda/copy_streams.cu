/* tx_copy_ops over two streams of a device: copies by the device's copy engines, marks as events. */
#include <stdlib.h>

#include "cuda/current_device.h"
#include "cuda/launch.h"

enum { TX_DOWN, TX_UP, TX_WAYS };

typedef struct tx_cuda_lanes {
  cudaStream_t streams[TX_WAYS];
  int64_t slots;
  int32_t device;
  cudaEvent_t *marks[TX_WAYS]; /* of each slot; NULL: it has none yet */
} tx_cuda_lanes;

/* The device is current in this scope, for waiting too; a thread of torch's pool may have none, or another one. */
static tx_status enter(const tx_cuda_lanes *lanes, int32_t *before, tx_error *error) {
  return tx_cuda_make_current(lanes->device, before, error);
}
static tx_status leave(const tx_cuda_lanes *lanes, int32_t before, tx_status status) {
  tx_cuda_put_back(lanes->device, before);
  return status;
}

static tx_status copy(void *ctx, int32_t up, void *to, const void *from, int64_t bytes, tx_error *error) {
  const tx_cuda_lanes *lanes = (const tx_cuda_lanes *)ctx;
  int32_t before = 0;
  TX_FORWARD(enter(lanes, &before, error));
  const cudaMemcpyKind kind = up ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
  const cudaError_t answer = cudaMemcpyAsync(to, from, (size_t)bytes, kind, lanes->streams[up ? TX_UP : TX_DOWN]);
  return leave(lanes, before, tx_cuda_answered(answer, up ? "copying to the device" : "copying to the host", error));
}

/* A slot is one thread's, so is its mark. */
static tx_status mark_of(const tx_cuda_lanes *lanes, int32_t up, int64_t slot, cudaEvent_t **mark, tx_error *error) {
  if (slot < 0 || slot >= lanes->slots)
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "slot %lld of lanes of %lld slots", (long long)slot,
                   (long long)lanes->slots);
  *mark = &lanes->marks[up ? TX_UP : TX_DOWN][slot];
  return TX_OK;
}

static tx_status mark(void *ctx, int32_t up, int64_t slot, tx_error *error) {
  const tx_cuda_lanes *lanes = (const tx_cuda_lanes *)ctx;
  cudaEvent_t *mark = NULL;
  int32_t before = 0;
  TX_FORWARD(mark_of(lanes, up, slot, &mark, error));
  TX_FORWARD(enter(lanes, &before, error));
  cudaError_t answer = cudaSuccess;
  if (!*mark) answer = cudaEventCreateWithFlags(mark, cudaEventDisableTiming);
  if (answer == cudaSuccess) answer = cudaEventRecord(*mark, lanes->streams[up ? TX_UP : TX_DOWN]);
  return leave(lanes, before, tx_cuda_answered(answer, "recording an event", error));
}

static tx_status wait(void *ctx, int32_t up, int64_t slot, tx_error *error) {
  const tx_cuda_lanes *lanes = (const tx_cuda_lanes *)ctx;
  cudaEvent_t *mark = NULL;
  int32_t before = 0;
  TX_FORWARD(mark_of(lanes, up, slot, &mark, error));
  if (!*mark) return TX_OK;
  TX_FORWARD(enter(lanes, &before, error));
  return leave(lanes, before, tx_cuda_answered(cudaEventSynchronize(*mark), "waiting for a copy", error));
}

static tx_status follow(void *ctx, int64_t slot, tx_error *error) {
  const tx_cuda_lanes *lanes = (const tx_cuda_lanes *)ctx;
  cudaEvent_t *mark = NULL;
  int32_t before = 0;
  TX_FORWARD(mark_of(lanes, TX_UP, slot, &mark, error));
  if (!*mark) return TX_OK;
  TX_FORWARD(enter(lanes, &before, error));
  const cudaError_t answer = cudaStreamWaitEvent(lanes->streams[TX_DOWN], *mark, 0);
  return leave(lanes, before, tx_cuda_answered(answer, "letting a stream wait", error));
}

tx_status tx_cuda_lanes_make(int32_t device, void *down, void *up, int64_t slots, tx_copy_ops *lanes, tx_error *error) {
  if (!lanes || slots < 1)
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "lanes is %s and slots is %lld; not NULL and >= 1 are legal",
                   lanes ? "given" : "NULL", (long long)slots);
  TX_FORWARD(tx_cuda_check_device(device, error));
  char *memory = (char *)calloc(1, sizeof(tx_cuda_lanes) + (size_t)(TX_WAYS * slots) * sizeof(cudaEvent_t));
  if (!memory) return tx_fail(error, TX_ERROR_OUT_OF_MEMORY, "no memory for %lld slots", (long long)slots);
  tx_cuda_lanes *made = (tx_cuda_lanes *)(void *)memory;
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
  *lanes = filled;
  return TX_OK;
}

void tx_cuda_lanes_free(tx_copy_ops *lanes) {
  if (!lanes || !lanes->ctx) return;
  tx_cuda_lanes *made = (tx_cuda_lanes *)lanes->ctx;
  int32_t before = 0;
  const tx_status entered = enter(made, &before, NULL);
  for (int way = 0; way < TX_WAYS; way++)
    for (int64_t slot = 0; slot < made->slots; slot++)
      if (made->marks[way][slot]) (void)cudaEventDestroy(made->marks[way][slot]);
  if (entered == TX_OK) (void)leave(made, before, TX_OK);
  free(made);
  *lanes = tx_copy_ops{};
}
