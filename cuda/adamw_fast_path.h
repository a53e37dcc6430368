/* The step of a vector in the fewest instructions. It gives csrc/math's bits for values in the middle of fp32's range,
 * where nearly all values are. Each function's result says whether that holds for the vector. If not, what it computed
 * is arbitrary, and the caller recomputes the vector from the start on the ordinary path. */
#ifndef TX_CUDA_ADAMW_FAST_PATH_H
#define TX_CUDA_ADAMW_FAST_PATH_H

#include "csrc/math/adamw.h"
#include "csrc/math/remainder.h"
#include "cuda/fast_path_math.h"
#include "cuda/packed_words.h"
#include "cuda/vector_forms.h"

/* -- bf16 with remainders ----------------------------------------------------------------------------------------- */

/* tx_see_ties of a vector of remainders. */
static __device__ __forceinline__ uint32_t tx_ties_of(uint32_t seen, const tx_raw &remainders) {
#pragma unroll
  for (int i = 0; i < TX_VECTOR / 2; i += 2)
    seen = tx_see_ties(seen, remainders[i], remainders[i + 1]);
  return seen;
}

/* tx_remainder_join of a vector, by additions. They are wrong for remainders of -32768, which are ties (tx_ties_of),
 * and for negative remainders of zero weights, which give NaN. */
static __device__ __forceinline__ void tx_quick_join(float (&p)[TX_VECTOR], const tx_raw &weights,
                                                     const tx_raw &remainders) {
#pragma unroll
  for (int i = 0; i < TX_VECTOR / 2; i++) {
    const uint32_t w = weights[i], r = remainders[i];
    p[2 * i] = tx_f32_from_bits((w << 16) + (uint32_t)(int32_t)(int16_t)r);
    p[2 * i + 1] = tx_f32_from_bits((w & 0xffff0000u) + (uint32_t)((int32_t)r >> 16));
  }
}

/* tx_remainder_split of a vector without NaN, by rounding to nearest. It is wrong for remainders that are ties. */
static __device__ __forceinline__ void tx_quick_split(tx_raw &weights, tx_raw &remainders,
                                                      const float (&p)[TX_VECTOR]) {
#pragma unroll
  for (int i = 0; i < TX_VECTOR / 2; i++) {
    weights[i] = tx_quick_bf16_pair(p[2 * i], p[2 * i + 1]);
    remainders[i] = tx_lower_halves(tx_bits_from_f32(p[2 * i]), tx_bits_from_f32(p[2 * i + 1]));
  }
}

/* tx_remainder_join and tx_remainder_split of any vector. */
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

/* -- plain -------------------------------------------------------------------------------------------------------- */

/* Rounds x to bf16 by thresholds u. All |x| are below 2^127 and none is NaN. */
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

/* -- 8 bits with block scales ------------------------------------------------------------------------------------- */

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

/* The largest byte of two words. */
static __device__ __forceinline__ uint32_t tx_largest_byte(const uint32_t (&words)[2]) {
  uint32_t bytes[8];
#pragma unroll
  for (int i = 0; i < 8; i++)
    bytes[i] = words[i / 4] >> (8 * (i % 4)) & 0xffu;
  return tx_largest_of(bytes);
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
  const bool may_double = __any_sync(0xffffffffu, tx_quick_may_double(f, plan, amax)) != 0;
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
  if (may_double) { /* a tenth of the blocks */
    const uint32_t largest = (uint32_t)tx_block_largest((int32_t)tx_largest_byte(codes));
    doubling = largest == f.element.max_code - (1u << f.element.mantissa_bits) ? 1u : 0u;
#pragma unroll
    for (int word = 0; word < TX_VECTOR / 4; word++)
      codes[word] = tx_double_bytes(codes[word], doubling, f.element.mantissa_bits);
  }
#pragma unroll
  for (int word = 0; word < TX_VECTOR / 4; word++)
    raw[word] = f.sign_bit != 0u ? codes[word] | (tops[word] & 0x80808080u) : codes[word];
  return (uint32_t)(plan.exponent + 127) - doubling;
}

/* -- the formula -------------------------------------------------------------------------------------------------- */

/* Whether the constants allow tx_quick_update: they are usual; the divisors b of its quotients are in [2^-50, 2^62];
 * and the weight of g^2 is so large that every gradient that needs the clamp has a root above 2^40. */
static __device__ __forceinline__ bool tx_quick_constants(const tx_adamw_constants &c) {
  return tx_adamw_is_usual(&c) && c.rsqrt_bc2 >= 1.0f && c.rsqrt_bc2 <= 1048576.0f && c.eps >= 0.0f && c.eps <= 1.0f &&
         c.exp_avg_sq.weight >= tx_f32_from_bits(TX_POWER_BITS(-44));
}

/* A vector's values: before and after the step. */
struct tx_stepped {
  float p[TX_VECTOR], m[TX_VECTOR], v[TX_VECTOR], root[TX_VECTOR];
  uint32_t m_amax, root_amax; /* patterns of the largest magnitudes; set if tx_quick_update succeeded */
};

/* tx_adamw_average and tx_adamw_update of a vector. p, m, v: the old values on entry. Returns whether the result is
 * right; then no result is NaN or reaches 2^127, all roots are in [2^-50, 2^40], and all |m| that are not 0 in
 * [2^-60, 2^60]. */
static __device__ __forceinline__ bool tx_quick_update(tx_stepped &x, const float (&g)[TX_VECTOR],
                                                       const tx_adamw_constants &c) {
  uint32_t roots[TX_VECTOR], twice[TX_VECTOR];
  float m_sizes[TX_VECTOR], p_sizes[TX_VECTOR];
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++) {
    const tx_adamw_moments moments =
        tx_adamw_average_within(c, 1, g[i], 0.0f, x.m[i], x.v[i]); /* moments.root is not used */
    x.m[i] = moments.m;
    x.v[i] = moments.v;
    x.root[i] = tx_quick_root(x.v[i]);
    x.p[i] = tx_adamw_apply(c, x.p[i], tx_quick_quotient(x.m[i], x.root[i] * c.rsqrt_bc2 + c.eps));
    roots[i] = tx_bits_from_f32(x.root[i]);
    twice[i] = 2u * tx_bits_from_f32(x.m[i]) - 1u; /* large for zeros */
    m_sizes[i] = fabsf(x.m[i]);
    p_sizes[i] = fabsf(x.p[i]);
  }
  /* In pairs, then pairs of pairs: the last of seven dependent instructions would come late. */
#pragma unroll
  for (int by = TX_VECTOR / 2; by > 0; by /= 2) {
#pragma unroll
    for (int i = 0; i < by; i++) {
      m_sizes[i] = fmaxf(m_sizes[i], m_sizes[i + by]); /* ignores NaN, which the sum then detects */
      p_sizes[i] += p_sizes[i + by];
    }
  }
  x.m_amax = tx_bits_from_f32(m_sizes[0]);
  x.root_amax = tx_largest_of(roots);
  /* & instead of &&: no branches. */
  return (tx_least_of(roots) >= TX_POWER_BITS(-50)) & (x.root_amax <= TX_POWER_BITS(40)) &
         (tx_least_of(twice) >= 2u * TX_POWER_BITS(-60) - 1u) & (x.m_amax <= TX_POWER_BITS(60)) &
         (p_sizes[0] < tx_f32_from_bits(TX_POWER_BITS(127)));
}

/* The same for any vector and constants. */
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
