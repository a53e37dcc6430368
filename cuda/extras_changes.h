/* Which weights of a round changed, and how far: tx_adamw_args.changed, moved and distances. A lane's eight weights are
 * a byte of `changed`; 16 neighbouring lanes have the block of an element of `moved`. */
#ifndef TX_CUDA_EXTRAS_CHANGES_H
#define TX_CUDA_EXTRAS_CHANGES_H

#include "cuda/adamw_streams.h"
#include "cuda/adamw_table.h"
#include "cuda/device_scalars.h"
#include "cuda/extras_weights.h"

struct tx_vector_change {
  uint32_t bits;   /* bit i: weight i changed */
  int32_t largest; /* the largest change of a master, as an fp32 pattern */
};

static __device__ __forceinline__ tx_vector_change tx_change_of(const tx_vector_weights &before,
                                                                const tx_vector_weights &now, int32_t count,
                                                                const tx_dtype param, const tx_dtype master) {
  tx_vector_change change = {0u, 0};
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++) {
    const float difference = tx_f32_from_bits(tx_master_bits(now, i, param, master)) -
                             tx_f32_from_bits(tx_master_bits(before, i, param, master));
    const int32_t size = i < count ? tx_magnitude_bits(difference) : 0;
    const bool differs = tx_weight_bits(before, i, param, master) != tx_weight_bits(now, i, param, master);
    change.largest = size > change.largest ? size : change.largest;
    change.bits |= i < count && differs ? 1u << i : 0u;
  }
  return change;
}

/* Every lane of the warp has to call it. written: whether the block's weights were written externally, so that it is
 * unknown how far they moved. */
static __device__ __forceinline__ void tx_note_change(const tx_entry_extras &x, const tx_lane_elements &here,
                                                      const tx_vector_change &change, bool written) {
  const int32_t largest = tx_block_largest(change.largest);
  if (here.count <= 0) return;
  const uint64_t first = (uint64_t)here.first;
  x.changed[first / 8] = (uint8_t)(x.changed[first / 8] | change.bits);
  if (!x.moved || first % TX_BLOCK != 0) return;
  char *const moved = (char *)x.moved + first / TX_BLOCK * 2;
  tx_write_value(moved, written ? TX_MOVED_UNKNOWN : tx_moved_add(tx_read_value<uint16_t>(moved), largest));
}

/* Adds a vector's changes in ulps to its distances, two of which share a byte. */
static __device__ __forceinline__ void tx_note_distances(uint8_t *distances, const tx_lane_elements &here,
                                                         const tx_vector_weights &before, const tx_vector_weights &now,
                                                         const tx_dtype param, const tx_dtype master) {
  uint8_t *const pairs = distances + (uint64_t)here.first / 2;
  uint32_t word = here.count == TX_VECTOR ? tx_read_value<uint32_t>(pairs) : 0u;
#pragma unroll
  for (int k = 0; k < TX_VECTOR / 2; k++) {
    if (2 * k >= here.count) break;
    int32_t by[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint32_t was = tx_weight_bits(before, 2 * k + i, param, master),
                     is = tx_weight_bits(now, 2 * k + i, param, master);
      const int32_t from = param == TX_F32 ? tx_ordered_32(was) : tx_ordered_16((uint16_t)was),
                    to = param == TX_F32 ? tx_ordered_32(is) : tx_ordered_16((uint16_t)is);
      by[i] = 2 * k + i < here.count ? tx_ulps_between(from, to) : 0;
    }
    const uint8_t pair = here.count == TX_VECTOR ? (uint8_t)(word >> (8 * k)) : pairs[k];
    const uint8_t moved = tx_distance_pair(tx_distance_added(tx_distance_of(pair, 0), by[0]),
                                           tx_distance_added(tx_distance_of(pair, 1), by[1]));
    word = (word & ~(0xffu << (8 * k))) | (uint32_t)moved << (8 * k);
    if (here.count != TX_VECTOR) pairs[k] = moved;
  }
  if (here.count == TX_VECTOR) tx_write_value(pairs, word);
}

#endif
