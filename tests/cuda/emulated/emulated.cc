// The emulated CUDA (cuda_runtime.h): fibers, the threads and barriers of a block, devices, streams and events.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "tests/cuda/emulated/cuda_runtime.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulated {
World world;

void Use(int processors, int blocks_per_processor) {
  static std::vector<std::pair<int, int>> kinds;
  const std::pair<int, int> kind(processors, blocks_per_processor);
  const auto found = std::find(kinds.begin(), kinds.end(), kind);
  const int index = static_cast<int>(found - kinds.begin());
  if (found == kinds.end()) kinds.push_back(kind);
  world.devices = 64;
  world.current = 16 + index;
  world.processors = processors;
  world.blocks_per_processor = blocks_per_processor;
}

namespace {

constexpr unsigned kWarp = 32;
constexpr size_t kStack = 256 * 1024;

// The saved state of a fiber that is not running.
struct Context {
#if defined(__x86_64__)
  void *stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
};

#if defined(__x86_64__)
// Switches the stack and the registers that a callee has to preserve. (Kernels do not change the floating-point mode.)
__asm__(
    ".text\n.p2align 4\n.type tx_emulated_switch,@function\ntx_emulated_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq (%rsi),%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
    ".size tx_emulated_switch,.-tx_emulated_switch\n");
extern "C" void tx_emulated_switch(Context *from, const Context *to);
#else
void tx_emulated_switch(Context *from, const Context *to) {
  swapcontext(&from->context, &to->context);
}
#endif

// A barrier for all threads of a warp, or of a block, that have not returned.
struct Barrier {
  unsigned arrived = 0;
  unsigned live = 0;
  uint64_t generation = 0;
  const char *what = nullptr;

  void ReleaseIfAll() {
    if (arrived == 0 || arrived < live) return;
    arrived = 0;
    what = nullptr;
    generation++;
  }
};

struct Warp {
  Barrier barrier;
  uint64_t values[2][kWarp] = {};  // of two consecutive exchanges: a lane is never more than one exchange ahead
};

struct Copy {
  char *to;
  const char *from;
  size_t bytes;
  int group;
  bool at_once;  // it was made when it began
};

struct Fiber {
  Context context;
  dim3 thread;
  unsigned lane = 0;
  Warp *warp = nullptr;
  uint64_t exchanges = 0;
  std::vector<Copy> copies;  // asynchronous copies that the lane has not waited for
  int group = 0;             // of the next copy
  bool done = false;
  std::unique_ptr<char[]> stack{new char[kStack]};
#if defined(__SANITIZE_ADDRESS__)
  void *fake_stack = nullptr;
#endif
};

// The block that is being run.
struct Block {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Warp> warps;
  Barrier barrier;
  Context scheduler;
  Fiber *current = nullptr;
  const std::function<void()> *body = nullptr;
#if defined(__SANITIZE_ADDRESS__)
  void *scheduler_fake_stack = nullptr;
  const void *scheduler_stack = nullptr;
  size_t scheduler_stack_size = 0;
#endif
};
Block block;

[[noreturn]] void Fail(const char *what) {
  std::fprintf(stderr, "emulated CUDA: %s, block %u, thread %u\n", what, blockIdx.x,
               block.current ? block.current->thread.x : 0u);
  std::abort();
}

void ToScheduler(bool finished) {
  Fiber *self = block.current;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(finished ? nullptr : &self->fake_stack, block.scheduler_stack,
                                 block.scheduler_stack_size);
#else
  (void)finished;
#endif
  tx_emulated_switch(&self->context, &block.scheduler);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(self->fake_stack, &block.scheduler_stack, &block.scheduler_stack_size);
#endif
}

void ToFiber(Fiber *fiber) {
  block.current = fiber;
  threadIdx = fiber->thread;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&block.scheduler_fake_stack, fiber->stack.get(), kStack);
#endif
  tx_emulated_switch(&block.scheduler, &fiber->context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(block.scheduler_fake_stack, nullptr, nullptr);
#endif
}

extern "C" void tx_emulated_entry() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_stack, &block.scheduler_stack_size);
#endif
  (*block.body)();
  Fiber *self = block.current;
  self->done = true;
  for (Barrier *barrier : {&self->warp->barrier, &block.barrier}) {
    barrier->live--;
    barrier->ReleaseIfAll();
  }
  ToScheduler(true);
  Fail("a thread that returned went on");
}

