/* Sums of a measured step: tx_adamw_args.healths. Included by step_extras.h. */
#ifndef TX_CPU_STEP_HEALTH_H
#define TX_CPU_STEP_HEALTH_H

#include "csrc/cpu/step_changes.h"
#include "csrc/math/health.h"

#define TX_HEALTH_LANES 16

/* Lanes that a loop adds up side by side, element i in lane i % 16. */
typedef struct tx_health_lanes {
  float updates[TX_HEALTH_LANES], weights[TX_HEALTH_LANES];
  int32_t below[TX_HEALTH_LANES], largest[TX_HEALTH_LANES];
} tx_health_lanes;

TX_FN float tx_lanes_sum(float *lanes) {
  for (int32_t half = TX_HEALTH_LANES / 2; half > 0; half /= 2)
    for (int32_t j = 0; j < half; j++)
      lanes[j] += lanes[j + half];
  return lanes[0];
}

/* Element i into lane j. */
TX_FN void tx_health_take(tx_health_lanes *l, tx_weights before, tx_weights now, int64_t i, int32_t j,
                          const tx_dtype param, const tx_dtype master) {
  const uint32_t bits = tx_master_bits(now, i, param, master);
  const float weight = tx_f32_from_bits(bits),
              update = weight - tx_f32_from_bits(tx_master_bits(before, i, param, master));
  const int32_t size = tx_magnitude_bits(weight);
  l->updates[j] += update * update;
  l->weights[j] += weight * weight;
  l->below[j] += tx_magnitude_bits(update) < tx_half_ulp_bits(bits, param) ? 1 : 0;
  l->largest[j] = size > l->largest[j] ? size : l->largest[j];
}

/* A block of n <= TX_BLOCK weights; changed: bits of those that did. */
TX_FN void tx_measure_block(tx_weights before, tx_weights now, int64_t n, const uint64_t changed[TX_BLOCK / 64],
                            int64_t *row, const tx_dtype param, const tx_dtype master) {
  tx_health_lanes l = {{0}, {0}, {0}, {0}};
  const int64_t whole = n / TX_HEALTH_LANES * TX_HEALTH_LANES;
  for (int64_t i = 0; i < whole; i += TX_HEALTH_LANES)
    for (int32_t j = 0; j < TX_HEALTH_LANES; j++)
      tx_health_take(&l, before, now, i + j, j, param, master);
  for (int64_t i = whole; i < n; i++)
    tx_health_take(&l, before, now, i, (int32_t)(i - whole), param, master);
  for (int32_t j = 0; j < TX_HEALTH_LANES; j++) {
    row[TX_HEALTH_BELOW] += l.below[j];
    if (l.largest[j] > row[TX_HEALTH_LARGEST]) row[TX_HEALTH_LARGEST] = l.largest[j];
  }
  for (int32_t k = 0; k < TX_BLOCK / 64; k++)
    row[TX_HEALTH_MOVED] += __builtin_popcountll(changed[k]);
  row[TX_HEALTH_ELEMENTS] += n;
  tx_health_add(row, TX_HEALTH_UPDATES, tx_lanes_sum(l.updates));
  tx_health_add(row, TX_HEALTH_WEIGHTS, tx_lanes_sum(l.weights));
}

#endif
