/* Conversions of the step in fewer instructions, of the kind that a processor has more of: floating-point ones, and
 * integer ones on two halves at a time. The bits are those of csrc/math; what would have others is found by a test that
 * costs a vector little, and goes the ordinary way. */
#ifndef TX_CUDA_ADAMW_QUICK_H
#define TX_CUDA_ADAMW_QUICK_H

#include "csrc/math/remainder.h"
#include "cuda/vector_forms.h"

/* Bits 15 and 31 are set where a half of `word` is 0, and perhaps above such a half; other bits mean nothing. */
static __device__ __forceinline__ uint32_t tx_zero_halves(uint32_t word) {
  return (word - 0x00010001u) & ~word;
}

/* The upper halves of two words, and the lower ones. */
static __device__ __forceinline__ uint32_t tx_upper_halves(uint32_t low, uint32_t high) {
  return low >> 16 | (high & 0xffff0000u);
}
static __device__ __forceinline__ uint32_t tx_lower_halves(uint32_t low, uint32_t high) {
  return (low & 0xffffu) | high << 16;
}

/* 0 where all are below 2^127 in magnitude, else NaN. */
static __device__ __forceinline__ float tx_large_ones(const float (&x)[TX_VECTOR]) {
  float odd = 0.0f;
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++) {
    const float twice = x[i] + x[i];
    odd += twice - twice;
  }
  return odd;
}

/* -- bf16: returns whether raw is right ---------------------------------------------------------------------------- */

static __device__ __forceinline__ bool tx_quick_bf16_nearest(tx_raw &raw, const float (&x)[TX_VECTOR]) {
  uint32_t upper[TX_VECTOR];
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++) {
    const uint32_t bits = tx_bits_from_f32(x[i]);
    upper[i] = bits + 0x7fffu + (bits >> 16 & 1u);
  }
#pragma unroll
  for (int i = 0; i < TX_VECTOR / 2; i++)
    raw[i] = tx_upper_halves(upper[2 * i], upper[2 * i + 1]);
  return tx_large_ones(x) == 0.0f;
}

static __device__ __forceinline__ bool tx_quick_bf16_round(tx_raw &raw, const float (&x)[TX_VECTOR],
                                                           const uint32_t (&u)[TX_VECTOR]) {
  uint32_t upper[TX_VECTOR];
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++)
    upper[i] = tx_bits_from_f32(x[i]) + (u[i] >> 16);
#pragma unroll
  for (int i = 0; i < TX_VECTOR / 2; i++)
    raw[i] = tx_upper_halves(upper[2 * i], upper[2 * i + 1]);
  return tx_large_ones(x) == 0.0f;
}

/* -- bf16 with remainders ------------------------------------------------------------------------------------------ */

/* tx_remainder_join of a vector: a sum, but for weights of 0 and remainders of -32768. */
static __device__ __forceinline__ void tx_quick_join(float (&p)[TX_VECTOR], const tx_raw &weights,
                                                     const tx_raw &remainders) {
  uint32_t odd = 0;
#pragma unroll
  for (int i = 0; i < TX_VECTOR / 2; i++) {
    const uint32_t w = weights[i], r = remainders[i];
    odd |= tx_zero_halves(w & 0x7fff7fffu) | tx_zero_halves(r ^ 0x80008000u);
    p[2 * i] = tx_f32_from_bits((w << 16) + (uint32_t)(int32_t)(int16_t)r);
    p[2 * i + 1] = tx_f32_from_bits((w & 0xffff0000u) + (uint32_t)((int32_t)r >> 16));
  }
  if ((odd & 0x80008000u) == 0u) return;
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++) {
    const uint32_t w = weights[i / 2], r = remainders[i / 2];
    p[i] = tx_remainder_join(i % 2 ? w & 0xffff0000u : w << 16, (int32_t)(i % 2 ? r : r << 16));
  }
}

