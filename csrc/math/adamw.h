/* The AdamW step of one element (Loshchilov & Hutter 2019, Algorithm 2), in one place for every back end.
 *
 * p is the master weight (or the weight, where there is no master), m is exp_avg, v is exp_avg_sq; m', v', p' are their
 * values after the step. t is the number of the step, from 1 on.
 *
 *   g  = clamped(factor * grad)                    factor = clip_coef / grad_scale, negated for maximize
 *   g  = clamped(g + l2 * p)                       only if l2 != 0
 *   m' = m + (1 - beta1) * (g - m)                 for beta1 < 1/2: g + beta1 * (m - g)
 *   v' = v + (1 - beta2) * (g * g - v)             likewise; 1 - beta2 slightly less for 8-bit codes (dither_lag.h)
 *   p' = p - (step_size * (m' / (sqrt(v') * rsqrt_bc2 + eps)) + decay * p)
 *
 * where
 *
 *   step_size = lr / (1 - beta1^t)                 lr and the bias correction of m
 *   rsqrt_bc2 = 1 / sqrt(1 - beta2^t)              the bias correction of v
 *   decay = lr * weight_decay, l2 = 0              for decoupled weight decay (AdamW)
 *   decay = 0, l2 = weight_decay                   for L2 regularisation (Adam)
 *
 * Elements are computed in fp32, in this order of operations, without contraction. Constants are computed in double and
 * rounded once. Each average starts from the operand with the larger weight: starting from the other one, a large old
 * value would cancel and leave its rounding error behind.
 *
 * clamped(x) clamps |x| to tx_adamw_grad_limit(), unless an operand of x is not finite. So finite gradients keep every
 * state finite, whatever finite values the states have: m' is between m and g, and v' between v and g^2 (rounding is
 * monotone and the smaller weight is <= 1/2). g^2 <= tx_adamw_grad_limit()^2 is below the largest number of every
 * format of v. |g - m| rounds to at most the largest fp32 number, because tx_adamw_grad_limit() is less than half an
 * ulp of that. A NaN gradient makes m', v' and p' NaN. An Inf gradient makes p' NaN, and m' and v' Inf; or NaN, where
 * the old value was not finite either or the average starts from the gradient (beta < 1/2). */
#ifndef TX_MATH_ADAMW_H
#define TX_MATH_ADAMW_H

#include <math.h>

#include "csrc/math/numeric.h"
#include "csrc/torch_ext.h"

/* The largest |g|: 31 * 2^59, about 1.8e19, which is also the largest sqrt(v) that has an e4m4 code. Its square,
 * 961 * 2^118, is exact and less than the largest bf16 number and the square of the largest fp16 code. */
#define TX_ADAMW_GRAD_LIMIT_BITS 0x5f780000u
TX_FN float tx_adamw_grad_limit(void) {
  return tx_f32_from_bits(TX_ADAMW_GRAD_LIMIT_BITS);
}

/* How an old value and a new one are averaged: from + weight * (to - from), where `from` is the one with the larger
 * weight. */
typedef struct tx_average {
  float weight;     /* of `to`, <= 1/2 */
  int32_t from_new; /* whether `from` is the new value: beta < 1/2 */
} tx_average;

TX_FN tx_average tx_average_from_beta(double beta) {
  const tx_average a = {(float)(beta < 0.5 ? beta : 1.0 - beta), beta < 0.5};
  return a;
}

/* old, added >= 0 give a result >= 0: rounding is monotone, so fl(to - from) >= -from, its product with a weight in
 * [0, 1] is >= -from too, and `from` plus that is >= 0. */
TX_FN float tx_averaged(tx_average a, float old, float added) {
  const float from = a.from_new ? added : old;
  const float to = a.from_new ? old : added;
  return from + a.weight * (to - from);
}

typedef struct tx_adamw_constants {
  float factor;
  float l2;
  tx_average exp_avg;
  tx_average exp_avg_sq;
  float rsqrt_bc2;
  float eps;
  float step_size;
  float decay;
} tx_adamw_constants;

/* base^n for n >= 0, by repeated squaring: the same bits on host and device, whose libraries' pow() may differ. */
TX_FN double tx_power(double base, int64_t n) {
  double power = 1.0;
  for (; n > 0; n >>= 1) {
    if ((n & 1) != 0) power *= base;
    base *= base;
  }
  return power;
}

/* x rounded to the nearest fp32, clamped to the largest finite number: an Inf would give NaN in Inf * 0. */
TX_FN float tx_adamw_constant(double x) {
  const double most = (double)tx_f32_from_bits(0x7f7fffffu);
  return (float)(x > most ? most : x < -most ? -most : x);
}

/* step: t, the number of the step to be computed, >= 1. lr is used instead of group->lr. lag: the fraction by which v's
 * weight 1 - beta2 is reduced (dither_lag.h). The caller has checked 0 <= beta < 1. */
