/* Updates the EMA of the masters that a round has just stepped: tx_adamw_args.emas. */
#ifndef TX_CUDA_EXTRAS_EMA_H
#define TX_CUDA_EXTRAS_EMA_H

#include "csrc/math/ema.h"
#include "cuda/adamw_streams.h"
#include "cuda/adamw_table.h"
#include "cuda/extras_weights.h"

/* weight: 1 - decay. */
static __device__ __forceinline__ void tx_average_vector(const tx_entry_extras &x, const tx_lane_elements &here,
                                                         const tx_ema_turn &turn, float weight,
                                                         const tx_vector_weights &now, const tx_dtype param,
                                                         const tx_dtype master) {
  const int bytes = x.ema_dtype == TX_F32 ? 4 : 2;
  tx_raw kept, lows = {};
  tx_read_raw(kept, x.ema, bytes, x.ema_alignment, here.first, here.count);
  if (x.ema_lows) tx_read_raw(lows, x.ema_lows, 1, x.ema_lows_alignment, here.first, here.count);
  uint32_t uppers[TX_VECTOR], lowers[TX_VECTOR];
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++) {
    const float master_now = tx_master_value(now, i, param, master);
    const uint32_t u = tx_dithered(turn.first, (uint32_t)here.first + (uint32_t)i);
    uppers[i] = lowers[i] = 0u;
    if (x.ema_dtype == TX_F32) {
      kept[i] = tx_bits_from_f32(turn.begins ? master_now : tx_ema_next(weight, tx_f32_from_bits(kept[i]), master_now));
    } else if (x.ema_lows) {
      const uint32_t known = tx_half(kept[i / 2], i % 2) << 16 | tx_raw_code(lows, i, TX_U8) << 8;
      const float old = turn.begins ? master_now : tx_f32_from_bits(known);
      const uint32_t bits = tx_ema_round_24(old, tx_ema_change(weight, old, master_now), u);
      uppers[i] = bits >> 16;
      lowers[i] = bits >> 8 & 0xffu;
    } else {
      const float old = tx_f32_from_bf16((uint16_t)tx_half(kept[i / 2], i % 2));
      uppers[i] = tx_bf16_round(turn.begins ? master_now : tx_ema_next(weight, old, master_now), u);
    }
  }
  if (x.ema_dtype != TX_F32) tx_join_codes(kept, uppers, TX_BF16);
  tx_write_raw(kept, x.ema, bytes, x.ema_alignment, here.first, here.count);
  if (!x.ema_lows) return;
  tx_join_codes(lows, lowers, TX_U8);
  tx_write_raw(lows, x.ema_lows, 1, x.ema_lows_alignment, here.first, here.count);
}

#endif
