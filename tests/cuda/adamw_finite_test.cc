// tx_cuda_adamw limits gradients as the CPU does: finite gradients of any size, with any legal state and constants.
#include "tests/core/extreme.h"
#include "tests/cuda/adamw_pair.h"

namespace {

using namespace adamw_pair;

class EveryCombination : public testing::TestWithParam<Combo> {
 protected:
  void SetUp() override { emulated::world = emulated::World(); }
};

// Replaces NaNs of fp32 streams: their sign and payload depend on the processor.
void MakeComparable(Param &p) {
  for (auto [bytes, dtype] : {std::pair{&p.param, p.combo.param}, {&p.master, p.combo.master}})
    for (int64_t i = 0; dtype == TX_F32 && bytes->size() > 0 && i < p.n; i++)
      if (std::isnan(adamw_call::Get(TX_F32, bytes->data(), i))) tx_store(bytes->data(), i, TX_F32, NAN);
}

TEST_P(EveryCombination, HasTheCpusBitsOfAnyFiniteGradientAndStaysFinite) {
  int64_t checked = 0;
  for (const int rounding : {TX_NEAREST, TX_DITHERED, TX_STOCHASTIC}) {
    SCOPED_TRACE(rounding);
    extreme::Random random(30 + static_cast<uint32_t>(rounding));
    Pair pair;
    pair.Add(GetParam(), 1024 + 77); /* a whole tile and a part of one */
    Param &ours = pair.ours.params[0].param, &theirs = pair.theirs.params[0].param;
    extreme::FillState(random, ours);
    for (int step = 0; step < 2; step++) {
      extreme::Constants constants = extreme::AnyConstants(random);
      tx_adamw_args args = Arguments();
      args.moment_rounding = args.weight_rounding = rounding;
      args.grad_scale = {&constants.grad_scale, 1, TX_F32, 0};
      args.clip_coef = {&constants.clip_coef, 1, TX_F32, 0};
      if (step > 0) extreme::FillWeights(random, ours); /* some overflowed in the step before */
      extreme::FillGradients(random, ours);
      const Param before = theirs = ours;
      ASSERT_EQ(pair.Take(args, &constants.group), TX_OK);
      MakeComparable(ours);
      MakeComparable(theirs);
      pair.ExpectEqual();
      ASSERT_EQ(extreme::NotFinite(before, ours, constants, &checked), "") << step;
    }
  }
  EXPECT_GT(checked, 1000);
}

INSTANTIATE_TEST_SUITE_P(AdamwFinite, EveryCombination, testing::ValuesIn(adamw_call::Combos()),
                         [](const auto &info) { return adamw_call::Name(info.param); });

// The fast arithmetic handles vectors in the middle of fp32's range. Moments after many steps that hardly count are in
// that range, too: gradients that must be limited must not be mistaken for them.
TEST(AdamwFinite, TheQuickArithmeticLeavesWhatIsLimitedToTheOrdinary) {
  for (const double beta2 : {0.5, 0.999, 1.0 - 0x1p-30, 1.0 - 0x1p-43, 1.0 - 0x1p-46, 1.0 - 0x1p-53}) {
    for (const Combo &combo : {adamw_call::kF32, adamw_call::kBf16, adamw_call::kRemainder, adamw_call::kBlocks}) {
      SCOPED_TRACE(beta2);
      emulated::world = emulated::World();
      Pair pair;
      pair.Add(combo, 1024);
      const float steps = 0x1p23f;
      for (Side *side : {&pair.ours, &pair.theirs}) {
        std::memcpy(side->params[0].param.step.data(), &steps, 4);
        for (int64_t i = 0; i < 1024; i++)
          tx_store(side->params[0].param.grad.data(), i, combo.grad, std::ldexp(i % 2 ? 1.99f : -1.99f, 63));
      }
      const tx_adamw_group group = {1e-2, 1.0 - 0x1p-30, beta2, 1e-8, 0.1, 0, 1};
      ASSERT_EQ(pair.Take(Arguments(), &group), TX_OK);
      pair.ExpectEqual();
    }
  }
}

}  // namespace
