// Makes legal random calls of the AdamW and Muon steps (see api_call.h).
#ifndef TESTS_CORE_API_STEPS_H
#define TESTS_CORE_API_STEPS_H

#include "tests/core/api_call.h"

namespace api {

struct Weight {
  tx_dtype param, master;
};
inline constexpr Weight kWeights[] = {{TX_BF16, TX_F32},  {TX_BF16, TX_I16}, {TX_F32, TX_NONE},
                                      {TX_BF16, TX_NONE}, {TX_F16, TX_F32},  {TX_F16, TX_NONE}};

inline bool IsScaled(tx_dtype dtype) {
  return dtype == TX_U8 || dtype == TX_F16;
}

// The arguments that all steps share: weights, masters, checksums, and the optional outputs for publishing, averages
// and health.
struct Weights {
  int64_t n;
  tx_tensor *params, *masters, *checksums, *steps, *changed, *moved, *distances, *emas, *ema_lows, *healths;
  tx_meta *meta;

  explicit Weights(Call *call) : n(1 + call->random.Below(3)) {
    for (tx_tensor **list :
         {&params, &masters, &checksums, &steps, &changed, &moved, &distances, &emas, &ema_lows, &healths})
      *list = call->New<tx_tensor>(n);
    meta = call->New<tx_meta>(n);
    for (int64_t i = 0; i < n; i++)
      Add(call, i);
  }
  template <typename Args>
  void Lend(Call *call, Args *args) const {
    args->n = n;
    args->params = params;
    args->masters = masters;
    args->checksums = checksums;
    args->steps = steps;
    args->meta = meta;
    args->changed = changed;
    args->moved = moved;
    args->distances = distances;
    args->emas = emas;
    args->ema_lows = ema_lows;
    args->healths = healths;
    args->ema_decay = 0.5;
    args->seed = static_cast<uint64_t>(call->random.I64());
    args->weight_rounding = static_cast<int32_t>(call->random.Below(3));
    args->on_external_write = static_cast<int32_t>(call->random.Below(2));
    args->resynced = call->Tensor(1, TX_I64);
    call->Of("resynced", &args->resynced);
    call->Size("size", &args->size);
    call->Needed("params", &args->params);
    call->Needed("steps", &args->steps);
    call->Absent("masters", &args->masters);
    call->Absent("checksums", &args->checksums);
    call->Absent("meta", &args->meta);
    call->Absent("changed", &args->changed);
    call->Never<int32_t>("weight_rounding", &args->weight_rounding, {-1, 3, 1 << 20});
    call->Never<int32_t>("on_external_write", &args->on_external_write, {-1, 3});
    call->Never<int64_t>("n", &args->n, {-1, std::numeric_limits<int64_t>::min()});
    call->Never<double>("ema_decay", &args->ema_decay, {kNan, -kTiny, 1.0, kInf});
    call->Never<int64_t>("ema_every", &args->ema_every, {0, -1});
  }

