// tx_muon_update, compared with arithmetic in double that is independent of csrc/math.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "csrc/torch_ext.h"
#include "tests/core/muon_calls.h"

namespace {

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

TEST_P(EveryWeight, AnExternalWriteIsTheWeight) {
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

TEST_P(EveryWeight, OutputsHaveTheSameBitsEverywhere) {
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
TEST_P(EveryWeight, OutputsSayWhatChanged) {
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

TEST_P(EveryWeight, MovedIsInfiniteInExternallyWrittenBlocks) {
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

}  // namespace
