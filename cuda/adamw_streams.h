/* The step's streams between memory and registers, as they are stored: all of a round's asked for before any is looked
 * at; and values rounded into what is stored. */
#ifndef TX_CUDA_ADAMW_STREAMS_H
#define TX_CUDA_ADAMW_STREAMS_H

#include "cuda/adamw_fast_path.h"
#include "cuda/vector_forms.h"

/* Where a lane's elements of a round are. whole: all of the warp's lanes have TX_VECTOR of them, aligned. */
struct tx_here {
  int64_t first;
  int32_t count;
  bool whole;
};

static __device__ __forceinline__ constexpr int tx_bytes_of(const tx_dtype dtype) {
  return dtype == TX_F32 ? 4 : dtype == TX_U8 ? 1 : 2;
}

/* What was read from memory before is not kept for reading it after. */
static __device__ __forceinline__ void tx_read_again() {
  asm volatile("" ::: "memory");
}

/* dtype and whole: mostly known when the kernel is compiled. */
static __device__ __forceinline__ void tx_get(tx_raw &raw, const void *data, const tx_dtype dtype, const bool whole,
                                              uint32_t alignment, const tx_here &here) {
  tx_read_raw(raw, data, tx_bytes_of(dtype), whole ? 16u : alignment, here.first, whole ? TX_VECTOR : here.count);
}

static __device__ __forceinline__ void tx_put(const tx_raw &raw, void *data, const tx_dtype dtype, const bool whole,
                                              uint32_t alignment, const tx_here &here) {
  tx_write_raw(raw, data, tx_bytes_of(dtype), whole ? 16u : alignment, here.first, whole ? TX_VECTOR : here.count);
}

/* The block that a lane's elements are in. */
static __device__ __forceinline__ int64_t tx_block_at(const tx_here &here) {
  return (int64_t)((uint64_t)here.first / TX_BLOCK);
}

/* tx_plain_floats of a dtype that is not known when the kernel is compiled. */
static __device__ __forceinline__ void tx_floats_of(float (&x)[TX_VECTOR], const tx_raw &raw, const tx_dtype dtype) {
  if (dtype == TX_F32) {
    tx_plain_floats(x, raw, TX_F32);
  } else if (dtype == TX_BF16) {
    tx_plain_floats(x, raw, TX_BF16);
  } else {
    tx_plain_floats(x, raw, TX_F16);
  }
}

static __device__ __forceinline__ void tx_round_plain_to(tx_raw &raw, const float (&x)[TX_VECTOR], const tx_dtype dtype,
                                                         int32_t rounding, const bool quick, const tx_here &here,
                                                         const tx_noise &noise) {
  uint32_t u[TX_VECTOR] = {};
  if (dtype == TX_F32 || rounding == TX_NEAREST) {
    if (quick && dtype == TX_BF16) {
      tx_quick_bf16_nearest(raw, x);
    } else {
      tx_plain_raw(raw, x, u, 0, dtype);
    }
    return;
  }
  tx_thresholds(u, noise, (uint32_t)here.first, rounding);
  if (quick && dtype == TX_BF16) {
    tx_quick_bf16_round(raw, x, u);
  } else {
    tx_plain_raw(raw, x, u, 1, dtype);
  }
}

/* x as it is stored, F32, BF16 or F16. quick: nothing is NaN or reaches 2^127. */
static __device__ __forceinline__ void tx_round_plain(tx_raw &raw, const float (&x)[TX_VECTOR], const tx_dtype dtype,
                                                      int32_t rounding, const bool quick, const tx_here &here,
                                                      const tx_noise &noise) {
  if (dtype == TX_F32) {
    tx_round_plain_to(raw, x, TX_F32, rounding, quick, here, noise);
  } else if (dtype == TX_BF16) {
    tx_round_plain_to(raw, x, TX_BF16, rounding, quick, here, noise);
  } else {
    tx_round_plain_to(raw, x, TX_F16, rounding, quick, here, noise);
  }
}

/* x in a block with a scale, U8 or F16; returns the scale byte. quick, amax_bits: as tx_quick_encode's. Every lane of
 * the warp calls it. */
static __device__ __forceinline__ uint8_t tx_round_scaled(tx_raw &raw, const float (&x)[TX_VECTOR],
                                                          const tx_dtype dtype, const tx_format format,
                                                          int32_t rounding, bool quick, uint32_t amax_bits,
                                                          const tx_here &here, const tx_noise &noise) {
  uint8_t scale;
  uint32_t u[TX_VECTOR];
  tx_thresholds(u, noise, (uint32_t)here.first, rounding);
  if (rounding == TX_NEAREST) return tx_encode_block(raw, x, u, 0, dtype, format);
  if (dtype == TX_U8 && tx_quick_encode(raw, &scale, x, amax_bits, u, quick, format)) return scale;
  return tx_encode_block(raw, x, u, 1, dtype, format);
}

#endif
