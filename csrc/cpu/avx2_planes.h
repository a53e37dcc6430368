/* Rows of the entropy code with AVX2. Included by loop_planes.h. */
#ifndef TX_CPU_AVX2_PLANES_H
#define TX_CPU_AVX2_PLANES_H

#include <immintrin.h>

#include "csrc/cpu/planes_loops.h"

#define TX_RANS_VECTORS (TX_RANS_LANES / 8)

/* Lane orders, by mask of lanes. gather: moves the lanes of the mask to the front; scatter: gives each lane of the mask
 * its word from the front. */
typedef struct tx_avx2_moves {
  uint8_t gather[256][8], scatter[256][8];
} tx_avx2_moves;

static void tx_avx2_moves_make(tx_avx2_moves *moves) {
  for (uint32_t mask = 0; mask < 256; mask++) {
    uint8_t set = 0;
    memset(moves->gather[mask], 0, 8);
    for (uint8_t lane = 0; lane < 8; lane++) {
      moves->scatter[mask][lane] = set & 7;
      moves->gather[mask][set & 7] = lane;
      set = (uint8_t)(set + (mask >> lane & 1));
    }
  }
}

TX_FN __m256i tx_avx2_indices(const uint8_t *bytes) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)bytes));
}

TX_FN __m256i tx_avx2_rans_quotient(__m256i x, __m256i factor, __m256i shift) {
  const __m256i shifted = _mm256_sllv_epi32(x, shift);
  const __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(shifted, factor), 32);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(shifted, 32), _mm256_srli_epi64(factor, 32));
  return _mm256_srli_epi32(_mm256_blend_epi32(even, odd, 0xaa), 11);
}

/* Encodes one symbol into each of a vector of states. Returns how many words were output, to `to`. States and
 * freq << TX_RANS_ROOM are below 2^31, so signed comparisons are right. */
TX_FN int32_t tx_avx2_rans_put(const tx_rans_encoder *encoder, const tx_avx2_moves *moves, __m256i symbols,
                               __m256i *states, uint8_t *to) {
  const __m256i parts = _mm256_i32gather_epi32((const int *)encoder->parts, symbols, 4);
  const __m256i factor = _mm256_i32gather_epi32((const int *)encoder->factor, symbols, 4);
  const __m256i freq = _mm256_and_si256(parts, _mm256_set1_epi32(0xfff));
  const __m256i cum = _mm256_and_si256(_mm256_srli_epi32(parts, 12), _mm256_set1_epi32(0xfff));
  const __m256i stay = _mm256_cmpgt_epi32(_mm256_slli_epi32(freq, TX_RANS_ROOM), *states);
  const uint32_t leave = ~(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(stay)) & 0xffu;
  const __m256i words = _mm256_permutevar8x32_epi32(_mm256_and_si256(*states, _mm256_set1_epi32(0xffff)),
                                                    tx_avx2_indices(moves->gather[leave]));
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
  _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(packed));
  const __m256i x = _mm256_blendv_epi8(_mm256_srli_epi32(*states, 16), *states, stay);
  const __m256i quotient = tx_avx2_rans_quotient(x, factor, _mm256_srli_epi32(parts, 24));
  const __m256i wider = _mm256_sub_epi32(_mm256_set1_epi32((int)TX_RANS_SCALE), freq);
  *states = _mm256_add_epi32(_mm256_add_epi32(x, cum), _mm256_mullo_epi32(quotient, wider));
  return __builtin_popcount(leave);
}

static uint8_t *tx_rans_encode_rows(const tx_rans_encoder *encoder, uint32_t *states, const uint8_t *symbols,
                                    int64_t rows, uint8_t *to, const uint8_t *limit) {
  tx_avx2_moves moves;
  tx_avx2_moves_make(&moves);
  __m256i x[TX_RANS_VECTORS];
  for (int32_t v = 0; v < TX_RANS_VECTORS; v++)
    x[v] = _mm256_loadu_si256((const __m256i *)(states + 8 * v));
  while (rows-- > 0) {
    if (limit - to < TX_RANS_ROW_BYTES) return NULL;
    const uint8_t *row = symbols + rows * TX_RANS_LANES;
    for (int32_t v = 0; v < TX_RANS_VECTORS; v++)
      to += 2 * tx_avx2_rans_put(encoder, &moves, tx_avx2_indices(row + 8 * v), &x[v], to);
  }
  for (int32_t v = 0; v < TX_RANS_VECTORS; v++)
    _mm256_storeu_si256((__m256i *)(states + 8 * v), x[v]);
  return to;
}

/* The symbols, which are the lowest bytes, of two vectors of slots. */
TX_FN __m128i tx_avx2_symbols(__m256i a, __m256i b) {
  const __m256i low = _mm256_set1_epi32(0xff);
  const __m256i both = _mm256_packus_epi32(_mm256_and_si256(a, low), _mm256_and_si256(b, low));
  const __m256i bytes = _mm256_packus_epi16(both, both);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5);
  return _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(bytes, order));
}

/* Decodes one symbol from each of a vector of states; returns the slots. */
TX_FN __m256i tx_avx2_rans_take(const tx_rans_decoder *decoder, __m256i *states) {
  const __m256i parts = _mm256_and_si256(*states, _mm256_set1_epi32((int)TX_RANS_SCALE - 1));
  const __m256i slot = _mm256_i32gather_epi32((const int *)decoder->slots, parts, 4);
  const __m256i freq = _mm256_and_si256(_mm256_srli_epi32(slot, 8), _mm256_set1_epi32(0xfff));
  *states =
      _mm256_add_epi32(_mm256_mullo_epi32(freq, _mm256_srli_epi32(*states, TX_RANS_BITS)), _mm256_srli_epi32(slot, 20));
  return slot;
}

/* Decodes whole rows, as long as there are enough words for another row; returns how many. */
static int64_t tx_rans_decode_rows(const tx_rans_decoder *decoder, uint32_t *states, const uint8_t *begin,
                                   const uint8_t **end, int64_t rows, uint8_t *symbols) {
  tx_avx2_moves moves;
  tx_avx2_moves_make(&moves);
  __m256i x[TX_RANS_VECTORS];
  const uint8_t *at = *end;
  int64_t done = 0;
  for (int32_t v = 0; v < TX_RANS_VECTORS; v++)
    x[v] = _mm256_loadu_si256((const __m256i *)(states + 8 * v));
  for (; done < rows && at - begin >= 2 * TX_RANS_LANES; done++) {
    for (int32_t v = 0; v < TX_RANS_VECTORS; v += 2) {
      const __m256i first = tx_avx2_rans_take(decoder, &x[v]), second = tx_avx2_rans_take(decoder, &x[v + 1]);
      _mm_storeu_si128((__m128i *)(symbols + done * TX_RANS_LANES + 8 * v), tx_avx2_symbols(first, second));
    }
    for (int32_t v = TX_RANS_VECTORS; v-- > 0;) {
      const __m256i short_of = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)TX_RANS_LEAST), x[v]);
      const uint32_t need = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(short_of));
      at -= 2 * __builtin_popcount(need);
      const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at));
      const __m256i lanes = _mm256_permutevar8x32_epi32(words, tx_avx2_indices(moves.scatter[need]));
      x[v] = _mm256_blendv_epi8(x[v], _mm256_or_si256(_mm256_slli_epi32(x[v], 16), lanes), short_of);
    }
  }
  for (int32_t v = 0; v < TX_RANS_VECTORS; v++)
    _mm256_storeu_si256((__m256i *)(states + 8 * v), x[v]);
  *end = at;
  return done;
}

#endif
