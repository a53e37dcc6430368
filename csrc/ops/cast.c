/* tx_cast: lists of tensors from any form to any other. */
#include "csrc/core/dtype.h"
#include "csrc/core/status.h"
#include "csrc/cpu/kernels.h"
#include "csrc/ops/convert.h"
#include "csrc/ops/tensor.h"
#include "csrc/ops/work.h"

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
             tx_noise_at(a->seed, meta.id, TX_LANE_CAST, a->step, meta.start + begin), a->rounding);
}

static tx_status check_cast(const tx_cast_args *a, const tx_parallel *parallel, tx_error *error) {
  if (!a || a->size != sizeof *a) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "args.size is %llu; %llu is legal (use TX_CAST_ARGS_INIT)",
                   (unsigned long long)(a ? a->size : 0), (unsigned long long)sizeof *a);
  }
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(tx_check_rounding("rounding", a->rounding, error));
  if (a->format != TX_FORMAT_SIGNED && a->format != TX_FORMAT_SQRT) {
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "format is %d; 0 (signed) and 1 (square root) are legal",
                   (int)a->format);
  }
  const tx_span spans[] = {{"srcs", a->srcs, a->n, 0},
                           {"dsts", a->dsts, a->n, 1},
                           {"src_scales", a->src_scales, a->n, 0},
                           {"dst_scales", a->dst_scales, a->n, 1}};
  TX_FORWARD(tx_check_present("srcs", a->srcs, a->n, error));
  TX_FORWARD(tx_check_present("dsts", a->dsts, a->n, error));
  TX_FORWARD(tx_check_tensors(spans, 4, error));
  TX_FORWARD(tx_check_same_numel("srcs", a->srcs, "dsts", a->dsts, a->n, error));
  for (int64_t i = 0; i < a->n; i++) {
    const tx_format format = (tx_format)a->format;
    TX_FORWARD(tx_check_form("srcs", "src_scales", i, a->srcs[i], tx_at_or_none(a->src_scales, i), format, error));
    TX_FORWARD(tx_check_form("dsts", "dst_scales", i, a->dsts[i], tx_at_or_none(a->dst_scales, i), format, error));
    if (tx_meta_of(a->meta, i).start < 0) {
      return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "meta[%lld] has start %lld; start >= 0 is legal", (long long)i,
                     (long long)a->meta[i].start);
    }
  }
  return tx_check_overlap(spans, 4, error);
}

tx_status tx_cast(const tx_cast_args *args, const tx_parallel *parallel, tx_error *error) {
  TX_FORWARD(check_cast(args, parallel, error));
  cast_context context = {args, tx_kernels_selected()};
  const tx_work work = {.n = args->n, .tensors = args->dsts, .piece = cast_piece, .ctx = &context};
  return tx_work_run(&work, parallel, error);
}
