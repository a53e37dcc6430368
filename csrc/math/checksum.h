/* Checksums: 64-bit checksums of 16-bit weights, by which a step knows whether somebody else wrote to them.
 *
 * The weights of a block, padded with zeros, are vectors of TX_CHECKSUM_LANES 32-bit words. Each lane has the sum of
 * its words and the sum of its partial sums, in which the order of the words counts (Fletcher 1982), modulo 2^32:
 *
 *   sum = w[0] + ... + w[V-1],   order = V w[0] + (V - 1) w[1] + ... + w[V-1]
 *
 * and the checksum is the sum of 64-bit words that two neighbouring lanes make together. */
#ifndef TX_MATH_CHECKSUM_H
#define TX_MATH_CHECKSUM_H

#include "csrc/math/numeric.h"

#define TX_CHECKSUM_LANES 16

/* What tells lanes apart, multiples of the golden ratio's: odd for sums (0 ... 15), even, by the factor of 2 below, for
 * their sums (16 ... 31), so that no change of a single word can cancel. */
#define TX_CHECKSUM_FACTOR(i) ((2u * (i) + 1u) * 0x9e3779b1u)

/* What a lane adds to the checksum. */
TX_FN uint64_t tx_checksum_share(uint32_t lane, uint32_t sum, uint32_t order) {
  const uint32_t mixed = sum * TX_CHECKSUM_FACTOR(lane) + 2u * (order * TX_CHECKSUM_FACTOR(lane + TX_CHECKSUM_LANES));
  return (uint64_t)mixed << (32u * (lane & 1u));
}

/* The sample beside fp32 masters: in each TX_SAMPLED weights, counted from the tensor's first, runs of as many as a
 * vector (and a cache line) has. */
#define TX_SAMPLE_RUNS 2
#define TX_SAMPLE_RUN (2 * TX_CHECKSUM_LANES)
#define TX_SAMPLE_STRIDE (TX_SAMPLED / TX_SAMPLE_RUNS)

#endif
