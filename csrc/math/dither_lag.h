/* How much too fast dithered codes of v follow, and what the step does about it.
 *
 * Thresholds of small discrepancy make a v that falls or grows steadily move a code at a time, at regular intervals.
 * All the while that it waits in a code it changes at that code's rate, though the way to the next one is behind it on
 * average by half: it moves too fast by half the spacing of codes over their size. For the e4m4 codes of sqrt(v), 16 to
 * an octave, that is, in the mean over log(v),
 *   integral of (1/32) / y  d(log y), y = 1 ... 2,  over log 2  =  1 / (64 log 2)  =  0.0225
 * and a little more where at a power of two the spacing halves, and with it what is left of the way: 0.028 in all,
 * found by steady decays. (Random thresholds have the mean right and pay with its variance.) Uncorrected, v was 6 to 10
 * % too small after gradients had become ten times smaller, for every beta2 from 0.95 on; with 1 - beta2 times 1 - lag
 * it is right within 1 % for 0.999, and the rms error of the step is a tenth smaller.
 *
 * A step that moves v by more than a code has no lag: in the first steps of all, and with a small beta2. */
#ifndef TX_MATH_DITHER_LAG_H
#define TX_MATH_DITHER_LAG_H

#include "csrc/math/numeric.h"
#include "csrc/torch_ext.h"

#define TX_E4M4_LAG 0.028
#define TX_E4M4_SPACING 0.045 /* of codes over their size, likewise: twice 0.0225 */

/* What 1 - beta2 is to be shortened by, a fraction. step: >= 1. */
TX_FN double tx_dither_lag(int32_t exp_avg_sq_dtype, int32_t moment_rounding, double beta2, int64_t step) {
  if (exp_avg_sq_dtype != TX_U8 || moment_rounding != TX_DITHERED) return 0.0;
  const double first = 1.0 / (double)step, weight = 1.0 - beta2;
  const double moved =
      0.5 * (first > weight ? first : weight); /* of sqrt(v), in a step, at most for a steady gradient */
  return moved < TX_E4M4_SPACING ? TX_E4M4_LAG * (1.0 - moved / TX_E4M4_SPACING) : 0.0;
}

#endif
