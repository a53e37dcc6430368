/* The step's streams between memory and registers: words as they are stored on the way in, all of a round's asked for
 * before any is looked at, and floats rounded into their storage on the way out. */
#ifndef TX_CUDA_ADAMW_STREAMS_H
#define TX_CUDA_ADAMW_STREAMS_H

#include "csrc/math/adamw.h"
#include "csrc/math/noise.h"
#include "csrc/math/remainder.h"
#include "cuda/adamw.h"
#include "cuda/block_scale.h"
#include "cuda/scalars.h"

/* A lane's elements of a stream, as stored: TX_VECTOR fp32 words, or as many 16-bit halves, or bytes, from the front.
 */
struct tx_stored {
  uint32_t words[TX_VECTOR];
};

/* Where a lane's elements of a round are. whole: all of the warp's lanes have TX_VECTOR of them, aligned. */
struct tx_here {
  int64_t first;
  int32_t count;
  bool whole;
};

template <int BYTES>
static __device__ __forceinline__ void tx_read_stored(tx_stored &to, const void *data, const bool whole,
                                                      uint32_t alignment, const tx_here &here) {
  uint32_t words[TX_VECTOR_WORDS(BYTES)];
  tx_read_vector<BYTES>(words, (const char *)data + BYTES * here.first, whole ? 16u : alignment,
                        whole ? TX_VECTOR : here.count);
#pragma unroll
  for (int i = 0; i < TX_VECTOR_WORDS(BYTES); i++)
    to.words[i] = words[i];
}

/* dtype and whole: mostly known when the kernel is compiled. */
static __device__ __forceinline__ void tx_read_stored(tx_stored &to, const void *data, const tx_dtype dtype,
                                                      const bool whole, uint32_t alignment, const tx_here &here) {
  if (dtype == TX_F32) {
    tx_read_stored<4>(to, data, whole, alignment, here);
  } else if (dtype == TX_U8) {
    tx_read_stored<1>(to, data, whole, alignment, here);
  } else {
    tx_read_stored<2>(to, data, whole, alignment, here);
  }
}

template <int BYTES>
static __device__ __forceinline__ void tx_write_stored(const tx_stored &from, void *data, uint32_t alignment,
                                                       const tx_here &here) {
  uint32_t words[TX_VECTOR_WORDS(BYTES)];
  char *const to = (char *)data + BYTES * here.first;
#pragma unroll
  for (int i = 0; i < TX_VECTOR_WORDS(BYTES); i++)
    words[i] = from.words[i];
  if (here.whole) {
    tx_write_vector<BYTES>(words, to, 16u, TX_VECTOR);
  } else {
    tx_write_vector<BYTES>(words, to, alignment, here.count);
  }
}

/* Element i of F32, BF16 or F16. */
static __device__ __forceinline__ float tx_stored_plain(const tx_stored &s, const tx_dtype dtype, int i) {
  if (dtype == TX_F32) return tx_f32_from_bits(s.words[i]);
  if (dtype == TX_BF16) return tx_f32_from_bits(i % 2 ? s.words[i / 2] & 0xffff0000u : s.words[i / 2] << 16);
  return tx_f32_from_f16((uint16_t)tx_half(s.words[i / 2], i % 2));
}

static __device__ __forceinline__ void tx_floats_of_plain(float (&x)[TX_VECTOR], const tx_stored &s,
                                                          const tx_dtype dtype) {
  if (dtype == TX_F32) {
#pragma unroll
    for (int i = 0; i < TX_VECTOR; i++)
      x[i] = tx_stored_plain(s, TX_F32, i);
  } else if (dtype == TX_BF16) {
#pragma unroll
    for (int i = 0; i < TX_VECTOR; i++)
      x[i] = tx_stored_plain(s, TX_BF16, i);
  } else {
#pragma unroll
    for (int i = 0; i < TX_VECTOR; i++)
      x[i] = tx_stored_plain(s, TX_F16, i);
  }
}

/* Halves into words. */
static __device__ __forceinline__ void tx_put_half(tx_stored &s, int i, uint32_t half) {
  s.words[i / 2] = i % 2 ? s.words[i / 2] | half << 16 : half;
}

/* -- thresholds -------------------------------------------------------------------------------------------------- */

/* Of one parameter, what is rounded, and the step. */
struct tx_thresholds {
  uint64_t seed;
  int64_t id, step;
  tx_lane lane;
  uint32_t start;
  uint32_t lattice; /* dithered threshold of the tensor's first element */
};

static __device__ __forceinline__ tx_thresholds tx_thresholds_of(uint64_t seed, int64_t id, int64_t step,
                                                                 const tx_lane lane, uint32_t start) {
  const tx_thresholds t = {seed, id, step, lane, start, tx_lattice_base(seed, id, lane, step, (int64_t)start)};
  return t;
}

