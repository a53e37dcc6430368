/* Gaps between positions in Rice codes, and back: functions, as a copy for each class would be more code than
 * processors keep at hand. Included by kernels_isa.c only. */
#ifndef TX_CPU_DELTA_GAPS_H
#define TX_CPU_DELTA_GAPS_H

#include "csrc/cpu/delta_batch.h"

/* How Rice codes of n numbers have them: r of each, and the mean that follows. */
TX_FN tx_rice tx_delta_remainders(tx_rice s, const uint32_t *numbers, int32_t n, int32_t *remainders) {
  int32_t k = 0;
  for (int32_t i = 0; i < TX_RICE_GROUP && s.left < TX_RICE_GROUP && k < n; i++, k++) { /* of a group begun before */
    remainders[k] = s.r;
    tx_rice_follow(&s, numbers[k]);
  }
  for (; k + TX_RICE_GROUP <= n; k += TX_RICE_GROUP) {
    for (int32_t i = 0; i < TX_RICE_GROUP; i++) {
      remainders[k + i] = s.r;
      s.sum += numbers[k + i];
    }
    s = tx_rice_renewed(s);
  }
  for (; k < n; k++) {
    remainders[k] = s.r;
    tx_rice_follow(&s, numbers[k]);
  }
  return s;
}

/* n numbers, which are for tx_rice_put one after the other. */
TX_FN void tx_delta_put_numbers(tx_bit_writer *w, tx_rice *rice, const uint32_t *numbers, int32_t n) {
  int32_t remainders[TX_DELTA_BATCH];
  tx_delta_codes codes;
  const tx_rice after = tx_delta_remainders(*rice, numbers, n, remainders);
  int32_t long_ones = 0;
  for (int32_t k = 0; k < n; k++) {
    const int32_t r = remainders[k];
    const uint32_t quotient = numbers[k] >> r, unary = quotient & 31u;
    const int32_t length = (int32_t)unary + 1 + r;
    const uint32_t rest = numbers[k] & ((1u << r) - 1u);
    codes.code[k] = ((1u << unary) - 1u) | rest << unary << 1;
    codes.length[k] = length;
    long_ones |= quotient >= TX_RICE_LONGEST || length > TX_DELTA_CODE_LONGEST;
  }
  if (__builtin_expect(long_ones, 0)) {
    for (int32_t k = 0; k < n; k++)
      tx_rice_put(w, rice, numbers[k]);
    return;
  }
  tx_delta_put_codes(w, &codes, n);
  *rice = after;
}

/* Gaps before n_at of n places. */
static __attribute__((noinline, unused)) void tx_delta_put_gaps(tx_delta_stream *stream, const uint16_t *at,
                                                                int32_t n_at, uint32_t n) {
  uint32_t gaps[TX_DELTA_BATCH];
  tx_delta_stream s = *stream;
  uint32_t next = 0u - s.left;
  for (int32_t done = 0, many = 0; done < n_at; done += many) {
    many = n_at - done < TX_DELTA_BATCH ? n_at - done : TX_DELTA_BATCH;
    gaps[0] = at[done] - next;
    for (int32_t k = 1; k < many; k++)
      gaps[k] = (uint32_t)at[done + k] - (uint32_t)at[done + k - 1] - 1u;
    tx_delta_put_numbers(&s.writer, &s.rice, gaps, many);
    next = at[done + many - 1] + 1u;
  }
  s.left = n - next;
  *stream = s;
}

/* Sets the bits of n places that come after gaps. */
static __attribute__((noinline, unused)) void tx_delta_take_gaps(tx_delta_source *source, uint32_t n, uint64_t *bits) {
  tx_bit_window window = tx_window_of(&source->reader);
  tx_rice rice = source->rice;
  uint32_t at = source->left;
  while (at < n) {
    const int32_t r = rice.r;
    const uint64_t rest = (UINT64_C(1) << r) - 1u;
    const uint32_t first = at;
    const int32_t before = rice.left;
    do {
      bits[at >> 6] |= UINT64_C(1) << (at & 63);
      tx_window_fill(&window);
      const uint64_t ends = ~window.bits;
      int32_t quotient = __builtin_ctzll(ends | UINT64_C(1) << 63), length = quotient + 1 + r;
      uint32_t value = (uint32_t)quotient << r | (uint32_t)(window.bits >> 1 >> quotient & rest);
      if (__builtin_expect(quotient >= TX_RICE_LONGEST, 0)) value = tx_rice_in(window.bits, r, &length);
      tx_window_drop(&window, length);
      at += 1u + value;
      rice.left--;
    } while (rice.left && at < n);
    rice.sum += at - first - (uint32_t)(before - rice.left);
    if (rice.left == 0) rice = tx_rice_renewed(rice);
  }
  *source = (tx_delta_source){tx_window_end(&window), rice, at - n};
}

#endif
