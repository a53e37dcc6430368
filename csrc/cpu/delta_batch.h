/* Codes of many 16-bit weights at a time. Included by coding_kernels_isa.c only.
 *
 * Note [Batches]. A code's length, and the weight that it stands for, are computed by sums and table look-ups that do
 * not depend on other weights: loops over arrays, which the compiler vectorises. Only reading bits from a stream or
 * writing them is sequential, and is done in loops that do nothing else. Weights that the tables
 * (csrc/math/delta_rungs.h) do not cover get length 0 here and are processed one by one. The last vector may be
 * incomplete: arrays have space for a whole one, and results past the end are ignored. */
#ifndef TX_CPU_DELTA_BATCH_H
#define TX_CPU_DELTA_BATCH_H

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "csrc/cpu/delta_loops.h"

#define TX_DELTA_BATCH 128
#define TX_DELTA_LANES 16

/* n rounded up to whole vectors. */
TX_FN int32_t tx_delta_whole(int32_t n) {
  return (n + TX_DELTA_LANES - 1) & -TX_DELTA_LANES;
}

/* Consecutive codes. */
typedef struct tx_delta_codes {
  uint32_t code[TX_DELTA_BATCH + TX_DELTA_LANES];
  int32_t length[TX_DELTA_BATCH + TX_DELTA_LANES];
} tx_delta_codes;
#define TX_DELTA_CODE_LONGEST 28

/* Bits of those of 64 lengths that are 0. */
TX_FN uint64_t tx_delta_lacking(const int32_t *length) {
  uint64_t found = 0;
#if defined(__AVX512F__)
  for (int32_t k = 0; k < 4; k++) {
    const __m512i x = _mm512_loadu_si512(length + 16 * k);
    found |= (uint64_t)_mm512_testn_epi32_mask(x, x) << (16 * k);
  }
#elif defined(__SSE2__)
  for (int32_t k = 0; k < 16; k++) {
    const __m128i x = _mm_cmpeq_epi32(_mm_loadu_si128((const __m128i *)(length + 4 * k)), _mm_setzero_si128());
    found |= (uint64_t)(uint32_t)_mm_movemask_ps(_mm_castsi128_ps(x)) << (4 * k);
  }
#else
  for (int32_t k = 0; k < 64; k++)
    found |= (uint64_t)(length[k] == 0) << k;
#endif
  return found;
}

/* Writes n codes of at most TX_DELTA_CODE_LONGEST bits. Pairs of codes, and pairs of pairs, are joined in vectorised
 * loops. */
TX_FN void tx_delta_put_codes(tx_bit_writer *writer, tx_delta_codes *c, int32_t n, tx_delta_ahead *ahead) {
  uint64_t pair[TX_DELTA_BATCH / 2 + TX_DELTA_LANES], four[TX_DELTA_BATCH / 4 + TX_DELTA_LANES];
  int32_t length[TX_DELTA_BATCH / 2 + TX_DELTA_LANES], all[TX_DELTA_BATCH / 4 + TX_DELTA_LANES];
  tx_bit_writer w = *writer;
  memset(c->code + n, 0, TX_DELTA_LANES * sizeof *c->code);
  memset(c->length + n, 0, TX_DELTA_LANES * sizeof *c->length);
  const int32_t fours = (n + 3) / 4, whole = tx_delta_whole(n);
  for (int32_t k = 0; k < whole / 2; k++) {
    pair[k] = c->code[2 * k] | (uint64_t)c->code[2 * k + 1] << c->length[2 * k];
    length[k] = c->length[2 * k] + c->length[2 * k + 1];
  }
  for (int32_t k = 0; k < whole / 4; k++) {
    four[k] = pair[2 * k] | pair[2 * k + 1] << length[2 * k];
    all[k] = length[2 * k] + length[2 * k + 1];
  }
  for (int32_t k = 0; k < fours; k++) {
    tx_delta_fetch(ahead);
    if (__builtin_expect(all[k] <= 56, 1)) {
      tx_put_bits(&w, four[k], all[k]);
    } else {
      tx_put_bits(&w, pair[2 * k], length[2 * k]);
      tx_put_bits(&w, pair[2 * k + 1], length[2 * k + 1]);
    }
  }
  *writer = w;
}

