/* Converts positions in a block to places in a class, and back. Included by coding_kernels_isa.c only.
 *
 * Note [Places]. Positions are coded for each class separately, as places: the index of a weight among the weights of
 * its class. The sender gets a place by counting the bits of the class's mask before the position. The receiver sets a
 * bit for each place; these bits are contiguous ("packed"), and an instruction (pdep) spreads them over the mask, 64 at
 * a time. Without that instruction, the position of each place is searched for. */
#ifndef TX_CPU_DELTA_PLACES_H
#define TX_CPU_DELTA_PLACES_H

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "csrc/cpu/delta_list.h"

/* Lists the positions of changed weights by class; n_of: how many are in each class, and unsure. */
TX_FN void tx_delta_sort(tx_delta_block *b, int32_t n, int32_t n_of[TX_DELTA_CLASSES + 1]) {
  for (int32_t c = 0; c <= TX_DELTA_CLASSES; c++)
    n_of[c] = 0;
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  for (int32_t k = 0; k < n; k += 16) {
    const uint32_t there = n - k < 16 ? (1u << (n - k)) - 1u : 0xffff;
    const __m256i class_of = _mm256_loadu_si256((const __m256i *)(b->class_of + k));
    const __m512i at = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(b->at + k)));
    for (int32_t c = 0; c <= TX_DELTA_CLASSES; c++) {
      const uint32_t of = _mm256_cmpeq_epi16_mask(class_of, _mm256_set1_epi16((int16_t)c)) & there;
      const __m512i positions = _mm512_maskz_compress_epi32((__mmask16)of, at);
      _mm256_storeu_si256((__m256i *)(b->listed[c] + n_of[c]), _mm512_cvtepi32_epi16(positions));
      n_of[c] += __builtin_popcount(of);
    }
  }
#else
  for (int32_t k = 0; k < n; k++) {
    const int32_t c = b->class_of[k];
    b->listed[c][n_of[c]++] = b->at[k];
  }
#endif
}

/* Counts the bits of n + 1 masks again. */
TX_FN void tx_delta_count(tx_delta_block *b, int64_t numel, const int32_t n, uint32_t *ones) {
  for (int32_t c = 0; c <= n; c++) {
    ones[c] = 0;
    for (int64_t w = 0; 64 * w < numel; w++) {
      b->before[c][w] = (uint16_t)ones[c];
      ones[c] += (uint32_t)__builtin_popcountll(b->masks[c][w]);
    }
  }
}

/* Replaces the positions of n weights of a class by their places. */
TX_FN void tx_delta_places(const tx_delta_block *b, int32_t c, uint16_t *list, int32_t n, tx_delta_ahead *ahead) {
  const uint64_t *mask = b->masks[c];
  const uint16_t *before = b->before[c];
  for (int32_t k = 0; k < n; k++) {
    if (k % 4 == 0) tx_delta_fetch(ahead);
    const uint32_t at = list[k], w = at >> 6;
    const uint64_t under = mask[w] & ((UINT64_C(1) << (at & 63)) - 1u);
    list[k] = (uint16_t)(before[w] + (uint32_t)__builtin_popcountll(under));
  }
}

#if defined(__BMI2__) /* not in the AVX2 build: on older processors with AVX2 pdep is slow */

/* Whether no word has more than 57 weights of any of the first n classes: so many bits are in a single load, wherever
 * they begin. */
TX_FN int tx_delta_is_sparse(const tx_delta_block *b, int64_t numel, const int32_t n) {
  const int64_t last = (numel - 1) / 64;
  uint16_t most = 0;
  for (int32_t c = 0; c < n; c++) {
    const uint16_t of_last = (uint16_t)__builtin_popcountll(b->masks[c][last]);
    most = of_last > most ? of_last : most;
    for (int64_t w = 0; w < last; w++) {
      const uint16_t here = (uint16_t)(b->before[c][w + 1] - b->before[c][w]);
      most = here > most ? here : most;
    }
  }
  return most <= 57;
}

/* Sets the bits of all changed weights, from n classes and the unsure ones, in b->changed. The first `sparse` classes
 * are sparse (tx_delta_is_sparse). */
TX_FN void tx_delta_unpack_as(tx_delta_block *b, int64_t numel, const int32_t n, const int32_t sparse,
                              tx_delta_ahead *ahead) {
  for (int64_t w = 0; 64 * w < numel; w++) {
    uint64_t word = b->unsure[w];
    if (w % 2) tx_delta_fetch(ahead);
    for (int32_t c = 0; c < n; c++) {
      const uint32_t at = b->before[c][w];
      uint64_t part, rest;
      if (c < sparse) {
        memcpy(&part, (const char *)b->packed[c] + (at >> 3), sizeof part);
        part >>= at & 7;
      } else {
        memcpy(&part, b->packed[c] + (at >> 6), sizeof part);
        memcpy(&rest, b->packed[c] + (at >> 6) + 1, sizeof rest);
        part = part >> (at & 63) | rest << 1 << (~at & 63);
      }
      word |= _pdep_u64(part, b->masks[c][w]);
    }
    b->changed[w] = word;
  }
}

/* Mostly, all classes but that of the largest weights are sparse. */
TX_FN void tx_delta_unpack(tx_delta_block *b, int64_t numel, const int32_t n, tx_delta_ahead *ahead) {
  if (tx_delta_is_sparse(b, numel, n - 1)) {
    tx_delta_unpack_as(b, numel, n, n - 1, ahead);
  } else {
    tx_delta_unpack_as(b, numel, n, 0, ahead);
  }
}

#else

/* The position of the set bit of a word that has n set bits below it; there has to be one. Its byte is found from the
 * counts of bytes, its place in the byte from the counts of bits. */
TX_FN int32_t tx_delta_select(uint64_t word, uint32_t n) {
  const uint64_t ones = UINT64_C(0x0101010101010101);
  uint64_t sums = word - (word >> 1 & (ones * 0x55));
  sums = (sums & (ones * 0x33)) + (sums >> 2 & (ones * 0x33));
  sums = ((sums + (sums >> 4)) & (ones * 0x0f)) * ones;                      /* byte i: set bits in bytes 0 ... i */
  const uint64_t past = ((ones * 0x80 | (ones * n)) - sums) & (ones * 0x80); /* byte i: whether it has no more than n */
  const int32_t byte = (int32_t)((past >> 7) * ones >> 56) * 8;
  const uint64_t before = sums << 8 >> byte & 0xff;
  uint64_t bits = (word >> byte & 0xff) * ones & UINT64_C(0x8040201008040201);
  bits = (((bits + (ones * 0x7f)) | bits) >> 7 & ones) * ones; /* byte i: set bits in bits 0 ... i */
  const uint64_t under = ((ones * 0x80 | (ones * (n - before))) - bits) & (ones * 0x80); /* no more than n - before */
  return byte + (int32_t)((under >> 7) * ones >> 56);
}

/* The word with the weight at a place of the class; the search begins at word w, which must not be after it. */
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

#endif

#endif
