/* The optimizer step, on the host, for parameters that are not in host memory. */
#ifndef TORCH_EXT_STAGING_H
#define TORCH_EXT_STAGING_H

#include "torch_ext_operators.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Copies between the host and the memory of the parameters and gradients. The functions are called by several threads
 * at a time, each with its own slots. They return TX_OK, or fail with a message, which ends the step. `up` is the
 * direction: 1 from the host to the parameters, 0 to the host. Copies in one direction are done in the order in which
 * they were requested. */
typedef struct tx_copy_ops {
  uint64_t size;
  void *ctx;
  /* Starts a copy. */
  tx_status (*copy)(void *ctx, int32_t up, void *to, const void *from, int64_t bytes, tx_error *error);
  /* Sets the slot's mark for this direction: it covers everything requested so far in this direction. */
  tx_status (*mark)(void *ctx, int32_t up, int64_t slot, tx_error *error);
  /* Returns when everything that the slot's mark covers is done; at once if there is no mark. */
  tx_status (*wait)(void *ctx, int32_t up, int64_t slot, tx_error *error);
  /* Copies to the host that are requested from now on start after everything that the slot's mark for `up` covers. */
  tx_status (*follow)(void *ctx, int64_t slot, tx_error *error);
} tx_copy_ops;
#define TX_COPY_OPS_INIT \
  { sizeof(tx_copy_ops), NULL, NULL, NULL, NULL, NULL }

/* The workspace that holds batches of elements while they are stepped. */
#define TX_MAX_SLOTS 8
typedef struct tx_staging {
  uint64_t size;
  const tx_copy_ops *copy_ops; /* NULL: params and grads are in host memory too; each thread does its own copies */
  void *memory;  /* host memory, aligned to 64 bytes; its content is arbitrary before and after the call */
  int64_t bytes; /* >= threads * slots * batch * (bytes of the widest gradient + of the widest weight) */
  int64_t batch; /* elements per batch; a multiple of TX_SAMPLED */
  int32_t slots; /* batches in flight per thread: 1 ... TX_MAX_SLOTS */
  int32_t reserved;
} tx_staging;
#define TX_STAGING_INIT \
  { .size = sizeof(tx_staging), .slots = 1 }

/* tx_adamw for parameters and gradients that copy_ops copies, as from a GPU; gives the same bits. The addresses of
 * params and grads are only passed to copy_ops; all other memory is the host's. Gradients are copied to the host and
 * weights back. Weights are copied to the host too if they have no master, or a remainder in place of one. So
 * on_external_write can compare checksums only of weights with remainders; checksums of weights with F32 masters are
 * just renewed. TX_EXTERNAL_CHECK is not legal.
 *
 * When the call returns, weights may still be on their way back. The next call may use the same staging memory if its
 * slots are as large and the widest dtypes are the same; otherwise wait until the copies are done. If a copy fails,
 * some elements have been stepped and others not, and no count in `steps` has changed. */
TX_API tx_status tx_adamw_offloaded(const tx_adamw_args *args, const tx_staging *staging, const tx_parallel *parallel,
                                    tx_error *error);

/* memcpy, on this thread, for large amounts of memory that are not in the cache. It prefetches the target before
 * writing it, which takes a quarter less time if the target is not in the cache. */
TX_API void tx_copy(void *to, const void *from, int64_t bytes);

/* memcpy, on this thread, for a target that is not read soon and was not allocated just now. It writes past the caches,
 * which takes a ninth less time. */
TX_API void tx_copy_nontemporal(void *to, const void *from, int64_t bytes);

#ifdef __cplusplus
}
#endif

#endif
