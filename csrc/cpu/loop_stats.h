/* Statistics of a run of elements: the exact sum of the block sums of squares, and the number of non-finite
 * elements. */
#ifndef TX_CPU_LOOP_STATS_H
#define TX_CPU_LOOP_STATS_H

#include "csrc/core/forms.h"
#include "csrc/cpu/element.h"
#include "csrc/cpu/kernels.h"
#include "csrc/math/exact_sum.h"
#include "csrc/math/reduce.h"

/* Adds n <= TX_TILE floats to the limbs; returns how many are not finite. Squares of finite fp32 numbers cannot
 * overflow in double, so a block's sum shows whether any element is not finite, and only then they are counted. One
 * copy for all loops: the sum's tree unrolls into a kilobyte of code. */
static __attribute__((noinline)) int64_t tx_stats_tile(const float *x, int64_t n, int64_t *limbs) {
  int64_t non_finite = 0;
  for (int64_t at = 0; at < n; at += TX_BLOCK) {
    const int64_t count = n - at < TX_BLOCK ? n - at : TX_BLOCK;
    const float *block = x + at;
    float padded[TX_BLOCK];
    if (count < TX_BLOCK) {
      for (int64_t i = 0; i < TX_BLOCK; i++)
        padded[i] = i < count ? block[i] : 0.0f;
      block = padded;
    }
    if (__builtin_expect(tx_exact_add(limbs, tx_sum_squares_full(block)), 0)) {
      for (int64_t i = 0; i < count; i++)
        non_finite += tx_magnitude_bits(block[i]) >= TX_F32_INF;
    }
  }
  tx_exact_carry(limbs);
  return non_finite;
}

TX_FN int64_t tx_stats_run(const void *from, int64_t n, int64_t *limbs, const tx_dtype dtype) {
  int64_t non_finite = 0;
  float tile[TX_TILE];
  for (int64_t at = 0; at < n; at += TX_TILE) {
    const int64_t count = n - at < TX_TILE ? n - at : TX_TILE;
    for (int64_t i = 0; i < count; i++)
      tile[i] = tx_load(from, at + i, dtype);
    non_finite += tx_stats_tile(tile, count, limbs);
  }
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