void Prepare(Fiber *fiber) {
  fiber->done = false;
  fiber->exchanges = 0;
  fiber->copies.clear();
  fiber->group = 0;
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(fiber->stack.get(), kStack);  // frames of the previous block
#endif
#if defined(__x86_64__)
  // As if tx_emulated_switch had been called from the entry function: six registers, the return address, an aligned
  // stack.
  auto top = reinterpret_cast<uintptr_t>(fiber->stack.get() + kStack) & ~uintptr_t{15};
  auto *stack = reinterpret_cast<void **>(top);
  *--stack = nullptr;
  *--stack = reinterpret_cast<void *>(&tx_emulated_entry);
  for (int i = 0; i < 6; i++)
    *--stack = nullptr;
  fiber->context.stack_pointer = stack;
#else
  getcontext(&fiber->context.context);
  fiber->context.context.uc_stack.ss_sp = fiber->stack.get();
  fiber->context.context.uc_stack.ss_size = kStack;
  fiber->context.context.uc_link = nullptr;
  makecontext(&fiber->context.context, &tx_emulated_entry, 0);
#endif
}

void Wait(Barrier *barrier, const char *what) {
  if (barrier->what && std::strcmp(barrier->what, what) != 0) Fail("threads of a warp diverge at a collective");
  barrier->what = what;
  barrier->arrived++;
  const uint64_t generation = barrier->generation;
  barrier->ReleaseIfAll();
  while (barrier->generation == generation)
    ToScheduler(false);
}

void RunBlock() {
  unsigned live = static_cast<unsigned>(block.fibers.size());
  for (Warp &warp : block.warps)
    warp = Warp();
  block.barrier = Barrier();
  block.barrier.live = live;
  for (auto &fiber : block.fibers) {
    Prepare(fiber.get());
    fiber->warp->barrier.live++;
  }
  for (int idle = 0; live > 0;) {
    const uint64_t before = block.barrier.generation;
    uint64_t warps_before = 0, warps_after = 0;
    const unsigned live_before = live;
    for (Warp &warp : block.warps)
      warps_before += warp.barrier.generation;
    for (auto &fiber : block.fibers) {
      if (fiber->done) continue;
      ToFiber(fiber.get());
      if (fiber->done) live--;
    }
    for (Warp &warp : block.warps)
      warps_after += warp.barrier.generation;
    const bool moved = live != live_before || before != block.barrier.generation || warps_before != warps_after;
    idle = moved ? 0 : idle + 1;
    if (idle > 2) Fail("threads wait for each other at different collectives");
  }
}

}  // namespace

void Run(dim3 grid, dim3 threads, const std::function<void()> &body) {
  const unsigned n = threads.x;
  if (n % kWarp != 0 || threads.y != 1 || threads.z != 1 || grid.y != 1 || grid.z != 1)
    Fail("only whole warps in one dimension are emulated");
  block.warps.assign(n / kWarp, Warp());
  while (block.fibers.size() < n)
    block.fibers.push_back(std::make_unique<Fiber>());
  block.fibers.resize(n);
  for (unsigned i = 0; i < n; i++) {
    block.fibers[i]->thread = dim3(i);
    block.fibers[i]->lane = i % kWarp;
    block.fibers[i]->warp = &block.warps[i / kWarp];
  }
  block.body = &body;
  blockDim = threads;
  gridDim = grid;
  for (unsigned b = 0; b < grid.x; b++) {
    blockIdx = dim3(b);
    RunBlock();
  }
  block.current = nullptr;
}

