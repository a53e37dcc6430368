/* Converts 16-bit words to bits: by the processor's comparison masks or sign bits of bytes, without a loop. */
#ifndef TX_CPU_PACK_BITS_H
#define TX_CPU_PACK_BITS_H

#include <stdint.h>
#include <string.h>

#include "csrc/cpu/element.h"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

/* Bit j is set if word j of the 64 is not 0. */
TX_FN uint64_t tx_bits_of_64(const uint16_t *halves) {
#if defined(__AVX512BW__)
  const __m512i low = _mm512_loadu_si512(halves), high = _mm512_loadu_si512(halves + 32);
  return (uint64_t)_mm512_test_epi16_mask(low, low) | (uint64_t)_mm512_test_epi16_mask(high, high) << 32;
#elif defined(__SSE2__)
  uint64_t zeros = 0;
  for (int32_t j = 0; j < 64; j += 16) {
    const __m128i low = _mm_loadu_si128((const __m128i *)(const void *)(halves + j));
    const __m128i high = _mm_loadu_si128((const __m128i *)(const void *)(halves + j + 8)), none = _mm_setzero_si128();
    const __m128i is_zero = _mm_packs_epi16(_mm_cmpeq_epi16(low, none), _mm_cmpeq_epi16(high, none));
    zeros |= (uint64_t)(uint32_t)_mm_movemask_epi8(is_zero) << j;
  }
  return ~zeros;
#else
  uint64_t bits = 0;
  for (int32_t j = 0; j < 64; j += 8) {
    uint8_t set[8];
    for (int32_t k = 0; k < 8; k++)
      set[k] = halves[j + k] != 0;
    uint64_t bytes; /* each 0 or 1 */
    memcpy(&bytes, set, sizeof bytes);
    bits |= (bytes * UINT64_C(0x0102040810204080) >> 56) << j;
  }
  return bits;
#endif
}

#endif
