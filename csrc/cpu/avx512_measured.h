/* Health measurements of AVX-512 loops, collected for a few blocks at a time: for single blocks, reducing lanes to a
 * number took as long as computing the squares. Included by avx512_found.h. */
#ifndef TX_CPU_AVX512_MEASURED_H
#define TX_CPU_AVX512_MEASURED_H

#include "csrc/cpu/avx512_weights.h"
#include "csrc/cpu/step_health.h"

#define TX_AVX512_MEASURED 8
#define TX_AVX512_RUNS (TX_AVX512_MEASURED * TX_BLOCK / 32)

/* Blocks measured since the last tx_avx512_add_measured, at most TX_AVX512_MEASURED. Which weights moved, and which
 * updates were below half an ulp, is stored as masks: storing them, and counting them later, uses none of the ports
 * that bound the step. */
typedef struct tx_measured_blocks {
  __m512 squares[TX_AVX512_MEASURED]; /* by block: eight lanes of tx_squares_sum for updates, eight for weights */
  __mmask32 moved[TX_AVX512_RUNS], below[TX_AVX512_RUNS];
  __m512 largest;  /* of the piece */
  __m512i amounts; /* of the piece, not yet added to its row: amounts for the bins in `bin` */
  __m512i bin;
  int32_t blocks;
} tx_measured_blocks;

TX_FN void tx_measured_begin(tx_measured_blocks *m) {
  m->blocks = 0;
  m->largest = _mm512_setzero_ps();
  m->amounts = m->bin = _mm512_setzero_si512();
}

/* Adds neighbours among the lanes of tx_health_squares. These are in the two vectors' equal lanes, or, for fp32
 * weights, in neighbouring lanes. */
TX_FN __m512 tx_avx512_neighbours(const __m512 squares[2], const tx_dtype param) {
  if (param == TX_BF16) return _mm512_add_ps(squares[0], squares[1]);
  return _mm512_add_ps(tx_avx512_unzip(squares[0], squares[1], 0), tx_avx512_unzip(squares[0], squares[1], 1));
}

/* Adds lanes 16 apart. */
TX_FN __m512 tx_avx512_squares(const __m512 updates[2], const __m512 weights[2], const tx_dtype param) {
  const __m512 u = tx_avx512_neighbours(updates, param), w = tx_avx512_neighbours(weights, param);
  return _mm512_add_ps(_mm512_shuffle_f32x4(u, w, 0x44), _mm512_shuffle_f32x4(u, w, 0xee));
}

/* tx_avx512_of_two adds lanes 8 apart, of two blocks; its quarters alternate between updates and weights.
 * tx_avx512_of_four then adds lanes 4 apart, of four blocks; the lanes of each quarter belong to the blocks. */
TX_FN __m512 tx_avx512_of_two(const __m512 squares[2]) {
  return _mm512_add_ps(_mm512_shuffle_f32x4(squares[0], squares[1], 0x88),
                       _mm512_shuffle_f32x4(squares[0], squares[1], 0xdd));
}
TX_FN __m512 tx_avx512_of_four(const __m512 squares[4]) {
  const __m512d a = _mm512_castps_pd(tx_avx512_of_two(squares)), b = _mm512_castps_pd(tx_avx512_of_two(squares + 2));
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
}

