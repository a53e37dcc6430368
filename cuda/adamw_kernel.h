/* The kernel of the step. A warp works on a tile, a round of TX_ROUND elements at a time, and shares nothing with other
 * warps. So there is only one barrier, at the end, where the last block to finish increments the step counts. Included
 * by the files that instantiate the kernel. */
#ifndef TX_CUDA_ADAMW_KERNEL_H
#define TX_CUDA_ADAMW_KERNEL_H

#include "cuda/adamw_usual.h"
#include "cuda/last_block.h"
#include "cuda/resync_vector.h"
#include "cuda/warp_checksum.h"

namespace {

/* Resyncs the fp32 masters of a suspect tensor's tile; returns how many of them changed. */
__device__ __forceinline__ int32_t resync_tile(const tx_step_entry &e, const tx_dtype param, const tx_tile &tile) {
  const tx_masters masters = {e.param, e.master, param, e.param_alignment, e.master_alignment};
  int32_t changed = 0;
  for (int32_t i = 0; i < tx_rounds(tile.count); i++) {
    const tx_share share = tx_share_of_tile(tile.count, i, tx_lane_id());
    if (share.count > 0) changed += tx_resync_vector(masters, tile.begin + share.first, share.count, TX_RESYNC_STALE);
  }
  changed = tx_warp_sum(changed);
  __syncwarp(); /* other lanes may read what this one wrote */
  return changed;
}

/* Whether the weights of a tile with remainders were written externally. copies: what was read ahead of it. */
template <int WEIGHT, int MOMENTS>
__device__ __forceinline__ bool was_written(const tx_step_entry &e, const tx_tile &tile, const tile_copies &copies) {
  if (usual_ops<WEIGHT, MOMENTS>::kHas && copies.there) return copy_ops<MOMENTS>::was_written(copies);
  const uint64_t stored = tx_stored_checksum((const char *)e.checksums + tile.begin / TX_CHECKSUM * 8);
  return stored != tx_checksum_of((const char *)e.param + 2 * tile.begin, e.param_alignment, tile.count, tx_lane_id());
}

/* Stores the checksum of a tile's new weights. sums: over all of them, with 16-bit remainders. */
__device__ __forceinline__ void renew_checksum(const tx_step_entry &e, const tx_tile &tile, const tx_dtype master,
                                               const tx_checksum_sums &sums) {
  const uint32_t lane = tx_lane_id();
  const void *const weights = (const char *)e.param + 2 * tile.begin;
  uint64_t checksum;
  if (master == TX_I16) {
    checksum = tx_checksum_of_tile(sums, tile.count, lane);
  } else {
    __syncwarp();
    checksum = e.numel > TX_SAMPLED ? tx_sample_of(weights, e.param_alignment, tile.count, lane)
                                    : tx_checksum_of(weights, e.param_alignment, tile.count, lane);
  }
  const uint64_t unit = master == TX_F32 ? TX_SAMPLED : TX_CHECKSUM;
  if (lane == 0) tx_write_value((char *)e.checksums + (uint64_t)tile.begin / unit * 8, checksum);
}

/* Steps a tile. copies: what was read ahead of the tile; becomes that of `next`, where the warp's next tile is. */
template <int WEIGHT, int MOMENTS>
__device__ __forceinline__ void step_tile(const tx_step_table &t, const tx_tile &tile, const tx_tile_place &next,
                                          const tensor_state &w, warp_notes &notes, tile_copies &copies) {
  typedef round_ops<WEIGHT, MOMENTS> any;
  typedef usual_ops<WEIGHT, MOMENTS> usual;
  const tx_step_entry &e = t.entries[tile.tensor];
  const tx_dtype master = any::master_of(e);
  bool written = false, drops = false;
  if (usual::kHas && copies.there) usual::wait_for_tile();
  if (master == TX_I16 && e.checksums && (kHasExtras || t.common.resyncs)) {
    written = was_written<WEIGHT, MOMENTS>(e, tile, copies);
    drops = written && (!kHasExtras || t.common.resyncs);
  }
  if (master == TX_F32 && w.suspect) {
    const int32_t resynced = resync_tile(e, any::param_of(e), tile);
    count_resynced(notes, resynced);
    if (resynced != 0) note_resynced(t, tile.tensor);
  }
  const bool is_usual = usual::kHas && copies.there && w.quick && !drops;
  typename usual::usual_tile here = {};
  if (usual::kHas) here = usual::enter(copies, t, next);
  tx_checksum_sums sums = {}; /* over the new weights, with 16-bit remainders */
#pragma unroll 1
  for (int32_t i = 0; i * TX_ROUND < tile.count; i++) {
    if (is_usual && usual::round(here, sums, copies, t, tile, next, w, notes, (uint32_t)i)) continue;
    stepped_round now;
    any::round(t, e, usual::whole(w, notes), any::layout::lane_elements_of(e, tile, i), {written, drops}, now,
               w.quick && !is_usual);
    if (usual::kHas) usual::note(here, now);
    if (master == TX_I16) tx_checksum_take(sums, now.weights);
  }
  if (is_usual) {
    usual::leave(here);
  } else {
    if (usual::kHas && copies.there) usual::copying::begin_all(copies, t.entries[next.tensor]);
    if (drops) count_resynced(notes, tile.count);
  }
  if (master != TX_NONE && e.checksums) renew_checksum(e, tile, master, sums);
}

/* Adds 1 to the step counts. The launch's last block does so, since every other block has read them by then. */
__device__ __forceinline__ void count_steps(const tx_step_table &t) {
  if (!tx_is_last_block(t.common.ticket)) return;
  mark_resynced(t);
  clear_suspects(t);
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
  const bool compares = (WEIGHT == TX_WEIGHT_ANY || tx_master_of_weight(WEIGHT) == TX_F32) && t.common.compares_samples;
  if (compares) compare_samples(t);
  warp_notes &notes = notes_of_warp();
  begin_notes(notes, admitted);
  begin_extras();
  tensor_state w = {};
  tx_tile_place place = tx_first_place(t);
  tile_copies copies = usual_ops<WEIGHT, MOMENTS>::start(t, place);
  if (place.tensor >= 0) read_ahead(notes, t, place.tensor, compares);
  while (place.tensor >= 0) {
    const tx_tile tile = tx_tile_of(t, place);
    if (notes.tensor != tile.tensor) enter_tensor(w, notes, t, tile.tensor, compares);
    place = tx_place_after(t, place);
    if (place.tensor >= 0 && place.tensor != notes.tensor) read_ahead(notes, t, place.tensor, compares);
    step_tile<WEIGHT, MOMENTS>(t, tile, place, w, notes, copies);
  }
  store_extras(t, notes.tensor);
  if (tx_lane_id() == 0) tx_count(t.common.resynced, notes.resynced);
  count_steps(t);
}

/* A tx_step_launch with a given kernel. */
tx_status launch_step(const tx_cuda_scope *scope, void (*kernel)(tx_step_table), tx_step_table &table,
                      tx_error *error) {
  table.common.ticket = tx_take_ticket(scope);
  return tx_cuda_launch_always(scope, kernel, table, "the step", error);
}

/* The kernel of a row of weights and a pair of moments; NULL if they have none of their own. */
template <int WEIGHT, int MOMENTS>
constexpr auto kernel_of() -> void (*)(tx_step_table) {
  if constexpr (tx_step_has_kernel(WEIGHT, MOMENTS)) {
    return step<WEIGHT, MOMENTS>;
  } else {
    return NULL;
  }
}

/* A tx_step_launch for one pair of moments: with the row's own kernel, or else with the general one. */
template <int MOMENTS>
tx_status launch_step_of(const tx_cuda_scope *scope, int weight, tx_step_table &table, tx_error *error) {
  static void (*const kernels[TX_WEIGHTS])(tx_step_table) = {
#define TX_ENTRY_(index, ...) kernel_of<index, MOMENTS>(),
      TX_FOR_EACH_WEIGHT(TX_ENTRY_)
#undef TX_ENTRY_
  };
  if (!kernels[weight]) return tx_step_launch_any(scope, weight, table, error);
  return launch_step(scope, kernels[weight], table, error);
}

}  // namespace

#endif
