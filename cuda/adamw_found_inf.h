/* Whether a step is computed or skipped, decided on the device. Every thread of every kernel of a call decides the
 * same. */
#ifndef TX_CUDA_ADAMW_FOUND_INF_H
#define TX_CUDA_ADAMW_FOUND_INF_H

#include "cuda/adamw_table.h"
#include "cuda/device_scalars.h"

struct tx_step_admission {
  double clip_coef, grad_scale;
  bool skips;
};

static __device__ __forceinline__ tx_step_admission tx_step_admitted(const tx_step_gate &gate) {
  tx_step_admission a;
  a.grad_scale = (double)tx_read_float_or(gate.grad_scale, 1.0f);
  a.clip_coef = (double)tx_read_float_or(gate.clip_coef, 1.0f);
  const double factor = a.clip_coef / a.grad_scale;
  a.skips = tx_read_float_or(gate.found_inf, 0.0f) != 0.0f || !(factor - factor == 0.0);
  return a;
}

#endif
