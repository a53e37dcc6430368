/* Checks the arguments of a step's optional outputs. */
#include "csrc/core/dtype.h"
#include "csrc/core/status.h"
#include "csrc/ops/step_outputs.h"
#include "csrc/ops/tensor.h"

/* Checks an optional output: none, or of this dtype and length. */
static tx_status check_extra(const char *name, const tx_tensor *list, int64_t i, tx_dtype dtype, int64_t numel,
                             tx_error *error) {
  const tx_tensor t = tx_at_or_none(list, i);
  if (t.numel == 0 || (t.dtype == dtype && t.numel == numel)) return TX_OK;
  return tx_fail(error, TX_ERROR_SHAPE, "%s[%lld] is %lld elements of %s; none, or %lld of %s are legal", name,
                 (long long)i, (long long)t.numel, tx_dtype_name(t.dtype), (long long)numel, tx_dtype_name(dtype));
}

static tx_status check_extras(const tx_step_outputs *outputs, int64_t i, tx_error *error) {
  const int64_t numel = outputs->params[i].numel;
  TX_FORWARD(check_extra("changed", outputs->changed, i, TX_U8, (numel + 7) / 8, error));
  TX_FORWARD(check_extra("moved", outputs->moved, i, TX_BF16, tx_blocks(numel), error));
  TX_FORWARD(check_extra("distances", outputs->distances, i, TX_U8, (numel + 1) / 2, error));
  TX_FORWARD(check_extra("healths", outputs->healths, i, TX_I64, TX_HEALTH_LEN, error));
  if (tx_at_or_none(outputs->healths, i).numel && (uintptr_t)outputs->healths[i].data % sizeof(int64_t)) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "healths[%lld] must begin at a multiple of 8 bytes", (long long)i);
  }
  const int needs_changed = tx_at_or_none(outputs->moved, i).numel || tx_at_or_none(outputs->distances, i).numel;
  if (needs_changed && !tx_at_or_none(outputs->changed, i).numel) {
    return tx_fail(error, TX_ERROR_SHAPE,
                   "moved[%lld] or distances[%lld] without changed[%lld]; they are legal together with it",
                   (long long)i, (long long)i, (long long)i);
  }
  return TX_OK;
}

static tx_status check_ema(const tx_step_outputs *outputs, int64_t i, tx_error *error) {
  const tx_tensor ema = tx_at_or_none(outputs->emas, i), param = outputs->params[i];
  TX_FORWARD(check_extra("ema_lows", outputs->ema_lows, i, TX_U8, ema.dtype == TX_BF16 ? ema.numel : 0, error));
  if (ema.numel == 0) return TX_OK;
  if (ema.numel != param.numel || (ema.dtype != TX_BF16 && ema.dtype != TX_F32)) {
    return tx_fail(error, TX_ERROR_SHAPE, "emas[%lld] is %lld elements of %s; none, or %lld of bf16 or fp32 are legal",
                   (long long)i, (long long)ema.numel, tx_dtype_name(ema.dtype), (long long)param.numel);
  }
  if (param.dtype != TX_F32 && tx_at_or_none(outputs->masters, i).numel == 0) {
    return tx_fail(
        error, TX_ERROR_DTYPE,
        "emas[%lld] for params[%lld] of %s without a master: an average needs more than 16 bits of each weight; "
        "pass a master, or fp32 weights",
        (long long)i, (long long)i, tx_dtype_name(param.dtype));
  }
  return TX_OK;
}

tx_status tx_check_step_outputs_of(const tx_step_outputs *outputs, int64_t i, tx_error *error) {
  TX_FORWARD(check_extras(outputs, i, error));
  return check_ema(outputs, i, error);
}

tx_status tx_check_step_outputs(const tx_step_outputs *outputs, tx_error *error) {
  if (outputs->emas && !(outputs->ema_decay >= 0 && outputs->ema_decay < 1 && outputs->ema_every >= 1)) {
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE,
                   "ema_decay is %g and ema_every %lld; a number in [0, 1), and a whole one from 1 on, are legal",
                   outputs->ema_decay, (long long)outputs->ema_every);
  }
  return TX_OK;
}
