/* The step with everything in fp32. Included by loop_adamw.h. */
#ifndef TX_CPU_STEP_FP32_H
#define TX_CPU_STEP_FP32_H

#include "csrc/cpu/step_weights.h"
#if TX_HAS_AVX512
#include "csrc/cpu/avx512_singles.h"
#endif

/* Whether no g of elements at ... end - 1 needs the clamp (tx_adamw_clamped). */
TX_FN int tx_step_fp32_is_within(tx_adamw_within within, tx_step_streams s, int32_t at, int32_t end, const int l2) {
  return tx_are_within(s.grad, at, end - at, within.grad, TX_F32) &&
         (!l2 || tx_are_within(s.param, at, end - at, within.p, TX_F32));
}

/* Moments of elements at ... end - 1, all in fp32, and their roots. usual, root: see tx_step_fp32. within: whether no g
 * needs the clamp. */
TX_FN void tx_step_fp32_moments(tx_adamw_constants c, tx_step_streams s, int32_t at, int32_t end, float *roots,
                                const int usual, const int root, const int within) {
  for (int32_t group = at; group < end; group += 2 * TX_GROUP) {
    tx_prefetch(s.grad, group, 2 * TX_GROUP, TX_F32);
    tx_prefetch(s.exp_avg, group, 2 * TX_GROUP, TX_F32);
    tx_prefetch(s.exp_avg_sq, group, 2 * TX_GROUP, TX_F32);
    TX_NO_ALIASES
    for (int32_t j = 0; j < 2 * TX_GROUP; j++) {
      const int32_t i = group + j;
      const float g = tx_load(s.grad, i, TX_F32), p = tx_load(s.param, i, TX_F32);
      const float m = tx_load(s.exp_avg, i, TX_F32), v = tx_load(s.exp_avg_sq, i, TX_F32);
      const tx_adamw_moments r =
          within ? tx_adamw_average_within(c, usual, g, p, m, v) : tx_adamw_average(c, g, p, m, v);
      tx_store(s.exp_avg, i, TX_F32, r.m);
      tx_store(s.exp_avg_sq, i, TX_F32, root ? r.root : r.v);
      roots[i - at] = r.root;
    }
  }
}

/* The same for any gradients and constants. */
static __attribute__((noinline)) void tx_step_fp32_moments_any(const tx_adamw_constants *c, const tx_step_streams *s,
                                                               int32_t at, int32_t end, float *roots, int root) {
  tx_step_fp32_moments(*c, *s, at, end, roots, 0, root, 0);
}

/* Weights of elements at ... end - 1. */
TX_FN void tx_step_fp32_weights(tx_adamw_constants c, tx_step_streams s, int32_t at, int32_t end, const float *roots,
                                tx_tile_found *found, const int32_t finds) {
  tx_finding finding;
  int all = 1;
  for (int32_t group = at; group < end; group += 2 * TX_GROUP) {
    const int32_t in_block = (group - at) % TX_BLOCK;
    if (in_block == 0) tx_find_begin(&finding, finds);
    tx_prefetch(s.param, group, 2 * TX_GROUP, TX_F32);
    TX_NO_ALIASES
    for (int32_t j = 0; j < 2 * TX_GROUP; j++) {
      const int32_t i = group + j;
      const float m = tx_load(s.exp_avg, i, TX_F32), before = tx_load(s.param, i, TX_F32);
      const float p = tx_adamw_update(c, before, m, roots[i - at]);
      tx_store(s.param, i, TX_F32, p);
      if (finds != TX_FIND_NOTHING) {
        finding.differ[in_block + j] = tx_bits_from_f32(before) != tx_bits_from_f32(p);
        tx_find(&finding, j, 0, before, p, TX_F32, 1, finds);
      }
    }
    if (finds != TX_FIND_NOTHING && in_block + 2 * TX_GROUP == TX_BLOCK)
      all &= tx_find_end(&finding, &found->blocks[(group - at) / TX_BLOCK], 1, finds);
  }
  if (finds != TX_FIND_NOTHING) found->all = all;
}
#if !TX_HAS_AVX512
static __attribute__((noinline)) void tx_step_fp32_changed(const tx_adamw_constants *c, const tx_step_streams *s,
                                                           int32_t at, int32_t end, const float *roots,
                                                           tx_tile_found *found) {
  tx_step_fp32_weights(*c, *s, at, end, roots, found, TX_FIND_CHANGED);
}
#endif

/* Weights of elements at ... end - 1, and the extra outputs. */
TX_FN void tx_step_fp32_tile(tx_adamw_constants c, tx_step_streams s, int32_t at, int32_t end, const float *roots) {
  const int32_t finds = tx_finds(s.extras);
#if TX_HAS_AVX512
  if (finds != TX_FIND_NOTHING) {
    tx_avx512_singles_loops[finds](&c, &s, at, end, roots);
    return;
  }
#endif
  tx_step_copy before;
  const tx_weights kept = tx_keep_weights(s, at, end - at, &before, TX_F32, TX_NONE);
#if !TX_HAS_AVX512
  if (finds == TX_FIND_CHANGED) { /* for health measurement, finding within the loop gained nothing */
    tx_tile_found found;
    tx_step_fp32_changed(&c, &s, at, end, roots, &found);
    tx_note_tile(s, &found, kept, at, end - at, TX_F32, TX_NONE);
    return;
  }
#endif
  tx_step_fp32_weights(c, s, at, end, roots, NULL, TX_FIND_NOTHING);
  if (s.extras) tx_note_stepped(s, kept, at, end - at, TX_F32, TX_NONE);
}

/* usual: tx_adamw_is_usual of the constants, or 0; it changes no bit. root: whether exp_avg_sq receives the square
 * root. n: a multiple of 2 * TX_GROUP. */
TX_FN void tx_step_fp32(tx_adamw_constants c, tx_step_streams s, int32_t n, const int usual, const int root) {
  const tx_adamw_within within = tx_adamw_within_of(&c);
  float roots[TX_STEP_TILE];
  for (int32_t at = 0; at < n; at += TX_STEP_TILE) {
    const int32_t end = n - at < TX_STEP_TILE ? n : at + TX_STEP_TILE;
    if (__builtin_expect(tx_step_fp32_is_within(within, s, at, end, !usual && c.l2 != 0.0f), 1)) {
      tx_step_fp32_moments(c, s, at, end, roots, usual, root, 1);
    } else {
      tx_step_fp32_moments_any(&c, &s, at, end, roots, root);
    }
    tx_step_fp32_tile(c, s, at, end, roots);
  }
}

#endif
