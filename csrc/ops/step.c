#include "csrc/ops/step.h"

#include <math.h>
#include <string.h>

#include "csrc/core/fp_mode.h"
#include "csrc/math/dither_lag.h"
#include "csrc/math/noise.h"
#include "csrc/ops/piece_outputs.h"
#include "csrc/ops/tensor.h"

static const tx_adamw_constants *constants_of(const tx_step *c, tx_step_local *local, int64_t i, int64_t group,
                                              int64_t step) {
  const tx_adamw_args *a = c->args;
  const double lag = tx_dither_lag((int32_t)a->exp_avg_sqs[i].dtype, a->moment_rounding, a->groups[group].beta2, step);
  if (local->step != step || local->group != group || local->lag != lag) {
    local->constants = tx_adamw_prepare(&a->groups[group], tx_lr_of(a, group), step, c->clip_coef, c->grad_scale, lag);
    local->group = group;
    local->step = step;
    local->lag = lag;
  }
  return &local->constants;
}

void tx_step_piece(const tx_step *c, tx_step_local *local, tx_tensor_range where, void *param, const void *grad) {
  const tx_adamw_args *a = c->args;
  const int64_t i = where.tensor, begin = where.begin;
  const tx_tensor checksums = tx_at_or_none(a->checksums, i);
  const tx_meta meta = tx_meta_of(a->meta, i);
  const int64_t step = (int64_t)tx_get_f32(a->steps[i], 0.0f) + 1;
  const int64_t start = tx_element_at(meta, begin);
  uint8_t *scales = a->scales && a->scales[i].numel ? (uint8_t *)a->scales[i].data + begin / TX_BLOCK : NULL;
  const int exp_avg_scaled = tx_moment_is_scaled(a->exp_avgs[i].dtype);
  const int exp_avg_sq_scaled = tx_moment_is_scaled(a->exp_avg_sqs[i].dtype);
  const tx_step_outputs outputs = TX_STEP_OUTPUTS_OF(a);
  tx_piece_outputs piece_outputs;
  const tx_adamw_piece piece = {
      .n = where.count,
      .grad = grad,
      .param = param,
      .exp_avg = tx_advanced(a->exp_avgs[i], begin),
      .exp_avg_sq = tx_advanced(a->exp_avg_sqs[i], begin),
      .master = tx_advanced(tx_at_or_none(a->masters, i), begin),
      .checksums = tx_advanced(checksums, begin / (tx_master_dtype(a, i) == TX_I16 ? TX_CHECKSUM : TX_SAMPLED)),
      .whole = a->params[i].numel <= TX_SAMPLED,
      .stream_store = c->stream_store,
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
      .extras = tx_extras_begin(&outputs, i, begin, step, &piece_outputs),
  };
  local->resynced += c->kernels->adamw(&piece);
  tx_extras_end(&piece_outputs);
}

int64_t tx_step_alignment(const tx_adamw_args *args) {
  return args->checksums ? TX_SAMPLED : TX_BLOCK;
}

static void count(tx_tensor counter, int64_t by) {
  if (counter.numel) tx_add_count(counter, 0, by);
}

static int begin(const tx_adamw_args *args, tx_step *step) {
  const double scale = (double)tx_get_f32(args->grad_scale, 1.0f), clip = (double)tx_get_f32(args->clip_coef, 1.0f);
  if (tx_get_f32(args->found_inf, 0.0f) != 0.0f || !isfinite(clip / scale)) {
    count(args->skipped, 1);
    return 0;
  }
  *step = (tx_step){args, tx_kernels_selected(), clip, scale, 0, 0};
  return 1;
}

int tx_step_begin(const tx_adamw_args *args, tx_step *step) {
  TX_RETURN_UNDER_FP_MODE(int, begin(args, step));
}

void tx_step_merge(tx_step *step, const tx_step_local *local) {
  step->resynced += local->resynced;
}

void tx_step_end(const tx_step *step) {
  const tx_adamw_args *args = step->args;
  for (int64_t i = 0; i < args->n; i++) {
    const float completed = tx_get_f32(args->steps[i], 0.0f) + 1.0f;
    memcpy(args->steps[i].data, &completed, sizeof completed);
  }
  count(args->resynced, step->resynced);
}
