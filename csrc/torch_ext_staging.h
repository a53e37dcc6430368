/* The step of parameters that are not in host memory. */
#ifndef TORCH_EXT_STAGING_H
#define TORCH_EXT_STAGING_H

#include "torch_ext_operators.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How parameters and gradients that lie elsewhere come to the host and go back. Functions are called by several threads
 * at a time, each with slots of its own; they return TX_OK, or fail with a message, which ends the step. `up`: 1 to
 * where the parameters are, 0 from there; what is asked for one way is done in that order. */
typedef struct tx_copy_ops {
  uint64_t size;
  void *ctx;
  /* Starts to copy. */
  tx_status (*copy)(void *ctx, int32_t up, void *to, const void *from, int64_t bytes, tx_error *error);
  /* From here on the slot's mark of this way stands for everything that was asked for. */
  tx_status (*mark)(void *ctx, int32_t up, int64_t slot, tx_error *error);
  /* Comes back when what the slot's mark stands for is done; at once where there is no mark. */
  tx_status (*wait)(void *ctx, int32_t up, int64_t slot, tx_error *error);
  /* What is asked for on the way down from here on comes after what the slot's mark on the way up stands for. */
  tx_status (*follow)(void *ctx, int64_t slot, tx_error *error);
} tx_copy_ops;
#define TX_COPY_OPS_INIT \
  { sizeof(tx_copy_ops), NULL, NULL, NULL, NULL, NULL }

/* Where batches lie while they are stepped. */
#define TX_MAX_SLOTS 8
typedef struct tx_staging {
  uint64_t size;
  const tx_copy_ops
      *copy_ops; /* NULL: parameters and gradients are in host memory, too, and each thread copies its own */
  void *memory;  /* the host's, aligned to 64 bytes; of no particular content before and after */
  int64_t bytes; /* of it: threads * slots * batch * (bytes of a gradient + bytes of a weight), the widest */
  int64_t batch; /* elements that come at a time; a multiple of TX_SAMPLED */
  int32_t slots; /* batches that each thread has under way: 1 ... TX_MAX_SLOTS */
  int32_t reserved;
} tx_staging;
#define TX_STAGING_INIT \
  { .size = sizeof(tx_staging), .slots = 1 }

/* tx_adamw of parameters that lie elsewhere: the same bits. The memory of params and grads is passed to copy_ops only,
 * all other memory is the host's. Gradients come down and weights go up; weights come down where there is no master, or
 * a remainder. So on_external_write looks at checksums beside remainders; those beside F32 masters are only renewed,
 * and TX_EXTERNAL_CHECK is not legal. When the call comes back weights may be on their way up still: the same memory
 * may be given to the next call where its slots are as large and the widest dtypes the same, else when they have left.
 * Where a copy fails some elements have been stepped and others not, and no count in `steps` has changed. */
TX_API tx_status tx_adamw_offloaded(const tx_adamw_args *args, const tx_staging *staging, const tx_parallel *parallel,
                                    tx_error *error);

/* memcpy of much memory that is not in the cache, on this thread: asks for what it will write ahead of writing it,
 * which takes a quarter less time where that is not in the cache. */
TX_API void tx_copy(void *to, const void *from, int64_t bytes);

/* The same of memory whose target nobody reads soon, and which was not allocated just now: it is written past the
 * caches, which takes a ninth less time. */
TX_API void tx_copy_nontemporal(void *to, const void *from, int64_t bytes);

#ifdef __cplusplus
}
#endif

#endif
