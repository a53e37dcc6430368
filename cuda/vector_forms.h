/* Converts the forms of csrc/core/forms.def to and from fp32 in a thread's registers, TX_VECTOR elements per lane. 16
 * neighbouring lanes hold a block of TX_BLOCK (grid.h) and compute its scale together. So where a comment below says
 * so, every lane of the warp has to call the function, also a lane beyond the tensor's end. */
#ifndef TX_CUDA_VECTOR_FORMS_H
#define TX_CUDA_VECTOR_FORMS_H

#include "csrc/math/block_scale.h"
#include "csrc/math/noise.h"
#include "cuda/vectors.h"

/* Lanes that hold one block. */
#define TX_BLOCK_LANES (TX_BLOCK / TX_VECTOR)

/* -- as stored ---------------------------------------------------------------------------------------------------- */

/* A vector of elements of any dtype, as stored: its first TX_VECTOR_WORDS(bytes) words. */
typedef uint32_t tx_raw[TX_VECTOR_WORDS(4)];

template <int BYTES>
static __device__ __forceinline__ void tx_read_raw_of(tx_raw &raw, const void *from, uint32_t alignment,
                                                      int32_t count) {
  uint32_t words[TX_VECTOR_WORDS(BYTES)];
  tx_read_vector<BYTES>(words, from, alignment, count);
#pragma unroll
  for (int i = 0; i < TX_VECTOR_WORDS(BYTES); i++)
    raw[i] = words[i];
}

template <int BYTES>
static __device__ __forceinline__ void tx_write_raw_of(const tx_raw &raw, void *to, uint32_t alignment, int32_t count) {
  uint32_t words[TX_VECTOR_WORDS(BYTES)];
#pragma unroll
  for (int i = 0; i < TX_VECTOR_WORDS(BYTES); i++)
    words[i] = raw[i];
  tx_write_vector<BYTES>(words, to, alignment, count);
}

/* Writes a whole vector, aligned to its size, to an address that was read from memory: the compiler does not know that
 * it is one of global memory. */
template <int BYTES>
static __device__ __forceinline__ void tx_write_whole(const tx_raw &raw, void *to) {
  static_assert(BYTES == 1 || BYTES == 2, "one access");
#if defined(__CUDA_ARCH__)
  const uint64_t at = __cvta_generic_to_global(to);
  if constexpr (BYTES == 2) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(raw[0]), "r"(raw[1]), "r"(raw[2]),
                 "r"(raw[3])
                 : "memory");
  } else {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(raw[0]), "r"(raw[1]) : "memory");
  }
#else
  tx_write_raw_of<BYTES>(raw, to, 16, TX_VECTOR);
#endif
}

/* Reads elements [first, first + count) of a stream whose elements have `bytes` bytes (1, 2 or 4); the rest of the
 * vector becomes zeros. */
static __device__ __forceinline__ void tx_read_raw(tx_raw &raw, const void *data, const int bytes, uint32_t alignment,
                                                   int64_t first, int32_t count) {
  const char *from = (const char *)data + bytes * first;
  if (bytes == 4) {
    tx_read_raw_of<4>(raw, from, alignment, count);
  } else if (bytes == 2) {
    tx_read_raw_of<2>(raw, from, alignment, count);
  } else {
    tx_read_raw_of<1>(raw, from, alignment, count);
  }
}

static __device__ __forceinline__ void tx_write_raw(const tx_raw &raw, void *data, const int bytes, uint32_t alignment,
                                                    int64_t first, int32_t count) {
  char *to = (char *)data + bytes * first;
  if (bytes == 4) {
    tx_write_raw_of<4>(raw, to, alignment, count);
  } else if (bytes == 2) {
    tx_write_raw_of<2>(raw, to, alignment, count);
  } else {
    tx_write_raw_of<1>(raw, to, alignment, count);
  }
}

/* Element i of a vector of 8-bit or 16-bit elements. */
static __device__ __forceinline__ uint32_t tx_raw_code(const tx_raw &raw, int i, const tx_dtype dtype) {
  return dtype == TX_U8 ? raw[i / 4] >> (8 * (i % 4)) & 0xffu : tx_half(raw[i / 2], i % 2);
}

/* Packs codes, each below 2^8 or 2^16, into a vector. */
static __device__ __forceinline__ void tx_join_codes(tx_raw &raw, const uint32_t (&codes)[TX_VECTOR],
                                                     const tx_dtype dtype) {
  constexpr int kHalf = TX_VECTOR / 2;
#pragma unroll
  for (int i = 0; i < kHalf; i++)
    raw[i] = codes[2 * i] | codes[2 * i + 1] << 16;
  if (dtype != TX_U8) return;
#pragma unroll
  for (int i = 0; i < kHalf / 2; i++)
    raw[i] = codes[4 * i] | codes[4 * i + 1] << 8 | codes[4 * i + 2] << 16 | codes[4 * i + 3] << 24;
}

/* -- plain -------------------------------------------------------------------------------------------------------- */

/* dtype: TX_F32, TX_BF16 or TX_F16; here and below mostly a compile-time constant. */
static __device__ __forceinline__ void tx_plain_floats(float (&x)[TX_VECTOR], const tx_raw &raw, const tx_dtype dtype) {
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++) {
    if (dtype == TX_F32) {
      x[i] = tx_f32_from_bits(raw[i]);
    } else {
      const uint16_t half = (uint16_t)tx_half(raw[i / 2], i % 2);
      x[i] = dtype == TX_BF16 ? tx_f32_from_bf16(half) : tx_f32_from_f16(half);
    }
  }
}

