/* 16-bit remainders: a bf16 weight and an int16 that together are the fp32 master (docs/specification.md, G4).
 *
 * The weight is always tx_bf16_from_f32(master), nearest even. The remainder is bits(master) - (weight << 16): what the
 * weight lacks, in fp32 ulps, positive away from zero for either sign. Its range depends on the weight:
 *   odd weight     [-32767, 32767]
 *   even weight    [-32768, 32768], since both ties round to it
 *   zero           magnitudes up to 32768; the remainder's sign is ignored, so the upper tie, 0x8000, is exact
 *   Inf            has no upper half
 * An even weight has one pattern more than 16 bits hold. So the upper tie is stored as 32767, and the master becomes
 * one fp32 ulp lower. This affects 32 638 of the 2^32 patterns; every other finite pattern and Inf is exact. NaN
 * becomes (0x7fc0, 0) and decodes to 0x7fc00000. */
#ifndef TX_MATH_REMAINDER_H
#define TX_MATH_REMAINDER_H

#include "csrc/math/numeric.h"

/* A master as stored: the weight is the upper half of `upper`, the remainder is the lower half of `lower`. */
typedef struct tx_remainder_halves {
  uint32_t upper;
  uint32_t lower;
} tx_remainder_halves;

/* The remainder's 16 bits are the lower half of the master, after the one inexact pattern is lowered by an ulp. Without
 * that pattern a tie always rounds up, so adding half a unit rounds to nearest even. */
TX_FN tx_remainder_halves tx_remainder_split(float master) {
  const uint32_t bits = tx_bits_from_f32(tx_one_nan(master));
  const uint32_t lowered = (bits & 0x1ffffu) == 0x8000u ? bits - 1u : bits;
  const tx_remainder_halves halves = {lowered + 0x8000u, (bits & 0x7fffffffu) == 0x8000u ? bits : lowered};
  return halves;
}

/* The remainder that belongs to the weight tx_bf16_from_f32(master). */
TX_FN int16_t tx_remainder_encode(float master) {
  return (int16_t)tx_remainder_split(master).lower;
}

/* The master of a weight and a remainder. Any remainder with a finite weight gives a master that rounds to the weight,
 * also pairs that tx_remainder_split never gives: with an odd weight, -32768 (the lower tie, which rounds to the even
 * neighbour) is read as -32767; with a zero weight the remainder's sign is ignored (0x8000, the upper tie, is its own
 * magnitude). An Inf with a positive remainder, which is never written either, gives NaN.
 *
 * upper: the weight in the upper half, 0 in the lower half. remainder: in the upper half; the lower half is ignored. */
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
