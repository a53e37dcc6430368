/* A round of the step: what a lane has of it, and where. Included by adamw_vector.h. */
#ifndef TX_CUDA_ADAMW_ROUND_H
#define TX_CUDA_ADAMW_ROUND_H

#include "cuda/adamw_streams.h"
#include "cuda/adamw_table.h"
#include "cuda/variants.h"

namespace {

/* A lane's elements of one round, as stored in memory. */
struct round_data {
  tx_raw grad, param, master, exp_avg, exp_avg_sq;
  uint32_t exp_avg_scale, exp_avg_sq_scale; /* bytes; 0 if the lane has no elements */
};

/* What the tile needs of a round that was stepped. */
struct stepped_round {
  uint32_t weights[4]; /* the new weights of the lane, if they have 16 bits; zeros beyond the tensor's end */
  uint32_t exp_avg_scale, exp_avg_sq_scale; /* new bytes, of the lane's block */
};

/* What the step does about external writes to a tile of a tensor with remainders. */
struct tile_writes {
  bool written; /* whether its weights were written externally; only set where it is used */
  bool drops;   /* whether its remainders are read as zeros */
};

/* How the kernel of a row of weights and a pair of moments distributes a round over the lanes. */
template <int WEIGHT, int MOMENTS>
struct round_layout {
  /* Whether there is a fast path. Rare pairs of moments have none, which halves what is compiled. */
  static constexpr bool kQuick = MOMENTS != TX_MOMENTS_ANY;

  /* Whether rounds may be split (TX_ACCESS_HALVES), which only helps if a stream is fp32. Not with extra outputs, which
   * are computed from whole vectors and blocks. Not with block scales, since neighbouring lanes hold a block. Not with
   * remainders, since each lane computes its part of the weights' checksum. */
  static constexpr bool kHalves =
      TX_CUDA_SECTORS && !kHasExtras && kQuick && MOMENTS != TX_MOMENTS_U8 && tx_master_of_weight(WEIGHT) != TX_I16 &&
      (MOMENTS == TX_MOMENTS_F32 || tx_param_of_weight(WEIGHT) == TX_F32 || tx_master_of_weight(WEIGHT) == TX_F32);
  static constexpr tx_access kAccess = kHalves ? TX_ACCESS_HALVES : TX_ACCESS_WHOLE;

  /* Where a lane's elements of round `round` of a tile are. */
  static __device__ __forceinline__ tx_lane_elements lane_elements_of(const tx_step_entry &e, const tx_tile &tile,
                                                                      int32_t round) {
    const int32_t lane = (int32_t)(threadIdx.x % TX_WARP);
    const bool whole = kQuick && e.aligned && tile.count - round * TX_ROUND >= TX_ROUND;
    if (kHalves && whole) {
      const int64_t first = tile.begin + round * TX_ROUND + lane * (TX_VECTOR / 2);
      return tx_lane_elements{first, TX_VECTOR, TX_HALVES_GAP, true};
    }
    const tx_share share = tx_share_of_tile(tile.count, round, (uint32_t)lane);
    return tx_lane_elements{tile.begin + share.first, share.count, 0, whole};
  }
};

}  // namespace

#endif
