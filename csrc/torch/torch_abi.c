#include "csrc/torch/torch_abi.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "csrc/core/status.h"

#define TX_LIBTORCH "libtorch_cpu.so"

/* torch is loaded with RTLD_LOCAL: RTLD_DEFAULT does not find its symbols, but its soname finds the loaded copy. */
static void *open_loaded_torch(void) {
  return dlopen(TX_LIBTORCH, RTLD_NOW | RTLD_NOLOAD);
}

bool tx_torch_is_loaded(void) {
  void *library = open_loaded_torch();
  if (!library) return false;
  dlclose(library);
  return true;
}

static void describe_running_torch(void *library, char *text, size_t size) {
  uint64_t (*abi_version)(void) = NULL;
  void *symbol = dlsym(library, "aoti_torch_abi_version");
  if (!symbol) {
    (void)snprintf(text, size, "the torch that is loaded (older than 2.8)");
    return;
  }
  memcpy(&abi_version, &symbol, sizeof symbol); /* ISO C has no cast from object to function pointer */
  const uint64_t version = abi_version();
  (void)snprintf(text, size, "torch %d.%d.%d, which is loaded,", (int)(version >> 56), (int)(version >> 48 & 0xff),
                 (int)(version >> 40 & 0xff));
}

typedef struct {
  const char *name;
  size_t slot; /* offset of the pointer in tx_torch_abi */
  int major, minor;
  bool optional;
} shim;

static const shim kShims[] = {
#define TX_SHIM(result, symbol, parameters, major, minor) \
  {#symbol, offsetof(tx_torch_abi, symbol), major, minor, false},
#define TX_SHIM_OPTIONAL(result, symbol, parameters, major, minor) \
  {#symbol, offsetof(tx_torch_abi, symbol), major, minor, true},
#define TX_SHIM_DTYPE(dtype, name) TX_SHIM(int32_t, aoti_torch_dtype_##name, (void), 2, 9)
#include "csrc/torch/shims.def"
#undef TX_SHIM
#undef TX_SHIM_OPTIONAL
#undef TX_SHIM_DTYPE
};

tx_status tx_torch_abi_resolve(tx_torch_abi *abi, tx_error *error) {
  void *library = open_loaded_torch();
  if (!library)
    return tx_fail(error, TX_ERROR_UNAVAILABLE, "torch is not loaded in this process (no %s): import torch first",
                   TX_LIBTORCH);
  tx_status status = TX_OK;
  for (size_t i = 0; i < sizeof kShims / sizeof *kShims && status == TX_OK; i++) {
    void *symbol = dlsym(library, kShims[i].name);
    if (!symbol && !kShims[i].optional) {
      char running[64];
      describe_running_torch(library, running, sizeof running);
      status = tx_fail(error, TX_ERROR_UNAVAILABLE,
                       "%s has no symbol %s (torch %d.%d brought it); torch >= %d.%d is needed", running,
                       kShims[i].name, kShims[i].major, kShims[i].minor, TX_TORCH_FLOOR_MAJOR, TX_TORCH_FLOOR_MINOR);
    }
    memcpy((char *)abi + kShims[i].slot, &symbol, sizeof symbol);
  }
  dlclose(library); /* only decrements the reference count: torch stays loaded */
  return status;
}
