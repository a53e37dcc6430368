/* The step's streams between memory and registers: on the way in as they are stored, all of a round's asked for before
 * any is looked at; on the way out rounded into their storage. */
#ifndef TX_CUDA_ADAMW_STREAMS_H
#define TX_CUDA_ADAMW_STREAMS_H

#include "cuda/adamw_quick.h"
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

/* dtype and whole: mostly known when the kernel is compiled. */
static __device__ __forceinline__ void tx_get(tx_raw &raw, const void *data, const tx_dtype dtype, const bool whole,
                                              uint32_t alignment, const tx_here &here) {
  tx_read_raw(raw, data, tx_bytes_of(dtype), whole ? 16u : alignment, here.first, whole ? TX_VECTOR : here.count);
}

static __device__ __forceinline__ void tx_put(const tx_raw &raw, void *data, const tx_dtype dtype, uint32_t alignment,
                                              const tx_here &here) {
  if (here.whole) {
    tx_write_raw(raw, data, tx_bytes_of(dtype), 16u, here.first, TX_VECTOR);
  } else {
    tx_write_raw(raw, data, tx_bytes_of(dtype), alignment, here.first, here.count);
  }
}

/* The block that a lane's elements are in. */
static __device__ __forceinline__ int64_t tx_block_at(const tx_here &here) {
  return (int64_t)((uint64_t)here.first / TX_BLOCK);
}

/* A stream that is rounded on its way out. */
struct tx_rounded {
  void *data;
  uint8_t *scales; /* of its first block; NULL unless scaled */
  uint32_t alignment;
  int32_t rounding;
};

/* x as it is stored, F32, BF16 or F16. */
static __device__ __forceinline__ void tx_put_plain(const float (&x)[TX_VECTOR], const tx_dtype dtype,
                                                    const tx_rounded &to, const tx_here &here, const tx_noise &noise) {
  tx_raw raw;
  if (dtype == TX_F32 || to.rounding == TX_NEAREST) {
    const uint32_t none[TX_VECTOR] = {};
    if (dtype != TX_BF16 || !tx_quick_bf16_nearest(raw, x)) tx_plain_raw(raw, x, none, 0, dtype);
  } else {
    uint32_t u[TX_VECTOR];
    tx_thresholds(u, noise, (uint32_t)here.first, to.rounding);
    if (dtype != TX_BF16 || !tx_quick_bf16_round(raw, x, u)) tx_plain_raw(raw, x, u, 1, dtype);
  }
  tx_put(raw, to.data, dtype, to.alignment, here);
}

/* x in blocks with scales, U8 or F16. Every lane of the warp calls it. */
static __device__ __forceinline__ void tx_put_scaled(const float (&x)[TX_VECTOR], const tx_dtype dtype,
                                                     const tx_format format, const tx_rounded &to, const tx_here &here,
                                                     const tx_noise &noise) {
  uint32_t u[TX_VECTOR];
  tx_raw raw;
  uint8_t scale;
  tx_thresholds(u, noise, (uint32_t)here.first, to.rounding);
  if (to.rounding == TX_NEAREST) {
    scale = tx_encode_block(raw, x, u, 0, dtype, format);
  } else if (dtype == TX_U8) {
    scale = tx_quick_encode(raw, x, u, format);
  } else {
    scale = tx_encode_block(raw, x, u, 1, dtype, format);
  }
  tx_write_scale(to.scales, scale, here.first, here.count);
  tx_put(raw, to.data, dtype, to.alignment, here);
}

#endif
