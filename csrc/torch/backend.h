/* What runs an operator: the CPU's functions, or those of the library for GPUs. Adapters call through one table. */
#ifndef TX_TORCH_BACKEND_H
#define TX_TORCH_BACKEND_H

#include "csrc/torch/torch_abi.h"

typedef struct tx_target tx_target;

/* Without the parentheses around a row's list. */
#define TX_LIST(...) __VA_ARGS__

typedef struct tx_backend {
#define TX_ENTRY(entry, parameters, arguments) \
  tx_status (*entry)(TX_LIST parameters, const tx_target *target, tx_error *error);
#include "csrc/torch/entries.def"
} tx_backend;

/* Where a call runs. */
struct tx_target {
  const tx_backend *backend;
  void *order; /* as in tx_adamw_args */
  int64_t order_bytes;
  const tx_parallel *parallel; /* the CPU's */
  const tx_torch_abi *abi;     /* from here on: a GPU's */
  const struct tx_cuda_library *library;
  void *stream;
  int32_t device;
};

tx_target tx_cpu_target(const tx_parallel *parallel);

/* On torch's current stream of the device, which need not be torch's current device. The first call looks for the
 * library and loads it. TX_ERROR_UNAVAILABLE where there is none, or one of another version, or where torch has no
 * CUDA. Any thread. */
tx_status tx_cuda_target(const tx_torch_abi *abi, int32_t device, tx_target *target, tx_error *error);

#endif
