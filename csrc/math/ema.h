/* An exponential moving average of masters, in fp32, and in the 16 or 24 bits that it is kept in.
 *
 * At a decay of 0.9999 a step moves the average by a ten thousandth of what it is off by. To nearest, bf16 would stay
 * where it is until it were off by 20 ulps or more, so thresholds are dithered: over the steps they move it as often as
 * is right. In 24 bits what a step adds may be less than an ulp of fp32 itself. There the sum is not rounded to fp32
 * and again to 24 bits, but once: what the first rounding lost counts beside the threshold. */
#ifndef TX_MATH_EMA_H
#define TX_MATH_EMA_H

#include "csrc/math/dither.h"

/* What step number `step` does to an average that is kept of every `every`-th. */
typedef struct tx_ema_turn {
  int averages;   /* else it is left alone */
  int begins;     /* the average is what the masters are */
  uint32_t first; /* dithered threshold of element `start`; they count averages, not steps: multiples of some numbers
                      are no good lattice */
} tx_ema_turn;
TX_FN tx_ema_turn tx_ema_turn_at(uint64_t seed, int64_t id, int64_t step, int64_t every, int64_t start) {
  const tx_ema_turn turn = {step % every == 0, step == every,
                            tx_lattice_base(seed, id, TX_LANE_EMA, step / every, start)};
  return turn;
}

/* What a step adds; weight: 1 - decay. */
TX_FN float tx_ema_change(float weight, float ema, float master) {
  return weight * (master - ema);
}

TX_FN float tx_ema_next(float weight, float ema, float master) {
  return ema + tx_ema_change(weight, ema, master);
}

/* What a + b to nearest, which is sum, lacks: exact (Knuth's TwoSum); 0 where it is not finite. */
TX_FN float tx_sum_error(float a, float b, float sum) {
  const float from_b = sum - a, error = (a - (sum - from_b)) + (b - from_b);
  return tx_magnitude_bits(error) < TX_F32_INF ? error : 0.0f;
}

#define TX_EMA_LARGEST 0x7f7fff00 /* the fp32 pattern of the largest finite number of 24 bits */

/* How many 2^-16 of an ulp of `sum` the error is, away from zero; 0 where sum is less than 2^-88. */
TX_FN int32_t tx_ema_missing(float sum, float error) {
  const uint32_t bits = tx_bits_from_f32(sum), exponent = (bits >> 23) & 0xffu;
  const uint32_t scale = exponent < 39u ? 0u : (293u - exponent) << 23; /* 2^16 / ulp */
  const float away = tx_f32_from_bits(tx_bits_from_f32(error) ^ (bits & 0x80000000u));
  return (int32_t)(away * tx_f32_from_bits(scale));
}

/* ema + change as the upper 24 bits of a pattern, by threshold u; the lower 8 mean nothing. Inf stays, NaN is the one,
 * and a finite number never becomes Inf. */
TX_FN uint32_t tx_ema_round_24(float ema, float change, uint32_t u) {
  const float sum = ema + change;
  const uint32_t bits = tx_bits_from_f32(tx_one_nan(sum));
  /* in 256ths of an ulp of 24 bits, which the lower 8 of the pattern are: -1 to 255 */
  const int32_t parts = (tx_ema_missing(sum, tx_sum_error(ema, change, sum)) + (int32_t)(u >> 8)) >> 16;
  return bits + (uint32_t)(tx_magnitude_bits(sum) >= TX_EMA_LARGEST ? 0 : parts);
}

#endif
