/* Unrounded moments of 8-bit blocks with AVX-512. Codes are converted to bf16 in 16-bit lanes, where an instruction
 * handles twice as many elements. That does not work for subnormal codes, so blocks with one take the ordinary path.
 * Included by avx512_codes.h. */
#ifndef TX_CPU_AVX512_MOMENTS_H
#define TX_CPU_AVX512_MOMENTS_H

#include "csrc/cpu/avx512_scales.h"
#include "csrc/cpu/block_moments.h"

/* The moments of a block; element 2 * i + k is at [k][i]. */
#define TX_BLOCK_PAIRS (TX_BLOCK / 2)
typedef struct tx_avx512_block {
  float m[2][TX_BLOCK_PAIRS], root[2][TX_BLOCK_PAIRS];
  uint32_t m_largest[16], root_largest[16]; /* the largest magnitude in each lane */
} __attribute__((aligned(64))) tx_avx512_block;

/* The streams from `block` blocks further on. */
TX_FN tx_step_streams tx_avx512_on(const tx_step_streams *s, int32_t block) {
  return tx_blocks_on(*s, block, TX_BF16, TX_I16, TX_BF16);
}

/* Narrow `mask` by half a block's codes: to those of exp_avg that are normal; to those of exp_avg_sq that are at least
 * `least`. */
TX_FN __mmask64 tx_avx512_normal_m(__mmask64 mask, tx_step_streams s, const int32_t half, __m512i exponents) {
  const __m512i codes = _mm512_loadu_si512((const char *)s.exp_avg + 64 * half);
  return _mm512_mask_test_epi8_mask(mask, codes, exponents);
}
TX_FN __mmask64 tx_avx512_normal_root(__mmask64 mask, tx_step_streams s, const int32_t half, __m512i least) {
  const __m512i codes = _mm512_loadu_si512((const char *)s.exp_avg_sq + 64 * half);
  return _mm512_mask_cmpge_epu8_mask(mask, codes, least);
}
/* Whether all codes of the block are normal, and those of the root have an exponent of at least 3: v' >= v / 2, so the
 * new root has an exponent of at least 2, or of at least 1 at twice the scale. */
TX_FN int tx_avx512_is_normal(const tx_avx512_block_constants *c, tx_step_streams s) {
  __mmask64 normal = tx_avx512_normal_m(~(__mmask64)0, s, 0, c->m_exponent);
  normal = tx_avx512_normal_root(tx_avx512_normal_m(normal, s, 1, c->m_exponent), s, 0, c->least_root);
  normal = tx_avx512_normal_root(normal, s, 1, c->least_root);
  return _kortestc_mask64_u8(normal, normal);
}

/* Whether every code of the block is normal or zero. */
TX_FN int tx_avx512_is_normal_or_zero(tx_step_streams s) {
  const __m512i size = _mm512_set1_epi8(0x7f), one = _mm512_set1_epi8(1);
  __mmask64 legal = ~(__mmask64)0;
  for (int32_t half = 0; half < 2; half++) {
    const __m512i m = _mm512_loadu_si512((const char *)s.exp_avg + 64 * half);
    const __m512i root = _mm512_loadu_si512((const char *)s.exp_avg_sq + 64 * half);
    /* code - 1: a code of 0 becomes the largest */
    legal = _mm512_mask_cmpge_epu8_mask(legal, _mm512_sub_epi8(_mm512_and_si512(m, size), one), _mm512_set1_epi8(7));
    legal = _mm512_mask_cmpge_epu8_mask(legal, _mm512_sub_epi8(root, one), _mm512_set1_epi8(15));
  }
  return _kortestc_mask64_u8(legal, legal);
}

/* 32 codes without subnormals as bf16. zeros: whether there may be zeros, which get no rebase. */
TX_FN __m512i tx_avx512_value(tx_block_format f, const void *codes, __m512i rebase, const int zeros) {
  const __m256i read = _mm256_loadu_si256((const __m256i *)codes);
  const uint8_t s = (uint8_t)(7 - f.element.mantissa_bits); /* int for gcc, unsigned for clang */
  __m512i placed = _mm512_slli_epi16(f.sign_bit == 0u ? _mm512_cvtepu8_epi16(read) : _mm512_cvtepi8_epi16(read), s);
  if (f.sign_bit != 0u) placed = _mm512_and_si512(placed, _mm512_set1_epi16((short)(0x8000 | (0x7f << s))));
  if (!zeros) return _mm512_add_epi16(placed, rebase);
  return _mm512_mask_add_epi16(placed, _mm512_test_epi16_mask(placed, _mm512_set1_epi16(0x7fff)), placed, rebase);
}

