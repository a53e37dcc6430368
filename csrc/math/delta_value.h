/* A changed weight in few bits, for a receiver that has the old one.
 *
 * Note [Windows]. The sender knows the new weight but not the old one. How few bits tell the receiver the new weight?
 *
 * Both sides know a bound B on how far the value moved that the weight is rounded from. So the new weight is in a
 * window around the old one (tx_delta_window). The sender sends the low bits of the new weight's ordered integer: as
 * many as distinguish it from every other weight that can be in a window together with it. That number is
 * tx_delta_bits, a function of the new weight and B alone. The receiver looks in its window for the weight v whose own
 * tx_delta_bits low bits are the next bits of the stream. There is only one: any two weights of a window differ in the
 * lower tx_delta_bits of either, so neither code is a prefix of the other.
 *
 * The commonest window has three weights: the old one and its two neighbours. The neighbours differ in bit 1 and share
 * bit 0, so bit 1 is sent first, and it is the whole code after a single training step. After several steps, a weight
 * that changed may have returned to its old value (`returns`), so that three weights have to be told apart.
 *
 * The ordered integer of a weight: its bits if the sign is +, else the complement of the bits without the sign.
 * Neighbouring weights differ by 1, and -0 is next to +0. All arithmetic is in integers, or in doubles with margins
 * much wider than their rounding errors; both sides compute the same. */
#ifndef TX_MATH_DELTA_VALUE_H
#define TX_MATH_DELTA_VALUE_H

#include <string.h>

#include "csrc/math/numeric.h"
#include "csrc/torch_ext.h"

/* Bounds are stored as codes: the exponent of an fp32 and the upper four bits of its mantissa. 0: no bound. */
#define TX_DELTA_BOUND_MOST ((255 << 4) - 1)
#define TX_DELTA_BOUND_LEAST (1 << 4)

/* By dtype: bits of the mantissa; bits of a weight; the difference of its exponent bias to fp32's. */
TX_FN int32_t tx_delta_mantissa(const tx_dtype dtype) {
  return dtype == TX_F32 ? 23 : dtype == TX_F16 ? 10 : 7;
}
TX_FN int32_t tx_delta_width(const tx_dtype dtype) {
  return dtype == TX_F32 ? 32 : 16;
}
TX_FN int32_t tx_delta_rebias(const tx_dtype dtype) {
  return dtype == TX_F16 ? 127 - 15 : 0;
}

TX_FN int64_t tx_delta_ordered(uint32_t bits, const tx_dtype dtype) {
  const uint32_t sign = 1u << (tx_delta_width(dtype) - 1);
  return bits & sign ? -(int64_t)(bits & (sign - 1u)) - 1 : (int64_t)bits;
}
TX_FN uint32_t tx_delta_unordered(int64_t ordered, const tx_dtype dtype) {
  const uint32_t sign = 1u << (tx_delta_width(dtype) - 1);
  return ordered < 0 ? (uint32_t)(-(ordered + 1)) | sign : (uint32_t)ordered;
}
/* The bits without the sign. */
TX_FN uint32_t tx_delta_size_of(uint32_t bits, const tx_dtype dtype) {
  return bits & ((1u << (tx_delta_width(dtype) - 1)) - 1u);
}

/* The code of the least bound that is >= a bf16; TX_DELTA_BOUND_MOST + 1 if there is none (Inf, NaN). */
TX_FN int32_t tx_delta_bound_code(uint16_t bf16) {
  const int32_t size = bf16 & 0x7fff;
  if (size >= 0x7f80) return TX_DELTA_BOUND_MOST + 1;
  const int32_t code = (size + 7) >> 3;
  return code < TX_DELTA_BOUND_LEAST ? TX_DELTA_BOUND_LEAST : code; /* for all changes below the normals */
}

/* How many steps a weight with this exponent moves at most, including its rounding, when its value moves by the bound.
 * Saturates. */
