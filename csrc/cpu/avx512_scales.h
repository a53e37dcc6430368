/* What the AVX-512 loops need for a group of blocks: constants in every lane, and decoded scales. Included by
 * avx512_moments.h. */
#ifndef TX_CPU_AVX512_SCALES_H
#define TX_CPU_AVX512_SCALES_H

#include "csrc/cpu/avx512_weights.h"
#include "csrc/cpu/step_streams.h"
#include "csrc/math/block_scale.h"

/* Hides a constant's value from the compiler, which would otherwise broadcast it again in each block. */
TX_FN __m512i tx_avx512_unknown(__m512i x) {
  __asm__("" : "+v"(x));
  return x;
}

/* The constants of a step on blocks, in every lane. */
typedef struct tx_avx512_block_constants {
  tx_avx512_constants step;
  __m512i upper;                  /* mask of a word's upper half */
  __m512i m_exponent, least_root; /* of codes: mask of the exponent; the least code with an exponent of 3 */
  __m512i m_half, root_half;      /* half of the largest code; m_half is twice that */
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

/* Blocks that are stepped before their codes are computed. The plans of four are computed together. */
#define TX_AVX512_GROUP 8

/* A 16-bit number in both halves of a word: broadcast from memory, it costs a vector load. */
TX_FN uint32_t tx_avx512_twice(uint32_t x) {
  return x << 16 | x;
}

/* The decoded scales of a group's blocks. */
typedef struct tx_avx512_scales {
  uint32_t m[TX_AVX512_GROUP], root[TX_AVX512_GROUP]; /* rebases for bf16, doubled by tx_avx512_twice */
  int32_t some_nan;                                   /* whether either moment of any block is NaN */
} tx_avx512_scales;

/* The first eight bytes as eight numbers; bytes from `count` on are replaced by the first one. */
TX_FN __m256i tx_avx512_bytes(const uint8_t *from, int32_t count) {
  uint8_t bytes[TX_AVX512_GROUP];
  if (__builtin_expect(count == TX_AVX512_GROUP, 1))
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)from));
  for (int32_t i = 0; i < TX_AVX512_GROUP; i++)
    bytes[i] = from[i < count ? i : 0];
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)bytes));
}

/* The rebases of tx_scale_decode for bytes that are not NaN's: they are linear in the exponent. */
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
