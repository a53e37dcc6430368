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

/* Whether a remainder is -32768, and its weight odd. The step writes no such pair. */
static __device__ __forceinline__ bool tx_has_odd_tie(const tx_raw &weights, const tx_raw &remainders) {
  bool found = false;
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++)
    found = found | (tx_half(remainders[i / 2], i % 2) == 0x8000u && (tx_half(weights[i / 2], i % 2) & 1u) != 0u);
  return found;
}

/* tx_remainder_join of a vector, by additions. They are wrong for odd ties (tx_has_odd_tie), and for negative
 * remainders of zero weights, which give NaN. */
static __device__ __forceinline__ void tx_quick_join(float (&p)[TX_VECTOR], const tx_raw &weights,
                                                     const tx_raw &remainders) {
#pragma unroll
  for (int i = 0; i < TX_VECTOR / 2; i++) {
    const uint32_t w = weights[i], r = remainders[i];
    p[2 * i] = tx_f32_from_bits((w << 16) + (uint32_t)(int32_t)(int16_t)r);
    p[2 * i + 1] = tx_f32_from_bits((w & 0xffff0000u) + (uint32_t)((int32_t)r >> 16));
  }
}

/* tx_remainder_split of a vector without NaN, by rounding to nearest. It is wrong for half of the ties (tx_ties_of). */
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
