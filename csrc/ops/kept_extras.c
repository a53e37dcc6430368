#include "csrc/ops/kept_extras.h"

#include <string.h>

#include "csrc/math/ema.h"
#include "csrc/math/health.h"
#include "csrc/ops/tensor.h"

/* Fills in the moving average of parameter i, from element `begin` on. */
static void average_of(const tx_left_behind *a, int64_t i, int64_t begin, int64_t step, tx_step_extras *extras) {
  const tx_tensor ema = tx_at_or_none(a->emas, i);
  const tx_meta meta = tx_meta_of(a->meta, i);
  if (ema.numel == 0) return;
  const tx_ema_turn turn = tx_ema_turn_at(a->seed, meta.id, step, a->ema_every, tx_element_at(meta, begin));
  if (!turn.averages) return;
  extras->ema = tx_advanced(ema, begin);
  extras->ema_low = tx_advanced(tx_at_or_none(a->ema_lows, i), begin);
  extras->ema_dtype = ema.dtype;
  extras->ema_weight = (float)(1.0 - a->ema_decay);
  extras->ema_begins = turn.begins;
  extras->ema_u = turn.first;
}

const tx_step_extras *tx_extras_begin(const tx_left_behind *a, int64_t i, int64_t begin, int64_t step,
                                      tx_kept_extras *kept) {
  tx_step_extras *const extras = &kept->extras;
  *extras = (tx_step_extras){.changed = tx_advanced(tx_at_or_none(a->changed, i), begin / 8),
                             .moved = tx_advanced(tx_at_or_none(a->moved, i), begin / TX_BLOCK),
                             .distance = tx_advanced(tx_at_or_none(a->distances, i), begin / 2)};
  average_of(a, i, begin, step, extras);
  kept->health = tx_at_or_none(a->healths, i);
  if (kept->health.numel) {
    memset(kept->row, 0, sizeof kept->row);
    extras->health = kept->row;
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

void tx_extras_end(tx_kept_extras *kept) {
  if (kept->health.numel) add_health(kept->health, kept->row);
}
