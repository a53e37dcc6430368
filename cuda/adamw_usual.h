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
 * and the step, since only the warp itself writes its tiles.
 *
 * With fp32 masters or moments, of which a round has more bytes, memory is the limit, and reading ahead gained nothing
 * on an H200. Nor did a second and a third round ahead. Prefetching into L2 (cp.async.bulk.prefetch.L2), 4 KB of each
 * stream at a time, took a third more time than reading directly. Included by adamw_kernel.h. */
#ifndef TX_CUDA_ADAMW_USUAL_H
#define TX_CUDA_ADAMW_USUAL_H

#include "cuda/adamw_vector.h"
#include "cuda/async_copy.h"
#include "cuda/warp_checksum.h"

namespace {

/* What a warp has of its next tile. */
struct usual_state {
  tx_cell cell;
  uint32_t there; /* whether the tile may be usual, and its weights and first round are being copied: 1 or 0 */
  uint32_t scale; /* the lane's scale byte (scale_of) */
};

/* Where a lane's elements of a tile's first round are, in each stream. */
struct lane_streams {
  char *param, *master, *exp_avg, *exp_avg_sq;
  const char *grad;
};

template <int WEIGHT, int MOMENTS>
struct usual_ops {
  typedef round_ops<WEIGHT, MOMENTS> ops;

  /* Whether the kernel has a path for usual tiles. Not with extra outputs, for which registers are short. */
  static constexpr bool kHas = TX_CUDA_USUAL && !kHasExtras && tx_master_of_weight(WEIGHT) == TX_I16 &&
                               (MOMENTS == TX_MOMENTS_BF16 || MOMENTS == TX_MOMENTS_U8);
  static constexpr bool kScales = MOMENTS == TX_MOMENTS_U8;
  static constexpr int kMomentBytes = kScales ? 1 : 2;
  static constexpr int kRounds = TX_CHECKSUM / TX_ROUND;

  /* The warp's shared memory: the weights of all rounds of a tile, its stored checksum, and the other streams of one
   * round. 8-bit moments share their cells. */
  static constexpr int kStored = kRounds * TX_CELLS, kMasters = kStored + TX_CELLS, kGrads = kMasters + TX_CELLS,
                       kExpAvgs = kGrads + TX_CELLS, kExpAvgSqs = kExpAvgs + (kScales ? 8 : TX_CELLS),
                       kAll = kExpAvgs + (kScales ? 1 : 2) * TX_CELLS;
  struct alignas(16) block_cells {
    char of_warp[TX_BLOCK_WARPS][kAll];
  };

  /* Whether the tile may be usual, as far as the table says. */
  static __device__ __forceinline__ bool may_be(const tx_step_table &t, const tx_tile &tile) {
    return tile.count == TX_CHECKSUM && t.entries[tile.tensor].usual;
  }

  static __device__ __forceinline__ lane_streams streams_of(const tx_step_table &t, const tx_tile &tile) {
    const tx_step_entry &e = t.entries[tile.tensor];
    const int64_t first = tile.begin + (int32_t)tx_lane_id() * TX_VECTOR;
    return lane_streams{(char *)e.param + 2 * first, (char *)e.master + 2 * first,
                        (char *)e.exp_avg + kMomentBytes * first, (char *)e.exp_avg_sq + kMomentBytes * first,
                        (const char *)e.grad + 2 * first};
  }

  /* `round` rounds further in a stream of 16-bit elements, and in one of moments. */
  template <class T>
  static __device__ __forceinline__ T *further(T *stream, uint32_t round) {
    return stream + round * (uint64_t)(2 * TX_ROUND);
  }
  static __device__ __forceinline__ char *moments_further(char *stream, uint32_t round) {
    return stream + round * (uint64_t)(kMomentBytes * TX_ROUND);
  }

  /* Starts to copy what round `round` has besides weights. */
  static __device__ __forceinline__ void copy(const tx_cell cell, const lane_streams &s, uint32_t round) {
    tx_copy_async<16, kMasters>(cell, further(s.master, round));
    tx_copy_async<16, kGrads>(cell, further(s.grad, round));
    tx_copy_async<8 * kMomentBytes, kExpAvgs>(cell, moments_further(s.exp_avg, round));
    tx_copy_async<8 * kMomentBytes, kExpAvgSqs>(cell, moments_further(s.exp_avg_sq, round));
  }

