/* An exact, order-independent sum of block sums of squares. It is an integer, so any split, any order of threads and
 * ranks, and an int64 all-reduce give the same bits.
 *
 * The sum is TX_NORM_LIMBS int64 limbs of 32 payload bits; limb i is worth 2^(32 i - 298): squares of fp32 numbers are
 * multiples of 2^-298 and a block's sum is below 2^263. An addition changes a limb by less than 2^32, so carries have
 * to be propagated (tx_exact_carry) every 2^30 additions, and before an all-reduce, which is then safe for world sizes
 * below 2^31. 640 bits are enough for 2^79 blocks. */
#ifndef TX_MATH_EXACT_SUM_H
#define TX_MATH_EXACT_SUM_H

#include "csrc/math/numeric.h"
#include "csrc/torch_ext.h"

#define TX_EXACT_LSB (-298)
#define TX_EXACT_ADDS_PER_CARRY (INT64_C(1) << 30)

/* a + b modulo 2^64: limbs from outside may have any value, and signed overflow is undefined. */
TX_FN int64_t tx_limb_sum(int64_t a, int64_t b) {
  return (int64_t)((uint64_t)a + (uint64_t)b);
}

/* A number as addends for three neighbouring limbs, e.g. for atomic additions to [first], [first+1], [first+2]. */
typedef struct tx_exact_parts {
  int32_t first; /* -1: not a number that the sum can hold */
  uint32_t part[3];
} tx_exact_parts;

/* Splits x: finite, 0 <= x < 2^300. Bits below 2^-298 are dropped (block sums of fp32 squares have none). NaN, Inf,
 * negative and larger numbers give first = -1. */
TX_FN tx_exact_parts tx_exact_split(double x) {
  tx_exact_parts parts = {-1, {0u, 0u, 0u}};
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  const int32_t field = (int32_t)(bits >> 52); /* with the sign: negative numbers exceed the limit below */
  if (bits == 0u || bits == UINT64_C(1) << 63) {
    parts.first = 0;
    return parts;
  }
  if (field >= 1023 + 300) return parts;
  uint64_t mantissa = (bits & ((UINT64_C(1) << 52) - 1u)) | (field > 0 ? UINT64_C(1) << 52 : 0u);
  int32_t shift = field - 1075 - TX_EXACT_LSB;
  if (shift < 0) {
    mantissa = shift > -64 ? mantissa >> -shift : 0u;
    shift = 0;
  }
  const int32_t offset = shift & 31;
  parts.first = shift >> 5;
  parts.part[0] = (uint32_t)(mantissa << offset);
  parts.part[1] = (uint32_t)(mantissa >> (32 - offset));
  parts.part[2] = (uint32_t)((mantissa >> 32) >> (32 - offset));
  return parts;
}

/* limbs += x. Returns 0; or 1, and adds nothing, if x is not finite, negative or >= 2^300. */
TX_FN int tx_exact_add(int64_t *limbs, double x) {
  const tx_exact_parts parts = tx_exact_split(x);
  if (parts.first < 0) return 1;
  for (int32_t i = 0; i < 3; ++i)
    limbs[parts.first + i] = tx_limb_sum(limbs[parts.first + i], (int64_t)parts.part[i]);
  return 0;
}

/* Brings every limb but the last into [0, 2^32). The value stays the same. */
TX_FN void tx_exact_carry(int64_t *limbs) {
  for (int32_t i = 0; i + 1 < TX_NORM_LIMBS; ++i) {
    limbs[i + 1] = tx_limb_sum(limbs[i + 1], limbs[i] >> 32);
    limbs[i] &= INT64_C(0xffffffff);
  }
}

/* to += from, and then carries, so that `to` has room for another 2^30 additions. */
TX_FN void tx_exact_merge(int64_t *to, const int64_t *from) {
  for (int32_t i = 0; i < TX_NORM_LIMBS; ++i)
    to[i] = tx_limb_sum(to[i], from[i]);
  tx_exact_carry(to);
}

/* The sum as a double, to nearest even; it is >= 0. Limbs need not be carried. */
TX_FN double tx_exact_double(const int64_t *limbs) {
  int64_t carried[TX_NORM_LIMBS];
  for (int32_t i = 0; i < TX_NORM_LIMBS; ++i)
    carried[i] = limbs[i];
  tx_exact_carry(carried);
  int32_t top = TX_NORM_LIMBS - 1;
  while (top > 0 && carried[top] == 0)
    --top;
  if (carried[top] <= 0) return 0.0;
  /* The 64 bits from the highest one down; `rest` is not 0 if any bit below them is set. */
  const uint64_t below =
      (top > 0 ? (uint64_t)carried[top - 1] << 32 : 0u) | (top > 1 ? (uint64_t)carried[top - 2] : 0u);
  uint64_t window = (uint64_t)carried[top];
  int32_t shift = 0;
  for (; window >> 63 == 0u; ++shift)
    window <<= 1;
  window |= shift > 0 ? below >> (64 - shift) : 0u;
  uint64_t rest = shift > 0 ? below << shift : below;
  for (int32_t i = top - 3; i >= 0; --i)
    rest |= (uint64_t)carried[i];
  /* Nearest even by the 11 bits that do not fit into a double. A carry out of the mantissa correctly raises the
   * exponent. */
  const uint64_t mantissa = window >> 11;
  const uint64_t tail = (window & 0x7ffu) << 1 | (rest != 0u ? 1u : 0u);
  const uint64_t up = tail > 0x800u || (tail == 0x800u && (mantissa & 1u) != 0u) ? 1u : 0u;
  const int32_t exponent = 32 * top + TX_EXACT_LSB - shift + 63;
  const uint64_t bits = ((uint64_t)(exponent + 1022) << 52) + mantissa + up;
  double sum;
  memcpy(&sum, &bits, sizeof sum);
  return sum;
}

#endif