/* A batch. Input: weights (the new ones for encoding, the old ones for decoding) and the bounds on how far they
 * moved. */
typedef struct tx_delta_batch {
  uint32_t weight[TX_DELTA_BATCH];
  int32_t bound[TX_DELTA_BATCH];
  tx_delta_codes codes;           /* a length does not include anything sent before the code; 0: not by table */
  uint32_t steps[TX_DELTA_BATCH]; /* for decoding */
  int32_t entry[TX_DELTA_BATCH];  /* indices into the tables */
  uint32_t lengths[TX_DELTA_BATCH];
} tx_delta_batch;

TX_FN void tx_delta_batch_begin(tx_delta_batch *b) {
  memset(b->weight, 0, sizeof b->weight); /* so that entries past the end are initialised */
  memset(b->bound, 0, sizeof b->bound);
}

/* Looks up n table entries; the rest of the last vector becomes 0. With a gather instruction: gcc makes single loads of
 * the plain loop. */
TX_FN void tx_delta_look_up(const uint32_t *table, const int32_t *entries, int32_t n, uint32_t *found) {
  int32_t k = 0;
#if defined(__AVX512F__)
  for (; k < n; k += 16) {
    const __mmask16 there = (__mmask16)(n - k < 16 ? (1u << (n - k)) - 1u : 0xffffu);
    const __m512i places = _mm512_loadu_si512(entries + k);
    _mm512_storeu_si512(found + k, _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), there, places, table, 4));
  }
#endif
  for (; k < tx_delta_whole(n); k++)
    found[k] = k < n ? table[entries[k]] : 0;
}

/* The weights at n_at positions of a block of n 16-bit weights. to: has space for a whole vector. */
TX_FN void tx_delta_gather(const void *weights, int64_t n, const uint16_t *at, int32_t n_at, uint32_t *to) {
  int32_t k = 0;
  (void)n;
#if defined(__AVX512F__)
  for (; n % 2 == 0 && k < n_at; k += 16) { /* loads pairs of weights, which are within the block if n is even */
    const __mmask16 there = (__mmask16)(n_at - k < 16 ? (1u << (n_at - k)) - 1u : 0xffffu);
    const __m512i places = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(at + k)));
    const __m512i pairs =
        _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), there, _mm512_srli_epi32(places, 1), weights, 4);
    const __m512i shifts = _mm512_slli_epi32(_mm512_and_si512(places, _mm512_set1_epi32(1)), 4);
    const __m512i found = _mm512_and_si512(_mm512_srlv_epi32(pairs, shifts), _mm512_set1_epi32(0xffff));
    _mm512_storeu_si512(to + k, found);
  }
#endif
  for (; k < n_at; k++)
    to[k] = ((const tx_mem_u16 *)weights)[at[k]];
}

/* The index of a rung in the tables. */
TX_FN int32_t tx_delta_rung_at(const tx_delta_rungs *t, int32_t exponent, int32_t bound, const tx_dtype dtype) {
  const int32_t at = bound - 16 * (exponent + tx_delta_rebias(dtype)) - t->first;
  const int32_t least = at < 0 ? 0 : at;
  return least < TX_DELTA_RUNGS ? least : TX_DELTA_RUNGS - 1;
}

/* Looks up each weight in the table of lengths. */
TX_FN void tx_delta_batch_rungs(tx_delta_batch *b, const tx_delta_rungs *t, int32_t n, const tx_dtype dtype) {
  const int32_t whole = tx_delta_whole(n);
  for (int32_t k = 0; k < whole; k++) {
    const int32_t e = (int32_t)((b->weight[k] & 0x7fffu) >> tx_delta_mantissa(dtype));
    b->entry[k] = tx_delta_rung_at(t, e, b->bound[k], dtype);
  }
  tx_delta_look_up(t->lengths, b->entry, n, b->lengths);
}

