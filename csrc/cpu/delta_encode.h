/* Encodes changed weights into the streams of a segment. Included by coding_kernels_isa.c only. Writers are copied to
 * locals while a loop runs: for all the compiler knows, the bytes that are written could be the encoder's own
 * fields. */
#ifndef TX_CPU_DELTA_ENCODE_H
#define TX_CPU_DELTA_ENCODE_H

#include "csrc/cpu/delta_batch.h"
#include "csrc/cpu/delta_bounds.h"
#include "csrc/cpu/delta_classes.h"
#include "csrc/cpu/delta_gaps.h"
#include "csrc/cpu/delta_places.h"

/* The distance of a weight, -8 ... 7. */
TX_FN int32_t tx_delta_distance(const uint8_t *distances, int64_t i) {
  const int32_t half = distances[i >> 1] >> (4 * (i & 1)) & 15;
  return (half ^ 8) - 8;
}

/* Removes weights from `changed` that have their old value again. */
TX_FN void tx_delta_drop_returned(const uint8_t *distances, int64_t begin, int64_t n,
                                  uint64_t changed[TX_DELTA_WORDS]) {
  for (int64_t w = 0; 64 * w < n; w++) {
    for (uint64_t hits = changed[w]; hits; hits &= hits - 1u) {
      if (tx_delta_distance(distances, begin + 64 * w + __builtin_ctzll(hits)) == 0)
        changed[w] &= ~(hits & (0u - hits));
    }
  }
}

/* -- positions ------------------------------------------------------------------------------------------------- */

/* Sets the classes of unsure weights whose old value is known from their distance. */
TX_FN void tx_delta_resolve(const tx_delta_encoder *e, int64_t begin, int32_t hits, const tx_delta_edges *edges,
                            const tx_dtype dtype) {
  tx_delta_block *b = e->block;
  for (int32_t k = 0; k < hits; k++) {
    const int32_t d = b->class_of[k] == TX_DELTA_CLASSES ? tx_delta_distance(e->distances, begin + b->at[k]) : -8;
    if (d == -8) continue;
    const uint32_t old = tx_delta_unordered(tx_delta_ordered(b->now[k], dtype) - d, dtype);
    b->class_of[k] = (uint16_t)tx_delta_class(tx_delta_size_of(old, dtype), edges);
  }
}

/* Moves these weights from the masks of their new classes to those of their old ones. */
TX_FN void tx_delta_move_resolved(tx_delta_block *b, int32_t hits, const tx_delta_edges *edges) {
  for (int32_t k = 0; k < hits; k++) {
    const int32_t was = b->class_of[k], now = tx_delta_class(b->now[k] & 0x7fff, edges);
    if (was == now || was == TX_DELTA_CLASSES) continue;
    const uint64_t bit = UINT64_C(1) << (b->at[k] & 63);
    b->masks[now][b->at[k] >> 6] ^= bit;
    b->masks[was][b->at[k] >> 6] ^= bit;
  }
}

/* Writes the positions of the changed weights of a class, or, if the class is flipped, of the others. */
TX_FN void tx_delta_put_class(tx_delta_encoder *e, int32_t c, int64_t n, int32_t n_of, uint32_t ones,
                              tx_delta_ahead *ahead) {
  tx_delta_block *b = e->block;
  uint16_t *list = b->listed[c];
  if (tx_delta_is_flipped(e->flags, c)) {
    for (int64_t w = 0; 64 * w < n; w++)
      b->packed[c][w] = b->masks[c][w] & ~b->changed[w];
    n_of = tx_delta_list_few(b->packed[c], n, list);
  }
  tx_delta_places(b, c, list, n_of, ahead);
  tx_delta_put_gaps(&e->positions[c], list, n_of, ones, ahead);
}

TX_FN void tx_delta_put_classes(tx_delta_encoder *e, int64_t begin, int64_t n, int32_t hits, int32_t bound,
                                tx_delta_ahead *ahead, const int32_t n_edges, const tx_dtype dtype) {
  tx_delta_block *b = e->block;
  const tx_delta_edges edges = tx_delta_edges_of(e->flags, bound, dtype);
  const tx_delta_limits limits = tx_delta_zones_of(&edges, bound, dtype);
  const int exact = (e->flags & TX_DELTA_EXACT) != 0;
  uint32_t ones[TX_DELTA_CLASSES];
  int32_t n_of[TX_DELTA_CLASSES + 1];
  tx_delta_gather((const char *)e->weights + 2 * begin, n, b->at, hits, b->now);
  tx_delta_classes_now(b->now, hits, &limits, n_edges, b->class_of);
  if (exact) tx_delta_resolve(e, begin, hits, &edges, dtype);
  tx_delta_sort(b, hits, n_of);
  const uint16_t *unsure = b->listed[TX_DELTA_CLASSES];
  memset(b->unsure, 0, sizeof b->unsure);
  for (int32_t k = 0; k < n_of[TX_DELTA_CLASSES]; k++)
    b->unsure[unsure[k] >> 6] |= UINT64_C(1) << (unsure[k] & 63);
  tx_delta_put_gaps(&e->positions[TX_DELTA_CLASSES], unsure, n_of[TX_DELTA_CLASSES], (uint32_t)n, ahead);
  tx_delta_masks((const char *)e->weights + 2 * begin, n, &edges, n_edges, b, ahead, ones);
  if (exact) tx_delta_move_resolved(b, hits, &edges);
  if (exact) tx_delta_count(b, n, n_edges, ones);
  for (int32_t c = 0; c <= n_edges; c++)
    tx_delta_put_class(e, c, n, n_of[c], ones[c], ahead);
}

