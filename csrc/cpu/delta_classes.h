/* Classes of the weights of a block. Included by kernels_isa.c only.
 *
 * Note [Classes]. Small weights change more often than large ones: they have smaller steps. So the weights of a block
 * are told apart by the size of the old one, compared with multiples of the bound on how far any of them has moved, and
 * positions are counted in each class by itself. The sender knows the old weight's class where the new one is further
 * from a class's edge than the bound; the few others ("unsure") go first, with their positions in the block, and are in
 * no class on either side. Where most of a class changed, positions are of those that did not ("flipped"). */
#ifndef TX_CPU_DELTA_CLASSES_H
#define TX_CPU_DELTA_CLASSES_H

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "csrc/cpu/delta_loops.h"

TX_FN uint32_t tx_delta_weight(const void *weights, int64_t i, const tx_dtype dtype) {
  return dtype == TX_F32 ? ((const tx_mem_u32 *)weights)[i] : ((const tx_mem_u16 *)weights)[i];
}

/* 2^octaves times the bound, as the bits of a weight of 16 bits: at least 1, at most infinity. */
TX_FN int32_t tx_delta_edge(int32_t bound, int32_t octaves, const tx_dtype dtype) {
  const int32_t m = tx_delta_mantissa(dtype);
  const int32_t e = (bound >> 4) + octaves - tx_delta_rebias(dtype);
  const int32_t infinity = ((1 << (15 - m)) - 1) << m;
  if (e < 1) return 1;
  const int32_t edge = e << m | (bound & 15) << (m - 4);
  return edge < infinity ? edge : infinity;
}

typedef struct tx_delta_edges {
  int32_t n; /* one less than classes */
  int32_t edge[TX_DELTA_CLASSES - 1];
} tx_delta_edges;

/* Where classes end, by measurement: with distances the old weight is known nearly always, and edges may be where more
 * would be unsure without. A single class, as that of fp32 weights, has no edge. */
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

/* Sizes of new weights that may have been on the other side of an edge. A few more are in it, too. */
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
  const int near = e < 2 || !tx_delta_is_narrow(2 * below, dtype); /* whose steps differ more than by half */
  const int64_t low = edge - (near ? 2 * below + 4 : down), high = edge + (near ? 2 * below + 4 : up);
  return (tx_delta_zone){(uint32_t)(low > 0 ? low : 0), (uint32_t)(high - (low > 0 ? low : 0))};
}

