/* The rules by which one value of the policy decides others. */
#include "csrc/core/policy_draft.h"
#include "csrc/core/policy_fields.h"
#include "csrc/core/policy_states.h"

static void mark(tx_policy_draft *d, int32_t field, tx_source source, int32_t cause) {
  d->origins[field] = (tx_origin){(int32_t)source, cause};
}

/* Sets d->field to value, because of another field's explicit value. A field that already has the value keeps its
 * origin. */
#define FOLLOW(field, value, because)                                     \
  do {                                                                    \
    if (d->p.field != (value)) {                                          \
      d->p.field = (value);                                               \
      mark(d, TX_POLICY_##field, TX_SOURCE_FOLLOWS, TX_POLICY_##because); \
    }                                                                     \
  } while (0)

/* Sets d->field to value, as the table of modes or of presets says. */
#define SET(field, value, source)                       \
  do {                                                  \
    d->p.field = (value);                               \
    mark(d, TX_POLICY_##field, TX_SOURCE_##source, -1); \
  } while (0)

#define GIVEN(field) TX_POLICY_GIVEN(in, field)

/* The mode (fp32, fp16 or bf16): the model's dtype, else param_dtype, else what the flags say; bf16 if none is
 * given. */
static tx_dtype mode_of(const tx_policy_inputs *in) {
  if (in->model_dtype != TX_NONE) return in->model_dtype;
  if (GIVEN(param_dtype)) return (tx_dtype)in->given.values.param_dtype;
  if (GIVEN(fp16) && in->given.values.fp16) return TX_F16;
  if (GIVEN(bf16) && !in->given.values.bf16) return TX_F32;
  return TX_BF16;
}

/* Applies the table of modes. Fields that are not set here keep the library's defaults, which are those of fp32. */
static void set_mode(tx_policy_draft *d, tx_dtype mode) {
  SET(param_dtype, (int32_t)mode, DTYPE);
  SET(bf16, mode == TX_BF16, DTYPE);
  SET(fp16, mode == TX_F16, DTYPE);
  if (mode == TX_F32) return;
  SET(use_precision_aware_optimizer, 1, DTYPE);
  if (mode == TX_BF16) {
    SET(exp_avg_dtype, TX_BF16, DTYPE);
    SET(exp_avg_sq_dtype, TX_BF16, DTYPE);
    SET(main_grads_dtype, TX_BF16, DTYPE);
    SET(grad_comm_dtype, TX_BF16, DTYPE);
    SET(grad_reduce_in_fp32, 0, DTYPE);
  } else {
    SET(store_param_remainders, 0, DTYPE);
    SET(initial_loss_scale, 32768.0, DTYPE);
    SET(min_loss_scale, 1.0, DTYPE);
  }
}

static void set_preset(tx_policy_draft *d, int32_t preset) {
  d->p.preset = preset;
  if (preset != TX_PRESET_CONSERVATIVE) return;
  SET(use_precision_aware_optimizer, 0, PRESET);
  SET(exp_avg_dtype, TX_F32, PRESET);
  SET(exp_avg_sq_dtype, TX_F32, PRESET);
  SET(main_grads_dtype, TX_F32, PRESET);
  SET(grad_comm_dtype, TX_F32, PRESET);
  SET(grad_reduce_in_fp32, 1, PRESET);
}

void tx_policy_set_full_shard(tx_policy_draft *d) {
  SET(use_distributed_optimizer, 1, PRESET);
  SET(check_for_nan_in_grad, 1, PRESET);
  SET(data_parallel_sharding_strategy, TX_OPTIM_GRADS_PARAMS, PRESET);
  SET(overlap_grad_reduce, 1, PRESET);
  SET(overlap_param_gather, 1, PRESET);
}

static void set_given(tx_policy_draft *d, const tx_policy_inputs *in) {
  for (int32_t f = 0; f < TX_POLICY_FIELDS; f++) {
    if (!in->given.source[f]) continue;
    const int is_mode = f == TX_POLICY_bf16 || f == TX_POLICY_fp16;
    if (is_mode && !tx_policy_equal(&d->p, &in->given.values, f))
      continue; /* bf16 given together with fp16, or a contradiction */
    tx_policy_copy(&d->p, &in->given.values, f);
    mark(d, f, (tx_source)in->given.source[f], -1);
  }
  if (d->p.main_grads_dtype == TX_NONE) {
    d->p.main_grads_dtype = d->p.param_dtype;
    d->origins[TX_POLICY_main_grads_dtype].cause = TX_POLICY_param_dtype;
  }
}

/* The configuration's `states` counts like an explicit one, since neither the dtype nor a preset sets it. */
static void follow_states(tx_policy_draft *d, const tx_policy_inputs *in) {
  const int32_t states = d->p.states;
  if (states == TX_STATES_BY_KEY) return;
  const int32_t moments = (int32_t)tx_states_moments(states);
  const int32_t remainders = tx_states_remainders(states, &d->p);
  if (!GIVEN(exp_avg_dtype)) FOLLOW(exp_avg_dtype, moments, states);
  if (!GIVEN(exp_avg_sq_dtype)) FOLLOW(exp_avg_sq_dtype, moments, states);
  if (!GIVEN(main_params_dtype)) FOLLOW(main_params_dtype, TX_F32, states);
  if (!GIVEN(store_param_remainders)) FOLLOW(store_param_remainders, remainders, states);
}

static void follow_masters(tx_policy_draft *d, const tx_policy_inputs *in) {
  if (GIVEN(preserve_fp32_weights) && !GIVEN(main_params_dtype)) {
    FOLLOW(main_params_dtype, d->p.preserve_fp32_weights ? TX_F32 : TX_NONE, preserve_fp32_weights);
  }
  if (!GIVEN(preserve_fp32_weights)) {
    FOLLOW(preserve_fp32_weights, d->p.main_params_dtype == TX_F32, main_params_dtype);
  }
}

/* A state with another dtype than fp32 needs the precision-aware optimizer; without it every state is fp32. */
static void follow_precision(tx_policy_draft *d, const tx_policy_inputs *in) {
  if (GIVEN(use_precision_aware_optimizer)) {
    if (d->p.use_precision_aware_optimizer) return;
    if (!GIVEN(exp_avg_dtype)) FOLLOW(exp_avg_dtype, TX_F32, use_precision_aware_optimizer);
    if (!GIVEN(exp_avg_sq_dtype)) FOLLOW(exp_avg_sq_dtype, TX_F32, use_precision_aware_optimizer);
    return;
  }
  if (d->p.exp_avg_dtype != TX_F32) FOLLOW(use_precision_aware_optimizer, 1, exp_avg_dtype);
  if (d->p.exp_avg_sq_dtype != TX_F32) FOLLOW(use_precision_aware_optimizer, 1, exp_avg_sq_dtype);
  if (d->p.main_params_dtype == TX_F16) FOLLOW(use_precision_aware_optimizer, 1, main_params_dtype);
  if (d->p.store_param_remainders) FOLLOW(use_precision_aware_optimizer, 1, store_param_remainders);
}

/* Decides gradients and bucket from one merged view of both sides, so that a dtype given for the gradients cannot leave
 * the bucket in another one, nor the reverse. */
static void follow_gradients(tx_policy_draft *d, const tx_policy_inputs *in) {
  tx_policy *p = &d->p;
  if (!GIVEN(main_grads_dtype) && GIVEN(grad_reduce_in_fp32)) {
    if (p->grad_reduce_in_fp32) {
      FOLLOW(main_grads_dtype, TX_F32, grad_reduce_in_fp32);
    } else if (!GIVEN(grad_comm_dtype)) {
      FOLLOW(main_grads_dtype, p->param_dtype, grad_reduce_in_fp32);
    }
  }
  if (!GIVEN(grad_reduce_in_fp32)) {
    if (GIVEN(grad_comm_dtype)) {
      FOLLOW(grad_reduce_in_fp32, p->grad_comm_dtype == TX_F32, grad_comm_dtype);
    } else if (p->preset == TX_PRESET_CONSERVATIVE) {
      FOLLOW(grad_reduce_in_fp32, !(p->use_precision_aware_optimizer && p->main_grads_dtype != TX_F32),
             main_grads_dtype);
    } else {
      FOLLOW(grad_reduce_in_fp32, p->main_grads_dtype == TX_F32, main_grads_dtype);
    }
  }
  if (GIVEN(grad_comm_dtype)) return;
  const int32_t narrow = p->main_grads_dtype != TX_F32 ? p->main_grads_dtype : p->param_dtype;
  if (GIVEN(grad_reduce_in_fp32)) {
    FOLLOW(grad_comm_dtype, p->grad_reduce_in_fp32 ? TX_F32 : narrow, grad_reduce_in_fp32);
  } else {
    FOLLOW(grad_comm_dtype, p->grad_reduce_in_fp32 ? TX_F32 : narrow, main_grads_dtype);
  }
}

/* FSDP2 provides gradients in the shards' dtype; they are sent in the dtype that follows from param_dtype. */
static void follow_shards(tx_policy_draft *d, const tx_policy_inputs *in) {
  if (d->p.shard_dtype == TX_NONE || GIVEN(main_grads_dtype)) return;
  FOLLOW(main_grads_dtype, d->p.shard_dtype, shard_dtype);
}

static void follow_sharding(tx_policy_draft *d, const tx_policy_inputs *in) {
  if (GIVEN(data_parallel_sharding_strategy) && !GIVEN(use_distributed_optimizer) &&
      d->p.data_parallel_sharding_strategy != TX_NO_SHARD) {
    FOLLOW(use_distributed_optimizer, 1, data_parallel_sharding_strategy);
  }
  if (GIVEN(use_distributed_optimizer) && !GIVEN(data_parallel_sharding_strategy) && d->p.use_distributed_optimizer &&
      d->p.data_parallel_sharding_strategy == TX_NO_SHARD) {
    FOLLOW(data_parallel_sharding_strategy, TX_OPTIM, use_distributed_optimizer);
  }
}

static void follow_loss_scale(tx_policy_draft *d, const tx_policy_inputs *in) {
  if (d->p.initial_loss_scale >= d->p.min_loss_scale) return;
  if (!GIVEN(min_loss_scale)) {
    FOLLOW(min_loss_scale, d->p.initial_loss_scale, initial_loss_scale);
  } else if (!GIVEN(initial_loss_scale)) {
    FOLLOW(initial_loss_scale, d->p.min_loss_scale, min_loss_scale);
  }
}

void tx_policy_apply_rules(const tx_policy_inputs *in, tx_policy_draft *d) {
  d->p = tx_policy_defaults();
  for (int32_t f = 0; f < TX_POLICY_FIELDS; f++) {
    mark(d, f, TX_SOURCE_DEFAULT, -1);
    if (in->config.source[f]) {
      tx_policy_copy(&d->p, &in->config.values, f);
      mark(d, f, TX_SOURCE_CONFIG, -1);
    }
  }
  set_mode(d, mode_of(in));
  if (in->shard_dtype != TX_NONE) SET(shard_dtype, (int32_t)in->shard_dtype, DTYPE);
  set_preset(d, in->preset);
  if (in->full_shard) tx_policy_set_full_shard(d);
  set_given(d, in);
  follow_states(d, in);
  follow_masters(d, in);
  follow_precision(d, in);
  follow_gradients(d, in);
  follow_shards(d, in);
  follow_sharding(d, in);
  follow_loss_scale(d, in);
}
