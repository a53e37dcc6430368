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

/* The remainder of `master` beside `weight` = tx_bf16_from_f32(master). */
TX_FN int16_t tx_remainder_encode(float master, uint16_t weight) {
  const int32_t missing = (int32_t)(tx_bits_from_f32(tx_one_nan(master)) - ((uint32_t)weight << 16));
  /* The upper tie of a weight that is not zero; of the zeros it is magnitude 0x8000. */
  const int32_t inexact = missing == 0x8000 && tx_magnitude_bits(master) != 0x8000 ? 1 : 0;
  return (int16_t)(missing - inexact);
}

/* The master of a pair. Every pair of patterns with a finite weight gives a master that rounds to the weight, also
 * those that tx_remainder_encode never writes: an odd weight's -32768, the lower tie, belongs to its even neighbour and
 * is read as -32767; beside a zero the sign is passed over (0x8000, the upper tie, is its own magnitude). An Inf with a
 * positive remainder, never written either, is NaN. */
TX_FN float tx_remainder_decode(uint16_t weight, int16_t remainder) {
  const int32_t upper = (int32_t)((uint32_t)weight << 16);
  const int32_t code = remainder;
  const int32_t lowest = (weight & 1) - 32768;
  const int32_t raised = code < lowest ? lowest : code;
  const int32_t size = code < 0 ? -code : code;
  const int32_t missing = (upper & 0x7fffffff) == 0 ? size : raised;
  return tx_f32_from_bits((uint32_t)upper + (uint32_t)missing);
}

#endif
