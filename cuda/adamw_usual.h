/* The step of a usual tile, in fewer instructions than the step of any tile.
 *
 * Note [usual tiles]
 *
 * Problem. Steps with remainders move so few bytes that instructions are the limit: an H200 can issue 873 per lane
 * while memory moves the bytes of eight elements with 8-bit moments, and the step of any tile takes 931. A quarter of
 * them decide per round what is the same for a whole tile or tensor: dtypes, alignment, rounding, the tensor's end, the
 * addresses of its streams. And nothing of a round's load, computation and store overlaps within a warp.
 *
 * So nearly all tiles are stepped here: full ones of aligned tensors with bf16 gradients, dithered moments, usual
 * constants and no external writes. A round has one branch, which is taken if a lane's values are unusual, too; the
 * round is then stepped as any other.
 *
 * And what the warp needs next is copied into shared memory (async_copy.h) while it computes: a round's streams one
 * round ahead, weights a tile ahead, since their checksum is compared before the tile's first round. Each lane reads a
 * copy into registers and then asks for the next one in the same place. Nothing changes these bytes between the copy
 * and the step, since only the warp itself writes its tiles. Two rounds ahead gained nothing on an H200.
 *
 * Steps with fp32 masters or moments read directly. Reading ahead gained nothing for them on an H200, but that was
 * measured while copies read sectors twice (Note [aligned cells]). Prefetching into L2 (cp.async.bulk.prefetch.L2),
 * 4 KB of each stream at a time, took a third more time than reading directly. Included by adamw_kernel.h. */
#ifndef TX_CUDA_ADAMW_USUAL_H
#define TX_CUDA_ADAMW_USUAL_H

#include "cuda/adamw_copies.h"
#include "cuda/adamw_vector.h"
#include "cuda/tile_place.h"

namespace {

template <int WEIGHT, int MOMENTS>
struct usual_ops {
  typedef round_ops<WEIGHT, MOMENTS> ops;
  typedef copy_ops<MOMENTS> copying;

  /* Whether the kernel has a path for usual tiles. Not with extra outputs, for which registers are short. */
  static constexpr bool kHas = TX_CUDA_USUAL && !kHasExtras && tx_master_of_weight(WEIGHT) == TX_I16 &&
                               (MOMENTS == TX_MOMENTS_BF16 || MOMENTS == TX_MOMENTS_U8);
  static constexpr bool kScales = copying::kScales;

  /* Whether the tile may be usual, as far as the table says. */
  static __device__ __forceinline__ bool may_be(const tx_step_table &t, const tx_tile &tile) {
    return tile.count == TX_CHECKSUM && t.entries[tile.tensor].usual;
  }

  /* Writes where the next tile's streams begin. */
  static __device__ __forceinline__ void keep_streams(const tile_copies &copies, const tx_step_table &t,
                                                      const tx_tile &next) {
    __syncwarp(); /* no lane needs those before them any more */
    if (tx_lane_id() == 0) copying::write_streams(copies.next, t.entries[next.tensor], next.begin);
    __syncwarp();
  }

  /* Called before the warp's first tile. */
  static __device__ __forceinline__ tile_copies start(const tx_step_table &t, const tx_tile_place &place) {
    tile_copies copies = {};
    if constexpr (kHas) {
      const tx_tile first = tx_tile_of(t, place);
      __shared__ typename copying::block_cells cells;
      __shared__ block_streams streams;
      copies.cell = tx_cell_of(cells.of_warp[threadIdx.x / TX_WARP]);
      copies.next = tx_cells_of(streams.of_warp[threadIdx.x / TX_WARP]);
      copies.there = may_be(t, first);
      keep_streams(copies, t, first);
      if (copies.there) copying::begin_all(copies, t.entries[first.tensor]);
    }
    return copies;
  }

  /* What a warp keeps of a tile while it steps it. */
  struct usual_tile {
    tx_cell streams; /* where they begin */
    uint32_t scale;  /* the lane's new scale byte (scale_of) */
  };

  /* Called before the first round of a tile; copies, of that tile, become those of the next one. */
  static __device__ __forceinline__ usual_tile enter(tile_copies &copies, const tx_step_table &t,
                                                     const tx_tile_place &place) {
    const tx_tile next = tx_tile_of(t, place);
    const usual_tile here = {copies.next, 0};
    copies.next = tx_cell_beside(copies.next, TX_STREAMS_BYTES);
    copies.there = may_be(t, next);
    keep_streams(copies, t, next);
    return here;
  }