/* tx_remainder_split of a vector: half a unit added, but for NaN and where the lower half is just that. */
static __device__ __forceinline__ void tx_quick_split(tx_raw &weights, tx_raw &remainders,
                                                      const float (&p)[TX_VECTOR]) {
  uint32_t odd = 0;
#pragma unroll
  for (int i = 0; i < TX_VECTOR / 2; i++) {
    const uint32_t low = tx_bits_from_f32(p[2 * i]), high = tx_bits_from_f32(p[2 * i + 1]);
    weights[i] = tx_upper_halves(low + 0x8000u, high + 0x8000u);
    remainders[i] = tx_lower_halves(low, high);
    odd |= tx_zero_halves(remainders[i] ^ 0x80008000u);
  }
  if ((odd & 0x80008000u) == 0u && tx_large_ones(p) == 0.0f) return;
#pragma unroll
  for (int i = 0; i < TX_VECTOR / 2; i++) {
    const tx_remainder_halves low = tx_remainder_split(p[2 * i]), high = tx_remainder_split(p[2 * i + 1]);
    weights[i] = tx_upper_halves(low.upper, high.upper);
    remainders[i] = tx_lower_halves(low.lower, high.lower);
  }
}

/* -- 8 bits with block scales -------------------------------------------------------------------------------------- */

/* tx_block_values of bytes: a code where an fp32 has its exponent and mantissa is its value, subnormals included, but
 * for a power of two, which two exact products bring. */
static __device__ __forceinline__ void tx_quick_values(float (&x)[TX_VECTOR], const tx_raw &raw, uint8_t byte,
                                                       const tx_format format) {
  const tx_block_format f = tx_block_format_of(TX_U8, format);
  const int s = 23 - f.element.mantissa_bits;
  const int32_t k = (int32_t)byte - 127, raised = k < f.min_exponent ? f.min_exponent : k;
  const float scale = byte == TX_BLOCK_SCALE_NAN ? tx_f32_from_bits(0x7fc00000u)
                                                 : tx_exp2i(raised > f.max_exponent ? f.max_exponent : raised);
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++) {
    const uint32_t word = raw[i / 4];
    const int low = 8 * (i % 4);
    const int32_t top = (int32_t)(word << (24 - low));
    const uint32_t sizes = (f.sign_bit != 0u ? 0x7fu : 0xffu) << s;
    const uint32_t bits =
        f.sign_bit != 0u ? (uint32_t)(top >> (24 - s)) & (0x80000000u | sizes) : tx_shifted(word, s - low) & sizes;
    x[i] = tx_f32_from_bits(bits) * tx_exp2i(127 - f.element.bias) * scale;
  }
}

/* tx_encode_block of bytes, by thresholds: codes are cut out of their sums straight into their places. Blocks that may
 * have to be doubled go the ordinary way. Every lane of the warp calls it. */
static __device__ __forceinline__ uint8_t tx_quick_encode(tx_raw &raw, const float (&x)[TX_VECTOR],
                                                          const uint32_t (&u)[TX_VECTOR], const tx_format format) {
  const tx_block_format f = tx_block_format_of(TX_U8, format);
  const int s = 23 - f.element.mantissa_bits;
  const int32_t amax = tx_block_largest(tx_block_amax_bits(x, TX_VECTOR));
  const tx_block_plan plan = tx_block_plan_from(f, amax);
  if (__any_sync(0xffffffffu, tx_block_may_double(f, plan, amax))) return tx_encode_block(raw, x, u, 1, TX_U8, format);
#pragma unroll
  for (int word = 0; word < TX_VECTOR / 4; word++) {
    uint32_t codes = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const float value = x[4 * word + k];
      const uint32_t sum = tx_block_round(f, plan, value, u[4 * word + k]);
      const uint32_t sign = f.sign_bit << (8 * k), sizes = (f.sign_bit != 0u ? 0x7fu : 0xffu) << (8 * k);
      codes |= tx_shifted(sum, 8 * k - s) & sizes;
      if (f.sign_bit != 0u) codes |= tx_shifted(tx_bits_from_f32(value), 8 * k - 24) & sign;
    }
    raw[word] = codes & plan.keep;
  }
  return tx_block_scale_byte(plan, 0);
}

#endif
