// tx_muon_momentum and tx_muon_update, compared with arithmetic in double that is independent of csrc/math.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <vector>

#include "csrc/torch_ext.h"
#include "tests/core/expect_refused.h"
#include "tests/core/same_bits.h"

extern "C" {
#include "csrc/math/block_scale.h"
#include "csrc/math/remainder.h"
#include "csrc/ops/step.h"
}

namespace {

constexpr int64_t kNumels[] = {1, 130, 5000, 0, 20000};

int64_t Size(tx_dtype dtype) {
  return dtype == TX_F32 ? 4 : dtype == TX_U8 ? 1 : dtype == TX_F64 || dtype == TX_I64 ? 8 : 2;
}

double Get(tx_dtype dtype, const uint8_t *data, int64_t i) {
  uint16_t half;
  float single;
  std::memcpy(&half, data + (Size(dtype) == 2 ? 2 * i : 0), 2);
  if (dtype == TX_BF16) return tx_f32_from_bf16(half);
  if (dtype == TX_F16) return tx_f32_from_f16(half);
  std::memcpy(&single, data + 4 * i, 4);
  return single;
}

// An allocator that aligns to a cache line: at such addresses the loops may use non-temporal stores.
template <typename T>
struct AtLine : std::allocator<T> {
  template <typename U>
  struct rebind {
    using other = AtLine<U>;
  };
  T *allocate(size_t n) { return static_cast<T *>(::operator new (n * sizeof(T), std::align_val_t{64})); }
  void deallocate(T *at, size_t) { ::operator delete (at, std::align_val_t{64}); }
};

// A list of tensors that owns their memory.
struct List {
  std::vector<std::vector<uint8_t, AtLine<uint8_t>>> memory;
  std::vector<tx_tensor> tensors;

  void Add(tx_dtype dtype, int64_t numel) {
    memory.emplace_back(static_cast<size_t>(Size(dtype) * numel + 8));
    tensors.push_back({nullptr, numel, dtype, 0});
  }
  const tx_tensor *Tensors() {
    for (size_t i = 0; i < tensors.size(); i++)
      tensors[i].data = memory[i].data();
    return tensors.data();
  }
  // Appends the bytes of the tensors with the sizes of kNumels, without those of AddMore.
  void AppendTo(Outputs *found) const {
    for (size_t t = 0; t < std::min(memory.size(), std::size(kNumels)); t++)
      found->emplace_back(memory[t].begin(), memory[t].end());
  }
  double At(size_t tensor, int64_t i) const { return Get(tensors[tensor].dtype, memory[tensor].data(), i); }
  void Put(size_t tensor, int64_t i, double value) {
    uint8_t *data = memory[tensor].data();
    const float single = static_cast<float>(value);
    uint16_t half = tx_bf16_from_f32(single);
    if (tensors[tensor].dtype == TX_F16) half = tx_f16_from_f32(single);
    if (tensors[tensor].dtype == TX_F32) {
      std::memcpy(data + 4 * i, &single, 4);
    } else {
      std::memcpy(data + 2 * i, &half, 2);
    }
  }
  void Fill(int seed, double scale) {
    std::mt19937 random(static_cast<uint32_t>(seed));
    std::normal_distribution<double> normal(0.0, scale);
    for (size_t t = 0; t < tensors.size(); t++)
      for (int64_t i = 0; i < tensors[t].numel; i++)
        Put(t, i, normal(random));
  }
};

// Matrices that start anywhere, also inside blocks and tiles.
std::vector<tx_muon_part> Parts() {
  std::vector<tx_muon_part> parts;
  int64_t tensor = 0;
  for (int64_t numel : kNumels) {
    for (int64_t begin : {int64_t{0}, numel / 7, numel / 2, numel - 1})
      if (numel && (parts.empty() || parts.back().tensor != tensor || parts.back().begin < begin))
        parts.push_back({tensor, begin});
    tensor++;
  }
  return parts;
}

int64_t EndOf(const std::vector<tx_muon_part> &parts, size_t part) {
  const int64_t tensor = parts[part].tensor;
  return part + 1 < parts.size() && parts[part + 1].tensor == tensor ? parts[part + 1].begin : kNumels[tensor];
}

// A call of tx_muon_momentum, and all its tensors.
struct Momentum {
  List grads, momentums, scales, updates, steps;
  tx_muon_momentum_args args = TX_MUON_MOMENTUM_ARGS_INIT;

