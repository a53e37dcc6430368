/* What a warp keeps in registers about the tensor that it works on. Included by adamw_kernel.h. */
#ifndef TX_CUDA_ADAMW_TENSOR_H
#define TX_CUDA_ADAMW_TENSOR_H

#include "csrc/math/adamw.h"
#include "csrc/math/dither_lag.h"
#include "csrc/math/noise.h"
#include "cuda/adamw_extras.h"
#include "cuda/adamw_fast_path.h"
#include "cuda/adamw_found_inf.h"
#include "cuda/adamw_suspects.h"

namespace {

/* Computed when the warp enters a tensor. */
struct tensor_state {
  int32_t tensor;
  int32_t constants_key; /* group and v's dtype: everything but the step that the constants depend on */
  float before;          /* completed steps */
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

/* What enter_tensor needs from memory. It is read a tile earlier: of many tensors, nearly every tile of a warp is in
 * another one, and would begin with the memory's latency. */
struct tensor_reads {
  float before; /* completed steps; nothing counts them until all blocks are done */
  bool suspect;
};

/* compares: whether the launch has compared samples. */
__device__ __forceinline__ tensor_reads read_tensor(const tx_step_table &t, int32_t tensor, const bool compares) {
  return tensor_reads{tx_read_value<float>(t.entries[tensor].step), compares && is_suspect(t, tensor)};
}

__device__ __forceinline__ void enter_tensor(tensor_state &w, const tx_step_table &t, int32_t tensor,
                                             const tensor_reads &read, const tx_step_admission &admitted) {
  if (w.tensor == tensor) return;
  store_extras(t, w.tensor);
  const tx_step_entry &e = t.entries[tensor];
  const float before = read.before;
  const int64_t step = (int64_t)before + 1;
  const int32_t constants_key = (int32_t)e.group << 8 | e.exp_avg_sq_dtype;
  if (w.tensor < 0 || w.constants_key != constants_key || w.before != before) {
    const tx_step_group &g = t.common.groups[e.group];
    const double lr = g.lr ? tx_read_double(g.lr, g.lr_dtype) : g.group.lr;
    const double lag = tx_dither_lag(e.exp_avg_sq_dtype, t.common.moment_rounding, g.group.beta2, step);
    w.constants = tx_adamw_prepare(&g.group, lr, step, admitted.clip_coef, admitted.grad_scale, lag);
    w.quick = tx_quick_constants(w.constants);
    w.constants_key = constants_key;
    w.before = before;
  }
  w.exp_avg = noise_of(t, e, w, TX_LANE_EXP_AVG);
  w.exp_avg_sq = noise_of(t, e, w, TX_LANE_EXP_AVG_SQ);
  w.param = noise_of(t, e, w, TX_LANE_PARAM);
  enter_extras(w.extras, t, e, step);
  w.suspect = read.suspect;
  w.tensor = tensor;
}

}  // namespace

#endif
