/* Decodes the streams of a segment into changed weights. Included by coding_kernels_isa.c only. Readers are copied to
 * locals while a loop runs (see csrc/cpu/delta_encode.h).
 *
 * Note [Decoding a block]. Everything sequential (gaps, values) is decoded in loops of its own, without branches that
 * depend on the weights. Gaps give places in a class, and places set bits. The list of all set bits gives the old
 * weights, with which values are decoded. */
#ifndef TX_CPU_DELTA_DECODE_H
#define TX_CPU_DELTA_DECODE_H

#include "csrc/cpu/delta_batch.h"
#include "csrc/cpu/delta_classes.h"
#include "csrc/cpu/delta_gaps.h"
#include "csrc/cpu/delta_places.h"

/* -- positions ------------------------------------------------------------------------------------------------- */

#if !defined(__BMI2__)
/* Sets the bits, in the block, of the places of a class that the next gaps give. */
TX_FN void tx_delta_take_class(tx_delta_source *source, const uint64_t *mask, const uint16_t *before, uint32_t ones,
                               uint64_t *bits) {
  tx_bit_window window = tx_window_of(&source->reader);
  tx_rice rice = source->rice;
  uint32_t left = source->left;
  int64_t w = 0;
  while (left < ones) {
    w = tx_delta_word_of(before, left, w);
    bits[w] |= UINT64_C(1) << tx_delta_select(mask[w], left - before[w]);
    left += 1u + tx_rice_take_from(&window, &rice);
  }
  *source = (tx_delta_source){tx_window_end(&window), rice, left - ones};
}

TX_FN int32_t tx_delta_take_each(tx_delta_decoder *d, int64_t n, const uint32_t *ones, const int32_t classes,
                                 tx_delta_ahead *ahead) {
  tx_delta_block *b = d->block;
  memcpy(b->changed, b->unsure, sizeof b->changed);
  for (int32_t c = 0; c < classes; c++) {
    const int flipped = tx_delta_is_flipped(d->flags, c);
    uint64_t *bits = flipped ? memset(b->packed[c], 0, sizeof b->packed[c]) : b->changed;
    tx_delta_take_class(&d->positions[c], b->masks[c], b->before[c], ones[c], bits);
    for (int64_t w = 0; flipped && 64 * w < n; w++)
      b->changed[w] |= bits[w] ^ b->masks[c][w];
  }
  return tx_delta_list(b->changed, n, b->at, ahead);
}
#else
TX_FN int32_t tx_delta_take_each(tx_delta_decoder *d, int64_t n, const uint32_t *ones, const int32_t classes,
                                 tx_delta_ahead *ahead) {
  for (int32_t c = 0; c < classes; c++) {
    uint64_t *packed = d->block->packed[c];
    const uint32_t words = ones[c] / 64 + 2;
    memset(packed, 0, sizeof *packed * words);
    tx_delta_take_gaps(&d->positions[c], ones[c], packed, ahead);
    for (uint32_t w = 0; w < words && tx_delta_is_flipped(d->flags, c); w++)
      packed[w] = ~packed[w];
  }
  tx_delta_unpack(d->block, n, classes, ahead);
  return tx_delta_list(d->block->changed, n, d->block->at, ahead);
}
#endif

/* Lists the changed weights; returns how many. */
TX_FN int32_t tx_delta_take_classes(tx_delta_decoder *d, const void *old, int64_t n, const tx_delta_edges *edges,
                                    const int32_t n_edges, tx_delta_ahead *ahead) {
  tx_delta_block *b = d->block;
  uint32_t ones[TX_DELTA_CLASSES];
  memset(b->unsure, 0, sizeof b->unsure);
  tx_delta_take_gaps(&d->positions[TX_DELTA_CLASSES], (uint32_t)n, b->unsure, ahead);
  tx_delta_masks(old, n, edges, n_edges, b, ahead, ones);
  return tx_delta_take_each(d, n, ones, n_edges + 1, ahead);
}

