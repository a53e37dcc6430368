#include "csrc/ops/piece_outputs.h"

#include <string.h>

#include "csrc/math/ema.h"
#include "csrc/math/health.h"
#include "csrc/ops/tensor.h"

/* Fills in the moving average of parameter i, from element `begin` on. */
static void average_of(const tx_step_outputs *outputs, int64_t i, int64_t begin, int64_t step, tx_step_extras *extras) {
  const tx_tensor ema = tx_at_or_none(outputs->emas, i);
  const tx_meta meta = tx_meta_of(outputs->meta, i);
  if (ema.numel == 0) return;
  const tx_ema_turn turn = tx_ema_turn_at(outputs->seed, meta.id, step, outputs->ema_every, tx_element_at(meta, begin));
  if (!turn.averages) return;
  extras->ema = tx_advanced(ema, begin);
  extras->ema_low = tx_advanced(tx_at_or_none(outputs->ema_lows, i), begin);
  extras->ema_dtype = ema.dtype;
  extras->ema_weight = (float)(1.0 - outputs->ema_decay);
  extras->ema_begins = turn.begins;
  extras->ema_u = turn.first;
}

const tx_step_extras *tx_extras_begin(const tx_step_outputs *outputs, int64_t i, int64_t begin, int64_t step,
                                      tx_piece_outputs *piece_outputs) {
  tx_step_extras *const extras = &piece_outputs->extras;
  *extras = (tx_step_extras){.changed = tx_advanced(tx_at_or_none(outputs->changed, i), begin / 8),
                             .moved = tx_advanced(tx_at_or_none(outputs->moved, i), begin / TX_BLOCK),
                             .distance = tx_advanced(tx_at_or_none(outputs->distances, i), begin / 2)};
  average_of(outputs, i, begin, step, extras);
  piece_outputs->health = tx_at_or_none(outputs->healths, i);
  if (piece_outputs->health.numel) {
    memset(piece_outputs->row, 0, sizeof piece_outputs->row);
    extras->health = piece_outputs->row;
  }
  return extras->changed || extras->ema || extras->health ? extras : NULL;
}

/* Adds a task's sums to the row of its parameter, to which other tasks add too. */
static void add_health(tx_tensor health, const int64_t *row) {
  int64_t *const to = health.data;
  for (int32_t k = 0; k < TX_HEALTH_LARGEST; k++)
    if (row[k]) __atomic_fetch_add(&to[k], row[k], __ATOMIC_RELAXED);
  int64_t known = __atomic_load_n(&to[TX_HEALTH_LARGEST], __ATOMIC_RELAXED);
  while (row[TX_HEALTH_LARGEST] > known &&
         !__atomic_compare_exchange_n(&to[TX_HEALTH_LARGEST], &known, row[TX_HEALTH_LARGEST], 1, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
}

void tx_extras_end(tx_piece_outputs *piece_outputs) {
  if (piece_outputs->health.numel) add_health(piece_outputs->health, piece_outputs->row);
}
