/* What a warp knows of the tensor that it is in. Included by adamw_kernel.h. */
#ifndef TX_CUDA_ADAMW_TENSOR_H
#define TX_CUDA_ADAMW_TENSOR_H

#include "csrc/math/adamw.h"
#include "csrc/math/dither_lag.h"
#include "csrc/math/noise.h"
#include "cuda/adamw_gate.h"
#include "cuda/adamw_quick.h"

namespace {

/* Kept while the tensor stays the same. */
struct of_tensor {
  int32_t tensor, group;
  int64_t step;
  double lag;
  tx_adamw_constants constants;
  bool quick; /* tx_quick_constants */
  tx_noise exp_avg, exp_avg_sq, param;
};

__device__ __forceinline__ void enter_tensor(of_tensor &w, const tx_step_table &t, int32_t tensor,
                                             const tx_step_admission &admitted) {
  if (w.tensor == tensor) return;
  const tx_step_entry &e = t.entries[tensor];
  const int64_t step = (int64_t)tx_read_value<float>(e.step) + 1;
  const tx_step_group &g = t.common.groups[e.group];
  const double lag = tx_dither_lag(e.exp_avg_sq_dtype, t.common.moment_rounding, g.group.beta2, step);
  if (w.tensor < 0 || w.group != e.group || w.step != step || w.lag != lag) {
    const double lr = g.lr ? tx_read_double(g.lr, g.lr_dtype) : g.group.lr;
    w.constants = tx_adamw_prepare(&g.group, lr, step, admitted.clip_coef, admitted.grad_scale, lag);
    w.quick = tx_quick_constants(w.constants);
    w.group = e.group;
    w.step = step;
    w.lag = lag;
  }
  w.exp_avg = tx_noise_at(t.common.seed, e.id, TX_LANE_EXP_AVG, step, e.start);
  w.exp_avg_sq = tx_noise_at(t.common.seed, e.id, TX_LANE_EXP_AVG_SQ, step, e.start);
  w.param = tx_noise_at(t.common.seed, e.id, TX_LANE_PARAM, step, e.start);
  w.tensor = tensor;
}

}  // namespace

#endif
