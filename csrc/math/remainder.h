/* 16-bit remainders: a bf16 weight and an int16 that together are the fp32 master (semantics.md, G4).
 *
 * The weight is always tx_bf16_from_f32(master), nearest even. The remainder is what is missing in units of the fp32
 * last place: bits(master) - (weight << 16), which grows with magnitude for either sign. An odd weight's cell is
 * [-32767, 32767]. An even weight's cell has both ties, [-32768, 32768]: one pattern more than 16 bits have, so the
 * upper tie is stored as 32767, one fp32 ulp lower. The two zeros have no lower half: their remainder is read as
 * unsigned and the upper tie, 0x8000, is exact. Inf has no upper half. Hence 32 638 of the 2^32 patterns are stored one
 * ulp lower; every other finite pattern and Inf is exact. NaN becomes (0x7fc0, 0) and decodes to 0x7fc00000. */
#ifndef TX_MATH_REMAINDER_H
#define TX_MATH_REMAINDER_H

#include "csrc/math/numeric.h"

/* The remainder of `master` beside `weight` = tx_bf16_from_f32(master). */
TX_FN int16_t tx_remainder_encode(float master, uint16_t weight) {
  const int32_t missing = (int32_t)(tx_bits_from_f32(master) - ((uint32_t)weight << 16));
  const int32_t magnitude = weight & 0x7fff;
  const int32_t clamped = missing > 32767 && magnitude != 0 ? 32767 : missing;
  return (int16_t)(magnitude > 0x7f80 ? 0 : clamped);
}

/* The master of a pair. Total: every pair of 16-bit patterns gives a master that rounds to the weight; remainders that
 * tx_remainder_encode never writes are clamped into the weight's cell. */
TX_FN float tx_remainder_decode(uint16_t weight, int16_t remainder) {
  const int32_t magnitude = weight & 0x7fff;
  const int32_t lowest = (weight & 1) - 32768; /* the lower tie belongs to the even neighbour */
  const int32_t highest = magnitude == 0x7f80 ? 0 : 32767;
  const int32_t raised = remainder < lowest ? lowest : remainder;
  const int32_t clamped = raised > highest ? highest : raised;
  const int32_t code = remainder & 0xffff;
  const int32_t beside_zero = code > 0x8000 ? 0x8000 : code;
  const int32_t missing = magnitude == 0 ? beside_zero : clamped;
  const uint32_t bits = ((uint32_t)weight << 16) + (uint32_t)missing;
  return tx_f32_from_bits(magnitude > 0x7f80 ? 0x7fc00000u : bits);
}

#endif
