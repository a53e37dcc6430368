/* Muon's arithmetic of one element (Jordan et al. 2024; torch.optim.Muon): all but the matrix products.
 *
 * m is the momentum buffer, u the matrix to be orthogonalised, o the result of that (an element each), p the master
 * weight (or the weight, where there is no master); m' and p' are values after the step.
 *
 *   g  = clamped(factor * grad)                    factor = clip_coef / grad_scale; clamped() as in adamw.h
 *   m' = momentum * m + (1 - momentum) * g
 *   u  = momentum * m' + (1 - momentum) * g        with Nesterov momentum, else u = m'
 *   p' = p - (lr * o + decay * p)                  decay = lr * weight_decay
 *
 * in fp32, in this order of operations, without contraction. Averages start from the operand with the larger weight, as
 * in adamw.h. */
#ifndef TX_MATH_MUON_H
#define TX_MATH_MUON_H

#include "csrc/math/adamw.h"

typedef struct tx_muon_constants {
  float factor;
  tx_average average;
} tx_muon_constants;

TX_FN tx_muon_constants tx_muon_prepare(double momentum, float clip_coef, float grad_scale) {
  const tx_muon_constants c = {(float)((double)clip_coef / (double)grad_scale), tx_average_from_beta(momentum)};
  return c;
}

typedef struct tx_muon_moments {
  float m;
  float u;
} tx_muon_moments;

TX_FN tx_muon_moments tx_muon_average(tx_muon_constants c, float grad, float m, const int nesterov) {
  const float g = tx_adamw_clamped(c.factor * grad, grad);
  tx_muon_moments r;
  r.m = tx_averaged(c.average, m, g);
  r.u = nesterov ? tx_averaged(c.average, r.m, g) : r.m;
  return r;
}

TX_FN float tx_muon_step(float lr, float decay, float p, float o) {
  return p - (lr * o + decay * p);
}

#endif
