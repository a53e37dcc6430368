/* The loader: decides every dtype from the model's dtype and the user's settings. */
#include <string.h>

#include "csrc/core/dtype.h"
#include "csrc/core/policy_draft.h"
#include "csrc/core/policy_fields.h"
#include "csrc/core/status.h"

static const int32_t kSides[2] = {TX_SIDE_OPTIMIZER, TX_SIDE_DDP};

static tx_status check_args(const tx_policy_args *args, const tx_policy *policy, const tx_origin *origins,
                            int64_t n_origins, tx_error *error) {
  if (!args || args->size != sizeof *args) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_policy_resolve: args must begin with TX_POLICY_ARGS_INIT");
  }
  if (!policy || policy->size != sizeof *policy) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_policy_resolve: policy must begin with TX_POLICY_INIT");
  }
  if (n_origins < 0 || (n_origins > 0 && !origins)) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_policy_resolve: %lld origins at %p", (long long)n_origins,
                   (const void *)origins);
  }
  const char *legal = tx_policy_field_at(TX_POLICY_param_dtype)->legal;
  if (args->model_dtype != TX_NONE &&
      (!tx_dtype_is_known(args->model_dtype) || !tx_policy_dtype_is_legal(legal, (tx_dtype)args->model_dtype))) {
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "the model's dtype %s is not legal; legal: %s",
                   tx_dtype_name((tx_dtype)args->model_dtype), legal);
  }
  if (args->shard_dtype != TX_NONE && (args->shard_dtype != TX_F32 || args->model_dtype == TX_NONE)) {
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE,
                   "shard_dtype=%s of a model in %s is not legal; legal: none, and fp32 together with a model's dtype",
                   tx_dtype_name((tx_dtype)args->shard_dtype), tx_dtype_name((tx_dtype)args->model_dtype));
  }
  if (args->preset != TX_PRESET_SEED && args->preset != TX_PRESET_CONSERVATIVE) {
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "preset=%d is not legal; legal: 0 (seed), 1 (conservative)",
                   (int)args->preset);
  }
  if (args->full_shard != 0 && args->full_shard != 1) {
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "full_shard=%d is not legal; legal: 0, 1", (int)args->full_shard);
  }
  return TX_OK;
}

static tx_status call_hook(const tx_policy_overrides *overrides, const char *where, int32_t side,
                           const tx_policy *resolved, tx_policy_settings *to, tx_error *error) {
  if (!overrides->hook) return TX_OK;
  const tx_setting *answer = NULL;
  int64_t n = 0;
  tx_error ignored;
  TX_FORWARD(overrides->hook(overrides->hook_ctx, resolved, &answer, &n, error ? error : &ignored));
  return tx_policy_read_all(answer, n, where, side, TX_SOURCE_HOOK, to, error);
}

tx_status tx_policy_resolve(const tx_policy_args *args, tx_policy *policy, tx_origin *origins, int64_t n_origins,
                            tx_error *error) {
  TX_FORWARD(check_args(args, policy, origins, n_origins, error));
  tx_policy_inputs in = {.model_dtype = (tx_dtype)args->model_dtype,
                         .shard_dtype = (tx_dtype)args->shard_dtype,
                         .preset = args->preset,
                         .full_shard = args->full_shard};
  const tx_policy_overrides *overrides[2] = {&args->optimizer, &args->ddp};
  static const char *const hook_names[2] = {"override_optimizer_config (hook)", "override_ddp_config (hook)"};

  TX_FORWARD(tx_policy_read_flag(args->fp16, "fp16", TX_POLICY_fp16, &in.flags, error));
  TX_FORWARD(tx_policy_read_flag(args->bf16, "bf16", TX_POLICY_bf16, &in.flags, error));
  TX_FORWARD(tx_policy_read_all(args->config, args->n_config, "optimizer_config", TX_SIDE_OPTIMIZER, TX_SOURCE_CONFIG,
                                &in.config, error));
  for (int i = 0; i < 2; i++) {
    TX_FORWARD(tx_policy_read_all(overrides[i]->settings, overrides[i]->n, tx_policy_side_name(kSides[i]), kSides[i],
                                  TX_SOURCE_OVERRIDE, &in.sides[i], error));
  }
  tx_policy_draft d;
  tx_policy_merge_all(&in);
  tx_policy_apply_rules(&in, &d);
  if (overrides[0]->hook || overrides[1]->hook) {
    /* Both hooks see the same policy, each its own copy, so that one cannot change it for the other. */
    for (int i = 0; i < 2; i++) {
      const tx_policy seen = d.p;
      TX_FORWARD(call_hook(overrides[i], hook_names[i], kSides[i], &seen, &in.sides[i], error));
    }
    tx_policy_merge_all(&in);
    tx_policy_apply_rules(&in, &d);
  }
  TX_FORWARD(tx_policy_check_conflicts(&in, &d, error));
  TX_FORWARD(tx_policy_check_config(&in, &d, error));

  *policy = d.p;
  const int64_t n = n_origins < TX_POLICY_FIELDS ? n_origins : TX_POLICY_FIELDS;
  if (n > 0) memcpy(origins, d.origins, (size_t)n * sizeof *origins);
  return TX_OK;
}

/* The row for parameters in shard_dtype, which are the masters of what is computed in param_dtype: the policy, except
 * for the fields that say that weights are in param_dtype. */
static void shards_row(const tx_policy *policy, const tx_origin *origins, tx_policy *row) {
  *row = *policy;
  row->param_dtype = policy->shard_dtype;
  row->bf16 = row->fp16 = row->store_param_remainders = 0;
  if (origins[TX_POLICY_main_grads_dtype].cause == TX_POLICY_param_dtype) row->main_grads_dtype = row->param_dtype;
}

