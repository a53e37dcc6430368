/* The step of a vector in the fewest instructions: csrc/math's bits for values in the middle of fp32's range, which is
 * where nearly all are. Each function says by its result whether the vector was one of those; what is not goes the
 * ordinary way, from the start, so that what was computed of it may be anything. */
#ifndef TX_CUDA_ADAMW_FAST_PATH_H
#define TX_CUDA_ADAMW_FAST_PATH_H

#include "csrc/math/adamw.h"
#include "csrc/math/remainder.h"
#include "cuda/fast_path_math.h"
#include "cuda/vector_forms.h"

/* -- bf16 with remainders ------------------------------------------------------------------------------------------ */

/* Bits 15 and 31 of the result are set where a half of `word` is 0x8000, and perhaps where the upper one is 0x8001. */
static __device__ __forceinline__ uint32_t tx_half_ways(uint32_t word) {
  return (word - 0x80018001u) & word;
}

/* The upper halves of two words, and the lower ones. */
static __device__ __forceinline__ uint32_t tx_upper_halves(uint32_t low, uint32_t high) {
  return low >> 16 | (high & 0xffff0000u);
}
static __device__ __forceinline__ uint32_t tx_lower_halves(uint32_t low, uint32_t high) {
  return (low & 0xffffu) | high << 16;
}

/* tx_remainder_join of a vector: a sum, but for remainders of -32768, for which the result has bit 15 or 31, and for
 * negative ones beside weights of 0, which become NaN. */
static __device__ __forceinline__ uint32_t tx_quick_join(float (&p)[TX_VECTOR], const tx_raw &weights,
                                                         const tx_raw &remainders) {
  uint32_t odd = 0;
#pragma unroll
  for (int i = 0; i < TX_VECTOR / 2; i++) {
    const uint32_t w = weights[i], r = remainders[i];
    odd |= tx_half_ways(r);
    p[2 * i] = tx_f32_from_bits((w << 16) + (uint32_t)(int32_t)(int16_t)r);
    p[2 * i + 1] = tx_f32_from_bits((w & 0xffff0000u) + (uint32_t)((int32_t)r >> 16));
  }
  return odd;
}

/* tx_remainder_split of a vector without NaN: to nearest, but for lower halves of 0x8000, for which the result has bit
 * 15 or 31. */
static __device__ __forceinline__ uint32_t tx_quick_split(tx_raw &weights, tx_raw &remainders,
                                                          const float (&p)[TX_VECTOR]) {
  uint32_t odd = 0;
#pragma unroll
  for (int i = 0; i < TX_VECTOR / 2; i++) {
    weights[i] = tx_quick_bf16_pair(p[2 * i], p[2 * i + 1]);
    remainders[i] = tx_lower_halves(tx_bits_from_f32(p[2 * i]), tx_bits_from_f32(p[2 * i + 1]));
    odd |= tx_half_ways(remainders[i]);
  }
  return odd;
}

/* The same of any vector. */
static __device__ __forceinline__ void tx_join(float (&p)[TX_VECTOR], const tx_raw &weights, const tx_raw &remainders) {
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++) {
    const uint32_t w = weights[i / 2], r = remainders[i / 2];
    p[i] = tx_remainder_join(i % 2 ? w & 0xffff0000u : w << 16, (int32_t)(i % 2 ? r : r << 16));
  }
}
static __device__ __forceinline__ void tx_split(tx_raw &weights, tx_raw &remainders, const float (&p)[TX_VECTOR]) {
#pragma unroll
  for (int i = 0; i < TX_VECTOR / 2; i++) {
    const tx_remainder_halves low = tx_remainder_split(p[2 * i]), high = tx_remainder_split(p[2 * i + 1]);
    weights[i] = tx_upper_halves(low.upper, high.upper);
    remainders[i] = tx_lower_halves(low.lower, high.lower);
  }
}

