/* 8-bit values with block scales in the fewest instructions, for values in the middle of fp32's range: as
 * cuda/adamw_fast_path.h, with the bits of csrc/math/block_scale.h. */
#ifndef TX_CUDA_QUICK_BLOCKS_H
#define TX_CUDA_QUICK_BLOCKS_H

#include "csrc/math/block_scale.h"
#include "cuda/fast_path_math.h"
#include "cuda/packed_words.h"
#include "cuda/vector_forms.h"

/* tx_block_values of bytes whose scale is at most 2^7, by one multiplication: a code shifted to where an fp32 has
 * exponent and mantissa is its value times a constant power of two, for subnormals, too. Returns whether the scale is
 * at most 2^7. */
static __device__ __forceinline__ bool tx_quick_values(float (&x)[TX_VECTOR], const tx_raw &raw, uint32_t byte,
                                                       const tx_format format) {
  const tx_block_format f = tx_block_format_of(TX_U8, format);
  const int s = 23 - f.element.mantissa_bits;
  const int32_t least = f.min_exponent + 127, raised = (int32_t)byte < least ? least : (int32_t)byte;
  const float scale = tx_f32_from_bits((uint32_t)(raised + 127 - f.element.bias) << 23);
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++) {
    const uint32_t word = raw[i / 4];
    const int low = 8 * (i % 4);
    const int32_t top = (int32_t)(word << (24 - low));
    const uint32_t sizes = (f.sign_bit != 0u ? 0x7fu : 0xffu) << s;
    const uint32_t bits =
        f.sign_bit != 0u ? (uint32_t)(top >> (24 - s)) & (0x80000000u | sizes) : tx_shifted(word, s - low) & sizes;
    x[i] = tx_f32_from_bits(bits) * scale;
  }
  return (int32_t)byte <= 127 + 7;
}

/* tx_block_finish's doubling of four codes without signs at a time: codes of at least `doubling` get their exponent's
 * unit added, smaller ones, which are subnormal, are added to themselves. */
static __device__ __forceinline__ uint32_t tx_double_bytes(uint32_t codes, uint32_t doubling, const int mantissa_bits) {
  const uint32_t exponents = codes & (0x100u - (1u << mantissa_bits)) * 0x01010101u;
  const uint32_t normal = (((exponents & 0x7f7f7f7fu) + 0x7f7f7f7fu) | exponents) & 0x80808080u;
  const uint32_t by = normal >> (7 - mantissa_bits) | (codes & ~((normal >> 7) * 0xffu));
  return codes + (doubling != 0u ? by : 0u);
}

/* tx_block_plan_from for an amax in [2^-60, 2^60], of roots in [2^-50, 2^40]: such a block has no clamped exponent, and
 * its amax is a normal number of the format. */
struct tx_quick_plan {
  int32_t exponent;
  uint32_t least; /* the pattern of the least normal; code 0 of a sum (tx_small_sum) has the same */
};
static __device__ __forceinline__ tx_quick_plan tx_quick_plan_from(const tx_block_format f, int32_t amax) {
  const int32_t most = tx_block_max_bits(f, 0);
  const int32_t exponent = ((amax + (0x7fffff - (most & 0x7fffff))) >> 23) - (most >> 23);
  const tx_quick_plan plan = {exponent, (uint32_t)(128 - f.element.bias + exponent) << 23};
  return plan;
}

/* tx_block_may_double. */
static __device__ __forceinline__ bool tx_quick_may_double(const tx_block_format f, const tx_quick_plan &plan,
                                                           int32_t amax) {
  const int s = 23 - f.element.mantissa_bits;
  const uint32_t one = 1u << f.element.mantissa_bits;
  return (uint32_t)amax - plan.least < (f.element.max_code - 2u * one + 1u) << s;
}

/* The codes of a word of four elements, before doubling and without signs, in a signed format. Exponents of codes
 * matter modulo 16 only, so that four codes are rebased at a time. */
static __device__ __forceinline__ uint32_t tx_quick_codes(const tx_block_format f, const tx_quick_plan &plan,
                                                          const float (&x)[4], const uint32_t (&u)[4]) {
  const int s = 23 - f.element.mantissa_bits;
  uint32_t sums[4];
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const float size = f.sign_bit != 0u ? fabsf(x[k]) : x[k];
    sums[k] =
        tx_bits_from_f32(size + fmaxf(size, tx_f32_from_bits(plan.least))) + (u[k] >> (9 + f.element.mantissa_bits));
    if (f.sign_bit == 0u) {
      const int32_t code = (int32_t)(sums[k] - plan.least), least = 1 << s;
      sums[k] = (uint32_t)(code > least ? code : least);
    }
  }
  const uint32_t codes = tx_join_bytes(sums, s);
  if (f.sign_bit == 0u) return codes;
  return ((codes | 0x80808080u) - (plan.least >> s & 0x7fu) * 0x01010101u) & 0x7f7f7f7fu;
}

/* tx_encode_block of bytes by thresholds, for vectors without NaN. amax: the pattern of the block's amax
 * (tx_block_largest), in the range of tx_quick_plan_from; in a sqrt format all values are above 0. Every lane of the
 * warp has to call it. */
static __device__ __forceinline__ uint32_t tx_quick_encode(tx_raw &raw, const float (&x)[TX_VECTOR], int32_t amax,
                                                           const uint32_t (&u)[TX_VECTOR], const tx_format format) {
  const tx_block_format f = tx_block_format_of(TX_U8, format);
  const tx_quick_plan plan = tx_quick_plan_from(f, amax);
  const bool may_double = tx_quick_may_double(f, plan, amax);
  uint32_t codes[TX_VECTOR / 4], tops[TX_VECTOR / 4];
#pragma unroll
  for (int word = 0; word < TX_VECTOR / 4; word++) {
    const float four[4] = {x[4 * word], x[4 * word + 1], x[4 * word + 2], x[4 * word + 3]};
    const uint32_t thresholds[4] = {u[4 * word], u[4 * word + 1], u[4 * word + 2], u[4 * word + 3]};
    codes[word] = tx_quick_codes(f, plan, four, thresholds);
    uint32_t patterns[4];
#pragma unroll
    for (int k = 0; k < 4; k++)
      patterns[k] = tx_bits_from_f32(four[k]);
    tops[word] = tx_join_bytes(patterns, 24);
  }
  uint32_t doubling = 0;
  if (__any_sync(0xffffffffu, may_double) != 0) { /* a tenth of the blocks */
    /* The block's amax is between MAX/2 and the code after it, so no code of the block is larger than that one. */
    const uint32_t after = (f.element.max_code - (1u << f.element.mantissa_bits) + 1u) * 0x01010101u;
    const uint32_t above = __ballot_sync(0xffffffffu, tx_has_zero_byte(codes[0] ^ after, codes[1] ^ after));
    const bool doubles = may_double && (above >> (threadIdx.x & TX_BLOCK_LANES) & 0xffffu) == 0u;
    doubling = doubles ? 1u : 0u;
    if (__any_sync(0xffffffffu, doubles) != 0) {
#pragma unroll
      for (int word = 0; word < TX_VECTOR / 4; word++)
        codes[word] = tx_double_bytes(codes[word], doubling, f.element.mantissa_bits);
    }
  }
#pragma unroll
  for (int word = 0; word < TX_VECTOR / 4; word++)
    raw[word] = f.sign_bit != 0u ? codes[word] | (tops[word] & 0x80808080u) : codes[word];
  return (uint32_t)(plan.exponent + 127) - doubling;
}

#endif
