/* The sums of health measurement: tx_adamw_args.healths. Included by step_found.h. */
#ifndef TX_CPU_STEP_HEALTH_H
#define TX_CPU_STEP_HEALTH_H

#include "csrc/cpu/step_changes.h"
#include "csrc/math/health.h"

#define TX_HEALTH_LANES 32

/* A block's squares: that of element i is added to lane i % 32, in the order of elements, each sum rounded once.
 * Afterwards neighbouring lanes are added, and then lanes 16, 8, 4 and 2 apart. Vectors of any length, and words of
 * several elements, can all add in this order. */
typedef struct tx_health_squares {
  float at[TX_HEALTH_LANES];
} tx_health_squares;

/* Where a loop over words of `per` elements has lane j: it first has element 0 of each word, then element 1, and so
 * on. */
TX_FN int32_t tx_health_lane(int32_t j, const int32_t per) {
  return j % per * (TX_HEALTH_LANES / per) + j / per;
}

TX_FN float tx_squares_sum(const tx_health_squares *squares, const int32_t per) {
  float sums[TX_HEALTH_LANES / 2];
  for (int32_t p = 0; p < TX_HEALTH_LANES / 2; p++) {
    const int32_t even = tx_health_lane(2 * p, per), odd = tx_health_lane(2 * p + 1, per);
    sums[p] = squares->at[even] + squares->at[odd];
  }
  for (int32_t half = TX_HEALTH_LANES / 4; half > 0; half /= 2)
    for (int32_t p = 0; p < half; p++)
      sums[p] += sums[p + half];
  return sums[0];
}

/* The measurements of a block. */
typedef struct tx_measured {
  float updates, weights; /* sums of squares */
  int32_t below;          /* updates of less than half an ulp of their weight */
  int32_t largest;        /* the fp32 pattern of the largest weight */
} tx_measured;

/* The same while they are collected; `below` and `largest` have a lane for each word. */
typedef struct tx_measuring {
  tx_health_squares updates, weights;
  int32_t below[TX_HEALTH_LANES], largest[TX_HEALTH_LANES];
} tx_measuring;

/* Adds element k of a word in lane j of the words. now: the value that the weight is rounded from. */
TX_FN void tx_measure(tx_measuring *to, int32_t j, int32_t k, float update, float now, const tx_dtype param,
                      const int32_t per) {
  const int32_t lane = k * (TX_HEALTH_LANES / per) + j, size = tx_magnitude_bits(now);
  to->updates.at[lane] = tx_square_added(to->updates.at[lane], update);
  to->weights.at[lane] = tx_square_added(to->weights.at[lane], now);
  to->below[j] += tx_magnitude_bits(update) < tx_half_ulp_bits(tx_bits_from_f32(now), param) ? 1 : 0;
  to->largest[j] = size > to->largest[j] ? size : to->largest[j];
}

TX_FN tx_measured tx_measured_of(const tx_measuring *sums, const int32_t per) {
  tx_measured found = {tx_squares_sum(&sums->updates, per), tx_squares_sum(&sums->weights, per), 0, 0};
  for (int32_t j = 0; j < TX_HEALTH_LANES / per; j++) {
    found.below += sums->below[j];
    found.largest = sums->largest[j] > found.largest ? sums->largest[j] : found.largest;
  }
  return found;
}

/* Measures n <= TX_BLOCK weights. */
TX_FN tx_measured tx_measure_block(tx_weights before, tx_weights now, int64_t n, const tx_dtype param,
                                   const tx_dtype master) {
  tx_measuring sums = {{{0}}, {{0}}, {0}, {0}};
  for (int64_t at = 0; at < n; at += TX_HEALTH_LANES) {
    const int32_t count = n - at < TX_HEALTH_LANES ? (int32_t)(n - at) : TX_HEALTH_LANES;
    for (int32_t j = 0; j < count; j++) {
      const float to = tx_f32_from_bits(tx_master_bits(now, at + j, param, master));
      const float from = tx_f32_from_bits(tx_master_bits(before, at + j, param, master));
      tx_measure(&sums, j, 0, to - from, to, param, 1);
    }
  }
  return tx_measured_of(&sums, 1);
}

/* Adds the measurements of n weights to a row. changed: bits of those that changed. */
TX_FN void tx_note_measured(int64_t *row, int64_t n, const uint64_t changed[TX_BLOCK / 64], tx_measured found) {
  for (int32_t k = 0; k < TX_BLOCK / 64; k++)
    row[TX_HEALTH_MOVED] += __builtin_popcountll(changed[k]);
  row[TX_HEALTH_BELOW] += found.below;
  row[TX_HEALTH_ELEMENTS] += n;
  if (found.largest > row[TX_HEALTH_LARGEST]) row[TX_HEALTH_LARGEST] = found.largest;
  tx_health_add(row, TX_HEALTH_UPDATES, found.updates);
  tx_health_add(row, TX_HEALTH_WEIGHTS, found.weights);
}

#endif
