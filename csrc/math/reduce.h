/* The sum of squares of one block of 128 elements, by a fixed tree: the leaf of every norm.
 *
 * A square of an fp32 number is exact in double. The tree folds halves: leaf j with j + 64, then j with j + 32, 16, 8,
 * 4, 2, 1. So each level is a vector loop, and a CUDA warp whose thread j holds elements j, j + 32, j + 64, j + 96
 * finishes with five shuffles. A short block counts as padded with zeros. The result is not finite exactly if an
 * element is not: finite ones add up to less than 2^263. */
#ifndef TX_MATH_REDUCE_H
#define TX_MATH_REDUCE_H

#include "csrc/math/numeric.h"

#define TX_REDUCE_BLOCK 128

TX_FN double tx_square(float x) {
  return (double)x * (double)x;
}

/* x: exactly 128 elements. */
TX_FN double tx_sum_squares_full(const float *x) {
  double leaf[TX_REDUCE_BLOCK / 2];
  for (int32_t j = 0; j < 64; ++j)
    leaf[j] = tx_square(x[j]) + tx_square(x[j + 64]);
  for (int32_t j = 0; j < 32; ++j)
    leaf[j] += leaf[j + 32];
  for (int32_t j = 0; j < 16; ++j)
    leaf[j] += leaf[j + 16];
  for (int32_t j = 0; j < 8; ++j)
    leaf[j] += leaf[j + 8];
  for (int32_t j = 0; j < 4; ++j)
    leaf[j] += leaf[j + 4];
  return (leaf[0] + leaf[2]) + (leaf[1] + leaf[3]);
}

#endif