  /* Reads the copies of round `round`. */
  static __device__ __forceinline__ void get(round_data &r, const tx_cell cell, int32_t round) {
    uint32_t words[4];
    tx_read_cell<0>(words, tx_cell_after(cell, round * TX_CELLS));
    memcpy(r.param, words, sizeof words);
    tx_read_cell<kMasters>(words, cell);
    memcpy(r.master, words, sizeof words);
    tx_read_cell<kGrads>(words, cell);
    memcpy(r.grad, words, sizeof words);
    tx_read_cell<kExpAvgs>(words, cell);
    memcpy(r.exp_avg, words, sizeof words);
    if constexpr (kScales) {
      memcpy(r.exp_avg_sq, words + 2, 8);
    } else {
      tx_read_cell<kExpAvgSqs>(words, cell);
      memcpy(r.exp_avg_sq, words, sizeof words);
    }
  }

  /* Where the scale bytes of a tile are. Lanes 0 to 7 of the warp's first 16 have those of the first block of each
   * round: exp_avg's of round 0 to 3, then exp_avg_sq's; and of the other 16 those of the second block. NULL in other
   * lanes. */
  static __device__ __forceinline__ uint8_t *scale_of(const tx_step_table &t, const tx_tile &tile) {
    const tx_step_entry &e = t.entries[tile.tensor];
    const uint32_t lane = tx_lane_id(), place = lane % TX_BLOCK_LANES;
    if (place >= 2 * kRounds) return NULL;
    uint8_t *const scales = place < kRounds ? e.scales : e.root_scales;
    return scales + (uint64_t)tile.begin / TX_BLOCK + 2 * (place % kRounds) + lane / TX_BLOCK_LANES;
  }
  static __device__ __forceinline__ uint32_t scale_at(uint32_t scale, int32_t place) {
    return __shfl_sync(0xffffffffu, scale, place, TX_BLOCK_LANES);
  }

  /* Starts to read the first round of the warp's next tile, and what is needed before it, apart from weights. */
  static __device__ __forceinline__ void begin(usual_state &u, const tx_step_table &t, const tx_tile &next) {
    const tx_step_entry &e = t.entries[next.tensor];
    copy(u.cell, streams_of(t, next), 0);
    if (e.checksums)
      tx_copy_async<8, kStored>(u.cell, (const uint64_t *)e.checksums + (uint64_t)next.begin / TX_CHECKSUM);
    if constexpr (kScales) {
      const uint8_t *const scale = scale_of(t, next);
      u.scale = scale ? *scale : 0u;
    }
  }

  /* Starts to read the warp's next tile if it may be usual: its first tile, or the one after a tile that was not
   * usual. */
  static __device__ __forceinline__ void begin_all(usual_state &u, const tx_step_table &t, const tx_tile &next) {
    if (!u.there) return;
    const char *const param = streams_of(t, next).param;
    begin(u, t, next);
#pragma unroll
    for (int i = 0; i < kRounds; i++)
      tx_copy_async<16, 0>(tx_cell_after(u.cell, i * TX_CELLS), further(param, i));
  }

  /* Called before the warp's first tile. */
  static __device__ __forceinline__ usual_state start(const tx_step_table &t, const tx_tile &first) {
    usual_state u = {};
    if constexpr (kHas) {
      __shared__ block_cells cells;
      u.cell = tx_cell_of(cells.of_warp[threadIdx.x / TX_WARP]);
      u.there = may_be(t, first);
      begin_all(u, t, first);
    }
    return u;
  }

  /* Whether the tile, whose weights and stored checksum were copied, was written externally. */
  static __device__ __forceinline__ bool was_written(const usual_state &u) {
    tx_checksum_sums sums = {};
    uint32_t stored[4];
    uint64_t checksum;
    const uint32_t lane = tx_lane_id();
#pragma unroll
    for (int i = 0; i < kRounds; i++) {
      uint32_t words[4];
      tx_read_cell<0>(words, tx_cell_after(u.cell, i * TX_CELLS));
      tx_checksum_take(sums, words, tx_checksum_left(TX_CHECKSUM, (int32_t)lane * TX_VECTOR) - i * (TX_ROUND / 32));
    }
    tx_read_cell<kStored>(stored, u.cell);
    memcpy(&checksum, stored, sizeof checksum);
    return checksum != tx_checksum_value(sums, lane);
  }

  /* What a warp keeps of a tile while it steps it. */
  struct usual_tile {
    lane_streams streams;
    const char *next_param; /* of the next tile */
    uint32_t scale;         /* the lane's new scale byte (scale_of) */
  };

