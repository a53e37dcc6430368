/* Rows of the entropy code with AVX-512. Included by loop_planes.h. */
#ifndef TX_CPU_AVX512_PLANES_H
#define TX_CPU_AVX512_PLANES_H

#include <immintrin.h>

#include "csrc/cpu/planes_loops.h"

#define TX_RANS_VECTORS (TX_RANS_LANES / 16)

/* x / freq, by the encoder's factor and shift. */
TX_FN __m512i tx_avx512_rans_quotient(__m512i x, __m512i factor, __m512i shift) {
  const __m512i shifted = _mm512_sllv_epi32(x, shift);
  const __m512i even = _mm512_srli_epi64(_mm512_mul_epu32(shifted, factor), 32);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(shifted, 32), _mm512_srli_epi64(factor, 32));
  return _mm512_srli_epi32(_mm512_mask_blend_epi32(0xaaaa, even, odd), 11);
}

/* The encoder's tables in registers, for symbols close to each other: the entries of symbol 0 and of those after
 * encoder->before. */
typedef struct tx_avx512_tables {
  __m512i factor[4], parts[4], before;
} tx_avx512_tables;

TX_FN void tx_avx512_tables_of(const uint32_t *table, uint32_t before, __m512i *vectors) {
  uint32_t entries[TX_RANS_NEAR];
  entries[0] = table[0];
  for (uint32_t i = 1; i < TX_RANS_NEAR; i++)
    entries[i] = table[before + i < 255 ? before + i : 255];
  for (int32_t v = 0; v < 4; v++)
    vectors[v] = _mm512_loadu_si512(entries + 16 * v);
}

TX_FN __m512i tx_avx512_look_up(const __m512i *vectors, __m512i index) {
  const __mmask16 upper = _mm512_test_epi32_mask(index, _mm512_set1_epi32(32));
  const __m512i low = _mm512_permutex2var_epi32(vectors[0], index, vectors[1]);
  return _mm512_mask_mov_epi32(low, upper, _mm512_permutex2var_epi32(vectors[2], index, vectors[3]));
}

/* Encodes one symbol into each of a vector of states. Returns how many words were output, to `to`. */
TX_FN int32_t tx_avx512_rans_put(__m512i parts, __m512i factor, __m512i *states, uint8_t *to) {
  const __m512i freq = _mm512_and_si512(parts, _mm512_set1_epi32(0xfff));
  const __m512i cum = _mm512_and_si512(_mm512_srli_epi32(parts, 12), _mm512_set1_epi32(0xfff));
  const __mmask16 leave = _mm512_cmpge_epu32_mask(*states, _mm512_slli_epi32(freq, TX_RANS_ROOM));
  const __m512i words = _mm512_maskz_compress_epi32(leave, *states);
  _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(words));
  const __m512i x = _mm512_mask_srli_epi32(*states, leave, *states, 16);
  const __m512i quotient = tx_avx512_rans_quotient(x, factor, _mm512_srli_epi32(parts, 24));
  const __m512i wider = _mm512_sub_epi32(_mm512_set1_epi32((int)TX_RANS_SCALE), freq);
  *states = _mm512_add_epi32(_mm512_add_epi32(x, cum), _mm512_mullo_epi32(quotient, wider));
  return __builtin_popcount(leave);
}

