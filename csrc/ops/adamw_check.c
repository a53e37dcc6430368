/* Checks the arguments of tx_adamw. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "csrc/core/combos.h"
#include "csrc/core/dtype.h"
#include "csrc/core/fp_mode.h"
#include "csrc/core/status.h"
#include "csrc/core/text.h"
#include "csrc/ops/operator_checks.h"
#include "csrc/ops/repeat_check.h"
#include "csrc/ops/step_outputs.h"
#include "csrc/ops/tensor.h"

/* 2^24: from this on an fp32 step count can no longer be increased by exactly 1. */
#define TX_MAX_STEP 16777216.0f

/* as_torch: 1: the message names the betas and group i as torch.optim does; 0: as tx_adamw_args does. where: the
 * beginning of the message, in place of the group; may be NULL. */
static tx_status check_group(const tx_adamw_group *group, int as_torch, const char *where, int64_t i, tx_error *error) {
  static const char finite[] = "a finite number >= 0", beta[] = "a number in [0, 1)", flag[] = "0 or 1";
  const struct {
    const char *name;
    double value;
    int legal;
    const char *rule;
  } checks[] = {
      {"lr", group->lr, isfinite(group->lr) && group->lr >= 0, finite},
      {as_torch ? "betas[0]" : "beta1", group->beta1, group->beta1 >= 0 && group->beta1 < 1, beta},
      {as_torch ? "betas[1]" : "beta2", group->beta2, group->beta2 >= 0 && group->beta2 < 1, beta},
      {"eps", group->eps, isfinite(group->eps) && group->eps >= 0, finite},
      {"weight_decay", group->weight_decay, isfinite(group->weight_decay) && group->weight_decay >= 0, finite},
      {"maximize", group->maximize, group->maximize == 0 || group->maximize == 1, flag},
      {"decoupled", group->decoupled, group->decoupled == 0 || group->decoupled == 1, flag},
  };
  for (size_t k = 0; k < sizeof checks / sizeof *checks; k++) {
    if (checks[k].legal) continue;
    char number[64], begin[64];
    tx_text value = tx_text_in(number, sizeof number);
    tx_text_add_float(&value, checks[k].value);
    (void)snprintf(begin, sizeof begin, as_torch ? "group %lld: " : "groups[%lld]: ", (long long)i);
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "%s%s is %s; %s is legal", where ? where : begin, checks[k].name,
                   number, checks[k].rule);
  }
  return TX_OK;
}

static tx_status check_each(const tx_adamw_group *groups, int64_t n, const char *where, tx_error *error) {
  if (n < 0 || (n > 0 && !groups)) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_adamw_check_groups: %lld groups at %p", (long long)n,
                   (const void *)groups);
  }
  for (int64_t i = 0; i < n; i++)
    TX_FORWARD(check_group(&groups[i], 1, where, i, error));
  return TX_OK;
}

tx_status tx_adamw_check_groups(const tx_adamw_group *groups, int64_t n, const char *where, tx_error *error) {
  TX_RETURN_UNDER_FP_MODE(tx_status, check_each(groups, n, where, error));
}

static tx_status check_groups(const tx_adamw_args *a, int reads_values, tx_error *error) {
  for (int64_t i = 0; i < a->n_groups; i++) {
    tx_adamw_group group = a->groups[i];
    if (a->lrs) {
      const tx_tensor lr = a->lrs[i];
      if (lr.numel != 1 || !lr.data || (lr.dtype != TX_F32 && lr.dtype != TX_F64)) {
        return tx_fail(error, TX_ERROR_SHAPE, "lrs[%lld] is %lld elements of %s; one fp32 or float64 is legal",
                       (long long)i, (long long)lr.numel, tx_dtype_name(lr.dtype));
      }
      group.lr = reads_values ? tx_lr_of(a, i) : 0;
    }
    TX_FORWARD(check_group(&group, 0, NULL, i, error));
  }
  return TX_OK;
}

