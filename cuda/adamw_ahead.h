/* Reads a warp's next round into shared memory while the warp computes on the current one.
 *
 * Note [reading ahead]
 *
 * Problem. A round loads, computes and stores, and nothing of it overlaps within the warp. Registers allow 16 warps on
 * a multiprocessor; while some of them compute, the others have too little in flight to keep an H200's memory busy.
 *
 * So each lane copies what it will read in the warp's next round into shared memory (cp.async, from sm_80 on), which
 * takes no registers, and the copies arrive while the warp computes. A lane reads only what it has copied itself, so
 * there is no barrier, only a wait for its own copies. With two slots per warp one round is ahead; three and four
 * gained nothing.
 *
 * On an H200 a step of bf16 moments and remainders takes 3 % less time with it, one of 8-bit moments 13 %. With fp32
 * masters or moments, of which a round has more bytes, it gained nothing, so their kernels read directly. Prefetching
 * into L2, 4 KB of each stream at a time (cp.async.bulk.prefetch.L2), took a third more time than reading directly.
 *
 * Rounds of whole aligned vectors with 16-bit gradients are read ahead, others directly. Nothing changes a round
 * between its copy and its step: only the warp itself writes its tiles. Included by adamw_vector.h. */
#ifndef TX_CUDA_ADAMW_AHEAD_H
#define TX_CUDA_ADAMW_AHEAD_H

#include "cuda/adamw_round.h"
#include "cuda/async_copy.h"

namespace {

/* What was read ahead of a round. */
struct ahead_round {
  const char *slot; /* of the warp */
  bool there;       /* whether the round is in the slot */
  uint8_t exp_avg_scale, exp_avg_sq_scale;
};

/* A warp's two slots: the round that is computed next is in `next.slot`. */
struct ahead_state {
  char *slots;
  ahead_round next;
};

template <int WEIGHT, int MOMENTS>
struct ahead_ops {
  typedef round_layout<WEIGHT, MOMENTS> layout;

  /* Whether the kernel reads ahead. Not with extra outputs, for which registers are short. */
  static constexpr bool kReads = TX_CUDA_AHEAD && !kHasExtras && tx_master_of_weight(WEIGHT) == TX_I16 &&
                                 (MOMENTS == TX_MOMENTS_BF16 || MOMENTS == TX_MOMENTS_U8);
  static constexpr int kMomentBytes = MOMENTS == TX_MOMENTS_U8 ? 1 : 2;
  static constexpr int kSlot = TX_ROUND * (3 * 2 + 2 * kMomentBytes); /* weights, remainders, gradients; moments */

  /* Copies the round at `here` into the slot. */
  static __device__ __forceinline__ void copy(char *slot, const tx_step_entry &e, const tx_lane_elements &here) {
    slot = tx_copy_stream<2>(slot, e.param, here.first);
    slot = tx_copy_stream<2>(slot, e.master, here.first);
    slot = tx_copy_stream<kMomentBytes>(slot, e.exp_avg, here.first);
    slot = tx_copy_stream<kMomentBytes>(slot, e.exp_avg_sq, here.first);
    (void)tx_copy_stream<2>(slot, e.grad, here.first);
  }

  static __device__ __forceinline__ void get(round_data &r, const ahead_round &copied) {
    const char *slot = tx_copied_stream<2>(r.param, copied.slot);
    slot = tx_copied_stream<2>(r.master, slot);
    slot = tx_copied_stream<kMomentBytes>(r.exp_avg, slot);
    slot = tx_copied_stream<kMomentBytes>(r.exp_avg_sq, slot);
    (void)tx_copied_stream<2>(r.grad, slot);
    r.exp_avg_scale = copied.exp_avg_scale;
    r.exp_avg_sq_scale = copied.exp_avg_sq_scale;
  }

  /* Starts to read round `round` of `tile` into the slot that is not in use, if it can be read ahead. */
  static __device__ __forceinline__ void ask(ahead_state &a, const tx_step_table &t, const tx_tile &tile,
                                             int32_t round) {
    const tx_step_entry &e = t.entries[tile.tensor];
    const tx_lane_elements here = layout::lane_elements_of(e, tile, round);
    char *const slot = a.slots + (a.next.slot == a.slots ? kSlot : 0);
    a.next = ahead_round{slot, here.whole && e.grad_dtype != TX_F32, 0, 0};
    if (a.next.there) {
      copy(slot, e, here);
      if constexpr (MOMENTS == TX_MOMENTS_U8) {
        const int64_t block = tx_block_at(here);
        a.next.exp_avg_scale = e.scales[block];
        a.next.exp_avg_sq_scale = e.root_scales[block];
      }
    }
    tx_end_copies();
  }

  struct alignas(16) block_slots {
    char of_warp[TX_BLOCK_WARPS][2 * kSlot];
  };

  /* Called before the warp's first tile. */
  static __device__ __forceinline__ ahead_state begin(const tx_step_table &t, const tx_tile &first) {
    ahead_state a = {};
    if constexpr (kReads) {
      __shared__ block_slots slots;
      static_assert(sizeof slots <= 40 << 10, "two blocks fit on a multiprocessor of every architecture");
      a.slots = slots.of_warp[threadIdx.x / TX_WARP];
      ask(a, t, first, 0);
    }
    return a;
  }

  /* Called before round `round` of a tile: returns what was read of it, and starts to read the round after it, in this
   * tile or at the start of the warp's next tile, which may have no elements. */
  static __device__ __forceinline__ ahead_round turn(ahead_state &a, const tx_step_table &t, const tx_tile &tile,
                                                     const tx_tile &next, int32_t round) {
    const ahead_round now = a.next;
    if constexpr (kReads) {
      const bool here = (round + 1) * TX_ROUND < tile.count;
      const tx_tile of = {here ? tile.begin : next.begin, here ? tile.tensor : next.tensor,
                          here ? tile.count : next.count}; /* field by field, which needs no memory */
      ask(a, t, of, here ? round + 1 : 0);
      tx_wait_but_for_last();
    }
    return now;
  }
};

}  // namespace

#endif
