/* Statistics of a run of elements: exact sum of the block sums of squares, and how many elements are not finite. */
#ifndef TX_CPU_LOOP_STATS_H
#define TX_CPU_LOOP_STATS_H

#include "csrc/cpu/element.h"
#include "csrc/cpu/forms.h"
#include "csrc/math/exact_sum.h"
#include "csrc/math/reduce.h"

/* Adds one block to the limbs; returns its number of non-finite elements. Finite squares of fp32 numbers cannot
 * overflow in double, so the sum alone tells whether there are any, and they are counted only then. */
TX_FN int64_t tx_stats_block(const float *x, int32_t n, int64_t *limbs) {
  if (__builtin_expect(tx_exact_add(limbs, tx_sum_squares(x, n)) == 0, 1)) return 0;
  int64_t non_finite = 0;
  for (int32_t i = 0; i < n; i++)
    non_finite += tx_magnitude_bits(x[i]) >= TX_F32_INF;
  return non_finite;
}

TX_FN int64_t tx_stats_run(const void *from, int64_t n, int64_t *limbs, const tx_dtype dtype) {
  int64_t non_finite = 0, at = 0;
  float x[TX_BLOCK];
  for (; at + TX_BLOCK <= n; at += TX_BLOCK) {
    for (int64_t i = 0; i < TX_BLOCK; i++)
      x[i] = tx_load(from, at + i, dtype);
    non_finite += tx_stats_block(x, TX_BLOCK, limbs);
  }
  if (at < n) {
    for (int64_t i = 0; i < n - at; i++)
      x[i] = tx_load(from, at + i, dtype);
    non_finite += tx_stats_block(x, (int32_t)(n - at), limbs);
  }
  tx_exact_carry(limbs);
  return non_finite;
}

#define TX_STATS_LOOP_(index, name, ...)                                        \
  static int64_t tx_stats_##name(const void *from, int64_t n, int64_t *limbs) { \
    return tx_stats_run(from, n, limbs, TX_##name);                             \
  }
TX_FOR_EACH_PLAIN(TX_STATS_LOOP_)
#undef TX_STATS_LOOP_

/* Initialiser of tx_kernels.stats. */
#define TX_STATS_ENTRY_(index, name, ...) [index] = tx_stats_##name,
#define TX_STATS_LOOPS TX_FOR_EACH_PLAIN(TX_STATS_ENTRY_)

#endif