/* One bit of each of 64 weights of 16 bits for each edge: whether its size is at least that. */
TX_FN void tx_delta_compare(const void *weights, const tx_delta_edges *edges, const int32_t n,
                            uint64_t above[TX_DELTA_CLASSES - 1]) {
#if defined(__AVX512BW__)
  const __m512i sizes = _mm512_set1_epi16(0x7fff);
  const __m512i low = _mm512_and_si512(_mm512_loadu_si512(weights), sizes);
  const __m512i high = _mm512_and_si512(_mm512_loadu_si512((const char *)weights + 64), sizes);
  for (int32_t c = 0; c < n; c++) {
    const __m512i edge = _mm512_set1_epi16((int16_t)edges->edge[c]);
    above[c] = (uint64_t)_mm512_cmpge_epi16_mask(low, edge) | (uint64_t)_mm512_cmpge_epi16_mask(high, edge) << 32;
  }
#elif defined(__AVX2__)
  const __m256i sizes = _mm256_set1_epi16(0x7fff);
  __m256i x[4];
  for (int32_t i = 0; i < 4; i++)
    x[i] = _mm256_and_si256(_mm256_loadu_si256((const __m256i *)((const char *)weights + 32 * i)), sizes);
  for (int32_t c = 0; c < n; c++) {
    const __m256i below = _mm256_set1_epi16((int16_t)(edges->edge[c] - 1));
    uint64_t found = 0;
    for (int32_t i = 0; i < 2; i++) {
      const __m256i bytes =
          _mm256_packs_epi16(_mm256_cmpgt_epi16(x[2 * i], below), _mm256_cmpgt_epi16(x[2 * i + 1], below));
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
    const __m128i below = _mm_set1_epi16((int16_t)(edges->edge[c] - 1));
    uint64_t found = 0;
    for (int32_t i = 0; i < 4; i++) {
      const __m128i bytes = _mm_packs_epi16(_mm_cmpgt_epi16(x[2 * i], below), _mm_cmpgt_epi16(x[2 * i + 1], below));
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
        bytes |= (uint64_t)((((const tx_mem_u16 *)weights)[8 * i + j] & 0x7fff) >= edges->edge[c]) << (8 * j);
      found |= (bytes * UINT64_C(0x0102040810204080) >> 56) << (8 * i);
    }
    above[c] = found;
  }
#endif
}

/* The classes of 64 weights, of which those of `rest` are looked at: a mask for each. n: of edges. */
TX_FN void tx_delta_masks_of(const void *weights, uint64_t rest, const tx_delta_edges *edges, const int32_t n,
                             uint64_t masks[TX_DELTA_CLASSES]) {
  uint64_t above[TX_DELTA_CLASSES - 1];
  tx_delta_compare(weights, edges, n, above);
  for (int32_t c = n; c > 0; c--) {
    masks[c] = above[c - 1] & rest;
    rest &= ~above[c - 1];
  }
  masks[0] = rest;
}

/* A row of the masks for each class: [c][w]: those of weights [64 w, 64 w + 64) that are in class c. */
typedef uint64_t tx_delta_mask[TX_DELTA_WORDS];

TX_FN void tx_delta_masks_by(const void *weights, int64_t numel, const tx_delta_edges *edges, const int32_t n,
                             const int64_t ahead, tx_delta_mask *masks) {
  uint64_t found[TX_DELTA_CLASSES];
  for (int64_t w = 0; 64 * w < numel; w++) {
    const char *from = (const char *)weights + 128 * w;
    uint64_t rest = ~UINT64_C(0);
    uint16_t padded[64];
    if (numel - 64 * w < 64) {
      rest = (UINT64_C(1) << (numel - 64 * w)) - 1u;
      memset(padded, 0, sizeof padded);
      from = memcpy(padded, from, (size_t)(2 * (numel - 64 * w)));
    }
    for (int64_t i = 0; i < ahead; i += 64)
      __builtin_prefetch(from + 2 * TX_DELTA_BLOCK + i, 0, 2);
    tx_delta_masks_of(from, rest, edges, n, found);
    for (int32_t c = 0; c <= n; c++)
      masks[c][w] = found[c];
  }
}

/* ahead: 128 where the next block is asked for from memory, 0 where it is at hand. */
TX_FN void tx_delta_masks(const void *weights, int64_t numel, const tx_delta_edges *edges, const int64_t ahead,
                          tx_delta_mask *masks) {
  if (edges->n == 1) {
    tx_delta_masks_by(weights, numel, edges, 1, ahead, masks);
  } else {
    tx_delta_masks_by(weights, numel, edges, TX_DELTA_CLASSES - 1, ahead, masks);
  }
}

/* -- places in a class ------------------------------------------------------------------------------------------- */

/* before: of a class, how many weights are in the words before each; more than there are behind the last one. Returns
 * how many there are in all. */
TX_FN uint32_t tx_delta_count(const uint64_t *mask, int64_t n, uint16_t *before) {
  uint32_t ones = 0;
  int64_t w = 0;
  for (; 64 * w < n; w++) {
    before[w] = (uint16_t)ones;
    ones += (uint32_t)__builtin_popcountll(mask[w]);
  }
  for (; w < TX_DELTA_WORDS + TX_DELTA_AHEAD; w++)
    before[w] = INT16_MAX;
  return ones;
}

/* How many of the class come before weight `at`. */
TX_FN uint32_t tx_delta_place(const uint64_t *mask, const uint16_t *before, int64_t at) {
  const uint64_t under = (UINT64_C(1) << (at & 63)) - 1u;
  return before[at >> 6] + (uint32_t)__builtin_popcountll(mask[at >> 6] & under);
}

/* The word of the weight before which so many of the class come; not before word w. */
TX_FN int64_t tx_delta_word_of(const uint16_t *before, uint32_t place, int64_t w) {
#if defined(__AVX2__)
  const __m256i wanted = _mm256_set1_epi16((int16_t)place);
  for (;; w += 16) {
    const __m256i past = _mm256_cmpgt_epi16(_mm256_loadu_si256((const __m256i *)(before + w + 1)), wanted);
    const uint32_t found = (uint32_t)_mm256_movemask_epi8(past);
    if (found) return w + __builtin_ctz(found) / 2;
  }
#else
  while (before[w + 1] <= place)
    w++;
  return w;
#endif
}

/* The positions of all ones of a block: how many. There is space for two more. */
TX_FN int32_t tx_delta_list(const uint64_t *bits, int64_t n, uint16_t *at) {
  const uint64_t some = UINT64_C(1) << 63;
  int32_t found = 0;
  for (int64_t w = 0; 64 * w < n; w++) {
    const int32_t ones = __builtin_popcountll(bits[w]);
    uint64_t hits = bits[w], next = hits & (hits - 1u);
    at[found] = (uint16_t)(64 * w + __builtin_ctzll(hits | some)); /* most words have two at most */
    at[found + 1] = (uint16_t)(64 * w + __builtin_ctzll(next | some));
    for (int32_t i = 2; i < ones; i++) {
      next &= next - 1u;
      at[found + i] = (uint16_t)(64 * w + __builtin_ctzll(next));
    }
    found += ones;
  }
  return found;
}

#endif
