/* The rounding thresholds of a stream of elements, a block at a time.
 *
 * On the lattice the threshold of element i is base + ramp[i], one vector addition; the ramp is the same for every
 * block and stream. Stochastic thresholds are hashed into a buffer that stands in for the ramp, with a base of 0, so
 * that the loops know one form. */
#ifndef TX_CPU_NOISE_H
#define TX_CPU_NOISE_H

#include "csrc/cpu/element.h"
#include "csrc/math/dither.h"

/* One stream (tx_meta.id, lane, step) from a given element on. */
typedef struct tx_noise {
  uint32_t lattice; /* dithered threshold of the first element */
  tx_noise_key key; /* of the stochastic ones */
  uint32_t start;   /* low 32 bits of the first element's logical index */
} tx_noise;

static inline tx_noise tx_noise_at(uint64_t seed, int64_t id, tx_lane lane, int64_t step, int64_t start) {
  return (tx_noise){tx_lattice_base(seed, id, lane, step, start), tx_stochastic_key(seed, id, lane, step),
                    (uint32_t)start};
}

/* Thresholds of one block: element i's is base + ramp[i]. */
typedef struct tx_thresholds {
  uint32_t base;
  const uint32_t *ramp;
} tx_thresholds;

TX_FN void tx_lattice_ramp(uint32_t ramp[TX_BLOCK]) {
  for (uint32_t i = 0; i < TX_BLOCK; i++)
    ramp[i] = tx_dithered(0, i);
}

/* Of the block that begins `at` elements into the stream. hashed: TX_BLOCK words of scratch, used where stochastic. */
TX_FN tx_thresholds tx_noise_block(tx_noise noise, int64_t at, int32_t rounding, const uint32_t *ramp,
                                   uint32_t *hashed) {
  if (rounding != TX_STOCHASTIC) {
    return (tx_thresholds){tx_dithered(noise.lattice, (uint32_t)at), ramp};
  }
  const uint32_t first = noise.start + (uint32_t)at;
  for (uint32_t i = 0; i < TX_BLOCK; i++)
    hashed[i] = tx_stochastic(noise.key, first + i);
  return (tx_thresholds){0, hashed};
}

#endif
