/* What a step leaves behind of a round beside states, of AdamW's and of Muon's: from registers, between what was
 * stepped and its being written. */
#ifndef TX_CUDA_EXTRAS_VECTOR_H
#define TX_CUDA_EXTRAS_VECTOR_H

#include "cuda/extras_changes.h"
#include "cuda/extras_ema.h"
#include "cuda/extras_health.h"

/* A round of weights that were `before` and are to be `now`. written: to their block, by somebody else. ema_weight: 1 -
 * ema_decay. Every lane of the warp calls it. */
static __device__ __forceinline__ void tx_leave_vector(const tx_entry_extras &x, const tx_here &here,
                                                       const tx_ema_turn &turn, float ema_weight, bool written,
                                                       const tx_vector_weights &before, const tx_vector_weights &now,
                                                       const tx_dtype param, const tx_dtype master) {
  if (x.changed || x.health) {
    const tx_vector_change change = tx_change_of(before, now, here.count, param, master);
    if (x.changed) tx_note_change(x, here, change, written);
    if (x.distances) tx_note_distances(x.distances, here, before, now, param, master);
    if (x.health) tx_health_take(before, now, here.count, change.bits, param, master);
  }
  if (x.ema && turn.averages) tx_average_vector(x, here, turn, ema_weight, now, param, master);
}

#endif
