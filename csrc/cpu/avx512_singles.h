/* Steps fp32 weights with AVX-512 if there are extra outputs; otherwise the plain loop is as fast. Included by
 * step_fp32.h. */
#ifndef TX_CPU_AVX512_SINGLES_H
#define TX_CPU_AVX512_SINGLES_H

#include "csrc/cpu/avx512_block.h"

/* Steps 32 weights, and copies the old ones to `kept`. */
TX_FN tx_avx512_stepped tx_avx512_singles(const tx_avx512_constants *c, float *param, tx_avx512_quotients q,
                                          float *kept) {
  const __m512 p[2] = {_mm512_loadu_ps(param), _mm512_loadu_ps(param + 16)};
  __m512 x[2];
  tx_avx512_move(c, q, p, x);
  __mmask16 changed[2];
  for (int k = 0; k < 2; k++) {
    _mm512_store_ps(kept + 16 * k, p[k]);
    _mm512_storeu_ps(param + 16 * k, x[k]);
    changed[k] = _mm512_cmpneq_epi32_mask(tx_avx512_bits(p[k]), tx_avx512_bits(x[k]));
  }
  const __m512i upper = tx_avx512_join_upper(tx_avx512_bits(x[0]), tx_avx512_bits(x[1]));
  return (tx_avx512_stepped){_mm512_kunpackw(changed[1], changed[0]), {p[0], p[1]}, {x[0], x[1]}, upper};
}

/* Steps the block at element `at` of the streams. tile, started: see tx_avx512_block_weights. last: whether no block
 * follows. finds: see tx_finds. */
TX_FN void tx_avx512_singles_block(const tx_avx512_constants *c, tx_step_streams s, int64_t at,
                                   tx_avx512_moment_tile tile, tx_avx512_quotients *started, int last,
                                   const int32_t finds) {
  tx_avx512_found found = tx_avx512_found_begin(s.measured, finds);
  float kept[TX_BLOCK] __attribute__((aligned(64)));
  tx_avx512_watch watch = tx_avx512_watch_begin();
#pragma GCC unroll 4
  for (int32_t run = 0; run < TX_BLOCK / 32; run++) {
    const tx_avx512_moment_tile further = tx_avx512_moments_on(tile, 32 * (run + 1));
    const tx_avx512_quotients q = tx_avx512_take(c, started, run + 1 < TX_BLOCK / 32 || !last ? &further : NULL);
    tx_prefetch(s.param, at + 32 * run, 32, TX_F32);
    const tx_avx512_stepped stepped = tx_avx512_singles(c, (float *)s.param + at + 32 * run, q, &kept[32 * run]);
    if (!(finds & TX_FIND_MEASURED)) tx_avx512_watch_numbers(&watch, stepped.now);
    tx_avx512_find(&found, stepped, run, TX_F32, finds);
  }
  if (finds & TX_FIND_MEASURED) tx_avx512_watch_numbers(&watch, found.weights); /* NaN if a square was */
  if (__builtin_expect(!tx_avx512_watch_is_quiet(watch), 0)) {
    tx_note_stepped(s, (tx_weights){kept, NULL}, at, TX_BLOCK, TX_F32, TX_NONE);
    return;
  }
  tx_avx512_note_found(&found, s.extras, s.begin + at, s.measured, TX_F32, finds);
  if (s.extras->ema) tx_note_averages(s, at, TX_BLOCK, TX_F32, TX_NONE);
}

TX_FN void tx_avx512_singles_tile(const tx_adamw_constants *c, const tx_step_streams *s, int32_t at, int32_t end,
                                  const float *roots, const int32_t finds) {
  const tx_avx512_constants wide = tx_avx512_constants_of(c);
  const tx_avx512_moment_tile first = {(const float *)s->exp_avg + at, roots, 16};
  tx_avx512_quotients started = tx_avx512_divide(&wide, first);
  for (int32_t block = at; block < end; block += TX_BLOCK)
    tx_avx512_singles_block(&wide, *s, block, tx_avx512_moments_on(first, block - at), &started,
                            block + TX_BLOCK >= end, finds);
}

/* The weights of whole blocks, of elements at ... end - 1. One function for each task: in a common one, each would take
 * registers from the others. */
typedef void (*tx_avx512_singles_loop)(const tx_adamw_constants *c, const tx_step_streams *s, int32_t at, int32_t end,
                                       const float *roots);
#define TX_SINGLES_LOOP_(finds)                                                                             \
  static __attribute__((noinline)) void tx_avx512_singles_##finds(                                          \
      const tx_adamw_constants *c, const tx_step_streams *s, int32_t at, int32_t end, const float *roots) { \
    tx_avx512_singles_tile(c, s, at, end, roots, TX_##finds);                                               \
  }
TX_FOR_EACH_AVX512_FIND(TX_SINGLES_LOOP_)
#undef TX_SINGLES_LOOP_

#define TX_SINGLES_ENTRY_(finds) [TX_##finds] = tx_avx512_singles_##finds,
static const tx_avx512_singles_loop tx_avx512_singles_loops[] = {TX_FOR_EACH_AVX512_FIND(TX_SINGLES_ENTRY_)};
#undef TX_SINGLES_ENTRY_

#endif