/* The thresholds of elements at, at + 1, ...; those of the vector's upper half are `gap` elements further. Undefined
 * when rounding to nearest. */
static __device__ __forceinline__ void tx_thresholds(uint32_t (&u)[TX_VECTOR], tx_noise noise, uint32_t at,
                                                     uint32_t gap, int32_t rounding) {
  if (rounding == TX_STOCHASTIC) {
#pragma unroll
    for (int i = 0; i < TX_VECTOR; i++)
      u[i] = tx_threshold(noise, i < TX_VECTOR / 2 ? at : at + gap, (uint32_t)i, 0, TX_STOCHASTIC);
    return;
  }
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++)
    u[i] =
        tx_threshold(noise, i < TX_VECTOR / 2 ? at : at + gap, (uint32_t)i, tx_dithered(0, (uint32_t)i), TX_DITHERED);
}

/* Converts x to what is stored. rounded: by thresholds u, else to nearest. */
static __device__ __forceinline__ void tx_plain_raw(tx_raw &raw, const float (&x)[TX_VECTOR],
                                                    const uint32_t (&u)[TX_VECTOR], int rounded, const tx_dtype dtype) {
  if (dtype == TX_F32) {
#pragma unroll
    for (int i = 0; i < TX_VECTOR; i++)
      raw[i] = tx_bits_from_f32(x[i]);
    return;
  }
  uint32_t halves[TX_VECTOR];
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++) {
    if (dtype == TX_BF16) {
      halves[i] = rounded ? tx_bf16_round(x[i], u[i]) : tx_bf16_from_f32(x[i]);
    } else {
      halves[i] = rounded ? tx_f16_round(x[i], u[i]) : tx_f16_from_f32(x[i]);
    }
  }
  tx_join_codes(raw, halves, dtype);
}

/* -- with block scales -------------------------------------------------------------------------------------------- */

/* The exact values of a vector of codes with their block's scale byte; sqrt(v) in a sqrt format. */
static __device__ __forceinline__ void tx_block_values(float (&x)[TX_VECTOR], const tx_raw &raw, uint8_t scale,
                                                       const tx_dtype dtype, const tx_format format) {
  const tx_block_format f = tx_block_format_of(dtype, format);
  const tx_block_scale decoded = tx_scale_decode(f, scale);
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++)
    x[i] = tx_block_value(f, tx_raw_code(raw, i, dtype), decoded);
}

/* The values that the codes represent: v in a sqrt format. Every NaN becomes the one quiet NaN. */
static __device__ __forceinline__ void tx_scaled_floats(float (&x)[TX_VECTOR], const tx_raw &raw, uint8_t scale,
                                                        const tx_dtype dtype, const tx_format format) {
  tx_block_values(x, raw, scale, dtype, format);
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++)
    x[i] = tx_one_nan(format == TX_FORMAT_SQRT ? x[i] * x[i] : x[i]);
}

/* The largest x of the block's lanes, in all of them. Every lane of the warp has to call it. The warp's own reductions
 * (redux), of which its two blocks need two, took as long on an H200. */
static __device__ __forceinline__ int32_t tx_block_largest(int32_t x) {
#pragma unroll
  for (int by = TX_BLOCK_LANES / 2; by > 0; by /= 2) {
    const int32_t other = __shfl_xor_sync(0xffffffffu, x, by);
    x = other > x ? other : x;
  }
  return x;
}

/* Encodes x; x is sqrt(v) in a sqrt format, and 0 beyond the tensor's end. rounded: by thresholds u, else to nearest.
 * Returns the block's scale byte in all its lanes. Every lane of the warp has to call it. */
static __device__ __forceinline__ uint8_t tx_encode_block(tx_raw &raw, const float (&x)[TX_VECTOR],
                                                          const uint32_t (&u)[TX_VECTOR], int rounded,
                                                          const tx_dtype dtype, const tx_format format) {
  const tx_block_format f = tx_block_format_of(dtype, format);
  const tx_block_plan plan = tx_block_plan_from(f, tx_block_largest(tx_block_amax_bits(x, TX_VECTOR)));
  uint32_t codes[TX_VECTOR];
  int32_t largest = 0;
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++) {
    codes[i] = tx_block_code(f, plan, x[i], rounded, u[i]);
    largest = (int32_t)codes[i] > largest ? (int32_t)codes[i] : largest;
  }
  const uint32_t doubling = tx_block_doubling(f, plan, (uint32_t)tx_block_largest(largest));
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++)
    codes[i] = tx_block_finish(f, plan, x[i], codes[i], doubling);
  tx_join_codes(raw, codes, dtype);
  return tx_block_scale_byte(plan, doubling);
}

/* Writes the scale byte of a block, from the lane that has the block's first element. first: that lane's first element.
 * scales: of the stream's first block. */
static __device__ __forceinline__ void tx_write_scale(uint8_t *scales, uint8_t scale, int64_t first, int32_t count) {
  if (first % TX_BLOCK == 0 && count > 0) scales[first / TX_BLOCK] = scale;
}

#endif
