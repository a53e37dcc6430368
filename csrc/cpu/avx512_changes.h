/* tx_compare_weights of whole blocks with AVX-512: changed bits and the largest change at once. For bf16 weights with
 * masters that are not NaN. Included by step_changes.h. */
#ifndef TX_CPU_AVX512_CHANGES_H
#define TX_CPU_AVX512_CHANGES_H

#include <immintrin.h>

#include "csrc/cpu/avx512_weights.h"
#include "csrc/torch_ext.h"

/* Which weights of a block changed, and the fp32 pattern of the largest change of a master. */
typedef struct tx_avx512_change {
  uint64_t bits[TX_BLOCK / 64];
  int32_t largest;
} tx_avx512_change;

TX_FN __m512i tx_avx512_larger(__m512i largest, __m512 before, __m512 now) {
  const __m512i size = _mm512_and_si512(tx_avx512_bits(_mm512_sub_ps(now, before)), _mm512_set1_epi32(0x7fffffff));
  return _mm512_max_epi32(largest, size);
}

/* With fp32 masters. */
TX_FN tx_avx512_change tx_avx512_compare_F32(const void *before, const void *now) {
  tx_avx512_change found;
  __m512i largest = _mm512_setzero_si512();
#pragma GCC unroll 2
  for (int32_t k = 0; k < TX_BLOCK / 64; k++) {
    uint64_t bits = 0;
#pragma GCC unroll 4
    for (int32_t j = 0; j < 4; j++) {
      const __m512 a = _mm512_loadu_ps((const char *)before + 256 * k + 64 * j);
      const __m512 b = _mm512_loadu_ps((const char *)now + 256 * k + 64 * j);
      const __m512i both = _mm512_xor_si512(tx_avx512_nearest_upper(a), tx_avx512_nearest_upper(b));
      bits |= (uint64_t)_mm512_test_epi32_mask(both, _mm512_set1_epi32((int32_t)0xffff0000)) << (16 * j);
      largest = tx_avx512_larger(largest, a, b);
    }
    found.bits[k] = bits;
  }
  found.largest = _mm512_reduce_max_epi32(largest);
  return found;
}

/* tx_master_bits of the first element of each word's pair, and of the second one. */
TX_FN __m512 tx_avx512_first_master(__m512i weights, __m512i remainders) {
  const __m512i missing = _mm512_srai_epi32(_mm512_slli_epi32(remainders, 16), 16);
  return tx_avx512_f32(_mm512_add_epi32(_mm512_slli_epi32(weights, 16), missing));
}
TX_FN __m512 tx_avx512_second_master(__m512i weights, __m512i remainders) {
  const __m512i upper = _mm512_and_si512(weights, _mm512_set1_epi32((int32_t)0xffff0000));
  return tx_avx512_f32(_mm512_add_epi32(upper, _mm512_srai_epi32(remainders, 16)));
}

/* With remainders. */
TX_FN tx_avx512_change tx_avx512_compare_I16(const void *weights_before, const void *before, const void *weights_now,
                                             const void *now) {
  tx_avx512_change found;
  __m512i largest = _mm512_setzero_si512();
#pragma GCC unroll 2
  for (int32_t k = 0; k < TX_BLOCK / 64; k++) {
    uint64_t bits = 0;
#pragma GCC unroll 2
    for (int32_t j = 0; j < 2; j++) {
      const int64_t at = 128 * k + 64 * j;
      const __m512i a = _mm512_loadu_si512((const char *)weights_before + at);
      const __m512i b = _mm512_loadu_si512((const char *)weights_now + at);
      const __m512i c = _mm512_loadu_si512((const char *)before + at), d = _mm512_loadu_si512((const char *)now + at);
      bits |= (uint64_t)_mm512_cmpneq_epi16_mask(a, b) << (32 * j);
      largest = tx_avx512_larger(largest, tx_avx512_first_master(a, c), tx_avx512_first_master(b, d));
      largest = tx_avx512_larger(largest, tx_avx512_second_master(a, c), tx_avx512_second_master(b, d));
    }
    found.bits[k] = bits;
  }
  found.largest = _mm512_reduce_max_epi32(largest);
  return found;
}

#endif
