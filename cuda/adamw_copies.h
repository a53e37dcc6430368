/* What a warp copies into shared memory (async_copy.h) before it steps a usual tile (adamw_usual.h): where it lies, and
 * where it comes from. Included by adamw_usual.h. */
#ifndef TX_CUDA_ADAMW_COPIES_H
#define TX_CUDA_ADAMW_COPIES_H

#include "cuda/adamw_round.h"
#include "cuda/async_copy.h"
#include "cuda/tile_place.h"
#include "cuda/warp_checksum.h"

namespace {

/* What a warp has of its next tile. */
struct tile_copies {
  tx_cell cell;
  uint32_t there; /* whether the tile may be usual, and its weights and first round are being copied: 1 or 0 */
  uint32_t scale; /* the lane's scale byte (scale_of) */
};

/* Where a lane's elements of a tile's first round are, in each stream. */
struct lane_streams {
  char *param, *master, *exp_avg, *exp_avg_sq;
  const char *grad;
};

/* MOMENTS: TX_MOMENTS_BF16 or TX_MOMENTS_U8. */
template <int MOMENTS>
struct copy_ops {
  static constexpr bool kScales = MOMENTS == TX_MOMENTS_U8;
  static constexpr int kMomentBytes = kScales ? 1 : 2;

  /* The warp's shared memory: the weights of all rounds of a tile, its stored checksum, and the other streams of one
   * round. 8-bit moments share their cells. */
  static constexpr int kStored = TX_CHECKSUM_ROUNDS * TX_CELLS, kMasters = kStored + TX_CELLS,
                       kGrads = kMasters + TX_CELLS, kExpAvgs = kGrads + TX_CELLS,
                       kExpAvgSqs = kExpAvgs + (kScales ? 8 : TX_CELLS), kAll = kExpAvgs + (kScales ? 1 : 2) * TX_CELLS;
  struct alignas(TX_CELLS) block_cells {
    char of_warp[TX_BLOCK_WARPS][kAll];
  };

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
  static __device__ __forceinline__ void copy_round(const tx_cell cell, const lane_streams &s, uint32_t round) {
    tx_copy_async<16, kMasters>(cell, further(s.master, round));
    tx_copy_async<16, kGrads>(cell, further(s.grad, round));
    tx_copy_async<8 * kMomentBytes, kExpAvgs>(cell, moments_further(s.exp_avg, round));
    tx_copy_async<8 * kMomentBytes, kExpAvgSqs>(cell, moments_further(s.exp_avg_sq, round));
  }

  /* Reads the copies of round `round`. */
  static __device__ __forceinline__ void read_round(round_data &r, const tx_cell cell, int32_t round) {
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
    if (place >= 2 * TX_CHECKSUM_ROUNDS) return NULL;
    uint8_t *const scales = place < TX_CHECKSUM_ROUNDS ? e.scales : e.root_scales;
    return scales + (uint64_t)tile.begin / TX_BLOCK + 2 * (place % TX_CHECKSUM_ROUNDS) + lane / TX_BLOCK_LANES;
  }
  static __device__ __forceinline__ uint32_t scale_at(uint32_t scale, int32_t place) {
    return __shfl_sync(0xffffffffu, scale, place, TX_BLOCK_LANES);
  }

  /* Starts to read the first round of the warp's next tile, and what is needed before it, apart from weights. */
  static __device__ __forceinline__ void begin(tile_copies &copies, const tx_step_table &t, const tx_tile &next) {
    const tx_step_entry &e = t.entries[next.tensor];
    copy_round(copies.cell, streams_of(t, next), 0);
    if (e.checksums)
      tx_copy_async<8, kStored>(copies.cell, (const uint64_t *)e.checksums + (uint64_t)next.begin / TX_CHECKSUM);
    if constexpr (kScales) {
      const uint8_t *const scale = scale_of(t, next);
      copies.scale = scale ? *scale : 0u;
    }
  }

  /* begin, and its weights, if copies.there: for the warp's first tile, and after a tile that was not usual. */
  static __device__ __forceinline__ void begin_all(tile_copies &copies, const tx_step_table &t, const tx_tile &next) {
    if (!copies.there) return;
    const char *const param = streams_of(t, next).param;
    begin(copies, t, next);
#pragma unroll
    for (int i = 0; i < TX_CHECKSUM_ROUNDS; i++)
      tx_copy_async<16, 0>(tx_cell_after(copies.cell, i * TX_CELLS), further(param, i));
  }

  /* Whether the tile was written externally. Its weights and stored checksum have arrived. */
  static __device__ __forceinline__ bool was_written(const tile_copies &copies) {
    uint32_t words[TX_CHECKSUM_ROUNDS][4], stored[4];
    uint64_t checksum;
#pragma unroll
    for (int i = 0; i < TX_CHECKSUM_ROUNDS; i++)
      tx_read_cell<0>(words[i], tx_cell_after(copies.cell, i * TX_CELLS));
    tx_read_cell<kStored>(stored, copies.cell);
    memcpy(&checksum, stored, sizeof checksum);
    return checksum != tx_checksum_of_rounds(words, tx_lane_id());
  }
};

}  // namespace

#endif