  Momentum(tx_dtype grad, tx_dtype momentum, tx_dtype work) {
    for (int64_t numel : kNumels) {
      grads.Add(grad, numel);
      momentums.Add(momentum, numel);
      scales.Add(TX_U8, momentum == TX_U8 || momentum == TX_F16 ? (numel + TX_BLOCK - 1) / TX_BLOCK : 0);
      updates.Add(work, numel);
      steps.Add(TX_F32, 1);
    }
    grads.Fill(1, 1e-2);
  }
  // Adds another tensor, so large that the call's results do not fit into the caches.
  void AddMore() {
    for (List *list : {&grads, &momentums, &updates})
      list->Add(list->tensors[0].dtype, TX_STEP_CACHED);
    scales.Add(TX_U8, scales.tensors[1].numel ? TX_STEP_CACHED / TX_BLOCK : 0);
    steps.Add(TX_F32, 1);
  }
  const tx_muon_momentum_args *Args() {
    args.n = static_cast<int64_t>(grads.tensors.size());
    args.grads = grads.Tensors();
    args.momentums = momentums.Tensors();
    args.scales = scales.Tensors();
    args.updates = updates.Tensors();
    args.steps = steps.Tensors();
    return &args;
  }
  // Runs two steps; returns everything they wrote.
  Outputs Run(const Caller &call) {
    Outputs found;
    for (int step = 0; step < 2; step++) {
      grads.Fill(2 + step, 1e-2);
      for (size_t i = 0; i < std::size(kNumels); i++)
        steps.Put(i, 0, step);
      Args();
      call([&](const tx_parallel *parallel, tx_error *error) { return tx_muon_momentum(&args, parallel, error); });
      for (const List *list : {&momentums, &scales, &updates})
        list->AppendTo(&found);
    }
    return found;
  }
};

struct Form {
  tx_dtype grad, momentum, work;
};
constexpr Form kForms[] = {{TX_F32, TX_F32, TX_F32},   {TX_BF16, TX_BF16, TX_BF16}, {TX_BF16, TX_BF16, TX_F32},
                           {TX_BF16, TX_F32, TX_BF16}, {TX_F32, TX_BF16, TX_F32},   {TX_F16, TX_U8, TX_F32},
                           {TX_BF16, TX_F16, TX_BF16}};

class EveryForm : public testing::TestWithParam<Form> {};

TEST_P(EveryForm, MomentumHasTheSameBitsEverywhere) {
  for (int nesterov : {0, 1}) {
    ExpectSameBits([&](const Caller &call) {
      Momentum m(GetParam().grad, GetParam().momentum, GetParam().work);
      m.args.nesterov = nesterov;
      return m.Run(call);
    });
  }
}

TEST_P(EveryForm, MomentumHasTheSameBitsPastTheCaches) {
  for (int nesterov : {0, 1}) {
    Outputs found[2];
    for (int more : {0, 1}) {
      Momentum m(GetParam().grad, GetParam().momentum, GetParam().work);
      m.args.nesterov = nesterov;
      if (more) m.AddMore();
      found[more] = m.Run(Caller(nullptr));
    }
    EXPECT_TRUE(found[0] == found[1]) << "nesterov " << nesterov;
  }
}
INSTANTIATE_TEST_SUITE_P(Muon, EveryForm, testing::ValuesIn(kForms));

// torch.optim.Muon's formula for three steps in fp32, for several momenta, clip coefficients and scales.
TEST(Momentum, FollowsTheFloat64Oracle) {
  for (double momentum : {0.0, 0.3, 0.95, 1.0}) {
    for (int nesterov : {0, 1}) {
      Momentum m(TX_F32, TX_F32, TX_F32);
      float clip = 0.5f, scale = 8.0f;
      m.args.momentum = momentum;
      m.args.nesterov = nesterov;
      m.args.clip_coef = {&clip, 1, TX_F32, 0};
      m.args.grad_scale = {&scale, 1, TX_F32, 0};
      std::vector<std::vector<double>> averages, largest; /* the largest gradient that an element had so far */
      for (int64_t numel : kNumels) {
        averages.emplace_back(static_cast<size_t>(numel));
        largest.emplace_back(static_cast<size_t>(numel));
      }
      for (int step = 0; step < 3; step++) {
        m.grads.Fill(50 + step, 1.0);
        tx_error error;
        ASSERT_EQ(tx_muon_momentum(m.Args(), nullptr, &error), TX_OK) << error.message;
        for (size_t t = 0; t < std::size(kNumels); t++) {
          for (int64_t i = 0; i < kNumels[t]; i++) {
            const double g = m.grads.At(t, i) * clip / scale, old = averages[t][static_cast<size_t>(i)];
            const double average = momentum * old + (1 - momentum) * g;
            const double u = nesterov ? momentum * average + (1 - momentum) * g : average;
            averages[t][static_cast<size_t>(i)] = average;
            double &most = largest[t][static_cast<size_t>(i)];
            most = std::max(most, std::fabs(g));
            ASSERT_LE(std::fabs(m.momentums.At(t, i) - average), most * std::ldexp(4.0, -23));
            ASSERT_LE(std::fabs(m.updates.At(t, i) - u), most * std::ldexp(6.0, -23));
          }
        }
      }
    }
  }
}

// In 8 bits (e3m4, dithered), the average of 1000 gradients that are mostly noise stays close to the average in double.
// With e4m3 the error would be 12 %.
TEST(Momentum, EightBitsKeepTheDirection) {
  Momentum m(TX_F32, TX_U8, TX_F32);
  const size_t t = 4;
  std::mt19937 random(7);
  std::normal_distribution<double> normal(0.0, 1.0);
  std::vector<double> signal(static_cast<size_t>(kNumels[t])), average(signal.size());
  for (double &s : signal)
    s = 0.1 * normal(random);
  for (int step = 0; step < 1000; step++) {
    for (size_t i = 0; i < signal.size(); i++) {
      m.grads.Put(t, static_cast<int64_t>(i), signal[i] + normal(random));
      average[i] = 0.95 * average[i] + 0.05 * m.grads.At(t, static_cast<int64_t>(i));
    }
    m.steps.Put(t, 0, step);
    ASSERT_EQ(tx_muon_momentum(m.Args(), nullptr, nullptr), TX_OK);
  }
  double error = 0.0, size = 0.0;
  for (size_t i = 0; i < average.size(); i++) {
    const tx_block_scale scale = tx_scale_decode(tx_block_e3m4(), m.scales.memory[t][i / TX_BLOCK]);
    const double stored = tx_block_value(tx_block_e3m4(), m.momentums.memory[t][i], scale);
    error += (stored - average[i]) * (stored - average[i]);
    size += average[i] * average[i];
  }
  RecordProperty("error", std::to_string(std::sqrt(error / size)));
  EXPECT_LE(std::sqrt(error / size), 0.07);
}

TEST(Momentum, NoFiniteGradientMakesAStateNonFinite) {
  for (tx_dtype momentum : {TX_F32, TX_BF16, TX_F16, TX_U8}) {
    Momentum m(TX_F32, momentum, TX_F32);
    for (double most : {3.4e38, -3.4e38}) {
      for (size_t t = 0; t < std::size(kNumels); t++)
        for (int64_t i = 0; i < kNumels[t]; i++)
          m.grads.Put(t, i, i % 2 ? most : -most);
      ASSERT_EQ(tx_muon_momentum(m.Args(), nullptr, nullptr), TX_OK);
      for (size_t t = 0; t < std::size(kNumels); t++)
        for (int64_t i = 0; i < kNumels[t]; i++)
          ASSERT_TRUE(std::isfinite(m.updates.At(t, i)));
    }
  }
}

// Loops that process whole tiles at once must not miss a non-finite gradient at any position.
TEST(Momentum, NonFiniteGradientsAreNonFiniteResultsAndOthersAreTheirs) {
  for (double wrong : {std::numeric_limits<double>::infinity(), std::nan("")}) {
    for (int64_t at : {int64_t{0}, int64_t{31}, int64_t{3000}, int64_t{4999}}) {
      Momentum plain(TX_BF16, TX_BF16, TX_BF16), m = plain;
      m.grads.Put(2, at, wrong);
      ASSERT_EQ(tx_muon_momentum(plain.Args(), nullptr, nullptr), TX_OK);
      ASSERT_EQ(tx_muon_momentum(m.Args(), nullptr, nullptr), TX_OK);
      for (size_t t = 0; t < std::size(kNumels); t++) {
        for (int64_t i = 0; i < kNumels[t]; i++) {
          if (t == 2 && i == at) {
            ASSERT_FALSE(std::isfinite(m.updates.At(t, i)) || std::isfinite(m.momentums.At(t, i)));
          } else {
            ASSERT_EQ(m.updates.At(t, i), plain.updates.At(t, i));
            ASSERT_EQ(m.momentums.At(t, i), plain.momentums.At(t, i));
          }
        }
      }
    }
  }
}

// A loaded momentum near fp32's largest number, next to tiny elements.
TEST(Momentum, LargeStatesStayWhatTheyAre) {
  Momentum wide(TX_BF16, TX_F32, TX_BF16), narrow(TX_BF16, TX_BF16, TX_BF16);
  for (int64_t i = 0; i < 5000; i++) {
    const double value = i % 3 ? 3e38 : 1e-40;
    narrow.momentums.Put(2, i, value);
    wide.momentums.Put(2, i, narrow.momentums.At(2, i));
  }
  ASSERT_EQ(tx_muon_momentum(wide.Args(), nullptr, nullptr), TX_OK);
  ASSERT_EQ(tx_muon_momentum(narrow.Args(), nullptr, nullptr), TX_OK);
  for (int64_t i = 0; i < 5000; i++) {
    ASSERT_TRUE(std::isfinite(narrow.momentums.At(2, i)));
    ASSERT_EQ(narrow.updates.At(2, i), wide.updates.At(2, i)) << i;
  }
}

// -- update -----------------------------------------------------------------------------------------------------------

struct Update {
  List params, updates, masters, checksums, steps;
  List changed, moved, distances, emas, ema_lows, healths;
  std::vector<tx_muon_part> parts = Parts();
  std::vector<tx_muon_rate> rates;
  int64_t resynced = 0;
  tx_muon_update_args args = TX_MUON_UPDATE_ARGS_INIT;

