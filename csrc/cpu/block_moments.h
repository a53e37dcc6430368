/* Decodes and averages the moments of 8-bit blocks, without rounding the results, for every step on 8-bit moments.
 * Included by step_8bit.h and avx512_moments.h. */
#ifndef TX_CPU_BLOCK_MOMENTS_H
#define TX_CPU_BLOCK_MOMENTS_H

#include "csrc/cpu/block_codes.h"
#include "csrc/cpu/step_streams.h"

/* The streams from n blocks further on. */
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
  s.begin += elements;
  return s;
}

/* Unrounded moments of a block. within: see tx_adamw_average_within. */
TX_FN void tx_step_quad_moments(tx_adamw_constants c, tx_step_streams s, tx_quads *m, tx_quads *root,
                                const tx_dtype grad, const int within) {
  const tx_block_format mf = tx_block_e4m3(), vf = tx_block_root_e4m4();
  tx_block_scale m_scale = tx_scale_decode(mf, *s.exp_avg_scale), v_scale = tx_scale_decode(vf, *s.exp_avg_sq_scale);
  const uint32_t m_keep = m_scale.keep, v_keep = v_scale.keep; /* masks applied to four codes at a time */
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

/* The same for any gradients. */
static __attribute__((noinline)) void tx_step_quad_moments_any(const tx_adamw_constants *c, const tx_step_streams *s,
                                                               tx_quads *m, tx_quads *root, tx_dtype grad) {
  if (grad == TX_F32) {
    tx_step_quad_moments(*c, *s, m, root, TX_F32, 0);
  } else {
    tx_step_quad_moments(*c, *s, m, root, TX_BF16, 0);
  }
}

/* Unrounded moments of any block, and tx_magnitude_bits of their largest magnitudes. */
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

#endif
