/* A tile of Muon's momentum with AVX-512: gradients and momentum in bf16, as words of two, so that nothing crosses
 * lanes until the work is written. It computes as if no gradient needed the clamp and nothing were Inf or NaN. It
 * detects both, and keeps the words that it read. Included by loop_muon.h. */
#ifndef TX_CPU_AVX512_MUON_H
#define TX_CPU_AVX512_MUON_H

#include <immintrin.h>

#include "csrc/cpu/avx512_changes.h"
#include "csrc/cpu/kernels.h"
#include "csrc/cpu/muon_ahead.h"
#include "csrc/cpu/stream_store.h"
#include "csrc/math/dither.h"
#include "csrc/math/muon.h"

/* Elements of a row, two per word. */
#define TX_MUON_LANES 32
#define TX_MUON_WORDS (TX_MUON_LANES / 2)
#define TX_MUON_ROWS ((int32_t)TX_TILE / TX_MUON_LANES)

/* Momentum words before the step. */
typedef struct tx_avx512_muon_kept {
  uint32_t words[TX_TILE / 2];
} __attribute__((aligned(64))) tx_avx512_muon_kept;

TX_FN void tx_avx512_muon_put(void *to, __m512i x, const int streams) {
  if (streams) {
    _mm512_stream_si512((__m512i *)to, x);
  } else {
    _mm512_storeu_si512(to, x);
  }
}

/* u[0] and u[1] as words of bf16, nearest even. *special: lanes in which the result may be wrong (round_bf16.h). */
TX_FN __m512i tx_avx512_muon_nearest(const __m512 u[2], __mmask16 *special) {
#if defined(__AVX512BF16__)
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512bh both = _mm512_cvtne2ps_pbh(u[1], u[0]);
  *special = _kor_mask16(*special, _kor_mask16(_mm512_fpclass_ps_mask(u[0], 0x20), _mm512_fpclass_ps_mask(u[1], 0x20)));
  __m512i words;
  memcpy(&words, &both, sizeof words);
  return _mm512_permutexvar_epi16(order, words);
#else
  (void)special;
  return tx_avx512_join_upper(tx_avx512_nearest_upper(u[0]), tx_avx512_nearest_upper(u[1]));
#endif
}

/* Stores a row of the work; u[k]: its elements 2 * i + k. */
TX_FN void tx_avx512_muon_work(const __m512 u[2], char *work, int32_t row, const tx_dtype dtype, const int streams,
                               __mmask16 *special) {
  if (dtype == TX_BF16) {
    tx_avx512_muon_put(work + 64 * row, tx_avx512_muon_nearest(u, special), streams);
    return;
  }
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  tx_avx512_muon_put(work + 128 * row, tx_avx512_bits(_mm512_permutex2var_ps(u[0], low, u[1])), streams);
  tx_avx512_muon_put(work + 128 * row + 64, tx_avx512_bits(_mm512_permutex2var_ps(u[0], high, u[1])), streams);
}

/* Whether no gradient of a tile needs the clamp. */
static __attribute__((noinline)) int tx_avx512_muon_is_within(const char *grad, float factor) {
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
  __m512 largest = _mm512_setzero_ps();
  for (int32_t row = 0; row < TX_MUON_ROWS; row++) {
    const __m512i grads = _mm512_loadu_si512(grad + 64 * row);
    const __m512 first = tx_avx512_f32(_mm512_slli_epi32(grads, 16));
    const __m512 second = tx_avx512_f32(_mm512_and_si512(grads, upper));
    largest = _mm512_range_ps(largest, _mm512_range_ps(first, second, 0x0b), 0x0b); /* of magnitudes */
  }
  const __m512 most = _mm512_mul_ps(_mm512_set1_ps(factor), largest);
  return _mm512_cmp_ps_mask(_mm512_abs_ps(most), _mm512_set1_ps(tx_adamw_grad_limit()), _CMP_LE_OQ) == 0xffffu;
}

