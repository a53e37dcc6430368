/* The gradient norm from exact statistics, and the clip coefficient and found_inf that follow from it, in one place for
 * every back end. */
#ifndef TX_MATH_NORM_H
#define TX_MATH_NORM_H

#include <math.h>

#include "csrc/math/exact_sum.h"

/* torch.nn.utils.clip_grad_norm_'s guard against a norm of zero */
#define TX_CLIP_EPS 1e-6

typedef struct tx_norm {
  double norm;
  double clip_coef;
  double found_inf; /* 0 or 1 */
} tx_norm;

/* limbs: carried or not. non_finite: the number of non-finite elements. Their blocks are missing in the limbs, so the
 * norm is NaN then; the root of the rest would look like a norm. */
TX_FN tx_norm tx_norm_of(const int64_t *limbs, int64_t non_finite, double grad_scale, double max_norm) {
  tx_norm n;
  const double root = non_finite == 0 ? sqrt(tx_exact_double(limbs)) : (double)NAN;
  n.norm = root / fabs(grad_scale);
  const double coef = max_norm / (n.norm + TX_CLIP_EPS);
  const int finite = isfinite(n.norm) != 0;
  n.clip_coef = !finite ? 0.0 : coef < 1.0 ? coef : 1.0;
  n.found_inf = finite ? 0.0 : 1.0;
  return n;
}

#endif
