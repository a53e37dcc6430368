/* The step on 8-bit moments in place, a few blocks of 128 elements at a time: their moments, which stay in L1 as fp32;
 * the weights; then, the largest values known, the codes. Four codes to a lane-wide word. Included by loop_adamw.h. */
#ifndef TX_CPU_STEP_8BIT_H
#define TX_CPU_STEP_8BIT_H

#include "csrc/cpu/step_plain.h"
#include "csrc/math/block_scale.h"

#define TX_QUADS (TX_BLOCK / 4)

/* A block's moment between step and codes: element 4 * w + k at [k][w]. */
typedef struct tx_quads {
  float x[4][TX_QUADS];
} tx_quads;

/* tx_dithered(0, 4 * w). */
#define TX_RAMP_(w) (w) * (4 * TX_LATTICE_ELEMENT)
#define TX_RAMP_4_(w) TX_RAMP_(w), TX_RAMP_(w + 1), TX_RAMP_(w + 2), TX_RAMP_(w + 3)
#define TX_RAMP_16_(w) TX_RAMP_4_(w), TX_RAMP_4_(w + 4), TX_RAMP_4_(w + 8), TX_RAMP_4_(w + 12)
static const uint32_t tx_quad_ramp[TX_QUADS] = {TX_RAMP_16_(0u), TX_RAMP_16_(16u)};
#undef TX_RAMP_
#undef TX_RAMP_4_
#undef TX_RAMP_16_

/* Element k's code as stored, in its byte of a word; the codes of the elements before it in `word`. */
TX_FN uint32_t tx_quad_code(tx_block_format f, tx_block_plan plan, float x, uint32_t u, uint32_t word, const int k) {
  const int s = 23 - f.element.mantissa_bits;
  const uint32_t sizes = (f.sign_bit != 0u ? 0x7fu : 0xffu) << (8 * k);
  const uint32_t code = tx_shifted(tx_block_round(f, plan, x, u), 8 * k - s) & sizes;
  const uint32_t sign = tx_shifted(tx_bits_from_f32(x), 8 * k - 24) & (f.sign_bit << (8 * k));
  return f.sign_bit != 0u ? word | code | sign : word | code;
}

/* Rounded by threshold. */
TX_FN void tx_encode_quads(tx_block_format f, tx_block_plan plan, const tx_quads *from, uint32_t u, void *to) {
  for (int32_t w = 0; w < TX_QUADS; w++) {
    uint32_t word = 0;
    for (int k = 0; k < 4; k++)
      word = tx_quad_code(f, plan, from->x[k][w], u + tx_quad_ramp[w] + (uint32_t)k * TX_LATTICE_ELEMENT, word, k);
    tx_put_word(to, w, word);
  }
}

/* The codes of a block doubled in place; rare. */
TX_FN void tx_double_quads(tx_block_format f, void *to) {
  const uint32_t one = 1u << f.element.mantissa_bits;
  uint8_t *codes = to;
  for (int32_t i = 0; i < TX_BLOCK; i++) {
    const uint32_t size = codes[i] & ~f.sign_bit;
    codes[i] = (uint8_t)(codes[i] + (size < one ? size : one));
  }
}

TX_FN uint32_t tx_largest_code(tx_block_format f, const void *codes) {
  uint32_t largest = 0;
  for (int32_t i = 0; i < TX_BLOCK; i++) {
    const uint32_t size = ((const uint8_t *)codes)[i] & ~f.sign_bit;
    largest = size > largest ? size : largest;
  }
  return largest;
}

/* One moment of a block to its codes; returns its scale byte. */
TX_FN uint8_t tx_store_quads(tx_block_format f, int32_t amax_bits, const tx_quads *from, uint32_t u, void *to) {
  const tx_block_plan plan = tx_block_plan_from(f, amax_bits);
  if (__builtin_expect(plan.keep == 0u, 0)) {
    memset(to, 0, TX_BLOCK);
    return tx_block_scale_byte(plan, 0);
  }
  tx_encode_quads(f, plan, from, u, to);
  if (__builtin_expect(!tx_block_may_double(f, plan, amax_bits), 1)) return tx_block_scale_byte(plan, 0);
  const uint32_t doubling = tx_block_doubling(f, plan, tx_largest_code(f, to));
  if (doubling != 0u) tx_double_quads(f, to);
  return tx_block_scale_byte(plan, doubling);
}

