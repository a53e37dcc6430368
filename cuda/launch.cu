#include <atomic>
#include <cstdio>

#include "cuda/current_device.h"
#include "cuda/launch.h"

namespace {

/* Compute capabilities times 100, ascending: nvcc defines the list from its arguments. */
constexpr int kArchitectures[] = {__CUDA_ARCH_LIST__};
constexpr int kNewest = kArchitectures[sizeof kArchitectures / sizeof *kArchitectures - 1];
constexpr int32_t kMaxDevices = 64;

/* The number of SMs of each device that was found usable; 0: not checked yet. */
std::atomic<int32_t> usable_sms[kMaxDevices];

/* A cache of how many blocks of a kernel can be resident on an SM of each device; 0: not known yet. The first query for
 * a kernel claims a row, for good; if no row is free, the answer is not cached. All threads that write an entry write
 * the same value. */
struct occupancy {
  std::atomic<const void *> kernel;
  std::atomic<int32_t> blocks[kMaxDevices];
};
constexpr int kMaxKernels = 64;
occupancy occupancies[kMaxKernels];

/* NULL if there is no room. */
occupancy *occupancy_of(const void *kernel) {
  const size_t home = ((uintptr_t)kernel >> 4) % kMaxKernels;
  for (size_t i = 0; i < kMaxKernels; i++) {
    occupancy *const row = &occupancies[(home + i) % kMaxKernels];
    const void *holder = row->kernel.load(std::memory_order_relaxed);
    if (holder == kernel) return row;
    if (holder == NULL && row->kernel.compare_exchange_strong(holder, kernel, std::memory_order_relaxed)) return row;
    if (holder == kernel) return row;
  }
  return NULL;
}

/* Used only to query whether this library has machine code for the device. */
__global__ void image_probe() {}

void list_architectures(char *text, size_t size) {
  size_t at = 0;
  for (const int architecture : kArchitectures) {
    const int written = snprintf(text + at, size - at, "sm_%d ", architecture / 10);
    at += written > 0 && (size_t)written < size - at ? (size_t)written : 0;
  }
  (void)snprintf(text + at, size - at, "and PTX of %d.%d", kNewest / 100, kNewest % 100 / 10);
}

/* Whether this library runs on compute capability major.minor: it has machine code for the same major version and no
 * newer minor one, or its PTX is not newer than the device. */
bool runs_on(int major, int minor) {
  for (const int architecture : kArchitectures)
    if (architecture / 100 == major && architecture % 100 / 10 <= minor) return true;
  return 100 * major + 10 * minor >= kNewest;
}

tx_status check_driver(tx_error *error) {
  int driver = 0;
  (void)cudaDriverGetVersion(&driver);
  if (driver == 0)
    return tx_fail(error, TX_ERROR_UNAVAILABLE,
                   "there is no CUDA driver on this machine; this library was built with CUDA %d.%d and needs one that "
                   "runs it",
                   CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
  /* A driver runs libraries built with any minor version of its major version. */
  if (driver / 1000 < CUDART_VERSION / 1000)
    return tx_fail(error, TX_ERROR_UNAVAILABLE,
                   "the driver runs CUDA %d.%d and this library was built with CUDA %d.%d; a driver for CUDA %d.0 or "
                   "newer is needed",
                   driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10,
                   CUDART_VERSION / 1000);
  return TX_OK;
}

/* Errors after which nothing runs on the device any more; every later call reports them. */
bool is_fatal(cudaError_t error) {
  switch (error) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable:
      return true;
    default:
      return false;
  }
}

tx_status fail_of_earlier_work(cudaError_t left, tx_error *error) {
  return tx_fail(
      error, TX_ERROR_BAD_STATE,
      "earlier work on this device failed with %s (%s), and nothing was launched now; CUDA_LAUNCH_BLOCKING=1 "
      "shows which call it was",
      cudaGetErrorName(left), cudaGetErrorString(left));
}

/* An error that is not fatal is reported once; later calls work again. */
tx_status check_nothing_left(tx_error *error) {
  const cudaError_t left = cudaGetLastError();
  return left == cudaSuccess ? TX_OK : fail_of_earlier_work(left, error);
}

tx_status check_device(int32_t device, tx_error *error) {
  int n = 0, major = 0, minor = 0, processors = 0;
  char built[96];
  if (device >= 0 && device < kMaxDevices && usable_sms[device].load(std::memory_order_relaxed)) return TX_OK;
  TX_FORWARD(check_driver(error));
  const cudaError_t counted = cudaGetDeviceCount(&n);
  if (counted == cudaErrorNoDevice || (counted == cudaSuccess && n == 0))
    return tx_fail(error, TX_ERROR_UNAVAILABLE, "there is no CUDA device on this machine");
  TX_FORWARD(tx_cuda_answered(counted, "counting devices", error));
  if (device < 0 || device >= n || device >= kMaxDevices)
    return tx_fail(error, TX_ERROR_DEVICE, "device is %d; this machine has devices 0 to %d", (int)device, n - 1);
  TX_FORWARD(tx_cuda_answered(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
                              "querying the device's architecture", error));
  TX_FORWARD(tx_cuda_answered(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
                              "querying the device's architecture", error));
  TX_FORWARD(tx_cuda_answered(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
                              "querying the number of multiprocessors", error));
  list_architectures(built, sizeof built);
  if (!runs_on(major, minor))
    return tx_fail(error, TX_ERROR_UNAVAILABLE, "device %d is sm_%d%d; this library was built for %s", (int)device,
                   major, minor, built);
  usable_sms[device].store(processors, std::memory_order_relaxed);
  return TX_OK;
}

/* Note: a kernel is loaded when it is first queried or launched. If a thread captures a graph in torch's capture mode,
 * "global", such a load may end the capture, even one on another thread's stream, unless the loading thread's mode is
 * "relaxed". So a call switches its thread to "relaxed". A load adds nothing to the stream. */
tx_status relax(cudaStreamCaptureMode *before, tx_error *error) {
  *before = cudaStreamCaptureModeRelaxed;
  return tx_cuda_answered(cudaThreadExchangeStreamCaptureMode(before), "exchanging the capture mode", error);
}

/* mode: the one that relax() replaced. */
void put_mode_back(cudaStreamCaptureMode mode) {
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
}

/* Checks that the current device can run this library's kernels. */
tx_status look_for_kernels(tx_error *error) {
  cudaFuncAttributes attributes;
  cudaStreamCaptureMode mode;
  TX_FORWARD(relax(&mode, error));
  const cudaError_t image = cudaFuncGetAttributes(&attributes, image_probe);
  put_mode_back(mode);
  return tx_cuda_answered(image, "loading this library's kernels on the device", error);
}

}  // namespace

