// Makes legal random calls of the functions for dtypes, the policy and the loss scale (see api_call.h).
#ifndef TESTS_CORE_API_DECISIONS_H
#define TESTS_CORE_API_DECISIONS_H

#include "tests/core/api_call.h"

namespace api {

struct Words {
  const char *key, *text;
  tx_dtype *dtype;
  int32_t code;
  int32_t *number;
  int64_t *bytes;
};

inline Words *MakeWords(Call *call) {
  auto *w = call->New<Words>();
  *w = {call->Text("exp_avg_dtype"), call->Text(call->random.OneIn(2) ? "  BF16 " : "float32"),
        call->New<tx_dtype>(),       call->random.Of({TX_F32, TX_BF16, TX_U8}),
        call->New<int32_t>(),        call->New<int64_t>()};
  return w;
}
inline void DtypeParse(Call *call) {
  Words *w = MakeWords(call);
  call->Needed("text", &w->text), call->Needed("dtype", &w->dtype);
  call->Must("fp31", "a word", [=] { w->text = "fp31"; });
  call->run = [=](tx_error *error) { return tx_dtype_parse(w->text, w->dtype, error); };
}
inline void DtypeCoerce(Call *call) {
  Words *w = MakeWords(call);
  call->Needed("key", &w->key), call->Needed("text", &w->text), call->Needed("dtype", &w->dtype);
  call->Must("exp_avg_dtype", "a word", [=] { w->text = "int64"; });
  call->Must("main_params_dtype", "bf16", [=] { w->key = "main_params_dtype", w->text = "bf16"; });
  call->run = [=](tx_error *error) { return tx_dtype_coerce(w->key, w->text, w->dtype, error); };
}
inline void DtypeCheckKey(Call *call) {
  Words *w = MakeWords(call);
  call->Needed("key", &w->key);
  call->Never<int32_t>("exp_avg_dtype", &w->code, {TX_I64, -1, 99});
  call->run = [=](tx_error *error) { return tx_dtype_check_key(w->key, static_cast<tx_dtype>(w->code), error); };
}
inline void DtypeSize(Call *call) {
  Words *w = MakeWords(call);
  call->Needed("bytes", &w->bytes);
  call->Never<int32_t>("dtype code", &w->code, {TX_NONE, -1, 99});
  call->run = [=](tx_error *error) { return tx_dtype_size(static_cast<tx_dtype>(w->code), w->bytes, error); };
}
inline void StrategyFind(Call *call) {
  Words *w = MakeWords(call);
  w->key = "strategy", w->text = call->random.OneIn(2) ? "optim" : "no_shard";
  call->Needed("strategy", &w->text), call->Needed("strategy", &w->number);
  call->Needed("where", &w->key);
  for (const char *word : {"zero2", "2", "", "-1"})
    call->Must("strategy", word, [=] { w->text = word; });
  call->run = [=](tx_error *error) { return tx_strategy_find(w->key, w->text, w->number, error); };
}
inline void IsaSelect(Call *call) {
  Words *w = MakeWords(call);
  w->text = call->random.OneIn(2) ? nullptr : "base";
  call->Must("sse9", "a word", [=] { w->text = "sse9"; });
  call->run = [=](tx_error *error) { return tx_isa_select(w->text, error); };
}

// -- policy

struct Resolved {
  const tx_policy_args *args;
  tx_policy *policy, *other;
  tx_origin *origins, *other_origins;
  int64_t n;
  int32_t dtype;
  tx_dtype *exp_avg, *exp_avg_sq;
  const tx_setting *list;
  int32_t keep;
};

inline Resolved *MakePolicy(Call *call, bool resolved) {
  Random &random = call->random;
  auto *args = call->New<tx_policy_args>(1, TX_POLICY_ARGS_INIT);
  auto *config = call->New<tx_setting>(3);
  config[0] = {"lr", nullptr, 1e-3, 0, TX_VALUE_FLOAT, 0};
  config[1] = {"clip_grad", nullptr, 0, 1, TX_VALUE_INT, 0};
  config[2] = {"exp_avg_dtype", random.OneIn(2) ? "bf16" : "fp32", 0, 0, TX_VALUE_TEXT, 0};
  args->n_config = random.Below(3), args->config = config;
  if (random.OneIn(2)) args->optimizer.n = 1, args->optimizer.settings = config + 2;
  args->model_dtype = random.Of({TX_BF16, TX_F16, TX_F32});
  args->preset = static_cast<int32_t>(random.Below(2));
  args->full_shard = static_cast<int32_t>(random.Below(2));
  auto *r = call->New<Resolved>();
  *r = {args,
        call->New<tx_policy>(1, TX_POLICY_INIT),
        call->New<tx_policy>(1, TX_POLICY_INIT),
        call->New<tx_origin>(TX_POLICY_FIELDS),
        call->New<tx_origin>(TX_POLICY_FIELDS),
        TX_POLICY_FIELDS,
        TX_F32,
        call->New<tx_dtype>(),
        call->New<tx_dtype>(),
        config,
        0};
  tx_error error = {};
  EXPECT_TRUE(!resolved || tx_policy_resolve(args, r->policy, r->origins, r->n, &error) == TX_OK) << error.message;
  return r;
}

inline void PolicyResolve(Call *call) {
  Resolved *r = MakePolicy(call, false);
  auto *args = const_cast<tx_policy_args *>(r->args);
  auto *config = const_cast<tx_setting *>(args->config);
  call->Needed("args", &r->args), call->Needed("policy", &r->policy);
  call->Absent("origins", &r->origins);
  call->Size("args", &args->size), call->Size("policy", &r->policy->size);
  call->Never<int32_t>("model's dtype", &args->model_dtype, {-1, TX_I64, 99});
  call->Never<int32_t>("bf16", &args->bf16, {-2, 2});
  call->Never<int32_t>("fp16", &args->fp16, {-2, 2});
  call->Never<int32_t>("preset", &args->preset, {-1, 2});
  call->Never<int32_t>("full_shard", &args->full_shard, {-1, 2});
  call->Never<int32_t>("shard_dtype", &args->shard_dtype, {-1, TX_BF16, 99});
  call->Never<int64_t>("optimizer_config", &args->n_config, {-1});
  call->Never<int64_t>("override_optimizer_config", &args->optimizer.n, {-1});
  call->Never<int64_t>("override_ddp_config", &args->ddp.n, {-1, 2});  // {-1, 2}: there are no settings
  call->Never<int64_t>("origins", &r->n, {-1});
  if (args->n_config > 0) {
    call->Needed("optimizer_config", &args->config);
    call->Never<double>("lr", &config[0].number, {kNan, kInf, -1.0, -kTiny});
    call->Must("optimizer_config", "no key", [=] { config[0].key = nullptr; });
    call->Never<int32_t>("lr", &config[0].kind, {-1, 6, TX_VALUE_TEXT, TX_VALUE_BOOL});
  }
  if (args->optimizer.n > 0) {
    call->Needed("override_optimizer_config", &args->optimizer.settings);
    call->Must("exp_avg_dtype", "no text", [=] { config[2].text = nullptr; });
    call->Must("exp_avg_dtype", "a word", [=] { config[2].text = "fp31"; });
  }
  call->run = [=](tx_error *error) { return tx_policy_resolve(r->args, r->policy, r->origins, r->n, error); };
}
inline void PolicyRow(Call *call) {
  Resolved *r = MakePolicy(call, true);
  call->Needed("policy", &r->policy), call->Needed("origins", &r->origins), call->Needed("row", &r->other);
  call->Size("policy", &r->policy->size), call->Size("row", &r->other->size);
  call->Never<int32_t>("dtype", &r->dtype, {TX_NONE, TX_I64, 99});
  call->run = [=](tx_error *error) {
    return tx_policy_row(r->policy, r->origins, static_cast<tx_dtype>(r->dtype), r->other, error);
  };
}
inline void PolicyWith(Call *call) {
  Resolved *r = MakePolicy(call, true);
  auto *setting = call->New<tx_setting>();
  *setting = {"weight_decay", nullptr, 0.5, 0, TX_VALUE_FLOAT, 0};
  r->list = setting, r->n = 1;
  call->Needed("policy", &r->policy), call->Needed("origins", &r->origins);
  call->Needed("result", &r->other), call->Needed("origins", &r->other_origins), call->Needed("argument", &r->list);
  call->Size("policy", &r->policy->size), call->Size("result", &r->other->size);
  call->Never<int64_t>("argument", &r->n, {-1});
  call->Never<double>("weight_decay", &setting->number, {kNan, -kTiny, kInf});
  call->Must("argument", "no key", [=] { setting->key = nullptr; });
  call->Must("weight_decai", "a word", [=] { setting->key = "weight_decai"; });
  call->run = [=](tx_error *error) {
    return tx_policy_with(r->policy, r->origins, r->list, r->n, r->other, r->other_origins, error);
  };
}
inline void PolicyMoments(Call *call) {
  Resolved *r = MakePolicy(call, true);
  call->Needed("row", &r->policy), call->Needed("pointer", &r->exp_avg), call->Needed("pointer", &r->exp_avg_sq);
  call->Size("row", &r->policy->size);
  call->Never<int64_t>("numel", &r->n, {-1});
  call->Never<int32_t>("keep_32bit", &r->keep, {-1, 2});
  call->run = [=](tx_error *error) {
    return tx_policy_moments(r->policy, r->n, r->keep, r->exp_avg, r->exp_avg_sq, error);
  };
}
// tx_policy_describe returns -1, without a message, for an illegal call.
inline void PolicyDescribe(Call *call) {
  Resolved *r = MakePolicy(call, true);
  auto **buffer = call->New<char *>(1, call->New<char>(300));
  r->n = call->random.Below(301);
  if (r->n) call->Needed("", buffer);
  call->Needed("", &r->policy), call->Size("", &r->policy->size);
  call->Absent("origins", &r->origins);
  call->Other<int64_t>("capacity", &r->n, {-1, 0});
  call->run = [=](tx_error *error) {
    const int64_t length = tx_policy_describe(r->policy, r->origins, *buffer, r->n);
    call->extra = std::to_string(length);
    if (length >= 0) return TX_OK;
    if (error) std::strcpy(error->message, "-1");
    return TX_ERROR_INVALID_ARGUMENT;
  };
}

// -- loss scale -------------------------------------------------------------------------------------------------------

inline void ScaleFromPolicy(Call *call) {
  Resolved *r = MakePolicy(call, true);
  auto *scale = call->New<tx_scale>(1, TX_SCALE_INIT);
  auto **to = call->New<tx_scale *>(1, scale);
  call->Needed("policy", &r->policy), call->Needed("scale", to);
  call->Size("policy", &r->policy->size), call->Size("scale", &scale->size);
  call->Never<double>("backoff_factor", &r->policy->loss_scale_backoff_factor, {kNan, 0, 1});
  call->run = [=](tx_error *error) { return tx_scale_from_policy(r->policy, *to, error); };
}
inline void ScaleUpdate(Call *call) {
  auto *scale = call->New<tx_scale>(1, TX_SCALE_INIT);
  auto **to = call->New<tx_scale *>(1, scale);
  auto *found = call->New<int32_t>(1, static_cast<int32_t>(call->random.Below(2)));
  scale->clean_steps = call->random.Below(1000), scale->hysteresis_left = call->random.Below(3);
  call->Needed("scale", to), call->Size("scale", &scale->size);
  call->Never<double>("growth_factor", &scale->growth_factor, {kNan, kInf, 1.0, 1e300});
  call->Never<double>("backoff_factor", &scale->backoff_factor, {kNan, 0.0, 1.0, -kTiny});
  call->Never<double>("min_scale", &scale->min_scale, {kNan, 0.0, -kTiny, 1e300});
  call->Never<double>("scale", &scale->scale, {kNan, kInf, 0.5, 1e300});
  call->Never<int64_t>("growth_interval", &scale->growth_interval, {0, -1});
  call->Never<int64_t>("hysteresis", &scale->hysteresis, {0, -1});
  call->Never<int64_t>("clean_steps", &scale->clean_steps, {-1, 1000, std::numeric_limits<int64_t>::max()});
  call->Never<int64_t>("hysteresis_left", &scale->hysteresis_left, {-1, 3});
  call->run = [=](tx_error *error) { return tx_scale_update(*to, *found, error); };
}

}  // namespace api

#endif
