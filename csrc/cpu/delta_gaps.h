/* Writes and reads gaps between positions in Rice codes. These are functions, since an inlined copy for each class
 * would be more code than a processor's instruction cache holds. Included by coding_kernels_isa.c only. */
#ifndef TX_CPU_DELTA_GAPS_H
#define TX_CPU_DELTA_GAPS_H

#include "csrc/cpu/delta_batch.h"

/* remainders: the r with which each of n numbers is coded. Returns the Rice state after them. */
TX_FN tx_rice tx_delta_remainders(tx_rice s, const uint32_t *numbers, int32_t n, int32_t *remainders) {
  int32_t k = 0;
  for (int32_t i = 0; i < TX_RICE_GROUP && s.left < TX_RICE_GROUP && k < n; i++, k++) { /* the rest of a begun group */
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

/* Writes n numbers as n calls of tx_rice_put would; there has to be space for TX_DELTA_LANES more. */
TX_FN void tx_delta_put_numbers(tx_bit_writer *w, tx_rice *rice, uint32_t *numbers, int32_t n, tx_delta_ahead *ahead) {
  int32_t remainders[TX_DELTA_BATCH + TX_DELTA_LANES];
  tx_delta_codes codes;
  const tx_rice after = tx_delta_remainders(*rice, numbers, n, remainders);
  const int32_t whole = tx_delta_whole(n);
  int32_t long_ones = 0;
  memset(numbers + n, 0, TX_DELTA_LANES * sizeof *numbers);
  memset(remainders + n, 0, TX_DELTA_LANES * sizeof *remainders);
  for (int32_t k = 0; k < whole; k++) {
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
  tx_delta_put_codes(w, &codes, n, ahead);
  *rice = after;
}

/* Writes the gaps before the n_at places `at` out of n. */
static __attribute__((noinline, unused)) void tx_delta_put_gaps(tx_delta_stream *stream, const uint16_t *at,
                                                                int32_t n_at, uint32_t n, tx_delta_ahead *ahead) {
  uint32_t gaps[TX_DELTA_BATCH + TX_DELTA_LANES];
  tx_delta_stream s = *stream;
  uint32_t next = 0u - s.left;
  for (int32_t done = 0, many = 0; done < n_at; done += many) {
    many = n_at - done < TX_DELTA_BATCH ? n_at - done : TX_DELTA_BATCH;
    gaps[0] = at[done] - next;
    for (int32_t k = 1; k < many; k++)
      gaps[k] = (uint32_t)at[done + k] - (uint32_t)at[done + k - 1] - 1u;
    tx_delta_put_numbers(&s.writer, &s.rice, gaps, many, ahead);
    next = at[done + many - 1] + 1u;
  }
  s.left = n - next;
  *stream = s;
}

/* Reads four numbers of a quotient and r bits each. ends: where each ends; if the last end is above TX_DELTA_FOUR_MOST,
 * the four are not valid. Each number depends on the one before by a shift and a count only. */
#define TX_DELTA_FOUR_MOST 56
TX_FN void tx_delta_four_in(uint64_t next, const int32_t r, uint32_t numbers[4], int32_t ends[4]) {
  const uint64_t rest = (UINT64_C(1) << r) - 1u;
  uint64_t left = ~next;
  int32_t bits = 0, longest = 0;
  for (int32_t i = 0; i < 4; i++) {
    const int32_t quotient = __builtin_ctzll(left | UINT64_C(1) << 63), length = quotient + 1 + r;
    numbers[i] = (uint32_t)quotient << r | (uint32_t)(~left >> 1 >> quotient & rest);
    left >>= length & 63;
    bits += length;
    ends[i] = bits;
    longest |= quotient;
  }
  ends[3] = longest < 16 ? bits : TX_DELTA_FOUR_MOST + 1;
}

/* Sets the bits of the places, out of n, that the next gaps give. */
static __attribute__((noinline, unused)) void tx_delta_take_gaps(tx_delta_source *source, uint32_t n, uint64_t *bits,
                                                                 tx_delta_ahead *ahead) {
  tx_bit_window window = tx_window_of(&source->reader);
  tx_rice rice = source->rice;
  uint32_t at = source->left;
  while (at < n) {
    const uint32_t first = at;
    const int32_t before = rice.left;
    do {
      uint32_t gaps[4];
      int32_t ends[4], alone, taken = 1;
      tx_delta_fetch(ahead);
      tx_window_fill(&window);
      tx_delta_four_in(window.bits, rice.r, gaps, ends);
      const uint32_t second = at + 1u + gaps[0], third = second + 1u + gaps[1], fourth = third + 1u + gaps[2];
      bits[at >> 6] |= UINT64_C(1) << (at & 63);
      if (__builtin_expect(ends[3] > TX_DELTA_FOUR_MOST, 0)) {
        at += 1u + tx_rice_in(window.bits, rice.r, &alone);
        tx_window_drop(&window, alone);
      } else if (__builtin_expect(rice.left >= 4 && fourth < n, 1)) {
        bits[second >> 6] |= UINT64_C(1) << (second & 63);
        bits[third >> 6] |= UINT64_C(1) << (third & 63);
        bits[fourth >> 6] |= UINT64_C(1) << (fourth & 63);
        tx_window_drop(&window, ends[3]);
        at = fourth + 1u + gaps[3];
        taken = 4;
      } else { /* at the end of the group or of the places */
        const int two = rice.left > 1 && second < n, three = two && rice.left > 2 && third < n;
        if (two) bits[second >> 6] |= UINT64_C(1) << (second & 63);
        if (three) bits[third >> 6] |= UINT64_C(1) << (third & 63);
        tx_window_drop(&window, three ? ends[2] : two ? ends[1] : ends[0]);
        at = three ? fourth : two ? third : second;
        taken = 1 + two + three;
      }
      rice.left -= taken;
    } while (rice.left && at < n);
    rice.sum += at - first - (uint32_t)(before - rice.left);
    if (rice.left == 0) rice = tx_rice_renewed(rice);
  }
  *source = (tx_delta_source){tx_window_end(&window), rice, at - n};
}

#endif