/* Steps a whole tile. threshold: of its first element. Returns whether the result is right; if not, momentum and work
 * are undefined. */
TX_FN int tx_avx512_muon_tile(const tx_muon_constants *c, const char *grad, char *momentum, char *work,
                              uint32_t threshold, int nesterov, const tx_dtype work_dtype, const int streams,
                              tx_avx512_muon_kept *kept) {
  const __m512 factor = _mm512_set1_ps(c->factor), weight = _mm512_set1_ps(c->average.weight);
  const __m512 of_u = _mm512_set1_ps(nesterov ? c->average.weight : 0.0f); /* 0: u is m' */
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
  const __m512i step = _mm512_set1_epi32((int)(TX_MUON_LANES * TX_LATTICE_ELEMENT));
  const __m512i lane = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i of_lane = _mm512_mullo_epi32(lane, _mm512_set1_epi32((int)TX_LATTICE_ELEMENT));
  __m512i ramp[2], seen = _mm512_setzero_si512();
  __m512 sizes[2]; /* sums of u * 2^64: not finite if a |u| is 2^64 or more, Inf or NaN */
  __mmask16 special = 0;
  for (int k = 0; k < 2; k++) {
    ramp[k] = _mm512_add_epi32(of_lane, _mm512_set1_epi32((int)(threshold + (uint32_t)k * TX_LATTICE_ELEMENT)));
    sizes[k] = _mm512_setzero_ps();
  }
  for (int32_t row = 0; row < TX_MUON_ROWS; row++) {
    _mm_prefetch(grad + 64 * row + TX_MUON_AHEAD, _MM_HINT_T0);
    _mm_prefetch(momentum + 64 * row + TX_MUON_AHEAD, _MM_HINT_T0);
    const __m512i grads = _mm512_loadu_si512(grad + 64 * row), read = _mm512_loadu_si512(momentum + 64 * row);
    _mm512_store_si512(&kept->words[TX_MUON_WORDS * row], read);
    seen = _mm512_or_si512(seen, grads);
    const __m512 gs[2] = {tx_avx512_f32(_mm512_slli_epi32(grads, 16)), tx_avx512_f32(_mm512_and_si512(grads, upper))};
    const __m512 ms[2] = {tx_avx512_f32(_mm512_slli_epi32(read, 16)), tx_avx512_f32(_mm512_and_si512(read, upper))};
    __m512 u[2];
    __m512i next[2];
    for (int k = 0; k < 2; k++) {
      const __m512 g = _mm512_mul_ps(factor, gs[k]);
      const __m512 m = _mm512_add_ps(ms[k], _mm512_mul_ps(weight, _mm512_sub_ps(g, ms[k])));
      u[k] = _mm512_add_ps(m, _mm512_mul_ps(of_u, _mm512_sub_ps(g, m)));
      sizes[k] = _mm512_fmadd_ps(u[k], _mm512_set1_ps(0x1p64f), sizes[k]);
      next[k] = _mm512_add_epi32(tx_avx512_bits(m), _mm512_srli_epi32(ramp[k], 16));
      ramp[k] = _mm512_add_epi32(ramp[k], step);
    }
    _mm512_storeu_si512(momentum + 64 * row, tx_avx512_join_upper(next[0], next[1]));
    tx_avx512_muon_work(u, work, row, work_dtype, streams, &special);
  }
  if (special || _mm512_fpclass_ps_mask(_mm512_add_ps(sizes[0], sizes[1]), 0x99)) return 0; /* NaN, Inf */
  /* the exponent's upper bit is set in magnitudes of 2 and more */
  const int small = _mm512_test_epi32_mask(seen, _mm512_set1_epi32(0x40004000)) == 0 && fabsf(c->factor) <= 0x1p62f;
  return small || tx_avx512_muon_is_within(grad, c->factor);
}

#endif