  Update(tx_dtype param, tx_dtype master, tx_dtype update, bool checked = true) {
    for (int64_t numel : kNumels) {
      params.Add(param, numel);
      updates.Add(update, numel);
      masters.Add(master == TX_NONE ? TX_F32 : master, master == TX_NONE ? 0 : numel);
      const int64_t weights = master == TX_I16 ? TX_CHECKSUM : TX_SAMPLED;
      checksums.Add(TX_I64, master == TX_NONE || !checked ? 0 : (numel + weights - 1) / weights);
      steps.Add(TX_F32, 1);
    }
    params.Fill(3, 1.0);
    updates.Fill(4, 0.1);
    for (size_t t = 0; master == TX_F32 && t < std::size(kNumels); t++)
      for (int64_t i = 0; i < kNumels[t]; i++)
        masters.Put(t, i, params.At(t, i));
    for (size_t p = 0; p < parts.size(); p++)
      rates.push_back({0.02 * (1.0 + 0.1 * static_cast<double>(p)), 1e-3 / (1.0 + static_cast<double>(p))});
    Args();
    args.on_external_write = TX_EXTERNAL_RESYNC;
    if (master == TX_NONE) return;
    EXPECT_EQ(tx_master_checksum(args.n, args.params, masters.Tensors(), checksums.Tensors(), TX_CHECKSUM_RENEW,
                                 {nullptr, 0, TX_NONE, 0}, nullptr, nullptr),
              TX_OK);
  }
  // See Momentum::AddMore.
  void AddMore() {
    parts.push_back({static_cast<int64_t>(params.tensors.size()), 0});
    rates.push_back(rates[0]);
    const tx_tensor master = masters.tensors[0], checksum = checksums.tensors[0];
    params.Add(params.tensors[0].dtype, TX_STEP_CACHED);
    updates.Add(updates.tensors[0].dtype, TX_STEP_CACHED);
    masters.Add(master.dtype, master.numel ? TX_STEP_CACHED : 0);
    const int64_t weights = master.dtype == TX_I16 ? TX_CHECKSUM : TX_SAMPLED;
    checksums.Add(TX_I64, checksum.numel ? TX_STEP_CACHED / weights : 0);
    steps.Add(TX_F32, 1);
  }
  const tx_muon_update_args *Args() {
    args.n = static_cast<int64_t>(params.tensors.size());
    args.params = params.Tensors();
    args.updates = updates.Tensors();
    args.masters = masters.Tensors();
    args.checksums = checksums.Tensors();
    args.steps = steps.Tensors();
    args.n_parts = static_cast<int64_t>(parts.size());
    args.parts = parts.data();
    args.rates = rates.data();
    args.resynced = {&resynced, 1, TX_I64, 0};
    return &args;
  }
  double Weight(size_t t, int64_t i) const {
    if (masters.tensors[t].numel == 0) return params.At(t, i);
    if (masters.tensors[t].dtype == TX_F32) return masters.At(t, i);
    uint16_t weight;
    int16_t remainder;
    std::memcpy(&weight, params.memory[t].data() + 2 * i, 2);
    std::memcpy(&remainder, masters.memory[t].data() + 2 * i, 2);
    return tx_remainder_decode(weight, remainder);
  }
  // Requests all optional outputs of a step. ema: the averages' dtype; bf16 averages get 8 additional bits.
  void Ask(tx_dtype ema) {
    for (int64_t numel : kNumels) {
      changed.Add(TX_U8, (numel + 7) / 8);
      moved.Add(TX_BF16, (numel + TX_BLOCK - 1) / TX_BLOCK);
      distances.Add(TX_U8, (numel + 1) / 2);
      emas.Add(ema, numel);
      ema_lows.Add(TX_U8, ema == TX_BF16 ? numel : 0);
      healths.Add(TX_I64, TX_HEALTH_LEN);
    }
    args.ema_decay = 0.75;
  }
  const tx_muon_update_args *ArgsWithOutputs() {
    Args();
    args.changed = changed.Tensors();
    args.moved = moved.Tensors();
    args.distances = distances.Tensors();
    args.emas = emas.Tensors();
    args.ema_lows = ema_lows.Tensors();
    args.healths = healths.Tensors();
    return &args;
  }
  Outputs Written() const {
    Outputs found;
    for (const List *list :
         {&params, &masters, &checksums, &steps, &changed, &moved, &distances, &emas, &ema_lows, &healths})
      list->AppendTo(&found);
    return found;
  }
};

struct Weights {
  tx_dtype param, master, update;
};
constexpr Weights kWeights[] = {{TX_F32, TX_NONE, TX_F32}, {TX_BF16, TX_NONE, TX_BF16}, {TX_BF16, TX_F32, TX_BF16},
                                {TX_BF16, TX_I16, TX_F32}, {TX_F16, TX_NONE, TX_BF16},  {TX_F16, TX_F32, TX_F32}};

class EveryWeight : public testing::TestWithParam<Weights> {};

TEST_P(EveryWeight, UpdateHasTheSameBitsEverywhere) {
  ExpectSameBits([](const Caller &call) {
    Update u(GetParam().param, GetParam().master, GetParam().update);
    for (int step = 0; step < 2; step++) {
      u.Args();
      call([&](const tx_parallel *parallel, tx_error *error) { return tx_muon_update(&u.args, parallel, error); });
      if (GetParam().master != TX_NONE && step == 0) u.params.Put(4, 40, 7.0); /* a write from outside */
    }
    return u.Written();
  });
}

TEST_P(EveryWeight, UpdateHasTheSameBitsPastTheCaches) {
  Outputs found[2];
  for (int more : {0, 1}) {
    Update u(GetParam().param, GetParam().master, GetParam().update);
    if (more) u.AddMore();
    for (int step = 0; step < 2; step++) {
      tx_error error;
      ASSERT_EQ(tx_muon_update(u.Args(), nullptr, &error), TX_OK) << error.message;
    }
    found[more] = u.Written();
  }
  EXPECT_TRUE(found[0] == found[1]);
}

// Error bounds: two ulp of fp32 at the largest of weight, update and difference; for a 16-bit weight without a master
// one ulp of its own format.
TEST_P(EveryWeight, UpdateFollowsTheFloat64Oracle) {
  Update u(GetParam().param, GetParam().master, GetParam().update);
  const Update before = u;
  ASSERT_EQ(tx_muon_update(u.Args(), nullptr, nullptr), TX_OK);
  const bool exact = GetParam().master != TX_NONE || GetParam().param == TX_F32;
  const int bits = exact ? 23 : GetParam().param == TX_BF16 ? 7 : 10;
  double worst = 0.0;
  for (size_t p = 0; p < u.parts.size(); p++) {
    const auto t = static_cast<size_t>(u.parts[p].tensor);
    for (int64_t i = u.parts[p].begin; i < EndOf(u.parts, p); i++) {
      const double old = before.Weight(t, i);
      const double update = u.rates[p].lr * u.updates.At(t, i), want = old - (update + u.rates[p].decay * old);
      const double largest = std::max({std::fabs(want), std::fabs(old), std::fabs(update)});
      const double ulp = std::ldexp(1.0, std::max(bits == 23 ? -126 : -14, std::ilogb(largest)) - bits);
      const double error = std::fabs(u.Weight(t, i) - want) / ulp;
      ASSERT_LE(error, exact ? 2.0 : 1.01) << t << " " << i;
      worst = std::max(worst, error);
    }
    EXPECT_EQ(u.steps.At(t, 0), 1.0);
  }
  RecordProperty("worst_ulp", std::to_string(worst));
}

// A weight with an fp32 master is the master rounded to nearest even.
TEST_P(EveryWeight, WeightIsItsMasterRounded) {
  if (GetParam().master != TX_F32) GTEST_SKIP() << "no fp32 master";
  Update u(GetParam().param, GetParam().master, GetParam().update);
  ASSERT_EQ(tx_muon_update(u.Args(), nullptr, nullptr), TX_OK);
  for (size_t t = 0; t < std::size(kNumels); t++) {
    for (int64_t i = 0; i < kNumels[t]; i++) {
      const float master = static_cast<float>(u.masters.At(t, i));
      const float rounded = GetParam().param == TX_BF16 ? tx_f32_from_bf16(tx_bf16_from_f32(master))
                                                        : tx_f32_from_f16(tx_f16_from_f32(master));
      ASSERT_EQ(u.params.At(t, i), rounded);
    }
  }
}

TEST_P(EveryWeight, AWriteOfSomebodyElseIsWhatTheWeightIs) {
  if (GetParam().master == TX_NONE) GTEST_SKIP() << "no master";
  Update u(GetParam().param, GetParam().master, GetParam().update);
  ASSERT_EQ(tx_muon_update(u.Args(), nullptr, nullptr), TX_OK);
  EXPECT_EQ(u.resynced, 0);
  tx_error error;
  Update as_it_was = u;
  as_it_was.args.on_external_write = TX_EXTERNAL_CHECK;
  EXPECT_EQ(tx_muon_update(as_it_was.Args(), nullptr, &error), TX_OK) << error.message;
  EXPECT_TRUE(as_it_was.Written() == u.Written()) << "a check steps nothing";
  u.params.Put(2, 3, 7.0); /* the sample of weights with fp32 masters also contains this element */
  Update checked = u;
  checked.args.on_external_write = TX_EXTERNAL_CHECK;
  EXPECT_EQ(tx_muon_update(checked.Args(), nullptr, &error), TX_ERROR_BAD_STATE);
  EXPECT_NE(std::string(error.message).find("params[2]"), std::string::npos) << error.message;
  EXPECT_TRUE(checked.Written() == u.Written());
  const double update = u.updates.At(2, 3);
  ASSERT_EQ(tx_muon_update(u.Args(), nullptr, nullptr), TX_OK);
  EXPECT_EQ(u.resynced, GetParam().master == TX_I16 ? TX_CHECKSUM : 1);
  size_t part = 0;
  while (u.parts[part].tensor != 2)
    part++;
  EXPECT_NEAR(u.Weight(2, 3), 7.0 - (u.rates[part].lr * update + u.rates[part].decay * 7.0), 1e-6);
}

TEST_P(EveryWeight, WhatItLeavesBehindHasTheSameBitsEverywhere) {
  if (GetParam().master == TX_NONE && GetParam().param != TX_F32) GTEST_SKIP() << "no average of these";
  for (tx_dtype ema : {TX_BF16, TX_F32}) {
    ExpectSameBits([ema](const Caller &call) {
      Update u(GetParam().param, GetParam().master, GetParam().update);
      u.Ask(ema);
      for (int step = 0; step < 3; step++) {
        u.ArgsWithOutputs();
        call([&](const tx_parallel *parallel, tx_error *error) { return tx_muon_update(&u.args, parallel, error); });
        if (GetParam().master != TX_NONE && step == 1) u.params.Put(4, 40, 7.0); /* a write from outside */
      }
      return u.Written();
    });
  }
}

// Compared with weights and masters before and after the step. The weights have to be those of a step without optional
// outputs.
TEST_P(EveryWeight, WhatItLeavesBehindIsWhatHappened) {
  if (GetParam().master == TX_NONE && GetParam().param != TX_F32) GTEST_SKIP() << "no average of these";
  Update u(GetParam().param, GetParam().master, GetParam().update);
  Update plain = u;
  u.Ask(TX_F32);
  std::vector<std::vector<double>> average(std::size(kNumels));
  for (int step = 0; step < 2; step++) {
    u.updates.Fill(10 + step, 0.01);
    plain.updates.Fill(10 + step, 0.01);
    for (List *list : {&u.changed, &u.moved, &u.healths})
      for (auto &memory : list->memory)
        std::fill(memory.begin(), memory.end(), uint8_t{0});
    const Update before = u;
    ASSERT_EQ(tx_muon_update(u.ArgsWithOutputs(), nullptr, nullptr), TX_OK);
    ASSERT_EQ(tx_muon_update(plain.Args(), nullptr, nullptr), TX_OK);
    EXPECT_TRUE(u.params.memory == plain.params.memory);
    EXPECT_TRUE(u.masters.memory == plain.masters.memory);
    for (size_t t = 0; t < std::size(kNumels); t++) {
      average[t].resize(static_cast<size_t>(kNumels[t]));
      double updates = 0.0, weights = 0.0;
      int64_t changes = 0;
      for (int64_t i = 0; i < kNumels[t]; i++) {
        const double was = before.Weight(t, i), is = u.Weight(t, i);
        const bool changed = u.params.At(t, i) != before.params.At(t, i);
        ASSERT_EQ((u.changed.memory[t][static_cast<size_t>(i / 8)] >> (i % 8) & 1) != 0, changed) << t << " " << i;
        ASSERT_GE(u.moved.At(t, i / TX_BLOCK), static_cast<double>(static_cast<float>(std::fabs(is - was))));
        double &kept = average[t][static_cast<size_t>(i)];
        kept = step == 0 ? is : kept + 0.25 * (is - kept);
        ASSERT_NEAR(u.emas.At(t, i), kept, 1e-6 * std::max(1.0, std::fabs(kept)));
        changes += changed ? 1 : 0;
        updates += (is - was) * (is - was);
        weights += is * is;
      }
      tx_health health = TX_HEALTH_INIT;
      const auto n = static_cast<double>(kNumels[t]);
      ASSERT_EQ(tx_health_of(u.healths.Tensors()[t], &health, nullptr), TX_OK);
      ASSERT_EQ(health.elements, kNumels[t]);
      if (kNumels[t] == 0) continue;
      EXPECT_NEAR(health.update_rms, std::sqrt(updates / n), 1e-4 * std::sqrt(updates / n));
      EXPECT_NEAR(health.weight_rms, std::sqrt(weights / n), 1e-5 * std::sqrt(weights / n));
      EXPECT_DOUBLE_EQ(health.moved, static_cast<double>(changes) / n);
    }
  }
}

TEST_P(EveryWeight, BlocksThatSomebodyWroteWentAnywhere) {
  if (GetParam().master == TX_NONE) GTEST_SKIP() << "no master";
  Update u(GetParam().param, GetParam().master, GetParam().update);
  u.Ask(TX_F32);
  ASSERT_EQ(tx_muon_update(u.ArgsWithOutputs(), nullptr, nullptr), TX_OK);
  EXPECT_TRUE(std::isfinite(u.moved.At(2, 0)));
  u.params.Put(2, 3, 7.0);
  ASSERT_EQ(tx_muon_update(u.ArgsWithOutputs(), nullptr, nullptr), TX_OK);
  EXPECT_TRUE(std::isinf(u.moved.At(2, 0)));
  EXPECT_TRUE(std::isfinite(u.moved.At(4, 0)));
}
INSTANTIATE_TEST_SUITE_P(Muon, EveryWeight, testing::ValuesIn(kWeights));

TEST(Refused, WhatCannotBeLeftBehind) {
  tx_error error = {};
  Update alone(TX_BF16, TX_NONE, TX_F32);
  alone.Ask(TX_F32);
  ExpectRefused(tx_muon_update(alone.ArgsWithOutputs(), nullptr, &error), TX_ERROR_DTYPE, error, "emas[0]");
  Update decay(TX_F32, TX_NONE, TX_F32);
  decay.Ask(TX_F32);
  decay.args.ema_decay = 1.0;
  ExpectRefused(tx_muon_update(decay.ArgsWithOutputs(), nullptr, &error), TX_ERROR_ILLEGAL_VALUE, error, "ema_decay");
  Update few(TX_F32, TX_NONE, TX_F32);
  few.Ask(TX_F32);
  few.changed.tensors[2].numel--;
  ExpectRefused(tx_muon_update(few.ArgsWithOutputs(), nullptr, &error), TX_ERROR_SHAPE, error, "changed[2]");
}

// -- illegal arguments ------------------------------------------------------------------------------------------------

TEST(Refused, PartsThatAreNoMatrices) {
  const std::vector<std::vector<tx_muon_part>> wrong = {
      {}, {{0, 0}, {1, 1}}, {{0, 0}, {1, 0}, {1, 0}}, {{0, 0}, {1, 0}, {2, 5000}}, {{1, 0}, {0, 0}}, {{7, 0}}};
  for (const std::vector<tx_muon_part> &parts : wrong) {
    Update u(TX_F32, TX_NONE, TX_F32);
    u.parts = parts;
    const Update before = u;
    tx_error error = {};
    ExpectRefused(tx_muon_update(u.Args(), nullptr, &error), TX_ERROR_SHAPE, error, "parts");
    EXPECT_TRUE(u.Written() == before.Written());
  }
}

const tx_meta kNegative[] = {{}, {.start = -1}, {}, {}, {}};

TEST(Refused, NumbersAndDtypes) {
  tx_error error = {};
  for (double momentum : {-0.1, 1.1, std::nan("")}) {
    Momentum m(TX_F32, TX_F32, TX_F32);
    m.args.momentum = momentum;
    ExpectRefused(tx_muon_momentum(m.Args(), nullptr, &error), TX_ERROR_ILLEGAL_VALUE, error, "momentum");
  }
  const struct {
    tx_status status;
    const char *word;
    std::function<void(Momentum *)> change; /* changes legal arguments, after the pointers were set */
  } momenta[] = {
      {TX_ERROR_INVALID_ARGUMENT, "args.size", [](Momentum *m) { m->args.size = 8; }},
      {TX_ERROR_ILLEGAL_VALUE, "nesterov is 2", [](Momentum *m) { m->args.nesterov = 2; }},
      {TX_ERROR_SHAPE, "steps[1]", [](Momentum *m) { m->steps.tensors[1].numel = 2; }},
      {TX_ERROR_SHAPE, "steps[1]", [](Momentum *m) { m->steps.tensors[1].dtype = TX_I64; }},
      {TX_ERROR_DTYPE, "momentums[1]", [](Momentum *m) { m->momentums.tensors[1].dtype = TX_I16; }},
      {TX_ERROR_SHAPE, "scales[1]", [](Momentum *m) { m->scales.tensors[1].numel = 1; }},
      {TX_ERROR_SHAPE, "scales[1]", [](Momentum *m) { m->scales.tensors[1].dtype = TX_I16; }},
      {TX_ERROR_ILLEGAL_VALUE, "meta[1]", [](Momentum *m) { m->args.meta = kNegative; }},
  };
  for (const auto &c : momenta) {
    Momentum m(TX_F32, TX_U8, TX_F32);
    m.Args();
    c.change(&m);
    ExpectRefused(tx_muon_momentum(&m.args, nullptr, &error), c.status, error, c.word);
  }
  ExpectRefused(tx_muon_momentum(nullptr, nullptr, &error), TX_ERROR_INVALID_ARGUMENT, error, "args.size");
  ExpectRefused(tx_muon_update(nullptr, nullptr, &error), TX_ERROR_INVALID_ARGUMENT, error, "args.size");
  Momentum half(TX_F32, TX_F32, TX_F16);
  ExpectRefused(tx_muon_momentum(half.Args(), nullptr, &error), TX_ERROR_DTYPE, error, "updates[0]");
  Update beside(TX_BF16, TX_F32, TX_F32);
  beside.params.tensors[1].dtype = TX_F32;
  beside.params.memory[1].resize(4 * 130 + 8);
  ExpectRefused(tx_muon_update(beside.Args(), nullptr, &error), TX_ERROR_DTYPE, error, "params[1]");
  const struct {
    tx_status status;
    const char *word;
    std::function<void(Update *)> change;
  } updates[] = {
      {TX_ERROR_INVALID_ARGUMENT, "args.size", [](Update *u) { u->args.size = 8; }},
      {TX_ERROR_SHAPE, "masters[1]", [](Update *u) { u->masters.tensors[1].numel = 3; }},
      {TX_ERROR_DTYPE, "params[1]", [](Update *u) { u->params.tensors[1].dtype = TX_F32; }},
      {TX_ERROR_SHAPE, "parts", [](Update *u) { u->args.parts = nullptr; }},
      {TX_ERROR_SHAPE, "parts", [](Update *u) { u->args.n_parts = -1; }},
      {TX_ERROR_INVALID_ARGUMENT, "rates is NULL", [](Update *u) { u->args.rates = nullptr; }},
      {TX_ERROR_ILLEGAL_VALUE, "rates[2]", [](Update *u) { u->rates[2].decay = -1; }},
      {TX_ERROR_SHAPE, "is of tensor 9", [](Update *u) { u->parts.back().tensor = 9; }},
  };
  for (const auto &c : updates) {
    Update u(TX_BF16, TX_I16, TX_F32);
    u.Args();
    c.change(&u);
    ExpectRefused(tx_muon_update(&u.args, nullptr, &error), c.status, error, c.word);
  }
  Update rate(TX_F32, TX_NONE, TX_F32);
  rate.rates[2].lr = std::nan("");
  ExpectRefused(tx_muon_update(rate.Args(), nullptr, &error), TX_ERROR_ILLEGAL_VALUE, error, "rates[2]");
}

TEST(Refused, HyperParameters) {
  const tx_muon_group legal = {0.02, 0.1, 0.95, 3.4445, -4.7750, 2.0315, 1e-7, 5};
  tx_error error = {};
  EXPECT_EQ(tx_muon_check_group(&legal, "group 0: ", &error), TX_OK) << error.message;
  const struct {
    const char *word;
    tx_muon_group group;
  } wrong[] = {
      {"lr", {-1, 0.1, 0.95, 3.4445, -4.7750, 2.0315, 1e-7, 5}},
      {"weight_decay", {1, INFINITY, 0.95, 3.4445, -4.7750, 2.0315, 1e-7, 5}},
      {"momentum", {1, 0.1, 1.5, 3.4445, -4.7750, 2.0315, 1e-7, 5}},
      {"eps", {1, 0.1, 0.95, 3.4445, -4.7750, 2.0315, NAN, 5}},
      {"ns_steps", {1, 0.1, 0.95, 3.4445, -4.7750, 2.0315, 1e-7, 100}},
      {"ns_steps", {1, 0.1, 0.95, 3.4445, -4.7750, 2.0315, 1e-7, 0}},
      {"ns_coefficients", {1, 0.1, 0.95, 30.0, 4.7750, 2.0315, 1e-7, 5}},
      {"ns_coefficients", {1, 0.1, 0.95, NAN, 4.7750, 2.0315, 1e-7, 5}},
  };
  for (const auto &w : wrong)
    ExpectRefused(tx_muon_check_group(&w.group, "group 3: ", &error), TX_ERROR_ILLEGAL_VALUE, error,
                  (std::string("group 3: ") + w.word).c_str());
}

}  // namespace