/* tx_magnitude_bits of the largest. Of roots, which are never negative zero, unsigned patterns will do. */
TX_FN int32_t tx_quads_amax(const tx_quads *q, const int roots) {
  uint32_t amax = 0;
  if (!roots) return tx_block_amax_bits(&q->x[0][0], TX_BLOCK);
  for (int32_t i = 0; i < TX_BLOCK; i++) {
    const uint32_t bits = tx_bits_from_f32((&q->x[0][0])[i]);
    amax = bits > amax ? bits : amax;
  }
  return (int32_t)(amax & 0x7fffffffu);
}

/* Unrounded moments of the block. within: tx_adamw_average_within's. */
TX_FN void tx_step_quad_moments(tx_adamw_constants c, tx_step_streams s, tx_quads *m, tx_quads *root,
                                const tx_dtype grad, const int within) {
  const tx_block_format mf = tx_block_e4m3(), vf = tx_block_root_e4m4();
  tx_block_scale m_scale = tx_scale_decode(mf, *s.exp_avg_scale), v_scale = tx_scale_decode(vf, *s.exp_avg_sq_scale);
  const uint32_t m_keep = m_scale.keep, v_keep = v_scale.keep; /* a word at a time */
  m_scale.keep = v_scale.keep = 0xffffffffu;
  TX_NO_ALIASES
  for (int32_t w = 0; w < TX_QUADS; w++) {
    const uint32_t m_codes = tx_word(s.exp_avg, w) & m_keep, v_codes = tx_word(s.exp_avg_sq, w) & v_keep;
    for (int k = 0; k < 4; k++) {
      const float old = tx_block_value_in(vf, v_codes, 8 * k, v_scale),
                  old_m = tx_block_value_in(mf, m_codes, 8 * k, m_scale);
      const float g = tx_load_lane(s.grad, 2 * w + k / 2, k % 2, grad);
      const tx_adamw_moments r = within ? tx_adamw_average_within(c, 1, g, 0.0f, old_m, old * old)
                                        : tx_adamw_average(c, g, 0.0f, old_m, old * old);
      m->x[k][w] = r.m;
      root->x[k][w] = r.root;
    }
  }
}

/* The same of any gradients. */
static __attribute__((noinline)) void tx_step_quad_moments_any(const tx_adamw_constants *c, const tx_step_streams *s,
                                                               tx_quads *m, tx_quads *root, tx_dtype grad) {
  if (grad == TX_F32) {
    tx_step_quad_moments(*c, *s, m, root, TX_F32, 0);
  } else {
    tx_step_quad_moments(*c, *s, m, root, TX_BF16, 0);
  }
}

/* Unrounded moments of any block, and tx_magnitude_bits of their largest. */
TX_FN void tx_step_quad_first(tx_adamw_constants c, tx_step_streams s, tx_quads *m, tx_quads *root, const tx_dtype grad,
                              int32_t *m_amax, int32_t *root_amax) {
  tx_step_quad_moments(c, s, m, root, grad, 1);
  *root_amax = tx_quads_amax(root, 1);
  if (__builtin_expect(*root_amax > TX_ADAMW_ROOT_BITS, 0)) {
    tx_step_quad_moments_any(&c, &s, m, root, grad);
    *root_amax = tx_quads_amax(root, 1);
  }
  *m_amax = tx_quads_amax(m, 0);
}

/* Elements k and k + 1 of word w. */
TX_FN void tx_step_quad_weight(tx_adamw_constants c, tx_step_streams s, int32_t w, const int k, const tx_quads *m,
                               const tx_quads *root, uint32_t u, const tx_dtype param, const tx_dtype master) {
  const int32_t pair = 2 * w + k / 2;
  const float p[2] = {
      tx_adamw_update(c, tx_weight_lane(s, pair, 0, param, master), m->x[k][w], root->x[k][w]),
      tx_adamw_update(c, tx_weight_lane(s, pair, 1, param, master), m->x[k + 1][w], root->x[k + 1][w]),
  };
  tx_store_weights(s, pair, param, master, p, u + (uint32_t)k * TX_LATTICE_ELEMENT);
}

