/* Classes of the weights of a block. Included by coding_kernels_isa.c only.
 *
 * Note [Classes]. Small weights change more often than large ones, because their steps are smaller. So the weights of a
 * block are divided into classes by magnitude, and positions are coded for each class separately. The edges of classes
 * are multiples of the bound on how far any weight of the block moved.
 *
 * The class has to be that of the old weight, which the sender does not know. It follows from the new weight, if that
 * is further from each edge than the bound. The few other changed weights are "unsure": they are sent first, with their
 * positions in the block, and are in no class on either side. If most weights of a class changed, the positions are
 * those of the weights that did not change ("flipped"). */
#ifndef TX_CPU_DELTA_CLASSES_H
#define TX_CPU_DELTA_CLASSES_H

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "csrc/cpu/delta_loops.h"

TX_FN uint32_t tx_delta_weight(const void *weights, int64_t i, const tx_dtype dtype) {
  return dtype == TX_F32 ? ((const tx_mem_u32 *)weights)[i] : ((const tx_mem_u16 *)weights)[i];
}

/* 2^octaves times the bound, as the bits of a 16-bit weight: at least 1, at most infinity. */
TX_FN int32_t tx_delta_edge(int32_t bound, int32_t octaves, const tx_dtype dtype) {
  const int32_t m = tx_delta_mantissa(dtype);
  const int32_t e = (bound >> 4) + octaves - tx_delta_rebias(dtype);
  const int32_t infinity = ((1 << (15 - m)) - 1) << m;
  if (e < 1) return 1;
  const int32_t edge = e << m | (bound & 15) << (m - 4);
  return edge < infinity ? edge : infinity;
}

typedef struct tx_delta_edges {
  int32_t n; /* one less than the number of classes */
  int32_t edge[TX_DELTA_CLASSES - 1];
} tx_delta_edges;

/* Edges of the classes, found by measurement. With distances the old weight is nearly always known, so edges may be
 * where more weights would be unsure otherwise. A single class, as for fp32 weights, has no edge. */
TX_FN tx_delta_edges tx_delta_edges_of(uint32_t flags, int32_t bound, const tx_dtype dtype) {
  const int32_t classes = tx_delta_classes(flags), first = flags & TX_DELTA_EXACT ? 4 : 6;
  if (classes == 1) return (tx_delta_edges){0};
  if (classes == 2) return (tx_delta_edges){1, {tx_delta_edge(bound, 7, dtype), 0, 0}};
  return (tx_delta_edges){3,
                          {tx_delta_edge(bound, first, dtype), tx_delta_edge(bound, first + 2, dtype),
                           tx_delta_edge(bound, first + 4, dtype)}};
}

TX_FN int32_t tx_delta_class(int64_t size, const tx_delta_edges *edges) {
  int32_t found = 0;
  for (int32_t i = 0; i < edges->n; i++)
    found += size >= edges->edge[i];
  return found;
}

/* The magnitudes of new weights whose old weight may have been on the other side of an edge; may have a few more. */
typedef struct tx_delta_zone {
  uint32_t low, span;
} tx_delta_zone;

TX_FN tx_delta_zone tx_delta_zone_of(int64_t edge, int32_t bound, const tx_dtype dtype) {
  const int32_t m = tx_delta_mantissa(dtype);
  const int64_t most = INT64_C(1) << 20;
  const int32_t e = (int32_t)(edge >> m);
  const int64_t significand = edge & ((INT64_C(1) << m) - 1);
  int64_t steps = tx_delta_steps(e, bound, dtype), below = tx_delta_steps(e - 1, bound, dtype);
  steps = steps < most ? steps : most;
  below = below < most ? below : most;
  const int64_t up = significand > 1 ? steps + 3 : steps + 4, down = significand >= steps + 3 ? steps + 3 : below + 3;
  const int near = e < 2 || !tx_delta_is_narrow(2 * below, dtype); /* steps change by more than a factor of two */
  const int whole = below >= INT64_C(1) << m; /* half of the edge is within the bound, as edges end at infinity */
  const int64_t low = whole ? 0 : edge - (near ? 2 * below + 4 : down), high = edge + (near ? 2 * below + 4 : up);
  return (tx_delta_zone){(uint32_t)(low > 0 ? low : 0), (uint32_t)(high - (low > 0 ? low : 0))};
}

