// tx_adamw: its results equal the reference bit for bit, for every combination of dtypes, instruction set, number of
// threads, split and address.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/core/adamw_call.h"
#include "tests/core/threads.h"

namespace {

using namespace adamw_call;

class EveryCombo : public testing::TestWithParam<Combo> {};

// Runs on every instruction set of this processor; tests/core/cpu_isa_test.cc names those it does not have.
TEST_P(EveryCombo, EqualsTheReferenceBitForBit) {
  for (int32_t isa = 0; tx_isa_name(isa); isa++) {
    ASSERT_EQ(tx_isa_select(tx_isa_name(isa), nullptr), TX_OK);
    for (int rounding : {TX_DITHERED, TX_NEAREST, TX_STOCHASTIC}) {
      for (int64_t n : {1, 127, 129, 2500}) {
        Param ours(GetParam(), n, n % 2), theirs(GetParam(), n);
        ours.Fill(11);
        theirs.Fill(11);
        for (int step = 0; step < 3; step++) {
          ours.FillGrad(100 + step);
          theirs.FillGrad(100 + step);
          Call call, reference;
          call.args.seed = reference.args.seed = 5;
          call.args.moment_rounding = reference.args.moment_rounding = rounding;
          call.args.weight_rounding = reference.args.weight_rounding = rounding;
          call.Add(ours);
          tx_error error;
          ASSERT_EQ(tx_adamw(call.Args(), nullptr, &error), TX_OK) << error.message;
          ReferenceStep(theirs, reference, 7);
        }
        ASSERT_EQ(ours.State(), theirs.State()) << tx_isa_name(isa) << " n " << n << " rounding " << rounding;
      }
    }
  }
  ASSERT_EQ(tx_isa_select(nullptr, nullptr), TX_OK);
}

// G1, compared with arithmetic in double that is independent of csrc/math. Error bounds: two ulp of fp32 at the weight
// (the last subtraction, and a remainder's inexact tie), 4e-7 of the update (a dozen fp32 operations), and less than
// one ulp of the 16-bit format if the weight has no master.
TEST_P(EveryCombo, G1_FirstStepFollowsTheFloat64Oracle) {
  const Combo c = GetParam();
  Param p(c, 1000);
  p.Fill(3);
  Call call;
  call.Add(p);
  std::vector<double> before(1000);
  for (int64_t i = 0; i < p.n; i++)
    before[i] = p.Master(i);
  ASSERT_EQ(tx_adamw(call.Args(), nullptr, nullptr), TX_OK);
  const int bits = c.master || c.param == TX_F32 ? 23 : c.param == TX_BF16 ? 7 : 10;
  for (int64_t i = 0; i < p.n; i++) {
    const double g = Get(c.grad, p.grad.data(), i);
    const double m = (1 - 0.9) * g, v = (1 - 0.999) * g * g;
    const double update = 1e-2 * ((m / (1 - 0.9)) / (std::sqrt(v / (1 - 0.999)) + 1e-8) + 0.1 * before[i]);
    const double want = before[i] - update;
    const int exponent = std::max(-14, std::ilogb(std::max(std::fabs(before[i]), std::fabs(want))));
    const double storage = bits == 23 ? 0 : std::ldexp(1.0, exponent - bits);
    const double bound = storage + std::ldexp(2.0, exponent - 23) + 4e-7 * std::fabs(update);
    ASSERT_NEAR(p.Master(i), want, bound) << i;
  }
}

// Threads, other tensors of the call, splits at block edges and addresses change no bit.
TEST_P(EveryCombo, BitsDoNotDependOnThreadsSplitsOrAddresses) {
  const int64_t n = 3 * 16384 + 777, cut = 16384 + 128 * 5;
  Param whole(GetParam(), n);
  whole.Fill(21);
  Param left(GetParam(), cut, 1), right(GetParam(), n - cut, 3);
  auto slice = [&](Bytes &from, Bytes &to, int64_t begin) {
    std::memcpy(to.data(), from.data() + begin, static_cast<size_t>(to.size()));
  };
  for (auto [part, begin] : {std::pair<Param *, int64_t>{&left, 0}, {&right, cut}}) {
    slice(whole.param, part->param, begin * Size(GetParam().param));
    slice(whole.grad, part->grad, begin * Size(GetParam().grad));
    if (GetParam().master) slice(whole.master, part->master, begin * Size(GetParam().master));
  }
  Threads threads(3);
  for (int step = 0; step < 2; step++) {
    Call one, two;
    one.Add(whole);
    two.Add(right, 7, cut);
    two.Add(left, 7, 0);
    ASSERT_EQ(tx_adamw(one.Args(), nullptr, nullptr), TX_OK);
    ASSERT_EQ(tx_adamw(two.Args(), threads.parallel(), nullptr), TX_OK);
  }
  auto equal = [&](Bytes &all, Bytes &part, int64_t begin) {
    return part.size() == 0 || std::memcmp(all.data() + begin, part.data(), static_cast<size_t>(part.size())) == 0;
  };
  const Combo c = GetParam();
  for (auto [part, begin] : {std::pair<Param *, int64_t>{&left, 0}, {&right, cut}}) {
    EXPECT_TRUE(equal(whole.param, part->param, begin * Size(c.param)));
    EXPECT_TRUE(equal(whole.exp_avg, part->exp_avg, begin * Size(c.exp_avg)));
    EXPECT_TRUE(equal(whole.exp_avg_sq, part->exp_avg_sq, begin * Size(c.exp_avg_sq)));
    EXPECT_TRUE(equal(whole.master, part->master, c.master ? begin * Size(c.master) : 0));
  }
}

// By powers of two, so that scaling rounds nothing and no small gradient underflows.
TEST_P(EveryCombo, UnscalesAndClipsAsIfTheGradientHadBeen) {
  const Combo c = GetParam();
  for (int32_t isa = 0; tx_isa_name(isa); isa++) {
    ASSERT_EQ(tx_isa_select(tx_isa_name(isa), nullptr), TX_OK);
    Param ours(c, 1300), theirs(c, 1300);
    ours.Fill(2);
    theirs.Fill(2);
    float scale = 16.0f, clip = 4.0f;
    for (int step = 0; step < 2; step++) {
      ours.FillGrad(30 + step);
      theirs.FillGrad(30 + step);
      for (int64_t i = 0; i < ours.n; i++) {
        const float g = Get(c.grad, ours.grad.data(), i);
        PutPlain(ours.grad.data(), i, c.grad, 4.0f * g, TX_NEAREST, 0);
      }
      Call a, b;
      a.args.grad_scale = {&scale, 1, TX_F32, 0};
      a.args.clip_coef = {&clip, 1, TX_F32, 0};
      a.Add(ours);
      b.Add(theirs);
      ASSERT_EQ(tx_adamw(a.Args(), nullptr, nullptr), TX_OK);
      ASSERT_EQ(tx_adamw(b.Args(), nullptr, nullptr), TX_OK);
    }
    ASSERT_EQ(ours.State(), theirs.State()) << tx_isa_name(isa);
  }
  ASSERT_EQ(tx_isa_select(nullptr, nullptr), TX_OK);
}

#ifdef TX_SLOW
std::vector<Combo> Grid() {
  std::vector<Combo> all = Combos(), some;
  for (size_t i = 0; i < all.size(); i += 7)
    some.push_back(all[i]);
  return some;
}
#else
std::vector<Combo> Grid() {
  return Combos();
}
#endif
INSTANTIATE_TEST_SUITE_P(Combos, EveryCombo, testing::ValuesIn(Grid()),
                         [](const auto &info) { return Name(info.param); });

#ifdef TX_SLOW
constexpr int64_t kSteps = 4; /* enough to find a stray access */
#else
constexpr int64_t kSteps = 40;
#endif
const int64_t kLengths[] = {0, 1, 31, 32, 33, 127, 128, 129, 255, 257, 1000, 40001};

// The gradients of every step. They are generated once, because that takes longer than a step.
struct Gradients {
  std::vector<std::vector<Bytes>> of_step;
  explicit Gradients(const Combo &c) {
    for (int64_t step = 0; step < kSteps; step++) {
      std::vector<Bytes> all;
      int64_t id = 0;
      for (const int64_t length : kLengths) {
        Param drawn(c, length, (id + 1) % 3);
        drawn.FillGrad(static_cast<uint32_t>(1000 * step + id++), step < kSteps / 2 ? 1e-2f : 1e-4f);
        all.push_back(std::move(drawn.grad));
      }
      of_step.push_back(std::move(all));
    }
  }
};

// Tensors of many lengths, so that every loop, its tails and its path through tiles are used.
struct Training {
  std::vector<Param> params;
  explicit Training(const Combo &c) {
    int64_t n = 1;
    for (const int64_t length : kLengths) {
      params.emplace_back(c, length, n % 3);
      params.back().Fill(static_cast<uint32_t>(n++));
    }
  }
  void Train(const Gradients &gradients, const tx_adamw_group &group, const tx_parallel *parallel) {
    for (const std::vector<Bytes> &of_step : gradients.of_step) {
      Call call;
      call.group = group;
      for (size_t i = 0; i < params.size(); i++) {
        params[i].grad = of_step[i];
        call.Add(params[i], static_cast<int64_t>(i));
      }
      tx_error error;
      ASSERT_EQ(tx_adamw(call.Args(), parallel, &error), TX_OK) << error.message;
    }
  }
  std::vector<std::vector<std::vector<uint8_t>>> State() const {
    std::vector<std::vector<std::vector<uint8_t>>> all;
    for (const Param &p : params)
      all.push_back(p.State());
    return all;
  }
};

class ManySteps : public testing::TestWithParam<std::tuple<Combo, const char *>> {};

// Compares whole states for each selected instruction set, with 1, 2, 3 and 8 threads. cpu_isa_test names the
// instruction sets that this processor does not have.
TEST_P(ManySteps, EveryInstructionSetAndNumberOfThreadsLeavesTheSameState) {
  const auto [combo, constants] = GetParam();
  tx_adamw_group group = {1e-2, 0.9, 0.999, 1e-8, 0.1, 0, 1};
  if (std::string(constants) == "l2") group.decoupled = 0;
  if (std::string(constants) == "small_beta") group.beta1 = 0.3;
  const Gradients gradients(combo);
  const Training initial(combo);
  ASSERT_EQ(tx_isa_select("base", nullptr), TX_OK);
  Training expected = initial;
  expected.Train(gradients, group, nullptr);
  for (int32_t isa = 0; tx_isa_name(isa); isa++) {
    ASSERT_EQ(tx_isa_select(tx_isa_name(isa), nullptr), TX_OK);
    for (const int64_t count : {1, 2, 3, 8}) {
      Threads threads(count);
      Training ours = initial;
      ours.Train(gradients, group, threads.parallel());
      ASSERT_TRUE(ours.State() == expected.State()) << tx_isa_name(isa) << ", threads " << count;
    }
  }
  ASSERT_EQ(tx_isa_select(nullptr, nullptr), TX_OK);
}
INSTANTIATE_TEST_SUITE_P(
    Configurations, ManySteps,
    testing::Combine(testing::Values(kF32, kBf16, kRemainder, kBlocks, Combo{TX_F16, TX_F32, TX_F16, TX_F16, TX_F16}),
                     testing::Values("usual", "l2", "small_beta")),
    [](const auto &info) { return Name(std::get<0>(info.param)) + "_" + std::get<1>(info.param); });

// Some tiles and blocks get gradients that make moments NaN, infinite or too large for bf16; they have to be rounded as
// in the reference. Only combinations in which every tensor but the gradient is narrow: the sign and payload of a NaN
// in fp32 are not promised.
TEST(Adamw, NonFiniteAndHugeMomentsAreRoundedAsTheReferenceDoes) {
  const float odd[] = {NAN, -NAN, INFINITY, -INFINITY, 3.4e38f, -3.4e38f, 1e20f, 1e-40f, 0.0f};
  for (const Combo &c : Combos()) {
    if (c.grad == TX_F16 || c.param == TX_F32 || c.master == TX_F32 || c.exp_avg == TX_F32 || c.exp_avg_sq == TX_F32) {
      continue;
    }
    for (int32_t isa = 0; tx_isa_name(isa); isa++) {
      ASSERT_EQ(tx_isa_select(tx_isa_name(isa), nullptr), TX_OK);
      Param ours(c, 1500), theirs(c, 1500);
      ours.Fill(11);
      theirs.Fill(11);
      for (int step = 0; step < 3; step++) {
        for (Param *p : {&ours, &theirs}) {
          p->FillGrad(100 + static_cast<uint32_t>(step));
          for (int64_t i = 0; i < 9; i++)
            tx_store(p->grad.data(), 300 + 131 * i, c.grad, odd[(i + step) % 9]);
        }
        Call call, reference;
        call.Add(ours);
        ASSERT_EQ(tx_adamw(call.Args(), nullptr, nullptr), TX_OK);
        ReferenceStep(theirs, reference, 7);
        ASSERT_EQ(ours.State(), theirs.State()) << Name(c) << " " << tx_isa_name(isa) << " step " << step;
      }
    }
  }
  ASSERT_EQ(tx_isa_select(nullptr, nullptr), TX_OK);
}

// Pairs of weight and remainder that a step never or rarely writes: ties, a negative remainder with a zero weight, Inf,
// NaN. They are surrounded by ordinary pairs, each in a tile of its own. A step with a tiny lr also writes ties.
TEST(Adamw, RarePairsOfWeightAndRemainderAreSteppedAsTheReferenceDoes) {
  const uint16_t weights[] = {0x0000, 0x8000, 0x0001, 0x3f80, 0x3f81, 0xbf81, 0x7f7f, 0x7f80, 0xff80, 0x7fc0, 0xffff};
  const int16_t remainders[] = {-32768, -32767, -1, 0, 1, 32767};
  for (const Combo &c : {kRemainder, kBlocks}) {
    for (const double lr : {1e-2, 1e-9, 0.0}) {
      for (int32_t isa = 0; tx_isa_name(isa); isa++) {
        ASSERT_EQ(tx_isa_select(tx_isa_name(isa), nullptr), TX_OK);
        const int64_t n = 66 * 256 + 77;
        Param ours(c, n), theirs(c, n);
        for (Param *p : {&ours, &theirs}) {
          p->Fill(11);
          for (int64_t i = 0; i < 66; i++) {
            std::memcpy(p->param.data() + 2 * (256 * i + i), &weights[i % 11], 2);
            std::memcpy(p->master.data() + 2 * (256 * i + i), &remainders[i / 11], 2);
          }
        }
        for (int step = 0; step < 2; step++) {
          Call call, reference;
          call.group.lr = reference.group.lr = lr;
          call.Add(ours);
          ASSERT_EQ(tx_adamw(call.Args(), nullptr, nullptr), TX_OK);
          ReferenceStep(theirs, reference, 7);
          ASSERT_EQ(ours.State(), theirs.State()) << Name(c) << " " << tx_isa_name(isa) << " lr " << lr;
        }
      }
    }
  }
  ASSERT_EQ(tx_isa_select(nullptr, nullptr), TX_OK);
}

// The codes and gradients of one kind of block of 8-bit moments.
struct Family {
  uint8_t least, most;  // range of the codes, without the sign
  int32_t grad_exponent;
  uint32_t zeros;  // percentage of zero gradients
};

// Blocks of all kinds: below the normal numbers or shrinking below them, zeros, the widest range, codes and scales that
// no step writes, NaN blocks, and blocks that outgrow their scale in either direction. A loop may treat common blocks
// specially.
TEST(Adamw, BlocksOfAnyCodesAndScalesAreSteppedAsTheReferenceDoes) {
  const Family families[] = {{0x40, 0x7e, -6, 0},  {0x30, 0x7e, -6, 0},  {0, 0xff, -6, 30},   {0, 0, -6, 0},
                             {0, 0x0f, -20, 0},    {0x10, 0x2f, -6, 0},  {0, 0, -6, 100},     {0x76, 0x7e, -60, 0},
                             {0x60, 0x70, 20, 2},  {0x60, 0x70, -70, 0}, {0x70, 0x77, 0, 90}, {0x10, 0xff, -60, 50},
                             {0x30, 0xff, -6, 95}, {0x30, 0x3f, -6, 95}};
  const Combo combo = kBlocks;
  for (uint32_t seed = 0; seed < 20; seed++) {
    const int64_t n = 60 * TX_BLOCK + 77, blocks = (n + TX_BLOCK - 1) / TX_BLOCK;
    Param initial(combo, n);
    initial.Fill(seed);
    std::mt19937 gen(seed);
    const auto below = [&](uint32_t bound) { return static_cast<uint32_t>(gen() % bound); };
    for (int64_t b = 0; b < blocks; b++) {
      const Family m = families[below(std::size(families))], v = families[below(std::size(families))];
      for (int64_t i = b * TX_BLOCK; i < std::min(n, (b + 1) * TX_BLOCK); i++) {
        const float grad = static_cast<float>(below(20001)) / 10000.0f - 1.0f;
        const bool none = below(100) < v.zeros;
        tx_store(initial.grad.data(), i, combo.grad, none ? 0.0f : std::ldexp(grad, v.grad_exponent));
        initial.exp_avg.data()[i] = static_cast<uint8_t>((m.least + below(m.most - m.least + 1u)) | (below(2) << 7));
        initial.exp_avg_sq.data()[i] = static_cast<uint8_t>(v.least + below(v.most - v.least + 1u));
      }
      if (below(8) == 0 && (b + 1) * TX_BLOCK <= n)
        tx_store(initial.grad.data(), b * TX_BLOCK + below(TX_BLOCK), combo.grad, below(2) ? NAN : INFINITY);
      for (int64_t at : {b, blocks + b}) {
        const uint32_t near = static_cast<uint32_t>(104 + v.grad_exponent) + below(20);
        const uint32_t any = below(2) == 0 ? TX_BLOCK_SCALE_NAN : below(256);
        initial.scales.data()[at] = static_cast<uint8_t>(below(8) == 0 ? any : near);
      }
    }
    Param theirs = initial;
    std::vector<std::vector<std::vector<uint8_t>>> expected;
    for (int step = 0; step < 3; step++) {
      ReferenceStep(theirs, Call(), 7);
      expected.push_back(theirs.State());
    }
    for (int32_t isa = 0; tx_isa_name(isa); isa++) {
      ASSERT_EQ(tx_isa_select(tx_isa_name(isa), nullptr), TX_OK);
      Param ours = initial;
      for (int step = 0; step < 3; step++) {
        Call call;
        call.Add(ours);
        ASSERT_EQ(tx_adamw(call.Args(), nullptr, nullptr), TX_OK);
        ASSERT_EQ(ours.State(), expected[static_cast<size_t>(step)])
            << tx_isa_name(isa) << " seed " << seed << " step " << step;
      }
    }
  }
  ASSERT_EQ(tx_isa_select(nullptr, nullptr), TX_OK);
}

// G4: a weight with a remainder follows the fp32 master exactly, until a master has the one pattern that the remainder
// stores an ulp lower.
TEST(Adamw, G4_RemainderFollowsTheFp32Master) {
  Param a(kBf16, 5000), b(kRemainder, 5000);
  a.Fill(1);
  b.Fill(1);
  for (int64_t i = 0; i < a.n; i++) {  // both start from the rounded weight
    const float w = Get(TX_BF16, a.param.data(), i);
    std::memcpy(a.master.data() + 4 * i, &w, 4);
  }
  for (int step = 0; step < 50; step++) {
    a.FillGrad(step);
    b.FillGrad(step);
    Call ca, cb;
    ca.Add(a);
    cb.Add(b);
    ASSERT_EQ(tx_adamw(ca.Args(), nullptr, nullptr), TX_OK);
    ASSERT_EQ(tx_adamw(cb.Args(), nullptr, nullptr), TX_OK);
    for (int64_t i = 0; i < a.n; i++) {
      uint16_t w;
      int16_t r;
      float master;
      std::memcpy(&w, b.param.data() + 2 * i, 2);
      std::memcpy(&r, b.master.data() + 2 * i, 2);
      std::memcpy(&master, a.master.data() + 4 * i, 4);
      if (tx_bits_from_f32(master) - (static_cast<uint32_t>(tx_bf16_from_f32(master)) << 16) == 0x8000u) {
        const float lower = tx_remainder_decode(w, r);  // continue from the same master after the inexact pattern
        std::memcpy(a.master.data() + 4 * i, &lower, 4);
        continue;
      }
      ASSERT_EQ(tx_bits_from_f32(tx_remainder_decode(w, r)), tx_bits_from_f32(master)) << step << " " << i;
    }
    ASSERT_EQ(a.param.copy(), b.param.copy()) << step;
  }
}

}  // namespace