  /* Reads round i of a usual tile, and starts to copy what the warp needs next. */
  static __device__ __forceinline__ void read(round_data &r, const usual_tile &here, tile_copies &copies,
                                              const tx_step_table &t, const tx_tile_place &next, uint32_t i) {
    if (i > 0) tx_wait_for_copies(); /* before the first round, the warp has waited already */
    copying::read_round(r, copies.cell, i);
    if constexpr (kScales) {
      r.exp_avg_scale = copying::scale_at(copies.scale, (int)i);
      r.exp_avg_sq_scale = copying::scale_at(copies.scale, TX_CHECKSUM_ROUNDS + (int)i);
    }
    __syncwarp();                                 /* all of it is read before it is overwritten */
    const bool same = i + 1 < TX_CHECKSUM_ROUNDS; /* whether the next round is of the same tile */
    const round_streams s = copying::streams_of(same ? here.streams : copies.next, (i + 1) % TX_CHECKSUM_ROUNDS);
    char *const weights = copying::weights_of(copies.next, i);
    if (same || copies.there) copying::copy_round(copies.cell, s);
    tx_copy_async_if<16, 0>(tx_cell_after(copies.cell, (int32_t)i * TX_CELLS), weights, copies.there);
    if (!same && copies.there) copying::begin(copies, t.entries[next.tensor]);
  }

  /* The state with its noise, which has no registers here and is read from the notes. */
  static __device__ __forceinline__ tensor_state whole(const tensor_state &w, const warp_notes &notes) {
    tensor_state all = w;
    if constexpr (kHas) {
      all.exp_avg = notes.exp_avg;
      all.exp_avg_sq = notes.exp_avg_sq;
    }
    return all;
  }

  /* Steps round i of a usual tile from r, and writes it. Returns false, and writes nothing, if a lane's values are
   * unusual. */
  static __device__ __forceinline__ bool step(stepped_round &now, const round_data &r, const usual_tile &tile,
                                              uint32_t i, const tx_step_table &t, const tx_step_entry &e,
                                              const tensor_state &w, const warp_notes &notes,
                                              const tx_lane_elements &here) {
    round_data to;
    tx_stepped x;
    float g[TX_VECTOR];
    int32_t m_amax = 0, root_amax = 0;
    tx_plain_floats(g, r.grad, TX_BF16);
    const tensor_state state = kScales ? whole(w, notes) : w; /* bf16 moments leave registers for it */
    bool right = ops::update(r, to, x, t, e, state, here, g, TX_DITHERED, true);
    if constexpr (kScales) {
      ops::find_amaxes(m_amax, root_amax, e, x);
      right = right & (m_amax != 0);
    }
    if (__any_sync(0xffffffffu, !right)) return false;
    const round_streams s = copying::streams_of(tile.streams, i);
    tx_write_raw_of<2>(to.param, copying::weights_of(tile.streams, i), 16, TX_VECTOR);
    tx_write_raw_of<2>(to.master, s.master, 16, TX_VECTOR);
    if constexpr (kScales) {
      now.exp_avg_scale =
          tx_round_scaled(to.exp_avg, x.m, TX_U8, TX_FORMAT_SIGNED, TX_DITHERED, true, m_amax, here, state.exp_avg);
      now.exp_avg_sq_scale = tx_round_scaled(to.exp_avg_sq, x.root, TX_U8, TX_FORMAT_SQRT, TX_DITHERED, true, root_amax,
                                             here, state.exp_avg_sq);
    }
    tx_write_raw_of<copying::kMomentBytes>(to.exp_avg, s.exp_avg, 16, TX_VECTOR);
    tx_write_raw_of<copying::kMomentBytes>(to.exp_avg_sq, s.exp_avg_sq, 16, TX_VECTOR);
#pragma unroll
    for (int k = 0; k < TX_VECTOR / 2; k++)
      now.weights[k] = to.param[k];
    return true;
  }

  /* read and step. */
  static __device__ __forceinline__ bool round(stepped_round &now, const usual_tile &here, tile_copies &copies,
                                               const tx_step_table &t, const tx_tile &tile, const tx_tile_place &next,
                                               const tensor_state &w, const warp_notes &notes, uint32_t i) {
    round_data r;
    read(r, here, copies, t, next, i);
    const int64_t first = tile.begin + (int32_t)(i * TX_ROUND + tx_lane_id() * TX_VECTOR);
    return step(now, r, here, i, t, t.entries[tile.tensor], w, notes, {first, TX_VECTOR, 0, true});
  }

  /* Called after round i, however it was stepped. */
  static __device__ __forceinline__ void note(usual_tile &here, const stepped_round &now, uint32_t i) {
    if constexpr (kScales) {
      const uint32_t place = tx_lane_id() % TX_BLOCK_LANES;
      here.scale = place == i ? now.exp_avg_scale : place == TX_CHECKSUM_ROUNDS + i ? now.exp_avg_sq_scale : here.scale;
    }
  }

  /* Called after the last round. */
  static __device__ __forceinline__ void leave(const usual_tile &here) {
    if constexpr (kScales) {
      uint8_t *const at = copying::scale_of(here.streams);
      if (at) *at = (uint8_t)here.scale;
    }
  }
};

}  // namespace

#endif
