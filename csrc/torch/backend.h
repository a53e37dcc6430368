/* The back ends that run an operator: the CPU's functions, or those of the CUDA library. Adapters call through one
 * table. */
#ifndef TX_TORCH_BACKEND_H
#define TX_TORCH_BACKEND_H

#include "csrc/torch/torch_abi.h"

typedef struct tx_target tx_target;

/* Removes the parentheses around a list in a row. */
#define TX_LIST(...) __VA_ARGS__

typedef struct tx_backend {
#define TX_ENTRY(entry, parameters, arguments) \
  tx_status (*entry)(TX_LIST parameters, const tx_target *target, tx_error *error);
#include "csrc/torch/entries.def"
} tx_backend;

/* The back end of a call and what it needs. */
struct tx_target {
  const tx_backend *backend;
  void *notes; /* as in tx_adamw_args */
  int64_t notes_bytes;
  const tx_parallel *parallel; /* for the CPU back end */
  const tx_torch_abi *abi;     /* this and the following: for the CUDA back end */
  const struct tx_cuda_library *library;
  void *stream;
  int32_t device;
};

tx_target tx_cpu_target(const tx_parallel *parallel);

/* A target on torch's current stream of the device, which need not be torch's current device. The first call finds and
 * loads the library. TX_ERROR_UNAVAILABLE if there is none, it has another version, or torch has no CUDA. May be called
 * from any thread. */
tx_status tx_cuda_target(const tx_torch_abi *abi, int32_t device, tx_target *target, tx_error *error);

#endif
