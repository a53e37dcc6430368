// Encodes one block of values, one element at a time, with the functions of csrc/math/block_scale.h. The vectorised
// loops have to give the same codes.
#ifndef TX_TESTS_CORE_BLOCKS_H
#define TX_TESTS_CORE_BLOCKS_H

#include <algorithm>

extern "C" {
#include "csrc/math/block_scale.h"
}

// Writes the codes of n values; returns the block's scale byte. u: n rounding thresholds, or nullptr to round to
// nearest.
inline uint8_t EncodeBlock(tx_block_format f, const float *x, int32_t n, const uint32_t *u, uint32_t *codes) {
  const tx_block_plan plan = tx_block_plan_from(f, tx_block_amax_bits(x, n));
  uint32_t largest = 0;
  for (int32_t i = 0; i < n; i++) {
    codes[i] = tx_block_code(f, plan, x[i], u != nullptr, u ? u[i] : 0);
    largest = std::max(largest, codes[i]);
  }
  const uint32_t doubling = tx_block_doubling(f, plan, largest);
  for (int32_t i = 0; i < n; i++)
    codes[i] = tx_block_finish(f, plan, x[i], codes[i], doubling);
  return tx_block_scale_byte(plan, doubling);
}

#endif
