/* Copies from global to shared memory (shared_cells.h) that take no registers: the lane that asks for one goes on, and
 * waits for its copies later (cp.async, from sm_80 on). A lane reads only what it has copied itself.
 *
 * Note [aligned cells]
 *
 * Problem. If what a warp copies to does not begin at a multiple of 128 bytes, each sector of 32 bytes is read from the
 * L2 cache twice: an H200 read 982 MB for 470 MB of streams, and waited for it. Nothing else shows it: neither results,
 * nor instructions, nor DRAM's counters. An alignment of 16, which is all that a copy needs, is not enough: whether the
 * linker puts something before the cells is chance.
 *
 * So cells are aligned to what one access of a warp covers, and the emulated device rejects copies to others. */
#ifndef TX_CUDA_ASYNC_COPY_H
#define TX_CUDA_ASYNC_COPY_H

#include "cuda/shared_cells.h"

/* Starts to copy BYTES bytes, 16 or 8, to OFFSET bytes from the lane's cell. Both addresses are aligned to BYTES. */
template <int BYTES, int OFFSET>
static __device__ __forceinline__ void tx_copy_async(tx_cell cell, const void *from) {
  static_assert(BYTES == 16 || BYTES == 8, "what cp.async copies for a vector");
#if defined(TX_EMULATED_CUDA_RUNTIME_H)
  emulated::CopyAsync(cell.at + OFFSET, from, BYTES);
#elif defined(__CUDA_ARCH__)
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0 + %1], [%2], 16;" ::"r"(cell.at), "n"(OFFSET), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0 + %1], [%2], 8;" ::"r"(cell.at), "n"(OFFSET), "l"(from) : "memory");
  }
#endif
}

/* The same if `there` is 1; nothing if it is 0. Takes no branch. */
template <int BYTES, int OFFSET>
static __device__ __forceinline__ void tx_copy_async_if(tx_cell cell, const void *from, uint32_t there) {
  static_assert(BYTES == 16, "the only use");
#if defined(TX_EMULATED_CUDA_RUNTIME_H)
  if (there) emulated::CopyAsync(cell.at + OFFSET, from, BYTES);
#elif defined(__CUDA_ARCH__)
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p cp.async.cg.shared.global [%0 + %1], [%2], 16;\n}" ::"r"(cell.at),
      "n"(OFFSET), "l"(from), "r"(there)
      : "memory");
#endif
}

/* Starts to copy one word. Both addresses are multiples of 4. */
static __device__ __forceinline__ void tx_copy_word_async(uint32_t *to, const void *from) {
#if defined(TX_EMULATED_CUDA_RUNTIME_H)
  emulated::CopyAsync(to, from, 4);
#elif defined(__CUDA_ARCH__)
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from)
               : "memory");
#endif
}

/* Makes a group of the copies that the lane has started since its last group. */
static __device__ __forceinline__ void tx_group_copies() {
#if defined(TX_EMULATED_CUDA_RUNTIME_H)
  emulated::GroupCopies();
#elif defined(__CUDA_ARCH__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* Waits for all of the lane's groups but the LATER newest ones. */
template <int LATER>
static __device__ __forceinline__ void tx_wait_for_groups() {
#if defined(TX_EMULATED_CUDA_RUNTIME_H)
  emulated::WaitForGroups(LATER);
#elif defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
#endif
}

/* Waits for all copies that the lane has started. */
static __device__ __forceinline__ void tx_wait_for_copies() {
#if defined(TX_EMULATED_CUDA_RUNTIME_H)
  emulated::WaitForCopies();
#elif defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

#endif
