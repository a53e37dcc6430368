/* The streams of a segment into changed weights. Included by kernels_isa.c only. Readers are copied while a loop runs
 * (csrc/cpu/delta_encode.h). */
#ifndef TX_CPU_DELTA_DECODE_H
#define TX_CPU_DELTA_DECODE_H

#include "csrc/cpu/delta_classes.h"

/* -- positions ------------------------------------------------------------------------------------------------- */

/* The bit of a word that has n ones below it, of which there are more: its byte by the sums of bytes, its place there
 * by the sums of bits. */
TX_FN uint64_t tx_delta_select(uint64_t word, uint32_t n) {
  const uint64_t ones = UINT64_C(0x0101010101010101);
  uint64_t sums = word - (word >> 1 & (ones * 0x55));
  sums = (sums & (ones * 0x33)) + (sums >> 2 & (ones * 0x33));
  sums = ((sums + (sums >> 4)) & (ones * 0x0f)) * ones;                      /* byte i: ones in bytes 0 ... i */
  const uint64_t past = ((ones * 0x80 | (ones * n)) - sums) & (ones * 0x80); /* byte i: it has no more than n */
  const int32_t byte = (int32_t)((past >> 7) * ones >> 56) * 8;
  const uint64_t before = sums << 8 >> byte & 0xff;
  uint64_t bits = (word >> byte & 0xff) * ones & UINT64_C(0x8040201008040201);
  bits = (((bits + (ones * 0x7f)) | bits) >> 7 & ones) * ones; /* byte i: ones in bits 0 ... i */
  const uint64_t under = ((ones * 0x80 | (ones * (n - before))) - bits) & (ones * 0x80); /* no more than n - before */
  return UINT64_C(1) << byte << ((under >> 7) * ones >> 56);
}

TX_FN void tx_delta_take_class(tx_delta_source *source, int64_t n, const uint64_t *mask, uint64_t flip,
                               uint64_t *changed) {
  tx_delta_source s = *source;
  for (int64_t w = 0; 64 * w < n; w++) {
    const uint32_t ones = (uint32_t)__builtin_popcountll(mask[w]);
    uint64_t hits = 0;
    while (s.left < ones) {
      hits |= tx_delta_select(mask[w], s.left);
      s.left += 1u + tx_rice_take(&s.reader, &s.rice);
    }
    s.left -= ones;
    changed[w] |= hits ^ (flip & mask[w]);
  }
  *source = s;
}

TX_FN void tx_delta_take_all(tx_delta_source *source, int64_t n, uint64_t flip, uint64_t *changed) {
  tx_delta_source s = *source;
  int64_t at = s.left;
  while (at < n) {
    changed[at >> 6] |= UINT64_C(1) << (at & 63);
    at += 1 + (int64_t)tx_rice_take(&s.reader, &s.rice);
  }
  s.left = (uint32_t)(at - n);
  *source = s;
  for (int64_t w = 0; flip && 64 * w < n; w++)
    changed[w] ^= n - 64 * w < 64 ? (UINT64_C(1) << (n - 64 * w)) - 1u : ~UINT64_C(0);
}

/* changed: 0 before. */
TX_FN void tx_delta_take_positions(tx_delta_decoder *d, const void *old, int64_t n, int32_t bound,
                                   uint64_t changed[TX_DELTA_WORDS], tx_delta_mask *masks, const tx_dtype dtype) {
  const int32_t classes = tx_delta_classes(d->flags);
  if (classes == 1) {
    tx_delta_take_all(&d->positions[0], n, tx_delta_is_flipped(d->flags, 0) ? ~UINT64_C(0) : 0, changed);
    return;
  }
  const tx_delta_edges edges = tx_delta_edges_of(d->flags, bound, dtype);
  tx_delta_masks(old, n, &edges, masks);
  tx_delta_take_all(&d->positions[TX_DELTA_CLASSES], n, 0, changed);
  for (int64_t w = 0; 64 * w < n; w++) {
    for (int32_t c = 0; changed[w] && c < classes; c++)
      masks[c][w] &= ~changed[w];
  }
  for (int32_t c = 0; c < classes; c++) {
    const uint64_t flip = tx_delta_is_flipped(d->flags, c) ? ~UINT64_C(0) : 0;
    tx_delta_take_class(&d->positions[c], n, masks[c], flip, changed);
  }
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

/* held: whether the receiver has the old weight; where not, what the result says of the new one is nothing. */
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

TX_FN int32_t tx_delta_take_values(tx_delta_decoder *d, const void *old, const uint8_t *held, int64_t n, int32_t bound,
                                   const uint64_t changed[TX_DELTA_WORDS], tx_delta_mask *masks, tx_delta_changes *out,
                                   const tx_dtype dtype) {
  const int64_t grain = tx_delta_grain(d->flags);
  const int32_t classes = tx_delta_classes(d->flags);
  const int exact = (d->flags & TX_DELTA_EXACT) != 0;
  tx_bit_reader values = d->values, bounds = d->bounds;
  int32_t sub = bound, found = 0;
  int64_t upto = grain < TX_DELTA_BLOCK && bound ? 0 : n;
  for (int64_t w = 0; 64 * w < n; w++) {
    for (uint64_t hits = changed[w]; hits; hits &= hits - 1u) {
      const int64_t at = 64 * w + __builtin_ctzll(hits);
      if (at >= upto) {
        upto = at / grain * grain + grain;
        sub = tx_delta_clamp_bound((int64_t)bound - tx_take_rice(&bounds, 2));
      }
      const int32_t class_of = exact ? tx_delta_class_in(masks, classes, w, hits & (0u - hits)) : 0;
      const int has = !held || held[at];
      const uint32_t was = tx_delta_weight(old, at, dtype);
      out->at[found] = (uint16_t)at;
      out->weight[found] = tx_delta_take_value(&values, &d->far[class_of], d, was, has, sub, dtype);
      found += has;
    }
  }
  d->values = values;
  d->bounds = bounds;
  return found;
}

TX_FN int32_t tx_delta_decode_as(tx_delta_decoder *d, const void *old, const uint8_t *held, int64_t n,
                                 tx_delta_changes *out, const tx_dtype dtype) {
  uint64_t changed[TX_DELTA_WORDS] = {0}, masks[TX_DELTA_CLASSES][TX_DELTA_WORDS];
  const int32_t bound = tx_delta_take_bound(d);
  tx_delta_take_positions(d, old, n, bound, changed, masks, dtype);
  tx_delta_mask *of = tx_delta_classes(d->flags) == 1 ? NULL : masks;
  return tx_delta_take_values(d, old, held, n, bound, changed, of, out, dtype);
}

#endif
