/* Which weights a step changed, and how far, from copies of a tile before the step: tx_adamw_args.changed, moved and
 * distances. Included by step_extras.h.
 *
 * Weights with fp32 masters are not read, before or after the step: they are their masters, rounded. */
#ifndef TX_CPU_STEP_CHANGES_H
#define TX_CPU_STEP_CHANGES_H

#include "csrc/core/combos.h"
#include "csrc/cpu/element.h"
#include "csrc/cpu/kernels.h"
#include "csrc/cpu/pack_bits.h"
#include "csrc/math/weight_change.h"
#if defined(__AVX512BW__) && defined(__AVX512DQ__)
#include "csrc/cpu/avx512_changes.h"
#endif

/* Arrays of weights and masters of a parameter, from some element on. */
typedef struct tx_weights {
  const void *weight, *master;
} tx_weights;

/* Room for copies of at most TX_TILE weights and masters. */
typedef struct tx_weights_copy {
  char weight[4 * TX_TILE], master[4 * TX_TILE];
} __attribute__((aligned(64))) tx_weights_copy;

TX_FN tx_weights tx_weights_at(tx_weights from, int64_t at, tx_dtype param, tx_dtype master) {
  const tx_weights found = {(const char *)from.weight + at * (param == TX_F32 ? 4 : 2),
                            (const char *)from.master + at * (master == TX_F32   ? 4
                                                              : master == TX_I16 ? 2
                                                                                 : 0)};
  return found;
}

TX_FN tx_weights tx_copy_weights(tx_weights from, int64_t n, tx_dtype param, tx_dtype master, tx_weights_copy *to) {
  const tx_weights copied = {to->weight, to->master};
  if (master != TX_F32) memcpy(to->weight, from.weight, (size_t)n * (param == TX_F32 ? 4 : 2));
  if (master != TX_NONE) memcpy(to->master, from.master, (size_t)n * (master == TX_F32 ? 4 : 2));
  return copied;
}

/* The stored pattern of weight i; 0 with fp32 masters. */
TX_FN uint32_t tx_stored_weight(tx_weights w, int64_t i, const tx_dtype param, const tx_dtype master) {
  if (master == TX_F32) return 0;
  return param == TX_F32 ? ((const tx_mem_u32 *)w.weight)[i] : ((const tx_mem_u16 *)w.weight)[i];
}
TX_FN uint32_t tx_stored_master(tx_weights w, int64_t i, const tx_dtype master) {
  if (master == TX_NONE) return 0;
  return master == TX_F32 ? ((const tx_mem_u32 *)w.master)[i] : ((const tx_mem_u16 *)w.master)[i];
}

TX_FN uint32_t tx_master_bits(tx_weights w, int64_t i, const tx_dtype param, const tx_dtype master) {
  return tx_master_pattern(tx_stored_weight(w, i, param, master), tx_stored_master(w, i, master), param, master);
}

/* The pattern of weight i (weight_change.h). */
TX_FN uint32_t tx_weight_bits(tx_weights w, int64_t i, const tx_dtype param, const tx_dtype master) {
  return tx_weight_pattern(tx_stored_weight(w, i, param, master), tx_stored_master(w, i, master), param, master);
}

/* Compares n <= TX_BLOCK weights: differ[i] is not 0 if weight i's bits changed. Returns the largest change of a
 * master, as an fp32 pattern. finite: whether no master is NaN. */
TX_FN int32_t tx_compare_weights(tx_weights before, tx_weights now, int64_t n, uint16_t *differ, const tx_dtype param,
                                 const tx_dtype master, const int finite) {
  int32_t largest = 0;
  for (int64_t i = 0; i < n; i++) {
    const uint32_t old_bits = tx_master_bits(before, i, param, master), bits = tx_master_bits(now, i, param, master);
    const int32_t size = tx_magnitude_bits(tx_f32_from_bits(bits) - tx_f32_from_bits(old_bits));
    largest = size > largest ? size : largest;
    if (param == TX_BF16 && master == TX_F32 && finite) {
      const uint32_t was = old_bits + 0x7fffu + ((old_bits >> 16) & 1u), is = bits + 0x7fffu + ((bits >> 16) & 1u);
      differ[i] = (uint16_t)((was ^ is) >> 16);
    } else {
      const uint32_t was = tx_weight_bits(before, i, param, master), is = tx_weight_bits(now, i, param, master);
      differ[i] = param == TX_F32 ? (uint16_t)(was != is) : (uint16_t)(was ^ is);
    }
  }
  return largest;
}

