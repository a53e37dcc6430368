/* What the blocks of a group need on a processor with AVX-512: constants in each lane, and what their scales say.
 * Included by avx512_moments.h. */
#ifndef TX_CPU_AVX512_SCALES_H
#define TX_CPU_AVX512_SCALES_H

#include "csrc/cpu/avx512_weights.h"
#include "csrc/cpu/step_streams.h"
#include "csrc/math/block_scale.h"

/* Kept from the compiler, which would spread what it knows anew in each block. */
TX_FN __m512i tx_avx512_unknown(__m512i x) {
  __asm__("" : "+v"(x));
  return x;
}

/* What the step of blocks needs in each lane. */
typedef struct tx_avx512_block_constants {
  tx_avx512_constants step;
  __m512i upper;                  /* half of a word */
  __m512i m_exponent, least_root; /* of codes: the bits of an exponent; the least with an exponent of 3 */
  __m512i m_half, root_half;      /* half of the largest code that there is; m's twice */
  int32_t scaled;                 /* whether the factor is not 1 */
} tx_avx512_block_constants;

TX_FN tx_avx512_block_constants tx_avx512_block_constants_of(const tx_adamw_constants *c) {
  const tx_small_float m = tx_block_e4m3().element, root = tx_block_root_e4m4().element;
  const uint32_t m_half = m.max_code - (1u << m.mantissa_bits), root_half = root.max_code - (1u << root.mantissa_bits);
  const tx_avx512_block_constants b = {tx_avx512_constants_of(c),
                                       tx_avx512_unknown(_mm512_set1_epi32((int)0xffff0000u)),
                                       tx_avx512_unknown(_mm512_set1_epi8(0xf << 3)),
                                       tx_avx512_unknown(_mm512_set1_epi8(3 << 4)),
                                       tx_avx512_unknown(_mm512_set1_epi8((char)(2u * m_half))),
                                       tx_avx512_unknown(_mm512_set1_epi8((char)root_half)),
                                       c->factor != 1.0f};
  return b;
}

/* Blocks whose moments are stepped before their codes are made; the plans of four are made together. */
#define TX_AVX512_GROUP 8

/* A 16-bit number twice, as a word is: spread from memory it costs a vector's load. */
TX_FN uint32_t tx_avx512_twice(uint32_t x) {
  return x << 16 | x;
}

/* What the scales of a group's blocks say. */
typedef struct tx_avx512_scales {
  uint32_t m[TX_AVX512_GROUP], root[TX_AVX512_GROUP]; /* rebases, of bf16: tx_avx512_twice */
  int32_t some_nan;                                   /* of either moment of any block */
} tx_avx512_scales;

/* The first eight bytes, or `count` of them and some others; a number each. */
TX_FN __m256i tx_avx512_bytes(const uint8_t *from, int32_t count) {
  uint8_t bytes[TX_AVX512_GROUP];
  if (__builtin_expect(count == TX_AVX512_GROUP, 1))
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)from));
  for (int32_t i = 0; i < TX_AVX512_GROUP; i++)
    bytes[i] = from[i < count ? i : 0];
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)bytes));
}

/* What tx_scale_decode makes of bytes that are not NaN's: rebases are linear in the exponent. */
TX_FN void tx_avx512_rebases(tx_block_format f, __m256i bytes, uint32_t *rebases) {
  const __m256i least = _mm256_set1_epi32(f.min_exponent + 127), most = _mm256_set1_epi32(f.max_exponent + 127);
  const int32_t of_zero = (int32_t)(tx_scale_decode(f, 127).at.rebase >> 16) - (127 << 7);
  const __m256i exponents = _mm256_min_epi32(_mm256_max_epi32(bytes, least), most);
  const __m256i rebase = _mm256_add_epi32(_mm256_slli_epi32(exponents, 7), _mm256_set1_epi32(of_zero));
  _mm256_storeu_si256((__m256i *)(void *)rebases, _mm256_or_si256(rebase, _mm256_slli_epi32(rebase, 16)));
}

/* Of the `count` blocks from s on. */
TX_FN void tx_avx512_scales_of(const tx_step_streams *s, int32_t count, tx_avx512_scales *scales) {
  const __m256i m = tx_avx512_bytes(s->exp_avg_scale, count), root = tx_avx512_bytes(s->exp_avg_sq_scale, count);
  tx_avx512_rebases(tx_block_e4m3(), m, scales->m);
  tx_avx512_rebases(tx_block_root_e4m4(), root, scales->root);
  scales->some_nan = _mm256_cmpeq_epi32_mask(_mm256_max_epi32(m, root), _mm256_set1_epi32(TX_BLOCK_SCALE_NAN)) != 0;
}

#endif
