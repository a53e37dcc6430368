/* What the blocks of a launch do together: counters that all of them add to, and something that the last one does when
 * the others are done, without a second launch, without memory of the caller's and without a host that waits.
 *
 * Each launch takes a ticket, a counter of the blocks that are done, which the last one leaves at 0. Tickets come from
 * a ring, and a kernel that is still running must not meet its ticket again. Eager launches: between two with the same
 * one lie TX_TICKETS - 1 others from the same .cu file, as many as a device queues, so only a stream that falls so far
 * behind another one could. Launches of a captured stream have a ring of their own, since a graph keeps its tickets for
 * ever: two of more than TX_CAPTURED_TICKETS captured launches may share one, and so do two instances of one captured
 * graph; these must not run at the same time. */
#ifndef TX_CUDA_LAST_BLOCK_H
#define TX_CUDA_LAST_BLOCK_H

#include <atomic>

#include "cuda/launch.h"

#define TX_TICKETS 1024
#define TX_CAPTURED_TICKETS 4096

static __device__ uint32_t tx_tickets[TX_TICKETS + TX_CAPTURED_TICKETS];

/* The ticket of the next launch from this .cu file. */
static inline int32_t tx_take_ticket(const tx_cuda_scope *scope) {
  static std::atomic<uint32_t> eager, captured;
  if (scope->capturing) {
    return (int32_t)(TX_TICKETS + captured.fetch_add(1, std::memory_order_relaxed) % TX_CAPTURED_TICKETS);
  }
  return (int32_t)(eager.fetch_add(1, std::memory_order_relaxed) % TX_TICKETS);
}

/* Whether the calling block is the last of the launch to come here; what the others wrote before they came can then be
 * read, by loads that do not look into the processor's own cache (volatile ones, atomics). Every thread of each block
 * calls it, once. */
static __device__ __forceinline__ bool tx_is_last_block(int32_t ticket) {
  __shared__ uint32_t last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicInc(&tx_tickets[ticket], gridDim.x - 1) == gridDim.x - 1 ? 1u : 0u;
    __threadfence();
  }
  __syncthreads();
  return last != 0u;
}

/* to += by, by any number of threads at a time. */
static __device__ __forceinline__ void tx_add_i64(void *to, int64_t by) {
  (void)atomicAdd((unsigned long long *)to, (unsigned long long)by);
}

/* A tensor of int64 that blocks add to, or none: at an address that atomics take. */
static inline tx_status tx_cuda_check_counter(const char *name, tx_tensor tensor, tx_error *error) {
  if (tensor.numel == 0 || (uintptr_t)tensor.data % 8 == 0) return TX_OK;
  return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "%s begins at %p; on a GPU multiples of 8 are legal", name,
                 tensor.data);
}

#endif
