/* Sums of a measured step: tx_adamw_args.healths. Included by step_found.h. */
#ifndef TX_CPU_STEP_HEALTH_H
#define TX_CPU_STEP_HEALTH_H

#include "csrc/cpu/step_changes.h"
#include "csrc/math/health.h"

#define TX_HEALTH_LANES 32

/* What a loop adds up of a block: the square of element i in lane i % 32 of half i / 64, so that a half's lane has two.
 * Lanes of the two halves are added, then neighbours, then what is eight, four, two and one apart: an order that
 * vectors of any length and words of two elements have alike. */
typedef struct tx_health_squares {
  float at[2][TX_HEALTH_LANES];
} tx_health_squares;

TX_FN float tx_squares_sum(const tx_health_squares *squares) {
  float sums[TX_HEALTH_LANES / 2];
  for (int32_t p = 0; p < TX_HEALTH_LANES / 2; p++) {
    const float even = squares->at[0][2 * p] + squares->at[1][2 * p];
    sums[p] = even + (squares->at[0][2 * p + 1] + squares->at[1][2 * p + 1]);
  }
  for (int32_t half = TX_HEALTH_LANES / 4; half > 0; half /= 2)
    for (int32_t p = 0; p < half; p++)
      sums[p] += sums[p + half];
  return sums[0];
}

/* What is measured of a block. */
typedef struct tx_measured {
  float updates, weights; /* sums of squares */
  int32_t below;          /* updates of less than half an ulp of their weight */
  int32_t largest;        /* the pattern of the largest weight */
} tx_measured;

/* Of n <= TX_BLOCK weights. */
TX_FN tx_measured tx_measure_block(tx_weights before, tx_weights now, int64_t n, const tx_dtype param,
                                   const tx_dtype master) {
  tx_health_squares updates = {{{0}}}, weights = {{{0}}};
  int32_t below = 0, largest = 0;
  for (int64_t i = 0; i < n; i++) {
    const uint32_t bits = tx_master_bits(now, i, param, master);
    const float weight = tx_f32_from_bits(bits),
                update = weight - tx_f32_from_bits(tx_master_bits(before, i, param, master));
    const int32_t size = tx_magnitude_bits(weight);
    updates.at[i / (TX_BLOCK / 2)][i % TX_HEALTH_LANES] += update * update;
    weights.at[i / (TX_BLOCK / 2)][i % TX_HEALTH_LANES] += weight * weight;
    below += tx_magnitude_bits(update) < tx_half_ulp_bits(bits, param) ? 1 : 0;
    largest = size > largest ? size : largest;
  }
  return (tx_measured){tx_squares_sum(&updates), tx_squares_sum(&weights), below, largest};
}

/* What was measured of n weights, of which those changed that have a bit. */
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
