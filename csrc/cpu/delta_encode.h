/* Changed weights into the streams of a segment. Included by kernels_isa.c only. Writers are copied while a loop runs:
 * what bytes are written to could be the encoder's own else, for all the compiler knows. */
#ifndef TX_CPU_DELTA_ENCODE_H
#define TX_CPU_DELTA_ENCODE_H

#include "csrc/cpu/delta_classes.h"

/* The distance of a weight, -8 ... 7. */
TX_FN int32_t tx_delta_distance(const uint8_t *distances, int64_t i) {
  const int32_t half = distances[i >> 1] >> (4 * (i & 1)) & 15;
  return (half ^ 8) - 8;
}

/* Those that are as they were have not changed. */
TX_FN void tx_delta_drop_returned(const uint8_t *distances, int64_t begin, int64_t n,
                                  uint64_t changed[TX_DELTA_WORDS]) {
  for (int64_t w = 0; 64 * w < n; w++) {
    for (uint64_t hits = changed[w]; hits; hits &= hits - 1u) {
      if (tx_delta_distance(distances, begin + 64 * w + __builtin_ctzll(hits)) == 0)
        changed[w] &= ~(hits & (0u - hits));
    }
  }
}

/* -- bounds ---------------------------------------------------------------------------------------------------- */

TX_FN int32_t tx_delta_sub_bound(const tx_delta_encoder *e, int64_t begin, int64_t n) {
  int32_t most = 0;
  for (int64_t i = begin / TX_BLOCK; i < (begin + n + TX_BLOCK - 1) / TX_BLOCK; i++) {
    uint64_t touched[2] = {0, 0};
    const int64_t bytes = (e->n - i * TX_BLOCK + 7) / 8;
    if (bytes >= 16) {
      memcpy(touched, e->changed + i * (TX_BLOCK / 8), 16);
    } else {
      memcpy(touched, e->changed + i * (TX_BLOCK / 8), (size_t)bytes);
    }
    const int32_t code = tx_delta_bound_code(((const tx_mem_u16 *)e->moved)[i]);
    most = (touched[0] | touched[1]) && code > most ? code : most;
  }
  return most;
}

TX_FN int32_t tx_delta_put_bound(tx_delta_encoder *e, int64_t begin, int64_t n) {
  if (!(e->flags & TX_DELTA_BOUNDED)) return 0;
  const int32_t found = tx_delta_sub_bound(e, begin, n);
  const int32_t bound = found ? found : e->bound;
  const int32_t up = bound - e->bound;
  tx_put_rice(&e->bounds, (uint32_t)(up < 0 ? -2 * up - 1 : 2 * up), 2);
  e->bound = bound;
  return bound;
}

/* -- positions ------------------------------------------------------------------------------------------------- */

/* The weights of a word whose class is not sure. */
TX_FN uint64_t tx_delta_in_zones(const void *weights, int64_t begin, uint64_t hits, const tx_delta_zone *zones,
                                 int32_t n, const tx_dtype dtype) {
  uint64_t found = 0;
  for (; hits; hits &= hits - 1u) {
    const int32_t bit = __builtin_ctzll(hits);
    const uint32_t size = tx_delta_size_of(tx_delta_weight(weights, begin + bit, dtype), dtype);
    uint64_t is = 0;
    for (int32_t i = 0; i < n; i++)
      is |= size - zones[i].low < zones[i].span;
    found |= is << bit;
  }
  return found;
}

/* Takes the unsure ones out of the masks and puts their positions; where distances are known, those that were in
 * another class into that one. */
TX_FN void tx_delta_put_unsure(tx_delta_encoder *e, int64_t begin, int64_t n, const tx_delta_edges *edges,
                               int32_t bound, uint64_t masks[TX_DELTA_CLASSES][TX_DELTA_WORDS],
                               const uint64_t changed[TX_DELTA_WORDS], const tx_dtype dtype) {
  tx_delta_stream s = e->positions[TX_DELTA_CLASSES];
  tx_delta_zone zones[TX_DELTA_CLASSES - 1];
  int64_t last = -1;
  for (int32_t i = 0; i < edges->n; i++)
    zones[i] = tx_delta_zone_of(edges->edge[i], bound, dtype);
  for (int64_t w = 0; 64 * w < n; w++) {
    if (!changed[w]) continue;
    uint64_t left = tx_delta_in_zones(e->weights, begin + 64 * w, changed[w], zones, edges->n, dtype);
    for (; left; left &= left - 1u) {
      const uint64_t bit = left & (0u - left);
      const int64_t at = 64 * w + __builtin_ctzll(left);
      const uint32_t bits = tx_delta_weight(e->weights, begin + at, dtype);
      const int32_t is = tx_delta_class(tx_delta_size_of(bits, dtype), edges);
      const int32_t d = e->flags & TX_DELTA_EXACT ? tx_delta_distance(e->distances, begin + at) : -8;
      masks[is][w] &= ~bit;
      if (d != -8) {
        const int64_t old = tx_delta_ordered(bits, dtype) - d;
        masks[tx_delta_class(tx_delta_size_of(tx_delta_unordered(old, dtype), dtype), edges)][w] |= bit;
        continue;
      }
      tx_rice_put(&s.writer, &s.rice, s.left + (uint32_t)(at - last - 1));
      s.left = 0;
      last = at;
    }
  }
  s.left += (uint32_t)(n - last - 1);
  e->positions[TX_DELTA_CLASSES] = s;
}