/* Lists the legal dtypes of one argument, from combos.def, for messages. `list` has room for all of them. */
static void append(char *list, tx_dtype dtype) {
  if (*list) strcat(list, ", ");
  strcat(list, dtype == TX_NONE ? "none" : tx_dtype_name(dtype));
}
#define TX_APPEND_(index, name, list) append(list, TX_##name);
static void list_grads(char *list) {
  TX_FOR_EACH_GRAD(TX_APPEND_, list)
}
static void list_moments(char *list) {
  TX_FOR_EACH_MOMENT(TX_APPEND_, list)
}
#undef TX_APPEND_
#define TX_APPEND_(index, param, master, list) \
  if (TX_##master == TX_NONE) append(list, TX_##param);
static void list_params(char *list) {
  TX_FOR_EACH_WEIGHT(TX_APPEND_, list)
}
#undef TX_APPEND_
#define TX_APPEND_(index, param, master, wanted, list) \
  if (TX_##param == (wanted)) append(list, TX_##master);
static void list_masters(tx_dtype param, char *list) {
  TX_FOR_EACH_WEIGHT(TX_APPEND_, param, list)
}
#undef TX_APPEND_

static tx_status fail_combo(const tx_adamw_args *a, int64_t i, tx_error *error) {
  const tx_dtype param = a->params[i].dtype, grad = a->grads[i].dtype;
  const tx_dtype exp_avg = a->exp_avgs[i].dtype, exp_avg_sq = a->exp_avg_sqs[i].dtype;
  const tx_tensor master = tx_at_or_none(a->masters, i);
  char legal[128] = "", what[128];
  if (tx_combo_weight(param, TX_NONE) < 0) {
    (void)snprintf(what, sizeof what, "params[%lld]", (long long)i);
    list_params(legal);
  } else if (tx_combo_grad(grad) < 0) {
    (void)snprintf(what, sizeof what, "grads[%lld]", (long long)i);
    list_grads(legal);
  } else if (tx_combo_moment(exp_avg) < 0 || tx_combo_moment(exp_avg_sq) < 0) {
    (void)snprintf(what, sizeof what, "exp_avg%s[%lld]", tx_combo_moment(exp_avg) < 0 ? "s" : "_sqs", (long long)i);
    list_moments(legal);
  } else {
    (void)snprintf(what, sizeof what, "masters[%lld] of a %s parameter", (long long)i, tx_dtype_name(param));
    list_masters(param, legal);
  }
  return tx_fail(error, TX_ERROR_DTYPE,
                 "no step for params %s, grads %s, exp_avgs %s, exp_avg_sqs %s, masters %s: %s may be %s",
                 tx_dtype_name(param), tx_dtype_name(grad), tx_dtype_name(exp_avg), tx_dtype_name(exp_avg_sq),
                 master.numel ? tx_dtype_name(master.dtype) : "none", what, legal);
}

static int is_legal(const tx_adamw_args *a, int64_t i) {
  return tx_combo_weight(a->params[i].dtype, tx_master_dtype(a, i)) >= 0 && tx_combo_grad(a->grads[i].dtype) >= 0 &&
         tx_combo_moment(a->exp_avgs[i].dtype) >= 0 && tx_combo_moment(a->exp_avg_sqs[i].dtype) >= 0;
}

tx_status tx_check_step_value(tx_tensor step, int64_t i, tx_error *error) {
  const float t = tx_get_f32(step, 0.0f);
  if (t >= 0 && t < TX_MAX_STEP && t == (float)(int64_t)t) return TX_OK;
  return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "steps[%lld] is %g; a whole number in [0, 2^24) is legal", (long long)i,
                 (double)t);
}

tx_status tx_check_external(const char *name, int32_t on_external_write, tx_error *error) {
  if (on_external_write >= TX_EXTERNAL_IGNORE && on_external_write <= TX_EXTERNAL_CHECK) return TX_OK;
  return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "%s is %d; 0 (ignore), 1 (resync) and 2 (check) are legal", name,
                 (int)on_external_write);
}

