/* A correction of 1 - beta2 for a v that is stored in dithered 8-bit codes.
 *
 * The problem. Thresholds of small discrepancy make a steadily falling or growing v move one code at a time, at regular
 * intervals. Between two moves, the stored v is a code that the true v has already left, by half the distance to the
 * next code on average. The update is computed from that code, so v moves too fast: by half the relative spacing of
 * codes. For the e4m4 codes of sqrt(v), 16 to an octave, that is, in the mean over log(v),
 *   integral of (1/32) / y  d(log y), y = 1 ... 2,  over log 2  =  1 / (64 log 2)  =  0.0225
 * and slightly more at powers of two, where the spacing halves: 0.028 in all, measured on steady decays. (Random
 * thresholds have no such bias, but their variance is larger.)
 *
 * The correction multiplies 1 - beta2 by 1 - lag. Without it v was 6 to 10 % too small after gradients had become ten
 * times smaller, for every beta2 >= 0.95. With it v is right within 1 % for beta2 = 0.999, and the rms error of the
 * step is a tenth smaller.
 *
 * A step that moves v by more than a code has no lag: the first steps, and all steps with a small beta2. */
#ifndef TX_MATH_DITHER_LAG_H
#define TX_MATH_DITHER_LAG_H

#include "csrc/math/numeric.h"
#include "csrc/torch_ext.h"

#define TX_E4M4_LAG 0.028
#define TX_E4M4_SPACING 0.045 /* relative spacing of codes, likewise the mean over log(v): twice 0.0225 */

/* The lag: the fraction by which 1 - beta2 is to be reduced. step: >= 1. */
TX_FN double tx_dither_lag(int32_t exp_avg_sq_dtype, int32_t moment_rounding, double beta2, int64_t step) {
  if (exp_avg_sq_dtype != TX_U8 || moment_rounding != TX_DITHERED) return 0.0;
  const double first = 1.0 / (double)step, weight = 1.0 - beta2;
  const double moved = 0.5 * (first > weight ? first : weight); /* relative change of sqrt(v), at most */
  return moved < TX_E4M4_SPACING ? TX_E4M4_LAG * (1.0 - moved / TX_E4M4_SPACING) : 0.0;
}

#endif
