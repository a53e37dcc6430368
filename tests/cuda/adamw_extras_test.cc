// tx_cuda_adamw's optional outputs must have the CPU's bits: changes, bounds, distances, averages, sums.
#include <cmath>
#include <limits>
#include <string>

#include "tests/cuda/adamw_pair.h"

namespace {

using namespace adamw_pair;

enum class EmaFormat { kNone, kBf16, k24, kF32 };

/* The outputs that a test requests. */
struct Asked {
  bool changed = true, moved = true, distances = true, health = true;
  EmaFormat ema = EmaFormat::k24;
};

/* The outputs for one parameter of one side. */
struct Left {
  Bytes changed, moved, distances, ema, lows;
  std::vector<int64_t> health;

  Left(const Asked &a, const Combo &c, int64_t n, int64_t misalign)
      : changed(a.changed ? (n + 7) / 8 : 0, misalign),
        moved(a.moved ? (n + 127) / 128 * 2 : 0, misalign),
        distances(a.distances ? (n + 1) / 2 : 0, misalign),
        ema(Averages(a, c) ? n * (a.ema == EmaFormat::kF32 ? 4 : 2) : 0, misalign),
        lows(Averages(a, c) && a.ema == EmaFormat::k24 ? n : 0, misalign),
        health(a.health && n ? TX_HEALTH_LEN : 0) {}
  // A 16-bit weight without a master is not averaged.
  static bool Averages(const Asked &a, const Combo &c) {
    return a.ema != EmaFormat::kNone && (c.param == TX_F32 || c.master != TX_NONE);
  }
};

/* A pair of sides and the optional outputs of their steps. */
struct Noting {
  Pair pair;
  std::deque<Left> ours, theirs;
  EmaFormat ema;
  Asked asked;
  double decay = 0.9;
  int64_t every = 1;