TX_FN void tx_step_quad_weights(tx_adamw_constants c, tx_step_streams s, const tx_quads *m, const tx_quads *root,
                                const tx_dtype param, const tx_dtype master) {
  uint32_t u = s.param_u;
  TX_NO_ALIASES
  for (int32_t w = 0; w < TX_QUADS; w++, u += 4 * TX_LATTICE_ELEMENT) {
    tx_step_quad_weight(c, s, w, 0, m, root, u, param, master);
    tx_step_quad_weight(c, s, w, 2, m, root, u, param, master);
  }
}

/* How many blocks go through each loop before the next: what a loop needs to begin is then little beside its work, and
 * a block's plan, which takes long to come out of its last results, is there when its codes are made. */
#define TX_BLOCKS_AT_ONCE 4

/* Of each of them: its moments, and the words that the fast way beside remainders read (step_pairs.h). */
typedef struct tx_step_block {
  tx_quads m, root;
  uint32_t param[2][TX_QUADS], remainder[2][TX_QUADS];
} tx_step_block;

TX_FN void tx_step_quad_remainder(tx_adamw_constants c, tx_step_streams s, int32_t w, const int h, tx_step_block *b,
                                  tx_watch *watch) {
  const float m[2] = {b->m.x[2 * h][w], b->m.x[2 * h + 1][w]};
  const float root[2] = {b->root.x[2 * h][w], b->root.x[2 * h + 1][w]};
  tx_step_remainders(c, (tx_mem_u32 *)s.param + 2 * w + h, (tx_mem_u32 *)s.master + 2 * w + h, m, root, watch, w,
                     &b->param[h][w], &b->remainder[h][w]);
}

static __attribute__((noinline)) void tx_step_quad_weights_again(const tx_adamw_constants *c, const tx_step_streams *s,
                                                                 const tx_step_block *b) {
  for (int32_t pair = 0; pair < 2 * TX_QUADS; pair++) {
    tx_put_word(s->param, pair, b->param[pair % 2][pair / 2]);
    tx_put_word(s->master, pair, b->remainder[pair % 2][pair / 2]);
  }
  tx_step_quad_weights(*c, *s, &b->m, &b->root, TX_BF16, TX_I16);
}

/* The streams n blocks further on. */
TX_FN tx_step_streams tx_blocks_on(tx_step_streams s, int32_t n, const tx_dtype param, const tx_dtype master,
                                   const tx_dtype grad) {
  const int64_t elements = (int64_t)n * TX_BLOCK;
  const uint32_t ramp = tx_dithered(0, (uint32_t)elements);
  s.grad = (const char *)s.grad + elements * tx_lane_bytes(grad);
  s.param = (char *)s.param + elements * tx_lane_bytes(param);
  if (master != TX_NONE) s.master = (char *)s.master + elements * tx_lane_bytes(master);
  s.exp_avg = (char *)s.exp_avg + elements;
  s.exp_avg_sq = (char *)s.exp_avg_sq + elements;
  s.exp_avg_scale += n;
  s.exp_avg_sq_scale += n;
  s.param_u += ramp;
  s.exp_avg_u += ramp;
  s.exp_avg_sq_u += ramp;
  return s;
}

TX_FN void tx_step_block_remainders(tx_adamw_constants c, tx_step_streams s, int32_t count, tx_step_block *blocks,
                                    const tx_dtype grad) {
  tx_watch watch = {{0}, {0}, {0}};
  for (int32_t i = 0; i < count; i++) {
    const tx_step_streams at = tx_blocks_on(s, i, TX_BF16, TX_I16, grad);
    tx_prefetch(at.param, TX_CHECKSUM, TX_BLOCK, TX_BF16);
    tx_prefetch(at.master, 0, TX_BLOCK, TX_I16);
    TX_NO_ALIASES
    for (int32_t w = 0; w < TX_QUADS; w++) {
      tx_step_quad_remainder(c, at, w, 0, &blocks[i], &watch);
      tx_step_quad_remainder(c, at, w, 1, &blocks[i], &watch);
    }
  }
  if (__builtin_expect(tx_watch_is_quiet(&watch), 1)) return;
  for (int32_t i = 0; i < count; i++) {
    const tx_step_streams at = tx_blocks_on(s, i, TX_BF16, TX_I16, grad);
    tx_step_quad_weights_again(&c, &at, &blocks[i]);
  }
}

