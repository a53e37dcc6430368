/* Checks the arguments of tx_muon_momentum, tx_muon_update and tx_muon_mirror. */
#include <math.h>

#include "csrc/core/combos.h"
#include "csrc/core/dtype.h"
#include "csrc/core/fp_mode.h"
#include "csrc/core/status.h"
#include "csrc/ops/operator_checks.h"
#include "csrc/ops/step_outputs.h"
#include "csrc/ops/tensor.h"

static tx_status check_size(uint64_t size, uint64_t legal, const char *init, tx_error *error) {
  if (size == legal) return TX_OK;
  return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "args.size is %llu; %llu is legal (use %s)",
                 (unsigned long long)size, (unsigned long long)legal, init);
}

/* Checks that parts lists the matrices of the n tensors in order, the first of each tensor at its first element. */
static tx_status check_parts(int64_t n_parts, const tx_muon_part *parts, int64_t n, const tx_tensor *params,
                             tx_error *error) {
  if (n_parts < 0 || (n_parts > 0 && !parts)) {
    return tx_fail(error, TX_ERROR_SHAPE, "parts has %lld rows at %p", (long long)n_parts, (const void *)parts);
  }
  int64_t part = 0;
  for (int64_t i = 0; i < n; i++) {
    for (int64_t begin = -1; part < n_parts && parts[part].tensor == i; begin = parts[part++].begin) {
      const int64_t at = parts[part].begin;
      if (at >= params[i].numel || (begin < 0 ? at != 0 : at <= begin)) {
        return tx_fail(
            error, TX_ERROR_SHAPE,
            "parts[%lld] begins at element %lld of params[%lld], which has %lld; 0 for the first of a tensor, "
            "then ascending, is legal",
            (long long)part, (long long)at, (long long)i, (long long)params[i].numel);
      }
    }
    const int has_some = part > 0 && parts[part - 1].tensor == i;
    if (params[i].numel > 0 && !has_some) {
      return tx_fail(error, TX_ERROR_SHAPE, "parts has no row for params[%lld] (in the order of the tensors)",
                     (long long)i);
    }
  }
  if (part == n_parts) return TX_OK;
  return tx_fail(error, TX_ERROR_SHAPE, "parts[%lld] is of tensor %lld; in the order of the %lld tensors is legal",
                 (long long)part, (long long)parts[part].tensor, (long long)n);
}

static tx_status check_steps(const tx_tensor *steps, int64_t n, int reads_values, tx_error *error) {
  for (int64_t i = 0; i < n; i++) {
    if (steps[i].numel != 1 || steps[i].dtype != TX_F32) {
      return tx_fail(error, TX_ERROR_SHAPE, "steps[%lld] is %lld elements of %s; one fp32 is legal", (long long)i,
                     (long long)steps[i].numel, tx_dtype_name(steps[i].dtype));
    }
    if (reads_values) TX_FORWARD(tx_check_step_value(steps[i], i, error));
  }
  return TX_OK;
}

static tx_status check_meta(const tx_meta *meta, int64_t n, tx_error *error) {
  for (int64_t i = 0; i < n; i++) {
    if (tx_meta_of(meta, i).start < 0)
      return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "meta[%lld] has start %lld; >= 0 is legal", (long long)i,
                     (long long)tx_meta_of(meta, i).start);
  }
  return TX_OK;
}

/* Checks that tensors are of a dtype of matrix products. */
static tx_status check_wide(const char *name, const tx_tensor *tensors, int64_t n, tx_error *error) {
  for (int64_t i = 0; i < n; i++) {
    if (tensors[i].numel && tensors[i].dtype != TX_F32 && tensors[i].dtype != TX_BF16)
      return tx_fail(error, TX_ERROR_DTYPE, "%s[%lld] is in %s; fp32 and bf16 are legal", name, (long long)i,
                     tx_dtype_name(tensors[i].dtype));
  }
  return TX_OK;
}

/* -- momentum ----------------------------------------------------------------------------------------------------- */

