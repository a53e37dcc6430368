/* The AdamW step of one element (Loshchilov & Hutter 2019, Algorithm 2), in one place for every back end.
 *
 *   g  = factor * grad + l2 * p                    factor = clip_coef / grad_scale, negative to maximize
 *   m' = m + (1 - beta1) * (g - m)
 *   v' = v + (1 - beta2) * (g * g - v)
 *   p' = p - (step_size * (m' / (sqrt(v') * rsqrt_bc2 + eps)) + decay * p)
 *
 * with step_size = lr / (1 - beta1^t), rsqrt_bc2 = 1 / sqrt(1 - beta2^t); decay = lr * weight_decay and l2 = 0 where
 * the decay is decoupled (AdamW), decay = 0 and l2 = weight_decay where it is not (Adam). Elements in fp32, in this
 * order of operations, without contraction; constants in double and rounded once. */
#ifndef TX_MATH_ADAMW_H
#define TX_MATH_ADAMW_H

#include <math.h>

#include "csrc/math/numeric.h"
#include "csrc/torch_ext.h"

typedef struct tx_adamw_constants {
  float factor;
  float l2;
  float one_minus_beta1;
  float one_minus_beta2;
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

/* step: t, the step about to be taken, >= 1. lr stands for group->lr. The caller has checked 0 <= beta < 1. */
TX_FN tx_adamw_constants tx_adamw_prepare(const tx_adamw_group *group, double lr, int64_t step, double clip_coef,
                                          double grad_scale) {
  const double factor = clip_coef / grad_scale;
  const int decoupled = group->decoupled != 0.0;
  tx_adamw_constants c;
  c.factor = (float)(group->maximize != 0.0 ? -factor : factor);
  c.l2 = (float)(decoupled ? 0.0 : group->weight_decay);
  c.one_minus_beta1 = (float)(1.0 - group->beta1);
  c.one_minus_beta2 = (float)(1.0 - group->beta2);
  c.rsqrt_bc2 = (float)(1.0 / sqrt(1.0 - tx_power(group->beta2, step)));
  c.eps = (float)group->eps;
  c.step_size = (float)(lr / (1.0 - tx_power(group->beta1, step)));
  c.decay = (float)(decoupled ? lr * group->weight_decay : 0.0);
  return c;
}

/* A state after the step, unrounded. root = sqrt(v), which is what 8- and 16-bit states store. */
typedef struct tx_adamw_result {
  float p;
  float m;
  float v;
  float root;
} tx_adamw_result;

/* v >= 0 gives v' >= 0: rounding is monotone, so fl(g*g - v) >= -v, its product with a factor in [0, 1] is >= -v too,
 * and v plus that is >= 0. Non-finite gradients give non-finite results: they are kept out before this point. */
TX_FN tx_adamw_result tx_adamw_element(tx_adamw_constants c, float grad, float p, float m, float v) {
  tx_adamw_result r;
  const float g = c.factor * grad + c.l2 * p;
  r.m = m + c.one_minus_beta1 * (g - m);
  r.v = v + c.one_minus_beta2 * (g * g - v);
  r.root = sqrtf(r.v);
  r.p = p - (c.step_size * (r.m / (r.root * c.rsqrt_bc2 + c.eps)) + c.decay * p);
  return r;
}

#endif