/* Positions of those that changed in one class, or of those that did not. */
TX_FN void tx_delta_put_class(tx_delta_stream *stream, int64_t n, const uint64_t *mask, const uint64_t *changed,
                              uint64_t flip) {
  tx_delta_stream s = *stream;
  for (int64_t w = 0; 64 * w < n; w++) {
    uint64_t rest = mask[w];
    for (uint64_t hits = (changed[w] ^ flip) & rest; hits; hits &= hits - 1u) {
      const uint64_t upto = hits ^ (hits - 1u); /* the lowest one, and all below it */
      tx_rice_put(&s.writer, &s.rice, s.left + (uint32_t)__builtin_popcountll(rest & (upto >> 1)));
      s.left = 0;
      rest &= ~upto;
    }
    s.left += (uint32_t)__builtin_popcountll(rest);
  }
  *stream = s;
}

/* The same for a single class of all. */
TX_FN void tx_delta_put_all(tx_delta_stream *stream, int64_t n, const uint64_t *changed, uint64_t flip) {
  tx_delta_stream s = *stream;
  int64_t next = -(int64_t)s.left;
  for (int64_t w = 0; 64 * w < n; w++) {
    uint64_t hits = changed[w] ^ flip;
    if (n - 64 * w < 64) hits &= (UINT64_C(1) << (n - 64 * w)) - 1u;
    for (; hits; hits &= hits - 1u) {
      const int64_t at = 64 * w + __builtin_ctzll(hits);
      tx_rice_put(&s.writer, &s.rice, (uint32_t)(at - next));
      next = at + 1;
    }
  }
  s.left = (uint32_t)(n - next);
  *stream = s;
}

TX_FN void tx_delta_put_positions(tx_delta_encoder *e, int64_t begin, int64_t n, int32_t bound,
                                  const uint64_t changed[TX_DELTA_WORDS], tx_delta_mask *masks, const tx_dtype dtype) {
  const int32_t classes = tx_delta_classes(e->flags);
  const uint64_t flip = tx_delta_is_flipped(e->flags, 0) ? ~UINT64_C(0) : 0;
  if (classes == 1) {
    tx_delta_put_all(&e->positions[0], n, changed, flip);
    return;
  }
  const tx_delta_edges edges = tx_delta_edges_of(e->flags, bound, dtype);
  tx_delta_masks((const char *)e->weights + 2 * begin, n, &edges, masks);
  tx_delta_put_unsure(e, begin, n, &edges, bound, masks, changed, dtype);
  for (int32_t c = 0; c < classes; c++) {
    const uint64_t of = tx_delta_is_flipped(e->flags, c) ? ~UINT64_C(0) : 0;
    tx_delta_put_class(&e->positions[c], n, masks[c], changed, of);
  }
}

/* -- values ---------------------------------------------------------------------------------------------------- */

TX_FN void tx_delta_put_value(tx_bit_writer *w, tx_rice *far, const tx_delta_encoder *e, uint32_t bits, int64_t i,
                              int32_t bound, const tx_dtype dtype) {
  if (e->flags & TX_DELTA_EXACT) {
    const int32_t d = tx_delta_distance(e->distances, i);
    tx_rice_put(w, far, (uint32_t)(d < 0 ? -d : d) - 1u);
    if (d != -8) {
      tx_put_bits(w, d < 0, 1);
      return;
    }
    if (!bound || e->flags & TX_DELTA_SLICEABLE) {
      tx_put_bits(w, bits, tx_delta_width(dtype));
      return;
    }
  }
  const int32_t n = tx_delta_rung_bits(e->rungs, bits, bound, dtype);
  if (e->flags & TX_DELTA_SLICEABLE) tx_put_bits(w, (UINT64_C(1) << (n - 1)) - 1u, n);
  tx_put_bits(w, tx_delta_sent(tx_delta_ordered(bits, dtype), n), n);
}

