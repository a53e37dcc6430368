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
 * constants and no external writes. A round has few branches, of which one is taken if a lane's values are
 * unusual: the round is then stepped as any other.
 *
 * And what the warp needs next is copied into shared memory (async_copy.h) while it computes: a round's streams one
 * round ahead, or two with 8-bit moments; weights a tile ahead, since their checksum is compared before the tile's
 * first round. Each lane reads a copy into registers and then asks for what comes next in the same place. Nothing
 * changes these bytes between the copy and the step, since only the warp itself writes its tiles.
 *
 * On an H200, warps with 8-bit moments waited a fifth of their time for copies of one round ahead, and six percent with
 * two: 0.87 of a copy's bandwidth instead of 0.84. Steps with fp32 masters or moments read directly: reading a round
 * ahead gained 0.01 for fp32 masters with bf16 moments. Prefetching into L2 (cp.async.bulk.prefetch.L2), 4 KB of each
 * stream at a time, took a third more time than reading directly. Included by adamw_kernel.h. */
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

  /* Notes whether the next tile may be usual, and where its streams begin. */
  static __device__ __forceinline__ void keep_streams(tile_copies &copies, const tx_step_table &t,
                                                      const tx_tile &next) {
    __syncwarp(); /* no lane needs those before them any more */
    const bool whole = copying::write_streams(copies.next, t.entries[next.tensor], next.begin);
    copies.there = whole && may_be(t, next);
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
      keep_streams(copies, t, first);
      if (copies.there) copying::begin_all(copies, t.entries[first.tensor]);
    }
    return copies;
  }

  /* What a warp keeps of a tile while it steps it. */
  struct usual_tile {
    tx_cell streams;                            /* where they begin */
    uint32_t exp_avg_scales, exp_avg_sq_scales; /* new scale bytes of the lane's blocks, the last round's on top */
  };

  /* Called before the first round of a tile; copies, of that tile, become those of the next one. */
  static __device__ __forceinline__ usual_tile enter(tile_copies &copies, const tx_step_table &t,
                                                     const tx_tile_place &place) {
    const tx_tile next = tx_tile_of(t, place);
    const usual_tile here = {copies.next, 0, 0};
    copies.next = tx_cell_beside(copies.next, TX_STREAMS_BYTES);
    keep_streams(copies, t, next);
    return here;
  }

  /* Waits for what was read ahead of a tile: everything that is needed before its first round. */
  static __device__ __forceinline__ void wait_for_tile() { tx_wait_for_groups<copying::kAhead - 1>(); }

  /* Reads round i of a usual tile, and starts to copy what the warp needs next. */
  static __device__ __forceinline__ void read(round_data &r, const usual_tile &here, tile_copies &copies,
                                              const tx_step_table &t, const tx_tile_place &next, uint32_t i) {
    constexpr uint32_t kAhead = copying::kAhead;
    /* Each round before this one of the tile has started two groups, the first of them for the next tile. */
    if (i > 0) tx_wait_for_groups<2 * (kAhead - 1)>();
    copying::read_round(r, copies.cell, i);
    if constexpr (kScales) {
      r.exp_avg_scale = copying::scale_at(copies.scale, (int)i);
      r.exp_avg_sq_scale = copying::scale_at(copies.scale, TX_CHECKSUM_ROUNDS + (int)i);
    }
    __syncwarp(); /* all of it is read before it is overwritten */
    char *const weights = copying::weights_of(copies.next, i);
    tx_copy_async_if<16, 0>(tx_cell_after(copies.cell, (int32_t)i * TX_CELLS), weights, copies.there);
    if (i + 1 == TX_CHECKSUM_ROUNDS && copies.there) copying::begin(copies, t.entries[next.tensor]);
    if (kAhead > 1) tx_group_copies();
    const bool same = i + kAhead < TX_CHECKSUM_ROUNDS; /* whether round i + kAhead is of the same tile */
    const uint32_t ahead = (i + kAhead) % TX_CHECKSUM_ROUNDS;
    const round_streams s = copying::streams_of(same ? here.streams : copies.next, ahead);
    if (same || copies.there) copying::copy_round(copies.cell, s, ahead);
    tx_group_copies();
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
    tx_write_whole<2>(to.param, copying::weights_of(tile.streams, i));
    tx_write_whole<2>(to.master, s.master);
    if constexpr (kScales) {
      now.exp_avg_scale =
          tx_round_scaled(to.exp_avg, x.m, TX_U8, TX_FORMAT_SIGNED, TX_DITHERED, true, m_amax, here, state.exp_avg);
      now.exp_avg_sq_scale = tx_round_scaled(to.exp_avg_sq, x.root, TX_U8, TX_FORMAT_SQRT, TX_DITHERED, true, root_amax,
                                             here, state.exp_avg_sq);
    }
    tx_write_whole<copying::kMomentBytes>(to.exp_avg, s.exp_avg);
    tx_write_whole<copying::kMomentBytes>(to.exp_avg_sq, s.exp_avg_sq);
#pragma unroll
    for (int k = 0; k < TX_VECTOR / 2; k++)
      now.weights[k] = to.param[k];
    return true;
  }

  /* Called after a round, however it was stepped. */
  static __device__ __forceinline__ void note(usual_tile &here, const stepped_round &now) {
    if constexpr (kScales) {
      here.exp_avg_scales = tx_push_byte(here.exp_avg_scales, now.exp_avg_scale);
      here.exp_avg_sq_scales = tx_push_byte(here.exp_avg_sq_scales, now.exp_avg_sq_scale);
    }
  }

  /* Reads, steps and notes round i of a usual tile; arguments and result as step's. sums: as tx_checksum_take's. */
  static __device__ __forceinline__ bool round(usual_tile &here, tx_checksum_sums &sums, tile_copies &copies,
                                               const tx_step_table &t, const tx_tile &tile, const tx_tile_place &next,
                                               const tensor_state &w, const warp_notes &notes, uint32_t i) {
    round_data r;
    stepped_round now;
    read(r, here, copies, t, next, i);
    const int64_t first = tile.begin + (int32_t)(i * TX_ROUND + tx_lane_id() * TX_VECTOR);
    if (!step(now, r, here, i, t, t.entries[tile.tensor], w, notes, {first, TX_VECTOR, 0, true})) return false;
    note(here, now);
    tx_checksum_take(sums, now.weights);
    return true;
  }

  /* Called after the last round. */
  static __device__ __forceinline__ void leave(const usual_tile &here) {
    if constexpr (kScales) {
      static_assert(TX_CHECKSUM_ROUNDS == 4, "a word has the bytes of all rounds");
      const uint32_t place = tx_lane_id() % TX_BLOCK_LANES;
      const uint32_t scales = place < TX_CHECKSUM_ROUNDS ? here.exp_avg_scales : here.exp_avg_sq_scales;
      uint8_t *const at = copying::scale_of(here.streams);
      if (at) *at = (uint8_t)(scales >> (8 * (place % TX_CHECKSUM_ROUNDS)));
    }
  }
};

}  // namespace

#endif
