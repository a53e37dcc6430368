/* Lengths of the codes of weights (Note [Windows]) by table.
 *
 * How many steps (of its dtype) a weight can have moved depends only on the distance between its exponent and the
 * bound's: on the `rung` bound - 16 * exponent. So do window and code length, except for the smallest exponents and for
 * weights that are as small as the bound. Weights of one rung have three lengths, by their significand:
 *   below `low`              `low_bits`: its windows reach the next smaller exponent, which has twice as many steps
 *   in [low, high)           `bits`
 *   from `high` on           `high_bits`: its windows reach the next larger exponent
 * The length at the top of an exponent is that at the bottom of the next one, since twice a number of steps takes as
 * many bits as twice that number plus one. So without codes of a single bit a window has at most two lengths: `bits`
 * from `low` on and `low_bits` below. */
#ifndef TX_MATH_DELTA_RUNGS_H
#define TX_MATH_DELTA_RUNGS_H

#include "csrc/math/delta_value.h"

typedef struct tx_delta_rung {
  int32_t low, high; /* high = -1: not by table */
  int32_t steps;
  uint8_t bits, high_bits, low_bits;
  uint8_t one; /* whether `bits` is 1 */
  /* From this significand on, a window's weights have only two lengths: `bits` and either `low_bits` or `high_bits`. */
  int32_t quick;
} tx_delta_rung;

#define TX_DELTA_RUNGS (16 * 26)
typedef struct tx_delta_rungs {
  tx_delta_rung rung[TX_DELTA_RUNGS];
  /* The same for 16-bit weights, packed for loops that look up many: `bits` in the lowest byte, then `high_bits`,
   * `low_bits`, and `steps`, from which `low` and `high` follow. 0: not by table. */
  uint32_t lengths[TX_DELTA_RUNGS];
  int32_t first; /* the rung of the first entry; all smaller rungs are equal to it */
  int32_t returns;
  tx_dtype dtype;
} tx_delta_rungs;

static inline void tx_delta_rungs_make(tx_delta_rungs *t, const tx_dtype dtype, int returns) {
  const int32_t m = tx_delta_mantissa(dtype);
  const int32_t exponent = 128 - tx_delta_rebias(dtype); /* any exponent in the middle of the range */
  t->first = -16 * (m + 2);
  t->dtype = dtype;
  t->returns = returns;
  memset(t->lengths, 0, sizeof t->lengths);
  for (int32_t i = 0; i < TX_DELTA_RUNGS; i++) {
    const int32_t bound = t->first + i + 16 * (exponent + tx_delta_rebias(dtype));
    const int64_t steps = tx_delta_steps(exponent, bound, dtype);
    tx_delta_rung *rung = &t->rung[i];
    *rung = (tx_delta_rung){.low = 0, .high = -1};
    if (!tx_delta_is_narrow(2 * steps, dtype)) continue;
    rung->steps = (int32_t)steps;
    rung->one = steps == 1 && !returns;
    rung->low = (int32_t)(2 * steps + 2);
    rung->high = (int32_t)((INT64_C(1) << m) - (rung->one ? steps + 2 : 0));
    rung->high_bits = (uint8_t)tx_delta_length(2 * steps);
    rung->bits = rung->one ? 1 : rung->high_bits;
    const int64_t below = tx_delta_steps(exponent - 1, bound, dtype);
    rung->low_bits = (uint8_t)tx_delta_length(2 * below + 1);
    const int deep = !tx_delta_is_narrow(2 * below, dtype); /* the next smaller exponent's rung has no table */
    rung->quick = deep ? (int32_t)(rung->low + steps) : 0;
    if (dtype == TX_F32) continue;
    t->lengths[i] =
        rung->bits | (uint32_t)rung->high_bits << 8 | (uint32_t)rung->low_bits << 16 | (uint32_t)steps << 24;
  }
}

TX_FN const tx_delta_rung *tx_delta_rung_of(const tx_delta_rungs *t, int32_t exponent, int32_t bound,
                                            const tx_dtype dtype) {
  const int32_t at = bound - 16 * (exponent + tx_delta_rebias(dtype)) - t->first;
  return &t->rung[at < 0 ? 0 : at < TX_DELTA_RUNGS ? at : TX_DELTA_RUNGS - 1];
}

/* tx_delta_bits, for the table's dtype and `returns`. */
TX_FN int32_t tx_delta_rung_bits(const tx_delta_rungs *t, uint32_t bits, int32_t bound, const tx_dtype dtype) {
  const int32_t m = tx_delta_mantissa(dtype);
  const uint32_t size = tx_delta_size_of(bits, dtype);
  const int32_t e = (int32_t)(size >> m), significand = (int32_t)(size & ((1u << m) - 1u));
  const tx_delta_rung *rung = tx_delta_rung_of(t, e, bound, dtype);
  if (e < 2 || rung->high < 0) return tx_delta_bits(bits, bound, t->returns, dtype);
  const int32_t most = significand < rung->high ? rung->bits : rung->high_bits;
  return significand < rung->low ? rung->low_bits : most;
}

/* tx_delta_search by table. */
TX_FN tx_delta_found tx_delta_rung_find(const tx_delta_rungs *t, uint32_t old, int32_t bound, uint64_t next,
                                        const tx_dtype dtype) {
  const int32_t m = tx_delta_mantissa(dtype);
  const uint32_t size = tx_delta_size_of(old, dtype);
  const int32_t e = (int32_t)(size >> m), significand = (int32_t)(size & ((1u << m) - 1u));
  const tx_delta_rung *rung = tx_delta_rung_of(t, e, bound, dtype);
  if (__builtin_expect(e < 3 || rung->high < 0 || significand < rung->quick, 0))
    return tx_delta_search(old, bound, next, t->returns, dtype);
  /* In magnitudes, where the window is the same for both signs: a negative weight's code is complemented. A code of one
   * bit is bit 1 of the weight; its bit 0 is the opposite of the old weight's. */
  const int64_t flip = old == size ? 0 : -1, high = (int64_t)size + rung->steps;
  const int64_t single = (int64_t)(next & 1u) << 1 | (((int64_t)size ^ flip ^ 1) & 1);
  int32_t bits = rung->bits;
  const int64_t mask = (INT64_C(1) << (bits + rung->one)) - 1;
  const int64_t first = (rung->one ? single : tx_delta_sent((int64_t)next & mask, bits)) ^ flip;
  int64_t found = high - ((high - first) & mask);
  const int64_t in_exponent = found - (int64_t)size + significand;
  if (in_exponent < rung->low || in_exponent >= rung->high) { /* the code has another length: read it again */
    bits = in_exponent < rung->low ? rung->low_bits : rung->high_bits;
    const int64_t wide = (INT64_C(1) << bits) - 1;
    found = high - ((high - (tx_delta_sent((int64_t)next & wide, bits) ^ flip)) & wide);
  }
  const uint32_t sign = old == size ? 0 : 1u << (tx_delta_width(dtype) - 1);
  return (tx_delta_found){(uint32_t)found | sign, bits};
}

#endif
