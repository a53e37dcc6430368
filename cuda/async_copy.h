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

/* The parts of a lane's vector of elements of BYTES bytes. */
template <int BYTES>
struct tx_vector_parts {
  static constexpr int kBytes = TX_VECTOR * BYTES < 16 ? TX_VECTOR * BYTES : 16; /* of one part */
  static constexpr int kCount = TX_VECTOR * BYTES / kBytes;
  static constexpr int kWarpBytes = TX_WARP * kBytes; /* one part of all lanes */
};

/* Starts the copies of the lane's vector, whose first element is `first`; returns where the next stream begins. slot:
 * of the warp. */
template <int BYTES>
static __device__ __forceinline__ char *tx_copy_stream(char *slot, const void *data, int64_t first) {
  typedef tx_vector_parts<BYTES> parts;
  char *const to = slot + threadIdx.x % TX_WARP * parts::kBytes;
  const char *const from = (const char *)data + BYTES * first;
#pragma unroll
  for (int i = 0; i < parts::kCount; i++)
    tx_copy_async<parts::kBytes>(to + i * parts::kWarpBytes, from + i * parts::kBytes);
  return slot + parts::kCount * parts::kWarpBytes;
}

/* Reads what tx_copy_stream has copied. */
template <int BYTES>
static __device__ __forceinline__ const char *tx_copied_stream(tx_raw &raw, const char *slot) {
  typedef tx_vector_parts<BYTES> parts;
  const char *const from = slot + threadIdx.x % TX_WARP * parts::kBytes;
#pragma unroll
  for (int i = 0; i < parts::kCount; i++) {
    if constexpr (parts::kBytes == 16) {
      const uint4 words = *(const uint4 *)(from + i * parts::kWarpBytes);
      memcpy(&raw[4 * i], &words, sizeof words);
    } else {
      const uint2 words = *(const uint2 *)(from + i * parts::kWarpBytes);
      memcpy(&raw[2 * i], &words, sizeof words);
    }
  }
  return slot + parts::kCount * parts::kWarpBytes;
}

#endif