TX_FN int32_t tx_delta_take_positions(tx_delta_decoder *d, const void *old, int64_t n, const tx_delta_edges *edges,
                                      tx_delta_ahead *ahead, const tx_dtype dtype) {
  tx_delta_block *b = d->block;
  if (dtype != TX_F32 && edges->n == 1) return tx_delta_take_classes(d, old, n, edges, 1, ahead);
  if (dtype != TX_F32 && edges->n > 1) return tx_delta_take_classes(d, old, n, edges, TX_DELTA_CLASSES - 1, ahead);
  memset(b->changed, 0, sizeof b->changed);
  tx_delta_take_gaps(&d->positions[0], (uint32_t)n, b->changed, ahead);
  for (int64_t w = 0; tx_delta_is_flipped(d->flags, 0) && 64 * w < n; w++)
    b->changed[w] ^= n - 64 * w < 64 ? (UINT64_C(1) << (n - 64 * w)) - 1u : ~UINT64_C(0);
  return tx_delta_list(b->changed, n, b->at, ahead);
}

/* -- values ---------------------------------------------------------------------------------------------------- */

TX_FN int32_t tx_delta_clamp_bound(int64_t bound) {
  return bound < TX_DELTA_BOUND_LEAST  ? TX_DELTA_BOUND_LEAST
         : bound > TX_DELTA_BOUND_MOST ? TX_DELTA_BOUND_MOST
                                       : (int32_t)bound;
}

TX_FN int32_t tx_delta_take_bound(tx_delta_decoder *d) {
  if (!(d->flags & TX_DELTA_BOUNDED)) return 0;
  const uint32_t z = tx_take_rice(&d->bounds, 2);
  d->bound = tx_delta_clamp_bound((int64_t)d->bound + (z & 1u ? -(int64_t)(z >> 1) - 1 : (int64_t)(z >> 1)));
  return d->bound;
}

/* held: whether the receiver has the old weight; if not, the result is undefined. */
TX_FN uint32_t tx_delta_take_value(tx_bit_reader *r, tx_rice *distance, const tx_delta_decoder *d, uint32_t old,
                                   int held, int32_t bound, const tx_dtype dtype) {
  if (d->flags & TX_DELTA_EXACT) {
    const uint32_t far = tx_rice_take(r, distance);
    if (far < 7) {
      const int64_t by = (int64_t)far + 1;
      return tx_delta_unordered(tx_delta_ordered(old, dtype) + (tx_take_bits(r, 1) ? -by : by), dtype);
    }
    if (!bound || d->flags & TX_DELTA_SLICEABLE) return (uint32_t)tx_take_bits(r, tx_delta_width(dtype));
  }
  if (d->flags & TX_DELTA_SLICEABLE) {
    const uint64_t next = tx_peek_bits(r);
    const int32_t n = __builtin_ctzll(~next | UINT64_C(1) << 31) + 1;
    r->at += (uint64_t)n;
    const uint64_t low = tx_take_bits(r, n);
    return held ? tx_delta_rung_find(d->rungs, old, bound, low, dtype).weight : 0;
  }
  const tx_delta_found found = tx_delta_rung_find(d->rungs, old, bound, tx_peek_bits(r), dtype);
  r->at += (uint64_t)found.bits;
  return found.weight;
}

/* The bounds of the weights of a list, by the grain. */
typedef struct tx_delta_bounds_in {
  tx_bit_reader reader;
  int64_t grain, upto;
  int32_t bound, sub;
} tx_delta_bounds_in;

TX_FN int32_t tx_delta_next_bound(tx_delta_bounds_in *in, int64_t at) {
  if (at >= in->upto) {
    in->upto = at / in->grain * in->grain + in->grain;
    in->sub = tx_delta_clamp_bound((int64_t)in->bound - tx_take_rice(&in->reader, 2));
  }
  return in->sub;
}

/* Reads the codes of the n weights of a batch. Where the length is known, codes[k] gets the code, with other bits above
 * it; else the new weight. */
TX_FN void tx_delta_take_codes(tx_bit_reader *values, tx_delta_batch *b, const tx_delta_rungs *rungs, int32_t n,
                               tx_delta_ahead *ahead, const tx_dtype dtype) {
  uint8_t last[2 * TX_DELTA_BATCH + 16]; /* 16 bits for each weight, and the bits that a load reads in addition */
  const uint64_t begin = values->at >> 3, left = values->bytes > begin ? values->bytes - begin : 0;
  const uint8_t *from = last;
  uint64_t at = values->at & 7;
  if (left >= sizeof last) {
    from = values->data + begin;
  } else {
    memset(last, 0, sizeof last);
    if (left) memcpy(last, values->data + begin, left);
  }
  for (int32_t k = 0; k < n; k++) {
    uint64_t next;
    memcpy(&next, from + (at >> 3), sizeof next);
    next >>= at & 7;
    if (k % 4 == 0) tx_delta_fetch(ahead);
    at += (uint64_t)b->codes.length[k];
    b->codes.code[k] = (uint32_t)next;
    if (__builtin_expect(b->codes.length[k] == 0, 0)) {
      const tx_delta_found found = tx_delta_rung_find(rungs, b->weight[k], b->bound[k], next, dtype);
      at += (uint64_t)found.bits;
      b->codes.code[k] = found.weight;
    }
  }
  values->at = 8 * begin + at;
}

