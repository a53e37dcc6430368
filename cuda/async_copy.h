/* Copies from device memory into shared memory that a lane starts and does not wait for (cp.async, sm_80 and newer),
 * and what a vector of a stream looks like there.
 *
 * A lane may read what it has copied itself after its own wait, without a barrier. The copies of one stream and one
 * warp lie as the lanes read them: 16 or 8 bytes of each lane, one lane after the other, so that no two lanes meet in a
 * bank of shared memory. */
#ifndef TX_CUDA_ASYNC_COPY_H
#define TX_CUDA_ASYNC_COPY_H

#include "cuda/vector_forms.h"

/* Copies BYTES bytes, 16 or 8, to which both addresses are aligned. */
template <int BYTES>
static __device__ __forceinline__ void tx_copy_async(char *shared, const char *from) {
  static_assert(BYTES == 16 || BYTES == 8, "what cp.async copies for a vector");
#if defined(TX_EMULATED_CUDA_RUNTIME_H)
  emulated::CopyAsync(shared, from, BYTES);
#elif defined(__CUDA_ARCH__)
  const uint32_t to = (uint32_t)__cvta_generic_to_shared(shared);
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
  }
#endif
}

/* Ends a group of copies: those that the lane has started since the last call, maybe none. */
static __device__ __forceinline__ void tx_end_copies() {
#if defined(TX_EMULATED_CUDA_RUNTIME_H)
  emulated::EndCopies();
#elif defined(__CUDA_ARCH__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* Waits for all of the lane's groups but the last one. */
static __device__ __forceinline__ void tx_wait_but_for_last() {
#if defined(TX_EMULATED_CUDA_RUNTIME_H)
  emulated::WaitButForLast();
#elif defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
}

/* Starts to copy the lane's vector of elements of BYTES bytes, 2 or 1, into the warp's slot; `first` is the index of
 * its first element. Returns where the next stream begins. */
template <int BYTES>
static __device__ __forceinline__ char *tx_copy_stream(char *slot, const void *data, int64_t first) {
  constexpr int kBytes = TX_VECTOR * BYTES;
  tx_copy_async<kBytes>(slot + threadIdx.x % TX_WARP * kBytes, (const char *)data + BYTES * first);
  return slot + TX_WARP * kBytes;
}

/* Reads what tx_copy_stream has copied. */
template <int BYTES>
static __device__ __forceinline__ const char *tx_copied_stream(tx_raw &raw, const char *slot) {
  constexpr int kBytes = TX_VECTOR * BYTES;
  const char *const from = slot + threadIdx.x % TX_WARP * kBytes;
  if constexpr (kBytes == 16) {
    const uint4 words = *(const uint4 *)from;
    memcpy(raw, &words, sizeof words);
  } else {
    const uint2 words = *(const uint2 *)from;
    memcpy(raw, &words, sizeof words);
  }
  return slot + TX_WARP * kBytes;
}

#endif
