/* The AdamW step of one element (Loshchilov & Hutter 2019, Algorithm 2), in one place for every back end.
 *
 *   g  = factor * grad [+ l2 * p if l2 != 0]       factor = clip_coef / grad_scale, negative to maximize
 *   m' = m + (1 - beta1) * (g - m)                 or, for beta1 < 1/2, g + beta1 * (m - g)
 *   v' = v + (1 - beta2) * (g * g - v)             likewise; 1 - beta2 a little less for 8-bit codes (dither_lag.h)
 *   p' = p - (step_size * (m' / (sqrt(v') * rsqrt_bc2 + eps)) + decay * p)
 *
 * with step_size = lr / (1 - beta1^t), rsqrt_bc2 = 1 / sqrt(1 - beta2^t); decay = lr * weight_decay and l2 = 0 where
 * the decay is decoupled (AdamW), decay = 0 and l2 = weight_decay where it is not (Adam). Elements in fp32, in this
 * order of operations, without contraction; constants in double and rounded once. An average is taken from the side
 * that weighs more: from the other one a large old value would cancel and leave its rounding error behind. */
#ifndef TX_MATH_ADAMW_H
#define TX_MATH_ADAMW_H

#include <math.h>

#include "csrc/math/numeric.h"
#include "csrc/torch_ext.h"

/* How old and new are averaged: from + weight * (to - from), from the one that weighs more. */
typedef struct tx_average {
  float weight;     /* of the other one, <= 1/2 */
  int32_t from_new; /* beta < 1/2 */
} tx_average;

TX_FN tx_average tx_average_of(double beta) {
  const tx_average a = {(float)(beta < 0.5 ? beta : 1.0 - beta), beta < 0.5};
  return a;
}

/* old, added >= 0 give a result >= 0: rounding is monotone, so fl(to - from) >= -from, its product with a weight in
 * [0, 1] is >= -from too, and from plus that is >= 0. */
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

/* base^n, n >= 0, by repeated squaring: the same bits on host and device, which two libraries' pow need not give. */
TX_FN double tx_power(double base, int64_t n) {
  double power = 1.0;
  for (; n > 0; n >>= 1) {
    if ((n & 1) != 0) power *= base;
    base *= base;
  }
  return power;
}

/* step: t, the step about to be taken, >= 1. lr stands for group->lr. lag: what v's weight is shortened by
 * (dither_lag.h). The caller has checked 0 <= beta < 1. */
TX_FN tx_adamw_constants tx_adamw_prepare(const tx_adamw_group *group, double lr, int64_t step, double clip_coef,
                                          double grad_scale, double lag) {
  const double factor = clip_coef / grad_scale;
  const int decoupled = group->decoupled != 0.0;
  tx_adamw_constants c;
  c.factor = (float)(group->maximize != 0.0 ? -factor : factor);
  c.l2 = (float)(decoupled ? 0.0 : group->weight_decay);
  c.exp_avg = tx_average_of(group->beta1);
  c.exp_avg_sq = tx_average_of(group->beta2 + lag * (1.0 - group->beta2));
  c.rsqrt_bc2 = (float)(1.0 / sqrt(1.0 - tx_power(group->beta2, step)));
  c.eps = (float)group->eps;
  c.step_size = (float)(lr / (1.0 - tx_power(group->beta1, step)));
  c.decay = (float)(decoupled ? lr * group->weight_decay : 0.0);
  return c;
}

/* Whether the constants are those of nearly every run: no l2 term, averages taken from the old value. */
TX_FN int tx_adamw_is_usual(const tx_adamw_constants *c) {
  return c->l2 == 0.0f && !c->exp_avg.from_new && !c->exp_avg_sq.from_new;
}

/* The moments after the step, unrounded. root = sqrt(v), which is what 8- and 16-bit states store. */
typedef struct tx_adamw_moments {
  float m;
  float v;
  float root;
} tx_adamw_moments;

/* The step's first half. usual: tx_adamw_is_usual, or 0; known when a loop is compiled, it changes no bit; where it is
 * 1 p is not looked at. Non-finite gradients give non-finite results: they are kept out before this point. */
TX_FN tx_adamw_moments tx_adamw_average(tx_adamw_constants c, const int usual, float grad, float p, float m, float v) {
  tx_adamw_moments r;
  if (usual) c.exp_avg.from_new = c.exp_avg_sq.from_new = 0;
  float g = c.factor * grad;
  if (!usual && c.l2 != 0.0f) g += c.l2 * p;
  r.m = tx_averaged(c.exp_avg, m, g);
  r.v = tx_averaged(c.exp_avg_sq, v, g * g);
  r.root = sqrtf(r.v);
  return r;
}

/* The second half: p after the step. quotient: m / (root * rsqrt_bc2 + eps), of the unrounded moments. */
TX_FN float tx_adamw_moved(tx_adamw_constants c, float p, float quotient) {
  return p - (c.step_size * quotient + c.decay * p);
}
TX_FN float tx_adamw_update(tx_adamw_constants c, float p, float m, float root) {
  return tx_adamw_moved(c, p, m / (root * c.rsqrt_bc2 + c.eps));
}

#endif