/* Checks what depends on nothing but the tensors of parameter i. */
static tx_status check_tensor(const tx_adamw_args *a, int64_t i, tx_error *error) {
  const int64_t numel = a->params[i].numel;
  /* the dtypes of an empty parameter do not matter: there is nothing to step */
  if (numel > 0 && !is_legal(a, i)) return fail_combo(a, i, error);
  const tx_tensor master = tx_at_or_none(a->masters, i);
  if (master.numel != 0 && master.numel != numel) {
    return tx_fail(error, TX_ERROR_SHAPE,
                   "masters[%lld] has %lld elements and params[%lld] has %lld; equal or 0 is legal", (long long)i,
                   (long long)master.numel, (long long)i, (long long)numel);
  }
  const int scaled = tx_moment_is_scaled(a->exp_avgs[i].dtype) + tx_moment_is_scaled(a->exp_avg_sqs[i].dtype);
  const tx_tensor scales = tx_at_or_none(a->scales, i);
  const int64_t wanted = scaled * tx_blocks(numel);
  if (scales.numel != wanted || (wanted && scales.dtype != TX_U8)) {
    return tx_fail(
        error, TX_ERROR_SHAPE,
        "scales[%lld] is %lld elements of %s; %lld of uint8 are legal (a byte per block of %d for each moment "
        "in fp16 or uint8)",
        (long long)i, (long long)scales.numel, tx_dtype_name(scales.dtype), (long long)wanted, TX_BLOCK);
  }
  TX_FORWARD(tx_check_checksums(a->masters, a->checksums, i, error));
  const tx_step_outputs outputs = TX_STEP_OUTPUTS_OF(a);
  TX_FORWARD(tx_check_step_outputs_of(&outputs, i, error));
  const tx_tensor step = a->steps[i];
  if (step.numel != 1 || step.dtype != TX_F32) {
    return tx_fail(error, TX_ERROR_SHAPE, "steps[%lld] is %lld elements of %s; one fp32 is legal", (long long)i,
                   (long long)step.numel, tx_dtype_name(step.dtype));
  }
  return TX_OK;
}

static tx_status check_values(const tx_adamw_args *a, int64_t i, int reads_values, tx_error *error) {
  if (reads_values) TX_FORWARD(tx_check_step_value(a->steps[i], i, error));
  const tx_meta meta = tx_meta_of(a->meta, i);
  if (meta.start >= 0 && meta.group >= 0 && meta.group < a->n_groups) return TX_OK;
  return tx_fail(error, TX_ERROR_ILLEGAL_VALUE,
                 "meta[%lld] has start %lld and group %lld; start >= 0 and a group in [0, %lld) are legal",
                 (long long)i, (long long)meta.start, (long long)meta.group, (long long)a->n_groups);
}

/* Checks the tensors of all parameters. repeats: those that are written passed before (Note [repeated checks]). */
static tx_status check_lists(const tx_adamw_args *a, const tx_span *spans, int64_t n_spans, int repeats,
                             tx_error *error) {
  for (int64_t s = 0; s < n_spans; s++)
    if (!repeats || !spans[s].writes) TX_FORWARD(tx_check_tensors(&spans[s], 1, error));
  TX_FORWARD(tx_check_same_numel("grads", a->grads, "params", a->params, a->n, error));
  if (!repeats) {
    TX_FORWARD(tx_check_same_numel("exp_avgs", a->exp_avgs, "params", a->params, a->n, error));
    TX_FORWARD(tx_check_same_numel("exp_avg_sqs", a->exp_avg_sqs, "params", a->params, a->n, error));
  }
  for (int64_t i = 0; i < a->n; i++) {
    if (!repeats) {
      TX_FORWARD(check_tensor(a, i, error));
    } else if (a->params[i].numel && tx_combo_grad(a->grads[i].dtype) < 0) {
      return fail_combo(a, i, error);
    }
  }
  return TX_OK;
}

