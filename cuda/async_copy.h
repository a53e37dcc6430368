/* Copies from global to shared memory that take no registers: the lane that asks for one goes on, and waits for its
 * copies later (cp.async, from sm_80 on).
 *
 * A lane reads only what it has copied itself. Its copies lie at multiples of 512 bytes from its own 16 bytes, so that
 * no two lanes meet in a bank of shared memory.
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

#include <cuda_runtime.h>

#include "cuda/grid.h"

/* The bytes of 16 per lane: what one access of a warp covers. */
#define TX_CELLS (16 * TX_WARP)

/* A lane's 16 bytes of shared memory. As a number, it takes one register and one addition per access. */
typedef struct tx_cell {
#if defined(TX_EMULATED_CUDA_RUNTIME_H)
  char *at;
#else
  uint32_t at;
#endif
} tx_cell;

/* The warp's shared memory `cells`, and the lane's cell of it, aligned to TX_CELLS bytes and of a multiple of them. */
static __device__ __forceinline__ tx_cell tx_cells_of(char *cells) {
#if defined(TX_EMULATED_CUDA_RUNTIME_H)
  return tx_cell{cells};
#else
  tx_cell cell = {(uint32_t)__cvta_generic_to_shared(cells)};
  asm("" : "+r"(cell.at)); /* otherwise it is computed anew for each use */
  return cell;
#endif
}
static __device__ __forceinline__ tx_cell tx_cell_of(char *cells) {
  return tx_cells_of(cells + threadIdx.x % TX_WARP * 16);
}
static __device__ __forceinline__ tx_cell tx_cell_after(tx_cell cell, int32_t bytes) {
  return tx_cell{cell.at + bytes};
}
/* Of two neighbours of `bytes` bytes, a power of two, the other one. They are aligned to both of them together. */
static __device__ __forceinline__ tx_cell tx_cell_beside(tx_cell cell, uint32_t bytes) {
#if defined(TX_EMULATED_CUDA_RUNTIME_H)
  return tx_cell{(char *)((uintptr_t)cell.at ^ bytes)};
#else
  return tx_cell{cell.at ^ bytes};
#endif
}

/* Reads and writes two addresses at OFFSET bytes from a multiple of 16. The same bytes are read by all lanes. */
template <int OFFSET>
static __device__ __forceinline__ void tx_read_addresses(char *&first, char *&second, tx_cell from) {
#if defined(TX_EMULATED_CUDA_RUNTIME_H)
  memcpy(&first, from.at + OFFSET, sizeof first);
  memcpy(&second, from.at + OFFSET + sizeof first, sizeof second);
#elif defined(__CUDA_ARCH__)
  uint64_t low, high;
  asm volatile("ld.shared.v2.u64 {%0, %1}, [%2 + %3];" : "=l"(low), "=l"(high) : "r"(from.at), "n"(OFFSET) : "memory");
  first = (char *)low;
  second = (char *)high;
#endif
}
/* Reads one address at `offset` bytes. */
static __device__ __forceinline__ char *tx_read_address(tx_cell from, uint32_t offset) {
  char *found;
#if defined(TX_EMULATED_CUDA_RUNTIME_H)
  memcpy(&found, from.at + offset, sizeof found);
#else
  uint64_t address;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(address) : "r"(from.at + offset) : "memory");
  found = (char *)address;
#endif
  return found;
}
template <int OFFSET>
static __device__ __forceinline__ void tx_write_addresses(tx_cell to, const void *first, const void *second) {
#if defined(TX_EMULATED_CUDA_RUNTIME_H)
  memcpy(to.at + OFFSET, &first, sizeof first);
  memcpy(to.at + OFFSET + sizeof first, &second, sizeof second);
#elif defined(__CUDA_ARCH__)
  asm volatile("st.shared.v2.u64 [%0 + %1], {%2, %3};" ::"r"(to.at), "n"(OFFSET), "l"(first), "l"(second) : "memory");
#endif
}

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

/* Waits for all copies that the lane has started. */
static __device__ __forceinline__ void tx_wait_for_copies() {
#if defined(TX_EMULATED_CUDA_RUNTIME_H)
  emulated::WaitForCopies();
#elif defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

/* Reads 16 bytes that were copied to OFFSET bytes from the lane's cell. */
template <int OFFSET>
static __device__ __forceinline__ void tx_read_cell(uint32_t (&words)[4], tx_cell cell) {
#if defined(TX_EMULATED_CUDA_RUNTIME_H)
  memcpy(words, cell.at + OFFSET, 16);
#elif defined(__CUDA_ARCH__)
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4 + %5];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(cell.at), "n"(OFFSET)
               : "memory");
#endif
}

#endif
