/* The table entries for a call's extra outputs. */
#ifndef TX_CUDA_EXTRAS_ENTRY_H
#define TX_CUDA_EXTRAS_ENTRY_H

#include "cuda/adamw_table.h"
#include "cuda/vectors.h"

extern "C" {
#include "csrc/ops/step_outputs.h"
#include "csrc/ops/tensor.h"
}

/* Whether parameter i has any extra output. */
static inline bool tx_has_extras(const tx_step_outputs &outputs, int64_t i) {
  return tx_at_or_none(outputs.changed, i).numel || tx_at_or_none(outputs.emas, i).numel ||
         tx_at_or_none(outputs.healths, i).numel;
}

/* The extra outputs of parameter i from element `begin` on, a multiple of TX_BLOCK. */
static inline tx_entry_extras tx_extras_of(const tx_step_outputs &outputs, int64_t i, int64_t begin) {
  const tx_tensor ema = tx_at_or_none(outputs.emas, i), health = tx_at_or_none(outputs.healths, i);
  tx_entry_extras x = {};
  x.changed = (uint8_t *)tx_advanced(tx_at_or_none(outputs.changed, i), begin / 8);
  x.moved = tx_advanced(tx_at_or_none(outputs.moved, i), begin / TX_BLOCK);
  x.distances = (uint8_t *)tx_advanced(tx_at_or_none(outputs.distances, i), begin / 2);
  x.ema = tx_advanced(ema, begin);
  x.ema_lows = (uint8_t *)tx_advanced(tx_at_or_none(outputs.ema_lows, i), begin);
  x.health = (unsigned long long *)(health.numel ? health.data : NULL);
  x.ema_dtype = (uint8_t)ema.dtype;
  x.ema_alignment = (uint8_t)tx_alignment_of(x.ema);
  x.ema_lows_alignment = (uint8_t)tx_alignment_of(x.ema_lows);
  return x;
}

#endif
