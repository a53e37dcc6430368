/* Updates the EMA with AVX-512, from registers of the loop that steps the masters: tx_average_some of a block in which
 * no average is NaN, Inf or nearly that large. Included by avx512_block.h. */
#ifndef TX_CPU_AVX512_EMA_H
#define TX_CPU_AVX512_EMA_H

#include "csrc/cpu/avx512_ramp.h"
#include "csrc/cpu/avx512_weights.h"
#include "csrc/cpu/step_extras.h"

/* The tasks that a loop can do while it steps weights. */
#define TX_FOR_EACH_AVX512_FIND(X) X(FIND_CHANGED) X(FIND_MEASURED) X(FIND_BOTH)
#define TX_FOR_EACH_AVX512_TASK(X) TX_FOR_EACH_AVX512_FIND(X) X(AVERAGE_BF16) X(AVERAGE_24) X(AVERAGE_F32)
enum { TX_AVERAGE_BF16 = TX_FIND_BOTH + 1, TX_AVERAGE_24, TX_AVERAGE_F32, TX_AVX512_TASKS };

/* A block's new averages, kept until it is known that nothing in the block is rare. upper: the averages' upper halves
 * as words of two, or the fp32 averages of each half of a run; low: the next lower bytes. */
typedef struct tx_avx512_averages {
  __m512i upper[TX_BLOCK / 32][2];
  __m256i low[TX_BLOCK / 32];
  __mmask16 ordinary; /* lanes in which no average is too large or NaN */
} tx_avx512_averages;

TX_FN tx_avx512_averages tx_avx512_averages_begin(void) {
  tx_avx512_averages a;
  a.ordinary = 0xffffu;
  return a;
}

/* Clears in `mask` the lanes in which size > most or an x is NaN. size >= 0. */
TX_FN __mmask16 tx_avx512_within(__mmask16 mask, __m512 size, float most, const __m512 x[2]) {
  mask = _mm512_mask_cmp_ps_mask(mask, size, _mm512_set1_ps(most), _CMP_LE_OQ);
  return _mm512_mask_cmp_ps_mask(mask, x[0], x[1], _CMP_ORD_Q);
}

/* tx_ema_change. */
TX_FN __m512 tx_avx512_ema_change(__m512 weight, __m512 old, __m512 now) {
  return _mm512_mul_ps(weight, _mm512_sub_ps(now, old));
}

/* Thresholds of elements 2 * p + k of run `run`. */
TX_FN __m512i tx_avx512_threshold(__m512i u, const int32_t run, const int k) {
  return _mm512_add_epi32(u, _mm512_load_si512(&tx_avx512_ramp[k][16 * run]));
}

/* tx_bf16_round of tx_ema_next. */
TX_FN void tx_avx512_average_bf16(tx_avx512_averages *a, const void *emas, __m512 weight, __m512i u, const int32_t run,
                                  const __m512 now[2]) {
  const __m512i read = _mm512_loadu_si512((const char *)emas + 64 * run);
  const __m512 old[2] = {tx_avx512_f32(_mm512_slli_epi32(read, 16)),
                         tx_avx512_f32(_mm512_and_si512(read, _mm512_set1_epi32((int32_t)0xffff0000)))};
  __m512 sum[2];
  __m512i bits[2];
  for (int k = 0; k < 2; k++) {
    sum[k] = _mm512_add_ps(old[k], tx_avx512_ema_change(weight, old[k], now[k]));
    bits[k] = _mm512_add_epi32(tx_avx512_bits(sum[k]), _mm512_srli_epi32(tx_avx512_threshold(u, run, k), 16));
  }
  a->ordinary = tx_avx512_within(a->ordinary, tx_avx512_farther(sum[0], sum[1]), 0x1.fep127f, sum);
  a->upper[run][0] = tx_avx512_join_upper(bits[0], bits[1]);
}

/* tx_ema_round_24, for lanes that pass tx_avx512_within. */
TX_FN __m512i tx_avx512_round_24(__m512 old, __m512 change, __m512 sum, __m512i u) {
  const __m512i exponents = _mm512_set1_epi32(0x7f800000);
  const __m512i bits = tx_avx512_bits(sum), exponent = _mm512_and_si512(bits, exponents);
  const __m512 from_change = _mm512_sub_ps(sum, old);
  const __m512 error =
      _mm512_add_ps(_mm512_sub_ps(old, _mm512_sub_ps(sum, from_change)), _mm512_sub_ps(change, from_change));
  /* error ^ (bits & sign) */
  const __m512i away =
      _mm512_ternarylogic_epi32(tx_avx512_bits(error), bits, _mm512_set1_epi32((int32_t)0x80000000), 0x78);
  const __mmask16 is_large = _mm512_cmp_epi32_mask(exponent, _mm512_set1_epi32(39 << 23), _MM_CMPINT_NLT);
  const __m512i scale = _mm512_maskz_sub_epi32(is_large, _mm512_set1_epi32((int32_t)(293u << 23)), exponent);
  const __m512i missing = _mm512_cvttps_epi32(_mm512_mul_ps(tx_avx512_f32(away), tx_avx512_f32(scale)));
  const __m512i parts = _mm512_srai_epi32(_mm512_add_epi32(missing, _mm512_srli_epi32(u, 8)), 16);
  return _mm512_add_epi32(bits, parts);
}