static tx_status check_momentum(const tx_muon_momentum_args *a, int64_t i, tx_error *error) {
  const tx_tensor momentum = a->momentums[i], scales = tx_at_or_none(a->scales, i);
  if (momentum.numel && tx_combo_moment(momentum.dtype) < 0) {
    return tx_fail(error, TX_ERROR_DTYPE, "momentums[%lld] is in %s; fp32, bf16, fp16 and uint8 are legal",
                   (long long)i, tx_dtype_name(momentum.dtype));
  }
  const int64_t wanted = tx_moment_is_scaled(momentum.dtype) ? tx_blocks(momentum.numel) : 0;
  if (scales.numel == wanted && (!wanted || scales.dtype == TX_U8)) return TX_OK;
  return tx_fail(
      error, TX_ERROR_SHAPE,
      "scales[%lld] is %lld elements of %s; %lld of uint8 are legal (a byte per block of %d of a momentum in "
      "fp16 or uint8)",
      (long long)i, (long long)scales.numel, tx_dtype_name(scales.dtype), (long long)wanted, TX_BLOCK);
}

static tx_status check_momentum_args(const tx_muon_momentum_args *a, int reads_values, tx_error *error) {
  TX_FORWARD(check_size(a ? a->size : 0, sizeof *a, "TX_MUON_MOMENTUM_ARGS_INIT", error));
  TX_FORWARD(tx_check_rounding("moment_rounding", a->moment_rounding, error));
  if (!(a->momentum >= 0.0 && a->momentum <= 1.0)) {
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "momentum is %g; a number in [0, 1] is legal", a->momentum);
  }
  if (a->nesterov != 0 && a->nesterov != 1) {
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "nesterov is %d; 0 or 1 is legal", (int)a->nesterov);
  }
  TX_FORWARD(tx_check_present("grads", a->grads, a->n, error));
  TX_FORWARD(tx_check_present("momentums", a->momentums, a->n, error));
  TX_FORWARD(tx_check_present("updates", a->updates, a->n, error));
  TX_FORWARD(tx_check_present("steps", a->steps, a->n, error));
  const tx_span spans[] = {
      {"grads", a->grads, a->n, 0},       {"momentums", a->momentums, a->n, 1}, {"scales", a->scales, a->n, 1},
      {"updates", a->updates, a->n, 1},   {"steps", a->steps, a->n, 0},         {"grad_scale", &a->grad_scale, 1, 0},
      {"clip_coef", &a->clip_coef, 1, 0},
  };
  const int64_t n_spans = (int64_t)(sizeof spans / sizeof *spans);
  TX_FORWARD(tx_check_tensors(spans, n_spans, error));
  TX_FORWARD(tx_check_fixed("grad_scale", a->grad_scale, TX_F32, 1, 0, error));
  TX_FORWARD(tx_check_fixed("clip_coef", a->clip_coef, TX_F32, 1, 0, error));
  TX_FORWARD(tx_check_same_numel("momentums", a->momentums, "grads", a->grads, a->n, error));
  TX_FORWARD(tx_check_same_numel("updates", a->updates, "grads", a->grads, a->n, error));
  TX_FORWARD(tx_check_plain("grads", a->grads, a->n, error));
  TX_FORWARD(check_wide("updates", a->updates, a->n, error));
  for (int64_t i = 0; i < a->n; i++)
    TX_FORWARD(check_momentum(a, i, error));
  TX_FORWARD(check_steps(a->steps, a->n, reads_values, error));
  TX_FORWARD(check_meta(a->meta, a->n, error));
  return tx_check_overlap(spans, n_spans, error);
}

tx_status tx_check_muon_momentum(const tx_muon_momentum_args *a, int reads_values, tx_error *error) {
  TX_RETURN_UNDER_FP_MODE(tx_status, check_momentum_args(a, reads_values, error));
}

/* -- update ------------------------------------------------------------------------------------------------------- */

static tx_status check_weight(const tx_muon_update_args *a, int64_t i, tx_error *error) {
  const tx_tensor param = a->params[i], master = tx_at_or_none(a->masters, i);
  if (master.numel != 0 && master.numel != param.numel) {
    return tx_fail(error, TX_ERROR_SHAPE,
                   "masters[%lld] has %lld elements and params[%lld] has %lld; equal or 0 is legal", (long long)i,
                   (long long)master.numel, (long long)i, (long long)param.numel);
  }
  if (param.numel && tx_combo_weight(param.dtype, master.numel ? master.dtype : TX_NONE) < 0) {
    return tx_fail(error, TX_ERROR_DTYPE,
                   "params[%lld] is %s with masters[%lld] of %s; fp32, bf16 and fp16 alone, bf16 and fp16 with fp32 "
                   "and bf16 with int16 are legal",
                   (long long)i, tx_dtype_name(param.dtype), (long long)i,
                   master.numel ? tx_dtype_name(master.dtype) : "none");
  }
  return tx_check_checksums(a->masters, a->checksums, i, error);
}

