/* The loader: from a model's dtype and what the user insists on to every other dtype. */
#include <stdio.h>
#include <string.h>

#include "csrc/core/dtype.h"
#include "csrc/core/policy_fields.h"
#include "csrc/core/policy_states.h"
#include "csrc/core/status.h"

/* Explicit values: those fields of `values` that have a source. */
typedef struct settings {
  tx_policy values;
  int32_t source[TX_POLICY_FIELDS];    /* tx_source, 0 (TX_SOURCE_DEFAULT): not given */
  const char *where[TX_POLICY_FIELDS]; /* the configuration that it came in, for messages */
} settings;

/* Everything that a resolution reads. */
typedef struct inputs {
  tx_dtype model_dtype;
  tx_dtype shard_dtype;
  int32_t preset;
  int32_t full_shard;
  settings config;   /* weaker than the dtype branch */
  settings flags;    /* bf16 and fp16 arguments: explicit, but a key of the same name wins over them */
  settings sides[2]; /* optimizer, ddp */
  settings given;    /* flags and sides merged */
  int32_t clash;     /* a field on which the two sides differ, or TX_POLICY_FIELDS */
} inputs;

/* -- collecting explicit values --------------------------------------------------------------------------------- */

static tx_status read_all(const tx_setting *list, int64_t n, const char *where, int32_t side, tx_source source,
                          settings *to, tx_error *error) {
  if (n < 0 || (n > 0 && !list)) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "%s: %lld settings at %p", where, (long long)n,
                   (const void *)list);
  }
  char seen[TX_POLICY_FIELDS] = {0};
  for (int64_t i = 0; i < n; i++) {
    int32_t field;
    int decided;
    TX_FORWARD(tx_policy_read(&list[i], where, side, &to->values, &field, &decided, error));
    if (seen[field]++) {
      return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "%s: %s is given twice", where, list[i].key);
    }
    if (!decided) continue;
    to->source[field] = (int32_t)source;
    to->where[field] = where;
  }
  return TX_OK;
}

static tx_status read_flag(int32_t flag, const char *name, int32_t field, settings *to, tx_error *error) {
  if (flag == TX_UNSET) return TX_OK;
  if (flag != 0 && flag != 1) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "%s=%d is not legal; legal: 0, 1, -1 (not set)", name, (int)flag);
  }
  if (field == TX_POLICY_fp16) {
    to->values.fp16 = flag;
  } else {
    to->values.bf16 = flag;
  }
  to->source[field] = TX_SOURCE_OVERRIDE;
  to->where[field] = "the argument";
  return TX_OK;
}

static void copy_setting(settings *to, const settings *from, int32_t f) {
  tx_policy_copy(&to->values, &from->values, f);
  to->source[f] = from->source[f];
  to->where[f] = from->where[f];
}

/* `from` over `to`; where both have a value of equal source that differs, *clash tells. */
static void merge(settings *to, const settings *from, int32_t *clash) {
  for (int32_t f = 0; f < TX_POLICY_FIELDS; f++) {
    if (!from->source[f] || from->source[f] < to->source[f]) continue;
    if (from->source[f] == to->source[f] && clash && !tx_policy_equal(&from->values, &to->values, f)) *clash = f;
    copy_setting(to, from, f);
  }
}

static void merge_all(inputs *in) {
  in->clash = TX_POLICY_FIELDS;
  in->given = in->flags;
  settings sides = in->sides[0];
  merge(&sides, &in->sides[1], &in->clash);
  merge(&in->given, &sides, NULL);
}

/* -- resolving -------------------------------------------------------------------------------------------------- */

/* A policy in the making: values and where they came from. */
typedef struct draft {
  tx_policy p;
  tx_origin origins[TX_POLICY_FIELDS];
} draft;

static void mark(draft *d, int32_t field, tx_source source, int32_t cause) {
  d->origins[field] = (tx_origin){(int32_t)source, cause};
}

