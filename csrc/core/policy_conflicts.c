/* Explicit values that contradict each other. */
#include "csrc/core/policy_draft.h"
#include "csrc/core/policy_fields.h"
#include "csrc/core/policy_states.h"
#include "csrc/core/status.h"

static void add_value(tx_text *text, const char *where, const tx_policy *values, int32_t field) {
  tx_text_add(text, "%s %s=", where, tx_policy_field_at(field)->name);
  tx_policy_format(values, field, text);
}

tx_status tx_policy_fail_conflict(const char *where_a, const tx_policy *values_a, int32_t a, const char *where_b,
                                  const tx_policy *values_b, int32_t b, const char *reason, tx_error *error) {
  char message[512];
  tx_text text = tx_text_in(message, sizeof message);
  add_value(&text, where_a, values_a, a);
  tx_text_add(&text, " contradicts ");
  add_value(&text, where_b, values_b, b);
  tx_text_add(&text, ": %s; change one of them", reason);
  return tx_fail(error, TX_ERROR_CONFLICT, "%s", message);
}

tx_status tx_policy_check_conflicts(const tx_policy_inputs *in, const tx_policy_draft *d, tx_error *error) {
  if (in->clash < TX_POLICY_FIELDS) {
    return tx_policy_fail_conflict(in->sides[0].where[in->clash], &in->sides[0].values, in->clash,
                                   in->sides[1].where[in->clash], &in->sides[1].values, in->clash,
                                   "the two configurations share this key", error);
  }
  const tx_policy *p = &d->p;
  tx_policy_settings all = in->given;
  if (!TX_POLICY_GIVEN(in, states) && in->config.source[TX_POLICY_states])
    tx_policy_copy_setting(&all, &in->config, TX_POLICY_states);
  if (!TX_POLICY_GIVEN(in, shard_dtype) && in->shard_dtype != TX_NONE) {
    all.values.shard_dtype = (int32_t)in->shard_dtype;
    all.source[TX_POLICY_shard_dtype] = TX_SOURCE_DTYPE;
    all.where[TX_POLICY_shard_dtype] = "the model's";
  }
  if (in->model_dtype != TX_NONE) {
    tx_policy_settings model = {0};
    model.values.param_dtype = (int32_t)in->model_dtype;
    model.source[TX_POLICY_param_dtype] = TX_SOURCE_DTYPE;
    model.where[TX_POLICY_param_dtype] = "the model's";
    if (!TX_POLICY_GIVEN(in, param_dtype)) {
      tx_policy_merge(&all, &model, NULL);
    } else if (in->given.values.param_dtype != model.values.param_dtype) {
      return tx_policy_fail_conflict(all.where[TX_POLICY_param_dtype], &all.values, TX_POLICY_param_dtype,
                                     "the model's", &model.values, TX_POLICY_param_dtype,
                                     "the policy cannot change the dtype of the parameters", error);
    }
  }
  const tx_policy *given = &all.values;
  const int fp16_wins = TX_POLICY_GIVEN(in, fp16) && given->fp16;
#define X(a, b, condition, reason)                                                                                  \
  if (all.source[TX_POLICY_##a] && all.source[TX_POLICY_##b] && (condition)) {                                      \
    return tx_policy_fail_conflict(all.where[TX_POLICY_##a], given, TX_POLICY_##a, all.where[TX_POLICY_##b], given, \
                                   TX_POLICY_##b, reason, error);                                                   \
  }
#include "csrc/core/policy_conflicts.def"
#undef X
  return TX_OK;
}

tx_status tx_policy_check_config(const tx_policy_inputs *in, const tx_policy_draft *d, tx_error *error) {
  for (int32_t f = 0; f < TX_POLICY_FIELDS; f++) {
    const tx_origin origin = d->origins[f];
    const int by_states = origin.source == TX_SOURCE_FOLLOWS && origin.cause == TX_POLICY_states;
    if (!in->config.source[f] || tx_policy_equal(&d->p, &in->config.values, f)) continue;
    if (origin.source != TX_SOURCE_DTYPE && origin.source != TX_SOURCE_PRESET && !by_states) continue;
    char reason[128];
    tx_text text = tx_text_in(reason, sizeof reason);
    tx_text_add(&text, "the latter is stronger, and %s is stronger than both",
                tx_policy_side_name(tx_policy_field_at(f)->side));
    const char *stronger = by_states ? "the word" : origin.source == TX_SOURCE_DTYPE ? "the dtype's" : "the preset's";
    return tx_policy_fail_conflict(in->config.where[f], &in->config.values, f, stronger, &d->p,
                                   by_states ? TX_POLICY_states : f, reason, error);
  }
  return TX_OK;
}