/* near: whether the tables are in registers (encoder->before < 256). */
TX_FN uint8_t *tx_avx512_rans_rows(const tx_rans_encoder *encoder, int near, uint32_t *states, const uint8_t *symbols,
                                   int64_t rows, uint8_t *to, const uint8_t *limit) {
  tx_avx512_tables tables;
  __m512i x[TX_RANS_VECTORS];
  if (near) {
    tx_avx512_tables_of(encoder->factor, encoder->before, tables.factor);
    tx_avx512_tables_of(encoder->parts, encoder->before, tables.parts);
    tables.before = _mm512_set1_epi32((int)encoder->before);
  }
  for (int32_t v = 0; v < TX_RANS_VECTORS; v++)
    x[v] = _mm512_loadu_si512(states + 16 * v);
  while (rows-- > 0) {
    if (limit - to < TX_RANS_ROW_BYTES) return NULL;
    const uint8_t *row = symbols + rows * TX_RANS_LANES;
    for (int32_t v = 0; v < TX_RANS_VECTORS; v++) {
      const __m512i s = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(row + 16 * v)));
      __m512i parts, factor;
      if (near) {
        const __m512i index = _mm512_maskz_sub_epi32(_mm512_test_epi32_mask(s, s), s, tables.before);
        parts = tx_avx512_look_up(tables.parts, index);
        factor = tx_avx512_look_up(tables.factor, index);
      } else {
        parts = _mm512_i32gather_epi32(s, encoder->parts, 4);
        factor = _mm512_i32gather_epi32(s, encoder->factor, 4);
      }
      to += 2 * tx_avx512_rans_put(parts, factor, &x[v], to);
    }
  }
  for (int32_t v = 0; v < TX_RANS_VECTORS; v++)
    _mm512_storeu_si512(states + 16 * v, x[v]);
  return to;
}

static uint8_t *tx_rans_encode_rows(const tx_rans_encoder *encoder, uint32_t *states, const uint8_t *symbols,
                                    int64_t rows, uint8_t *to, const uint8_t *limit) {
  return encoder->before < 256 ? tx_avx512_rans_rows(encoder, 1, states, symbols, rows, to, limit)
                               : tx_avx512_rans_rows(encoder, 0, states, symbols, rows, to, limit);
}

/* Decodes whole rows, as long as there are enough words for another row; returns how many. */
static int64_t tx_rans_decode_rows(const tx_rans_decoder *decoder, uint32_t *states, const uint8_t *begin,
                                   const uint8_t **end, int64_t rows, uint8_t *symbols) {
  __m512i x[TX_RANS_VECTORS];
  const uint8_t *at = *end;
  int64_t done = 0;
  for (int32_t v = 0; v < TX_RANS_VECTORS; v++)
    x[v] = _mm512_loadu_si512(states + 16 * v);
  for (; done < rows && at - begin >= 2 * TX_RANS_LANES; done++) {
    __mmask16 need[TX_RANS_VECTORS];
    for (int32_t v = 0; v < TX_RANS_VECTORS; v++) {
      const __m512i parts = _mm512_and_si512(x[v], _mm512_set1_epi32((int)TX_RANS_SCALE - 1));
      const __m512i slot = _mm512_i32gather_epi32(parts, decoder->slots, 4);
      const __m512i freq = _mm512_and_si512(_mm512_srli_epi32(slot, 8), _mm512_set1_epi32(0xfff));
      _mm_storeu_si128((__m128i *)(symbols + done * TX_RANS_LANES + 16 * v), _mm512_cvtepi32_epi8(slot));
      x[v] = _mm512_add_epi32(_mm512_mullo_epi32(freq, _mm512_srli_epi32(x[v], TX_RANS_BITS)),
                              _mm512_srli_epi32(slot, 20));
      need[v] = _mm512_cmplt_epu32_mask(x[v], _mm512_set1_epi32((int)TX_RANS_LEAST));
    }
    for (int32_t v = TX_RANS_VECTORS; v-- > 0;) {
      at -= 2 * __builtin_popcount(need[v]);
      const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at));
      const __m512i lanes = _mm512_maskz_expand_epi32(need[v], words);
      x[v] = _mm512_or_si512(_mm512_mask_slli_epi32(x[v], need[v], x[v], 16), lanes);
    }
  }
  for (int32_t v = 0; v < TX_RANS_VECTORS; v++)
    _mm512_storeu_si512(states + 16 * v, x[v]);
  *end = at;
  return done;
}

#endif
