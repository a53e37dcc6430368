/* Changes and health measurements, found by the loop that steps the weights while old and new values are in registers.
 * The bits are those that step_changes.h and step_health.h compute from copies. Reading the copies again from L1 took a
 * third of a step; here most of the work is done while the loop waits for the divider. Included by step_extras.h. */
#ifndef TX_CPU_STEP_FOUND_H
#define TX_CPU_STEP_FOUND_H

#include "csrc/cpu/step_changes.h"
#include "csrc/cpu/step_health.h"

/* What is found of a whole block. */
typedef struct tx_found {
  uint64_t changed[TX_BLOCK / 64]; /* bits of the weights that changed */
  int32_t moved;                   /* the fp32 pattern of the largest change of a master */
  tx_measured measured;
} tx_found;

/* What a loop looks for, as bits. Loops that use tx_finding always look for changes if they look for anything. */
enum { TX_FIND_NOTHING, TX_FIND_CHANGED, TX_FIND_MEASURED, TX_FIND_BOTH };
TX_FN int32_t tx_finds(const tx_step_extras *e) {
  if (!e || e->distance) return TX_FIND_NOTHING;
  return (e->changed ? TX_FIND_CHANGED : 0) | (e->health ? TX_FIND_MEASURED : 0);
}

/* Stores what was found of the block at element `at` of the piece. */
TX_FN void tx_note_found(const tx_found *found, const tx_step_extras *e, int64_t at) {
  if (e->changed) tx_note_changed(found->changed, TX_BLOCK, found->moved, e, at);
  if (e->health) tx_note_measured(e->health, TX_BLOCK, found->changed, found->measured);
}

/* The findings of a block in the lanes of a loop over words of `per` elements; see tx_measuring. */
typedef struct tx_finding {
  uint16_t differ[TX_BLOCK]; /* not 0 if the weight changed */
  int32_t moved[TX_HEALTH_LANES];
  tx_measuring measured;
} __attribute__((aligned(64))) tx_finding;

TX_FN void tx_find_begin(tx_finding *f, const int32_t finds) {
  if (finds != TX_FIND_NOTHING) memset(f->moved, 0, sizeof f->moved);
  if (finds & TX_FIND_MEASURED) memset(&f->measured, 0, sizeof f->measured);
}

/* Adds a master's values before and after the step; j, k: see tx_measure. */
TX_FN void tx_find(tx_finding *f, int32_t j, int32_t k, float before, float now, const tx_dtype param,
                   const int32_t per, const int32_t finds) {
  const float update = now - before;
  const int32_t size = tx_magnitude_bits(update);
  f->moved[j] = size > f->moved[j] ? size : f->moved[j];
  if (finds & TX_FIND_MEASURED) tx_measure(&f->measured, j, k, update, now, param, per);
}

/* The values of a pair of masters before and after the step, and a word whose halves are not 0 if the weights
 * changed. */
typedef struct tx_stepped_pair {
  float before[2], now[2];
  uint32_t differ;
} tx_stepped_pair;

/* Adds pair i of the block: elements k and k + 1 of a word of `per`, in lane j. */
TX_FN void tx_find_pair(tx_finding *f, tx_stepped_pair pair, int32_t i, int32_t j, const int32_t k, const int32_t per,
                        const int32_t finds) {
  if (finds == TX_FIND_NOTHING) return;
  ((tx_mem_u32 *)f->differ)[i] = pair.differ;
  tx_find(f, j, k, pair.before[0], pair.now[0], TX_BF16, per, finds);
  tx_find(f, j, k + 1, pair.before[1], pair.now[1], TX_BF16, per, finds);
}

/* Returns whether all values were finite; if not, *found is wrong. */
TX_FN int tx_find_end(const tx_finding *f, tx_found *found, const int32_t per, const int32_t finds) {
  if (finds == TX_FIND_NOTHING) return 0;
  found->moved = 0;
  for (int32_t j = 0; j < TX_HEALTH_LANES / per; j++)
    found->moved = f->moved[j] > found->moved ? f->moved[j] : found->moved;
  for (int32_t k = 0; k < TX_BLOCK / 64; k++)
    found->changed[k] = tx_bits_of_64(f->differ + 64 * k);
  if (finds & TX_FIND_MEASURED) found->measured = tx_measured_of(&f->measured, per);
  return found->moved < TX_F32_INF;
}

#endif
