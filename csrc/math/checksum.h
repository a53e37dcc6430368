/* 64-bit checksums of 16-bit weights, by which a step detects that weights were written outside the optimizer.
 *
 * The weights of a block, padded with zeros, are V vectors of TX_CHECKSUM_LANES 32-bit words. Each lane has two sums of
 * its words w, modulo 2^32: the plain sum, and the sum of the partial sums, which depends on the order of the words
 * (Fletcher 1982):
 *
 *   sum = w[0] + ... + w[V-1],   order = V w[0] + (V - 1) w[1] + ... + w[V-1]
 *
 * Lane i makes one 32-bit word of these, sum * TX_CHECKSUM_FACTOR(i) + 2 * order * TX_CHECKSUM_FACTOR(i + 16). The
 * words of two neighbouring lanes are one of 64 bits, whose lower half is the even lane's; the checksum is the sum of
 * these. */
#ifndef TX_MATH_CHECKSUM_H
#define TX_MATH_CHECKSUM_H

#include "csrc/math/numeric.h"

#define TX_CHECKSUM_LANES 16

/* Factors that make lanes distinct, multiples of the golden ratio's constant: odd for `sum` (i = 0 ... 15) and, times
 * 2, even for `order` (i = 16 ... 31). So a change of a single word always changes the checksum. */
#define TX_CHECKSUM_FACTOR(i) ((2u * (i) + 1u) * 0x9e3779b1u)

/* The weights sampled for checksums of parameters with fp32 masters: of each TX_SAMPLED weights, counted from the
 * tensor's first, TX_SAMPLE_RUNS runs as long as a vector (and a cache line). */
#define TX_SAMPLE_RUNS 2
#define TX_SAMPLE_RUN (2 * TX_CHECKSUM_LANES)
#define TX_SAMPLE_STRIDE (TX_SAMPLED / TX_SAMPLE_RUNS)

#endif