#if defined(__AVX512BW__)
/* Moves a mask out of the mask registers, in which gcc would continue: all their instructions wait for one port. */
TX_FN uint64_t tx_delta_unmasked(__mmask32 mask) {
  uint64_t bits = mask;
  __asm__("" : "+r"(bits));
  return bits;
}
#endif

/* Compares the magnitudes of 64 16-bit weights with n limits: bit i of above[c] is set if weight i is above
 * limits[c]. */
TX_FN void tx_delta_compare(const void *weights, const int16_t *limits, const int32_t n, uint64_t *above) {
#if defined(__AVX512BW__)
  const __m512i sizes = _mm512_set1_epi16(0x7fff);
  const __m512i low = _mm512_and_si512(_mm512_loadu_si512(weights), sizes);
  const __m512i high = _mm512_and_si512(_mm512_loadu_si512((const char *)weights + 64), sizes);
  for (int32_t c = 0; c < n; c++) {
    const __m512i limit = _mm512_set1_epi16(limits[c]);
    above[c] = tx_delta_unmasked(_mm512_cmpgt_epi16_mask(low, limit)) |
               tx_delta_unmasked(_mm512_cmpgt_epi16_mask(high, limit)) << 32;
  }
#elif defined(__AVX2__)
  const __m256i sizes = _mm256_set1_epi16(0x7fff);
  __m256i x[4];
  for (int32_t i = 0; i < 4; i++)
    x[i] = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)((const char *)weights + 32 * i)), sizes);
  for (int32_t c = 0; c < n; c++) {
    const __m256i limit = _mm256_set1_epi16(limits[c]);
    uint64_t found = 0;
    for (int32_t i = 0; i < 2; i++) {
      const __m256i bytes =
          _mm256_packs_epi16(_mm256_cmpgt_epi16(x[2 * i], limit), _mm256_cmpgt_epi16(x[2 * i + 1], limit));
      const __m256i ordered = _mm256_permute4x64_epi64(bytes, 0xd8);
      found |= (uint64_t)(uint32_t)_mm256_movemask_epi8(ordered) << (32 * i);
    }
    above[c] = found;
  }
#elif defined(__SSE2__)
  const __m128i sizes = _mm_set1_epi16(0x7fff);
  __m128i x[8];
  for (int32_t i = 0; i < 8; i++)
    x[i] = _mm_and_si128(_mm_loadu_si128((const __m128i *)((const char *)weights + 16 * i)), sizes);
  for (int32_t c = 0; c < n; c++) {
    const __m128i limit = _mm_set1_epi16(limits[c]);
    uint64_t found = 0;
    for (int32_t i = 0; i < 4; i++) {
      const __m128i bytes = _mm_packs_epi16(_mm_cmpgt_epi16(x[2 * i], limit), _mm_cmpgt_epi16(x[2 * i + 1], limit));
      found |= (uint64_t)(uint32_t)_mm_movemask_epi8(bytes) << (16 * i);
    }
    above[c] = found;
  }
#else
  for (int32_t c = 0; c < n; c++) {
    uint64_t found = 0;
    for (int32_t i = 0; i < 8; i++) {
      uint64_t bytes = 0;
      for (int32_t j = 0; j < 8; j++)
        bytes |= (uint64_t)((((const tx_mem_u16 *)weights)[8 * i + j] & 0x7fff) > limits[c]) << (8 * j);
      found |= (bytes * UINT64_C(0x0102040810204080) >> 56) << (8 * i);
    }
    above[c] = found;
  }
#endif
}

/* Limits for tx_delta_compare: the last magnitude below each edge, the last one below each zone, and the last one in
 * it. */
typedef struct tx_delta_limits {
  int16_t below[TX_DELTA_CLASSES - 1], zone[TX_DELTA_CLASSES - 1], zone_last[TX_DELTA_CLASSES - 1];
} tx_delta_limits;

TX_FN tx_delta_limits tx_delta_limits_of(const tx_delta_edges *edges) {
  tx_delta_limits limits = {{0}, {0}, {0}};
  for (int32_t c = 0; c < edges->n; c++)
    limits.below[c] = (int16_t)(edges->edge[c] - 1);
  return limits;
}

