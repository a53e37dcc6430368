/* Unrounded moments of 8-bit blocks on a processor with AVX-512. Codes become bf16 in 16-bit lanes, where a step costs
 * half; that leaves out what is below the normals, so blocks with such a code go the ordinary way. Included by
 * step_wide.h. */
#ifndef TX_CPU_WIDE_MOMENTS_H
#define TX_CPU_WIDE_MOMENTS_H

/* Of a block: element 2 * i + k at [k][i]. */
#define TX_BLOCK_PAIRS (TX_BLOCK / 2)
typedef struct tx_wide_block {
  float m[2][TX_BLOCK_PAIRS], root[2][TX_BLOCK_PAIRS];
  uint32_t m_largest[16], root_largest[16]; /* magnitudes, a lane's each */
} __attribute__((aligned(64))) tx_wide_block;

/* The streams `block` blocks further on. */
TX_FN tx_step_streams tx_wide_on(const tx_step_streams *s, int32_t block) {
  return tx_blocks_on(*s, block, TX_BF16, TX_I16, TX_BF16);
}

/* Of half a block, under the mask of what was seen before: which codes of the signed moment are not below the normals,
 * and which of the root have exponents of `least` at the least. */
TX_FN __mmask64 tx_wide_normal_m(__mmask64 mask, tx_step_streams s, const int32_t half) {
  const __m512i codes = _mm512_loadu_si512((const char *)s.exp_avg + 64 * half);
  return _mm512_mask_test_epi8_mask(mask, codes, _mm512_set1_epi8(0x78));
}
TX_FN __mmask64 tx_wide_normal_root(__mmask64 mask, tx_step_streams s, const int32_t half, const int least) {
  const __m512i codes = _mm512_loadu_si512((const char *)s.exp_avg_sq + 64 * half);
  return _mm512_mask_cmpge_epu8_mask(mask, codes, _mm512_set1_epi8((char)(least << 4)));
}
/* Whether all codes of the block are normal, those of the root with exponents of `least` at the least, and neither
 * scale NaN's. */
TX_FN int tx_wide_is_normal(tx_step_streams s, const int least) {
  __mmask64 normal = tx_wide_normal_m(~(__mmask64)0, s, 0);
  normal = tx_wide_normal_root(tx_wide_normal_m(normal, s, 1), s, 0, least);
  normal = tx_wide_normal_root(normal, s, 1, least);
  const uint32_t scale = *s.exp_avg_scale > *s.exp_avg_sq_scale ? *s.exp_avg_scale : *s.exp_avg_sq_scale;
  return normal == ~(__mmask64)0 && scale != TX_BLOCK_SCALE_NAN;
}

/* Whether what is not normal in the block is zero, and neither scale NaN's. */
TX_FN int tx_wide_is_normal_or_zero(tx_step_streams s) {
  const __m512i size = _mm512_set1_epi8(0x7f), one = _mm512_set1_epi8(1);
  __mmask64 legal = ~(__mmask64)0;
  for (int32_t half = 0; half < 2; half++) {
    const __m512i m = _mm512_loadu_si512((const char *)s.exp_avg + 64 * half);
    const __m512i root = _mm512_loadu_si512((const char *)s.exp_avg_sq + 64 * half);
    /* one less, 0 is the largest */
    legal = _mm512_mask_cmpge_epu8_mask(legal, _mm512_sub_epi8(_mm512_and_si512(m, size), one), _mm512_set1_epi8(7));
    legal = _mm512_mask_cmpge_epu8_mask(legal, _mm512_sub_epi8(root, one), _mm512_set1_epi8(15));
  }
  return legal == ~(__mmask64)0 && *s.exp_avg_scale != TX_BLOCK_SCALE_NAN && *s.exp_avg_sq_scale != TX_BLOCK_SCALE_NAN;
}

/* 32 codes without subnormals as bf16. zeros: 0 may be among them, whose exponent stays as it is. */
TX_FN __m512i tx_wide_value(tx_block_format f, const void *codes, __m512i rebase, const int zeros) {
  const __m256i read = _mm256_loadu_si256((const __m256i *)codes);
  const int s = 7 - f.element.mantissa_bits;
  __m512i placed = _mm512_slli_epi16(f.sign_bit == 0u ? _mm512_cvtepu8_epi16(read) : _mm512_cvtepi8_epi16(read), s);
  if (f.sign_bit != 0u) placed = _mm512_and_si512(placed, _mm512_set1_epi16((short)(0x8000 | (0x7f << s))));
  if (!zeros) return _mm512_add_epi16(placed, rebase);
  return _mm512_mask_add_epi16(placed, _mm512_test_epi16_mask(placed, _mm512_set1_epi16(0x7fff)), placed, rebase);
}

