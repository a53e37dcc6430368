/* What a loop for AVX-512 finds of the bf16 weights beside masters that it steps, from registers: tx_changes_of and
 * tx_measure_block of a block of which the watch found nothing rare. Included by step_plain.h. */
#ifndef TX_CPU_AVX512_FOUND_H
#define TX_CPU_AVX512_FOUND_H

#include "csrc/cpu/avx512_weights.h"
#include "csrc/cpu/step_streams.h"

/* Of a block, while its four runs of 32 elements are stepped. */
typedef struct tx_avx512_found {
  __mmask32 changed[TX_BLOCK / 32];
  __m512 moved, largest;
  __m512 updates[2][2], weights[2][2]; /* tx_health_squares: of half h, element 2 * p + k of a run in [h][k][p] */
  int32_t below;
} tx_avx512_found;

TX_FN tx_avx512_found tx_avx512_found_begin(void) {
  const __m512 none = _mm512_setzero_ps();
  const tx_avx512_found found = {{0}, none, none, {{none}}, {{none}}, 0};
  return found;
}

/* Which updates are below half an ulp of their weight: numbers are below a power of two where their upper halves are.
 */
TX_FN int32_t tx_avx512_below(const __m512 updates[2], const __m512 weights[2]) {
  const __m512i least = _mm512_set1_epi16((1 + 8) << 7), digits = _mm512_set1_epi16(8 << 7);
  const __m512i update = tx_avx512_join_upper(tx_avx512_bits(updates[0]), tx_avx512_bits(updates[1]));
  const __m512i weight = tx_avx512_join_upper(tx_avx512_bits(weights[0]), tx_avx512_bits(weights[1]));
  const __m512i exponent = _mm512_max_epi16(_mm512_and_si512(weight, _mm512_set1_epi16(0x7f80)), least);
  const __m512i size = _mm512_and_si512(update, _mm512_set1_epi16(0x7fff));
  return __builtin_popcount(_mm512_cmplt_epi16_mask(size, _mm512_sub_epi16(exponent, digits)));
}

/* Run 0 ... 3 of the block; found: TX_FIND_CHANGED or TX_FIND_MEASURED. */
TX_FN void tx_avx512_find(tx_avx512_found *to, tx_avx512_stepped s, const int32_t run, const int32_t finds) {
  __m512 updates[2];
  to->changed[run] = _mm512_cmpneq_epi16_mask(s.weights, s.stored);
  for (int k = 0; k < 2; k++) {
    updates[k] = _mm512_sub_ps(s.now[k], s.before[k]);
    to->moved = tx_avx512_farther(to->moved, updates[k]);
  }
  if (finds != TX_FIND_MEASURED) return;
  for (int k = 0; k < 2; k++) {
    __m512 *const u = &to->updates[run / 2][k], *const w = &to->weights[run / 2][k];
    *u = _mm512_add_ps(*u, _mm512_mul_ps(updates[k], updates[k]));
    *w = _mm512_add_ps(*w, _mm512_mul_ps(s.now[k], s.now[k]));
    to->largest = tx_avx512_farther(to->largest, s.now[k]);
  }
  to->below += tx_avx512_below(updates, s.now);
}

/* tx_squares_sum of each. */
TX_FN void tx_avx512_sums(const tx_avx512_found *found, float *updates, float *weights) {
  const __m512 u = _mm512_add_ps(_mm512_add_ps(found->updates[0][0], found->updates[1][0]),
                                 _mm512_add_ps(found->updates[0][1], found->updates[1][1]));
  const __m512 w = _mm512_add_ps(_mm512_add_ps(found->weights[0][0], found->weights[1][0]),
                                 _mm512_add_ps(found->weights[0][1], found->weights[1][1]));
  __m512 x = _mm512_add_ps(_mm512_shuffle_f32x4(u, w, 0x44), _mm512_shuffle_f32x4(u, w, 0xee)); /* 8 apart */
  x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));                                       /* 4 */
  x = _mm512_add_ps(x, _mm512_permute_ps(x, 0x4e));
  x = _mm512_add_ps(x, _mm512_permute_ps(x, 0xb1));
  *updates = _mm512_cvtss_f32(x);
  *weights = _mm_cvtss_f32(_mm512_extractf32x4_ps(x, 2));
}

TX_FN int32_t tx_avx512_size(__m512 sizes) {
  return _mm512_reduce_max_epi32(_mm512_and_si512(tx_avx512_bits(sizes), _mm512_set1_epi32(0x7fffffff)));
}

/* Of the block at s. */
TX_FN void tx_avx512_note_found(const tx_avx512_found *found, tx_step_streams s, const tx_dtype master,
                                const int32_t finds) {
  tx_found f = {{0, 0}, 0, {0.0f, 0.0f, 0, 0}};
  for (int32_t k = 0; k < TX_BLOCK / 64; k++)
    f.changed[k] = (uint64_t)found->changed[2 * k] | (uint64_t)found->changed[2 * k + 1] << 32;
  f.moved = tx_avx512_size(found->moved);
  if (finds == TX_FIND_MEASURED) {
    tx_avx512_sums(found, &f.measured.updates, &f.measured.weights);
    f.measured.below = found->below;
    f.measured.largest = tx_avx512_size(found->largest);
  }
  tx_note_found(&f, s.extras, s.begin);
  if (s.extras->ema) tx_note_averages(s, 0, TX_BLOCK, TX_BF16, master);
}

#endif
