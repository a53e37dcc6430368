/* tx_cast: converts lists of tensors between any two forms. */
#include "csrc/core/status.h"
#include "csrc/cpu/kernels.h"
#include "csrc/ops/convert.h"
#include "csrc/ops/operator_checks.h"
#include "csrc/ops/parallel.h"
#include "csrc/ops/tensor.h"

typedef struct cast_context {
  const tx_cast_args *args;
  const tx_kernels *kernels;
} cast_context;

static void cast_piece(void *ctx, void *local, int64_t i, int64_t begin, int64_t count) {
  (void)local;
  const cast_context *c = ctx;
  const tx_cast_args *a = c->args;
  const tx_tensor src_scales = tx_at_or_none(a->src_scales, i), dst_scales = tx_at_or_none(a->dst_scales, i);
  const tx_meta meta = tx_meta_of(a->meta, i);
  const tx_format format = (tx_format)a->format;
  tx_convert(c->kernels, tx_run_at(tx_form_of(a->srcs[i], src_scales, format), a->srcs[i], src_scales, begin),
             tx_run_at(tx_form_of(a->dsts[i], dst_scales, format), a->dsts[i], dst_scales, begin), count,
             tx_noise_at(a->seed, meta.id, TX_LANE_CAST, a->step, tx_element_at(meta, begin)), a->rounding);
}

tx_status tx_cast(const tx_cast_args *args, const tx_parallel *parallel, tx_error *error) {
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(tx_check_cast(args, error));
  cast_context context = {args, tx_kernels_selected()};
  const tx_parallel_work work = {.n = args->n, .tensors = args->dsts, .piece = cast_piece, .ctx = &context};
  return tx_parallel_work_run(&work, parallel, error);
}
