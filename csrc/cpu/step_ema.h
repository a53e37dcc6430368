/* Updates the EMA of masters that a step has just written: tx_adamw_args.emas. Included by step_extras.h. */
#ifndef TX_CPU_STEP_EMA_H
#define TX_CPU_STEP_EMA_H

#include "csrc/cpu/step_changes.h"
#include "csrc/math/dither.h"
#include "csrc/math/ema.h"
#include "csrc/math/remainder.h"

#define TX_EMA_AHEAD 1024 /* bytes to prefetch ahead */

/* The value that weight i is rounded from, for any pair of weight and remainder. */
TX_FN float tx_master_value(tx_weights w, int64_t i, const tx_dtype param, const tx_dtype master) {
  if (master != TX_I16) return tx_f32_from_bits(tx_master_bits(w, i, param, master));
  return tx_remainder_decode(((const tx_mem_u16 *)w.weight)[i], (int16_t)((const tx_mem_u16 *)w.master)[i]);
}

/* n <= TX_BLOCK weights, from element `at` of the piece on. kept: the dtype of the average; has_low: whether 8 more
 * bits are in ema_low. begins: whether the average is set to the masters. */
TX_FN void tx_average_some(tx_weights now, int64_t n, const tx_step_extras *e, int64_t at, const tx_dtype param,
                           const tx_dtype master, const tx_dtype kept, const int has_low, const int begins) {
  char *const emas = (char *)e->ema + at * (kept == TX_F32 ? 4 : 2);
  uint8_t *const lows = has_low ? e->ema_low + at : NULL;
  const uint32_t u = tx_dithered(e->ema_u, (uint32_t)at);
  const float weight = e->ema_weight;
  for (int64_t byte = 0; byte < n * (kept == TX_F32 ? 4 : 2); byte += 64)
    __builtin_prefetch(emas + TX_EMA_AHEAD + byte);
  TX_NO_ALIASES
  for (int32_t i = 0; i < (int32_t)n; i++) {
    const float x = tx_master_value(now, i, param, master);
    const uint32_t threshold = u + (uint32_t)i * TX_LATTICE_ELEMENT;
    if (kept == TX_F32) {
      const float old = ((const tx_mem_f32 *)emas)[i];
      ((tx_mem_f32 *)emas)[i] = begins ? x : tx_ema_next(weight, old, x);
    } else if (has_low) {
      const uint32_t upper = (uint32_t)((const tx_mem_u16 *)emas)[i] << 16, lower = (uint32_t)lows[i] << 8;
      const float old = begins ? x : tx_f32_from_bits(upper | lower);
      const uint32_t bits = tx_ema_round_24(old, tx_ema_change(weight, old, x), threshold);
      ((tx_mem_u16 *)emas)[i] = (uint16_t)(bits >> 16);
      lows[i] = (uint8_t)(bits >> 8);
    } else {
      const float old = tx_f32_from_bf16(((const tx_mem_u16 *)emas)[i]);
      ((tx_mem_u16 *)emas)[i] = tx_bf16_round(begins ? x : tx_ema_next(weight, old, x), threshold);
    }
  }
}

/* One loop for whole blocks, and one for shorter runs and for the first update. */
#define TX_AVERAGE_(kept, has_low)                                               \
  if (n == TX_BLOCK && !e->ema_begins) {                                         \
    tx_average_some(now, TX_BLOCK, e, at, param, master, kept, has_low, 0);      \
  } else {                                                                       \
    tx_average_some(now, n, e, at, param, master, kept, has_low, e->ema_begins); \
  }

TX_FN void tx_average_block(tx_weights now, int64_t n, const tx_step_extras *e, int64_t at, const tx_dtype param,
                            const tx_dtype master) {
  if (e->ema_dtype == TX_F32) {
    TX_AVERAGE_(TX_F32, 0)
  } else if (e->ema_low) {
    TX_AVERAGE_(TX_BF16, 1)
  } else {
    TX_AVERAGE_(TX_BF16, 0)
  }
}
#undef TX_AVERAGE_

#endif