TX_FN tx_adamw_constants tx_adamw_prepare(const tx_adamw_group *group, double lr, int64_t step, double clip_coef,
                                          double grad_scale, double lag) {
  const double factor = clip_coef / grad_scale;
  const int decoupled = group->decoupled != 0.0;
  tx_adamw_constants c;
  c.factor = tx_adamw_constant(group->maximize != 0.0 ? -factor : factor);
  c.l2 = tx_adamw_constant(decoupled ? 0.0 : group->weight_decay);
  c.exp_avg = tx_average_from_beta(group->beta1);
  c.exp_avg_sq = tx_average_from_beta(group->beta2 + lag * (1.0 - group->beta2));
  c.rsqrt_bc2 = (float)(1.0 / sqrt(1.0 - tx_power(group->beta2, step)));
  c.eps = tx_adamw_constant(group->eps);
  c.step_size = tx_adamw_constant(lr / (1.0 - tx_power(group->beta1, step)));
  c.decay = tx_adamw_constant(decoupled ? lr * group->weight_decay : 0.0);
  return c;
}

/* Whether the constants are of the common kind: no l2 term, and both averages start from the old value. */
TX_FN int tx_adamw_is_usual(const tx_adamw_constants *c) {
  return c->l2 == 0.0f && !c->exp_avg.from_new && !c->exp_avg_sq.from_new;
}

/* The moments after the step, unrounded. root = sqrt(v), which is what 8-bit and fp16 states store. */
typedef struct tx_adamw_moments {
  float m;
  float v;
  float root;
} tx_adamw_moments;

/* x clamped to tx_adamw_grad_limit() in magnitude if `from` is finite, else x itself. `from` has to be finite exactly
 * where the operands of x are. In integers: comparisons of floats kept gcc 12 from vectorising. */
TX_FN float tx_adamw_clamped(float x, float from) {
  const int32_t most = tx_magnitude_bits(from) < TX_F32_INF ? (int32_t)TX_ADAMW_GRAD_LIMIT_BITS : 0x7fffffff;
  const int32_t size = tx_magnitude_bits(x);
  return tx_f32_from_bits((uint32_t)(size < most ? size : most) | (tx_bits_from_f32(x) & 0x80000000u));
}

TX_FN tx_adamw_moments tx_adamw_moments_of(tx_adamw_constants c, float g, float m, float v) {
  tx_adamw_moments r;
  r.m = tx_averaged(c.exp_avg, m, g);
  r.v = tx_averaged(c.exp_avg_sq, v, g * g);
  r.root = sqrtf(r.v);
  return r;
}

/* The first half of the step: both moments. Non-finite gradients give non-finite results; callers that skip such steps
 * do so before. */
TX_FN tx_adamw_moments tx_adamw_average(tx_adamw_constants c, float grad, float p, float m, float v) {
  float g = tx_adamw_clamped(c.factor * grad, grad);
  if (c.l2 != 0.0f) g = tx_adamw_clamped(g + c.l2 * p, g + p); /* g + p cannot overflow for a finite p */
  return tx_adamw_moments_of(c, g, m, v);
}

/* tx_adamw_average without the clamp, in fewer instructions, for loops that detect the elements that need the clamp and
 * recompute them. A loop can detect them beforehand, by tx_adamw_within_of. If the constants are tx_adamw_is_usual, it
 * can also detect them afterwards, by a root above TX_ADAMW_ROOT_BITS: every g that needs the clamp has such a root,
 * since v' >= (1 - beta2) * g^2 and 1 - beta2 >= 2^-53, and so has everything that is not finite.
 *
 * usual: tx_adamw_is_usual of the constants, or 0; a compile-time constant. It changes no bit. If it is 1, p is not
 * read. */
TX_FN tx_adamw_moments tx_adamw_average_within(tx_adamw_constants c, const int usual, float grad, float p, float m,
                                               float v) {
  if (usual) c.exp_avg.from_new = c.exp_avg_sq.from_new = 0;
  float g = c.factor * grad;
  if (!usual && c.l2 != 0.0f) g += c.l2 * p;
  return tx_adamw_moments_of(c, g, m, v);
}
#define TX_ADAMW_ROOT_BITS 0x51800000 /* 2^36 */

/* Magnitudes of gradients and weights up to which g certainly needs no clamp; slightly smaller than they could be. */
typedef struct tx_adamw_within {
  float grad;
  float p;
} tx_adamw_within;

/* share / |of|, at most the largest fp32 number, with a margin for the rounding of this quotient and of the product of
 * `of` with a number of that size. */
TX_FN float tx_adamw_share(double share, float of) {
  const double size = of < 0.0f ? -(double)of : (double)of, largest = (double)tx_f32_from_bits(0x7f7fffffu);
  const double most = share * (1.0 - 0x1p-22);
  return (float)(most < largest * size ? most / size : largest);
}
TX_FN tx_adamw_within tx_adamw_within_of(const tx_adamw_constants *c) {
  const double share = (double)tx_adamw_grad_limit() * (c->l2 != 0.0f ? 0.5 : 1.0);
  const tx_adamw_within within = {tx_adamw_share(share, c->factor), tx_adamw_share(share, c->l2)};
  return within;
}

/* The second half of the step: p'. quotient: m' / (sqrt(v') * rsqrt_bc2 + eps), of the unrounded moments. */
TX_FN float tx_adamw_apply(tx_adamw_constants c, float p, float quotient) {
  return p - (c.step_size * quotient + c.decay * p);
}
TX_FN float tx_adamw_update(tx_adamw_constants c, float p, float m, float root) {
  return tx_adamw_apply(c, p, m / (root * c.rsqrt_bc2 + c.eps));
}

#endif