unsigned Lane() {
  return block.current->lane;
}

uint64_t Exchange(uint64_t value, unsigned from) {
  Fiber *self = block.current;
  const unsigned turn = self->exchanges++ & 1u;
  self->warp->values[turn][self->lane] = value;
  Wait(&self->warp->barrier, "shuffle or vote");
  const uint64_t result = from < kWarp ? self->warp->values[turn][from] : value;
  return result;
}

uint32_t Vote(bool value) {
  Fiber *self = block.current;
  const unsigned turn = self->exchanges++ & 1u;
  self->warp->values[turn][self->lane] = value;
  Wait(&self->warp->barrier, "shuffle or vote");
  uint32_t votes = 0;
  for (unsigned i = 0; i < kWarp; i++)
    votes |= self->warp->values[turn][i] != 0 ? 1u << i : 0u;
  return votes;
}

void SyncWarp() {
  Wait(&block.current->warp->barrier, "__syncwarp");
}

void CopyAsync(void *to, const void *from, int bytes) {
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from);
  if ((bytes != 16 && bytes != 8 && bytes != 4) || addresses % static_cast<unsigned>(bytes) != 0)
    Fail("an odd asynchronous copy");
  // See Note [aligned cells] in cuda/async_copy.h.
  if (bytes == 16 && (reinterpret_cast<uintptr_t>(to) - 16 * Lane()) % 128 != 0) Fail("copies that read sectors twice");
  world.copies = world.copies * 1664525u + 1013904223u;
  const Copy copy = {static_cast<char *>(to), static_cast<const char *>(from), static_cast<size_t>(bytes),
                     block.current->group, world.copies >> 31 != 0};
  for (const Copy &other : block.current->copies)
    if (copy.to < other.to + other.bytes && other.to < copy.to + copy.bytes)
      Fail("two copies to one place, which may be made in any order");
  world.copied.push_back({copy.from, bytes});
  if (copy.at_once) {
    std::memcpy(to, from, copy.bytes);
  } else {
    std::memset(to, 0xa5, copy.bytes);
  }
  block.current->copies.push_back(copy);
}

static void MakeCopiesBefore(int group) {
  std::vector<Copy> later;
  for (const Copy &copy : block.current->copies) {
    if (copy.group >= group) {
      later.push_back(copy);
    } else if (!copy.at_once) {
      std::memcpy(copy.to, copy.from, copy.bytes);
    }
  }
  block.current->copies = later;
}

void WaitForCopies() {
  MakeCopiesBefore(block.current->group + 1);
}

void GroupCopies() {
  block.current->group++;
}

void WaitForGroups(int later) {
  MakeCopiesBefore(block.current->group - later);
}

void SyncThreads() {
  Wait(&block.barrier, "__syncthreads");
}

}  // namespace emulated

// -- the runtime ------------------------------------------------------------------------------------------------------

using emulated::world;

const char *cudaGetErrorName(cudaError_t error) {
  return error == cudaSuccess ? "cudaSuccess" : "cudaErrorEmulated";
}
const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "an emulated error";
}
cudaError_t cudaPeekAtLastError() {
  return world.sticky != cudaSuccess ? world.sticky : world.left;
}
cudaError_t cudaGetLastError() {
  const cudaError_t last = cudaPeekAtLastError();
  world.left = cudaSuccess;
  return last;
}
cudaError_t cudaGetDeviceCount(int *n) {
  *n = world.devices;
  return world.driver == 0 ? cudaErrorInsufficientDriver : world.devices ? cudaSuccess : cudaErrorNoDevice;
}
namespace {
std::recursive_mutex world_mutex;
thread_local int chosen = 0;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

int *Current() {
  return std::this_thread::get_id() == world.maker ? &world.current : &chosen;
}

// Stands in for cuDevicePrimaryCtxGetState.
int ContextState(int device, unsigned *flags, int *active) {
  *flags = 0;
  *active = emulated::HasContext(device);
  return world.driver_answers ? 0 : 999;
}
}  // namespace