/* u: of TX_VECTOR elements from the tensor's `first` on. */
static __device__ __forceinline__ void tx_thresholds_at(uint32_t (&u)[TX_VECTOR], const tx_thresholds &t, int64_t first,
                                                        int32_t rounding) {
  if (rounding == TX_STOCHASTIC) {
    const tx_noise_key key = tx_stochastic_key(t.seed, t.id, t.lane, t.step);
#pragma unroll
    for (int i = 0; i < TX_VECTOR; i++)
      u[i] = tx_stochastic(key, t.start + (uint32_t)first + (uint32_t)i);
  } else {
    const uint32_t base = tx_dithered(t.lattice, (uint32_t)first);
#pragma unroll
    for (int i = 0; i < TX_VECTOR; i++)
      u[i] = tx_dithered(base, (uint32_t)i);
  }
}

/* -- floats into their storage ------------------------------------------------------------------------------------ */

static __device__ __forceinline__ void tx_store_f32(const float (&x)[TX_VECTOR], void *data, uint32_t alignment,
                                                    const tx_here &here) {
  tx_stored s;
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++)
    s.words[i] = tx_bits_from_f32(x[i]);
  tx_write_stored<4>(s, data, alignment, here);
}

/* BF16 or F16, to nearest. */
static __device__ __forceinline__ void tx_store_nearest(const float (&x)[TX_VECTOR], const tx_dtype dtype, void *data,
                                                        uint32_t alignment, const tx_here &here) {
  tx_stored s;
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++)
    tx_put_half(s, i, dtype == TX_BF16 ? tx_bf16_from_f32(x[i]) : tx_f16_from_f32(x[i]));
  tx_write_stored<2>(s, data, alignment, here);
}

/* BF16 or F16, by any rounding. */
static __device__ __forceinline__ void tx_store_rounded(const float (&x)[TX_VECTOR], const tx_dtype dtype, void *data,
                                                        uint32_t alignment, const tx_here &here, const tx_thresholds &t,
                                                        int32_t rounding) {
  if (rounding == TX_NEAREST) {
    tx_store_nearest(x, dtype, data, alignment, here);
    return;
  }
  uint32_t u[TX_VECTOR];
  tx_stored s;
  tx_thresholds_at(u, t, here.first, rounding);
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++)
    tx_put_half(s, i, dtype == TX_BF16 ? tx_bf16_round(x[i], u[i]) : tx_f16_round(x[i], u[i]));
  tx_write_stored<2>(s, data, alignment, here);
}

/* -- moments ------------------------------------------------------------------------------------------------------ */

/* U8 or F16 with block scales. */
static __device__ __forceinline__ tx_block_format tx_moment_format(const tx_dtype dtype, const bool root) {
  if (dtype == TX_U8) return root ? tx_block_root_e4m4() : tx_block_e4m3();
  return root ? tx_block_root_f16() : tx_block_f16();
}

/* A moment's scale byte is among what a round asks for first; 0 where the lane has no elements. */
static __device__ __forceinline__ uint8_t tx_read_scale(const uint8_t *scales, const tx_here &here) {
  return here.count > 0 ? scales[here.first / TX_BLOCK] : (uint8_t)0;
}

/* root: exp_avg_sq, which scaled formats hold as its square root. */
static __device__ __forceinline__ void tx_floats_of_moment(float (&x)[TX_VECTOR], const tx_stored &s,
                                                           const tx_dtype dtype, const bool root, uint8_t scale_byte) {
  if (dtype == TX_F32 || dtype == TX_BF16) {
    tx_floats_of_plain(x, s, dtype);
    return;
  }
  const tx_block_format f = tx_moment_format(dtype, root);
  const tx_block_scale scale = tx_scale_decode(f, scale_byte);
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++) {
    const float value = dtype == TX_U8 ? tx_block_value_in(f, s.words[i / 4], 8 * (i % 4), scale)
                                       : tx_block_value_in(f, s.words[i / 2], 16 * (i % 2), scale);
    x[i] = root ? value * value : value;
  }
}

/* Where a moment is stored. */
struct tx_moment_stream {
  void *data;
  uint8_t *scales; /* NULL unless scaled */
  uint32_t alignment;
  int32_t rounding;
};

static __device__ __forceinline__ void tx_store_scaled(const float (&x)[TX_VECTOR], const tx_dtype dtype,
                                                       const bool root, const tx_moment_stream &to, const tx_here &here,
                                                       const tx_thresholds &t) {
  uint32_t u[TX_VECTOR], codes[TX_VECTOR];
  tx_stored s;
  tx_thresholds_at(u, t, here.first, to.rounding);
  const uint8_t byte = tx_block_encode(codes, tx_moment_format(dtype, root), x, to.rounding != TX_NEAREST, u);
  if (here.count > 0 && tx_lane_id() % TX_BLOCK_LANES == 0) to.scales[here.first / TX_BLOCK] = byte;
  if (dtype == TX_U8) {
#pragma unroll
    for (int i = 0; i < TX_VECTOR; i++)
      s.words[i / 4] = i % 4 ? s.words[i / 4] | codes[i] << (8 * (i % 4)) : codes[i];
    tx_write_stored<1>(s, to.data, to.alignment, here);
  } else {
#pragma unroll
    for (int i = 0; i < TX_VECTOR; i++)
      tx_put_half(s, i, codes[i]);
    tx_write_stored<2>(s, to.data, to.alignment, here);
  }
}

#endif