  /* Called before the first round of a tile; u, of that tile, becomes that of the next one. */
  static __device__ __forceinline__ usual_tile enter(usual_state &u, const tx_step_table &t, const tx_tile &tile,
                                                     const tx_tile &next) {
    usual_tile here = {streams_of(t, tile), streams_of(t, next).param, 0};
#if defined(__CUDA_ARCH__)
    /* Otherwise nvcc computes them anew for each use. */
    asm(""
        : "+l"(here.streams.param), "+l"(here.streams.master), "+l"(here.streams.exp_avg),
          "+l"(here.streams.exp_avg_sq), "+l"(here.streams.grad));
#endif
    u.there = may_be(t, next);
    return here;
  }

  /* Reads round i of a usual tile, and starts to copy what the warp needs next. */
  static __device__ __forceinline__ void read(round_data &r, const usual_tile &here, usual_state &u,
                                              const tx_step_table &t, const tx_tile &next, uint32_t i) {
    tx_wait_for_copies();
    get(r, u.cell, i);
    if constexpr (kScales) {
      r.exp_avg_scale = scale_at(u.scale, (int)i);
      r.exp_avg_sq_scale = scale_at(u.scale, kRounds + (int)i);
    }
    __syncwarp(); /* all of it is read before it is overwritten */
    if (i + 1 < kRounds) {
      copy(u.cell, here.streams, i + 1);
    } else if (u.there) {
      begin(u, t, next);
    }
    tx_copy_async_if<16, 0>(tx_cell_after(u.cell, (int32_t)i * TX_CELLS), further(here.next_param, i), u.there);
  }

  /* Steps round i of a usual tile from r, and writes it. Returns false, and writes nothing, if a lane's values are
   * unusual. */
  static __device__ __forceinline__ bool step(stepped_round &now, const round_data &r, const usual_tile &tile,
                                              const tx_step_table &t, const tx_step_entry &e, const tensor_state &w,
                                              const tx_lane_elements &here, uint32_t i) {
    round_data to;
    tx_stepped x;
    float g[TX_VECTOR];
    int32_t m_amax = 0, root_amax = 0;
    tx_plain_floats(g, r.grad, TX_BF16);
    bool right = ops::update(r, to, x, t, e, w, here, g, TX_DITHERED, true);
    if constexpr (kScales) {
      ops::find_amaxes(m_amax, root_amax, e, x);
      right = right & (m_amax != 0);
    }
    if (__any_sync(0xffffffffu, !right)) return false;
    const lane_streams &s = tile.streams;
    tx_write_raw_of<2>(to.param, further(s.param, i), 16, TX_VECTOR);
    tx_write_raw_of<2>(to.master, further(s.master, i), 16, TX_VECTOR);
    if constexpr (kScales) {
      now.exp_avg_scale =
          tx_round_scaled(to.exp_avg, x.m, TX_U8, TX_FORMAT_SIGNED, TX_DITHERED, true, m_amax, here, w.exp_avg);
      now.exp_avg_sq_scale = tx_round_scaled(to.exp_avg_sq, x.root, TX_U8, TX_FORMAT_SQRT, TX_DITHERED, true, root_amax,
                                             here, w.exp_avg_sq);
    }
    tx_write_raw_of<kMomentBytes>(to.exp_avg, moments_further(s.exp_avg, i), 16, TX_VECTOR);
    tx_write_raw_of<kMomentBytes>(to.exp_avg_sq, moments_further(s.exp_avg_sq, i), 16, TX_VECTOR);
#pragma unroll
    for (int k = 0; k < TX_VECTOR / 2; k++)
      now.weights[k] = to.param[k];
    return true;
  }

  /* read and step. */
  static __device__ __forceinline__ bool round(stepped_round &now, const usual_tile &here, usual_state &u,
                                               const tx_step_table &t, const tx_tile &tile, const tx_tile &next,
                                               const tensor_state &w, uint32_t i) {
    round_data r;
    const int64_t first = tile.begin + (int32_t)(i * TX_ROUND + tx_lane_id() * TX_VECTOR);
    read(r, here, u, t, next, i);
    return step(now, r, here, t, t.entries[tile.tensor], w, {first, TX_VECTOR, 0, true}, i);
  }

  /* Called after round i, however it was stepped. */
  static __device__ __forceinline__ void note(usual_tile &here, const stepped_round &now, uint32_t i) {
    if constexpr (kScales) {
      const uint32_t place = tx_lane_id() % TX_BLOCK_LANES;
      here.scale = place == i ? now.exp_avg_scale : place == kRounds + i ? now.exp_avg_sq_scale : here.scale;
    }
  }

  /* Called after the last round. */
  static __device__ __forceinline__ void leave(const usual_tile &here, const tx_step_table &t, const tx_tile &tile) {
    if constexpr (kScales) {
      uint8_t *const at = scale_of(t, tile);
      if (at) *at = (uint8_t)here.scale;
    }
  }
};

}  // namespace

#endif
