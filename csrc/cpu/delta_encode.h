/* Changed weights into the streams of a segment. Included by kernels_isa.c only. Writers are copied while a loop runs:
 * what bytes are written to could be the encoder's own else, for all the compiler knows. */
#ifndef TX_CPU_DELTA_ENCODE_H
#define TX_CPU_DELTA_ENCODE_H

#include "csrc/cpu/delta_batch.h"
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

/* The code of the largest bound of those blocks of TX_BLOCK in which something changed; 0: nothing did. */
TX_FN int32_t tx_delta_sub_bound(const tx_delta_encoder *e, int64_t begin, int64_t n) {
  const int64_t last = (begin + n + TX_BLOCK - 1) / TX_BLOCK, whole = e->n / TX_BLOCK;
  int32_t most = 0;
  for (int64_t i = begin / TX_BLOCK; i < last; i++) {
    const uint8_t *from = e->changed + i * (TX_BLOCK / 8);
    uint64_t low = 0, high = 0;
    if (i < whole) {
      memcpy(&low, from, sizeof low);
      memcpy(&high, from + 8, sizeof high);
    } else {
      for (int64_t k = 0; 8 * k < e->n - i * TX_BLOCK; k++)
        low |= from[k];
    }
    const int32_t size = ((const tx_mem_u16 *)e->moved)[i] & 0x7fff;
    const int32_t of = low | high ? (size ? size : 1) : 0;
    most = of > most ? of : most;
  }
  return most ? tx_delta_bound_code((uint16_t)most) : 0;
}

/* found: tx_delta_sub_bound of the block. */
TX_FN int32_t tx_delta_put_bound(tx_delta_encoder *e, int32_t found) {
  if (!(e->flags & TX_DELTA_BOUNDED)) return 0;
  const int32_t bound = found ? found : e->bound;
  const int32_t up = bound - e->bound;
  tx_put_rice(&e->bounds, (uint32_t)(up < 0 ? -2 * up - 1 : 2 * up), 2);
  e->bound = bound;
  return bound;
}

/* -- positions ------------------------------------------------------------------------------------------------- */

#define TX_DELTA_NEAR 0x80

/* Of each weight that changed its class as it is now, and TX_DELTA_NEAR where it may have been in another one. */
TX_FN void tx_delta_find_classes(const tx_delta_encoder *e, int64_t begin, int32_t hits, const tx_delta_edges *edges,
                                 int32_t bound, const int32_t n_edges, const tx_dtype dtype) {
  tx_delta_block *b = e->block;
  uint32_t size[TX_DELTA_BATCH], low[TX_DELTA_CLASSES - 1], span[TX_DELTA_CLASSES - 1], edge[TX_DELTA_CLASSES - 1];
  for (int32_t i = 0; i < n_edges; i++) {
    const tx_delta_zone zone = tx_delta_zone_of(edges->edge[i], bound, dtype);
    low[i] = zone.low;
    span[i] = zone.span;
    edge[i] = (uint32_t)edges->edge[i];
  }
  for (int32_t done = 0, many = 0; done < hits; done += many) {
    many = hits - done < TX_DELTA_BATCH ? hits - done : TX_DELTA_BATCH;
    for (int32_t k = 0; k < many; k++)
      size[k] = tx_delta_size_of(tx_delta_weight(e->weights, begin + b->at[done + k], dtype), dtype);
    for (int32_t k = 0; k < many; k++) {
      uint32_t class_of = 0, near = 0;
      for (int32_t i = 0; i < n_edges; i++) {
        class_of += size[k] >= edge[i];
        near |= size[k] - low[i] < span[i];
      }
      b->class_of[done + k] = (uint8_t)(class_of | near * TX_DELTA_NEAR);
    }
  }
}

/* Lists those that changed by their classes. Those that were in another one than they are, as distances say, change
 * places in the masks; positions of those of which nothing says it go out, and they leave the masks. */
