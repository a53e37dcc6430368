/* What loops for AVX-512 measure of a piece, a few blocks at once: for one at a time, what makes a number of the lanes
 * took as long as the squares. Included by avx512_found.h. */
#ifndef TX_CPU_AVX512_MEASURED_H
#define TX_CPU_AVX512_MEASURED_H

#include "csrc/cpu/avx512_weights.h"
#include "csrc/cpu/step_health.h"

#define TX_AVX512_MEASURED 8

/* Of the blocks since tx_avx512_add_measured, at most so many, and of their words of two elements. */
typedef struct tx_measured_blocks {
  __m512 squares[TX_AVX512_MEASURED]; /* of a block: lanes of tx_squares_sum, eight of updates, eight of weights */
  __m512i moved, below;               /* counts, in 16 bits */
  __m512 largest;                     /* of the piece */
  int32_t blocks;
} tx_measured_blocks;

TX_FN void tx_avx512_measure_next(tx_measured_blocks *m) {
  m->moved = m->below = _mm512_setzero_si512();
  m->blocks = 0;
}
TX_FN void tx_measured_begin(tx_measured_blocks *m) {
  tx_avx512_measure_next(m);
  m->largest = _mm512_setzero_ps();
}

/* Sums of neighbours among the lanes of tx_health_squares, which are those of pairs, or, of fp32 weights, halves. */
TX_FN __m512 tx_avx512_neighbours(const __m512 squares[2], const tx_dtype param) {
  if (param == TX_BF16) return _mm512_add_ps(squares[0], squares[1]);
  return _mm512_add_ps(tx_avx512_unzip(squares[0], squares[1], 0), tx_avx512_unzip(squares[0], squares[1], 1));
}

/* Lanes 16 apart are added. */
TX_FN __m512 tx_avx512_squares(const __m512 updates[2], const __m512 weights[2], const tx_dtype param) {
  const __m512 u = tx_avx512_neighbours(updates, param), w = tx_avx512_neighbours(weights, param);
  return _mm512_add_ps(_mm512_shuffle_f32x4(u, w, 0x44), _mm512_shuffle_f32x4(u, w, 0xee));
}

/* What lanes 8 apart make: of two blocks, in quarters of updates and of weights in turn; 4 apart: of four, each
 * quarter's lanes are the blocks'. */
TX_FN __m512 tx_avx512_of_two(const __m512 squares[2]) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(squares[0], squares[1], 0x88),
                       _mm512_shuffle_f32x4(squares[0], squares[1], 0xdd));
}
TX_FN __m512 tx_avx512_of_four(const __m512 squares[4]) {
  const __m512d a = _mm512_castps_pd(tx_avx512_of_two(squares)), b = _mm512_castps_pd(tx_avx512_of_two(squares + 2));
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
}

/* tx_squares_sum of each block: of updates in the first and third quarter, of weights in the others. */
TX_FN __m512 tx_avx512_sums(const __m512 squares[TX_AVX512_MEASURED]) {
  const __m512 a = tx_avx512_of_four(squares), b = tx_avx512_of_four(squares + 4);
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

/* tx_health_add of each of these: the ordinary way, and where all of updates, and all of weights, go into one bin. */
static __attribute__((noinline)) void tx_avx512_add_each(int64_t *row, __m512 sums) {
  float all[16];
  _mm512_storeu_ps(all, sums);
  for (int32_t i = 0; i < 16; i++)
    tx_health_add(row, i / 4 % 2 == 0 ? TX_HEALTH_UPDATES : TX_HEALTH_WEIGHTS, all[i]);
}
TX_FN void tx_avx512_add_sums(int64_t *row, __m512 sums) {
  const __m512i exponent = _mm512_srli_epi32(tx_avx512_bits(sums), 23),
                shift = _mm512_and_si512(exponent, _mm512_set1_epi32(7));
  const __m512i bin = _mm512_srli_epi32(exponent, 3),
                first = _mm512_shuffle_i32x4(_mm512_shuffle_epi32(bin, 0), _mm512_shuffle_epi32(bin, 0), 0x44);
  /* of the exponents 0 and 255 others are made */
  const __mmask16 usual =
      _mm512_cmplt_epu32_mask(_mm512_sub_epi32(exponent, _mm512_set1_epi32(1)), _mm512_set1_epi32(254));
  if (_mm512_mask_cmpeq_epi32_mask(usual, bin, first) != 0xffffu) {
    tx_avx512_add_each(row, sums);
    return;
  }
  /* (bits & 0x7fffff) | 0x800000 */
  const __m512i mantissa =
      _mm512_ternarylogic_epi32(tx_avx512_bits(sums), _mm512_set1_epi32(0x7fffff), _mm512_set1_epi32(0x800000), 0xea);
  const __m512i amounts = _mm512_sllv_epi32(mantissa, shift);
  const __m512i pairs =
      _mm512_add_epi64(_mm512_srli_epi64(amounts, 32), _mm512_and_si512(amounts, _mm512_set1_epi64(0xffffffff)));
  int64_t quarters[8];
  uint32_t bins[16];
  _mm512_storeu_si512(quarters, pairs);
  _mm512_storeu_si512(bins, bin);
  row[TX_HEALTH_UPDATES + bins[0]] += (quarters[0] + quarters[1]) + (quarters[4] + quarters[5]);
  row[TX_HEALTH_WEIGHTS + bins[4]] += (quarters[2] + quarters[3]) + (quarters[6] + quarters[7]);
}

TX_FN int64_t tx_avx512_count(__m512i counts) {
  return _mm512_reduce_add_epi32(_mm512_madd_epi16(counts, _mm512_set1_epi16(1)));
}

/* What was measured since the last time, to the row. */
static __attribute__((noinline)) void tx_avx512_add_measured(tx_measured_blocks *m, int64_t *row) {
  for (int32_t i = m->blocks; i < TX_AVX512_MEASURED; i++)
    m->squares[i] = _mm512_setzero_ps();
  tx_avx512_add_sums(row, tx_avx512_sums(m->squares));
  row[TX_HEALTH_MOVED] += tx_avx512_count(m->moved);
  row[TX_HEALTH_BELOW] += tx_avx512_count(m->below);
  row[TX_HEALTH_ELEMENTS] += (int64_t)m->blocks * TX_BLOCK;
  tx_avx512_measure_next(m);
}

TX_FN void tx_measured_end(tx_measured_blocks *m, int64_t *row) {
  tx_avx512_add_measured(m, row);
  const int64_t largest = _mm512_reduce_max_epi32(tx_avx512_bits(m->largest));
  if (largest > row[TX_HEALTH_LARGEST]) row[TX_HEALTH_LARGEST] = largest;
}

#endif
