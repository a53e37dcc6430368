/* What a warp copies into shared memory (async_copy.h) before it steps a usual tile (adamw_usual.h): where it lies, and
 * where it comes from. Included by adamw_usual.h. */
#ifndef TX_CUDA_ADAMW_COPIES_H
#define TX_CUDA_ADAMW_COPIES_H

#include <stddef.h>

#include "cuda/adamw_round.h"
#include "cuda/async_copy.h"
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
 * takes registers. A warp has two of these: of its tile, and of its next one. The streams are those of tx_plain_entry,
 * in its order. */
enum tile_streams {
  TX_OF_GRAD = 0, /* offsets of addresses, in pairs */
  TX_OF_EXP_AVG = 16,
  TX_OF_EXP_AVG_SQ = 24,
  TX_OF_PARAM = 32,
  TX_OF_SCALES = 40, /* exp_avg's, then exp_avg_sq's */
  TX_OF_CHECKSUM = 56,
  TX_STREAMS_BYTES = 64
};
#define TX_IS_AT_(field, offset) (offsetof(tx_plain_entry, field) - offsetof(tx_plain_entry, grad) == (offset))
static_assert(TX_IS_AT_(master, TX_OF_GRAD + 8) && TX_IS_AT_(exp_avg, TX_OF_EXP_AVG) &&
                  TX_IS_AT_(exp_avg_sq, TX_OF_EXP_AVG_SQ) && TX_IS_AT_(param, TX_OF_PARAM) &&
                  TX_IS_AT_(scales, TX_OF_SCALES) && TX_IS_AT_(root_scales, TX_OF_SCALES + 8) &&
                  TX_IS_AT_(checksums, TX_OF_CHECKSUM),
              "the order of tx_plain_entry");
#undef TX_IS_AT_
struct alignas(2 * TX_STREAMS_BYTES) block_streams {
  char of_warp[TX_BLOCK_WARPS][2 * TX_STREAMS_BYTES];
};

/* Addresses of a lane's vectors of a round, without its weights. */
struct round_streams {
  char *grad, *master, *exp_avg, *exp_avg_sq;
};

/* MOMENTS: TX_MOMENTS_BF16 or TX_MOMENTS_U8. */
template <int MOMENTS>
struct copy_ops {
  static constexpr bool kScales = MOMENTS == TX_MOMENTS_U8;
  static constexpr int kMomentBytes = kScales ? 1 : 2;

  /* How many rounds are read ahead. With bf16 moments, two of them do not fit into shared memory of a fixed size. */
  static constexpr int kAhead = kScales ? 2 : 1;

  /* The warp's shared memory: the weights of all rounds of a tile, its stored checksum, and the other streams of kAhead
   * rounds. 8-bit moments share their cells. */
  static constexpr int kStored = TX_CHECKSUM_ROUNDS * TX_CELLS, kRounds = kStored + TX_CELLS, kMasters = 0,
                       kGrads = TX_CELLS, kExpAvgs = 2 * TX_CELLS, kExpAvgSqs = kExpAvgs + (kScales ? 8 : TX_CELLS),
                       kRound = kExpAvgs + (kScales ? 1 : 2) * TX_CELLS, kAll = kRounds + kAhead * kRound;
  struct alignas(TX_CELLS) block_cells {
    char of_warp[TX_BLOCK_WARPS][kAll];
  };

  /* Writes where a tile's streams begin. Returns in all lanes whether each vector's address may be computed by
   * tx_within: no multiple of 4 GB divides a stream. Every lane of the warp has to call it. */
  static __device__ __forceinline__ bool write_streams(tx_cell to, const tx_step_entry &e, int64_t begin) {
    static_assert(TX_CHECKSUM == 8 * TX_BLOCK, "a tile has as many bytes of scales as of its checksum");
    const uint32_t at = tx_lane_id() * 8;
    bool crosses = false;
    if (at < TX_STREAMS_BYTES) {
      const char *stream;
      memcpy(&stream, (const char *)&e.grad + at, sizeof stream);
      const bool small = at >= TX_OF_SCALES, halves = !kScales || (at != TX_OF_EXP_AVG && at != TX_OF_EXP_AVG_SQ);
      stream += small ? begin / TX_BLOCK : halves ? 2 * begin : begin;
      tx_write_address(to, at, stream);
      crosses = !small && (uint32_t)(uintptr_t)stream > 0u - (halves ? 2u : 1u) * (uint32_t)TX_CHECKSUM;
    }
    return __any_sync(0xffffffffu, crosses) == 0;
  }

