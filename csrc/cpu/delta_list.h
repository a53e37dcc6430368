/* Lists the positions of the set bits of a block. Included by coding_kernels_isa.c only. */
#ifndef TX_CPU_DELTA_LIST_H
#define TX_CPU_DELTA_LIST_H

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "csrc/cpu/delta_loops.h"

#if defined(__AVX512BW__) && defined(__AVX512DQ__)
/* Removes the first four set bits from each of eight words. Each bit gives 16 bits of the result: 1023 + its position,
 * or 0 if there is none. A bit is converted to a double, whose exponent has its position. */
TX_FN __m512i tx_delta_take_four(__m512i *words) {
  __m512i four = _mm512_setzero_si512();
  for (uint32_t i = 0; i < 4; i++) {
    const __m512i one = _mm512_and_si512(*words, _mm512_sub_epi64(_mm512_setzero_si512(), *words));
    const __m512i exponent = _mm512_srli_epi64(_mm512_castpd_si512(_mm512_cvtepu64_pd(one)), 52);
    four = _mm512_or_si512(four, _mm512_slli_epi64(exponent, 16 * i));
    *words = _mm512_xor_si512(*words, one);
  }
  return four;
}

/* Writes those of 32 numbers that are not 0, each plus its number in `add`; returns how many. There has to be space for
 * 16 more. */
TX_FN int32_t tx_delta_put_there(__m512i numbers, __m512i add, uint16_t *to) {
  const uint32_t there = _mm512_test_epi16_mask(numbers, numbers), low = there & 0xffffu, high = there >> 16;
  const __m512i sums = _mm512_add_epi16(numbers, add);
  const __m512i begin = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(sums));
  const __m512i end = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(sums, 1));
  const __m512i first = _mm512_maskz_compress_epi32((__mmask16)low, begin);
  const __m512i second = _mm512_maskz_compress_epi32((__mmask16)high, end);
  _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(first));
  to += __builtin_popcount(low);
  _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(second));
  return __builtin_popcount(there);
}

/* Lists the positions of the set bits of a word, any number of them; returns how many. */
TX_FN int32_t tx_delta_list_word(uint64_t word, int64_t first, uint16_t *at) {
  const __m512i places = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  int32_t found = 0;
  for (int32_t i = 0; i < 64; i += 16, word >>= 16) {
    const __m512i positions = _mm512_add_epi32(places, _mm512_set1_epi32((int32_t)first + i));
    const __m512i there = _mm512_maskz_compress_epi32((__mmask16)word, positions);
    _mm256_storeu_si256((__m256i *)(at + found), _mm512_cvtepi32_epi16(there));
    found += __builtin_popcount((uint32_t)word & 0xffffu);
  }
  return found;
}

/* Lists the positions of the set bits of n <= 8 words; `first` is the first word's position. Returns how many. Most
 * words have no more than four, and nearly all others no more than eight, unless much changed. */
TX_FN int32_t tx_delta_list_words(const uint64_t *words, int32_t n, int64_t first, uint16_t *at) {
  const int64_t word = 0x0040004000400040;
  const __m512i before = _mm512_set1_epi16((int16_t)(first - 1023));
  __m512i left = _mm512_maskz_loadu_epi64((__mmask8)(n < 8 ? (1u << n) - 1u : 0xffu), words);
  const __m512i four = tx_delta_take_four(&left);
  if (_mm512_test_epi64_mask(left, left) == 0) {
    const __m512i in_words = _mm512_set_epi64(7 * word, 6 * word, 5 * word, 4 * word, 3 * word, 2 * word, word, 0);
    return tx_delta_put_there(four, _mm512_add_epi16(before, in_words), at);
  }
  const __m512i more = tx_delta_take_four(&left);
  int32_t found = 0;
  if (_mm512_test_epi64_mask(left, left) == 0) {
    const __m512i in_words = _mm512_set_epi64(3 * word, 3 * word, 2 * word, 2 * word, word, word, 0, 0);
    const __m512i low = _mm512_permutex2var_epi64(four, _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0), more);
    const __m512i high = _mm512_permutex2var_epi64(four, _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4), more);
    const __m512i add = _mm512_add_epi16(before, in_words);
    found = tx_delta_put_there(low, add, at);
    return found + tx_delta_put_there(high, _mm512_add_epi16(add, _mm512_set1_epi16(4 * 64)), at + found);
  }
  for (int32_t w = 0; w < n; w++)
    found += tx_delta_list_word(words[w], first + 64 * w, at + found);
  return found;
}
#else
/* Lists the positions of the set bits of n words; `first` is the first word's position. Returns how many. There has to
 * be space for 3 more. */
TX_FN int32_t tx_delta_list_words(const uint64_t *words, int32_t n, int64_t first, uint16_t *at) {
  const uint64_t some = UINT64_C(1) << 63;
  int32_t found = 0;
  for (int32_t w = 0; w < n; w++, first += 64) {
    const int32_t ones = __builtin_popcountll(words[w]);
    uint64_t hits = words[w], second = hits & (hits - 1u), left = second & (second - 1u);
    at[found] = (uint16_t)(first + __builtin_ctzll(hits | some)); /* no branch: most words have no more */
    at[found + 1] = (uint16_t)(first + __builtin_ctzll(second | some));
    at[found + 2] = (uint16_t)(first + __builtin_ctzll(left | some));
    for (int32_t i = 3; i < ones; i++) {
      left &= left - 1u;
      at[found + i] = (uint16_t)(first + __builtin_ctzll(left));
    }
    found += ones;
  }
  return found;
}
#endif

/* Lists the positions of all set bits of a block; returns how many. */
TX_FN int32_t tx_delta_list(const uint64_t *bits, int64_t n, uint16_t *at, tx_delta_ahead *ahead) {
  const int32_t words = (int32_t)((n + 63) / 64);
  int32_t found = 0;
  for (int32_t w = 0; w < words; w += 8) {
    tx_delta_fetch(ahead);
    tx_delta_fetch(ahead);
    found += tx_delta_list_words(bits + w, words - w < 8 ? words - w : 8, 64 * w, at + found);
  }
  return found;
}

/* The same, for bits of which most words have none. */
TX_FN int32_t tx_delta_list_few(const uint64_t *bits, int64_t n, uint16_t *at) {
  int32_t found = 0;
  for (int64_t w = 0; 64 * w < n; w++) {
    for (uint64_t hits = bits[w]; hits; hits &= hits - 1u)
      at[found++] = (uint16_t)(64 * w + __builtin_ctzll(hits));
  }
  return found;
}

#endif
