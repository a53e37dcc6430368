/* Changes and health measurements, found from registers while weights are stepped with AVX-512: tx_changes_of and
 * tx_measure_block of a block in which the watch met nothing rare. Included by avx512_block.h. */
#ifndef TX_CPU_AVX512_FOUND_H
#define TX_CPU_AVX512_FOUND_H

#include "csrc/cpu/avx512_measured.h"
#include "csrc/cpu/step_streams.h"

/* The findings of a block, collected while its four runs of 32 elements are stepped. */
typedef struct tx_avx512_found {
  __mmask32 changed[TX_BLOCK / 32];
  __m512 farthest;               /* the largest changes of masters */
  __m512 updates[2], weights[2]; /* tx_health_squares of the block; index k as in tx_avx512_stepped */
  __m512 largest;                /* of the piece */
  __mmask32 *moved, *below;      /* masks of the runs */
} tx_avx512_found;

TX_FN tx_avx512_found tx_avx512_found_begin(tx_measured_blocks *measured, const int32_t finds) {
  const __m512 none = _mm512_setzero_ps();
  tx_avx512_found found = {{0}, none, {none, none}, {none, none}, none, NULL, NULL};
  if (finds & TX_FIND_MEASURED) {
    found.largest = measured->largest;
    found.moved = &measured->moved[TX_BLOCK / 32 * measured->blocks];
    found.below = &measured->below[TX_BLOCK / 32 * measured->blocks];
  }
  return found;
}

/* Which updates are below half an ulp of their weight, from upper halves: those whose exponent, plus 1 and `digits`, is
 * not above the weight's pattern, and those whose exponent is 0. */
TX_FN __mmask32 tx_avx512_below(const __m512 updates[2], __m512i weights, const tx_dtype param) {
  const int32_t digits = param == TX_BF16 ? 8 : 24;
  const __m512i update = tx_avx512_join_upper(tx_avx512_bits(updates[0]), tx_avx512_bits(updates[1]));
  const __m512i exponent = _mm512_and_si512(update, _mm512_set1_epi16(0x7f80));
  const __m512i weight = _mm512_and_si512(weights, _mm512_set1_epi16(0x7fff));
  const __m512i most = _mm512_subs_epu16(weight, _mm512_set1_epi16((short)((1 + digits) << 7)));
  return _mm512_cmple_epu16_mask(exponent, most);
}

/* Keeps the compiler from moving a run's findings behind the block's last division, where nothing else is left to do
 * meanwhile. */
TX_FN void tx_avx512_find_here(tx_avx512_found *to) {
  __asm__ volatile("" : "+v"(to->updates[0]), "+v"(to->updates[1]), "+v"(to->weights[0]), "+v"(to->weights[1]));
  __asm__ volatile("" : "+v"(to->largest));
}

/* Adds run 0 ... 3 of the block. finds: see tx_finds. */
TX_FN void tx_avx512_find(tx_avx512_found *to, tx_avx512_stepped s, const int32_t run, const tx_dtype param,
                          const int32_t finds) {
  __m512 updates[2];
  for (int k = 0; k < 2; k++)
    updates[k] = _mm512_sub_ps(s.now[k], s.before[k]);
  if (finds & TX_FIND_CHANGED) {
    to->changed[run] = s.changed;
    for (int k = 0; k < 2; k++)
      to->farthest = tx_avx512_farther(to->farthest, updates[k]);
  }
  if (!(finds & TX_FIND_MEASURED)) return;
  for (int k = 0; k < 2; k++) {
    to->updates[k] = _mm512_fmadd_ps(updates[k], updates[k], to->updates[k]);
    to->weights[k] = _mm512_fmadd_ps(s.now[k], s.now[k], to->weights[k]);
    to->largest = tx_avx512_farther(to->largest, s.now[k]);
  }
  _store_mask32(&to->moved[run], s.changed);
  _store_mask32(&to->below[run], tx_avx512_below(updates, s.upper, param));
  tx_avx512_find_here(to);
}

/* Stores the findings of the block at element `at` of the piece. */
TX_FN void tx_avx512_note_found(const tx_avx512_found *found, const tx_step_extras *e, int64_t at,
                                tx_measured_blocks *measured, const tx_dtype param, const int32_t finds) {
  if (finds & TX_FIND_CHANGED) {
    uint64_t changed[TX_BLOCK / 64];
    for (int32_t k = 0; k < TX_BLOCK / 64; k++)
      changed[k] = (uint64_t)found->changed[2 * k] | (uint64_t)found->changed[2 * k + 1] << 32;
    const __m512i size = _mm512_and_si512(tx_avx512_bits(found->farthest), _mm512_set1_epi32(0x7fffffff));
    tx_note_changed(changed, TX_BLOCK, _mm512_reduce_max_epi32(size), e, at);
  }
  if (!(finds & TX_FIND_MEASURED)) return;
  measured->squares[measured->blocks++] = tx_avx512_squares(found->updates, found->weights, param);
  measured->largest = found->largest;
  if (measured->blocks == TX_AVX512_MEASURED) tx_avx512_add_measured(measured, e->health);
}

#endif
