/* libtorch_ext_cuda.so in this process: found beside this library, loaded when it is first needed. */
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

/* The library, which stays loaded as long as the process. TX_ERROR_UNAVAILABLE says what was looked for, or which
 * version was found; nothing is remembered then, and a later call looks again. Any thread. */
tx_status tx_cuda_library_load(const tx_cuda_library **library, tx_error *error);

#endif
