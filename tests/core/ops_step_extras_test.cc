// Each optional output of a step is independent of the other outputs and of the loops that compute it. Runs random
// programs, including weights that the vectorised loops leave to scalar code. If distances are requested, everything
// else is computed together with them from copies of the weights, without vectorised loops: that is the reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "tests/core/adamw_call.h"
#include "tests/core/extreme.h"
#include "tests/core/threads.h"

extern "C" {
#include "csrc/math/health.h"
}

namespace {

using namespace adamw_call;
using extreme::Random;

enum Average { kNone, kBf16Average, k24Average, kF32Average };

struct Asked {
  bool changed, distances, health;
  Average average;
};

// A number that is legal but rare in weights and averages.
float Rare(Random &random) {
  const float inf = std::numeric_limits<float>::infinity();
  const float values[] = {0.0f, -0.0f, inf, -inf, std::nanf(""), 3e38f, -3.3e38f, 0x1p126f, 1e-45f, -1e-39f, 1e-20f};
  return random.Below(3) ? random.Of(values) : random.Finite();
}

// A number for a block. rarity: 0 for none, else one number in `rarity` is rare.
float Number(Random &random, uint32_t rarity) {
  return rarity && random.Below(rarity) == 0 ? Rare(random) : random.Normal();
}

struct Program {
  Param p;
  Bytes average, low;
  int64_t every;
  double decay;
  Bytes changed, moved, distances;
  std::vector<int64_t> health = std::vector<int64_t>(TX_HEALTH_LEN);

  Program(const Combo &c, int64_t n, int64_t misalign, Random &random)
      : p(c, n, misalign),
        average(4 * n, misalign),
        low(n, misalign),
        every(1 + random.Below(2)),
        decay(random.Below(2) ? 0.99 : 0.5),
        changed((n + 7) / 8, misalign),
        moved(2 * ((n + 127) / 128), misalign),
        distances((n + 1) / 2, misalign) {
    uint32_t rarity = 0;
    for (int64_t i = 0; i < n; i++) {
      const uint32_t rarities[] = {0, 0, 100, 3};
      if (i % 128 == 0) rarity = random.Of(rarities);
      const float weight = Number(random, rarity);
      tx_store(p.param.data(), i, c.param, weight);
      const uint16_t low_half = static_cast<uint16_t>(rarity && random.Below(8) == 0 ? 0x8000 : random.Below(0x10000));
      const uint16_t remainder = c.master == TX_I16 && std::isfinite(weight) && weight != 0 ? low_half : 0;
      if (c.master == TX_F32) std::memcpy(p.master.data() + 4 * i, &weight, 4);
      if (c.master == TX_I16) std::memcpy(p.master.data() + 2 * i, &remainder, 2);
    }
    p.FillGrad(random.Below(1000));
    for (int64_t i = 0; i < n; i++)
      low.data()[i] = static_cast<uint8_t>(random.Below(256));
  }

  void FillAverage(Random &random, enum Average kind) {
    for (int64_t i = 0; i < p.n; i++)
      tx_store(average.data(), i, kind == kF32Average ? TX_F32 : TX_BF16, Number(random, 40 * (i / 128 % 3)));
  }