 private:
  void Add(Call *call, int64_t i) {
    Random &random = call->random;
    const int64_t numel = Numel(random);
    const Weight weight = random.Of(kWeights);
    params[i] = call->Tensor(numel, weight.param);
    if (weight.master) masters[i] = call->Tensor(numel, weight.master);
    if (weight.master && random.OneIn(2))
      checksums[i] = call->Tensor(Blocks(numel, weight.master == TX_I16 ? TX_CHECKSUM : TX_SAMPLED), TX_I64);
    steps[i] = call->F32(static_cast<float>(random.Below(100)));
    meta[i] = {random.I64(), TX_BLOCK * static_cast<int64_t>(random.Below(3)), 0};
    if (random.OneIn(2)) AddOutputs(call, i);
    for (const auto &[name, list] : {std::pair{"params", params},
                                     {"masters", masters},
                                     {"checksums", checksums},
                                     {"steps", steps},
                                     {"changed", changed},
                                     {"moved", moved},
                                     {"distances", distances},
                                     {"emas", emas},
                                     {"ema_lows", ema_lows},
                                     {"healths", healths}})
      call->Of(std::string(name) + "[" + std::to_string(i) + "]", list + i);
    call->Never<int64_t>("meta[" + std::to_string(i) + "]", &meta[i].start, {-1, -128});
    float *step = static_cast<float *>(steps[i].data);
    for (const float wrong : {-1.0f, 0.5f, 0x1p24f, std::numeric_limits<float>::quiet_NaN(), 0x1p-149f})
      call->Must("steps[" + std::to_string(i) + "]", std::to_string(wrong),
                 [=] { std::memcpy(static_cast<void *>(step), &wrong, sizeof wrong); });
    if (i > 0) call->Overlaps("params[" + std::to_string(i) + "]", &params[i], &params[0]);
  }
  void AddOutputs(Call *call, int64_t i) {
    Random &random = call->random;
    const int64_t numel = params[i].numel;
    changed[i] = call->Tensor((numel + 7) / 8, TX_U8);
    if (random.OneIn(2)) moved[i] = call->Tensor(Blocks(numel), TX_BF16);
    if (random.OneIn(2)) distances[i] = call->Tensor((numel + 1) / 2, TX_U8);
    if (random.OneIn(2)) healths[i] = call->Tensor(TX_HEALTH_LEN, TX_I64);
    if (masters[i].numel || params[i].dtype == TX_F32) {
      emas[i] = call->Tensor(numel, random.OneIn(2) ? TX_F32 : TX_BF16);
      if (emas[i].dtype == TX_BF16 && random.OneIn(2)) ema_lows[i] = call->Tensor(numel, TX_U8);
    }
  }
};

inline tx_adamw_args *AdamwArgs(Call *call) {
  Random &random = call->random;
  tx_adamw_args *args = call->New<tx_adamw_args>(1, TX_ADAMW_ARGS_INIT);
  const Weights weights(call);
  weights.Lend(call, args);
  const int64_t n = weights.n;
  auto *grads = call->New<tx_tensor>(n), *exp_avgs = call->New<tx_tensor>(n), *exp_avg_sqs = call->New<tx_tensor>(n),
       *scales = call->New<tx_tensor>(n);
  static const tx_dtype kMoments[] = {TX_BF16, TX_F32, TX_U8, TX_F16};
  for (int64_t i = 0; i < n; i++) {
    const int64_t numel = weights.params[i].numel;
    grads[i] = call->Tensor(numel, random.Of(kPlain));
    exp_avgs[i] = call->Tensor(numel, random.Of(kMoments));
    exp_avg_sqs[i] = call->Tensor(numel, random.Of(kMoments));
    for (int64_t k = 0; exp_avg_sqs[i].dtype != TX_U8 && k < numel; k++)  // not negative
      static_cast<uint8_t *>(exp_avg_sqs[i].data)[(k + 1) * (exp_avg_sqs[i].dtype == TX_F32 ? 4 : 2) - 1] &= 0x7f;
    const int scaled = IsScaled(exp_avgs[i].dtype) + IsScaled(exp_avg_sqs[i].dtype);
    if (scaled) scales[i] = call->Tensor(scaled * Blocks(numel), TX_U8);
    call->Overlaps("grads", &grads[i], &weights.params[0]);
    for (tx_tensor *one : {&grads[0], &exp_avgs[i], &exp_avg_sqs[i], &scales[i], &weights.masters[i]})
      for (tx_tensor *written : {&exp_avgs[i], &exp_avg_sqs[i], &scales[i], &weights.masters[i], &weights.changed[i]})
        call->Overlaps("share memory", one, written), call->Overlaps("share memory", written, one);
    weights.meta[i].group = random.Below(2);
    call->Never<int64_t>("meta[" + std::to_string(i) + "]", &weights.meta[i].group, {-1, 2});
  }
  args->grads = grads, args->exp_avgs = exp_avgs, args->exp_avg_sqs = exp_avg_sqs, args->scales = scales;
  call->OfList("grads", grads, n), call->OfList("exp_avgs", exp_avgs, n), call->OfList("exp_avg_sqs", exp_avg_sqs, n);
  call->OfList("scales", scales, n);
  for (auto &[name, list] : {std::pair{"grads", &args->grads},
                             {"exp_avgs", &args->exp_avgs},
                             {"exp_avg_sqs", &args->exp_avg_sqs},
                             {"groups", nullptr}})
    if (list) call->Needed(name, list);
  auto *groups = call->New<tx_adamw_group>(2, {1e-2, 0.9, 0.999, 1e-8, 0.1, 0, 1});
  args->n_groups = 2;
  args->groups = groups;
  groups[1].maximize = random.Below(2), groups[1].decoupled = random.Below(2);
  call->Needed("groups", &args->groups);
  call->Never<int64_t>("groups", &args->n_groups, {0, -1});
  call->Never<double>("groups[0]: lr", &groups[0].lr, {kNan, kInf, -1.0, -kTiny});
  call->Never<double>("groups[1]: beta1", &groups[1].beta1, {kNan, kInf, 1.0, -kTiny});
  call->Never<double>("groups[0]: beta2", &groups[0].beta2, {kNan, kInf, 1.0, -kTiny});
  call->Never<double>("groups[1]: eps", &groups[1].eps, {kNan, kInf, -1.0, -kTiny});
  call->Never<double>("groups[0]: weight_decay", &groups[0].weight_decay, {kNan, kInf, -1.0, -kTiny});
  call->Never<double>("groups[0]: maximize", &groups[0].maximize, {kNan, 0.5, -1.0, kTiny});
  call->Never<double>("groups[1]: decoupled", &groups[1].decoupled, {kNan, 0.5, -1.0, kTiny});
  call->Other<double>("groups[0]: lr", &groups[0].lr, {0, 1e-300, 1e300});
  call->Never<int32_t>("moment_rounding", &args->moment_rounding, {-1, 3});
  args->moment_rounding = static_cast<int32_t>(random.Below(3));
  args->skipped = call->Tensor(1, TX_I64);
  call->Of("skipped", &args->skipped);
  for (auto &[name, one] :
       {std::pair{"grad_scale", &args->grad_scale}, {"clip_coef", &args->clip_coef}, {"found_inf", &args->found_inf}}) {
    if (random.OneIn(2)) continue;
    *one = call->F32(one == &args->found_inf ? static_cast<float>(random.Below(2)) : 1.0f);
    call->Of(name, one);
  }
  if (random.OneIn(2)) {
    args->notes_bytes = 512 + 320 * n - random.Below(9);
    args->notes = call->Scratch(args->notes_bytes);
    call->Other<int64_t>("notes_bytes", &args->notes_bytes, {0, 3, -4});
  }
  return args;
}

inline void Adamw(Call *call) {
  tx_adamw_args *args = AdamwArgs(call);
  call->run = [=](tx_error *error) { return tx_adamw(args, call->parallel, error); };
}
inline void AdamwCheck(Call *call) {
  tx_adamw_args *args = AdamwArgs(call);
  call->run = [=](tx_error *error) { return tx_adamw_check(args, error); };
}
inline void AdamwOffloaded(Call *call) {
  tx_adamw_args *args = AdamwArgs(call);
  auto *staging = call->New<tx_staging>(1, TX_STAGING_INIT);
  constexpr int64_t kBytes = 4 * 4096 * 8 * 2;
  staging->slots = static_cast<int32_t>(1 + call->random.Below(2));
  staging->batch = 4096;
  staging->bytes = kBytes;
  char *memory = call->Scratch(kBytes + 64);
  staging->memory = memory + (64 - reinterpret_cast<uintptr_t>(memory) % 64) % 64;
  call->Size("staging.size", &staging->size);
  call->Never<int32_t>("slots", &staging->slots, {0, -1, 9});
  call->Never<int64_t>("batch", &staging->batch, {0, -4096, 4095, 4097});
  call->Never<int64_t>("staging.memory", &staging->bytes, {0, -1});
  call->Must("staging.memory", "NULL", [=] { staging->memory = nullptr; });
  call->Must("staging.memory", "not aligned", [=] { staging->memory = memory + 1; });
  call->run = [=](tx_error *error) { return tx_adamw_offloaded(args, staging, call->parallel, error); };
}
inline void AdamwCheckGroups(Call *call) {
  struct Values {
    const tx_adamw_group *groups;
    int64_t n;
    const char *where;
  };
  auto *a = call->New<Values>();
  auto *groups = call->New<tx_adamw_group>(2, {1e-2, 0.9, 0.999, 1e-8, 0.1, 0, 1});
  *a = {groups, 2, call->random.OneIn(2) ? nullptr : "of mine: "};
  call->Needed("groups", &a->groups);
  call->Never<int64_t>("groups", &a->n, {-1});
  call->Never<double>("lr", &groups[0].lr, {kNan, kInf, -1.0, -kTiny});
  call->Never<double>("betas[0]", &groups[1].beta1, {kNan, 1.0, -kTiny});
  call->Never<double>("betas[1]", &groups[0].beta2, {kNan, 1.0, -kTiny});
  call->Never<double>("eps", &groups[1].eps, {kNan, kInf, -kTiny});
  call->Never<double>("weight_decay", &groups[1].weight_decay, {kNan, kInf, -kTiny});
  call->run = [=](tx_error *error) { return tx_adamw_check_groups(a->groups, a->n, a->where, error); };
}

inline void HealthOf(Call *call) {
  auto *health = call->New<tx_tensor>();
  *health = call->Tensor(TX_HEALTH_LEN, TX_I64);
  auto *found = call->New<tx_health>(1, TX_HEALTH_INIT);
  auto **to = call->New<tx_health *>(1, found);
  call->Must("TX_HEALTH_INIT", "NULL", [=] { *to = nullptr; });
  call->Size("TX_HEALTH_INIT", &found->size);
  call->Of("health", health);
  auto *row = static_cast<int64_t *>(health->data);
  for (int64_t i = 0; i < TX_HEALTH_LEN; i++)
    if (call->random.OneIn(4)) row[i] = call->random.I64();
  call->run = [=](tx_error *error) { return tx_health_of(*health, *to, error); };
}

inline void MuonMomentum(Call *call) {
  Random &random = call->random;
  static const tx_dtype kMoments[] = {TX_BF16, TX_F32, TX_U8, TX_F16};
  auto *args = call->New<tx_muon_momentum_args>(1, TX_MUON_MOMENTUM_ARGS_INIT);
  const int64_t n = 1 + random.Below(3);
  auto *grads = call->New<tx_tensor>(n), *momentums = call->New<tx_tensor>(n), *scales = call->New<tx_tensor>(n),
       *updates = call->New<tx_tensor>(n), *steps = call->New<tx_tensor>(n);
  auto *meta = call->New<tx_meta>(n);
  for (int64_t i = 0; i < n; i++) {
    const int64_t numel = Numel(random);
    grads[i] = call->Tensor(numel, random.Of(kPlain));
    momentums[i] = call->Tensor(numel, random.Of(kMoments));
    if (IsScaled(momentums[i].dtype)) scales[i] = call->Tensor(Blocks(numel), TX_U8);
    updates[i] = call->Tensor(numel, random.OneIn(2) ? TX_F32 : TX_BF16);
    steps[i] = call->F32(static_cast<float>(random.Below(9)));
    call->Overlaps("updates", &updates[i], &grads[0]);
    call->Never<int64_t>("meta", &meta[i].start, {-1});
  }
  call->OfList("grads", grads, n), call->OfList("momentums", momentums, n), call->OfList("scales", scales, n);
  call->OfList("updates", updates, n), call->OfList("steps", steps, n);
  args->n = n;
  args->grads = grads, args->momentums = momentums, args->scales = scales, args->updates = updates, args->steps = steps;
  args->meta = meta;
  args->seed = static_cast<uint64_t>(random.I64());
  args->nesterov = static_cast<int32_t>(random.Below(2));
  args->moment_rounding = static_cast<int32_t>(random.Below(3));
  call->Size("size", &args->size);
  call->Needed("grads", &args->grads), call->Needed("momentums", &args->momentums);
  call->Needed("updates", &args->updates), call->Needed("steps", &args->steps);
  call->Absent("scales", &args->scales), call->Absent("meta", &args->meta);
  call->Never<int64_t>("n", &args->n, {-1});
  call->Never<double>("momentum", &args->momentum, {kNan, kInf, 1.5, -kTiny});
  call->Never<int32_t>("nesterov", &args->nesterov, {-1, 2});
  call->Never<int32_t>("moment_rounding", &args->moment_rounding, {-1, 3});
  call->run = [=](tx_error *error) { return tx_muon_momentum(args, call->parallel, error); };
}

inline void MuonUpdate(Call *call) {
  auto *args = call->New<tx_muon_update_args>(1, TX_MUON_UPDATE_ARGS_INIT);
  const Weights weights(call);
  weights.Lend(call, args);
  auto *updates = call->New<tx_tensor>(weights.n);
  auto *parts = call->New<tx_muon_part>(2 * weights.n);
  auto *rates = call->New<tx_muon_rate>(2 * weights.n, {1e-2, 1e-3});
  for (int64_t i = 0; i < weights.n; i++) {
    const int64_t numel = weights.params[i].numel;
    updates[i] = call->Tensor(numel, call->random.OneIn(2) ? TX_F32 : TX_BF16);
    parts[args->n_parts++] = {i, 0};
    if (numel > 1)
      parts[args->n_parts++] = {i, 1 + static_cast<int64_t>(call->random.Below(static_cast<uint32_t>(numel - 1)))};
  }
  args->updates = updates, args->parts = parts, args->rates = rates;
  call->OfList("updates", updates, weights.n);
  call->Needed("updates", &args->updates), call->Needed("parts", &args->parts), call->Needed("rates", &args->rates);
  call->Never<int64_t>("parts", &args->n_parts, {-1, 0});
  call->Never<int64_t>("parts", &parts[0].begin, {-1, 1});
  call->Never<int64_t>("parts", &parts[0].tensor, {-1, 99});
  call->Never<double>("rates[0]", &rates[0].lr, {kNan, kInf, -1.0, -kTiny});
  call->Never<double>("rates[0]", &rates[0].decay, {kNan, kInf, -1.0, -kTiny});
  call->run = [=](tx_error *error) { return tx_muon_update(args, call->parallel, error); };
}

inline void MuonCheckGroup(Call *call) {
  auto *group = call->New<tx_muon_group>(1, {0.02, 0.1, 0.95, 3.4445, -4.7750, 2.0315, 1e-7, 5});
  auto **of = call->New<tx_muon_group *>(1, group);
  call->Must("group", "NULL", [=] { *of = nullptr; });
  call->Never<double>("lr", &group->lr, {kNan, kInf, -1.0, -kTiny});
  call->Never<double>("weight_decay", &group->weight_decay, {kNan, kInf, -1.0, -kTiny});
  call->Never<double>("momentum", &group->momentum, {kNan, 1.5, -kTiny});
  call->Never<double>("eps", &group->eps, {kNan, kInf, -kTiny});
  call->Never<double>("ns_coefficients", &group->ns_a, {kNan, kInf, 100.0});
  call->Never<int64_t>("ns_steps", &group->ns_steps, {0, -1, 100});
  call->run = [=](tx_error *error) { return tx_muon_check_group(*of, nullptr, error); };
}

inline void MuonMirror(Call *call) {
  struct Values {
    tx_tensor square;
    int64_t n, panel;
  };
  auto *a = call->New<Values>();
  const int64_t n = call->random.Below(60);
  *a = {call->Tensor(n * n, call->random.Of(kPlain)), n, 1 + static_cast<int64_t>(call->random.Below(70))};
  call->Of("square", &a->square);
  call->Never<int64_t>("n is", &a->n, {-1, n + 1, int64_t{1} << 33});
  call->Never<int64_t>("panel", &a->panel, {0, -1});
  call->run = [=](tx_error *error) { return tx_muon_mirror(a->square, a->n, a->panel, call->parallel, error); };
}

}  // namespace api

#endif
