/* Cooperation of a launch's blocks: counters that all blocks add to, and work that the last block does when the others
 * are done. It takes no second launch, no memory of the caller's and no waiting on the host.
 *
 * Each launch takes a ticket: a counter of finished blocks, which the last block resets to 0. Tickets come from a ring,
 * so a kernel must have finished before its ticket is used again. Eager launches: a ticket is reused after
 * TX_TICKETS - 1 other launches from the same .cu file. That is as many as a device queues, so a ticket could only meet
 * itself if one stream fell that far behind another one. Captured launches have a ring of their own, since a graph
 * never gives its tickets back. Two of more than TX_CAPTURED_TICKETS captured launches may share a ticket, and so do
 * two instances of one captured graph; these must not run at the same time. */
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

/* Whether the calling block is the launch's last one to get here. If so, everything that the other blocks wrote before
 * is visible to loads that bypass the L1 cache (volatile loads, atomics). Every thread of each block has to call it,
 * once. */
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

/* *to += by, atomically. */
static __device__ __forceinline__ void tx_add_i64(void *to, int64_t by) {
  (void)atomicAdd((unsigned long long *)to, (unsigned long long)by);
}

/* Rejects a counter (an int64 tensor that blocks add to, or none) whose address is not a multiple of 8, as atomics
 * need. */
static inline tx_status tx_cuda_check_counter(const char *name, tx_tensor tensor, tx_error *error) {
  if (tensor.numel == 0 || (uintptr_t)tensor.data % 8 == 0) return TX_OK;
  return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "%s begins at %p; on a GPU multiples of 8 are legal", name,
                 tensor.data);
}

#endif
