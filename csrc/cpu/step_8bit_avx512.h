/* The step of (bf16 weights and gradients, 16-bit remainders, 8-bit moments) with AVX-512: the bits of step_8bit.h in
 * about two thirds of the time. A group of blocks goes through three loops: moments, bound by the square root; weights,
 * bound by the division; codes, whose plans are ready by then. With two of these in one loop, instructions that wait
 * for the divider would fill the scheduler. Included by loop_adamw.h. */
#ifndef TX_CPU_STEP_8BIT_AVX512_H
#define TX_CPU_STEP_8BIT_AVX512_H

#include "csrc/cpu/avx512_block.h"
#include "csrc/cpu/avx512_codes.h"

/* How many elements ahead moments are prefetched: a group and a half, since the two other loops run in between.
 * Prefetched a quarter of a group ahead, a group's first elements came late, which cost a seventh of the step on Zen 5.
 * The loop of the codes reads nothing else from memory, so it prefetches the next group's remainders: 5 % there. */
#define TX_AVX512_AHEAD (3 * TX_AVX512_GROUP * TX_BLOCK / 2)

/* Moments. Returns whether no root can have become subnormal, unless the block's new scale is more than twice the old
 * one. */
TX_FN int tx_avx512_first(const tx_adamw_constants *c, const tx_avx512_block_constants *w,
                          const tx_step_streams *streams, const tx_avx512_scales *scales, int32_t block,
                          tx_avx512_block *b) {
  const tx_step_streams s = tx_avx512_on(streams, block);
  tx_prefetch_at(s.grad, 0, TX_AVX512_AHEAD, TX_BLOCK, TX_BF16);
  tx_prefetch_at(s.exp_avg, 0, TX_AVX512_AHEAD, TX_BLOCK, TX_U8);
  tx_prefetch_at(s.exp_avg_sq, 0, TX_AVX512_AHEAD, TX_BLOCK, TX_U8);
  if (__builtin_expect(!scales->some_nan && tx_avx512_is_normal(w, s), 1)) {
    if (w->scaled) {
      tx_avx512_moments(w, s, scales->m[block], scales->root[block], b, 0, 1);
    } else {
      tx_avx512_moments(w, s, scales->m[block], scales->root[block], b, 0, 0);
    }
    return 1;
  }
  if (!scales->some_nan && tx_avx512_is_normal_or_zero(s)) {
    tx_avx512_moments_zeros(w, streams, scales, block, b);
  } else {
    tx_avx512_moments_any(c, streams, block, b);
  }
  return 0;
}

TX_FN tx_avx512_moment_tile tx_avx512_moments_of(const tx_avx512_block *b) {
  return (tx_avx512_moment_tile){b->m[0], b->root[0], TX_BLOCK_PAIRS};
}

/* Weights, and a task (tx_avx512_task). started: see tx_avx512_block_weights; ahead: the next block, or NULL. */
TX_FN void tx_avx512_second(const tx_adamw_constants *c, const tx_avx512_block_constants *w,
                            const tx_step_streams *streams, int32_t block, const tx_avx512_block *b,
                            tx_avx512_quotients *started, const tx_avx512_block *ahead, const int32_t task) {
  const tx_step_streams s = tx_avx512_on(streams, block);
  const tx_avx512_moment_tile further = ahead ? tx_avx512_moments_of(ahead) : tx_avx512_moments_of(b);
  tx_prefetch_at(s.param, TX_CHECKSUM, TX_AVX512_GROUP * TX_BLOCK, TX_BLOCK, TX_BF16);
  tx_avx512_block_weights(c, &w->step, s, tx_avx512_moments_of(b), started, ahead ? &further : NULL, TX_I16, task);
}

/* Recomputes the codes that the fast path gets wrong: of a block of zeros, of one that is not finite, of one whose
 * codes are doubled, and of one in which a positive root got code 0. */
static __attribute__((noinline)) void tx_avx512_third_again(const tx_step_streams *streams, int32_t block,
                                                            const tx_avx512_block *b, const tx_avx512_plans *m_plans,
                                                            const tx_avx512_plans *root_plans, tx_avx512_seen seen) {
  const __mmask64 all = ~(__mmask64)0;
  const tx_step_streams s = tx_avx512_on(streams, block);
  if ((m_plans->keep[block] == 0u) | (seen.m_half == all))
    *s.exp_avg_scale = tx_avx512_store_any(0, m_plans->amax[block], b->m, s.exp_avg_u, s.exp_avg);
  if ((root_plans->keep[block] == 0u) | (seen.root_half == all) | (seen.positive != all))
    *s.exp_avg_sq_scale = tx_avx512_store_any(1, root_plans->amax[block], b->root, s.exp_avg_sq_u, s.exp_avg_sq);
}