static tx_status check_rates(const tx_muon_update_args *a, tx_error *error) {
  if (a->n_parts > 0 && !a->rates) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "rates is NULL; a row for each of %lld parts is legal",
                   (long long)a->n_parts);
  }
  for (int64_t i = 0; i < a->n_parts; i++) {
    const tx_muon_rate r = a->rates[i];
    if (!(isfinite(r.lr) && isfinite(r.decay) && r.lr >= 0 && r.decay >= 0))
      return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "rates[%lld] is %g, %g; finite numbers >= 0 are legal",
                     (long long)i, r.lr, r.decay);
  }
  return TX_OK;
}

static tx_status check_update_args(const tx_muon_update_args *a, int reads_values, tx_error *error) {
  TX_FORWARD(check_size(a ? a->size : 0, sizeof *a, "TX_MUON_UPDATE_ARGS_INIT", error));
  TX_FORWARD(tx_check_rounding("weight_rounding", a->weight_rounding, error));
  TX_FORWARD(tx_check_external("on_external_write", a->on_external_write, error));
  TX_FORWARD(tx_check_present("params", a->params, a->n, error));
  TX_FORWARD(tx_check_present("updates", a->updates, a->n, error));
  TX_FORWARD(tx_check_present("steps", a->steps, a->n, error));
  const tx_span spans[] = {
      {"params", a->params, a->n, 1},       {"updates", a->updates, a->n, 0},   {"masters", a->masters, a->n, 1},
      {"checksums", a->checksums, a->n, 1}, {"steps", a->steps, a->n, 1},       {"resynced", &a->resynced, 1, 1},
      {"changed", a->changed, a->n, 1},     {"moved", a->moved, a->n, 1},       {"distances", a->distances, a->n, 1},
      {"emas", a->emas, a->n, 1},           {"ema_lows", a->ema_lows, a->n, 1}, {"healths", a->healths, a->n, 1},
  };
  const tx_step_outputs outputs = TX_STEP_OUTPUTS_OF(a);
  TX_FORWARD(tx_check_step_outputs(&outputs, error));
  const int64_t n_spans = (int64_t)(sizeof spans / sizeof *spans);
  TX_FORWARD(tx_check_tensors(spans, n_spans, error));
  TX_FORWARD(tx_check_fixed("resynced", a->resynced, TX_I64, 1, 0, error));
  TX_FORWARD(tx_check_same_numel("updates", a->updates, "params", a->params, a->n, error));
  TX_FORWARD(check_wide("updates", a->updates, a->n, error));
  for (int64_t i = 0; i < a->n; i++) {
    TX_FORWARD(check_weight(a, i, error));
    TX_FORWARD(tx_check_step_outputs_of(&outputs, i, error));
  }
  TX_FORWARD(check_steps(a->steps, a->n, reads_values, error));
  TX_FORWARD(check_meta(a->meta, a->n, error));
  TX_FORWARD(check_parts(a->n_parts, a->parts, a->n, a->params, error));
  TX_FORWARD(check_rates(a, error));
  return tx_check_overlap(spans, n_spans, error);
}

tx_status tx_check_muon_update(const tx_muon_update_args *a, int reads_values, tx_error *error) {
  TX_RETURN_UNDER_FP_MODE(tx_status, check_update_args(a, reads_values, error));
}

tx_status tx_check_muon_mirror(tx_tensor square, int64_t n, int64_t panel, tx_error *error) {
  const tx_span span = {"square", &square, 1, 1};
  TX_FORWARD(tx_check_tensors(&span, 1, error));
  if (n < 0 || n > INT32_MAX || square.numel != n * n) {
    return tx_fail(error, TX_ERROR_SHAPE, "square has %lld elements, and n is %lld; n * n elements are legal",
                   (long long)square.numel, (long long)n);
  }
  if (panel < 1) return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "panel is %lld; >= 1 is legal", (long long)panel);
  return tx_check_plain("square", &square, 1, error);
}
