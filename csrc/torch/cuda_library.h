/* libtorch_ext_cuda.so in this process: found next to this library, loaded when it is first needed. */
#ifndef TX_TORCH_CUDA_LIBRARY_H
#define TX_TORCH_CUDA_LIBRARY_H

#include "csrc/torch_ext_cuda.h"

/* One function pointer per entry. */
typedef struct tx_cuda_library {
#define TX_ENTRY_HOST(entry, parameters, arguments)
#define TX_ENTRY(entry, parameters, arguments) __typeof__(tx_cuda_##entry) *entry;
#include "csrc/torch/entries.def"
  __typeof__(tx_cuda_workspace) *workspace;
} tx_cuda_library;

/* Returns the library, loading it first if needed; it stays loaded until the process ends. TX_ERROR_UNAVAILABLE says
 * what was looked for, or which version was found; a failure is not remembered, and a later call tries again. May be
 * called from any thread. */
tx_status tx_cuda_library_load(const tx_cuda_library **library, tx_error *error);

#endif