TX_FN tx_delta_limits tx_delta_zones_of(const tx_delta_edges *edges, int32_t bound, const tx_dtype dtype) {
  tx_delta_limits limits = tx_delta_limits_of(edges);
  for (int32_t c = 0; c < edges->n; c++) {
    const tx_delta_zone zone = tx_delta_zone_of(edges->edge[c], bound, dtype);
    const uint32_t last = zone.low + zone.span - 1;
    limits.zone[c] = (int16_t)((int32_t)zone.low - 1);
    limits.zone_last[c] = (int16_t)(last < INT16_MAX ? last : INT16_MAX);
  }
  return limits;
}

/* Divides 64 weights, those in `rest`, into classes: a mask for each. above: for the n edges, ascending. */
TX_FN void tx_delta_split(const uint64_t *above, uint64_t rest, const int32_t n, uint64_t masks[TX_DELTA_CLASSES]) {
  masks[0] = rest;
  for (int32_t c = 1; c <= n; c++) {
    masks[c] = above[c - 1] & rest;
    masks[c - 1] ^= masks[c];
  }
}

/* Computes a word's masks. ones: how many weights of each class are in the words before; updated. */
TX_FN void tx_delta_mask_word(const void *weights, uint64_t rest, const tx_delta_limits *limits, const int32_t n,
                              int64_t w, tx_delta_block *b, uint32_t *ones) {
  uint64_t above[TX_DELTA_CLASSES - 1], found[TX_DELTA_CLASSES];
  tx_delta_compare(weights, limits->below, n, above);
  tx_delta_split(above, rest, n, found);
  for (int32_t c = 0; c <= n; c++) {
    b->masks[c][w] = found[c];
    b->before[c][w] = (uint16_t)ones[c];
    ones[c] += (uint32_t)__builtin_popcountll(found[c]);
  }
}

#define TX_DELTA_NEAR 1024 /* bytes, prefetched from the L2 cache into L1 */

/* Computes the masks of all weights that are not unsure. ones: how many are in each class. */
TX_FN void tx_delta_masks(const void *weights, int64_t numel, const tx_delta_edges *edges, const int32_t n,
                          tx_delta_block *b, tx_delta_ahead *ahead, uint32_t *ones) {
  const tx_delta_limits limits = tx_delta_limits_of(edges);
  uint32_t found[TX_DELTA_CLASSES] = {0};
  const char *from = weights;
  int64_t w = 0;
  for (; 64 * w + 64 <= numel; w++, from += 128) {
    if (w % 2) tx_delta_fetch(ahead);
    __builtin_prefetch(from + TX_DELTA_NEAR, 0, 3);
    __builtin_prefetch(from + TX_DELTA_NEAR + 64, 0, 3);
    tx_delta_mask_word(from, ~b->unsure[w], &limits, n, w, b, found);
  }
  if (64 * w < numel) {
    uint16_t padded[64] = {0};
    memcpy(padded, from, (size_t)(2 * (numel - 64 * w)));
    tx_delta_mask_word(padded, ~b->unsure[w] & ((UINT64_C(1) << (numel - 64 * w)) - 1u), &limits, n, w, b, found);
    w++;
  }
  for (int32_t c = 0; c <= n; c++) { /* so that a search ends at the last word */
    for (int32_t i = 0; i < TX_DELTA_PAST; i++)
      b->before[c][w + i] = INT16_MAX;
  }
  memcpy(ones, found, sizeof found);
}

/* The classes of n weights by their new values; TX_DELTA_CLASSES if the old weight may have been in another class. */
TX_FN void tx_delta_classes_now(const uint32_t *now, int32_t n, const tx_delta_limits *limits, const int32_t n_edges,
                                uint16_t *class_of) {
  for (int32_t k = 0; k < n; k++) {
    const int32_t size = (int32_t)(now[k] & 0x7fff);
    int32_t found = 0, near = 0;
    for (int32_t c = 0; c < n_edges; c++) {
      found += size > limits->below[c];
      near |= size > limits->zone[c] && size <= limits->zone_last[c];
    }
    class_of[k] = (uint16_t)(near ? TX_DELTA_CLASSES : found);
  }
}

/* The class of the weight at a position, of so many classes; TX_DELTA_CLASSES: unsure. */
TX_FN int32_t tx_delta_class_at(const tx_delta_block *b, int64_t at, int32_t classes) {
  const int64_t w = at >> 6, i = at & 63;
  int32_t found = 0;
  if (b->unsure[w] >> i & 1u) return TX_DELTA_CLASSES;
  for (int32_t c = 1; c < classes; c++)
    found += (int32_t)(b->masks[c][w] >> i & 1u) * c;
  return found;
}

#endif