static __device__ __forceinline__ bool tx_is_half_way(uint32_t odd) {
  return (odd & 0x80008000u) != 0u;
}

/* -- plain --------------------------------------------------------------------------------------------------------- */

/* x, all below 2^127 and none NaN, as bf16, rounded by thresholds u. */
static __device__ __forceinline__ void tx_quick_bf16_round(tx_raw &raw, const float (&x)[TX_VECTOR],
                                                           const uint32_t (&u)[TX_VECTOR]) {
#pragma unroll
  for (int i = 0; i < TX_VECTOR / 2; i++)
    raw[i] = tx_upper_halves(tx_bits_from_f32(x[2 * i]) + (u[2 * i] >> 16),
                             tx_bits_from_f32(x[2 * i + 1]) + (u[2 * i + 1] >> 16));
}

static __device__ __forceinline__ void tx_quick_bf16_nearest(tx_raw &raw, const float (&x)[TX_VECTOR]) {
#pragma unroll
  for (int i = 0; i < TX_VECTOR / 2; i++)
    raw[i] = tx_quick_bf16_pair(x[2 * i], x[2 * i + 1]);
}

/* -- 8 bits with block scales -------------------------------------------------------------------------------------- */

/* tx_block_values of bytes whose scale is at most 2^7: a code where an fp32 has its exponent and mantissa is its value,
 * subnormals included, but for a power of two. Returns whether the scale is. */