TX_FN int64_t tx_delta_steps(int32_t exponent, int32_t bound, const tx_dtype dtype) {
  const int32_t e = (exponent > 1 ? exponent : 1) + tx_delta_rebias(dtype);
  const int32_t shift = (bound >> 4) - e + tx_delta_mantissa(dtype) - 4;
  const int64_t significand = 16 + (bound & 15);
  if (shift >= 0) return (shift > 40 ? INT64_C(1) << 42 : significand << shift) + 1;
  return (shift < -8 ? 0 : significand >> -shift) + 1;
}

TX_FN double tx_delta_power(int32_t exponent) {
  const uint64_t bits = (uint64_t)(exponent + 1023) << 52;
  double x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
TX_FN double tx_delta_bound_value(int32_t bound) {
  return (double)(16 + (bound & 15)) * tx_delta_power((bound >> 4) - 131);
}
/* The magnitude of a weight as a double. Infinity counts as the power of two that follows the largest number. */
TX_FN double tx_delta_value(uint32_t size, const tx_dtype dtype) {
  const int32_t m = tx_delta_mantissa(dtype);
  const int32_t e = (int32_t)(size >> m), normal = e > 0;
  const uint32_t significand = (size & ((1u << m) - 1u)) | ((uint32_t)normal << m);
  return (double)significand * tx_delta_power((normal ? e : 1) + tx_delta_rebias(dtype) - 127 - m);
}
/* The bits without the sign of the largest number <= x, if x >= the least normal number; for smaller x >= 0, those of
 * the least normal number if `up`, else 0. */
TX_FN int64_t tx_delta_below(double x, int up, const tx_dtype dtype) {
  const int32_t m = tx_delta_mantissa(dtype);
  const int64_t rebias = (int64_t)(1023 - 127 + tx_delta_rebias(dtype)) << m;
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  const int64_t size = (int64_t)(bits >> (52 - m)) - rebias;
  if (size < INT64_C(1) << m) return up ? INT64_C(1) << m : 0;
  const int64_t most = (INT64_C(1) << (tx_delta_width(dtype) - 1)) - 1;
  return size < most ? size : most;
}

typedef struct tx_delta_range {
  int64_t low, high;
} tx_delta_range;

/* The ordered integers of all weights within `reach` of a weight's value, and a few more. */
TX_FN tx_delta_range tx_delta_within(uint32_t bits, double reach, const tx_dtype dtype) {
  const uint32_t size = tx_delta_size_of(bits, dtype);
  const double a = tx_delta_value(size, dtype);
  const int64_t high = tx_delta_below(a + reach, 1, dtype) + 1;
  const int64_t low =
      a > reach ? tx_delta_below(a - reach, 0, dtype) - 1 : -tx_delta_below(reach - a, 1, dtype) - 2; /* of |weight| */
  if (size == bits) return (tx_delta_range){low, high};
  return (tx_delta_range){-high - 1, -low - 1};
}

/* Whether windows of weights with that many steps reach at most one exponent down. */
TX_FN int tx_delta_is_narrow(int64_t steps, const tx_dtype dtype) {
  return steps < INT64_C(1) << (tx_delta_mantissa(dtype) - 2);
}

/* The weights that `old` can have become. */
TX_FN tx_delta_range tx_delta_window(uint32_t old, int32_t bound, const tx_dtype dtype) {
  const int32_t m = tx_delta_mantissa(dtype);
  const uint32_t size = tx_delta_size_of(old, dtype);
  const int32_t e = (int32_t)(size >> m);
  const int64_t steps = tx_delta_steps(e, bound, dtype);
  if (e < 2 || !tx_delta_is_narrow(steps, dtype)) {
    const double a = tx_delta_value(size, dtype);
    return tx_delta_within(old, tx_delta_bound_value(bound) + a * tx_delta_power(1 - m), dtype);
  }
  const int64_t at = tx_delta_ordered(old, dtype);
  const int64_t significand = size & ((1u << m) - 1u);
  const int64_t down = significand > steps ? steps : tx_delta_steps(e - 1, bound, dtype) + 1; /* towards zero */
  if (old == size) return (tx_delta_range){at - down, at + steps};
  return (tx_delta_range){at - steps, at + down};
}

TX_FN int32_t tx_delta_length(int64_t n) {
  return 64 - __builtin_clzll((unsigned long long)n | 1u);
}

/* How many low bits of the new weight are sent. returns: whether it may be the old weight again. */
TX_FN int32_t tx_delta_bits(uint32_t bits, int32_t bound, int returns, const tx_dtype dtype) {
  const int32_t m = tx_delta_mantissa(dtype);
  const uint32_t size = tx_delta_size_of(bits, dtype);
  const int32_t e = (int32_t)(size >> m);
  const int64_t steps = tx_delta_steps(e, bound, dtype);
  const int64_t significand = size & ((1u << m) - 1u);
  if (e >= 2 && tx_delta_is_narrow(2 * steps, dtype)) {
    const int64_t above = (INT64_C(1) << m) - significand; /* steps to the next exponent */
    if (significand >= 2 * steps + 2)
      return above > steps + 2 && steps == 1 && !returns ? 1 : tx_delta_length(2 * steps);
    return tx_delta_length(2 * tx_delta_steps(e - 1, bound, dtype) + 1);
  }
  const double a = tx_delta_value(size, dtype);
  const tx_delta_range all = tx_delta_within(bits, 2.5 * tx_delta_bound_value(bound) + a * 0.125, dtype);
  const int32_t length = tx_delta_length(all.high - all.low);
  return length < tx_delta_width(dtype) ? length : tx_delta_width(dtype);
}

/* The low n bits of an ordered integer with bits 0 and 1 swapped: the order in which they are sent. Its own inverse. */
TX_FN uint32_t tx_delta_sent(int64_t ordered, int32_t n) {
  const uint32_t low = (uint32_t)ordered;
  return ((low & ~3u) | (low >> 1 & 1u) | (low & 1u) << 1) & (uint32_t)((UINT64_C(1) << n) - 1u);
}

typedef struct tx_delta_found {
  uint32_t weight;
  int32_t bits; /* length of the code */
} tx_delta_found;

/* Looks in the window for the weight whose code is the next n bits. Returns 0 if there is none. at: the old weight's
 * ordered integer. */
TX_FN int tx_delta_match(tx_delta_range window, int64_t at, int32_t bound, uint64_t next, int32_t n, int returns,
                         uint32_t *weight, const tx_dtype dtype) {
  const int64_t modulus = INT64_C(1) << (n == 1 ? 2 : n);
  const int64_t first = n == 1 ? (int64_t)(next & 1u) << 1 | ((at & 1) ^ 1)
                               : (int64_t)tx_delta_sent((int64_t)(next & ((UINT64_C(1) << n) - 1u)), n);
  if (window.high - window.low >= modulus * 64) return 0; /* no weight of so wide a window has so short a code */
  for (int64_t v = window.low + ((first - window.low) & (modulus - 1)); v <= window.high; v += modulus) {
    *weight = tx_delta_unordered(v, dtype);
    if ((v != at || returns) && tx_delta_bits(*weight, bound, returns, dtype) == n) return 1;
  }
  return 0;
}

/* The weight whose code comes next; any bits give one. At most one length matches, so the likeliest are tried first:
 * those near the old weight's. tx_delta_rung_find (csrc/math/delta_rungs.h) finds most weights faster. */
static __attribute__((noinline, unused)) tx_delta_found tx_delta_search(uint32_t old, int32_t bound, uint64_t next,
                                                                        int returns, const tx_dtype dtype) {
  const tx_delta_range window = tx_delta_window(old, bound, dtype);
  const int64_t at = tx_delta_ordered(old, dtype);
  const int32_t guess = tx_delta_bits(old, bound, returns, dtype), least = 1 + returns;
  tx_delta_found found = {old, least}; /* for bits that no sender sends */
  for (int32_t by = 0; by <= tx_delta_width(dtype); by++) {
    for (int32_t n = guess - by; n <= guess + by; n += 2 * by) {
      if (n >= least && n <= tx_delta_width(dtype) &&
          tx_delta_match(window, at, bound, next, n, returns, &found.weight, dtype)) {
        found.bits = n;
        return found;
      }
      if (by == 0) break;
    }
  }
  return (tx_delta_found){old, least};
}

#endif