TX_FN void tx_delta_put_positions(tx_delta_encoder *e, int64_t begin, int64_t n, int32_t hits, int32_t bound,
                                  tx_delta_ahead *ahead, const tx_dtype dtype) {
  tx_delta_block *b = e->block;
  const int32_t classes = tx_delta_classes(e->flags);
  if (dtype != TX_F32 && classes == 2) {
    tx_delta_put_classes(e, begin, n, hits, bound, ahead, 1, dtype);
  } else if (dtype != TX_F32 && classes > 2) {
    tx_delta_put_classes(e, begin, n, hits, bound, ahead, TX_DELTA_CLASSES - 1, dtype);
  } else if (!tx_delta_is_flipped(e->flags, 0)) {
    tx_delta_put_gaps(&e->positions[0], b->at, hits, (uint32_t)n, ahead);
  } else {
    for (int64_t w = 0; 64 * w < n; w++)
      b->packed[0][w] = ~b->changed[w] & (n - 64 * w < 64 ? (UINT64_C(1) << (n - 64 * w)) - 1u : ~UINT64_C(0));
    const int32_t others = tx_delta_list(b->packed[0], n, b->listed[0], ahead);
    tx_delta_put_gaps(&e->positions[0], b->listed[0], others, (uint32_t)n, ahead);
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

/* Writes values that are bits of weights, batch by batch. */
TX_FN void tx_delta_put_batches(tx_delta_encoder *e, int64_t begin, int32_t hits, const int32_t *bounds,
                                tx_delta_ahead *ahead, const tx_dtype dtype) {
  const tx_delta_block *from = e->block;
  tx_bit_writer values = e->values;
  tx_delta_batch b;
  uint64_t hash = 0;
  tx_delta_batch_begin(&b);
  for (int32_t done = 0, many = 0; done < hits; done += many) {
    const uint16_t *at = from->at + done;
    many = hits - done < TX_DELTA_BATCH ? hits - done : TX_DELTA_BATCH;
    memcpy(b.weight, from->now + done, (size_t)many * sizeof *b.weight);
    for (int32_t k = 0; k < tx_delta_whole(many); k++)
      b.entry[k] = at[k] / TX_BLOCK;
    tx_delta_look_up((const uint32_t *)bounds, b.entry, many, (uint32_t *)b.bound);
    tx_delta_batch_encode(&b, e->rungs, many, dtype);
    tx_delta_put_codes(&values, &b.codes, many, ahead);
    for (int32_t k = 0; k < many; k++)
      hash += tx_delta_touch(e->at + begin + at[k], b.weight[k]);
  }
  e->values = values;
  e->touched += hash;
}

/* bounds: of each TX_BLOCK. */
TX_FN void tx_delta_put_values(tx_delta_encoder *e, int64_t begin, int32_t hits, const int32_t *bounds,
                               tx_delta_ahead *ahead, const tx_dtype dtype) {
  const int32_t classes = e->flags & TX_DELTA_EXACT ? tx_delta_classes(e->flags) : 1;
  const tx_delta_block *b = e->block;
  if (dtype != TX_F32 && !(e->flags & (TX_DELTA_EXACT | TX_DELTA_SLICEABLE))) {
    tx_delta_put_batches(e, begin, hits, bounds, ahead, dtype);
    return;
  }
  tx_bit_writer values = e->values;
  uint64_t hash = 0;
  for (int32_t k = 0; k < hits; k++) {
    const int64_t at = b->at[k];
    const uint32_t bits = tx_delta_weight(e->weights, begin + at, dtype);
    tx_delta_put_value(&values, &e->far[classes > 1 ? b->class_of[k] : 0], e, bits, begin + at, bounds[at / TX_BLOCK],
                       dtype);
    hash += tx_delta_touch(e->at + begin + at, bits);
  }
  e->values = values;
  e->touched += hash;
}

/* -- segments -------------------------------------------------------------------------------------------------- */

/* Chooses the classes to be flipped: those of which more than half changed, judged by one word of every 16. bounds: of
 * the blocks, 0 if nothing changed. */
TX_FN void tx_delta_choose_flips(tx_delta_encoder *e, const int32_t bounds[TX_DELTA_BLOCKS], const tx_dtype dtype) {
  const int32_t classes = tx_delta_classes(e->flags);
  int64_t seen[TX_DELTA_CLASSES] = {0};
  for (int64_t b = 0; b * TX_DELTA_BLOCK < e->n; b++) {
    const int64_t begin = b * TX_DELTA_BLOCK;
    const int64_t n = e->n - begin < TX_DELTA_BLOCK ? e->n - begin : TX_DELTA_BLOCK;
    if (e->dense >> b & 1u) continue;
    if (classes > 1 && !bounds[b]) continue;
    const tx_delta_edges edges = tx_delta_edges_of(e->flags, bounds[b], dtype);
    const tx_delta_limits limits = tx_delta_limits_of(&edges);
    for (int64_t w = 0; 64 * w + 64 <= n; w += 16) {
      uint64_t masks[TX_DELTA_CLASSES] = {~UINT64_C(0)}, above[TX_DELTA_CLASSES - 1], changed;
      memcpy(&changed, e->changed + begin / 8 + 8 * w, sizeof changed);
      if (classes > 1) {
        tx_delta_compare((const char *)e->weights + 2 * (begin + 64 * w), limits.below, edges.n, above);
        tx_delta_split(above, ~UINT64_C(0), edges.n, masks);
      }
      for (int32_t c = 0; c < classes; c++)
        seen[c] += 2 * __builtin_popcountll(masks[c] & changed) - __builtin_popcountll(masks[c]);
    }
  }
  for (int32_t c = 0; c < classes; c++)
    e->flags |= seen[c] > 0 ? (uint32_t)TX_DELTA_FLIPPED << c : 0;
}

/* moved: tx_delta_moved_of the segment; found: the code of the block's largest bound. */
TX_FN void tx_delta_encode_block(tx_delta_encoder *e, int64_t begin, int64_t n, const uint16_t *moved, int32_t found,
                                 const tx_dtype dtype) {
  const int64_t size = dtype == TX_F32 ? 4 : 2;
  const char *next = (const char *)e->weights + (begin + e->ahead) * size;
  tx_delta_ahead ahead = {next, e->ahead ? next + n * size : next};
  tx_delta_block *b = e->block;
  int32_t bounds[TX_DELTA_BLOCK / TX_BLOCK];
  for (int64_t i = 0; e->ahead && i < n / 8; i += 64)
    __builtin_prefetch(e->changed + (begin + e->ahead) / 8 + i, 0, 2);
  tx_delta_load_bits(e->changed + begin / 8, n, b->changed);
  if (e->flags & TX_DELTA_EXACT) tx_delta_drop_returned(e->distances, begin, n, b->changed);
  const int32_t hits = tx_delta_list(b->changed, n, b->at, &ahead);
  const int32_t bound = tx_delta_put_bound(e, found);
  tx_delta_put_bounds(e, moved + begin / TX_BLOCK, n, bound, bounds);
  tx_delta_put_positions(e, begin, n, hits, bound, &ahead, dtype);
  tx_delta_put_values(e, begin, hits, bounds, &ahead, dtype);
  while (ahead.at < ahead.end)
    tx_delta_fetch(&ahead);
}

TX_FN void tx_delta_encode_blocks(tx_delta_encoder *e, const tx_dtype dtype) {
  int32_t bounds[TX_DELTA_BLOCKS] = {0};
  uint16_t moved[TX_DELTA_SEGMENT / TX_BLOCK] = {0};
  if (e->flags & TX_DELTA_BOUNDED) tx_delta_moved_of(e, moved);
  for (int64_t b = 0; b * TX_DELTA_BLOCK < e->n; b++) {
    if (!(e->dense >> b & 1u)) bounds[b] = tx_delta_bound_of(moved + b * (TX_DELTA_BLOCK / TX_BLOCK), TX_DELTA_BLOCK);
  }
  tx_delta_choose_flips(e, bounds, dtype);
  for (int64_t b = 0; b * TX_DELTA_BLOCK < e->n; b++) {
    const int64_t begin = b * TX_DELTA_BLOCK, left = e->n - begin;
    if (e->dense >> b & 1u) continue;
    tx_delta_encode_block(e, begin, left < TX_DELTA_BLOCK ? left : TX_DELTA_BLOCK, moved, bounds[b], dtype);
  }
  for (int32_t c = 0; c <= TX_DELTA_CLASSES; c++) {
    tx_delta_stream *s = &e->positions[c];
    if (tx_delta_has_stream(e->flags, c)) tx_rice_put(&s->writer, &s->rice, s->left);
  }
}

#endif
