/* Codes of many 16-bit weights at a time. Included by kernels_isa.c only.
 *
 * Note [Batches]. How long a weight's code is, and which weight it stands for, are sums and look-ups that depend on no
 * other weight: loops over arrays, which the compiler makes vectors of. Only taking bits from a stream, or putting them
 * there, is one after the other, and does nothing else. What tables (csrc/math/delta_rungs.h) do not have has length 0
 * here, and is done weight by weight. */
#ifndef TX_CPU_DELTA_BATCH_H
#define TX_CPU_DELTA_BATCH_H

#include "csrc/cpu/delta_loops.h"

#define TX_DELTA_BATCH 128

/* Codes that follow each other. */
typedef struct tx_delta_codes {
  uint32_t code[TX_DELTA_BATCH + 4];
  int32_t length[TX_DELTA_BATCH + 4];
} tx_delta_codes;
#define TX_DELTA_CODE_LONGEST 28

/* Puts n codes, of TX_DELTA_CODE_LONGEST bits at most. Pairs, and pairs of pairs, are made many at a time. */
TX_FN void tx_delta_put_codes(tx_bit_writer *writer, tx_delta_codes *c, int32_t n) {
  uint64_t pair[TX_DELTA_BATCH / 2 + 2], four[TX_DELTA_BATCH / 4 + 1];
  int32_t length[TX_DELTA_BATCH / 2 + 2], all[TX_DELTA_BATCH / 4 + 1];
  tx_bit_writer w = *writer;
  for (int32_t k = n; k < n + 4; k++)
    c->code[k] = 0, c->length[k] = 0;
  const int32_t fours = (n + 3) / 4;
  for (int32_t k = 0; k < 2 * fours; k++) {
    pair[k] = c->code[2 * k] | (uint64_t)c->code[2 * k + 1] << c->length[2 * k];
    length[k] = c->length[2 * k] + c->length[2 * k + 1];
  }
  for (int32_t k = 0; k < fours; k++) {
    four[k] = pair[2 * k] | pair[2 * k + 1] << length[2 * k];
    all[k] = length[2 * k] + length[2 * k + 1];
  }
  for (int32_t k = 0; k < fours; k++) {
    if (__builtin_expect(all[k] <= 56, 1)) {
      tx_put_bits(&w, four[k], all[k]);
    } else {
      tx_put_bits(&w, pair[2 * k], length[2 * k]);
      tx_put_bits(&w, pair[2 * k + 1], length[2 * k + 1]);
    }
  }
  *writer = w;
}

/* In: weights (new ones where they are encoded, else the old ones) and the bounds on how far they went. */
typedef struct tx_delta_batch {
  uint32_t weight[TX_DELTA_BATCH];
  int32_t bound[TX_DELTA_BATCH];
  tx_delta_codes codes;           /* a length without what is sent before it; 0: not by table */
  uint32_t steps[TX_DELTA_BATCH]; /* for decoding */
} tx_delta_batch;

/* The entry of the tables. */
TX_FN int32_t tx_delta_rung_at(const tx_delta_rungs *t, int32_t exponent, int32_t bound, const tx_dtype dtype) {
  const int32_t at = bound - 16 * (exponent + tx_delta_rebias(dtype)) - t->first;
  const int32_t least = at < 0 ? 0 : at;
  return least < TX_DELTA_RUNGS ? least : TX_DELTA_RUNGS - 1;
}

/* Lengths and codes of n new weights; whether these are all by table. */
TX_FN int tx_delta_batch_encode(tx_delta_batch *b, const tx_delta_rungs *t, int32_t n, const tx_dtype dtype) {
  const int32_t m = tx_delta_mantissa(dtype);
  int32_t others = 0;
  for (int32_t k = 0; k < n; k++) {
    const uint32_t bits = b->weight[k], size = bits & 0x7fffu, significand = size & ((1u << m) - 1u);
    const int32_t e = (int32_t)(size >> m), at = tx_delta_rung_at(t, e, b->bound[k], dtype);
    const uint32_t lengths = t->lengths[at], steps = lengths >> 24;
    const uint32_t high = (1u << m) - ((lengths & 0xffu) == 1 ? steps + 2 : 0);
    const uint32_t most = significand < high ? lengths : lengths >> 8;
    const uint32_t length = (significand < 2 * steps + 2 ? lengths >> 16 : most) & 0xffu;
    const uint32_t ordered = bits & 0x8000u ? ~size : size;
    const uint32_t sent = (ordered & ~3u) | (ordered >> 1 & 1u) | (ordered & 1u) << 1;
    b->codes.length[k] = e < 2 ? 0 : (int32_t)length;
    b->codes.code[k] = sent & ((1u << length) - 1u);
    others |= b->codes.length[k] == 0;
  }
  return !others;
}

/* Lengths of the codes of what n old weights became, where these don't depend on that. */
TX_FN void tx_delta_batch_lengths(tx_delta_batch *b, const tx_delta_rungs *t, int32_t n, const tx_dtype dtype) {
  const int32_t m = tx_delta_mantissa(dtype);
  for (int32_t k = 0; k < n; k++) {
    const uint32_t size = b->weight[k] & 0x7fffu, significand = size & ((1u << m) - 1u);
    const int32_t e = (int32_t)(size >> m), at = tx_delta_rung_at(t, e, b->bound[k], dtype);
    const uint32_t lengths = t->lengths[at], steps = lengths >> 24, length = lengths & 0xffu;
    const uint32_t low = 3 * steps + 2; /* of any further the window has no other lengths */
    const uint32_t end = (1u << m) - (length == 1 ? 2 * steps + 2 : 0);
    const uint32_t found = significand - low < end - low ? length : 0;
    b->codes.length[k] = e < 3 ? 0 : (int32_t)found;
    b->steps[k] = steps;
  }
}

/* Weights in the place of their codes, where they have lengths: as tx_delta_rung_find. */
TX_FN void tx_delta_batch_decode(tx_delta_batch *b, int32_t n) {
  for (int32_t k = 0; k < n; k++) {
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
