/* 16-bit remainders: a bf16 weight and an int16 that together are the fp32 master (semantics.md, G4).
 *
 * The weight is always tx_bf16_from_f32(master), nearest even. The remainder is what is missing in units of the fp32
 * last place: bits(master) - (weight << 16), which grows with magnitude for either sign. An odd weight's cell is
 * [-32767, 32767]. An even weight's cell has both ties, [-32768, 32768]: one pattern more than 16 bits have, so the
 * upper tie is stored as 32767, one fp32 ulp lower. The two zeros have no lower half: the sign of their remainder says
 * nothing and the upper tie, 0x8000, is exact. Inf has no upper half. Hence 32 638 of the 2^32 patterns are stored one
 * ulp lower; every other finite pattern and Inf is exact. NaN becomes (0x7fc0, 0) and decodes to 0x7fc00000. */
#ifndef TX_MATH_REMAINDER_H
#define TX_MATH_REMAINDER_H

#include "csrc/math/numeric.h"

/* A master as stored: the weight is the upper half of `upper`, the remainder the lower half of `lower`. */
typedef struct tx_remainder_halves {
  uint32_t upper;
  uint32_t lower;
} tx_remainder_halves;

/* The remainder's 16 bits are those of the master, lowered where it is the inexact pattern; without that pattern a tie
 * is always up, and half a unit added rounds to nearest even. */
TX_FN tx_remainder_halves tx_remainder_split(float master) {
  const uint32_t bits = tx_bits_from_f32(tx_one_nan(master));
  const uint32_t lowered = (bits & 0x1ffffu) == 0x8000u ? bits - 1u : bits;
  const tx_remainder_halves halves = {lowered + 0x8000u, (bits & 0x7fffffffu) == 0x8000u ? bits : lowered};
  return halves;
}

/* The remainder of `master` beside tx_bf16_from_f32(master). */
TX_FN int16_t tx_remainder_encode(float master) {
  return (int16_t)tx_remainder_split(master).lower;
}

/* The master of a pair. Every pair of patterns with a finite weight gives a master that rounds to the weight, also
 * those that tx_remainder_split never gives: an odd weight's -32768, the lower tie, belongs to its even neighbour and
 * is read as -32767; beside a zero the sign is passed over (0x8000, the upper tie, is its own magnitude). An Inf with a
 * positive remainder, never written either, is NaN. upper: the weight in the upper half, the lower one 0.
 * remainder: likewise, the lower half does not matter. */
TX_FN float tx_remainder_join(uint32_t upper, int32_t remainder) {
  const int32_t lowest = (int32_t)((upper & 0x10000u) | 0x80000000u);
  const int32_t code = remainder >> 16;
  const int32_t raised = (remainder < lowest ? lowest : remainder) >> 16;
  const int32_t size = code < 0 ? -code : code;
  const int32_t missing = (upper & 0x7fffffffu) == 0u ? size : raised;
  return tx_f32_from_bits(upper + (uint32_t)missing);
}
TX_FN float tx_remainder_decode(uint16_t weight, int16_t remainder) {
  return tx_remainder_join((uint32_t)weight << 16, (int32_t)((uint32_t)remainder << 16));
}

#endif
