/* tx_adamw: decide whether the step is skipped, run the pieces, count. */
#include <math.h>
#include <string.h>

#include "csrc/core/status.h"
#include "csrc/cpu/kernels.h"
#include "csrc/math/dither_lag.h"
#include "csrc/math/noise.h"
#include "csrc/ops/checks.h"
#include "csrc/ops/external.h"
#include "csrc/ops/tensor.h"
#include "csrc/ops/work.h"

typedef struct step_context {
  const tx_adamw_args *args;
  const tx_kernels *kernels;
  double clip_coef, grad_scale;
  int64_t resynced; /* elements whose master became the weight */
} step_context;

/* The constants of the last (group, step, lag) that a task met: neighbours mostly share them. */
typedef struct step_local {
  tx_adamw_constants constants;
  int64_t group;
  int64_t step; /* 0: nothing is cached */
  double lag;
  int64_t resynced;
} step_local;

static const tx_adamw_constants *constants_of(const step_context *c, step_local *local, int64_t i, int64_t group,
                                              int64_t step) {
  const tx_adamw_args *a = c->args;
  const double lag = tx_dither_lag(a->exp_avg_sqs[i].dtype, a->moment_rounding, a->groups[group].beta2, step);
  if (local->step != step || local->group != group || local->lag != lag) {
    local->constants = tx_adamw_prepare(&a->groups[group], tx_lr_of(a, group), step, c->clip_coef, c->grad_scale, lag);
    local->group = group;
    local->step = step;
    local->lag = lag;
  }
  return &local->constants;
}

static void step_piece(void *ctx, void *memory, int64_t i, int64_t begin, int64_t count) {
  const step_context *c = ctx;
  step_local *local = memory;
  const tx_adamw_args *a = c->args;
  const tx_tensor witnesses = tx_at_or_none(a->witnesses, i);
  const tx_meta meta = tx_meta_of(a->meta, i);
  const int64_t step = (int64_t)tx_get_f32(a->steps[i], 0.0f) + 1;
  const int64_t start = meta.start + begin;
  uint8_t *scales = a->scales && a->scales[i].numel ? (uint8_t *)a->scales[i].data + begin / TX_BLOCK : NULL;
  const int exp_avg_scaled = tx_moment_is_scaled(a->exp_avgs[i].dtype);
  const int exp_avg_sq_scaled = tx_moment_is_scaled(a->exp_avg_sqs[i].dtype);
  const tx_adamw_piece piece = {
      .n = count,
      .grad = tx_advanced(a->grads[i], begin),
      .param = tx_advanced(a->params[i], begin),
      .exp_avg = tx_advanced(a->exp_avgs[i], begin),
      .exp_avg_sq = tx_advanced(a->exp_avg_sqs[i], begin),
      .master = tx_advanced(tx_at_or_none(a->masters, i), begin),
      .witnesses = tx_advanced(witnesses, begin / (tx_master_dtype(a, i) == TX_I16 ? TX_WITNESS : TX_SAMPLED)),
      .whole = a->params[i].numel <= TX_SAMPLED,
      .resyncs = a->on_external_write == TX_EXTERNAL_RESYNC,
      .exp_avg_scale = exp_avg_scaled ? scales : NULL,
      .exp_avg_sq_scale = exp_avg_sq_scaled ? scales + (exp_avg_scaled ? tx_blocks(a->params[i].numel) : 0) : NULL,
      .constants = constants_of(c, local, i, meta.group, step),
      .exp_avg_noise = tx_noise_at(a->seed, meta.id, TX_LANE_EXP_AVG, step, start),
      .exp_avg_sq_noise = tx_noise_at(a->seed, meta.id, TX_LANE_EXP_AVG_SQ, step, start),
      .param_noise = tx_noise_at(a->seed, meta.id, TX_LANE_PARAM, step, start),
      .grad_dtype = a->grads[i].dtype,
      .param_dtype = a->params[i].dtype,
      .master_dtype = tx_master_dtype(a, i),
      .exp_avg_dtype = a->exp_avgs[i].dtype,
      .exp_avg_sq_dtype = a->exp_avg_sqs[i].dtype,
      .moment_rounding = a->moment_rounding,
      .weight_rounding = a->weight_rounding,
  };
  local->resynced += c->kernels->adamw(&piece);
}

static void step_merge(void *ctx, const void *memory) {
  step_context *c = ctx;
  const step_local *local = memory;
  c->resynced += local->resynced;
}

static void count(tx_tensor counter, int64_t by) {
  if (counter.numel) tx_set_i64(counter, 0, tx_get_i64(counter, 0) + by);
}

tx_status tx_adamw(const tx_adamw_args *args, const tx_parallel *parallel, tx_error *error) {
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(tx_check_adamw(args, 1, error));
  int64_t resynced = 0;
  if (args->on_external_write == TX_EXTERNAL_CHECK) return tx_notice_external(args, &resynced, parallel, error);
  const double scale = (double)tx_get_f32(args->grad_scale, 1.0f), clip = (double)tx_get_f32(args->clip_coef, 1.0f);
  if (tx_get_f32(args->found_inf, 0.0f) != 0.0f || !isfinite(clip / scale)) {
    count(args->skipped, 1);
    return TX_OK;
  }
  if (args->on_external_write == TX_EXTERNAL_RESYNC) {
    TX_FORWARD(tx_notice_external(args, &resynced, parallel, error));
  }
  step_context context = {args, tx_kernels_selected(), clip, scale, resynced};
  const tx_work work = {.n = args->n,
                        .tensors = args->params,
                        .piece = step_piece,
                        .merge = step_merge,
                        .local_bytes = sizeof(step_local),
                        .alignment = args->witnesses ? TX_SAMPLED : TX_BLOCK,
                        .ctx = &context};
  TX_FORWARD(tx_work_run(&work, parallel, error));
  for (int64_t i = 0; i < args->n; i++) {
    const float completed = tx_get_f32(args->steps[i], 0.0f) + 1.0f;
    memcpy(args->steps[i].data, &completed, sizeof completed);
  }
  count(args->resynced, context.resynced);
  return TX_OK;
}