static __device__ __forceinline__ bool tx_quick_values(float (&x)[TX_VECTOR], const tx_raw &raw, uint8_t byte,
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

/* The bytes at bits `from` of four words, the first one's lowest. */
static __device__ __forceinline__ uint32_t tx_join_bytes(const uint32_t (&words)[4], const int from) {
  const int up = 24 - from;
  const uint32_t low = (words[0] << up) >> 24 | (words[1] << up & 0xff000000u) >> 16;
  const uint32_t high = ((words[2] << up) >> 8 & 0x00ff0000u) | (words[3] << up & 0xff000000u);
  return low | high;
}

/* tx_encode_block of bytes, by thresholds, of vectors without NaN; amax_bits: of the vector. In a sqrt format all are
 * above 0. Of codes only what is below an exponent's multiple of 16 counts, so that they are rebased four at a time.
 * Returns whether raw and *scale are right: blocks that may have to be doubled are not coded, nor where `quick` is
 * false. Every lane of the warp calls it, and all are told the same. */
static __device__ __forceinline__ bool tx_quick_encode(tx_raw &raw, uint8_t *scale, const float (&x)[TX_VECTOR],
                                                       uint32_t amax_bits, const uint32_t (&u)[TX_VECTOR], bool quick,
                                                       const tx_format format) {
  const tx_block_format f = tx_block_format_of(TX_U8, format);
  const int s = 23 - f.element.mantissa_bits;
  const int32_t amax = tx_block_largest((int32_t)amax_bits);
  const tx_block_plan plan = tx_block_plan_from(f, amax);
  if (__any_sync(0xffffffffu, !quick || tx_block_may_double(f, plan, amax))) return false;
  const uint32_t rebase = plan.at.rebase + (1u << 23);
  const uint32_t rebase_codes = (rebase >> s & 0x7fu) * 0x01010101u;
#pragma unroll
  for (int word = 0; word < TX_VECTOR / 4; word++) {
    uint32_t sums[4];
    uint32_t tops[4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int i = 4 * word + k;
      const float size = f.sign_bit != 0u ? fabsf(x[i]) : x[i];
      sums[k] = tx_bits_from_f32(size + fmaxf(size, plan.at.least_normal)) + (u[i] >> (9 + f.element.mantissa_bits));
      tops[k] = tx_bits_from_f32(x[i]);
      if (f.sign_bit == 0u) {
        const int32_t code = (int32_t)(sums[k] - rebase), least = 1 << s;
        sums[k] = (uint32_t)(code > least ? code : least);
      }
    }
    uint32_t codes = tx_join_bytes(sums, s);
    if (f.sign_bit != 0u) {
      const uint32_t signs = tx_join_bytes(tops, 24);
      codes = (((codes | 0x80808080u) - rebase_codes) & 0x7f7f7f7fu) | (signs & 0x80808080u);
    }
    raw[word] = codes & plan.keep;
  }
  *scale = tx_block_scale_byte(plan, 0);
  return true;
}

/* -- the formula --------------------------------------------------------------------------------------------------- */

/* What the constants must be for tx_quick_update: the usual ones, b of its quotients in [2^-50, 2^62], and a weight of
 * g^2 by which the root of a gradient that would have to be limited is above 2^40. */
static __device__ __forceinline__ bool tx_quick_constants(const tx_adamw_constants &c) {
  return tx_adamw_is_usual(&c) && c.rsqrt_bc2 >= 1.0f && c.rsqrt_bc2 <= 1048576.0f && c.eps >= 0.0f && c.eps <= 1.0f &&
         c.exp_avg_sq.weight >= tx_f32_from_bits(TX_POWER_BITS(-44));
}

/* What a vector's values became. */
struct tx_stepped {
  float p[TX_VECTOR], m[TX_VECTOR], v[TX_VECTOR], root[TX_VECTOR];
  uint32_t m_amax, root_amax; /* patterns of the largest; known where tx_quick_update was right */
};

/* tx_adamw_average and tx_adamw_update of a vector. Returns whether it is right; if so no result is NaN or reaches
 * 2^127, and all roots are above 0. p, m, v: on entry the old ones. */
static __device__ __forceinline__ bool tx_quick_update(tx_stepped &x, const float (&g)[TX_VECTOR],
                                                       const tx_adamw_constants &c) {
  uint32_t roots[TX_VECTOR], twice[TX_VECTOR];
  float m_amax = 0.0f, p_sum = 0.0f;
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++) {
    const tx_adamw_moments moments =
        tx_adamw_average_within(c, 1, g[i], 0.0f, x.m[i], x.v[i]); /* root is not looked at */
    x.m[i] = moments.m;
    x.v[i] = moments.v;
    x.root[i] = tx_quick_root(x.v[i]);
    x.p[i] = tx_adamw_moved(c, x.p[i], tx_quick_quotient(x.m[i], x.root[i] * c.rsqrt_bc2 + c.eps));
    roots[i] = tx_bits_from_f32(x.root[i]);
    twice[i] = 2u * tx_bits_from_f32(x.m[i]) - 1u; /* of zeros it is large */
    m_amax = fmaxf(m_amax, fabsf(x.m[i]));         /* passes over NaN, which p shows */
    p_sum += fabsf(x.p[i]);
  }
  x.m_amax = tx_bits_from_f32(m_amax);
  x.root_amax = tx_largest_of(roots);
  return tx_least_of(roots) >= TX_POWER_BITS(-50) && x.root_amax <= TX_POWER_BITS(40) &&
         tx_least_of(twice) >= 2u * TX_POWER_BITS(-60) - 1u && x.m_amax <= TX_POWER_BITS(60) &&
         p_sum < tx_f32_from_bits(TX_POWER_BITS(127));
}

/* The same of any vector and constants. */
static __device__ __forceinline__ void tx_update(tx_stepped &x, const float (&g)[TX_VECTOR],
                                                 const tx_adamw_constants &c) {
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++) {
    const tx_adamw_moments moments = tx_adamw_average(c, g[i], x.p[i], x.m[i], x.v[i]);
    x.m[i] = moments.m;
    x.v[i] = moments.v;
    x.root[i] = moments.root;
    x.p[i] = tx_adamw_update(c, x.p[i], moments.m, moments.root);
  }
  x.m_amax = x.root_amax = 0;
}

#endif