bool emulated::HasContext(int device) {
  const std::lock_guard<std::recursive_mutex> lock(world_mutex);
  return (world.contexts >> device & 1u) != 0;
}
void emulated::Context() {
  const std::lock_guard<std::recursive_mutex> lock(world_mutex);
  world.contexts |= uint64_t{1} << *Current();
}
int emulated::CaptureMode() {
  return capture_mode;
}
cudaError_t emulated::Load(const void *kernel) {
  const std::lock_guard<std::recursive_mutex> lock(world_mutex);
  if (world.capturing && capture_mode != cudaStreamCaptureModeRelaxed && world.loaded.count(kernel) == 0)
    return cudaErrorStreamCaptureUnsupported;
  world.loaded.insert(kernel);
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
  *device = *Current();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= world.devices) return cudaErrorInvalidDevice;
  *Current() = device;
  emulated::Context();
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *found) {
  const bool known = std::strcmp(symbol, "cuDevicePrimaryCtxGetState") == 0;
  *function = known ? reinterpret_cast<void *>(&ContextState) : nullptr;
  *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) {
  *version = world.driver;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) {
  *version = world.runtime;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
  if (device < 0 || device >= world.devices) return cudaErrorInvalidDevice;
  *value = attribute == cudaDevAttrMultiProcessorCount      ? world.processors
           : attribute == cudaDevAttrComputeCapabilityMajor ? world.major
                                                            : world.minor;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
  emulated::Context();
  *status = world.capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return world.sticky;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) {
  emulated::Context();
  world.synchronisations++;
  return world.sticky;
}

// The work queued on streams while the world is late.
struct CUevent_st {
  cudaStream_t stream = nullptr;
  size_t upto = 0;  // number of the stream's tasks before the event
};
namespace {
struct Queue {
  std::deque<std::function<void()>> tasks;
  size_t done = 0;  // of all tasks ever queued, counted as in `upto`
};
std::recursive_mutex queues_mutex;
std::map<cudaStream_t, Queue> queues;

void Queued(cudaStream_t stream, std::function<void()> task) {
  const std::lock_guard<std::recursive_mutex> lock(queues_mutex);
  queues[stream].tasks.push_back(std::move(task));
}
void RunTasksUpTo(CUevent_st event) {
  const std::lock_guard<std::recursive_mutex> lock(queues_mutex);
  Queue &queue = queues[event.stream];
  while (queue.done < event.upto) {
    const std::function<void()> task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    queue.done++;
    task();
  }
}
}  // namespace

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  emulated::Context();
  if (world.late) {
    Queued(stream, [=] { std::memcpy(to, from, bytes); });
  } else {
    std::memcpy(to, from, bytes);
  }
  return world.sticky;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  emulated::Context();
  *event = new CUevent_st;
  const std::lock_guard<std::recursive_mutex> lock(queues_mutex);
  world.events++;
  world.spinning_events += (flags & cudaEventBlockingSync) == 0 ? 1 : 0;
  return world.sticky;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  emulated::Context();
  delete event;
  const std::lock_guard<std::recursive_mutex> lock(queues_mutex);
  world.events--;
  return world.sticky;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  emulated::Context();
  const std::lock_guard<std::recursive_mutex> lock(queues_mutex);
  const Queue &queue = queues[stream];
  *event = {stream, queue.done + queue.tasks.size()};
  return world.sticky;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  emulated::Context();
  RunTasksUpTo(*event);
  return world.sticky;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  emulated::Context();
  Queued(stream, [as_recorded = *event] { RunTasksUpTo(as_recorded); });
  return world.sticky;
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t) {
  emulated::Context();
  std::memset(to, value, bytes);
  return world.sticky;
}
