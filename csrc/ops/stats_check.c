/* Checks the arguments of tx_grad_stats and tx_grad_norm. */
#include "csrc/core/fp_mode.h"
#include "csrc/core/status.h"
#include "csrc/ops/check.h"
#include "csrc/ops/operator_checks.h"

tx_status tx_check_grad_stats(int64_t n, const tx_tensor *grads, tx_tensor stats, tx_tensor first_bad,
                              tx_error *error) {
  const tx_span spans[] = {{"grads", grads, n, 0}, {"stats", &stats, 1, 1}, {"first_bad", &first_bad, 1, 1}};
  TX_FORWARD(tx_check_present("grads", grads, n, error));
  TX_FORWARD(tx_check_tensors(spans, 3, error));
  TX_FORWARD(tx_check_fixed("stats", stats, TX_I64, TX_STATS_LEN, 1, error));
  TX_FORWARD(tx_check_fixed("first_bad", first_bad, TX_I64, 1, 0, error));
  TX_FORWARD(tx_check_plain("grads", grads, n, error));
  return tx_check_overlap(spans, 3, error);
}

static int is_positive(double number) {
  const volatile double there = number;
  TX_RETURN_UNDER_FP_MODE(int, there > 0);
}

tx_status tx_check_grad_norm(tx_tensor stats, tx_tensor grad_scale, double max_norm, tx_tensor norm,
                             tx_tensor clip_coef, tx_tensor found_inf, tx_error *error) {
  const tx_span spans[] = {{"stats", &stats, 1, 0},
                           {"grad_scale", &grad_scale, 1, 0},
                           {"norm", &norm, 1, 1},
                           {"clip_coef", &clip_coef, 1, 1},
                           {"found_inf", &found_inf, 1, 1}};
  TX_FORWARD(tx_check_tensors(spans, 5, error));
  TX_FORWARD(tx_check_fixed("stats", stats, TX_I64, TX_STATS_LEN, 1, error));
  TX_FORWARD(tx_check_fixed("grad_scale", grad_scale, TX_F32, 1, 0, error));
  TX_FORWARD(tx_check_fixed("norm", norm, norm.dtype == TX_F64 ? TX_F64 : TX_F32, 1, 0, error));
  TX_FORWARD(tx_check_fixed("clip_coef", clip_coef, TX_F32, 1, 0, error));
  TX_FORWARD(tx_check_fixed("found_inf", found_inf, TX_F32, 1, 0, error));
  if (!is_positive(max_norm)) {
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "max_norm is %g; a number > 0 is legal, infinity for no clipping",
                   max_norm);
  }
  return tx_check_overlap(spans, 5, error);
}
