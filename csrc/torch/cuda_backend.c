/* libtorch_ext_cuda.so as a back end. It uses torch's current stream and device, and torch's memory for workspaces. */
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "csrc/core/status.h"
#include "csrc/torch/backend.h"
#include "csrc/torch/cuda_library.h"

#define TX_LIBTORCH_CUDA "libtorch_cuda.so"

/* -- torch's stream --------------------------------------------------------------------------------------------------
 */

static tx_torch_current_stream current_stream;
static tx_torch_create_guard create_guard;
static tx_torch_delete_guard delete_guard;
static pthread_once_t looked_for_stream = PTHREAD_ONCE_INIT;

/* Called when tensors on a GPU exist, so torch's CUDA library is loaded by now, if ever. */
static void look_for_stream(void) {
  void *library = dlopen(TX_LIBTORCH_CUDA, RTLD_NOW | RTLD_NOLOAD);
  if (!library) return;
  void *symbol = dlsym(library, "aoti_torch_get_current_cuda_stream");
  memcpy(&current_stream, &symbol, sizeof symbol);
  symbol = dlsym(library, "aoti_torch_delete_cuda_guard");
  memcpy(&delete_guard, &symbol, sizeof symbol);
  symbol = delete_guard ? dlsym(library, "aoti_torch_create_cuda_guard") : NULL;
  memcpy(&create_guard, &symbol, sizeof symbol);
  dlclose(library); /* only decrements the reference count */
}

static tx_status stream_of(int32_t device, void **stream, tx_error *error) {
  (void)pthread_once(&looked_for_stream, look_for_stream);
  if (!current_stream)
    return tx_fail(error, TX_ERROR_UNAVAILABLE,
                   "this torch has no CUDA: no aoti_torch_get_current_cuda_stream in " TX_LIBTORCH_CUDA
                   ", or no such file loaded (a build for ROCm?)");
  if (current_stream(device, stream))
    return tx_fail(error, TX_ERROR_UNAVAILABLE, "torch could not tell its current stream of cuda:%d", (int)device);
  return TX_OK;
}

/* -- torch's device --------------------------------------------------------------------------------------------------
 */

/* Makes the device current through torch. Where CUDA's own call would create a context, torch only remembers a thread's
 * device, so torch must change it; our library then finds its device current. NULL if torch cannot: then our library
 * changes it. */
static void *hold_device(const tx_target *target) {
  void *guard = NULL;
  return create_guard && !create_guard(target->device, &guard) ? guard : NULL;
}

static void release_device(void *guard) {
  if (guard) (void)delete_guard(guard);
}

/* -- torch's memory --------------------------------------------------------------------------------------------------
 */

/* Allocates a workspace from torch's caching allocator, on the current stream. It can be freed right after the launch:
 * whatever gets the memory next on this stream runs later, also in a replay of a captured graph. */
static tx_status take_workspace(const tx_target *target, int64_t bytes, AtenTensorHandle *tensor, tx_cuda_call *call,
                                tx_error *error) {
  const tx_torch_abi *abi = target->abi;
  const int64_t stride = 1;
  if (abi->aoti_torch_empty_strided(1, &bytes, &stride, abi->aoti_torch_dtype_uint8(),
                                    abi->aoti_torch_device_type_cuda(), target->device, tensor))
    return tx_fail(error, TX_ERROR_OUT_OF_MEMORY, "torch has no %lld bytes for a workspace on cuda:%d",
                   (long long)bytes, (int)target->device);
  call->workspace_bytes = bytes;
  if (!abi->torch_get_mutable_data_ptr(*tensor, &call->workspace)) return TX_OK;
  return tx_fail(error, TX_ERROR_UNAVAILABLE, "torch gave a workspace on cuda:%d without memory", (int)target->device);
}

/* Which dtypes of masters make a call need a workspace, for what it finds when it compares checksums. A step that
 * resyncs needs none. */
enum tx_workspace_rule { TX_WORKSPACE_NEVER, TX_WORKSPACE_IF_F32, TX_WORKSPACE_IF_ANY };
static bool tx_needs_workspace(int64_t n, const tx_tensor *masters, const tx_tensor *checksums,
                               enum tx_workspace_rule rule) {
  if (rule == TX_WORKSPACE_NEVER) return false;
  for (int64_t i = 0; masters && checksums && i < n; i++)
    if (checksums[i].numel && masters[i].numel && (rule == TX_WORKSPACE_IF_ANY || masters[i].dtype == TX_F32))
      return true;
  return false;
}

/* -- the table -------------------------------------------------------------------------------------------------------
 */

static tx_cuda_call call_of(const tx_target *target) {
  tx_cuda_call call = TX_CUDA_CALL_INIT;
  call.stream = target->stream;
  call.device = target->device;
  return call;
}

static tx_status fail_host_only(const char *operator_name, const tx_target *target, tx_error *error) {
  return tx_fail(error, TX_ERROR_UNAVAILABLE,
                 "%s has no kernel for GPUs, and got tensors on cuda:%d; tensors on the CPU are legal", operator_name,
                 (int)target->device);
}

#define TX_ENTRY(entry, parameters, arguments)                                                 \
  static tx_status run_##entry(TX_LIST parameters, const tx_target *target, tx_error *error) { \
    const tx_cuda_call call = call_of(target);                                                 \
    void *const guard = hold_device(target);                                                   \
    const tx_status status = target->library->entry(TX_LIST arguments, &call, error);          \
    release_device(guard);                                                                     \
    return status;                                                                             \
  }
#define TX_ENTRY_WORKS(entry, parameters, arguments, count, masters, checksums, masters_rule)       \
  static tx_status run_##entry(TX_LIST parameters, const tx_target *target, tx_error *error) {      \
    tx_cuda_call call = call_of(target);                                                            \
    void *const guard = hold_device(target);                                                        \
    AtenTensorHandle workspace = NULL;                                                              \
    tx_status status = TX_OK;                                                                       \
    if (tx_needs_workspace(count, masters, checksums, masters_rule))                                \
      status = take_workspace(target, target->library->workspace(count), &workspace, &call, error); \
    if (status == TX_OK) status = target->library->entry(TX_LIST arguments, &call, error);          \
    if (workspace) (void)target->abi->aoti_torch_delete_tensor_object(workspace);                   \
    release_device(guard);                                                                          \
    return status;                                                                                  \
  }
#define TX_ENTRY_HOST(entry, parameters, arguments)                                            \
  static tx_status run_##entry(TX_LIST parameters, const tx_target *target, tx_error *error) { \
    return fail_host_only(#entry "_", target, error);                                          \
  }
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter" /* of entries that are rejected */
#include "csrc/torch/entries.def"
#pragma GCC diagnostic pop

static const tx_backend kBackend = {
#define TX_ENTRY(entry, parameters, arguments) .entry = run_##entry,
#include "csrc/torch/entries.def"
};

tx_status tx_cuda_target(const tx_torch_abi *abi, int32_t device, tx_target *target, tx_error *error) {
  *target = (tx_target){.backend = &kBackend, .abi = abi, .device = device};
  TX_FORWARD(tx_cuda_library_load(&target->library, error));
  return stream_of(device, &target->stream, error);
}