/* d->field = value, because of another field's explicit value; a value that does not change keeps its origin. */
#define FOLLOW(field, value, because)                                     \
  do {                                                                    \
    if (d->p.field != (value)) {                                          \
      d->p.field = (value);                                               \
      mark(d, TX_POLICY_##field, TX_SOURCE_FOLLOWS, TX_POLICY_##because); \
    }                                                                     \
  } while (0)

/* d->field = value, by the table of modes or of presets. */
#define SET(field, value, source)                       \
  do {                                                  \
    d->p.field = (value);                               \
    mark(d, TX_POLICY_##field, TX_SOURCE_##source, -1); \
  } while (0)

#define GIVEN(field) (in->given.source[TX_POLICY_##field] != 0)

/* fp32, fp16 or bf16: of the model, else as param_dtype says, else by the flags; without any of them bf16. */
static tx_dtype mode_of(const inputs *in) {
  if (in->model_dtype != TX_NONE) return in->model_dtype;
  if (GIVEN(param_dtype)) return (tx_dtype)in->given.values.param_dtype;
  if (GIVEN(fp16) && in->given.values.fp16) return TX_F16;
  if (GIVEN(bf16) && !in->given.values.bf16) return TX_F32;
  return TX_BF16;
}

/* The rows of the table of modes; what they leave alone are the library's defaults, which are those of fp32. */
static void set_mode(draft *d, tx_dtype mode) {
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

static void set_preset(draft *d, int32_t preset) {
  d->p.preset = preset;
  if (preset != TX_PRESET_CONSERVATIVE) return;
  SET(use_precision_aware_optimizer, 0, PRESET);
  SET(exp_avg_dtype, TX_F32, PRESET);
  SET(exp_avg_sq_dtype, TX_F32, PRESET);
  SET(main_grads_dtype, TX_F32, PRESET);
  SET(grad_comm_dtype, TX_F32, PRESET);
  SET(grad_reduce_in_fp32, 1, PRESET);
}

static void set_full_shard(draft *d) {
  SET(use_distributed_optimizer, 1, PRESET);
  SET(check_for_nan_in_grad, 1, PRESET);
  SET(data_parallel_sharding_strategy, TX_OPTIM_GRADS_PARAMS, PRESET);
  SET(overlap_grad_reduce, 1, PRESET);
  SET(overlap_param_gather, 1, PRESET);
}

static void set_given(draft *d, const inputs *in) {
  for (int32_t f = 0; f < TX_POLICY_FIELDS; f++) {
    if (!in->given.source[f]) continue;
    const int is_mode = f == TX_POLICY_bf16 || f == TX_POLICY_fp16;
    if (is_mode && !tx_policy_equal(&d->p, &in->given.values, f)) continue; /* bf16 beside fp16, or a contradiction */
    tx_policy_copy(&d->p, &in->given.values, f);
    mark(d, f, (tx_source)in->given.source[f], -1);
  }
  if (d->p.main_grads_dtype == TX_NONE) {
    d->p.main_grads_dtype = d->p.param_dtype;
    d->origins[TX_POLICY_main_grads_dtype].cause = TX_POLICY_param_dtype;
  }
}

/* The configuration's word counts like an explicit one: neither the dtype nor a preset has another. */
static void follow_states(draft *d, const inputs *in) {
  const int32_t states = d->p.states;
  if (states == TX_STATES_BY_KEY) return;
  const int32_t moments = (int32_t)tx_states_moments(states);
  const int32_t remainders = tx_states_remainders(states, &d->p);
  if (!GIVEN(exp_avg_dtype)) FOLLOW(exp_avg_dtype, moments, states);
  if (!GIVEN(exp_avg_sq_dtype)) FOLLOW(exp_avg_sq_dtype, moments, states);
  if (!GIVEN(main_params_dtype)) FOLLOW(main_params_dtype, TX_F32, states);
  if (!GIVEN(store_param_remainders)) FOLLOW(store_param_remainders, remainders, states);
}

static void follow_masters(draft *d, const inputs *in) {
  if (GIVEN(preserve_fp32_weights) && !GIVEN(main_params_dtype)) {
    FOLLOW(main_params_dtype, d->p.preserve_fp32_weights ? TX_F32 : TX_NONE, preserve_fp32_weights);
  }
  if (!GIVEN(preserve_fp32_weights)) {
    FOLLOW(preserve_fp32_weights, d->p.main_params_dtype == TX_F32, main_params_dtype);
  }
}

/* A state in another dtype than fp32 needs the precision-aware optimizer; without it every state is fp32. */
static void follow_precision(draft *d, const inputs *in) {
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

/* One merged view of both sides: a dtype given for the gradients cannot leave the bucket in another, nor the reverse.
 */
static void follow_gradients(draft *d, const inputs *in) {
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

/* FSDP2 hands out gradients in the shards' dtype; what travels stays that of param_dtype. */
static void follow_shards(draft *d, const inputs *in) {
  if (d->p.shard_dtype == TX_NONE || GIVEN(main_grads_dtype)) return;
  FOLLOW(main_grads_dtype, d->p.shard_dtype, shard_dtype);
}

static void follow_sharding(draft *d, const inputs *in) {
  if (GIVEN(data_parallel_sharding_strategy) && !GIVEN(use_distributed_optimizer) &&
      d->p.data_parallel_sharding_strategy != TX_NO_SHARD) {
    FOLLOW(use_distributed_optimizer, 1, data_parallel_sharding_strategy);
  }
  if (GIVEN(use_distributed_optimizer) && !GIVEN(data_parallel_sharding_strategy) && d->p.use_distributed_optimizer &&
      d->p.data_parallel_sharding_strategy == TX_NO_SHARD) {
    FOLLOW(data_parallel_sharding_strategy, TX_OPTIM, use_distributed_optimizer);
  }
}

static void follow_loss_scale(draft *d, const inputs *in) {
  if (d->p.initial_loss_scale >= d->p.min_loss_scale) return;
  if (!GIVEN(min_loss_scale)) {
    FOLLOW(min_loss_scale, d->p.initial_loss_scale, initial_loss_scale);
  } else if (!GIVEN(initial_loss_scale)) {
    FOLLOW(initial_loss_scale, d->p.min_loss_scale, min_loss_scale);
  }
}

static void resolve(const inputs *in, draft *d) {
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
  if (in->full_shard) set_full_shard(d);
  set_given(d, in);
  follow_states(d, in);
  follow_masters(d, in);
  follow_precision(d, in);
  follow_gradients(d, in);
  follow_shards(d, in);
  follow_sharding(d, in);
  follow_loss_scale(d, in);
}

/* -- contradictions --------------------------------------------------------------------------------------------- */

static void add_value(tx_text *text, const char *where, const tx_policy *values, int32_t field) {
  tx_text_add(text, "%s %s=", where, tx_policy_field_at(field)->name);
  tx_policy_format(values, field, text);
}

static tx_status fail_conflict(const char *where_a, const tx_policy *values_a, int32_t a, const char *where_b,
                               const tx_policy *values_b, int32_t b, const char *reason, tx_error *error) {
  char message[512];
  tx_text text = tx_text_in(message, sizeof message);
  add_value(&text, where_a, values_a, a);
  tx_text_add(&text, " contradicts ");
  add_value(&text, where_b, values_b, b);
  tx_text_add(&text, ": %s; change one of them", reason);
  return tx_fail(error, TX_ERROR_CONFLICT, "%s", message);
}

/* Every explicit value, the model's dtype among them. */
static tx_status check_conflicts(const inputs *in, const draft *d, tx_error *error) {
  if (in->clash < TX_POLICY_FIELDS) {
    return fail_conflict(in->sides[0].where[in->clash], &in->sides[0].values, in->clash, in->sides[1].where[in->clash],
                         &in->sides[1].values, in->clash, "the two configurations share this key", error);
  }
  const tx_policy *p = &d->p;
  settings all = in->given;
  if (!GIVEN(states) && in->config.source[TX_POLICY_states]) copy_setting(&all, &in->config, TX_POLICY_states);
  if (!GIVEN(shard_dtype) && in->shard_dtype != TX_NONE) {
    all.values.shard_dtype = (int32_t)in->shard_dtype;
    all.source[TX_POLICY_shard_dtype] = TX_SOURCE_DTYPE;
    all.where[TX_POLICY_shard_dtype] = "the model's";
  }
  if (in->model_dtype != TX_NONE) {
    settings model = {0};
    model.values.param_dtype = (int32_t)in->model_dtype;
    model.source[TX_POLICY_param_dtype] = TX_SOURCE_DTYPE;
    model.where[TX_POLICY_param_dtype] = "the model's";
    if (!GIVEN(param_dtype)) {
      merge(&all, &model, NULL);
    } else if (in->given.values.param_dtype != model.values.param_dtype) {
      return fail_conflict(all.where[TX_POLICY_param_dtype], &all.values, TX_POLICY_param_dtype, "the model's",
                           &model.values, TX_POLICY_param_dtype, "the parameters are what they are", error);
    }
  }
  const tx_policy *given = &all.values;
  const int fp16_wins = GIVEN(fp16) && given->fp16;
#define X(a, b, condition, reason)                                                                        \
  if (all.source[TX_POLICY_##a] && all.source[TX_POLICY_##b] && (condition)) {                            \
    return fail_conflict(all.where[TX_POLICY_##a], given, TX_POLICY_##a, all.where[TX_POLICY_##b], given, \
                         TX_POLICY_##b, reason, error);                                                   \
  }
#include "csrc/core/policy_conflicts.def"
#undef X
  return TX_OK;
}

/* The configuration is weaker than the model's dtype and the presets, but a value of it never vanishes in silence. */
static tx_status check_config(const inputs *in, const draft *d, tx_error *error) {
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
    return fail_conflict(in->config.where[f], &in->config.values, f, stronger, &d->p, by_states ? TX_POLICY_states : f,
                         reason, error);
  }
  return TX_OK;
}

/* -- the public functions --------------------------------------------------------------------------------------- */

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
                   "shard_dtype=%s of a model in %s is not legal; legal: none, and fp32 beside a model's dtype",
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
                           const tx_policy *resolved, settings *to, tx_error *error) {
  if (!overrides->hook) return TX_OK;
  const tx_setting *answer = NULL;
  int64_t n = 0;
  tx_error ignored;
  TX_FORWARD(overrides->hook(overrides->hook_ctx, resolved, &answer, &n, error ? error : &ignored));
  return read_all(answer, n, where, side, TX_SOURCE_HOOK, to, error);
}

tx_status tx_policy_resolve(const tx_policy_args *args, tx_policy *policy, tx_origin *origins, int64_t n_origins,
                            tx_error *error) {
  TX_FORWARD(check_args(args, policy, origins, n_origins, error));
  inputs in = {.model_dtype = (tx_dtype)args->model_dtype,
               .shard_dtype = (tx_dtype)args->shard_dtype,
               .preset = args->preset,
               .full_shard = args->full_shard};
  const tx_policy_overrides *overrides[2] = {&args->optimizer, &args->ddp};
  static const char *const hook_names[2] = {"override_optimizer_config (hook)", "override_ddp_config (hook)"};

  TX_FORWARD(read_flag(args->fp16, "fp16", TX_POLICY_fp16, &in.flags, error));
  TX_FORWARD(read_flag(args->bf16, "bf16", TX_POLICY_bf16, &in.flags, error));
  TX_FORWARD(read_all(args->config, args->n_config, "optimizer_config", TX_SIDE_OPTIMIZER, TX_SOURCE_CONFIG, &in.config,
                      error));
  for (int i = 0; i < 2; i++) {
    TX_FORWARD(read_all(overrides[i]->settings, overrides[i]->n, tx_policy_side_name(kSides[i]), kSides[i],
                        TX_SOURCE_OVERRIDE, &in.sides[i], error));
  }
  draft d;
  merge_all(&in);
  resolve(&in, &d);
  if (overrides[0]->hook || overrides[1]->hook) {
    /* Both hooks see the same policy, a copy that they cannot spoil for each other. */
    for (int i = 0; i < 2; i++) {
      const tx_policy seen = d.p;
      TX_FORWARD(call_hook(overrides[i], hook_names[i], kSides[i], &seen, &in.sides[i], error));
    }
    merge_all(&in);
    resolve(&in, &d);
  }
  TX_FORWARD(check_conflicts(&in, &d, error));
  TX_FORWARD(check_config(&in, &d, error));

  *policy = d.p;
  const int64_t n = n_origins < TX_POLICY_FIELDS ? n_origins : TX_POLICY_FIELDS;
  if (n > 0) memcpy(origins, d.origins, (size_t)n * sizeof *origins);
  return TX_OK;
}

/* The row of the masters of what is computed in param_dtype: the policy, but for what says that weights are in it. */
static void shards_row(const tx_policy *policy, const tx_origin *origins, tx_policy *row) {
  *row = *policy;
  row->param_dtype = policy->shard_dtype;
  row->bf16 = row->fp16 = row->store_param_remainders = 0;
  if (origins[TX_POLICY_main_grads_dtype].cause == TX_POLICY_param_dtype) row->main_grads_dtype = row->param_dtype;
}

/* What `policy` was resolved from, as far as its origins tell, for parameters in `dtype`. */
static inputs inputs_of(const tx_policy *policy, const tx_origin *origins, tx_dtype dtype) {
  inputs in = {.model_dtype = dtype, .preset = policy->preset, .clash = TX_POLICY_FIELDS};
  const int own = dtype == (tx_dtype)policy->param_dtype;
  if (own && origins[TX_POLICY_shard_dtype].source == TX_SOURCE_DTYPE) in.shard_dtype = (tx_dtype)policy->shard_dtype;
  draft d = {0};
  set_full_shard(&d); /* which fields that touches */
  for (int32_t f = 0; f < TX_POLICY_FIELDS; f++) {
    const int32_t source = origins[f].source;
    if (f == TX_POLICY_param_dtype || f == TX_POLICY_bf16 || f == TX_POLICY_fp16) continue; /* the mode: now `dtype` */
    if (f == TX_POLICY_store_param_remainders && dtype != TX_BF16) continue; /* they stand beside bf16 weights only */
    if (f == TX_POLICY_shard_dtype && !own) continue; /* of parameters that are computed in param_dtype */
    settings *to = source == TX_SOURCE_CONFIG ? &in.config : &in.given;
    if (source == TX_SOURCE_OVERRIDE || source == TX_SOURCE_HOOK || source == TX_SOURCE_CONFIG) {
      to->source[f] = source;
      to->where[f] = "the policy's";
      tx_policy_copy(&to->values, policy, f);
    } else if (source == TX_SOURCE_PRESET && d.origins[f].source == TX_SOURCE_PRESET) {
      in.full_shard = 1;
    }
  }
  /* main_grads_dtype=None was given, and stands for the dtype of the parameter whatever that is. */
  if (origins[TX_POLICY_main_grads_dtype].cause == TX_POLICY_param_dtype) in.given.values.main_grads_dtype = TX_NONE;
  return in;
}

tx_status tx_policy_row(const tx_policy *policy, const tx_origin *origins, tx_dtype dtype, tx_policy *row,
                        tx_error *error) {
  if (!policy || policy->size != sizeof *policy || !origins || !row || row->size != sizeof *row) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "tx_policy_row: policy and row must begin with TX_POLICY_INIT, and origins must not be NULL");
  }
  const char *legal = tx_policy_field_at(TX_POLICY_param_dtype)->legal;
  if (!tx_dtype_is_known(dtype) || !tx_policy_dtype_is_legal(legal, dtype)) {
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "parameters of dtype %s have no policy; legal: %s",
                   tx_dtype_name(dtype), legal);
  }
  if (dtype == (tx_dtype)policy->shard_dtype && dtype != (tx_dtype)policy->param_dtype) {
    shards_row(policy, origins, row);
    return TX_OK;
  }
  const inputs in = inputs_of(policy, origins, dtype);
  draft d;
  resolve(&in, &d);
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
  settings more = {0};
  TX_FORWARD(read_all(list, n, "the argument", TX_SIDE_OPTIMIZER, TX_SOURCE_OVERRIDE, &more, error));
  inputs in = inputs_of(policy, origins, (tx_dtype)policy->param_dtype);
  for (int32_t f = 0; f < TX_POLICY_FIELDS; f++) {
    if (!more.source[f]) continue;
    if (in.given.source[f] && !tx_policy_equal(&more.values, &in.given.values, f)) {
      return fail_conflict(more.where[f], &more.values, f, in.given.where[f], &in.given.values, f,
                           "both set the same key", error);
    }
    copy_setting(&in.given, &more, f);
  }
  draft d;
  resolve(&in, &d);
  TX_FORWARD(check_conflicts(&in, &d, error));
  TX_FORWARD(check_config(&in, &d, error));
  const int32_t mode[] = {TX_POLICY_param_dtype, TX_POLICY_bf16, TX_POLICY_fp16};
  for (size_t i = 0; i < sizeof mode / sizeof *mode; i++)
    d.origins[mode[i]] = origins[mode[i]];
  *result = d.p;
  memcpy(result_origins, d.origins, sizeof d.origins);
  return TX_OK;
}