TX_FN void tx_avx512_average_24(tx_avx512_averages *a, const void *emas, const uint8_t *lows, __m512 weight, __m512i u,
                                const int32_t run, const __m512 now[2]) {
  const __m512i first_byte = _mm512_set1_epi32(0xff00), second_byte = _mm512_set1_epi32(0xff00);
  const __m512i read = _mm512_loadu_si512((const char *)emas + 64 * run);
  const __m512i low =
      _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(lows + 32 * run))); /* of both */
  /* upper | (low & mask) */
  const __m512 old[2] = {tx_avx512_f32(_mm512_ternarylogic_epi32(_mm512_slli_epi32(read, 16), _mm512_slli_epi32(low, 8),
                                                                 first_byte, 0xf8)),
                         tx_avx512_f32(_mm512_ternarylogic_epi32(
                             _mm512_and_si512(read, _mm512_set1_epi32((int32_t)0xffff0000)), low, second_byte, 0xf8))};
  __m512 sum[2], size[2];
  __m512i bits[2];
  for (int k = 0; k < 2; k++) {
    const __m512 change = tx_avx512_ema_change(weight, old[k], now[k]);
    sum[k] = _mm512_add_ps(old[k], change);
    size[k] = tx_avx512_farther(old[k], sum[k]); /* with `old`: the error's sums do not overflow either */
    bits[k] = tx_avx512_round_24(old[k], change, sum[k], tx_avx512_threshold(u, run, k));
  }
  a->ordinary = tx_avx512_within(a->ordinary, tx_avx512_farther(size[0], size[1]), 0x1p126f, sum);
  a->upper[run][0] = tx_avx512_join_upper(bits[0], bits[1]);
  /* (first >> 8 & 0xff) | (second & 0xff00) */
  const __m512i both = _mm512_ternarylogic_epi32(_mm512_srli_epi32(bits[0], 8), bits[1], _mm512_set1_epi32(0xff), 0xe4);
  a->low[run] = _mm512_cvtepi32_epi16(both);
}

/* tx_ema_next of fp32 averages, in the order of memory. */
TX_FN void tx_avx512_average_f32(tx_avx512_averages *a, const void *emas, __m512 weight, const int32_t run,
                                 const __m512 now[2]) {
  for (int h = 0; h < 2; h++) {
    const __m512 to = tx_avx512_zip(now, h);
    const __m512 old = _mm512_loadu_ps((const char *)emas + 128 * run + 64 * h);
    a->upper[run][h] = tx_avx512_bits(_mm512_add_ps(old, tx_avx512_ema_change(weight, old, to)));
  }
}

/* Updates run 0 ... 3 of the block at element `at` of the piece. */
TX_FN void tx_avx512_average(tx_avx512_averages *a, const tx_step_extras *e, int64_t at, const int32_t run,
                             const __m512 now[2], const int32_t task) {
  const __m512 weight = _mm512_set1_ps(e->ema_weight);
  const __m512i u = _mm512_set1_epi32((int32_t)tx_dithered(e->ema_u, (uint32_t)at));
  const char *const emas = (const char *)e->ema + at * (task == TX_AVERAGE_F32 ? 4 : 2);
  for (int32_t byte = 0; byte < (task == TX_AVERAGE_F32 ? 128 : 64); byte += 64)
    __builtin_prefetch(emas + TX_EMA_AHEAD + (task == TX_AVERAGE_F32 ? 128 : 64) * run + byte);
  if (task == TX_AVERAGE_24 && run % 2 == 0) __builtin_prefetch(e->ema_low + at + TX_EMA_AHEAD + 32 * run);
  if (task == TX_AVERAGE_BF16) tx_avx512_average_bf16(a, emas, weight, u, run, now);
  if (task == TX_AVERAGE_24) tx_avx512_average_24(a, emas, e->ema_low + at, weight, u, run, now);
  if (task == TX_AVERAGE_F32) tx_avx512_average_f32(a, emas, weight, run, now);
}

/* Stores the averages of the block; only if all lanes are ordinary. */
TX_FN void tx_avx512_store_averages(const tx_avx512_averages *a, const tx_step_extras *e, int64_t at,
                                    const int32_t task) {
  char *const emas = (char *)e->ema + at * (task == TX_AVERAGE_F32 ? 4 : 2);
#pragma GCC unroll 4
  for (int32_t run = 0; run < TX_BLOCK / 32; run++) {
    for (int32_t h = 0; h < (task == TX_AVERAGE_F32 ? 2 : 1); h++)
      _mm512_storeu_si512(emas + (task == TX_AVERAGE_F32 ? 128 : 64) * run + 64 * h, a->upper[run][h]);
    if (task == TX_AVERAGE_24) _mm256_storeu_si256((__m256i *)(void *)(e->ema_low + at + 32 * run), a->low[run]);
  }
}

#endif