/* The same for any masters, NaN too; rare, so one function serves all dtypes. */
static __attribute__((noinline)) int32_t tx_compare_any(tx_weights before, tx_weights now, int64_t n, uint16_t *differ,
                                                        tx_dtype param, tx_dtype master) {
  return tx_compare_weights(before, now, n, differ, param, master, 0);
}

/* Adds the changes of n <= TX_BLOCK weights, in ulps, to their distances. */
TX_FN void tx_move_distances(tx_weights before, tx_weights now, int64_t n, uint8_t *distances, const tx_dtype param,
                             const tx_dtype master) {
  int8_t by[TX_BLOCK] = {0};
  for (int64_t i = 0; i < n; i++) {
    const uint32_t was = tx_weight_bits(before, i, param, master), is = tx_weight_bits(now, i, param, master);
    const int32_t from = param == TX_F32 ? tx_ordered_32(was) : tx_ordered_16((uint16_t)was);
    const int32_t to = param == TX_F32 ? tx_ordered_32(is) : tx_ordered_16((uint16_t)is);
    by[i] = (int8_t)tx_ulps_between(from, to);
  }
  for (int64_t i = 0; 2 * i < n; i++) {
    const uint8_t pair = distances[i];
    distances[i] = tx_distance_pair(tx_distance_added(tx_distance_of(pair, 0), by[2 * i]),
                                    tx_distance_added(tx_distance_of(pair, 1), by[2 * i + 1]));
  }
}

/* Sets the bits of those of n <= TX_BLOCK weights that changed; returns the largest change of a master, as an fp32
 * pattern. */
TX_FN int32_t tx_changes_of(tx_weights before, tx_weights now, int64_t n, uint64_t bits[TX_BLOCK / 64],
                            const tx_dtype param, const tx_dtype master) {
#if defined(__AVX512BW__) && defined(__AVX512DQ__)
  if (n == TX_BLOCK && param == TX_BF16 && master != TX_NONE) {
    const tx_avx512_change found = master == TX_F32
                                       ? tx_avx512_compare_F32(before.master, now.master)
                                       : tx_avx512_compare_I16(before.weight, before.master, now.weight, now.master);
    if (__builtin_expect(found.largest < TX_F32_INF, 1)) {
      memcpy(bits, found.bits, sizeof found.bits);
      return found.largest;
    }
  }
#endif
  uint16_t differ[TX_BLOCK] = {0};
  int32_t largest = TX_F32_INF;
  if (n == TX_BLOCK) largest = tx_compare_weights(before, now, TX_BLOCK, differ, param, master, 1);
  if (__builtin_expect(largest >= TX_F32_INF, 0)) largest = tx_compare_any(before, now, n, differ, param, master);
  for (int32_t k = 0; k < TX_BLOCK / 64; k++)
    bits[k] = tx_bits_of_64(differ + 64 * k);
  return largest;
}

/* Adds to `changed` and `moved`: of n <= TX_BLOCK weights from element `at` of the piece on, those whose bits are set
 * changed, and masters moved by at most `largest`. */
TX_FN void tx_note_changed(const uint64_t bits[TX_BLOCK / 64], int64_t n, int32_t largest, const tx_step_extras *e,
                           int64_t at) {
  uint64_t known[TX_BLOCK / 64] = {0};
  const size_t bytes = n == TX_BLOCK ? sizeof known : (size_t)(n + 7) / 8;
  memcpy(known, e->changed + at / 8, bytes);
  for (int32_t k = 0; k < TX_BLOCK / 64; k++)
    known[k] |= bits[k];
  memcpy(e->changed + at / 8, known, bytes);
  if (e->moved) {
    tx_mem_u16 *const moved = (tx_mem_u16 *)e->moved + at / TX_BLOCK;
    *moved = tx_moved_add(*moved, largest);
  }
}

/* Records that n weights from element `at` of the piece on were written externally. */
TX_FN void tx_note_written(const tx_step_extras *e, int64_t at, int64_t n) {
  for (int64_t i = at / TX_BLOCK; e->moved && i * TX_BLOCK < at + n; i++)
    ((tx_mem_u16 *)e->moved)[i] = TX_MOVED_UNKNOWN;
}

#endif
