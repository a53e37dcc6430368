/* libtorch's stable C ABI in C. torch's own headers are C++ only, so the few functions that we call are declared here,
 * and tests/core/torch_abi_test.cc compares each declaration with torch's. Nothing is linked to torch: the symbols are
 * looked up in the libtorch_cpu that the process has loaded, which is why one binary works with every torch from
 * TX_TORCH_FLOOR on. */
#ifndef TX_TORCH_ABI_H
#define TX_TORCH_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "csrc/torch_ext.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t AOTITorchError; /* 0: success */
typedef uint64_t StableIValue;  /* one slot of a boxed stack */
typedef struct AtenTensorOpaque *AtenTensorHandle;
typedef struct TorchLibraryOpaque *TorchLibraryHandle;
typedef struct StableListOpaque *StableListHandle;

/* One function pointer per row of shims.def, named like its symbol. */
typedef struct tx_torch_abi {
#define TX_SHIM(result, symbol, parameters, major, minor) result(*symbol) parameters;
#define TX_SHIM_OPTIONAL(result, symbol, parameters, major, minor) TX_SHIM(result, symbol, parameters, major, minor)
#define TX_SHIM_DTYPE(dtype, name) TX_SHIM(int32_t, aoti_torch_dtype_##name, (void), 2, 9)
#include "csrc/torch/shims.def"
#undef TX_SHIM
#undef TX_SHIM_OPTIONAL
#undef TX_SHIM_DTYPE
} tx_torch_abi;

/* Functions of libtorch_cuda.so, looked up when a GPU is first used: aoti_torch_get_current_cuda_stream, and its guards
 * of the current device (aoti_torch_create_cuda_guard, aoti_torch_delete_cuda_guard). */
typedef AOTITorchError (*tx_torch_current_stream)(int32_t device_index, void **stream);
typedef AOTITorchError (*tx_torch_create_guard)(int32_t device_index, void **guard);
typedef AOTITorchError (*tx_torch_delete_guard)(void *guard);

/* The oldest supported torch, and the version whose prototypes are declared here: torch converts a boxed stack to the
 * layout of this version. A fixed number, never the running torch's. */
#define TX_TORCH_FLOOR_MAJOR 2
#define TX_TORCH_FLOOR_MINOR 10
#define TX_TORCH_BUILD_VERSION (((uint64_t)TX_TORCH_FLOOR_MAJOR << 56) | ((uint64_t)TX_TORCH_FLOOR_MINOR << 48))

/* Whether this process has loaded libtorch_cpu. */
bool tx_torch_is_loaded(void);

/* Looks up every symbol. TX_ERROR_UNAVAILABLE if torch is not loaded or a required symbol is missing; the message names
 * the symbol, the release that introduced it and the running torch. Not thread-safe on one `abi`. */
tx_status tx_torch_abi_resolve(tx_torch_abi *abi, tx_error *error);

#ifdef __cplusplus
}
#endif

#endif
