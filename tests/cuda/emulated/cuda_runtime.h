// The part of CUDA that cuda/ uses, emulated on the host: the same .cu files are compiled as C++ with this header in
// place of the toolkit's, and run on the CPU. Every thread of a block is a fiber, so shuffles, votes, barriers and
// atomics behave as on a device; blocks run one after the other. This is slow but exact, and under AddressSanitizer it
// finds every access of a kernel outside its tensors.
//
// A shuffle or barrier that is not reached by all threads of the warp (or block) ends the program with a message.
#ifndef TX_EMULATED_CUDA_RUNTIME_H
#define TX_EMULATED_CUDA_RUNTIME_H

#include <cstdint>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

extern thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

// -- the state that tests set up and inspect --------------------------------------------------------------------------

typedef int cudaError_t;
enum {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInsufficientDriver = 35,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorECCUncorrectable = 214,
  cudaErrorPeerAccessAlreadyEnabled = 704,
  cudaErrorIllegalAddress = 700,
  cudaErrorLaunchTimeout = 702,
  cudaErrorAssert = 710,
  cudaErrorHardwareStackError = 714,
  cudaErrorIllegalInstruction = 715,
  cudaErrorMisalignedAddress = 716,
  cudaErrorInvalidAddressSpace = 717,
  cudaErrorInvalidPc = 718,
  cudaErrorLaunchFailure = 719,
  cudaErrorStreamCaptureUnsupported = 900
};
typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;

namespace emulated {
// Memory that a lane has copied into shared memory.
struct Copied {
  const char *from;
  int64_t bytes;
};
struct World {
  int devices = 1;
  int current = 0;  // of the thread that made the world; others have none, which reads as 0, until they choose one
  std::thread::id maker = std::this_thread::get_id();
  uint64_t contexts = 0;       // bit d: device d has a primary context, which costs memory and start-up time
  bool driver_answers = true;  // to questions about contexts
  int driver = 13000;
  int runtime = 13000;
  int major = 9, minor = 0;
  int processors = 3;  // odd, so that tiles cannot be divided evenly
  int blocks_per_processor = 2;
  cudaError_t sticky = cudaSuccess;    // an error left behind by another caller's work
  cudaError_t left = cudaSuccess;      // the last error, until it is read
  cudaError_t no_image = cudaSuccess;  // the error of looking up a kernel
  bool capturing = false;              // whether any stream is being captured, in mode "global"
  std::set<const void *> loaded;       // kernels
  bool late = false;                   // copies are only made when something waits for a later event
  int events = 0;                      // events that exist
  int spinning_events = 0;             // events for which a waiting thread spins
  int launches = 0;
  int synchronisations = 0;
  int occupancy_queries = 0;
  uint32_t blocks = 0;             // blocks of the last launch
  int64_t largest_parameters = 0;  // largest size of a launch's parameters, in bytes
  std::vector<Copied> copied;      // asynchronous copies of all launches
  uint32_t copies = 1;             // seed of when they are made: at once, or when a lane waits for them
};
extern World world;
// Since CUDA 12, choosing a device creates its context, and so does any other work on it; this query does not.
bool HasContext(int device);
// The calling thread's capture mode.
int CaptureMode();
// A kernel is loaded at its first use. During a capture only a thread in relaxed mode may load one.
cudaError_t Load(const void *kernel);
// Makes a device with so many processors current. The library caches properties of a device, so each pair of arguments
// has its own ordinal, from 16 on.
void Use(int processors, int blocks_per_processor);
// The calling thread uses its device.
void Context();
// Runs `body` once for each thread of each block.
void Run(dim3 grid, dim3 block, const std::function<void()> &body);
}  // namespace emulated

// -- used by kernels --------------------------------------------------------------------------------------------------

