/* Steps weights with remainders with AVX-512, as tx_step_remainders does: 32 at a time, as words of two, so that
 * nothing crosses lanes. A masked byte shuffle replaces a shift and a selection. Rare patterns are detected by
 * comparisons under the mask of the earlier comparisons. Included by avx512_changes.h. */
#ifndef TX_CPU_AVX512_WEIGHTS_H
#define TX_CPU_AVX512_WEIGHTS_H

#include <immintrin.h>

#include "csrc/cpu/lanes.h"
#include "csrc/math/adamw.h"

TX_FN __m512 tx_avx512_f32(__m512i bits) {
  return _mm512_castsi512_ps(bits);
}
TX_FN __m512i tx_avx512_bits(__m512 x) {
  return _mm512_castps_si512(x);
}

/* The larger magnitude of the two; NaNs are ignored. */
TX_FN __m512 tx_avx512_farther(__m512 a, __m512 b) {
  return _mm512_range_ps(a, b, 0xb);
}

/* Byte orders for a shuffle that moves upper halves of words down, and lower halves up. */
#define TX_AVX512_DOWN _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302)
#define TX_AVX512_UP _mm512_set4_epi32(0x0d0c0d0c, 0x09080908, 0x05040504, 0x01000100)
#define TX_AVX512_LOWER_BYTES 0x3333333333333333u
/* tx_join_upper and tx_join_lower. */
TX_FN __m512i tx_avx512_join_upper(__m512i first, __m512i second) {
  return _mm512_mask_shuffle_epi8(second, TX_AVX512_LOWER_BYTES, first, TX_AVX512_DOWN);
}
TX_FN __m512i tx_avx512_join_lower(__m512i first, __m512i second) {
  return _mm512_mask_shuffle_epi8(first, ~TX_AVX512_LOWER_BYTES, second, TX_AVX512_UP);
}

/* The constants in every lane; loading one costs less than broadcasting it. */
typedef struct tx_avx512_constants {
  __m512 factor, m_weight, v_weight, rsqrt_bc2, eps, step_size, decay;
} tx_avx512_constants;

TX_FN tx_avx512_constants tx_avx512_constants_of(const tx_adamw_constants *c) {
  const tx_avx512_constants w = {_mm512_set1_ps(c->factor),
                                 _mm512_set1_ps(c->exp_avg.weight),
                                 _mm512_set1_ps(c->exp_avg_sq.weight),
                                 _mm512_set1_ps(c->rsqrt_bc2),
                                 _mm512_set1_ps(c->eps),
                                 _mm512_set1_ps(c->step_size),
                                 _mm512_set1_ps(c->decay)};
  return w;
}

/* Unrounded moments of a run of elements: that of element 2 * i + k, or with fp32 weights of element 16 * k + i, is at
 * [k * stride + i]. */
typedef struct tx_avx512_moment_tile {
  const float *m, *root;
  int32_t stride;
} tx_avx512_moment_tile;
TX_FN tx_avx512_moment_tile tx_avx512_moments_on(tx_avx512_moment_tile t, int32_t by) {
  return (tx_avx512_moment_tile){t.m + by, t.root + by, t.stride};
}

/* The rare patterns that were met. Ties are recorded by the functions that step weights, NaN by their callers. */
typedef struct tx_avx512_watch {
  __mmask32 untied;   /* cleared for remainders that were -32768, as read or as written */
  __mmask16 ordinary; /* cleared for NaN masters; a master with another sign than its weight has a NaN's pattern */
} tx_avx512_watch;

TX_FN tx_avx512_watch tx_avx512_watch_begin(void) {
  const tx_avx512_watch watch = {0xffffffffu, 0xffffu};
  return watch;
}
/* x: the masters of the first and second elements of pairs. */
TX_FN void tx_avx512_watch_numbers(tx_avx512_watch *watch, const __m512 x[2]) {
  watch->ordinary = _mm512_mask_cmp_ps_mask(watch->ordinary, x[0], x[1], _CMP_ORD_Q);
}
TX_FN int tx_avx512_watch_is_quiet(tx_avx512_watch watch) {
  return (watch.untied == 0xffffffffu) & (watch.ordinary == 0xffffu);
}

/* 32 stepped elements: which weights changed; the masters of the first and second elements of each pair; upper: words
 * of the new masters' upper halves. */
typedef struct tx_avx512_stepped {
  __mmask32 changed;
  __m512 before[2], now[2];
  __m512i upper;
} tx_avx512_stepped;

/* The quotients of tx_adamw_update for the first and second elements of each word's pair. */
typedef struct tx_avx512_quotients {
  __m512 of[2];
} tx_avx512_quotients;
TX_FN tx_avx512_quotients tx_avx512_divide(const tx_avx512_constants *c, tx_avx512_moment_tile tile) {
  /* breadth first: the step is bound by what waits in the processor's scheduler */
  tx_avx512_quotients q;
  for (int k = 0; k < 2; k++)
    q.of[k] = _mm512_mul_ps(_mm512_loadu_ps(tile.root + k * tile.stride), c->rsqrt_bc2);
  for (int k = 0; k < 2; k++)
    q.of[k] = _mm512_div_ps(_mm512_loadu_ps(tile.m + k * tile.stride), _mm512_add_ps(q.of[k], c->eps));
  return q;
}

/* Returns the quotients that were started last, and starts those of `ahead`, unless it is NULL: the divider works on
 * them while the caller uses the returned ones. */
