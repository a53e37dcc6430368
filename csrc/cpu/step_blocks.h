/* The step on 8-bit moments in place, a block of 128 elements at a time: first the step itself, whose moments stay in
 * L1 as fp32, then, their largest values known, the codes. Four codes to a lane-wide word. Included by loop_adamw.h. */
#ifndef TX_CPU_STEP_BLOCKS_H
#define TX_CPU_STEP_BLOCKS_H

#include "csrc/cpu/step_pairs.h"
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

/* Codes doubled in place: those of a word at a time. */
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
TX_FN uint8_t tx_store_quads(tx_block_format f, tx_block_plan plan, int32_t amax_bits, const tx_quads *from, uint32_t u,
                             void *to) {
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

/* Unrounded moments of the block. */
TX_FN void tx_step_quad_moments(tx_adamw_constants c, tx_step_streams s, tx_quads *m, tx_quads *root,
                                const tx_dtype grad) {
  const tx_block_format mf = tx_block_e4m3(), vf = tx_block_root_e4m4();
  tx_block_scale m_scale = tx_scale_decode(mf, *s.exp_avg_scale), v_scale = tx_scale_decode(vf, *s.exp_avg_sq_scale);
  const uint32_t m_keep = m_scale.keep, v_keep = v_scale.keep; /* a word at a time */
  m_scale.keep = v_scale.keep = 0xffffffffu;
#pragma GCC ivdep
  for (int32_t w = 0; w < TX_QUADS; w++) {
    const uint32_t m_codes = tx_word(s.exp_avg, w) & m_keep, v_codes = tx_word(s.exp_avg_sq, w) & v_keep;
    for (int k = 0; k < 4; k++) {
      const float old = tx_block_value_in(vf, v_codes, 8 * k, v_scale);
      const tx_adamw_moments r = tx_adamw_average(c, 1, tx_load_lane(s.grad, 2 * w + k / 2, k % 2, grad), 0.0f,
                                                  tx_block_value_in(mf, m_codes, 8 * k, m_scale), old * old);
      m->x[k][w] = r.m;
      root->x[k][w] = r.root;
    }
  }
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
#pragma GCC ivdep
  for (int32_t w = 0; w < TX_QUADS; w++, u += 4 * TX_LATTICE_ELEMENT) {
    tx_step_quad_weight(c, s, w, 0, m, root, u, param, master);
    tx_step_quad_weight(c, s, w, 2, m, root, u, param, master);
  }
}

TX_FN void tx_step_block(tx_adamw_constants c, tx_step_streams s, const tx_dtype param, const tx_dtype master,
                         const tx_dtype grad) {
  const tx_block_format mf = tx_block_e4m3(), vf = tx_block_root_e4m4();
  tx_quads m, root;
  tx_ask(s.grad, 0, TX_BLOCK, grad);
  tx_ask(s.exp_avg, 0, TX_BLOCK, TX_U8);
  tx_ask(s.exp_avg_sq, 0, TX_BLOCK, TX_U8);
  tx_ask(s.param, 0, TX_BLOCK, param);
  if (master != TX_NONE) tx_ask(s.master, 0, TX_BLOCK, master);
  tx_step_quad_moments(c, s, &m, &root, grad);
  /* The plans take long to come out of the block's last results; the weights do not wait for them. */
  const int32_t m_amax = tx_quads_amax(&m, 0), root_amax = tx_quads_amax(&root, 1);
  const tx_block_plan m_plan = tx_block_plan_from(mf, m_amax), root_plan = tx_block_plan_from(vf, root_amax);
  tx_step_quad_weights(c, s, &m, &root, param, master);
  tx_round_weights(s, 0, TX_BLOCK, master);
  *s.exp_avg_scale = tx_store_quads(mf, m_plan, m_amax, &m, s.exp_avg_u, s.exp_avg);
  *s.exp_avg_sq_scale = tx_store_quads(vf, root_plan, root_amax, &root, s.exp_avg_sq_u, s.exp_avg_sq);
}

/* n: a multiple of TX_BLOCK. */
TX_FN void tx_step_blocks(tx_adamw_constants c, tx_step_streams s, int32_t n, const tx_dtype param,
                          const tx_dtype master, const tx_dtype grad) {
  const int64_t param_bytes = (param == TX_F32 ? 4 : 2) * TX_BLOCK, grad_bytes = (grad == TX_F32 ? 4 : 2) * TX_BLOCK;
  const int64_t master_bytes = (master == TX_F32 ? 4 : master == TX_I16 ? 2 : 0) * TX_BLOCK;
  for (int32_t at = 0; at < n; at += TX_BLOCK) {
    tx_step_block(c, s, param, master, grad);
    s.grad = (const char *)s.grad + grad_bytes;
    s.param = (char *)s.param + param_bytes;
    if (master != TX_NONE) s.master = (char *)s.master + master_bytes;
    s.exp_avg = (char *)s.exp_avg + TX_BLOCK;
    s.exp_avg_sq = (char *)s.exp_avg_sq + TX_BLOCK;
    s.exp_avg_scale++;
    s.exp_avg_sq_scale++;
    s.param_u += TX_BLOCK * TX_LATTICE_ELEMENT;
    s.exp_avg_u += TX_BLOCK * TX_LATTICE_ELEMENT;
    s.exp_avg_sq_u += TX_BLOCK * TX_LATTICE_ELEMENT;
  }
}

#endif