/* Decodes values that are bits of weights, batch by batch. */
TX_FN void tx_delta_take_batches(tx_delta_decoder *d, const void *old, int64_t n, int32_t hits, tx_delta_bounds_in *in,
                                 tx_delta_ahead *ahead, tx_delta_changes out, const tx_dtype dtype) {
  const uint16_t *at = d->block->at;
  tx_bit_reader values = d->values;
  tx_delta_batch b;
  uint64_t touched = 0;
  tx_delta_batch_begin(&b);
  for (int32_t done = 0, many = 0; done < hits; done += many) {
    many = hits - done < TX_DELTA_BATCH ? hits - done : TX_DELTA_BATCH;
    tx_delta_gather(old, n, at + done, many, b.weight);
    for (int32_t k = 0; k < many; k++)
      b.bound[k] = tx_delta_next_bound(in, at[done + k]);
    tx_delta_batch_lengths(&b, d->rungs, many, dtype);
    tx_delta_take_codes(&values, &b, d->rungs, many, ahead, dtype);
    tx_delta_batch_decode(&b, many);
    for (int32_t k = 0; k < many; k++) {
      out.at[done + k] = at[done + k];
      out.weight[done + k] = b.codes.code[k];
      touched += tx_delta_touch(d->at + at[done + k], b.codes.code[k]);
    }
  }
  d->values = values;
  d->touched += touched;
}

TX_FN int32_t tx_delta_take_values(tx_delta_decoder *d, const void *old, const uint8_t *held, int64_t n, int32_t hits,
                                   int32_t bound, tx_delta_ahead *ahead, tx_delta_changes out, const tx_dtype dtype) {
  const int64_t grain = tx_delta_grain(d->flags);
  const int32_t classes = d->flags & TX_DELTA_EXACT ? tx_delta_classes(d->flags) : 1;
  const tx_delta_block *b = d->block;
  tx_delta_bounds_in in = {d->bounds, grain, grain < TX_DELTA_BLOCK && bound ? 0 : n, bound, bound};
  if (hits > out.room) return -1;
  if (dtype != TX_F32 && !(d->flags & (TX_DELTA_EXACT | TX_DELTA_SLICEABLE))) {
    tx_delta_take_batches(d, old, n, hits, &in, ahead, out, dtype);
    d->bounds = in.reader;
    return hits;
  }
  tx_bit_reader values = d->values;
  int32_t found = 0;
  for (int32_t i = 0; i < hits; i++) {
    const int64_t at = b->at[i];
    const int32_t sub = tx_delta_next_bound(&in, at);
    const int has = !held || held[at];
    const uint32_t was = tx_delta_weight(old, at, dtype);
    const int32_t class_of = classes > 1 ? tx_delta_class_at(b, at, classes) : 0;
    const uint32_t weight = tx_delta_take_value(&values, &d->far[class_of], d, was, has, sub, dtype);
    out.at[found] = (uint16_t)at;
    out.weight[found] = weight;
    found += has;
    d->touched += has ? tx_delta_touch(d->at + at, weight) : 0;
  }
  d->values = values;
  d->bounds = in.reader;
  return found;
}

TX_FN int32_t tx_delta_decode_as(tx_delta_decoder *d, const void *old, const uint8_t *held, int64_t n,
                                 tx_delta_changes out, const tx_dtype dtype) {
  const int32_t bound = tx_delta_take_bound(d);
  const tx_delta_edges edges = tx_delta_edges_of(d->flags, bound, dtype);
  const char *next = (const char *)old + n * (dtype == TX_F32 ? 4 : 2);
  tx_delta_ahead ahead = {next, next + (next - (const char *)old)};
  const int32_t hits = tx_delta_take_positions(d, old, n, &edges, &ahead, dtype);
  const int32_t found = tx_delta_take_values(d, old, held, n, hits, bound, &ahead, out, dtype);
  while (ahead.at < ahead.end)
    tx_delta_fetch(&ahead);
  return found;
}

#endif
