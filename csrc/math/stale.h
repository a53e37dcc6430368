/* Whether a 16-bit weight still is its fp32 master, rounded. */
#ifndef TX_MATH_STALE_H
#define TX_MATH_STALE_H

#include "csrc/math/numeric.h"
#include "csrc/torch_ext.h"

/* 1 if a 16-bit weight is not what `master` rounds to, else 0; +0 equals -0, and NaN equals NaN. In integers and
 * without branches: comparisons of floats kept gcc 12 from vectorising. */
TX_FN uint32_t tx_master_stale(float master, uint32_t weight, const tx_dtype param) {
  const uint32_t nearest = param == TX_BF16 ? tx_bf16_from_f32(master) : tx_f16_from_f32(master);
  const int32_t infinity = param == TX_BF16 ? 0x7f80 : 0x7c00;
  const int32_t a = (int32_t)(nearest & 0x7fffu), b = (int32_t)(weight & 0x7fffu);
  const uint32_t zeros = (a | b) == 0 ? 1u : 0u;
  const uint32_t nans = (a < b ? a : b) > infinity ? 1u : 0u;
  return (nearest != weight ? 1u : 0u) & ~(zeros | nans);
}

#endif