static tx_status check_scalars(const tx_adamw_args *a, int reads_values, tx_error *error) {
  TX_FORWARD(tx_check_fixed("grad_scale", a->grad_scale, TX_F32, 1, 0, error));
  TX_FORWARD(tx_check_fixed("clip_coef", a->clip_coef, TX_F32, 1, 0, error));
  TX_FORWARD(tx_check_fixed("found_inf", a->found_inf, TX_F32, 1, 0, error));
  TX_FORWARD(tx_check_fixed("skipped", a->skipped, TX_I64, 1, 0, error));
  TX_FORWARD(tx_check_fixed("resynced", a->resynced, TX_I64, 1, 0, error));
  return check_groups(a, reads_values, error);
}

static tx_status check(const tx_adamw_args *a, int reads_values, tx_error *error) {
  if (!a || a->size != sizeof *a) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "args.size is %llu; %llu is legal (use TX_ADAMW_ARGS_INIT)",
                   (unsigned long long)(a ? a->size : 0), (unsigned long long)sizeof *a);
  }
  TX_FORWARD(tx_check_rounding("moment_rounding", a->moment_rounding, error));
  TX_FORWARD(tx_check_rounding("weight_rounding", a->weight_rounding, error));
  TX_FORWARD(tx_check_external("on_external_write", a->on_external_write, error));
  if (a->n > 0 && !(a->params && a->grads && a->exp_avgs && a->exp_avg_sqs && a->steps)) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "params, grads, exp_avgs, exp_avg_sqs and steps are needed; the others may be NULL");
  }
  if (a->n_groups < 1 || !a->groups) {
    return tx_fail(error, TX_ERROR_SHAPE, "groups has %lld rows; at least 1 is legal", (long long)a->n_groups);
  }
  const tx_span spans[] = {
      {"params", a->params, a->n, 1},       {"grads", a->grads, a->n, 0},
      {"exp_avgs", a->exp_avgs, a->n, 1},   {"exp_avg_sqs", a->exp_avg_sqs, a->n, 1},
      {"masters", a->masters, a->n, 1},     {"scales", a->scales, a->n, 1},
      {"steps", a->steps, a->n, 1},         {"lrs", a->lrs, a->n_groups, 0},
      {"grad_scale", &a->grad_scale, 1, 0}, {"clip_coef", &a->clip_coef, 1, 0},
      {"found_inf", &a->found_inf, 1, 0},   {"skipped", &a->skipped, 1, 1},
      {"checksums", a->checksums, a->n, 1}, {"resynced", &a->resynced, 1, 1},
      {"changed", a->changed, a->n, 1},     {"moved", a->moved, a->n, 1},
      {"distances", a->distances, a->n, 1}, {"emas", a->emas, a->n, 1},
      {"ema_lows", a->ema_lows, a->n, 1},   {"healths", a->healths, a->n, 1},
  };
  const tx_step_outputs outputs = TX_STEP_OUTPUTS_OF(a);
  TX_FORWARD(tx_check_step_outputs(&outputs, error));
  const int64_t n_spans = (int64_t)(sizeof spans / sizeof *spans);
  const tx_notes notes = {a->notes, a->notes_bytes};
  const int repeats = tx_notes_repeat(&notes, spans, n_spans);
  TX_FORWARD(check_lists(a, spans, n_spans, repeats, error));
  TX_FORWARD(check_scalars(a, reads_values, error));
  for (int64_t i = 0; i < a->n; i++)
    TX_FORWARD(check_values(a, i, reads_values, error));
  if (repeats && tx_notes_reads_are_apart(&notes, spans, n_spans)) return TX_OK;
  TX_FORWARD(tx_check_overlap(spans, n_spans, error));
  tx_notes_take(&notes, spans, n_spans);
  return TX_OK;
}

tx_status tx_check_adamw(const tx_adamw_args *a, int reads_values, tx_error *error) {
  TX_RETURN_UNDER_FP_MODE(tx_status, check(a, reads_values, error));
}
