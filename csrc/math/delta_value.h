/* A changed weight in few bits, for somebody who has the old one.
 *
 * Note [Windows]. Both sides know a bound B on how far the value that the weight is rounded from has moved, so the new
 * weight is in a window around the old one: tx_delta_window. The sender does not know the old weight. It sends the low
 * bits of the new one's ordered integer, and as many of them as tell it from every other weight that can be in a window
 * together with it: tx_delta_bits, a function of the new weight and B alone. The receiver looks for the one weight v of
 * its window whose own tx_delta_bits low bits are those that come next. There is only one: two weights of a window
 * differ in the lower tx_delta_bits of either, so neither code begins with the other.
 *
 * The commonest window has three weights: the old one and its two neighbours. These differ in bit 1 and have bit 0 in
 * common, so bit 1 goes first, and is the whole code there after a single step. After several a weight that changed may
 * be the old one again ("returns"), and there are three to tell apart.
 *
 * The ordered integer of a weight: its bits where the sign is +, else the complement of the bits without the sign.
 * Neighbouring weights differ by 1, and -0 is next to +0. Arithmetic is in integers, or in doubles with margins that
 * are wide beside their rounding; both sides do the same. */
#ifndef TX_MATH_DELTA_VALUE_H
#define TX_MATH_DELTA_VALUE_H

#include <string.h>

#include "csrc/math/numeric.h"
#include "csrc/torch_ext.h"

/* Bounds travel as codes: the exponent of an fp32 and four bits of its significand. 0: no bound. */
#define TX_DELTA_BOUND_MOST ((255 << 4) - 1)
#define TX_DELTA_BOUND_LEAST (1 << 4)

/* Bits of a significand, without the leading one; bits of a weight; what its exponent lacks to an fp32's. */
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

/* The code of the least bound that is not below a bf16; TX_DELTA_BOUND_MOST + 1 where there is none (infinity, NaN). */
TX_FN int32_t tx_delta_bound_code(uint16_t bf16) {
  const int32_t size = bf16 & 0x7fff;
  if (size >= 0x7f80) return TX_DELTA_BOUND_MOST + 1;
  const int32_t code = (size + 7) >> 3;
  return code < TX_DELTA_BOUND_LEAST ? TX_DELTA_BOUND_LEAST : code; /* what moved by less than any normal number */
}

/* How many steps of weights with this exponent a value moves at most, and its weight with it, by rounding. Saturates.
 */
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
/* Infinity counts as the power of two that follows the largest number. */
TX_FN double tx_delta_value(uint32_t size, const tx_dtype dtype) {
  const int32_t m = tx_delta_mantissa(dtype);
  const int32_t e = (int32_t)(size >> m), normal = e > 0;
  const uint32_t significand = (size & ((1u << m) - 1u)) | ((uint32_t)normal << m);
  return (double)significand * tx_delta_power((normal ? e : 1) + tx_delta_rebias(dtype) - 127 - m);
}
/* The bits without the sign of what is not above x >= 0, from the least normal number on; below it, of that where `up`,
 * else 0. */
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

/* Ordered integers of everything within `reach` of a weight's value, and a little more. */
TX_FN tx_delta_range tx_delta_within(uint32_t bits, double reach, const tx_dtype dtype) {
  const uint32_t size = tx_delta_size_of(bits, dtype);
  const double a = tx_delta_value(size, dtype);
  const int64_t high = tx_delta_below(a + reach, 1, dtype) + 1;
  const int64_t low =
      a > reach ? tx_delta_below(a - reach, 0, dtype) - 1 : -tx_delta_below(reach - a, 1, dtype) - 2; /* of |weight| */
  if (size == bits) return (tx_delta_range){low, high};
  return (tx_delta_range){-high - 1, -low - 1};
}

/* Whether windows of weights with so many steps reach one exponent down at most. */
TX_FN int tx_delta_is_narrow(int64_t steps, const tx_dtype dtype) {
  return steps < INT64_C(1) << (tx_delta_mantissa(dtype) - 2);
}

/* What the weight can have become. */
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

/* How many low bits of a weight are sent. returns: it may have come back to what it was. */
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

/* The low `n` bits of an ordered integer in the order in which they are sent, and the other way. */
TX_FN uint32_t tx_delta_sent(int64_t ordered, int32_t n) {
  const uint32_t low = (uint32_t)ordered;
  return ((low & ~3u) | (low >> 1 & 1u) | (low & 1u) << 1) & (uint32_t)((UINT64_C(1) << n) - 1u);
}

typedef struct tx_delta_found {
  uint32_t weight;
  int32_t bits; /* how many of those that came it took */
} tx_delta_found;

/* The weight of a window whose code are the next n bits; 0: there is none. */
TX_FN int tx_delta_match(tx_delta_range window, int64_t at, int32_t bound, uint64_t next, int32_t n, int returns,
                         uint32_t *weight, const tx_dtype dtype) {
  const int64_t modulus = INT64_C(1) << (n == 1 ? 2 : n);
  const int64_t first = n == 1 ? (int64_t)(next & 1u) << 1 | ((at & 1) ^ 1)
                               : (int64_t)tx_delta_sent((int64_t)(next & ((UINT64_C(1) << n) - 1u)), n);
  if (window.high - window.low >= modulus * 64) return 0; /* no weight of such a window has so few */
  for (int64_t v = window.low + ((first - window.low) & (modulus - 1)); v <= window.high; v += modulus) {
    *weight = tx_delta_unordered(v, dtype);
    if ((v != at || returns) && tx_delta_bits(*weight, bound, returns, dtype) == n) return 1;
  }
  return 0;
}

/* The weight whose code comes next. Any bits give one. There is one match at most, so the likeliest lengths are tried
 * first: those of the old weight's neighbourhood. Most weights are found quicker (csrc/math/delta_rungs.h). */
static __attribute__((noinline, unused)) tx_delta_found tx_delta_search(uint32_t old, int32_t bound, uint64_t next,
                                                                        int returns, const tx_dtype dtype) {
  const tx_delta_range window = tx_delta_window(old, bound, dtype);
  const int64_t at = tx_delta_ordered(old, dtype);
  const int32_t guess = tx_delta_bits(old, bound, returns, dtype), least = 1 + returns;
  tx_delta_found found = {old, least}; /* what no sender sent */
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