  /* Reads where the lane's vectors of round `round` are in the other streams. */
  static __device__ __forceinline__ round_streams streams_of(tx_cell from, uint32_t round) {
    round_streams s;
    tx_read_addresses<TX_OF_GRAD>(s.grad, s.master, from);
    tx_read_addresses<TX_OF_EXP_AVG>(s.exp_avg, s.exp_avg_sq, from);
    const uint32_t element = round * TX_ROUND + tx_lane_id() * TX_VECTOR;
    s.grad = tx_within(s.grad, 2 * element);
    s.master = tx_within(s.master, 2 * element);
    s.exp_avg = tx_within(s.exp_avg, kMomentBytes * element);
    s.exp_avg_sq = tx_within(s.exp_avg_sq, kMomentBytes * element);
    return s;
  }
  /* Reads where the lane's weights of round `round` are. */
  static __device__ __forceinline__ char *weights_of(tx_cell from, uint32_t round) {
    return tx_within(tx_read_address(from, TX_OF_PARAM), 2 * (round * TX_ROUND + tx_lane_id() * TX_VECTOR));
  }

  /* Where the lane has the copies of a round without its weights. */
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

  /* Where a tile's scale bytes are; streams: its own. Lanes 0 to 7 of the warp's first 16 have those of the first block
   * of each round: exp_avg's of round 0 to 3, then exp_avg_sq's; and of the other 16 those of the second block. NULL in
   * other lanes. */
  static __device__ __forceinline__ uint8_t *scale_of(tx_cell streams) {
    const uint32_t lane = tx_lane_id(), place = lane % TX_BLOCK_LANES;
    if (place >= 2 * TX_CHECKSUM_ROUNDS) return NULL;
    char *const scales = tx_read_address(streams, TX_OF_SCALES + place / TX_CHECKSUM_ROUNDS * 8);
    return (uint8_t *)scales + 2 * (place % TX_CHECKSUM_ROUNDS) + lane / TX_BLOCK_LANES;
  }
  static __device__ __forceinline__ uint32_t scale_at(uint32_t scale, int32_t place) {
    return __shfl_sync(0xffffffffu, scale, place, TX_BLOCK_LANES);
  }

  /* Starts to read what is needed of the next tile besides its streams. e: of its tensor. */
  static __device__ __forceinline__ void begin(tile_copies &copies, const tx_step_entry &e) {
    if (e.checksums) tx_copy_async<8, kStored>(copies.cell, tx_read_address(copies.next, TX_OF_CHECKSUM));
    if constexpr (kScales) {
      const uint8_t *const scale = scale_of(copies.next);
      copies.scale = scale ? *scale : 0u;
    }
  }

  /* Starts to read the next tile: the warp's first one, and one after a tile that was not usual. */
  static __device__ __forceinline__ void begin_all(tile_copies &copies, const tx_step_entry &e) {
    tx_wait_for_copies(); /* of rounds of a tile that was not usual: they go to the same places */
    begin(copies, e);
#pragma unroll
    for (uint32_t i = 0; i < TX_CHECKSUM_ROUNDS; i++)
      tx_copy_async<16, 0>(tx_cell_after(copies.cell, (int32_t)i * TX_CELLS), weights_of(copies.next, i));
#pragma unroll
    for (uint32_t i = 0; i < kAhead; i++) {
      copy_round(copies.cell, streams_of(copies.next, i), i);
      tx_group_copies();
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