/* Unrounded moments of a block without subnormal codes; rebases: from tx_avx512_scales. scaled: whether gradients are
 * multiplied by the factor; if not, it is 1. */
TX_FN void tx_avx512_moments(const tx_avx512_block_constants *c, tx_step_streams s, uint32_t m_rebases,
                             uint32_t root_rebases, tx_avx512_block *b, const int zeros, const int scaled) {
  const tx_block_format mf = tx_block_e4m3(), vf = tx_block_root_e4m4();
  const __m512i m_rebase = _mm512_set1_epi32((int)m_rebases), v_rebase = _mm512_set1_epi32((int)root_rebases);
  const __m512i upper = c->upper;
  __m512 m_largest = _mm512_setzero_ps();
  __m512i root_largest = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int32_t h = 0; h < TX_BLOCK / 32; h++) {
    const __m512i grads = _mm512_loadu_si512((const char *)s.grad + 64 * h);
    const __m512i ms = tx_avx512_value(mf, (const char *)s.exp_avg + 32 * h, m_rebase, zeros);
    const __m512i roots = tx_avx512_value(vf, (const char *)s.exp_avg_sq + 32 * h, v_rebase, zeros);
    __m512 v[2] = {tx_avx512_f32(_mm512_slli_epi32(roots, 16)), tx_avx512_f32(_mm512_and_si512(roots, upper))};
    __m512 g[2] = {tx_avx512_f32(_mm512_slli_epi32(grads, 16)), tx_avx512_f32(_mm512_and_si512(grads, upper))};
    __m512 m[2] = {tx_avx512_f32(_mm512_slli_epi32(ms, 16)), tx_avx512_f32(_mm512_and_si512(ms, upper))};
    __m512 root[2];
    /* breadth first: the step is bound by what waits in the processor's scheduler */
    for (int k = 0; k < 2; k++)
      if (scaled) g[k] = _mm512_mul_ps(c->step.factor, g[k]);
    for (int k = 0; k < 2; k++)
      v[k] = _mm512_mul_ps(v[k], v[k]);
    for (int k = 0; k < 2; k++)
      root[k] = _mm512_sub_ps(_mm512_mul_ps(g[k], g[k]), v[k]);
    for (int k = 0; k < 2; k++)
      g[k] = _mm512_mul_ps(c->step.m_weight, _mm512_sub_ps(g[k], m[k]));
    for (int k = 0; k < 2; k++)
      root[k] = _mm512_sqrt_ps(_mm512_add_ps(v[k], _mm512_mul_ps(c->step.v_weight, root[k])));
    for (int k = 0; k < 2; k++) {
      m[k] = _mm512_add_ps(m[k], g[k]);
      _mm512_store_ps(&b->m[k][16 * h], m[k]);
      m_largest = _mm512_range_ps(m_largest, m[k], 0xb); /* the larger magnitude; NaNs are ignored */
    }
    for (int k = 0; k < 2; k++) {
      _mm512_store_ps(&b->root[k][16 * h], root[k]);
      root_largest = _mm512_max_epu32(root_largest, tx_avx512_bits(root[k]));
    }
  }
  _mm512_store_ps(b->m_largest, m_largest);
  _mm512_store_si512(b->root_largest, root_largest);
}

/* With zeros, e.g. in rows of an embedding that no step has reached yet. */
static __attribute__((noinline)) void tx_avx512_moments_zeros(const tx_avx512_block_constants *c,
                                                              const tx_step_streams *s, const tx_avx512_scales *scales,
                                                              int32_t block, tx_avx512_block *b) {
  tx_avx512_moments(c, tx_avx512_on(s, block), scales->m[block], scales->root[block], b, 1, 1);
}

/* For any block. */
static __attribute__((noinline)) void tx_avx512_moments_any(const tx_adamw_constants *c, const tx_step_streams *s,
                                                            int32_t block, tx_avx512_block *b) {
  tx_quads m, root;
  int32_t m_amax, root_amax;
  tx_step_quad_first(*c, tx_avx512_on(s, block), &m, &root, TX_BF16, &m_amax, &root_amax);
  memset(b->m_largest, 0, sizeof b->m_largest);
  memset(b->root_largest, 0, sizeof b->root_largest);
  b->m_largest[0] = (uint32_t)m_amax;
  b->root_largest[0] = (uint32_t)root_amax;
  for (int32_t i = 0; i < TX_BLOCK_PAIRS; i++) {
    for (int k = 0; k < 2; k++) {
      b->m[k][i] = m.x[2 * (i % 2) + k][i / 2];
      b->root[k][i] = root.x[2 * (i % 2) + k][i / 2];
    }
  }
}

#endif