namespace emulated {
// Every lane of the calling thread's warp contributes a 64-bit value. Returns the value of lane `from`, or the caller's
// own if there is no such lane. Waits for all lanes that have not returned.
uint64_t Exchange(uint64_t value, unsigned from);
uint32_t Vote(bool value);
void SyncThreads();
void SyncWarp();
// A copy of 16, 8 or 4 bytes, to which both addresses must be aligned, into shared memory. It is made now or as late as
// possible: when the lane waits for its copies. Until then `to` has other bytes, and no other copy may go there.
void CopyAsync(void *to, const void *from, int bytes);
void WaitForCopies();
// Copies since the last group become one. Waiting for groups makes all but those of the `later` newest ones.
void GroupCopies();
void WaitForGroups(int later);
unsigned Lane();

template <class T>
T Shuffle(T value, unsigned from) {
  static_assert(sizeof(T) <= 8, "");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = Exchange(bits, from);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
}  // namespace emulated

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask, int = 32) {
  return emulated::Shuffle(value, emulated::Lane() ^ static_cast<unsigned>(mask));
}
template <class T>
T __shfl_sync(unsigned, T value, int from, int width = 32) {
  const unsigned within = static_cast<unsigned>(width) - 1u;
  return emulated::Shuffle(value, (emulated::Lane() & ~within) | (static_cast<unsigned>(from) & within));
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned by, int = 32) {
  return emulated::Shuffle(value, emulated::Lane() + by);
}
inline uint32_t __ballot_sync(unsigned, int value) {
  return emulated::Vote(value != 0);
}
inline int __any_sync(unsigned, int value) {
  return emulated::Vote(value != 0) != 0u;
}
inline void __syncthreads() {
  emulated::SyncThreads();
}
inline void __syncwarp(unsigned = ~0u) {
  emulated::SyncWarp();
}
inline void __threadfence() {}

template <class T>
T atomicAdd(T *to, T by) {
  const T old = *to;
  *to += by;
  return old;
}
template <class T>
T atomicMin(T *to, T with) {
  const T old = *to;
  if (with < old) *to = with;
  return old;
}
template <class T>
T atomicMax(T *to, T with) {
  const T old = *to;
  if (with > old) *to = with;
  return old;
}
template <class T>
T atomicExch(T *to, T with) {
  const T old = *to;
  *to = with;
  return old;
}
inline unsigned atomicInc(unsigned *to, unsigned last) {
  const unsigned old = *to;
  *to = old >= last ? 0 : old + 1;
  return old;
}
inline unsigned atomicOr(unsigned *to, unsigned with) {
  const unsigned old = *to;
  *to |= with;
  return old;
}
inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}

// -- the runtime ------------------------------------------------------------------------------------------------------

#define CUDART_VERSION 13000
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76
};
enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone = 0,
  cudaStreamCaptureStatusActive = 1,
  cudaStreamCaptureStatusInvalidated = 2
};
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal = 0,
  cudaStreamCaptureModeThreadLocal = 1,
  cudaStreamCaptureModeRelaxed = 2
};
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess = 0, cudaDriverEntryPointSymbolNotFound = 1 };
enum { cudaEnableDefault = 0 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2, cudaMemcpyDeviceToDevice = 3 };
struct cudaFuncAttributes {
  int numRegs;
};
struct cudaLaunchAttribute;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute *attrs;
  unsigned numAttrs;
};

const char *cudaGetErrorName(cudaError_t error);
const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
cudaError_t cudaGetDeviceCount(int *n);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long flags, cudaDriverEntryPointQueryResult *found);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream);
enum { cudaEventBlockingSync = 1, cudaEventDisableTiming = 2 };
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream);

template <class T>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, T *kernel) {
  emulated::Context();
  const cudaError_t loaded = emulated::Load(reinterpret_cast<const void *>(kernel));
  if (loaded != cudaSuccess) return loaded;
  attributes->numRegs = 64;
  return emulated::world.no_image;
}
template <class T>
cudaError_t cudaGetSymbolAddress(void **address, T &symbol) {
  *address = &symbol;
  return cudaSuccess;
}
template <class T>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, T kernel, int, size_t) {
  emulated::Context();
  const cudaError_t loaded = emulated::Load(reinterpret_cast<const void *>(kernel));
  if (loaded != cudaSuccess) return loaded;
  emulated::world.occupancy_queries++;
  *blocks = emulated::world.blocks_per_processor;
  return cudaSuccess;
}
template <class... Parameters>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Parameters...),
                               const std::remove_reference_t<Parameters> &...arguments) {
  emulated::Context();
  if (emulated::world.sticky != cudaSuccess) return emulated::world.sticky;
  const cudaError_t loaded = emulated::Load(reinterpret_cast<const void *>(kernel));
  if (loaded != cudaSuccess) return loaded;
  emulated::world.launches++;
  emulated::world.blocks = config->gridDim.x;
  const int64_t bytes = (static_cast<int64_t>(sizeof arguments) + ... + 0);
  if (bytes > emulated::world.largest_parameters) emulated::world.largest_parameters = bytes;
  if (bytes > 32764) return cudaErrorInvalidValue;
  emulated::Run(config->gridDim, config->blockDim, [&] { kernel(arguments...); });
  return cudaSuccess;
}

#endif
