/* Shared memory as a warp uses it: in cells of 16 bytes, one per lane.
 *
 * What a lane has lies at multiples of TX_CELLS bytes from its own cell, so that no two lanes meet in a bank. Addresses
 * that all lanes need, and that would take registers, are kept in shared memory, too: each is written by one lane. */
#ifndef TX_CUDA_SHARED_CELLS_H
#define TX_CUDA_SHARED_CELLS_H

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

/* The warp's shared memory `cells`; and the lane's cell of it, for which it is aligned to TX_CELLS bytes. */
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

/* Reads 16 bytes at OFFSET bytes from the lane's cell. */
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

/* address + bytes, where the sum's upper 32 bits are those of the address. Takes one instruction instead of two. */
static __device__ __forceinline__ char *tx_within(const char *address, uint32_t bytes) {
  const uint64_t number = (uint64_t)(uintptr_t)address;
  return (char *)(uintptr_t)((number & 0xffffffff00000000u) | (uint32_t)((uint32_t)number + bytes));
}

/* Writes an address at `offset` bytes. */
static __device__ __forceinline__ void tx_write_address(tx_cell to, uint32_t offset, const void *address) {
#if defined(TX_EMULATED_CUDA_RUNTIME_H)
  memcpy(to.at + offset, &address, sizeof address);
#elif defined(__CUDA_ARCH__)
  asm volatile("st.shared.u64 [%0], %1;" ::"r"(to.at + offset), "l"(address) : "memory");
#endif
}
/* Reads two addresses at OFFSET bytes, a multiple of 16. */
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
  char *found = NULL;
#if defined(TX_EMULATED_CUDA_RUNTIME_H)
  memcpy(&found, from.at + offset, sizeof found);
#elif defined(__CUDA_ARCH__)
  uint64_t address;
  asm volatile("ld.shared.u64 %0, [%1];" : "=l"(address) : "r"(from.at + offset) : "memory");
  found = (char *)address;
#endif
  return found;
}

#endif