uint32_t tx_cuda_version(void) {
  return (uint32_t)TX_VERSION_MAJOR << 16 | (uint32_t)TX_VERSION_MINOR << 8 | (uint32_t)TX_VERSION_PATCH;
}

tx_status tx_cuda_answered(cudaError_t answer, const char *what, tx_error *error) {
  if (answer == cudaSuccess) return TX_OK;
  (void)cudaGetLastError(); /* so that the next caller of CUDA does not see it again; a fatal error stays */
  if (is_fatal(answer)) return fail_of_earlier_work(answer, error);
  return tx_fail(error, TX_ERROR_UNAVAILABLE, "%s failed with %s (%s)", what, cudaGetErrorName(answer),
                 cudaGetErrorString(answer));
}

tx_status tx_cuda_about_this(tx_cuda_about *about, tx_error *error) {
  if (!about || about->size != sizeof *about)
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "about.size is %llu; %llu is legal (use TX_CUDA_ABOUT_INIT)",
                   (unsigned long long)(about ? about->size : 0), (unsigned long long)sizeof *about);
  tx_error why;
  int driver = 0, n = 0;
  (void)cudaDriverGetVersion(&driver);
  if (driver == 0 || cudaGetDeviceCount(&n) != cudaSuccess) n = 0;
  about->runtime_version = CUDART_VERSION;
  about->driver_version = driver;
  about->n_devices = n;
  about->reserved = 0;
  list_architectures(about->architectures, sizeof about->architectures);
  about->why_not[0] = '\0';
  for (int32_t device = 0; device == 0 || device < n; device++) {
    if (check_device(device, &why) == TX_OK) {
      about->why_not[0] = '\0';
      break;
    }
    if (device == 0) (void)snprintf(about->why_not, sizeof about->why_not, "%s", why.message);
  }
  return TX_OK;
}

tx_status tx_cuda_check_device(int32_t device, tx_error *error) {
  int32_t before = 0;
  TX_FORWARD(check_device(device, error));
  TX_FORWARD(check_nothing_left(error));
  TX_FORWARD(tx_cuda_make_current(device, &before, error));
  const tx_status status = look_for_kernels(error);
  tx_cuda_put_back(device, before);
  return status;
}

tx_status tx_cuda_enter(const tx_cuda_call *call, tx_cuda_scope *scope, tx_error *error) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  if (!call || call->size != sizeof *call)
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "call.size is %llu; %llu is legal (use TX_CUDA_CALL_INIT)",
                   (unsigned long long)(call ? call->size : 0), (unsigned long long)sizeof *call);
  TX_FORWARD(check_device(call->device, error));
  TX_FORWARD(check_nothing_left(error));
  TX_FORWARD(tx_cuda_make_current(call->device, &scope->before, error));
  scope->stream = (cudaStream_t)call->stream;
  scope->device = call->device;
  scope->processors = usable_sms[call->device].load(std::memory_order_relaxed);
  scope->capturing = 0;
  tx_status status = relax(&scope->mode, error);
  if (status != TX_OK) {
    tx_cuda_put_back(scope->device, scope->before);
    return status;
  }
  status = tx_cuda_answered(cudaStreamIsCapturing(scope->stream, &capture),
                            "querying whether the stream is being captured", error);
  if (status != TX_OK) return tx_cuda_leave(scope, status);
  scope->capturing = capture != cudaStreamCaptureStatusNone;
  return TX_OK;
}

tx_status tx_cuda_leave(const tx_cuda_scope *scope, tx_status status) {
  put_mode_back(scope->mode);
  tx_cuda_put_back(scope->device, scope->before);
  return status;
}

tx_status tx_cuda_blocks_per_processor(const tx_cuda_scope *scope, const void *kernel, int32_t *blocks,
                                       const char *name, tx_error *error) {
  occupancy *const row = occupancy_of(kernel);
  int found = row ? row->blocks[scope->device].load(std::memory_order_relaxed) : 0;
  if (found == 0) {
    TX_FORWARD(tx_cuda_answered(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found, kernel, TX_BLOCK_THREADS, 0),
                                name, error));
    if (row) row->blocks[scope->device].store(found, std::memory_order_relaxed);
  }
  *blocks = found;
  return TX_OK;
}

uint32_t tx_cuda_blocks(const tx_cuda_scope *scope, int64_t tiles, int32_t per_processor) {
  const int64_t wanted = (tiles + TX_BLOCK_WARPS - 1) / TX_BLOCK_WARPS;
  const int64_t at_a_time = (int64_t)scope->processors * (per_processor > 0 ? per_processor : 1);
  return (uint32_t)(wanted < at_a_time ? wanted : at_a_time);
}
