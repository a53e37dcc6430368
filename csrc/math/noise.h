/* The rounding thresholds of a run of elements of one (parameter, lane, step). */
#ifndef TX_MATH_NOISE_H
#define TX_MATH_NOISE_H

#include "csrc/math/dither.h"
#include "csrc/torch_ext.h"

/* The thresholds from a given element on. */
typedef struct tx_noise {
  uint32_t lattice; /* dithered threshold of the first element */
  tx_noise_key key; /* of the stochastic thresholds */
  uint32_t start;   /* low 32 bits of the first element's logical index */
} tx_noise;

TX_FN tx_noise tx_noise_at(uint64_t seed, int64_t id, tx_lane lane, int64_t step, int64_t start) {
  const tx_noise noise = {tx_lattice_base(seed, id, lane, step, start), tx_stochastic_key(seed, id, lane, step),
                          (uint32_t)start};
  return noise;
}

/* The threshold of element at + i, counted from the first. ramp = tx_dithered(0, i): loops carry it along, since an
 * addition per vector is faster than the product. rounding is a compile-time constant. */
TX_FN uint32_t tx_threshold(tx_noise noise, uint32_t at, uint32_t i, uint32_t ramp, const int32_t rounding) {
  if (rounding == TX_STOCHASTIC) return tx_stochastic(noise.key, noise.start + at + i);
  return tx_dithered(noise.lattice, at) + ramp;
}

#endif
