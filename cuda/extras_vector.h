/* The extra outputs of a round, for the steps of AdamW and of Muon: computed from registers, after the step is computed
 * and before its results are written. */
#ifndef TX_CUDA_EXTRAS_VECTOR_H
#define TX_CUDA_EXTRAS_VECTOR_H

#include "cuda/extras_changes.h"
#include "cuda/extras_ema.h"
#include "cuda/extras_health.h"

/* Weights `before` become `now`. written: whether the block's weights were written externally. ema_weight:
 * 1 - ema_decay. Every lane of the warp has to call it. */
static __device__ __forceinline__ void tx_store_extras_vector(const tx_entry_extras &x, const tx_lane_elements &here,
                                                              const tx_ema_turn &turn, float ema_weight, bool written,
                                                              const tx_vector_weights &before,
                                                              const tx_vector_weights &now, const tx_dtype param,
                                                              const tx_dtype master) {
  if (x.changed || x.health) {
    const tx_vector_change change = tx_change_of(before, now, here.count, param, master);
    if (x.changed) tx_note_change(x, here, change, written);
    if (x.distances) tx_note_distances(x.distances, here, before, now, param, master);
    if (x.health) tx_health_take(before, now, here.count, change.bits, param, master);
  }
  if (x.ema && turn.averages) tx_average_vector(x, here, turn, ema_weight, now, param, master);
}

#endif