/* Unrounded moments of a block without subnormals. */
TX_FN void tx_wide_moments(const tx_wide_constants *c, tx_step_streams s, tx_wide_block *b, const int zeros) {
  const tx_block_format mf = tx_block_e4m3(), vf = tx_block_root_e4m4();
  const __m512i m_rebase = _mm512_set1_epi16((short)(tx_scale_decode(mf, *s.exp_avg_scale).at.rebase >> 16));
  const __m512i v_rebase = _mm512_set1_epi16((short)(tx_scale_decode(vf, *s.exp_avg_sq_scale).at.rebase >> 16));
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
  __m512 m_largest = _mm512_setzero_ps();
  __m512i root_largest = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int32_t h = 0; h < TX_BLOCK / 32; h++) {
    const __m512i grads = _mm512_loadu_si512((const char *)s.grad + 64 * h);
    const __m512i ms = tx_wide_value(mf, (const char *)s.exp_avg + 32 * h, m_rebase, zeros);
    const __m512i roots = tx_wide_value(vf, (const char *)s.exp_avg_sq + 32 * h, v_rebase, zeros);
    __m512 v[2] = {tx_wide_f32(_mm512_slli_epi32(roots, 16)), tx_wide_f32(_mm512_and_si512(roots, upper))};
    __m512 g[2] = {tx_wide_f32(_mm512_slli_epi32(grads, 16)), tx_wide_f32(_mm512_and_si512(grads, upper))};
    __m512 m[2] = {tx_wide_f32(_mm512_slli_epi32(ms, 16)), tx_wide_f32(_mm512_and_si512(ms, upper))};
    __m512 root[2];
    /* breadth first: what waits in the processor's scheduler is what bounds it */
    for (int k = 0; k < 2; k++)
      g[k] = _mm512_mul_ps(c->factor, g[k]);
    for (int k = 0; k < 2; k++)
      v[k] = _mm512_mul_ps(v[k], v[k]);
    for (int k = 0; k < 2; k++)
      root[k] = _mm512_sub_ps(_mm512_mul_ps(g[k], g[k]), v[k]);
    for (int k = 0; k < 2; k++)
      g[k] = _mm512_mul_ps(c->m_weight, _mm512_sub_ps(g[k], m[k]));
    for (int k = 0; k < 2; k++)
      root[k] = _mm512_sqrt_ps(_mm512_add_ps(v[k], _mm512_mul_ps(c->v_weight, root[k])));
    for (int k = 0; k < 2; k++) {
      m[k] = _mm512_add_ps(m[k], g[k]);
      _mm512_store_ps(&b->m[k][16 * h], m[k]);
      m_largest = _mm512_range_ps(m_largest, m[k], 0xb); /* |the larger one|; a NaN is passed over */
    }
    for (int k = 0; k < 2; k++) {
      _mm512_store_ps(&b->root[k][16 * h], root[k]);
      root_largest = _mm512_max_epu32(root_largest, tx_wide_bits(root[k]));
    }
  }
  _mm512_store_ps(b->m_largest, m_largest);
  _mm512_store_si512(b->root_largest, root_largest);
}

/* With zeros, such as of an embedding's rows that no step has met. */
static __attribute__((noinline)) void tx_wide_moments_zeros(const tx_wide_constants *c, const tx_step_streams *s,
                                                            int32_t block, tx_wide_block *b) {
  tx_wide_moments(c, tx_wide_on(s, block), b, 1);
}

/* Of any block. */
static __attribute__((noinline)) void tx_wide_moments_any(const tx_adamw_constants *c, const tx_step_streams *s,
                                                          int32_t block, tx_wide_block *b) {
  tx_quads m, root;
  tx_step_quad_moments(*c, tx_wide_on(s, block), &m, &root, TX_BF16);
  memset(b->m_largest, 0, sizeof b->m_largest);
  memset(b->root_largest, 0, sizeof b->root_largest);
  b->m_largest[0] = (uint32_t)tx_quads_amax(&m, 0);
  b->root_largest[0] = (uint32_t)tx_quads_amax(&root, 1);
  for (int32_t i = 0; i < TX_BLOCK_PAIRS; i++) {
    for (int k = 0; k < 2; k++) {
      b->m[k][i] = m.x[2 * (i % 2) + k][i / 2];
      b->root[k][i] = root.x[2 * (i % 2) + k][i / 2];
    }
  }
}

#endif