TX_FN void tx_step_block_weights(tx_adamw_constants c, tx_step_streams s, int32_t count, const tx_step_block *blocks,
                                 const tx_dtype param, const tx_dtype master, const tx_dtype grad) {
  for (int32_t i = 0; i < count; i++) {
    tx_step_streams at = tx_blocks_on(s, i, param, master, grad);
    const int stream_store = master == TX_F32 && s.stream_store;
    uint32_t rounded[TX_BLOCK / 2] __attribute__((aligned(TX_CACHE_LINE)));
    void *const weights = at.param;
    if (!stream_store) tx_prefetch(at.param, 0, TX_BLOCK, param);
    if (master != TX_NONE) tx_prefetch(at.master, 0, TX_BLOCK, master);
    if (stream_store) at.param = rounded;
    tx_step_quad_weights(c, at, &blocks[i].m, &blocks[i].root, param, master);
    tx_round_weights(at, 0, TX_BLOCK, master);
    if (stream_store) tx_store_nontemporal(rounded, weights, sizeof rounded);
  }
}

/* count <= TX_BLOCKS_AT_ONCE blocks. */
TX_FN void tx_step_some_blocks(tx_adamw_constants c, tx_step_streams s, int32_t count, const tx_dtype param,
                               const tx_dtype master, const tx_dtype grad) {
  const tx_block_format mf = tx_block_e4m3(), vf = tx_block_root_e4m4();
  tx_step_block blocks[TX_BLOCKS_AT_ONCE];
  int32_t m_amax[TX_BLOCKS_AT_ONCE], root_amax[TX_BLOCKS_AT_ONCE];
  for (int32_t i = 0; i < count; i++) {
    const tx_step_streams at = tx_blocks_on(s, i, param, master, grad);
    tx_prefetch(at.grad, 0, TX_BLOCK, grad);
    tx_prefetch(at.exp_avg, 0, TX_BLOCK, TX_U8);
    tx_prefetch(at.exp_avg_sq, 0, TX_BLOCK, TX_U8);
    tx_step_quad_first(c, at, &blocks[i].m, &blocks[i].root, grad, &m_amax[i], &root_amax[i]);
  }
  if (master == TX_I16) {
    tx_step_block_remainders(c, s, count, blocks, grad);
  } else {
    tx_step_block_weights(c, s, count, blocks, param, master, grad);
  }
  for (int32_t i = 0; i < count; i++) {
    const tx_step_streams at = tx_blocks_on(s, i, param, master, grad);
    *at.exp_avg_scale = tx_store_quads(mf, m_amax[i], &blocks[i].m, at.exp_avg_u, at.exp_avg);
  }
  for (int32_t i = 0; i < count; i++) {
    const tx_step_streams at = tx_blocks_on(s, i, param, master, grad);
    *at.exp_avg_sq_scale = tx_store_quads(vf, root_amax[i], &blocks[i].root, at.exp_avg_sq_u, at.exp_avg_sq);
  }
}

_Static_assert(TX_CHECKSUM % (TX_BLOCKS_AT_ONCE * TX_BLOCK) == 0, "a checksum is of whole turns of the loop");

#if TX_WIDE
#include "csrc/cpu/step_8bit_avx512.h"
#endif

/* n: a multiple of TX_BLOCK, and of TX_CHECKSUM where there are checksums. */
TX_FN void tx_step_blocks(tx_adamw_constants c, tx_step_streams s, int32_t n, const tx_dtype param,
                          const tx_dtype master, const tx_dtype grad) {
#if TX_WIDE
  if (param == TX_BF16 && master == TX_I16 && grad == TX_BF16) {
    tx_wide_step(&c, &s, n / TX_BLOCK);
    return;
  }
#endif
  const int checksumed = master == TX_I16 && s.checksums;
  const tx_step_streams all = s;
  for (int32_t at = 0; at < n; at += TX_BLOCKS_AT_ONCE * TX_BLOCK) {
    const int32_t left = (n - at) / TX_BLOCK, count = left < TX_BLOCKS_AT_ONCE ? left : TX_BLOCKS_AT_ONCE;
    if (checksumed && at % TX_CHECKSUM == 0) tx_look_at_block(all, at);
    tx_step_some_blocks(c, s, count, param, master, grad);
    s = tx_blocks_on(s, count, param, master, grad);
    const int32_t end = at + count * TX_BLOCK;
    if (checksumed && end % TX_CHECKSUM == 0) tx_renew_block(all, end - TX_CHECKSUM);
  }
}

#endif
