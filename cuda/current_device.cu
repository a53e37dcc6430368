#include <atomic>

#include "cuda/current_device.h"
#include "cuda/launch.h"

namespace {

/* The driver's cuDevicePrimaryCtxGetState: the runtime has no such query that does not create a context. */
typedef int (*context_state)(int device, unsigned *flags, int *active);
std::atomic<context_state> known_context_state;

context_state look_for_context_state() {
#if CUDART_VERSION >= 12050
  void *function = NULL;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const unsigned since = 7000;
  const cudaError_t answer =
      cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &function, since, cudaEnableDefault, &found);
  if (answer == cudaSuccess && found == cudaDriverEntryPointSuccess) return (context_state)function;
  (void)cudaGetLastError(); /* so that the next caller of CUDA does not see this error */
#endif
  return NULL;
}

/* True also if the driver cannot be queried. */
bool may_have_context(int32_t device) {
  context_state state = known_context_state.load(std::memory_order_relaxed);
  if (!state) {
    state = look_for_context_state();
    known_context_state.store(state, std::memory_order_relaxed);
  }
  unsigned flags = 0;
  int active = 1;
  return !state || state(device, &flags, &active) != 0 || active != 0;
}

}  // namespace

tx_status tx_cuda_make_current(int32_t device, int32_t *before, tx_error *error) {
  int current = 0;
  TX_FORWARD(tx_cuda_answered(cudaGetDevice(&current), "querying the current device", error));
  *before = current;
  if (current == device) return TX_OK;
  return tx_cuda_answered(cudaSetDevice(device), "making the device current", error);
}

void tx_cuda_put_back(int32_t device, int32_t before) {
  if (before != device && may_have_context(before)) (void)cudaSetDevice(before);
}

tx_status tx_cuda_exchange_capture_mode(int32_t *mode, tx_error *error) {
  if (!mode) return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "mode is NULL");
  if (*mode < cudaStreamCaptureModeGlobal || *mode > cudaStreamCaptureModeRelaxed)
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "mode is %d; 0 (global), 1 (thread local) and 2 (relaxed) are legal",
                   (int)*mode);
  cudaStreamCaptureMode exchanged = (cudaStreamCaptureMode)*mode;
  TX_FORWARD(tx_cuda_answered(cudaThreadExchangeStreamCaptureMode(&exchanged), "exchanging the capture mode", error));
  *mode = (int32_t)exchanged;
  return TX_OK;
}
