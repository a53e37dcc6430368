/* The step of a vector in the fewest instructions. It gives csrc/math's bits for values in the middle of fp32's range,
 * where nearly all values are. Each function's result says whether that holds for the vector. If not, what it computed
 * is arbitrary, and the caller recomputes the vector from the start on the ordinary path. */
#ifndef TX_CUDA_ADAMW_FAST_PATH_H
#define TX_CUDA_ADAMW_FAST_PATH_H

#include "csrc/math/adamw.h"
#include "csrc/math/remainder.h"
#include "cuda/fast_path_math.h"
#include "cuda/vector_forms.h"

/* -- bf16 with remainders ----------------------------------------------------------------------------------------- */

/* Bits 15 and 31 of the result are set where a half of `word` is 0x8000; also, perhaps, where the upper half is
 * 0x8001. */
static __device__ __forceinline__ uint32_t tx_tie_bits(uint32_t word) {
  return (word - 0x80018001u) & word;
}

/* The upper halves of two words as one word, and the lower halves. */
static __device__ __forceinline__ uint32_t tx_upper_halves(uint32_t low, uint32_t high) {
  return low >> 16 | (high & 0xffff0000u);
}
static __device__ __forceinline__ uint32_t tx_lower_halves(uint32_t low, uint32_t high) {
  return (low & 0xffffu) | high << 16;
}

/* tx_remainder_join of a vector, by additions. They are wrong for remainders of -32768, which set bit 15 or 31 of the
 * result, and for negative remainders of zero weights, which give NaN. */
static __device__ __forceinline__ uint32_t tx_quick_join(float (&p)[TX_VECTOR], const tx_raw &weights,
                                                         const tx_raw &remainders) {
  uint32_t ties = 0;
#pragma unroll
  for (int i = 0; i < TX_VECTOR / 2; i++) {
    const uint32_t w = weights[i], r = remainders[i];
    ties |= tx_tie_bits(r);
    p[2 * i] = tx_f32_from_bits((w << 16) + (uint32_t)(int32_t)(int16_t)r);
    p[2 * i + 1] = tx_f32_from_bits((w & 0xffff0000u) + (uint32_t)((int32_t)r >> 16));
  }
  return ties;
}

/* tx_remainder_split of a vector without NaN, by rounding to nearest. It is wrong for lower halves of 0x8000, which set
 * bit 15 or 31 of the result. */
static __device__ __forceinline__ uint32_t tx_quick_split(tx_raw &weights, tx_raw &remainders,
                                                          const float (&p)[TX_VECTOR]) {
  uint32_t ties = 0;
#pragma unroll
  for (int i = 0; i < TX_VECTOR / 2; i++) {
    weights[i] = tx_quick_bf16_pair(p[2 * i], p[2 * i + 1]);
    remainders[i] = tx_lower_halves(tx_bits_from_f32(p[2 * i]), tx_bits_from_f32(p[2 * i + 1]));
    ties |= tx_tie_bits(remainders[i]);
  }
  return ties;
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

static __device__ __forceinline__ bool tx_has_tie(uint32_t ties) {
  return (ties & 0x80008000u) != 0u;
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

/* Joins one byte of each of four words, the one from bit `from` on; the first word's byte is the lowest. */
static __device__ __forceinline__ uint32_t tx_join_bytes(const uint32_t (&words)[4], const int from) {
  const int up = 24 - from;
  const uint32_t low = (words[0] << up) >> 24 | (words[1] << up & 0xff000000u) >> 16;
  const uint32_t high = ((words[2] << up) >> 8 & 0x00ff0000u) | (words[3] << up & 0xff000000u);
  return low | high;
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

/* tx_encode_block of bytes by thresholds, for vectors without NaN; in a sqrt format all values are above 0. amax: the
 * pattern of the block's amax (tx_block_largest). Exponents of codes matter modulo 16 only, so four codes are rebased
 * at a time. Returns whether `quick` is true in all lanes of the warp; if not, raw and *scale are not set. Every lane
 * of the warp has to call it, and all get the same result. */
static __device__ __forceinline__ bool tx_quick_encode(tx_raw &raw, uint8_t *scale, const float (&x)[TX_VECTOR],
                                                       int32_t amax, const uint32_t (&u)[TX_VECTOR], bool quick,
                                                       const tx_format format) {
  const tx_block_format f = tx_block_format_of(TX_U8, format);
  const int s = 23 - f.element.mantissa_bits;
  const tx_block_plan plan = tx_block_plan_from(f, amax);
  if (__any_sync(0xffffffffu, !quick)) return false;
  const bool may_double = __any_sync(0xffffffffu, tx_block_may_double(f, plan, amax)) != 0;
  const uint32_t rebase = plan.at.rebase + (1u << 23);
  const uint32_t rebase_codes = (rebase >> s & 0x7fu) * 0x01010101u;
  uint32_t codes[TX_VECTOR / 4], signs[TX_VECTOR / 4];
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
    codes[word] = tx_join_bytes(sums, s);
    signs[word] = f.sign_bit != 0u ? tx_join_bytes(tops, 24) & 0x80808080u : 0u;
    if (f.sign_bit != 0u) codes[word] = ((codes[word] | 0x80808080u) - rebase_codes) & 0x7f7f7f7fu;
  }
  uint32_t doubling = 0;
  if (may_double) { /* a tenth of the blocks */
    doubling = tx_block_doubling(f, plan, (uint32_t)tx_block_largest((int32_t)tx_largest_byte(codes)));
#pragma unroll
    for (int word = 0; word < TX_VECTOR / 4; word++)
      codes[word] = tx_double_bytes(codes[word], doubling, f.element.mantissa_bits);
  }
#pragma unroll
  for (int word = 0; word < TX_VECTOR / 4; word++)
    raw[word] = (codes[word] | signs[word]) & plan.keep;
  *scale = tx_block_scale_byte(plan, doubling);
  return true;
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
 * right; then no result is NaN or reaches 2^127, and all roots are above 0. */
static __device__ __forceinline__ bool tx_quick_update(tx_stepped &x, const float (&g)[TX_VECTOR],
                                                       const tx_adamw_constants &c) {
  uint32_t roots[TX_VECTOR], twice[TX_VECTOR];
  float m_amax = 0.0f, p_sum = 0.0f;
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
    m_amax = fmaxf(m_amax, fabsf(x.m[i]));         /* ignores NaN, which p_sum then detects */
    p_sum += fabsf(x.p[i]);
  }
  x.m_amax = tx_bits_from_f32(m_amax);
  x.root_amax = tx_largest_of(roots);
  return tx_least_of(roots) >= TX_POWER_BITS(-50) && x.root_amax <= TX_POWER_BITS(40) &&
         tx_least_of(twice) >= 2u * TX_POWER_BITS(-60) - 1u && x.m_amax <= TX_POWER_BITS(60) &&
         p_sum < tx_f32_from_bits(TX_POWER_BITS(127));
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
