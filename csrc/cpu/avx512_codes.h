/* Codes of 8-bit blocks with AVX-512: rounded as fp32, and then cut off, signed and packed in 16-bit lanes. Included by
 * step_8bit_avx512.h. */
#ifndef TX_CPU_AVX512_CODES_H
#define TX_CPU_AVX512_CODES_H

#include "csrc/cpu/avx512_moments.h"
#include "csrc/cpu/avx512_ramp.h"

/* The largest lane of each of eight vectors: that of a[i] in lane 4 * i of the result, that of b[i] in lane
 * 4 * i + 2. */
TX_FN __m512i tx_avx512_halves(__m512i a, __m512i b) {
  return _mm512_max_epu32(_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xee));
}
TX_FN __m512i tx_avx512_quarters(__m512i a, __m512i b) {
  return _mm512_max_epu32(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xdd));
}
TX_FN __m512i tx_avx512_largest(const __m512i a[4], const __m512i b[4]) {
  const __m512i as = tx_avx512_quarters(tx_avx512_halves(a[0], a[1]), tx_avx512_halves(a[2], a[3]));
  const __m512i bs = tx_avx512_quarters(tx_avx512_halves(b[0], b[1]), tx_avx512_halves(b[2], b[3]));
  const __m512i both = _mm512_max_epu32(_mm512_unpacklo_epi64(as, bs), _mm512_unpackhi_epi64(as, bs));
  return _mm512_max_epu32(both, _mm512_shuffle_epi32(both, _MM_PERM_CDAB));
}

/* How the codes of a group's blocks are computed. */
typedef struct tx_avx512_plans {
  int32_t amax[TX_AVX512_GROUP] __attribute__((aligned(16)));
  int32_t exponent[TX_AVX512_GROUP];
  uint32_t rebase[2][TX_AVX512_GROUP]; /* tx_avx512_twice; [1]: for blocks without values below the normals */
  float least_normal[TX_AVX512_GROUP];
  uint32_t keep[TX_AVX512_GROUP];
  uint32_t kept; /* all of keep, and-ed */
} tx_avx512_plans;

TX_FN void tx_avx512_plans_from(tx_block_format f, tx_avx512_plans *plans) {
  for (int32_t i = 0; i < TX_AVX512_GROUP; i++) {
    const tx_block_plan plan = tx_block_plan_from(f, plans->amax[i]);
    plans->exponent[i] = plan.exponent;
    plans->rebase[0][i] = tx_avx512_twice((plan.at.rebase + (1u << 23)) >> 16);
    plans->rebase[1][i] = tx_avx512_twice(plan.at.rebase >> 16);
    plans->least_normal[i] = plan.at.least_normal;
    plans->keep[i] = plan.keep;
  }
  plans->kept = 0xffffffffu;
  for (int32_t i = 0; i < TX_AVX512_GROUP; i++)
    plans->kept &= plans->keep[i];
}

/* Recomputes those of the four blocks from `first` on that have a gradient that needs the clamp or is not finite: the
 * comparisons of the fast path ignored NaNs. */
static __attribute__((noinline)) void tx_avx512_blocks_again(const tx_adamw_constants *c, const tx_step_streams *s,
                                                             tx_avx512_block *blocks, int32_t first, int32_t count,
                                                             tx_avx512_plans *m, tx_avx512_plans *root) {
  for (int32_t i = first; i < first + 4 && i < count; i++) {
    if (root->amax[i] <= TX_ADAMW_ROOT_BITS) continue;
    tx_avx512_moments_any(c, s, i, &blocks[i]);
    m->amax[i] = (int32_t)blocks[i].m_largest[0];
    root->amax[i] = (int32_t)blocks[i].root_largest[0];
  }
}

/* Computes amax of the four blocks from `first` on. Data is loaded in the pieces in which it was stored: a load that
 * spans several stores would wait for all of them. */
TX_FN void tx_avx512_plan(const tx_adamw_constants *c, const tx_step_streams *s, tx_avx512_block *blocks, int32_t first,
                          int32_t count, tx_avx512_plans *m, tx_avx512_plans *root) {
  __m512i ms[4], roots[4];
  for (int32_t i = 0; i < 4; i++) {
    const tx_avx512_block *b = &blocks[first + i < count ? first + i : 0];
    ms[i] = _mm512_load_si512(b->m_largest);
    roots[i] = _mm512_load_si512(b->root_largest);
  }
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m512i amaxes = _mm512_permutexvar_epi32(order, tx_avx512_largest(ms, roots));
  const __m128i root_amax = _mm_and_si128(_mm512_extracti32x4_epi32(amaxes, 1), _mm_set1_epi32(0x7fffffff));
  _mm_store_si128((__m128i *)(m->amax + first), _mm512_castsi512_si128(amaxes));
  _mm_store_si128((__m128i *)(root->amax + first), root_amax);
  if (__builtin_expect(_mm_cmpgt_epi32_mask(root_amax, _mm_set1_epi32(TX_ADAMW_ROOT_BITS)) != 0, 0))
    tx_avx512_blocks_again(c, s, blocks, first, count, m, root);
}