  explicit Noting(const Asked &a = {}) : ema(a.ema), asked(a) {}
  void Add(const Combo &c, int64_t n, int64_t misalign = 0, bool watched = false) {
    AddWith(asked, c, n, misalign, watched);
  }
  void AddWith(const Asked &a, const Combo &c, int64_t n, int64_t misalign = 0, bool watched = false) {
    pair.Add(c, n, misalign, watched);
    ours.emplace_back(a, c, n, misalign);
    theirs.emplace_back(a, c, n, misalign);
  }
  /* The lists of one side. */
  struct Lists {
    std::vector<tx_tensor> changed, moved, distances, emas, lows, healths;
    Lists(std::deque<Left> &of, EmaFormat ema) {
      for (Left &l : of) {
        changed.push_back(T(l.changed, TX_U8));
        moved.push_back(T(l.moved, TX_BF16));
        distances.push_back(T(l.distances, TX_U8));
        emas.push_back(T(l.ema, ema == EmaFormat::kF32 ? TX_F32 : TX_BF16));
        lows.push_back(T(l.lows, TX_U8));
        healths.push_back({l.health.data(), static_cast<int64_t>(l.health.size()), TX_I64, 0});
      }
    }
    void Into(tx_adamw_args *args) {
      args->changed = changed.data(), args->moved = moved.data(), args->distances = distances.data();
      args->emas = emas.data(), args->ema_lows = lows.data(), args->healths = healths.data();
    }
  };
  tx_status Take(tx_adamw_args like = Arguments(), const tx_adamw_group *group = nullptr) {
    tx_error a = {}, b = {};
    like.ema_decay = decay, like.ema_every = every;
    Step to_ours(pair.ours, like, group), to_theirs(pair.theirs, like, group);
    Lists our_lists(ours, ema), their_lists(theirs, ema);
    our_lists.Into(&to_ours.call.args), their_lists.Into(&to_theirs.call.args);
    pair.call.device = emulated::world.current;
    const tx_status status = tx_cuda_adamw(to_ours.Args(), &pair.call, &a);
    EXPECT_EQ(status, tx_adamw(to_theirs.Args(), nullptr, &b)) << a.message << b.message;
    EXPECT_STREQ(a.message, b.message);
    return status;
  }
  void ExpectEqual() {
    pair.ExpectEqual();
    for (size_t i = 0; i < ours.size(); i++) {
      SCOPED_TRACE("parameter " + std::to_string(i) + ", " + adamw_call::Name(pair.ours.params[i].param.combo) +
                   ", elements " + std::to_string(pair.ours.params[i].param.n));
      EXPECT_EQ(ours[i].changed.copy(), theirs[i].changed.copy());
      EXPECT_EQ(ours[i].moved.copy(), theirs[i].moved.copy());
      EXPECT_EQ(ours[i].distances.copy(), theirs[i].distances.copy());
      EXPECT_EQ(ours[i].ema.copy(), theirs[i].ema.copy());
      EXPECT_EQ(ours[i].lows.copy(), theirs[i].lows.copy());
      EXPECT_EQ(ours[i].health, theirs[i].health);
    }
  }
  // The number of blocks without a bound, over all parameters.
  int64_t Unbounded() {
    int64_t count = 0;
    for (Left &l : ours)
      for (int64_t b = 0; b < l.moved.size() / 2; b++)
        count += std::isinf(adamw_call::Get(TX_BF16, l.moved.data(), b));
    return count;
  }
};

class Emulated : public testing::Test {
 protected:
  void SetUp() override { emulated::world = emulated::World(); }
  void TearDown() override { emulated::world = emulated::World(); }
};

class EveryCombination : public testing::TestWithParam<Combo> {
 protected:
  void SetUp() override { emulated::world = emulated::World(); }
};

TEST_P(EveryCombination, LeavesTheCpusBitsBehind) {
  Noting noting;
  noting.Add(GetParam(), 1300);
  noting.Add(GetParam(), 400, 1);
  for (uint32_t step = 0; step < 2; step++) {
    noting.pair.NewGradients(10 * step, step == 1 ? 1e-5f : 1e-2f);
    ASSERT_EQ(noting.Take(), TX_OK);
  }
  noting.ExpectEqual();
}

INSTANTIATE_TEST_SUITE_P(Extras, EveryCombination, testing::ValuesIn(adamw_call::Combos()),
                         [](const auto &info) { return adamw_call::Name(info.param); });

class Kinds : public testing::TestWithParam<Combo> {
 protected:
  void SetUp() override { emulated::world = emulated::World(); }
  void TearDown() override { emulated::world = emulated::World(); }
};

TEST_P(Kinds, AtEveryLengthAndAddressInOneLaunch) {
  Noting noting;
  for (const int64_t n : {0, 1, 7, 8, 9, 127, 128, 129, 255, 257, 1023, 1025})
    for (const int64_t misalign : {0, 1, 2, 4})
      noting.Add(GetParam(), n, misalign);
  noting.Add(GetParam(), 4096 + 5);
  for (int step = 0; step < 2; step++) {
    emulated::world.launches = 0;
    ASSERT_EQ(noting.Take(), TX_OK);
    EXPECT_EQ(emulated::world.launches, 1);
    EXPECT_EQ(emulated::world.synchronisations, 0);
  }
  noting.ExpectEqual();
}

TEST_P(Kinds, EachAlone) {
  const Asked alone[] = {
      {true, false, false, false, EmaFormat::kNone},  {true, true, false, false, EmaFormat::kNone},
      {true, false, true, false, EmaFormat::kNone},   {false, false, false, true, EmaFormat::kNone},
      {false, false, false, false, EmaFormat::kBf16}, {false, false, false, false, EmaFormat::k24},
      {false, false, false, false, EmaFormat::kF32},  {true, true, false, false, EmaFormat::kBf16},
  };
  for (const Asked &asked : alone) {
    Noting noting(asked);
    noting.Add(GetParam(), 1300);
    /* no outputs are requested for this one */
    noting.AddWith({false, false, false, false, EmaFormat::kNone}, GetParam(), 300);
    noting.Add(GetParam(), 77, 2);
    for (int step = 0; step < 3; step++) {
      noting.pair.NewGradients(static_cast<uint32_t>(step), 1e-2f);
      ASSERT_EQ(noting.Take(), TX_OK);
    }
    noting.ExpectEqual();
  }
}

TEST_P(Kinds, OnAnyGrid) {
  for (const int processors : {1, 2, 7}) {
    emulated::Use(processors, processors == 1 ? 1 : 3);
    Noting noting;
    for (const int64_t n : {20000, 5, 3000})
      noting.Add(GetParam(), n);
    for (int step = 0; step < 2; step++)
      ASSERT_EQ(noting.Take(), TX_OK);
    noting.ExpectEqual();
  }
}

// Small steps, few of which change a weight, and large ones, which the bits of a distance cannot hold; over many steps.
TEST_P(Kinds, OverStepsOfAnySize) {
  for (const double lr : {0.0, 1e-6, 1e-4, 3e-2, 10.0}) {
    const tx_adamw_group group = {lr, 0.9, 0.999, 1e-8, 0.0, 0, 1};
    Noting noting;
    noting.every = lr == 1e-4 ? 3 : 1;
    noting.Add(GetParam(), 700);
    for (uint32_t step = 0; step < 7; step++) {
      noting.pair.NewGradients(step, 1e-2f);
      ASSERT_EQ(noting.Take(Arguments(), &group), TX_OK);
    }
    noting.ExpectEqual();
  }
}

// The squares of some are subnormal, and those of others exceed fp32.
TEST_P(Kinds, OfWeightsOfAnySize) {
  for (const float size : {1e-30f, 1e-4f, 60000.0f, 1e19f}) {
    if (GetParam().param == TX_F16 && (size < 1e-4f || size > 60000.0f)) continue;
    Noting noting;
    noting.Add(GetParam(), 1100);
    for (Side *side : {&noting.pair.ours, &noting.pair.theirs}) {
      Param &p = side->params[0].param;
      for (int64_t i = 0; i < p.n; i++) {
        const float weight = size * (i % 3 == 0 ? -1.0f : 0.5f);
        tx_store(p.param.data(), i, p.combo.param, weight);
        if (p.combo.master == TX_F32)
          tx_store(p.master.data(), i, TX_F32, adamw_call::Get(p.combo.param, p.param.data(), i));
      }
    }
    ASSERT_EQ(noting.Take(), TX_OK);
    noting.ExpectEqual();
  }
}

TEST_P(Kinds, NumbersThatAreNoneHaveNoBound) {
  if (GetParam().param == TX_F32) return; /* an fp32 NaN has whatever bits the processor gave it */
  Noting noting({true, true, true, true, EmaFormat::kBf16});
  noting.Add(GetParam(), 1500);
  const float odd[] = {NAN, INFINITY, -INFINITY};
  for (Side *side : {&noting.pair.ours, &noting.pair.theirs}) {
    for (int64_t i = 0; i < 3; i++)
      tx_store(side->params[0].param.grad.data(), 300 * i, GetParam().grad, odd[i]);
  }
  ASSERT_EQ(noting.Take(), TX_OK);
  EXPECT_EQ(noting.Unbounded(), 3);
  noting.ExpectEqual();
}

// The blocks with external writes are reported alike, whether the step resyncs them or ignores the writes.
TEST_P(Kinds, OfWeightsThatOthersWroteNobodyKnowsHowFar) {
  for (const int32_t external : {TX_EXTERNAL_RESYNC, TX_EXTERNAL_IGNORE}) {
    for (const bool only_a_sign_of_zero : {false, true}) {
      SCOPED_TRACE(testing::Message() << "external " << external << ", zero " << only_a_sign_of_zero);
      emulated::world = emulated::World();
      Noting noting({true, true, true, false, EmaFormat::kF32});
      for (const int64_t n : {300, 2 * 4096 + 1500, 900})
        noting.Add(GetParam(), n, n % 2, true);
      for (Side *side : {&noting.pair.ours, &noting.pair.theirs}) {
        Param &p = side->params[1].param;
        for (int64_t i = 0; i < p.n; i++) {
          if (i % 1024 != 0) continue;
          tx_store(p.param.data(), i, p.combo.param, 0.0f);
          if (p.combo.master != TX_NONE) std::memset(p.master.data() + i * adamw_call::Size(p.combo.master), 0, 2);
          if (p.combo.master == TX_F32) tx_store(p.master.data(), i, TX_F32, 0.0f);
        }
      }
      noting.pair.Renew();
      for (Side *side : {&noting.pair.ours, &noting.pair.theirs}) {
        Param &p = side->params[1].param;
        const bool halves = p.combo.param != TX_F32;
        if (only_a_sign_of_zero) {
          if (halves) p.param.data()[2 * 4096 + 1] ^= 0x80;
        } else {
          for (const int64_t i : {int64_t{4096}, p.n - 3}) /* both are in samples */
            if (halves) p.param.data()[2 * i] ^= 1;
        }
      }
      tx_adamw_args args = Arguments();
      args.on_external_write = external;
      for (int step = 0; step < 2; step++)
        ASSERT_EQ(noting.Take(args), TX_OK);
      noting.ExpectEqual();
      const bool fp32 = GetParam().master == TX_F32, remainders = GetParam().master == TX_I16;
      const int64_t all = (2 * 4096 + 1500 + 127) / 128;
      EXPECT_EQ(noting.Unbounded(), remainders ? (only_a_sign_of_zero ? 8 : 8 + 4)
                                    : fp32 && external == TX_EXTERNAL_RESYNC && !only_a_sign_of_zero ? all
                                                                                                     : 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Extras, Kinds,
                         testing::Values(kF32, kBf16, kRemainder, kBlocks, kHalf,
                                         Combo{TX_F16, TX_NONE, TX_F32, TX_F16, TX_U8},
                                         Combo{TX_BF16, TX_F32, TX_F32, TX_F32, TX_F32},
                                         Combo{TX_BF16, TX_NONE, TX_BF16, TX_BF16, TX_BF16}),
                         [](const auto &info) { return adamw_call::Name(info.param); });

TEST_F(Emulated, MoreTensorsThanOneLaunchTakes) {
  Noting noting;
  for (int64_t i = 0; i < 400; i++)
    noting.Add(i % 2 ? kBf16 : kRemainder, 1 + i % 40);
  for (int step = 0; step < 2; step++)
    ASSERT_EQ(noting.Take(), TX_OK);
  EXPECT_LE(emulated::world.launches, 2 * 4);
  noting.ExpectEqual();
}

TEST_F(Emulated, AStepThatIsNotTakenLeavesNothingBehind) {
  Noting noting;
  noting.Add(kBf16, 1300);
  ASSERT_EQ(noting.Take(), TX_OK);
  float found = 1.0f;
  tx_adamw_args args = Arguments();
  args.found_inf = {&found, 1, TX_F32, 0};
  const auto ema = noting.ours[0].ema.copy();
  const auto health = noting.ours[0].health;
  ASSERT_EQ(noting.Take(args), TX_OK);
  EXPECT_EQ(noting.pair.ours.skipped, 1);
  EXPECT_TRUE(noting.ours[0].ema.copy() == ema && noting.ours[0].health == health);
  noting.ExpectEqual();
}

// A captured launch reads the step number from the device, and decides by it whether to average.
TEST_F(Emulated, IsCaptured) {
  emulated::world.capturing = true;
  Noting noting;
  noting.every = 2;
  noting.Add(kBlocks, 1300, 0, true);
  noting.Add(kBf16, 1300, 0, true);
  noting.pair.Renew();
  float rate = 1e-2f;
  const tx_tensor lr = {&rate, 1, TX_F32, 0};
  tx_adamw_args args = Arguments();
  args.lrs = &lr;
  args.on_external_write = TX_EXTERNAL_RESYNC;
  for (int step = 0; step < 5; step++)
    ASSERT_EQ(noting.Take(args), TX_OK);
  EXPECT_EQ(emulated::world.synchronisations, 0);
  noting.ExpectEqual();
}

// The sums of a measured step, to which the tiles of many warps add, are read like the CPU's.
TEST_F(Emulated, HealthIsRead) {
  Noting noting({false, false, false, true, EmaFormat::kNone});
  noting.Add(kBf16, 50000);
  ASSERT_EQ(noting.Take(), TX_OK);
  tx_health found = {};
  found.size = sizeof found;
  ASSERT_EQ(tx_health_of({noting.ours[0].health.data(), TX_HEALTH_LEN, TX_I64, 0}, &found, nullptr), TX_OK);
  EXPECT_EQ(found.elements, 50000);
  EXPECT_NEAR(found.weight_rms, 1.0, 0.05);
  noting.ExpectEqual();
}

}  // namespace