TX_FN void tx_delta_put_unsure(tx_delta_encoder *e, int64_t begin, int64_t n, int32_t hits, const tx_delta_edges *edges,
                               const tx_dtype dtype) {
  tx_delta_block *b = e->block;
  tx_delta_stream s = e->positions[TX_DELTA_CLASSES];
  int32_t n_of[TX_DELTA_CLASSES] = {0};
  int64_t last = -1;
  for (int32_t k = 0; k < hits; k++) {
    const int64_t at = b->at[k];
    int32_t class_of = b->class_of[k];
    if (class_of & TX_DELTA_NEAR) {
      class_of ^= TX_DELTA_NEAR;
      const int32_t d = e->flags & TX_DELTA_EXACT ? tx_delta_distance(e->distances, begin + at) : -8;
      b->masks[class_of][at >> 6] &= ~(UINT64_C(1) << (at & 63));
      if (d == -8) {
        tx_rice_put(&s.writer, &s.rice, s.left + (uint32_t)(at - last - 1));
        s.left = 0;
        last = at;
        b->class_of[k] = TX_DELTA_CLASSES;
        continue;
      }
      const int64_t now = tx_delta_ordered(tx_delta_weight(e->weights, begin + at, dtype), dtype);
      class_of = tx_delta_class(tx_delta_size_of(tx_delta_unordered(now - d, dtype), dtype), edges);
      b->masks[class_of][at >> 6] |= UINT64_C(1) << (at & 63);
      b->class_of[k] = (uint8_t)class_of;
    }
    b->at_of[class_of][n_of[class_of]++] = (uint16_t)at;
  }
  s.left += (uint32_t)(n - last - 1);
  e->positions[TX_DELTA_CLASSES] = s;
  memcpy(b->n_of, n_of, sizeof n_of);
}

/* Gaps between the places of n_at of the class's weights. */
TX_FN void tx_delta_put_class(tx_delta_stream *stream, int64_t n, const uint64_t *mask, uint16_t *before,
                              const uint16_t *at, int32_t n_at) {
  const uint32_t ones = tx_delta_count(mask, n, before);
  tx_delta_stream s = *stream;
  uint32_t next = 0u - s.left;
  for (int32_t k = 0; k < n_at; k++) {
    const uint32_t place = tx_delta_place(mask, before, at[k]);
    tx_rice_put(&s.writer, &s.rice, place - next);
    next = place + 1;
  }
  s.left = ones - next;
  *stream = s;
}

/* The same for a single class of all. */
TX_FN void tx_delta_put_all(tx_delta_stream *stream, int64_t n, const uint16_t *at, int32_t n_at) {
  tx_delta_stream s = *stream;
  uint32_t next = 0u - s.left;
  for (int32_t k = 0; k < n_at; k++) {
    tx_rice_put(&s.writer, &s.rice, at[k] - next);
    next = at[k] + 1u;
  }
  s.left = (uint32_t)n - next;
  *stream = s;
}

