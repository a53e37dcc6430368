/* Muon's arithmetic of one element (Jordan et al. 2024; torch.optim.Muon): everything but the matrix products.
 *
 *   g  = limited(factor * grad)                    factor = clip_coef / grad_scale; limited as adamw.h's
 *   m' = momentum * m + (1 - momentum) * g
 *   u  = momentum * m' + (1 - momentum) * g        Nesterov; else m'
 *   p' = p - (lr * o + decay * p)                  o: of the orthogonalised matrix; decay = lr * weight_decay
 *
 * in fp32, in this order of operations, without contraction; averages as adamw.h's, from the side that weighs more. */
#ifndef TX_MATH_MUON_H
#define TX_MATH_MUON_H

#include "csrc/math/adamw.h"

typedef struct tx_muon_constants {
  float factor;
  tx_average average;
} tx_muon_constants;

TX_FN tx_muon_constants tx_muon_prepare(double momentum, float clip_coef, float grad_scale) {
  const tx_muon_constants c = {(float)((double)clip_coef / (double)grad_scale), tx_average_of(momentum)};
  return c;
}

typedef struct tx_muon_moments {
  float m;
  float u;
} tx_muon_moments;

TX_FN tx_muon_moments tx_muon_average(tx_muon_constants c, float grad, float m, const int nesterov) {
  const float g = tx_adamw_limited(c.factor * grad, grad);
  tx_muon_moments r;
  r.m = tx_averaged(c.average, m, g);
  r.u = nesterov ? tx_averaged(c.average, r.m, g) : r.m;
  return r;
}

TX_FN float tx_muon_step(float lr, float decay, float p, float o) {
  return p - (lr * o + decay * p);
}

#endif