/* How one moment of one block is rounded. */
typedef struct tx_avx512_rounding {
  __m512 least_normal;
  __m512i rebase, u; /* rebase: in 16-bit lanes; u: threshold of the block's first element */
} tx_avx512_rounding;

TX_FN tx_avx512_rounding tx_avx512_rounding_of(const tx_avx512_plans *plans, int32_t block, uint32_t u,
                                               const int narrow) {
  const tx_avx512_rounding r = {_mm512_set1_ps(plans->least_normal[block]),
                                _mm512_set1_epi32((int)plans->rebase[narrow][block]), _mm512_set1_epi32((int)u)};
  return r;
}

/* The codes of the block's elements 32 * h to 32 * h + 63, as tx_quad_code computes them, except that a positive root
 * may get code 0. narrow: whether no element is below the normals. */
TX_FN __m512i tx_avx512_codes(tx_block_format f, tx_avx512_rounding r, const float x[2][TX_BLOCK_PAIRS], int32_t h,
                              const int narrow) {
  const uint8_t s = (uint8_t)(7 - f.element.mantissa_bits); /* int for gcc, unsigned for clang */
  __m512 sum[4];
  __m512i u[4], codes[2];
  for (int j = 0; j < 4; j++)
    sum[j] = _mm512_load_ps(&x[j % 2][16 * (h + j / 2)]);
  if (!narrow) {
    for (int j = 0; j < 4; j++) /* adds the larger of magnitude and least_normal, with the value's sign */
      sum[j] = _mm512_add_ps(sum[j], _mm512_range_ps(sum[j], r.least_normal, 0x3));
  }
  for (int j = 0; j < 4; j++)
    u[j] = _mm512_add_epi32(r.u, _mm512_load_si512(&tx_avx512_ramp[j % 2][16 * (h + j / 2)]));
  for (int j = 0; j < 4; j++)
    u[j] = _mm512_srli_epi32(u[j], (unsigned)(9 + f.element.mantissa_bits));
  for (int j = 0; j < 4; j++)
    u[j] = _mm512_add_epi32(u[j], tx_avx512_bits(sum[j]));
  for (int i = 0; i < 2; i++) {
    codes[i] = _mm512_sub_epi16(tx_avx512_join_upper(u[2 * i], u[2 * i + 1]), r.rebase);
    const __m512i sizes = _mm512_srli_epi16(codes[i], s);
    /* sizes & 0x7f | (codes >> 8 & 0x80) */
    const __m512i sign_places = _mm512_set1_epi16((short)0xff80);
    codes[i] =
        f.sign_bit == 0u ? sizes : _mm512_ternarylogic_epi32(sizes, _mm512_srli_epi16(codes[i], 8), sign_places, 0xd8);
  }
  return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), _mm512_packus_epi16(codes[0], codes[1]));
}

/* Properties of a block's codes, as masks over its two halves. */
typedef struct tx_avx512_seen {
  __mmask64 m_half, root_half; /* all set: no code is above half of the largest code of the format */
  __mmask64 positive;          /* all set: no root has code 0 */
} tx_avx512_seen;

/* narrow: whether no root is below the normals. */
TX_FN tx_avx512_seen tx_avx512_block_codes(const tx_avx512_block_constants *c, tx_step_streams s,
                                           const tx_avx512_block *b, tx_avx512_rounding m, tx_avx512_rounding root,
                                           const int narrow) {
  const tx_block_format mf = tx_block_e4m3(), vf = tx_block_root_e4m4();
  tx_avx512_seen seen = {~(__mmask64)0, ~(__mmask64)0, ~(__mmask64)0};
#pragma GCC unroll 2
  for (int32_t h = 0; h < TX_BLOCK / 32; h += 2) {
    const __m512i m_codes = tx_avx512_codes(mf, m, b->m, h, 0);
    const __m512i root_codes = tx_avx512_codes(vf, root, b->root, h, narrow);
    _mm512_storeu_si512((char *)s.exp_avg + 32 * h, m_codes);
    _mm512_storeu_si512((char *)s.exp_avg_sq + 32 * h, root_codes);
    /* doubling removes the signs */
    seen.m_half = _mm512_mask_cmple_epu8_mask(seen.m_half, _mm512_add_epi8(m_codes, m_codes), c->m_half);
    seen.root_half = _mm512_mask_cmple_epu8_mask(seen.root_half, root_codes, c->root_half);
    if (!narrow) seen.positive = _mm512_mask_test_epi8_mask(seen.positive, root_codes, root_codes);
  }
  return seen;
}

/* Encodes one moment of a block again, whatever its values are. is_root: which moment. */
static __attribute__((noinline)) uint8_t tx_avx512_store_any(int is_root, int32_t amax,
                                                             const float x[2][TX_BLOCK_PAIRS], uint32_t u, void *to) {
  const tx_block_format f = is_root ? tx_block_root_e4m4() : tx_block_e4m3();
  if (amax == 0) {
    memset(to, 0, TX_BLOCK);
    return tx_block_scale_byte(tx_block_plan_from(f, 0), 0);
  }
  tx_quads q;
  for (int32_t w = 0; w < TX_QUADS; w++)
    for (int k = 0; k < 4; k++)
      q.x[k][w] = x[k % 2][2 * w + k / 2];
  return tx_store_quads(f, amax, &q, u, to);
}

#endif
