/* Converts tensors from any form to any other; see tx_cast. */
#include "cuda/conversions.h"

extern "C" {
#include "csrc/ops/operator_checks.h"
}

namespace {

int form_of(tx_tensor tensor, bool scaled, int32_t format) {
  return scaled ? tx_form_scaled(tensor.dtype, (tx_format)format) : tx_form_plain(tensor.dtype);
}

tx_conversion conversion(const tx_cast_args *a, int64_t i) {
  const bool from_scaled = a->src_scales && a->src_scales[i].numel, to_scaled = a->dst_scales && a->dst_scales[i].numel;
  const int64_t id = a->meta ? a->meta[i].id : i, start = a->meta ? a->meta[i].start : 0;
  tx_conversion run = {};
  run.numel = run.given = a->dsts[i].numel;
  run.from = a->srcs[i].data;
  run.to = a->dsts[i].data;
  run.from_scales = from_scaled ? (const uint8_t *)a->src_scales[i].data : nullptr;
  run.to_scales = to_scaled ? (uint8_t *)a->dst_scales[i].data : nullptr;
  run.noise = tx_noise_at(a->seed, id, TX_LANE_CAST, a->step, start);
  run.from_form = (uint8_t)form_of(a->srcs[i], from_scaled, a->format);
  run.to_form = (uint8_t)form_of(a->dsts[i], to_scaled, a->format);
  return run;
}

tx_status run_all(const tx_cuda_scope *scope, const tx_cast_args *a, tx_error *error) {
  const char *name = "casting";
  tx_convert_table t;
  tx_convert_begin(&t, a->rounding);
  for (int64_t i = 0; i < a->n; i++)
    TX_FORWARD(tx_convert_add(scope, &t, conversion(a, i), name, error));
  return tx_convert_end(scope, &t, name, error);
}

}  // namespace

tx_status tx_cuda_cast(const tx_cast_args *args, const tx_cuda_call *call, tx_error *error) {
  tx_cuda_scope scope;
  TX_FORWARD(tx_check_cast(args, error));
  TX_FORWARD(tx_cuda_enter(call, &scope, error));
  return tx_cuda_leave(&scope, run_all(&scope, args, error));
}
