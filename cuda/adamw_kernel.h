/* The kernel of the step. A warp takes a tile, a round of TX_ROUND elements at a time, and shares nothing with other
 * warps, so that there is no barrier but the one at the end, when the last block to finish counts the steps. Included
 * by the files that instantiate it. */
#ifndef TX_CUDA_ADAMW_KERNEL_H
#define TX_CUDA_ADAMW_KERNEL_H

#include "cuda/adamw_vector.h"
#include "cuda/last_block.h"
#include "cuda/warp_checksum.h"

namespace {

/* Returns how many weights are in a block of remainders that was dropped. */
template <int WEIGHT, int MOMENTS>
__device__ __forceinline__ int64_t step_tile(const tx_step_table &t, const tx_tile &tile, const of_tensor &w) {
  const tx_step_entry &e = t.entries[tile.tensor];
  const tx_dtype master = round_of<WEIGHT, MOMENTS>::master_of(e);
  const uint32_t lane = tx_lane_id();
  const void *const weights = (const char *)e.param + 2 * tile.begin;
  bool drops = false;
  if (master == TX_I16 && e.checksums && t.common.resyncs) {
    const void *checksum = (const char *)e.checksums + tile.begin / TX_CHECKSUM * 8;
    drops = tx_checksum_differs(checksum, tx_checksum_of(weights, e.param_alignment, tile.count, lane));
  }
  const bool renews = master != TX_NONE && e.checksums;
  tx_checksum_sums written = {}; /* of the weights beside remainders, as they are stored */
  for (int32_t i = 0; i < tx_rounds(tile.count); i++) {
    const tx_share share = tx_share_of_tile(tile.count, i, lane);
    const bool whole = round_of<WEIGHT, MOMENTS>::kQuick && e.aligned && tile.count - i * TX_ROUND >= TX_ROUND;
    const tx_here here = {tile.begin + share.first, share.count, whole};
    uint32_t words[4];
    round_of<WEIGHT, MOMENTS>::round(t, e, w, here, drops, words);
    if (master == TX_I16 && renews) tx_checksum_take(written, words, tx_checksum_left(tile.count, share.first));
  }
  if (renews) {
    uint64_t checksum;
    if (master == TX_I16) {
      checksum = tx_checksum_value(written, lane);
    } else {
      __syncwarp();
      checksum = e.numel > TX_SAMPLED ? tx_sample_of(weights, e.param_alignment, tile.count, lane)
                                      : tx_checksum_of(weights, e.param_alignment, tile.count, lane);
    }
    const int64_t unit = master == TX_F32 ? TX_SAMPLED : TX_CHECKSUM;
    if (lane == 0) tx_write_value((char *)e.checksums + tile.begin / unit * 8, checksum);
  }
  return drops ? tile.count : 0;
}

/* Once every block has read the steps, the last one adds to them. */
__device__ __forceinline__ void count_steps(const tx_step_table &t) {
  if (!tx_is_last_block(t.common.ticket)) return;
  for (int32_t i = (int32_t)threadIdx.x; i < t.n; i += (int32_t)blockDim.x)
    tx_write_value(t.entries[i].step, tx_read_value<float>(t.entries[i].step) + 1.0f);
}

template <int WEIGHT, int MOMENTS>
__global__ void __launch_bounds__(TX_BLOCK_THREADS, 2) step(const __grid_constant__ tx_step_table t) {
  const tx_step_admission admitted = tx_step_admitted(t.common.gate);
  if (admitted.skips) {
    if (blockIdx.x == 0 && threadIdx.x == 0) tx_count(t.common.skipped, 1);
    return;
  }
  of_tensor w = {};
  w.tensor = -1;
  int64_t resynced = 0;
  const int64_t tiles = tx_table_tiles(t);
  for (int64_t number = tx_first_tile(); number < tiles; number += tx_tile_step()) {
    const tx_tile tile = tx_table_tile(t, number);
    enter_tensor(w, t, tile.tensor, admitted);
    resynced += step_tile<WEIGHT, MOMENTS>(t, tile, w);
  }
  if (tx_lane_id() == 0) tx_count(t.common.resynced, resynced);
  count_steps(t);
}

/* tx_step_launch by one kernel. */
tx_status launch_step(const tx_cuda_scope *scope, void (*kernel)(tx_step_table), tx_step_table &table,
                      tx_error *error) {
  table.common.ticket = tx_take_ticket(scope);
  return tx_cuda_launch_always(scope, kernel, table, "the step", error);
}

/* tx_step_launch for one kind of moments, with a kernel for each row of weights. */
template <int MOMENTS>
tx_status launch_step_of(const tx_cuda_scope *scope, int weight, tx_step_table &table, tx_error *error) {
  static void (*const kernels[TX_WEIGHTS])(tx_step_table) = {
#define TX_ENTRY_(index, ...) step<index, MOMENTS>,
      TX_FOR_EACH_WEIGHT(TX_ENTRY_)
#undef TX_ENTRY_
  };
  return launch_step(scope, kernels[weight], table, error);
}

}  // namespace

#endif
