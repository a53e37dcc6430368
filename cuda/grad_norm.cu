/* The norm, the clip coefficient and found_inf from statistics that stay on the device; see tx_grad_norm. */
#include "csrc/math/norm.h"
#include "cuda/launch.h"

extern "C" {
#include "csrc/ops/operator_checks.h"
}

namespace {

struct arguments {
  tx_tensor stats, grad_scale, norm, clip_coef, found_inf;
  double max_norm;
};

/* Stores a value in a tensor of one element, F32 or F64; nothing if it is "none". */
__device__ __forceinline__ void set_float(tx_tensor tensor, double value) {
  const float narrow = (float)value;
  if (tensor.numel == 0) return;
  if (tensor.dtype == TX_F64) {
    memcpy(tensor.data, &value, sizeof value);
  } else {
    memcpy(tensor.data, &narrow, sizeof narrow);
  }
}

__global__ void grad_norm(const __grid_constant__ arguments a) {
  int64_t stats[TX_STATS_LEN];
  float scale = 1.0f;
  if (threadIdx.x != 0) return;
  memcpy(stats, a.stats.data, sizeof stats);
  if (a.grad_scale.numel != 0) memcpy(&scale, a.grad_scale.data, sizeof scale);
  const tx_norm n = tx_norm_of(stats, stats[TX_NORM_LIMBS], (double)scale, a.max_norm);
  set_float(a.norm, n.norm);
  set_float(a.clip_coef, n.clip_coef);
  set_float(a.found_inf, n.found_inf);
}

}  // namespace

tx_status tx_cuda_grad_norm(tx_tensor stats, tx_tensor grad_scale, double max_norm, tx_tensor norm, tx_tensor clip_coef,
                            tx_tensor found_inf, const tx_cuda_call *call, tx_error *error) {
  tx_cuda_scope scope;
  TX_FORWARD(tx_check_grad_norm(stats, grad_scale, max_norm, norm, clip_coef, found_inf, error));
  TX_FORWARD(tx_cuda_enter(call, &scope, error));
  const arguments a = {stats, grad_scale, norm, clip_coef, found_inf, max_norm};
  return tx_cuda_leave(&scope,
                       tx_cuda_launch_one(&scope, grad_norm, a, TX_WARP, "finishing the norm of the gradients", error));
}