  tx_status Step(const Asked &asked, double lr, const tx_parallel *parallel, tx_error *error) {
    Call call;
    call.group.lr = lr;
    call.Add(p);
    const bool is_f32 = asked.average == kF32Average;
    const tx_tensor lists[] = {T(changed, TX_U8),   T(moved, TX_BF16),
                               T(distances, TX_U8), {average.data(), p.n, is_f32 ? TX_F32 : TX_BF16, 0},
                               T(low, TX_U8),       {health.data(), TX_HEALTH_LEN, TX_I64, 0}};
    tx_adamw_args args = *call.Args();
    if (asked.changed) args.changed = &lists[0], args.moved = &lists[1];
    if (asked.distances) args.distances = &lists[2];
    if (asked.average != kNone) args.emas = &lists[3], args.ema_decay = decay, args.ema_every = every;
    if (asked.average == k24Average) args.ema_lows = &lists[4];
    if (asked.health) args.healths = &lists[5];
    return tx_adamw(&args, parallel, error);
  }
};

void ExpectSame(const Program &found, const Program &expected, const Asked &asked) {
  EXPECT_TRUE(found.p.State() == expected.p.State());
  if (asked.changed) {
    EXPECT_TRUE(found.changed.copy() == expected.changed.copy());
    EXPECT_TRUE(found.moved.copy() == expected.moved.copy());
  }
  EXPECT_TRUE(!asked.distances || found.distances.copy() == expected.distances.copy());
  EXPECT_TRUE(asked.average == kNone || found.average.copy() == expected.average.copy());
  EXPECT_TRUE(asked.average != k24Average || found.low.copy() == expected.low.copy());
  for (int32_t k = 0; asked.health && k < TX_HEALTH_LEN; k++)
    EXPECT_EQ(found.health[k], expected.health[k]) << "health, number " << k;
}

std::vector<Combo> Rows() {
  std::vector<Combo> rows;
#define ROW(i, P, M, ...) rows.push_back({TX_##P, TX_##M, TX_BF16, TX_BF16, TX_BF16});
  TX_FOR_EACH_WEIGHT(ROW, )
#undef ROW
  rows.push_back(kF32);
  rows.push_back(kBlocks);
  rows.push_back({TX_BF16, TX_I16, TX_F32, TX_U8, TX_U8});
  rows.push_back({TX_BF16, TX_F32, TX_BF16, TX_U8, TX_U8});
  return rows;
}

class EveryRow : public testing::TestWithParam<Combo> {};

void RunProgram(const Combo &row, uint32_t seed) {
  Random random(seed);
  const int64_t lengths[] = {1, 127, 128, 300, 1024, 1400, 3 * 1024 + 77, 3 * 4096 + 640};
  const double lrs[] = {1e-2, 1e-4, 1e-6, 0.0};
  const double lr = random.Of(lrs);
  const Average kinds[] = {kNone, kBf16Average, k24Average, kF32Average};
  const bool has_average = row.master != TX_NONE || row.param == TX_F32;
  const Average kind = has_average ? random.Of(kinds) : kNone;
  Program begun(row, random.Of(lengths), random.Below(2), random);
  begun.FillAverage(random, kind);
  const Asked all = {true, true, true, kind};
  Program expected = begun;
  ASSERT_EQ(tx_isa_select("base", nullptr), TX_OK);
  tx_error error = {};
  for (int step = 0; step < 4; step++)
    ASSERT_EQ(expected.Step(all, lr, nullptr, &error), TX_OK) << error.message;
  for (int32_t isa = 0; tx_isa_name(isa); isa++) {
    ASSERT_EQ(tx_isa_select(tx_isa_name(isa), nullptr), TX_OK);
    for (int turn = 0; turn < 4; turn++) {
      const Asked few[] = {{true, false, false, kNone}, {false, false, true, kNone}, {false, false, false, kind}};
      const bool changed = random.Below(2);
      const Asked some = {changed, changed && random.Below(3) == 0, random.Below(2) != 0,
                          random.Below(2) ? kind : kNone};
      const Asked asked = turn < 3 ? few[turn] : some;
      Program found = begun;
      Threads threads(1 + 2 * random.Below(2));
      for (int step = 0; step < 4; step++)
        ASSERT_EQ(found.Step(asked, lr, threads.parallel(), &error), TX_OK) << error.message;
      SCOPED_TRACE(std::string(tx_isa_name(isa)) + ", seed " + std::to_string(seed) + ", changed " +
                   std::to_string(asked.changed) + std::to_string(asked.distances) + ", health " +
                   std::to_string(asked.health) + ", average " + std::to_string(asked.average));
      ExpectSame(found, expected, asked);
    }
  }
  ASSERT_EQ(tx_isa_select(nullptr, nullptr), TX_OK);
}

TEST_P(EveryRow, EachIsWhatItIsAlone) {
  for (uint32_t seed = 0; seed < 40 && !HasFailure(); seed++)
    RunProgram(GetParam(), seed);
}

INSTANTIATE_TEST_SUITE_P(Rows, EveryRow, testing::ValuesIn(Rows()), [](const auto &info) { return Name(info.param); });

}  // namespace