/* Reconstructs the inputs from which `policy` was resolved, as far as its origins tell, for parameters in `dtype`. */
static tx_policy_inputs inputs_of(const tx_policy *policy, const tx_origin *origins, tx_dtype dtype) {
  tx_policy_inputs in = {.model_dtype = dtype, .preset = policy->preset, .clash = TX_POLICY_FIELDS};
  const int own = dtype == (tx_dtype)policy->param_dtype;
  if (own && origins[TX_POLICY_shard_dtype].source == TX_SOURCE_DTYPE) in.shard_dtype = (tx_dtype)policy->shard_dtype;
  tx_policy_draft d = {0};
  tx_policy_set_full_shard(&d); /* finds the fields that full_shard sets */
  for (int32_t f = 0; f < TX_POLICY_FIELDS; f++) {
    const int32_t source = origins[f].source;
    if (f == TX_POLICY_param_dtype || f == TX_POLICY_bf16 || f == TX_POLICY_fp16) continue; /* the mode: now `dtype` */
    if (f == TX_POLICY_store_param_remainders && dtype != TX_BF16)
      continue;                                       /* remainders exist for bf16 weights only */
    if (f == TX_POLICY_shard_dtype && !own) continue; /* holds only for parameters that are computed in param_dtype */
    tx_policy_settings *to = source == TX_SOURCE_CONFIG ? &in.config : &in.given;
    if (source == TX_SOURCE_OVERRIDE || source == TX_SOURCE_HOOK || source == TX_SOURCE_CONFIG) {
      to->source[f] = source;
      to->where[f] = "the policy's";
      tx_policy_copy(&to->values, policy, f);
    } else if (source == TX_SOURCE_PRESET && d.origins[f].source == TX_SOURCE_PRESET) {
      in.full_shard = 1;
    }
  }
  /* main_grads_dtype=None was given, and means the dtype of the parameter, whichever that is. */
  if (origins[TX_POLICY_main_grads_dtype].cause == TX_POLICY_param_dtype) in.given.values.main_grads_dtype = TX_NONE;
  return in;
}

/* A policy that was not written by these functions may have any number in `states`, which is the index into a table. */
static tx_status check_states(const tx_policy *policy, const char *function, tx_error *error) {
  if (policy->states >= TX_STATES_BY_KEY && policy->states <= TX_STATES_8BIT) return TX_OK;
  return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "%s: the policy has states=%d; legal: 0 ... %d (%s)", function,
                 (int)policy->states, (int)TX_STATES_8BIT, tx_policy_field_at(TX_POLICY_states)->legal);
}

tx_status tx_policy_row(const tx_policy *policy, const tx_origin *origins, tx_dtype dtype, tx_policy *row,
                        tx_error *error) {
  if (!policy || policy->size != sizeof *policy || !origins || !row || row->size != sizeof *row) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "tx_policy_row: policy and row must begin with TX_POLICY_INIT, and origins must not be NULL");
  }
  TX_FORWARD(check_states(policy, "tx_policy_row", error));
  const char *legal = tx_policy_field_at(TX_POLICY_param_dtype)->legal;
  if (!tx_dtype_is_known(dtype) || !tx_policy_dtype_is_legal(legal, dtype)) {
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "parameters of dtype %s have no policy; legal: %s",
                   tx_dtype_name(dtype), legal);
  }
  if (dtype == (tx_dtype)policy->shard_dtype && dtype != (tx_dtype)policy->param_dtype) {
    shards_row(policy, origins, row);
    return TX_OK;
  }
  const tx_policy_inputs in = inputs_of(policy, origins, dtype);
  tx_policy_draft d;
  tx_policy_apply_rules(&in, &d);
  *row = d.p;
  return TX_OK;
}

tx_status tx_policy_with(const tx_policy *policy, const tx_origin *origins, const tx_setting *list, int64_t n,
                         tx_policy *result, tx_origin *result_origins, tx_error *error) {
  if (!policy || policy->size != sizeof *policy || !origins || !result || result->size != sizeof *result ||
      !result_origins) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "tx_policy_with: policy and result must begin with TX_POLICY_INIT, and no origins may be NULL");
  }
  TX_FORWARD(check_states(policy, "tx_policy_with", error));
  tx_policy_settings more = {0};
  TX_FORWARD(tx_policy_read_all(list, n, "the argument", TX_SIDE_OPTIMIZER, TX_SOURCE_OVERRIDE, &more, error));
  tx_policy_inputs in = inputs_of(policy, origins, (tx_dtype)policy->param_dtype);
  for (int32_t f = 0; f < TX_POLICY_FIELDS; f++) {
    if (!more.source[f]) continue;
    if (in.given.source[f] && !tx_policy_equal(&more.values, &in.given.values, f)) {
      return tx_policy_fail_conflict(more.where[f], &more.values, f, in.given.where[f], &in.given.values, f,
                                     "both set the same key", error);
    }
    tx_policy_copy_setting(&in.given, &more, f);
  }
  tx_policy_draft d;
  tx_policy_apply_rules(&in, &d);
  TX_FORWARD(tx_policy_check_conflicts(&in, &d, error));
  TX_FORWARD(tx_policy_check_config(&in, &d, error));
  const int32_t mode[] = {TX_POLICY_param_dtype, TX_POLICY_bf16, TX_POLICY_fp16};
  for (size_t i = 0; i < sizeof mode / sizeof *mode; i++)
    d.origins[mode[i]] = origins[mode[i]];
  *result = d.p;
  memcpy(result_origins, d.origins, sizeof d.origins);
  return TX_OK;
}