/* tx_squares_sum of each block: those of updates in the first and third quarter, those of weights in the others. */
TX_FN __m512 tx_avx512_sums(const __m512 squares[TX_AVX512_MEASURED]) {
  const __m512 a = tx_avx512_of_four(squares), b = tx_avx512_of_four(squares + 4);
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

/* Adds the collected amounts to the row. */
TX_FN void tx_avx512_add_amounts(tx_measured_blocks *m, int64_t *row) {
  int64_t amounts[8];
  uint32_t bins[16];
  _mm512_storeu_si512(amounts, m->amounts);
  _mm512_storeu_si512(bins, m->bin);
  row[TX_HEALTH_UPDATES + bins[0]] += (amounts[0] + amounts[1]) + (amounts[4] + amounts[5]);
  row[TX_HEALTH_WEIGHTS + bins[4]] += (amounts[2] + amounts[3]) + (amounts[6] + amounts[7]);
  m->amounts = _mm512_setzero_si512();
}

/* Adds sums whose bins differ from `bin`, one by one. `bin` then becomes the bins of these sums, for the next ones, if
 * all sums of updates have the same bin, and all of weights, and no exponent field is in the bins of 0 or 255, which
 * need special treatment. */
static __attribute__((noinline)) void tx_avx512_add_each(tx_measured_blocks *m, int64_t *row, __m512 sums) {
  float all[16];
  _mm512_storeu_ps(all, sums);
  tx_avx512_add_amounts(m, row);
  for (int32_t i = 0; i < 16; i++)
    tx_health_add(row, i / 4 % 2 == 0 ? TX_HEALTH_UPDATES : TX_HEALTH_WEIGHTS, all[i]);
  const __m512i bin = _mm512_srli_epi32(tx_avx512_bits(sums), 26);
  const __m512i first = _mm512_shuffle_i32x4(_mm512_shuffle_epi32(bin, 0), _mm512_shuffle_epi32(bin, 0), 0x44);
  const __mmask16 usual = _mm512_cmplt_epu32_mask(_mm512_sub_epi32(bin, _mm512_set1_epi32(1)), _mm512_set1_epi32(30));
  m->bin = _mm512_maskz_mov_epi32(_mm512_mask_cmpeq_epi32_mask(usual, bin, first) == 0xffffu ? 0xffffu : 0, bin);
}

/* tx_health_add of each sum. */
TX_FN void tx_avx512_add_sums(tx_measured_blocks *m, int64_t *row, __m512 sums) {
  const __m512i bits = tx_avx512_bits(sums);
  const __mmask16 others = _mm512_cmpneq_epi32_mask(_mm512_srli_epi32(bits, 26), m->bin);
  if (__builtin_expect(others != 0 || _mm512_cvtsi512_si32(m->bin) == 0, 0)) {
    tx_avx512_add_each(m, row, sums);
    return;
  }
  /* ((bits & 0x7fffff) | 0x800000) << (exponent & 7) */
  const __m512i mantissa =
      _mm512_ternarylogic_epi32(bits, _mm512_set1_epi32(0x7fffff), _mm512_set1_epi32(0x800000), 0xea);
  const __m512i amounts =
      _mm512_sllv_epi32(mantissa, _mm512_and_si512(_mm512_srli_epi32(bits, 23), _mm512_set1_epi32(7)));
  const __m512i pairs =
      _mm512_add_epi64(_mm512_srli_epi64(amounts, 32), _mm512_and_si512(amounts, _mm512_set1_epi64(0xffffffff)));
  m->amounts = _mm512_add_epi64(m->amounts, pairs);
}

TX_FN int64_t tx_avx512_count(const __mmask32 masks[TX_AVX512_RUNS], int32_t blocks) {
  uint64_t words[TX_AVX512_RUNS / 2];
  int64_t count = 0;
  memcpy(words, masks, sizeof words);
  for (int32_t i = 0; i < blocks * (TX_BLOCK / 64); i++)
    count += __builtin_popcountll(words[i]);
  return count;
}

/* Adds what was measured since the last call to the row, or to `amounts`. */
static __attribute__((noinline)) void tx_avx512_add_measured(tx_measured_blocks *m, int64_t *row) {
  for (int32_t i = m->blocks; i < TX_AVX512_MEASURED; i++)
    m->squares[i] = _mm512_setzero_ps();
  tx_avx512_add_sums(m, row, tx_avx512_sums(m->squares));
  row[TX_HEALTH_MOVED] += tx_avx512_count(m->moved, m->blocks);
  row[TX_HEALTH_BELOW] += tx_avx512_count(m->below, m->blocks);
  row[TX_HEALTH_ELEMENTS] += (int64_t)m->blocks * TX_BLOCK;
  m->blocks = 0;
}

TX_FN void tx_measured_end(tx_measured_blocks *m, int64_t *row) {
  if (m->blocks) tx_avx512_add_measured(m, row);
  tx_avx512_add_amounts(m, row);
  const int64_t largest = _mm512_reduce_max_epi32(tx_avx512_bits(m->largest));
  if (largest > row[TX_HEALTH_LARGEST]) row[TX_HEALTH_LARGEST] = largest;
}

#endif
