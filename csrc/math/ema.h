/* An exponential moving average (EMA) of masters: computed in fp32, stored in fp32 or in 16 or 24 bits.
 *
 * At a decay of 0.9999 a step moves the average by a ten-thousandth of its distance to the master. Rounded to nearest,
 * a bf16 average would not move until it were off by 20 ulps or more, so it is rounded with dithered thresholds, which
 * are right in the mean over the steps. In 24 bits a step's change may be less than an ulp of fp32 itself. There the
 * sum is rounded once, not to fp32 first and then to 24 bits: the error of the fp32 addition is added to the
 * threshold. */
#ifndef TX_MATH_EMA_H
#define TX_MATH_EMA_H

#include "csrc/math/dither.h"

/* What step number `step` does to an average that is updated every `every` steps. */
typedef struct tx_ema_turn {
  int averages;   /* whether the step updates the average */
  int begins;     /* whether the average is set to the masters */
  uint32_t first; /* dithered threshold of element `start`; by number of the update, since steps' multiples give a bad
                   * lattice */
} tx_ema_turn;
TX_FN tx_ema_turn tx_ema_turn_at(uint64_t seed, int64_t id, int64_t step, int64_t every, int64_t start) {
  const tx_ema_turn turn = {step % every == 0, step == every,
                            tx_lattice_base(seed, id, TX_LANE_EMA, step / every, start)};
  return turn;
}

/* What an update adds to the average; weight: 1 - decay. */
TX_FN float tx_ema_change(float weight, float ema, float master) {
  return weight * (master - ema);
}

TX_FN float tx_ema_next(float weight, float ema, float master) {
  return ema + tx_ema_change(weight, ema, master);
}

/* The exact rounding error (a + b) - sum of sum = a + b (Knuth's TwoSum); 0 if it is not finite. */
TX_FN float tx_sum_error(float a, float b, float sum) {
  const float from_b = sum - a, error = (a - (sum - from_b)) + (b - from_b);
  return tx_magnitude_bits(error) < TX_F32_INF ? error : 0.0f;
}

#define TX_EMA_LARGEST 0x7f7fff00 /* the fp32 pattern of the largest finite number of 24 bits */

/* The error in units of 2^-16 ulp of `sum`, positive away from zero; 0 if |sum| < 2^-88. */
TX_FN int32_t tx_ema_missing(float sum, float error) {
  const uint32_t bits = tx_bits_from_f32(sum), exponent = (bits >> 23) & 0xffu;
  const uint32_t scale = exponent < 39u ? 0u : (293u - exponent) << 23; /* 2^16 / ulp */
  const float away = tx_f32_from_bits(tx_bits_from_f32(error) ^ (bits & 0x80000000u));
  return (int32_t)(away * tx_f32_from_bits(scale));
}

/* ema + change rounded by threshold u, as the upper 24 bits of a pattern; the lower 8 bits are undefined. Inf stays,
 * NaN becomes the one NaN (tx_one_nan), and a finite number never becomes Inf. */
TX_FN uint32_t tx_ema_round_24(float ema, float change, uint32_t u) {
  const float sum = ema + change;
  const uint32_t bits = tx_bits_from_f32(tx_one_nan(sum));
  /* -1 to 255, in 256ths of a 24-bit ulp: the unit of the pattern's lower 8 bits */
  const int32_t parts = (tx_ema_missing(sum, tx_sum_error(ema, change, sum)) + (int32_t)(u >> 8)) >> 16;
  return bits + (uint32_t)(tx_magnitude_bits(sum) >= TX_EMA_LARGEST ? 0 : parts);
}

#endif