TX_FN void tx_delta_put_values(tx_delta_encoder *e, int64_t begin, int64_t n, int32_t bound,
                               const uint64_t changed[TX_DELTA_WORDS], tx_delta_mask *masks, const tx_dtype dtype) {
  const int64_t grain = tx_delta_grain(e->flags);
  const int32_t classes = tx_delta_classes(e->flags);
  const int exact = (e->flags & TX_DELTA_EXACT) != 0;
  tx_bit_writer values = e->values, bounds = e->bounds;
  int32_t sub = bound;
  int64_t upto = grain < TX_DELTA_BLOCK && bound ? 0 : n;
  uint64_t hash = 0;
  for (int64_t w = 0; 64 * w < n; w++) {
    for (uint64_t hits = changed[w]; hits; hits &= hits - 1u) {
      const int64_t at = 64 * w + __builtin_ctzll(hits);
      if (at >= upto) {
        const int64_t from = at / grain * grain;
        upto = from + grain;
        sub = tx_delta_sub_bound(e, begin + from, (upto < n ? upto : n) - from);
        tx_put_rice(&bounds, (uint32_t)(bound - sub), 2);
      }
      const uint32_t bits = tx_delta_weight(e->weights, begin + at, dtype);
      const int32_t class_of = exact ? tx_delta_class_in(masks, classes, w, hits & (0u - hits)) : 0;
      tx_delta_put_value(&values, &e->far[class_of], e, bits, begin + at, sub, dtype);
      hash += tx_delta_touch(e->at + begin + at, bits);
    }
  }
  e->values = values;
  e->bounds = bounds;
  e->touched += hash;
}

/* -- segments -------------------------------------------------------------------------------------------------- */

/* Which classes changed by more than half, judged by a word of every 16. The bound is that of the block. */
TX_FN void tx_delta_choose_flips(tx_delta_encoder *e, const tx_dtype dtype) {
  const int32_t classes = tx_delta_classes(e->flags);
  int64_t seen[TX_DELTA_CLASSES] = {0};
  for (int64_t b = 0; b * TX_DELTA_BLOCK < e->n; b++) {
    const int64_t begin = b * TX_DELTA_BLOCK;
    const int64_t n = e->n - begin < TX_DELTA_BLOCK ? e->n - begin : TX_DELTA_BLOCK;
    if (e->dense >> b & 1u) continue;
    const int32_t bound = classes > 1 ? tx_delta_sub_bound(e, begin, n) : 0;
    if (classes > 1 && !bound) continue;
    const tx_delta_edges edges = tx_delta_edges_of(e->flags, bound, dtype);
    for (int64_t w = 0; 64 * w + 64 <= n; w += 16) {
      uint64_t masks[TX_DELTA_CLASSES] = {~UINT64_C(0)}, changed;
      memcpy(&changed, e->changed + begin / 8 + 8 * w, sizeof changed);
      if (classes > 1) tx_delta_masks_of((const char *)e->weights + 2 * (begin + 64 * w), masks[0], &edges, masks);
      for (int32_t c = 0; c < classes; c++)
        seen[c] += 2 * __builtin_popcountll(masks[c] & changed) - __builtin_popcountll(masks[c]);
    }
  }
  for (int32_t c = 0; c < classes; c++)
    e->flags |= seen[c] > 0 ? (uint32_t)TX_DELTA_FLIPPED << c : 0;
}

TX_FN void tx_delta_encode_blocks(tx_delta_encoder *e, const tx_dtype dtype) {
  tx_delta_choose_flips(e, dtype);
  for (int64_t b = 0; b * TX_DELTA_BLOCK < e->n; b++) {
    if (e->dense >> b & 1u) continue;
    const int64_t begin = b * TX_DELTA_BLOCK;
    const int64_t n = e->n - begin < TX_DELTA_BLOCK ? e->n - begin : TX_DELTA_BLOCK;
    uint64_t changed[TX_DELTA_WORDS], masks[TX_DELTA_CLASSES][TX_DELTA_WORDS];
    tx_delta_load_bits(e->changed + begin / 8, n, changed);
    if (e->flags & TX_DELTA_EXACT) tx_delta_drop_returned(e->distances, begin, n, changed);
    const int32_t bound = tx_delta_put_bound(e, begin, n);
    tx_delta_put_positions(e, begin, n, bound, changed, masks, dtype);
    tx_delta_put_values(e, begin, n, bound, changed, tx_delta_classes(e->flags) == 1 ? NULL : masks, dtype);
  }
  for (int32_t c = 0; c <= TX_DELTA_CLASSES; c++) {
    tx_delta_stream *s = &e->positions[c];
    if (tx_delta_has_stream(e->flags, c)) tx_rice_put(&s->writer, &s->rice, s->left);
  }
}

#endif
