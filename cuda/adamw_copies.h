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
  tx_cell next;   /* where the next tile's streams begin */
};

/* Where a tile's streams begin, in shared memory: to compute it anew for each round takes instructions, and to keep it
 * takes registers. A warp has two: of its tile, and of its next one. */
enum { TX_STREAMS_BYTES = 64, TX_OTHER_STREAMS = TX_STREAMS_BYTES };
struct alignas(2 * TX_STREAMS_BYTES) block_streams {
  char of_warp[TX_BLOCK_WARPS][2 * TX_STREAMS_BYTES];
};

/* Addresses of the same round in a tile's streams. */
struct round_streams {
  char *grad, *master, *exp_avg, *exp_avg_sq, *param;
};

/* MOMENTS: TX_MOMENTS_BF16 or TX_MOMENTS_U8. */
template <int MOMENTS>
struct copy_ops {
  static constexpr bool kScales = MOMENTS == TX_MOMENTS_U8;
  static constexpr int kMomentBytes = kScales ? 1 : 2;

  /* How many rounds are read ahead. The instructions of 8-bit moments take so long that one round is not enough for
   * an even flow of reads. For two rounds of bf16 moments, shared memory of a fixed size is too small. */
  static constexpr uint32_t kAhead = kScales ? 2 : 1;

  /* The warp's shared memory: the weights of all rounds of a tile, its stored checksum, and the other streams of kAhead
   * rounds. 8-bit moments share their cells. */
  static constexpr int kStored = TX_CHECKSUM_ROUNDS * TX_CELLS, kRounds = kStored + TX_CELLS, kMasters = 0,
                       kGrads = TX_CELLS, kExpAvgs = 2 * TX_CELLS, kExpAvgSqs = kExpAvgs + (kScales ? 8 : TX_CELLS),
                       kRound = kExpAvgs + (kScales ? 1 : 2) * TX_CELLS, kAll = kRounds + kAhead * kRound;
  struct alignas(TX_CELLS) block_cells {
    char of_warp[TX_BLOCK_WARPS][kAll];
  };

  /* Writes where a tile's streams begin; called by one lane. */
  static __device__ __forceinline__ void write_streams(tx_cell to, const tx_step_entry &e, int64_t begin) {
    tx_write_addresses<0>(to, (const char *)e.grad + 2 * begin, (char *)e.master + 2 * begin);
    tx_write_addresses<16>(to, (char *)e.exp_avg + kMomentBytes * begin, (char *)e.exp_avg_sq + kMomentBytes * begin);
    tx_write_addresses<32>(to, (char *)e.param + 2 * begin, NULL);
  }

  /* Reads where the lane's vectors of round `round` are. */
  static __device__ __forceinline__ round_streams streams_of(tx_cell from, uint32_t round) {
    round_streams s;
    char *none;
    tx_read_addresses<0>(s.grad, s.master, from);
    tx_read_addresses<16>(s.exp_avg, s.exp_avg_sq, from);
    tx_read_addresses<32>(s.param, none, from);
    const uint32_t element = round * TX_ROUND + tx_lane_id() * TX_VECTOR;
    s.grad += 2 * element;
    s.master += 2 * element;
    s.param += 2 * element;
    s.exp_avg += kMomentBytes * element;
    s.exp_avg_sq += kMomentBytes * element;
    return s;
  }

  /* streams_of, of the weights only. */
  static __device__ __forceinline__ char *weights_of(tx_cell from, uint32_t round) {
    char *param, *none;
    tx_read_addresses<32>(param, none, from);
    return param + 2 * (round * TX_ROUND + tx_lane_id() * TX_VECTOR);
  }

  /* Where the lane has a round's copies without weights. */
  static __device__ __forceinline__ tx_cell cell_of_round(const tx_cell cell, uint32_t round) {
    return tx_cell_after(cell, kRounds + (int32_t)(round % kAhead) * kRound);
  }

  /* Starts to copy what round `round` has besides weights. s: of that round. */
  static __device__ __forceinline__ void copy_round(const tx_cell cell, const round_streams &s, uint32_t round) {
    const tx_cell to = cell_of_round(cell, round);
    tx_copy_async<16, kMasters>(to, s.master);
    tx_copy_async<16, kGrads>(to, s.grad);
    tx_copy_async<8 * kMomentBytes, kExpAvgs>(to, s.exp_avg);
    tx_copy_async<8 * kMomentBytes, kExpAvgSqs>(to, s.exp_avg_sq);
  }

  /* Reads the copies of round `round`. */
  static __device__ __forceinline__ void read_round(round_data &r, const tx_cell cell, uint32_t round) {
    uint32_t words[4];
    tx_read_cell<0>(words, tx_cell_after(cell, (int32_t)round * TX_CELLS));
    memcpy(r.param, words, sizeof words);
    const tx_cell from = cell_of_round(cell, round);
    tx_read_cell<kMasters>(words, from);
    memcpy(r.master, words, sizeof words);
    tx_read_cell<kGrads>(words, from);
    memcpy(r.grad, words, sizeof words);
    tx_read_cell<kExpAvgs>(words, from);
    memcpy(r.exp_avg, words, sizeof words);
    if constexpr (kScales) {
      memcpy(r.exp_avg_sq, words + 2, 8);
    } else {
      tx_read_cell<kExpAvgSqs>(words, from);
      memcpy(r.exp_avg_sq, words, sizeof words);
    }
  }

  /* Where the scale bytes of the tile at `begin` are. Lanes 0 to 7 of the warp's first 16 have those of the first block
   * of each round: exp_avg's of round 0 to 3, then exp_avg_sq's; and of the other 16 those of the second block. NULL in
   * other lanes. */
  static __device__ __forceinline__ uint8_t *scale_of(const tx_step_entry &e, int64_t begin) {
    const uint32_t lane = tx_lane_id(), place = lane % TX_BLOCK_LANES;
    if (place >= 2 * TX_CHECKSUM_ROUNDS) return NULL;
    uint8_t *const scales = place < TX_CHECKSUM_ROUNDS ? e.scales : e.root_scales;
    return scales + (uint64_t)begin / TX_BLOCK + 2 * (place % TX_CHECKSUM_ROUNDS) + lane / TX_BLOCK_LANES;
  }
  static __device__ __forceinline__ uint32_t scale_at(uint32_t scale, int32_t place) {
    return __shfl_sync(0xffffffffu, scale, place, TX_BLOCK_LANES);
  }

  /* Starts to read what is needed of a tile besides its streams. */
  static __device__ __forceinline__ void begin(tile_copies &copies, const tx_step_entry &e, int64_t at) {
    if (e.checksums) tx_copy_async<8, kStored>(copies.cell, (const uint64_t *)e.checksums + (uint64_t)at / TX_CHECKSUM);
    if constexpr (kScales) {
      const uint8_t *const scale = scale_of(e, at);
      copies.scale = scale ? *scale : 0u;
    }
  }

  /* Starts to read the next tile, if copies.there: the warp's first tile, and one after a tile that was not usual. */
  static __device__ __forceinline__ void begin_all(tile_copies &copies, const tx_step_table &t, const tx_tile &tile) {
    if (!copies.there) return;
    begin(copies, t.entries[tile.tensor], tile.begin);
#pragma unroll
    for (uint32_t i = 0; i < TX_CHECKSUM_ROUNDS; i++) {
      const round_streams s = streams_of(copies.next, i);
      if (i < kAhead) copy_round(copies.cell, s, i);
      tx_copy_async<16, 0>(tx_cell_after(copies.cell, (int32_t)i * TX_CELLS), s.param);
    }
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
