/* Rounding thresholds: a pure function of (seed, parameter id, lane, step, element index), so that bits depend on no
 * instruction set, thread, chunk, shard or grid.
 *
 * Dithered: u = C + i * 0xC13FA9A9 + t * 0x9E3779B9 (mod 2^32), where i is the index in the logical parameter modulo
 * 2^32, t the step, and C a hash of seed, parameter and lane. The increments are those of the plastic number
 * (0.7548776662466927) over elements and of the golden ratio over steps. Over steps one element's thresholds are
 * equidistributed with small discrepancy, so that slow changes add up as in a sigma-delta converter; neighbours are
 * decorrelated. It needs no hash per element.
 *
 * Stochastic: an integer hash per element. */
#ifndef TX_MATH_DITHER_H
#define TX_MATH_DITHER_H

#include "csrc/math/numeric.h"

#define TX_LATTICE_ELEMENT 0xC13FA9A9u
#define TX_LATTICE_STEP 0x9E3779B9u

/* What is being rounded. The values are pinned: a resumed run needs the same thresholds. */
typedef enum tx_lane {
  TX_LANE_EXP_AVG = 0,
  TX_LANE_EXP_AVG_SQ = 1,
  TX_LANE_PARAM = 2,
  TX_LANE_WIRE = 3,
  TX_LANE_CAST = 4,
  TX_LANE_EMA = 5
} tx_lane;

/* splitmix64's finaliser (Stafford's variant 13): every input bit reaches every output bit. */
TX_FN uint64_t tx_mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/* lowbias32 (Wellons). A bijection. */
TX_FN uint32_t tx_mix32(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

TX_FN uint64_t tx_threshold_key(uint64_t seed, int64_t id, tx_lane lane) {
  return tx_mix64(tx_mix64(tx_mix64(seed + 0x9e3779b97f4a7c15u) ^ (uint64_t)id) + (uint64_t)lane);
}

/* The dithered threshold of element `start`. The one of element start + j is tx_dithered(base, j). */
TX_FN uint32_t tx_lattice_base(uint64_t seed, int64_t id, tx_lane lane, int64_t step, int64_t start) {
  return (uint32_t)(tx_threshold_key(seed, id, lane) >> 32) + (uint32_t)start * TX_LATTICE_ELEMENT +
         (uint32_t)step * TX_LATTICE_STEP;
}
TX_FN uint32_t tx_dithered(uint32_t base, uint32_t j) {
  return base + j * TX_LATTICE_ELEMENT;
}

/* Two words from which the stochastic thresholds of one (seed, id, lane, step) are derived. */
typedef struct tx_noise_key {
  uint32_t a;
  uint32_t b;
} tx_noise_key;
TX_FN tx_noise_key tx_stochastic_key(uint64_t seed, int64_t id, tx_lane lane, int64_t step) {
  const uint64_t key = tx_mix64(tx_threshold_key(seed, id, lane) ^ tx_mix64((uint64_t)step + 0x9e3779b97f4a7c15u));
  const tx_noise_key pair = {(uint32_t)key, (uint32_t)(key >> 32)};
  return pair;
}
/* The stochastic threshold of the element with index i (mod 2^32) in the logical parameter. */
TX_FN uint32_t tx_stochastic(tx_noise_key key, uint32_t i) {
  return tx_mix32(tx_mix32(i ^ key.a) + key.b);
}

#endif