TX_FN tx_avx512_quotients tx_avx512_take(const tx_avx512_constants *c, tx_avx512_quotients *started,
                                         const tx_avx512_moment_tile *ahead) {
  const tx_avx512_quotients q = *started;
  if (ahead) *started = tx_avx512_divide(c, *ahead);
  __asm__ volatile("" : "+v"(started->of[0]), "+v"(started->of[1])); /* now, not where it is used */
  return q;
}

/* tx_adamw_apply of masters p. */
TX_FN void tx_avx512_move(const tx_avx512_constants *c, tx_avx512_quotients q, const __m512 p[2], __m512 x[2]) {
  for (int k = 0; k < 2; k++)
    x[k] = _mm512_add_ps(_mm512_mul_ps(c->step_size, q.of[k]), _mm512_mul_ps(c->decay, p[k]));
  for (int k = 0; k < 2; k++)
    x[k] = _mm512_sub_ps(p[k], x[k]);
}

/* Steps the words param[0 ... 15] and remainder[0 ... 15], and copies the old ones to kept_param and kept_remainder. */
TX_FN tx_avx512_stepped tx_avx512_weights(const tx_avx512_constants *c, void *param, void *remainder,
                                          tx_avx512_quotients q, tx_avx512_watch *watch, uint32_t *kept_param,
                                          uint32_t *kept_remainder) {
  const __m512i tie = _mm512_set1_epi16((short)0x8000);
  const __m512i weights = _mm512_loadu_si512(param), read = _mm512_loadu_si512(remainder);
  _mm512_store_si512(kept_param, weights);
  _mm512_store_si512(kept_remainder, read);
  watch->untied = _mm512_mask_cmpneq_epi16_mask(watch->untied, read, tie);
  /* a negative remainder takes one from the upper half */
  const __m512i uppers = _mm512_add_epi16(weights, _mm512_srai_epi16(read, 15));
  const __m512 p[2] = {tx_avx512_f32(tx_avx512_join_lower(read, uppers)),
                       tx_avx512_f32(tx_avx512_join_upper(read, uppers))};
  __m512 x[2];
  tx_avx512_move(c, q, p, x);
  const __m512i first = tx_avx512_bits(x[0]), second = tx_avx512_bits(x[1]);
  const __m512i written = tx_avx512_join_lower(first, second), upper = tx_avx512_join_upper(first, second);
  const __m512i stored = _mm512_add_epi16(upper, _mm512_srli_epi16(written, 15));
  _mm512_storeu_si512(param, stored);
  _mm512_storeu_si512(remainder, written);
  watch->untied = _mm512_mask_cmpneq_epi16_mask(watch->untied, written, tie);
  return (tx_avx512_stepped){_mm512_cmpneq_epi16_mask(weights, stored), {p[0], p[1]}, {x[0], x[1]}, upper};
}

/* The first (k = 0) or second (k = 1) elements of each pair, from 32 numbers in the order of memory. */
TX_FN __m512 tx_avx512_unzip(__m512 low, __m512 high, const int k) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  return _mm512_permutex2var_ps(low, k == 0 ? even : odd, high);
}

/* The inverse: half h of 32 numbers in the order of memory, from the first and second elements of each pair. */
TX_FN __m512 tx_avx512_zip(const __m512 x[2], const int h) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  return _mm512_permutex2var_ps(x[0], h == 0 ? low : high, x[1]);
}

/* The pattern whose upper half is x rounded to nearest even. */
TX_FN __m512i tx_avx512_nearest_upper(__m512 x) {
  const __m512i bits = tx_avx512_bits(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
}

/* Words of two masters, not NaN, rounded to nearest even, from words of their lower and of their upper halves: up if
 * the lower half, plus one for an odd upper half, is more than 0x8000. */
TX_FN __m512i tx_avx512_nearest(__m512i lower, __m512i upper) {
  const __m512i rest = _mm512_adds_epu16(lower, _mm512_and_si512(upper, _mm512_set1_epi16(1)));
  const __mmask32 up = _mm512_cmpgt_epu16_mask(rest, _mm512_set1_epi16((short)0x8000));
  return _mm512_mask_sub_epi16(upper, up, upper, _mm512_set1_epi16(-1));
}

/* tx_avx512_weights with 32 fp32 masters; copies the old ones to `kept`. */
TX_FN tx_avx512_stepped tx_avx512_masters(const tx_avx512_constants *c, void *param, void *master,
                                          tx_avx512_quotients q, float *kept) {
  const __m512 low = _mm512_loadu_ps(master), high = _mm512_loadu_ps((const char *)master + 64);
  _mm512_store_ps(kept, low);
  _mm512_store_ps(kept + 16, high);
  const __m512 p[2] = {tx_avx512_unzip(low, high, 0), tx_avx512_unzip(low, high, 1)};
  __m512 x[2];
  tx_avx512_move(c, q, p, x);
  _mm512_storeu_ps(master, tx_avx512_zip(x, 0));
  _mm512_storeu_ps((char *)master + 64, tx_avx512_zip(x, 1));
  const __m512i a = tx_avx512_bits(p[0]), b = tx_avx512_bits(p[1]);
  const __m512i weights = tx_avx512_nearest(tx_avx512_join_lower(a, b), tx_avx512_join_upper(a, b));
  const __m512i first = tx_avx512_bits(x[0]), second = tx_avx512_bits(x[1]);
  const __m512i upper = tx_avx512_join_upper(first, second);
  const __m512i stored = tx_avx512_nearest(tx_avx512_join_lower(first, second), upper);
  _mm512_storeu_si512(param, stored);
  return (tx_avx512_stepped){_mm512_cmpneq_epi16_mask(weights, stored), {p[0], p[1]}, {x[0], x[1]}, upper};
}

#endif