TX_FN void tx_delta_put_positions(tx_delta_encoder *e, int64_t begin, int64_t n, int32_t hits, int32_t bound,
                                  const tx_dtype dtype) {
  const int32_t classes = tx_delta_classes(e->flags);
  tx_delta_block *b = e->block;
  uint64_t others[TX_DELTA_WORDS];
  if (classes == 1) {
    if (!tx_delta_is_flipped(e->flags, 0)) {
      tx_delta_put_all(&e->positions[0], n, b->at, hits);
      return;
    }
    for (int64_t w = 0; 64 * w < n; w++)
      others[w] = ~b->changed[w] & (n - 64 * w < 64 ? (UINT64_C(1) << (n - 64 * w)) - 1u : ~UINT64_C(0));
    tx_delta_put_all(&e->positions[0], n, b->at_of[0], tx_delta_list(others, n, b->at_of[0]));
    return;
  }
  const tx_delta_edges edges = tx_delta_edges_of(e->flags, bound, dtype);
  tx_delta_masks((const char *)e->weights + 2 * begin, n, &edges, 0, b->masks);
  if (edges.n == 1) {
    tx_delta_find_classes(e, begin, hits, &edges, bound, 1, dtype);
  } else {
    tx_delta_find_classes(e, begin, hits, &edges, bound, TX_DELTA_CLASSES - 1, dtype);
  }
  tx_delta_put_unsure(e, begin, n, hits, &edges, dtype);
  for (int32_t c = 0; c < classes; c++) {
    if (tx_delta_is_flipped(e->flags, c)) {
      for (int64_t w = 0; 64 * w < n; w++)
        others[w] = b->masks[c][w] & ~b->changed[w];
      b->n_of[c] = tx_delta_list(others, n, b->at_of[c]);
    }
    tx_delta_put_class(&e->positions[c], n, b->masks[c], b->before, b->at_of[c], b->n_of[c]);
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

/* The bound of each weight in a list, by the grain; those that are not their block's go out. */
typedef struct tx_delta_bounds_out {
  tx_bit_writer writer;
  int64_t grain, upto;
  int32_t bound, sub;
} tx_delta_bounds_out;

TX_FN int32_t tx_delta_bound_at(const tx_delta_encoder *e, tx_delta_bounds_out *out, int64_t begin, int64_t n,
                                int64_t at) {
  if (at >= out->upto) {
    const int64_t from = at / out->grain * out->grain;
    out->upto = from + out->grain;
    out->sub = tx_delta_sub_bound(e, begin + from, (out->upto < n ? out->upto : n) - from);
    tx_put_rice(&out->writer, (uint32_t)(out->bound - out->sub), 2);
  }
  return out->sub;
}

/* Values that are bits of weights, a batch after the other. */
TX_FN void tx_delta_put_batches(tx_delta_encoder *e, int64_t begin, int64_t n, int32_t hits, tx_delta_bounds_out *out,
                                const tx_dtype dtype) {
  const uint16_t *at = e->block->at;
  tx_bit_writer values = e->values;
  tx_delta_batch b;
  uint64_t hash = 0;
  for (int32_t done = 0, many = 0; done < hits; done += many) {
    many = hits - done < TX_DELTA_BATCH ? hits - done : TX_DELTA_BATCH;
    for (int32_t k = 0; k < many; k++) {
      b.weight[k] = tx_delta_weight(e->weights, begin + at[done + k], dtype);
      b.bound[k] = tx_delta_bound_at(e, out, begin, n, at[done + k]);
    }
    tx_delta_batch_encode(&b, e->rungs, many, dtype);
    for (int32_t k = 0; k < many; k++) {
      if (__builtin_expect(b.length[k] == 0, 0)) {
        b.length[k] = tx_delta_rung_bits(e->rungs, b.weight[k], b.bound[k], dtype);
        b.code[k] = tx_delta_sent(tx_delta_ordered(b.weight[k], dtype), b.length[k]);
      }
      tx_put_bits(&values, b.code[k], b.length[k]);
    }
    for (int32_t k = 0; k < many; k++)
      hash += tx_delta_touch(e->at + begin + at[done + k], b.weight[k]);
  }
  e->values = values;
  e->touched += hash;
}

TX_FN void tx_delta_put_values(tx_delta_encoder *e, int64_t begin, int64_t n, int32_t hits, int32_t bound,
                               const tx_dtype dtype) {
  const int64_t grain = tx_delta_grain(e->flags);
  const int by_class = e->flags & TX_DELTA_EXACT && tx_delta_classes(e->flags) > 1;
  const tx_delta_block *b = e->block;
  tx_delta_bounds_out out = {e->bounds, grain, grain < TX_DELTA_BLOCK && bound ? 0 : n, bound, bound};
  if (dtype != TX_F32 && !(e->flags & (TX_DELTA_EXACT | TX_DELTA_SLICEABLE))) {
    tx_delta_put_batches(e, begin, n, hits, &out, dtype);
    e->bounds = out.writer;
    return;
  }
  tx_bit_writer values = e->values;
  uint64_t hash = 0;
  for (int32_t k = 0; k < hits; k++) {
    const int64_t at = b->at[k];
    const int32_t sub = tx_delta_bound_at(e, &out, begin, n, at);
    const uint32_t bits = tx_delta_weight(e->weights, begin + at, dtype);
    tx_delta_put_value(&values, &e->far[by_class ? b->class_of[k] : 0], e, bits, begin + at, sub, dtype);
    hash += tx_delta_touch(e->at + begin + at, bits);
  }
  e->values = values;
  e->bounds = out.writer;
  e->touched += hash;
}

/* -- segments -------------------------------------------------------------------------------------------------- */

/* Which classes changed by more than half, judged by a word of every 16. bounds: of the blocks, 0 where nothing did. */
TX_FN void tx_delta_choose_flips(tx_delta_encoder *e, const int32_t bounds[TX_DELTA_BLOCKS], const tx_dtype dtype) {
  const int32_t classes = tx_delta_classes(e->flags);
  int64_t seen[TX_DELTA_CLASSES] = {0};
  for (int64_t b = 0; b * TX_DELTA_BLOCK < e->n; b++) {
    const int64_t begin = b * TX_DELTA_BLOCK;
    const int64_t n = e->n - begin < TX_DELTA_BLOCK ? e->n - begin : TX_DELTA_BLOCK;
    if (e->dense >> b & 1u) continue;
    if (classes > 1 && !bounds[b]) continue;
    const tx_delta_edges edges = tx_delta_edges_of(e->flags, bounds[b], dtype);
    for (int64_t w = 0; 64 * w + 64 <= n; w += 16) {
      uint64_t masks[TX_DELTA_CLASSES] = {~UINT64_C(0)}, changed;
      memcpy(&changed, e->changed + begin / 8 + 8 * w, sizeof changed);
      if (classes > 1)
        tx_delta_masks_of((const char *)e->weights + 2 * (begin + 64 * w), masks[0], &edges, edges.n, masks);
      for (int32_t c = 0; c < classes; c++)
        seen[c] += 2 * __builtin_popcountll(masks[c] & changed) - __builtin_popcountll(masks[c]);
    }
  }
  for (int32_t c = 0; c < classes; c++)
    e->flags |= seen[c] > 0 ? (uint32_t)TX_DELTA_FLIPPED << c : 0;
}

TX_FN void tx_delta_encode_blocks(tx_delta_encoder *e, const tx_dtype dtype) {
  int32_t bounds[TX_DELTA_BLOCKS] = {0};
  for (int64_t b = 0; e->flags & TX_DELTA_BOUNDED && b * TX_DELTA_BLOCK < e->n; b++) {
    const int64_t begin = b * TX_DELTA_BLOCK, left = e->n - begin;
    if (!(e->dense >> b & 1u)) bounds[b] = tx_delta_sub_bound(e, begin, left < TX_DELTA_BLOCK ? left : TX_DELTA_BLOCK);
  }
  tx_delta_choose_flips(e, bounds, dtype);
  for (int64_t b = 0; b * TX_DELTA_BLOCK < e->n; b++) {
    if (e->dense >> b & 1u) continue;
    const int64_t begin = b * TX_DELTA_BLOCK;
    const int64_t n = e->n - begin < TX_DELTA_BLOCK ? e->n - begin : TX_DELTA_BLOCK;
    tx_delta_block *block = e->block;
    tx_delta_load_bits(e->changed + begin / 8, n, block->changed);
    if (e->flags & TX_DELTA_EXACT) tx_delta_drop_returned(e->distances, begin, n, block->changed);
    const int32_t hits = tx_delta_list(block->changed, n, block->at);
    const int32_t bound = tx_delta_put_bound(e, bounds[b]);
    tx_delta_put_positions(e, begin, n, hits, bound, dtype);
    tx_delta_put_values(e, begin, n, hits, bound, dtype);
  }
  for (int32_t c = 0; c <= TX_DELTA_CLASSES; c++) {
    tx_delta_stream *s = &e->positions[c];
    if (tx_delta_has_stream(e->flags, c)) tx_rice_put(&s->writer, &s->rice, s->left);
  }
}

#endif
