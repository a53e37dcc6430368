#include "csrc/ops/muon_square.h"

#include "csrc/math/numeric.h"

void tx_muon_shift(tx_tensor square, int64_t n, double by) {
  for (int64_t i = 0; i < n; i++) {
    if (square.dtype == TX_BF16) {
      uint16_t *at = (uint16_t *)square.data + i * (n + 1);
      *at = tx_bf16_from_f32(tx_f32_from_bf16(*at) + (float)by);
    } else {
      ((float *)square.data)[i * (n + 1)] += (float)by;
    }
  }
}

int tx_muon_is_finite(tx_tensor square) {
  uint32_t found = 0;
  if (square.dtype == TX_BF16) {
    const uint16_t *bits = square.data;
    for (int64_t i = 0; i < square.numel; i++)
      found |= (bits[i] & 0x7f80u) == 0x7f80u;
  } else {
    const uint32_t *bits = square.data;
    for (int64_t i = 0; i < square.numel; i++)
      found |= (bits[i] & 0x7f800000u) == 0x7f800000u;
  }
  return !found;
}