/* Lengths and codes of n new weights. */
TX_FN void tx_delta_batch_encode(tx_delta_batch *b, const tx_delta_rungs *t, int32_t n, const tx_dtype dtype) {
  const int32_t m = tx_delta_mantissa(dtype);
  const int32_t whole = tx_delta_whole(n);
  tx_delta_batch_rungs(b, t, n, dtype);
  for (int32_t k = 0; k < whole; k++) {
    const uint32_t bits = b->weight[k], size = bits & 0x7fffu, significand = size & ((1u << m) - 1u);
    const int32_t e = (int32_t)(size >> m);
    const uint32_t lengths = b->lengths[k], steps = lengths >> 24;
    const uint32_t high = (1u << m) - ((lengths & 0xffu) == 1 ? steps + 2 : 0);
    const uint32_t most = significand < high ? lengths : lengths >> 8;
    const uint32_t length = (significand < 2 * steps + 2 ? lengths >> 16 : most) & 0xffu;
    const uint32_t ordered = bits & 0x8000u ? ~size : size;
    const uint32_t sent = (ordered & ~3u) | (ordered >> 1 & 1u) | (ordered & 1u) << 1;
    b->codes.length[k] = e < 2 ? 0 : (int32_t)length;
    b->codes.code[k] = sent & ((1u << length) - 1u);
  }
  for (int32_t from = 0; from < n; from += 64) {
    const uint64_t there = n - from < 64 ? (UINT64_C(1) << (n - from)) - 1u : ~UINT64_C(0);
    for (uint64_t others = tx_delta_lacking(b->codes.length + from) & there; others; others &= others - 1u) {
      const int32_t k = from + __builtin_ctzll(others);
      b->codes.length[k] = tx_delta_rung_bits(t, b->weight[k], b->bound[k], dtype);
      b->codes.code[k] = tx_delta_sent(tx_delta_ordered(b->weight[k], dtype), b->codes.length[k]);
    }
  }
}

/* Lengths of the codes for n old weights, where all weights of the window have the same length. */
TX_FN void tx_delta_batch_lengths(tx_delta_batch *b, const tx_delta_rungs *t, int32_t n, const tx_dtype dtype) {
  const int32_t m = tx_delta_mantissa(dtype);
  const int32_t whole = tx_delta_whole(n);
  tx_delta_batch_rungs(b, t, n, dtype);
  for (int32_t k = 0; k < whole; k++) {
    const uint32_t size = b->weight[k] & 0x7fffu, significand = size & ((1u << m) - 1u);
    const int32_t e = (int32_t)(size >> m);
    const uint32_t lengths = b->lengths[k], steps = lengths >> 24, length = lengths & 0xffu;
    const uint32_t low_bits = lengths >> 16 & 0xffu, high_bits = lengths >> 8 & 0xffu;
    /* All weights of a window have one length if the whole window is below the rung's `low`, or between `low` and
     * `high`, or (if lengths differ there) from `high` on. If the next smaller exponent's rung has no table, weights
     * below `low` have none here. */
    const uint32_t low = 2 * steps + 2, high = (1u << m) - (length == 1 ? steps + 2 : 0);
    const uint32_t under = low_bits <= (uint32_t)m - 2 ? low_bits : 0;
    uint32_t found = significand >= low + steps ? length : 0;
    found = significand + steps >= high && length == 1 ? (significand >= high + steps ? high_bits : 0) : found;
    found = significand + steps < low ? under : found;
    b->codes.length[k] = e < 3 ? 0 : (int32_t)found;
    b->steps[k] = steps;
  }
}

/* Replaces codes by the weights that they stand for, as tx_delta_rung_find, where there are lengths. */
TX_FN void tx_delta_batch_decode(tx_delta_batch *b, int32_t n) {
  const int32_t whole = tx_delta_whole(n);
  for (int32_t k = 0; k < whole; k++) {
    const uint32_t old = b->weight[k], size = old & 0x7fffu, next = b->codes.code[k],
                   length = (uint32_t)b->codes.length[k];
    const uint32_t flip = old & 0x8000u ? ~0u : 0u, one = length == 1;
    const uint32_t mask = (1u << (length + one)) - 1u;
    const uint32_t single = (next & 1u) << 1 | ((size ^ flip ^ 1u) & 1u);
    const uint32_t sent = (next & ~3u) | (next >> 1 & 1u) | (next & 1u) << 1;
    const uint32_t high = size + b->steps[k];
    const uint32_t found = high - ((high - ((one ? single : sent) ^ flip)) & mask);
    b->codes.code[k] = length ? found | (old & 0x8000u) : next;
  }
}

#endif