/* Codes. narrow: the result of tx_avx512_first. */
TX_FN void tx_avx512_third(const tx_avx512_block_constants *w, const tx_step_streams *streams, int32_t block,
                           const tx_avx512_block *b, const tx_avx512_plans *m_plans, const tx_avx512_plans *root_plans,
                           int narrow) {
  const tx_step_streams s = tx_avx512_on(streams, block);
  tx_prefetch_at(s.master, 0, TX_AVX512_GROUP * TX_BLOCK, TX_BLOCK, TX_I16);
  const tx_avx512_rounding m = tx_avx512_rounding_of(m_plans, block, s.exp_avg_u, 0);
  const int32_t m_byte = m_plans->exponent[block] + 127, root_byte = root_plans->exponent[block] + 127;
  tx_avx512_seen seen;
  if (__builtin_expect(narrow & (root_byte <= *s.exp_avg_sq_scale + 1), 1)) {
    seen = tx_avx512_block_codes(w, s, b, m, tx_avx512_rounding_of(root_plans, block, s.exp_avg_sq_u, 1), 1);
  } else {
    seen = tx_avx512_block_codes(w, s, b, m, tx_avx512_rounding_of(root_plans, block, s.exp_avg_sq_u, 0), 0);
  }
  *s.exp_avg_scale = (uint8_t)m_byte;
  *s.exp_avg_sq_scale = (uint8_t)root_byte;
  if (__builtin_expect((m_plans->kept & root_plans->kept) == 0u || _kortestc_mask64_u8(seen.m_half, seen.m_half) ||
                           _kortestc_mask64_u8(seen.root_half, seen.root_half) || seen.positive != ~(__mmask64)0,
                       0))
    tx_avx512_third_again(streams, block, b, m_plans, root_plans, seen);
}

/* A group of blocks between its moments and its codes. */
typedef struct tx_avx512_group {
  tx_avx512_block blocks[TX_AVX512_GROUP];
  tx_step_streams s;
  int32_t count;
  int narrow[TX_AVX512_GROUP];
  tx_avx512_scales scales;
  tx_avx512_plans m, root;
} tx_avx512_group;

/* Computes the moments and plans of the group whose first block is at s. left: remaining blocks, > 0. */
static __attribute__((noinline)) void tx_avx512_begin(const tx_adamw_constants *c, const tx_avx512_block_constants *w,
                                                      const tx_step_streams *s, int32_t left, tx_avx512_group *g) {
  g->s = *s;
  g->count = left < TX_AVX512_GROUP ? left : TX_AVX512_GROUP;
  tx_avx512_scales_of(&g->s, g->count, &g->scales);
  for (int32_t i = 0; i < g->count; i++)
    g->narrow[i] = tx_avx512_first(c, w, &g->s, &g->scales, i, &g->blocks[i]);
  for (int32_t i = 0; i < TX_AVX512_GROUP; i += 4) /* blocks beyond `count` use the first block's values */
    tx_avx512_plan(c, &g->s, g->blocks, i, g->count, &g->m, &g->root);
  tx_avx512_plans_from(tx_block_e4m3(), &g->m);
  tx_avx512_plans_from(tx_block_root_e4m4(), &g->root);
}

_Static_assert(TX_CHECKSUM == TX_AVX512_GROUP * TX_BLOCK, "a checksum is of a group");

TX_FN void tx_avx512_group_task(const tx_adamw_constants *c, const tx_avx512_block_constants *w,
                                const tx_avx512_group *g, const int32_t task) {
  tx_avx512_quotients started = tx_avx512_divide(&w->step, tx_avx512_moments_of(g->blocks));
  for (int32_t i = 0; i < g->count; i++)
    tx_avx512_second(c, w, &g->s, i, &g->blocks[i], &started, i + 1 < g->count ? &g->blocks[i + 1] : NULL, task);
}

/* The weights of a group. One function for each task: in a common one, each task would take registers from the
 * others. */
typedef void (*tx_avx512_group_loop)(const tx_adamw_constants *c, const tx_avx512_block_constants *w,
                                     const tx_avx512_group *g);
#define TX_GROUP_LOOP_(task)                                                                       \
  static __attribute__((noinline)) void tx_avx512_group_##task(                                    \
      const tx_adamw_constants *c, const tx_avx512_block_constants *w, const tx_avx512_group *g) { \
    tx_avx512_group_task(c, w, g, TX_##task);                                                      \
  }
TX_FOR_EACH_AVX512_TASK(TX_GROUP_LOOP_)
#undef TX_GROUP_LOOP_

#define TX_GROUP_ENTRY_(task) [TX_##task] = tx_avx512_group_##task,
static const tx_avx512_group_loop tx_avx512_group_loops[TX_AVX512_TASKS] = {TX_FOR_EACH_AVX512_TASK(TX_GROUP_ENTRY_)};
#undef TX_GROUP_ENTRY_

TX_FN void tx_avx512_group_weights(const tx_adamw_constants *c, const tx_avx512_block_constants *w,
                                   const tx_avx512_group *g) {
  const int32_t task = tx_avx512_task(g->s.extras);
  if (__builtin_expect(task != TX_FIND_NOTHING, 0)) {
    tx_avx512_group_loops[task](c, w, g);
  } else {
    tx_avx512_group_task(c, w, g, TX_FIND_NOTHING);
  }
}

TX_FN void tx_avx512_step(const tx_adamw_constants *c, const tx_step_streams *s, int32_t blocks) {
  const tx_avx512_block_constants w = tx_avx512_block_constants_of(c);
  tx_avx512_group g;
  for (int32_t at = 0; at < blocks; at += TX_AVX512_GROUP) {
    const tx_step_streams further = tx_avx512_on(s, at);
    tx_avx512_begin(c, &w, &further, blocks - at, &g);
    if (s->checksums) tx_compare_checksum(*s, (int64_t)at * TX_BLOCK);
    tx_avx512_group_weights(c, &w, &g);
    if (s->checksums) tx_renew_checksum(*s, (int64_t)at * TX_BLOCK);
    for (int32_t i = 0; i < g.count; i++)
      tx_avx512_third(&w, &g.s, i, &g.blocks[i], &g.m, &g.root, g.narrow[i]);
  }
}

#endif
