/* What a warp keeps of the tensor that it works on: in registers, and in shared memory what it seldom needs. Included
 * by adamw_vector.h. */
#ifndef TX_CUDA_ADAMW_TENSOR_H
#define TX_CUDA_ADAMW_TENSOR_H

#include "csrc/math/adamw.h"
#include "csrc/math/dither_lag.h"
#include "csrc/math/noise.h"
#include "cuda/adamw_extras.h"
#include "cuda/adamw_fast_path.h"
#include "cuda/adamw_found_inf.h"
#include "cuda/adamw_suspects.h"
#include "cuda/async_copy.h"

namespace {

/* What a warp keeps of its tensor in registers. Computed when it enters the tensor. */
struct tensor_state {
  float before; /* completed steps */
  tx_adamw_constants constants;
  bool quick;   /* tx_quick_constants */
  bool suspect; /* whether its masters may no longer round to its weights */
  tx_noise exp_avg, exp_avg_sq, param;
  extras_state extras;
};

__device__ __forceinline__ tx_noise noise_of(const tx_step_table &t, const tx_step_entry &e, const tensor_state &w,
                                             tx_lane lane) {
  return tx_noise_at(t.common.seed, e.id, lane, (int64_t)w.before + 1, e.start);
}

/* What a warp needs between tensors, and at its end.
 *
 * Note [notes of a warp]
 *
 * Problem. The loop over tiles needs more registers than there are, and the compiler spills what is used least often
 * into local memory. That is behind the L1 cache, which the tiles' streams pass through: on an H200 a warp waited a
 * fifth of its time for what it had spilled, once per tile, for the latency of the L2 cache.
 *
 * So what is used least often is kept in shared memory. Lane 0 writes it, all lanes read it. */
struct alignas(16) warp_notes {
  tx_noise exp_avg, exp_avg_sq; /* of the tensor */
  double clip_coef, grad_scale; /* of the launch */
  int64_t resynced;       /* masters that were resynced so far: fp32 ones that became their weights, or the elements
                             of blocks whose remainders were dropped */
  float before;           /* completed steps that the constants are for */
  int32_t constants_key;  /* group and v's dtype: everything but the step that the constants depend on */
  int32_t tensor;         /* the one that the warp has entered; -1: none */
  uint32_t next_before;   /* pattern of the completed steps of the tensor that is entered next */
  uint32_t next_suspects; /* bits of its word of suspects */
};

__device__ __forceinline__ warp_notes &notes_of_warp() {
  __shared__ warp_notes notes[TX_BLOCK_WARPS];
  return notes[threadIdx.x / TX_WARP];
}

/* Every lane of the warp has to call it. */
__device__ __forceinline__ void begin_notes(warp_notes &notes, const tx_step_admission &admitted) {
  if (tx_lane_id() == 0) {
    notes.clip_coef = admitted.clip_coef;
    notes.grad_scale = admitted.grad_scale;
    notes.resynced = 0;
    notes.constants_key = -1; /* no key is negative */
    notes.tensor = -1;
  }
  __syncwarp();
}

/* count: the same in all lanes. */
__device__ __forceinline__ void count_resynced(warp_notes &notes, int32_t count) {
  if (tx_lane_id() == 0) notes.resynced += count;
}

/* Starts to read what enter_tensor needs of a tensor. That is a tile earlier: of many tensors, nearly every tile of a
 * warp is in another one, and would begin with the memory's latency. compares: whether the launch has compared
 * samples. */
__device__ __forceinline__ void read_ahead(warp_notes &notes, const tx_step_table &t, int32_t tensor,
                                           const bool compares) {
  const void *const step = t.entries[tensor].step; /* nothing counts it until all blocks are done */
  if (tx_lane_id() != 0) return;
  if ((uintptr_t)step % 4 == 0) {
    tx_copy_word_async(&notes.next_before, step);
  } else {
    notes.next_before = tx_bits_from_f32(tx_read_value<float>(step));
  }
  if (compares) tx_copy_word_async(&notes.next_suspects, suspects_of(t, tensor));
}

/* Every lane of the warp has to call it. */
__device__ __forceinline__ void enter_tensor(tensor_state &w, warp_notes &notes, const tx_step_table &t, int32_t tensor,
                                             const bool compares) {
  tx_wait_for_copies();
  __syncwarp(); /* lane 0 has read ahead */
  store_extras(t, notes.tensor);
  const tx_step_entry &e = t.entries[tensor];
  const float before = tx_f32_from_bits(notes.next_before);
  const int64_t step = (int64_t)before + 1;
  const int32_t constants_key = (int32_t)e.group << 8 | e.exp_avg_sq_dtype;
  if (notes.constants_key != constants_key || notes.before != before) {
    const tx_step_group &g = t.common.groups[e.group];
    const double lr = g.lr ? tx_read_double(g.lr, g.lr_dtype) : g.group.lr;
    const double lag = tx_dither_lag(e.exp_avg_sq_dtype, t.common.moment_rounding, g.group.beta2, step);
    w.constants = tx_adamw_prepare(&g.group, lr, step, notes.clip_coef, notes.grad_scale, lag);
    w.quick = tx_quick_constants(w.constants);
  }
  w.before = before;
  w.exp_avg = noise_of(t, e, w, TX_LANE_EXP_AVG);
  w.exp_avg_sq = noise_of(t, e, w, TX_LANE_EXP_AVG_SQ);
  w.param = noise_of(t, e, w, TX_LANE_PARAM);
  enter_extras(w.extras, t, e, step);
  w.suspect = compares && (notes.next_suspects >> (tensor % 32) & 1u) != 0u;
  __syncwarp(); /* all lanes have read the notes before they change */
  if (tx_lane_id() == 0) {
    notes.exp_avg = w.exp_avg;
    notes.exp_avg_sq = w.exp_avg_sq;
    notes.before = before;
    notes.constants_key = constants_key;
    notes.tensor = tensor;
  }
  __syncwarp();
}

}  // namespace

#endif
