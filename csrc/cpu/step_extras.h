/* The step's extra outputs, computed from a tile after it was stepped, while it is in the L1 cache. Included by
 * step_streams.h. */
#ifndef TX_CPU_STEP_EXTRAS_H
#define TX_CPU_STEP_EXTRAS_H

#include "csrc/cpu/step_changes.h"
#include "csrc/cpu/step_ema.h"
#include "csrc/cpu/step_found.h"

/* One block of n <= TX_BLOCK weights, from element `at` of the piece on. */
TX_FN void tx_note_block(tx_weights before, tx_weights now, int64_t n, const tx_step_extras *e, int64_t at,
                         const tx_dtype param, const tx_dtype master) {
  uint64_t bits[TX_BLOCK / 64];
  const int32_t largest = tx_changes_of(before, now, n, bits, param, master);
  if (e->changed) tx_note_changed(bits, n, largest, e, at);
  if (e->distance) tx_move_distances(before, now, n, e->distance + at / 2, param, master);
  if (e->health) tx_note_measured(e->health, n, bits, tx_measure_block(before, now, n, param, master));
}

/* Loops for each row of weights, over n weights; the first is element `at` of the piece, at a block's edge.
 * tx_note_loops: all extra outputs; tx_average_loops: the EMA only. */
typedef void (*tx_note_loop)(tx_weights before, tx_weights now, int64_t n, const tx_step_extras *e, int64_t at);
typedef void (*tx_average_loop)(tx_weights now, int64_t n, const tx_step_extras *e, int64_t at);
#define TX_NOTE_LOOP_(index, P, M, ...)                                                                               \
  static __attribute__((noinline)) void tx_average_##P##_##M(tx_weights now, int64_t n, const tx_step_extras *e,      \
                                                             int64_t at) {                                            \
    for (int64_t i = 0; i < n; i += TX_BLOCK)                                                                         \
      tx_average_block(tx_weights_at(now, i, TX_##P, TX_##M), n - i < TX_BLOCK ? n - i : TX_BLOCK, e, at + i, TX_##P, \
                       TX_##M);                                                                                       \
  }                                                                                                                   \
  static __attribute__((noinline)) void tx_note_##P##_##M(tx_weights before, tx_weights now, int64_t n,               \
                                                          const tx_step_extras *e, int64_t at) {                      \
    for (int64_t i = 0; (e->changed || e->health) && i < n; i += TX_BLOCK)                                            \
      tx_note_block(tx_weights_at(before, i, TX_##P, TX_##M), tx_weights_at(now, i, TX_##P, TX_##M),                  \
                    n - i < TX_BLOCK ? n - i : TX_BLOCK, e, at + i, TX_##P, TX_##M);                                  \
    if (e->ema) tx_average_##P##_##M(now, n, e, at);                                                                  \
  }
TX_FOR_EACH_WEIGHT(TX_NOTE_LOOP_)
#undef TX_NOTE_LOOP_

#define TX_AVERAGE_ENTRY_(index, P, M, ...) [index] = tx_average_##P##_##M,
static const tx_average_loop tx_average_loops[TX_WEIGHTS] = {TX_FOR_EACH_WEIGHT(TX_AVERAGE_ENTRY_)};
#undef TX_AVERAGE_ENTRY_

#define TX_NOTE_ENTRY_(index, P, M, ...) [index] = tx_note_##P##_##M,
static const tx_note_loop tx_note_loops[TX_WEIGHTS] = {TX_FOR_EACH_WEIGHT(TX_NOTE_ENTRY_)};
#undef TX_NOTE_ENTRY_

#endif
