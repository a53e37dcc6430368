// A finite gradient never makes a state or a weight non-finite, for any combination of dtypes, rounding and instruction
// set. A gradient that is not finite has to show in the results.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/core/extreme.h"

namespace {

using namespace adamw_call;

#ifdef TX_SLOW
constexpr uint32_t kSeeds = 1;
#else
constexpr uint32_t kSeeds = 2;
#endif

// The state with all NaNs in fp32 made equal, since their sign and payload are not promised.
std::vector<std::vector<uint8_t>> Comparable(Param p) {
  const auto canonical = [&](Bytes &bytes, tx_dtype dtype) {
    for (int64_t i = 0; dtype == TX_F32 && i < p.n && bytes.size() > 0; i++)
      if (std::isnan(Get(TX_F32, bytes.data(), i))) tx_store(bytes.data(), i, TX_F32, NAN);
  };
  canonical(p.param, p.combo.param);
  canonical(p.master, p.combo.master);
  canonical(p.exp_avg, p.combo.exp_avg);
  canonical(p.exp_avg_sq, p.combo.exp_avg_sq);
  return p.State();
}

class EveryCombo : public testing::TestWithParam<Combo> {
 protected:
  void TearDown() override { EXPECT_EQ(tx_isa_select(nullptr, nullptr), TX_OK); }

  // Steps `initial` on every instruction set; each result has to equal the reference's. *result: the new state.
  static void StepEverywhere(const Param &initial, extreme::Constants &constants, int rounding, Param *result) {
    Call reference;
    reference.args.moment_rounding = reference.args.weight_rounding = rounding;
    extreme::Set(reference, constants);
    Param theirs = initial;
    ReferenceStep(theirs, reference, 7);
    for (int32_t isa = 0; tx_isa_name(isa); isa++) {
      ASSERT_EQ(tx_isa_select(tx_isa_name(isa), nullptr), TX_OK);
      *result = initial;
      Call call;
      call.args.moment_rounding = call.args.weight_rounding = rounding;
      extreme::Set(call, constants);
      call.Add(*result);
      tx_error error = {};
      ASSERT_EQ(tx_adamw(call.Args(), nullptr, &error), TX_OK) << error.message;
      ASSERT_EQ(Comparable(*result), Comparable(theirs)) << tx_isa_name(isa);
    }
  }
};

// 900 elements: both whole and partial tiles, blocks, and groups of blocks of the widest loop.
TEST_P(EveryCombo, AnyFiniteGradientLeavesEverythingFinite) {
  int64_t checked = 0;
  for (uint32_t seed = 0; seed < kSeeds; seed++) {
    for (const int rounding : {TX_NEAREST, TX_DITHERED, TX_STOCHASTIC}) {
      extreme::Random random(100 * seed + static_cast<uint32_t>(rounding));
      Param p(GetParam(), 8 * TX_BLOCK + 131);
      extreme::FillState(random, p);
      for (int step = 0; step < 4; step++) {
        extreme::Constants constants = extreme::AnyConstants(random);
        if (step > 0) extreme::FillWeights(random, p); /* some overflowed legally */
        extreme::FillGradients(random, p);
        const Param before = p;
        StepEverywhere(before, constants, rounding, &p);
        if (HasFatalFailure()) return;
        ASSERT_EQ(extreme::NotFinite(before, p, constants, &checked), "")
            << "seed " << seed << ", rounding " << rounding << ", step " << step << ", beta1 " << constants.group.beta1
            << ", beta2 " << constants.group.beta2 << ", scale " << constants.grad_scale << ", clip "
            << constants.clip_coef;
      }
    }
  }
  EXPECT_GT(checked, kSeeds * 3 * 1000);
}

// Includes a gradient that used to make v Inf and the weight NaN, and the smallest one that did so within a few steps.
TEST_P(EveryCombo, TrainingGoesOnAfterAHugeGradient) {
  for (const float huge : {1.85e19f, 3.3e38f, -3.3e38f}) {
    if (GetParam().grad == TX_F16) continue;
    Param p(GetParam(), 300);
    p.Fill(3);
    for (int step = 0; step < 3; step++) {
      p.FillGrad(static_cast<uint32_t>(step));
      if (step == 1) extreme::Put(p.grad, 17, GetParam().grad, huge);
      Call call;
      call.Add(p);
      ASSERT_EQ(tx_adamw(call.Args(), nullptr, nullptr), TX_OK);
    }
    for (int64_t i = 0; i < p.n; i++)
      ASSERT_LT(std::fabs(p.Master(i)), 10.0f) << huge << " " << i;
  }
}

// It makes its own weight NaN and its moments non-finite, and affects nothing outside its block.
TEST_P(EveryCombo, AGradientThatIsNotFiniteShows) {
  for (const float odd : {NAN, INFINITY, -INFINITY}) {
    for (int32_t isa = 0; tx_isa_name(isa); isa++) {
      ASSERT_EQ(tx_isa_select(tx_isa_name(isa), nullptr), TX_OK);
      Param p(GetParam(), 4 * TX_BLOCK);
      p.Fill(3);
      const int64_t at = TX_BLOCK + 5;
      tx_store(p.grad.data(), at, GetParam().grad, odd);
      extreme::Put(p.grad, at + 1, GetParam().grad, 3.3e38f);
      Call call;
      call.Add(p);
      ASSERT_EQ(tx_adamw(call.Args(), nullptr, nullptr), TX_OK);
      const auto m = GetMoment(p.exp_avg, p.scales.data(), GetParam().exp_avg, 0, p.n);
      const auto v = GetMoment(p.exp_avg_sq, extreme::RootScales(p), GetParam().exp_avg_sq, 1, p.n);
      EXPECT_TRUE(std::isnan(p.Master(at))) << odd;
      EXPECT_FALSE(std::isfinite(m[at])) << odd;
      EXPECT_FALSE(std::isfinite(v[at])) << odd;
      for (int64_t i = 0; i < p.n; i++) {
        const size_t k = static_cast<size_t>(i);
        ASSERT_TRUE(i == at || std::isfinite(p.Master(i))) << odd << " " << i;
        ASSERT_TRUE(i / TX_BLOCK == 1 || (std::isfinite(m[k]) && std::isfinite(v[k]))) << odd << " " << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AdamwFinite, EveryCombo, testing::ValuesIn(Combos()),
                         [](const auto &info) { return Name(info.param); });

}  // namespace
