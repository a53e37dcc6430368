#include <float.h>
#include <inttypes.h>

#include "csrc/core/fp_mode.h"
#include "csrc/core/status.h"

/* Checks that a state is legal. The comparisons are written so that NaN is illegal. */
static tx_status check_fields(const tx_scale *s, tx_error *error) {
  if (!s || s->size != sizeof *s) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_scale: a scale must begin with TX_SCALE_INIT");
  }
#define REQUIRE(condition, field, format, rule)                                                                   \
  if (!(condition)) {                                                                                             \
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "loss scale: " #field "=" format " is not legal; legal: " rule, \
                   s->field);                                                                                     \
  }
  REQUIRE(s->growth_factor > 1 && s->growth_factor <= FLT_MAX, growth_factor, "%g", "> 1, finite as fp32")
  REQUIRE(s->backoff_factor > 0 && s->backoff_factor < 1, backoff_factor, "%g", "in (0, 1)")
  REQUIRE(s->min_scale > 0 && s->min_scale <= FLT_MAX, min_scale, "%g", "> 0, finite as fp32")
  REQUIRE(s->scale >= s->min_scale && s->scale <= FLT_MAX, scale, "%g", ">= min_scale, finite as fp32")
  REQUIRE(s->growth_interval >= 1, growth_interval, "%" PRId64, ">= 1")
  REQUIRE(s->hysteresis >= 1, hysteresis, "%" PRId64, ">= 1")
  REQUIRE(s->clean_steps >= 0 && s->clean_steps < s->growth_interval, clean_steps, "%" PRId64,
          ">= 0, less than growth_interval")
  REQUIRE(s->hysteresis_left >= 0 && s->hysteresis_left <= s->hysteresis, hysteresis_left, "%" PRId64,
          ">= 0, at most hysteresis")
#undef REQUIRE
  return TX_OK;
}

static tx_status check(const tx_scale *s, tx_error *error) {
  TX_RETURN_UNDER_FP_MODE(tx_status, check_fields(s, error));
}

tx_status tx_scale_from_policy(const tx_policy *policy, tx_scale *scale, tx_error *error) {
  if (!policy || policy->size != sizeof *policy || !scale || scale->size != sizeof *scale) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "tx_scale_from_policy: policy must begin with TX_POLICY_INIT, and scale with TX_SCALE_INIT");
  }
  const tx_scale fresh = {.size = sizeof fresh,
                          .growth_factor = policy->loss_scale_growth_factor,
                          .backoff_factor = policy->loss_scale_backoff_factor,
                          .min_scale = policy->min_loss_scale,
                          .growth_interval = policy->loss_scale_window,
                          .hysteresis = policy->hysteresis,
                          .scale = policy->initial_loss_scale,
                          .hysteresis_left = policy->hysteresis};
  TX_FORWARD(check(&fresh, error));
  *scale = fresh;
  return TX_OK;
}

/* Multiplies the scale by `factor`, but not below `low`, and not if fp32 could not hold the result. */
static void multiply(tx_scale *s, double factor, double low) {
  const tx_fp_mode saved = tx_fp_enter();
  const volatile double product = s->scale * factor;
  if (product <= FLT_MAX) s->scale = product > low ? product : low;
  tx_fp_leave(saved);
}

tx_status tx_scale_update(tx_scale *s, int32_t found_inf, tx_error *error) {
  TX_FORWARD(check(s, error));
  if (found_inf) {
    s->clean_steps = 0;
    if (s->hysteresis_left > 0) s->hysteresis_left--;
    if (s->hysteresis_left == 0) multiply(s, s->backoff_factor, s->min_scale);
    return TX_OK;
  }
  if (++s->clean_steps < s->growth_interval) return TX_OK;
  s->clean_steps = 0;
  s->hysteresis_left = s->hysteresis;
  multiply(s, s->growth_factor, s->min_scale);
  return TX_OK;
}
