// The averages of masters that tx_adamw keeps: compared with a reference in plain C++, and with float64 over many
// steps.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "tests/core/adamw_call.h"
#include "tests/core/same_bits.h"

extern "C" {
#include "csrc/math/ema.h"
}

namespace {

using namespace adamw_call;

enum class EmaFormat { kBf16, k24, kF32 };
const char *const kNames[] = {"bf16", "24", "fp32"};

struct Averaged {
  Param p;
  EmaFormat kept;
  Bytes ema, low;
  double decay = 0.999;
  int64_t every = 1;

  Averaged(const Combo &c, int64_t n, EmaFormat kept, int64_t misalign = 0)
      : p(c, n, misalign),
        kept(kept),
        ema(n * (kept == EmaFormat::kF32 ? 4 : 2), misalign),
        low(kept == EmaFormat::k24 ? n : 0, misalign) {
    p.Fill(static_cast<uint32_t>(n));
  }

  tx_status Step(double lr, const tx_parallel *parallel, tx_error *error, int64_t id = 7) {
    Call call;
    call.group.lr = lr;
    call.Add(p, id);
    const tx_tensor average = T(ema, kept == EmaFormat::kF32 ? TX_F32 : TX_BF16), lower = T(low, TX_U8);
    tx_adamw_args args = *call.Args();
    args.emas = &average, args.ema_lows = &lower, args.ema_decay = decay, args.ema_every = every;
    return tx_adamw(&args, parallel, error);
  }
  float Master(int64_t i) { return p.Master(i); }
  float Average(int64_t i) {
    if (kept != EmaFormat::k24) return Get(kept == EmaFormat::kF32 ? TX_F32 : TX_BF16, ema.data(), i);
    uint16_t upper;
    std::memcpy(&upper, ema.data() + 2 * i, 2);
    return tx_f32_from_bits(static_cast<uint32_t>(upper) << 16 | static_cast<uint32_t>(low.data()[i]) << 8);
  }
  std::vector<std::vector<uint8_t>> Left() const {
    auto all = p.State();
    all.push_back(ema.copy());
    all.push_back(low.copy());
    return all;
  }
};

std::vector<Combo> Rows() {
  return {kF32, kBf16, kRemainder, kBlocks, {TX_F16, TX_F32, TX_F16, TX_F16, TX_F16}};
}

class EveryRow : public testing::TestWithParam<std::tuple<Combo, EmaFormat>> {};

TEST_P(EveryRow, BitsDependOnNoInstructionSetNorThread) {
  const auto [combo, kept] = GetParam();
  ExpectSameBits([&](const Caller &call) {
    Outputs all;
    for (const int64_t n : {1, 129, 1100, 2 * 16384 + 333}) {
      Averaged a(combo, n, kept, n % 2);
      for (uint32_t step = 0; step < 4; step++) {
        a.p.FillGrad(step);
        call([&](const tx_parallel *parallel, tx_error *error) { return a.Step(1e-2, parallel, error); });
      }
      for (auto &bytes : a.Left())
        all.push_back(bytes);
    }
    return all;
  });
}

// One update from the previous state: fp32 exactly; the narrower formats give one of the two neighbours, and the right
// mean.
TEST_P(EveryRow, AnAverageGoesTowardsTheMasterByTheShareThatDecayLeaves) {
  const auto [combo, kept] = GetParam();
  Averaged a(combo, 3000, kept);
  ASSERT_EQ(a.Step(1e-1, nullptr, nullptr), TX_OK);
  const double ulp = kept == EmaFormat::kBf16 ? 0x1p-7 : 0x1p-15;
  for (int64_t i = 0; i < a.p.n; i++) /* the first average is the master itself */
    ASSERT_LE(std::fabs(a.Average(i) - a.Master(i)), kept == EmaFormat::kF32 ? 0.0 : ulp * std::fabs(a.Master(i)));
  for (uint32_t step = 0; step < 5; step++) {
    std::vector<float> before;
    for (int64_t i = 0; i < a.p.n; i++)
      before.push_back(a.Average(i));
    a.p.FillGrad(step);
    ASSERT_EQ(a.Step(1e-1, nullptr, nullptr), TX_OK);
    double mean = 0, moved = 0;
    for (int64_t i = 0; i < a.p.n; i++) {
      const float weight = static_cast<float>(1.0 - a.decay);
      const double want = before[i] + static_cast<double>(weight) * (static_cast<double>(a.Master(i)) - before[i]);
      if (kept == EmaFormat::kF32) {
        ASSERT_EQ(a.Average(i), before[i] + weight * (a.Master(i) - before[i])) << i;
      }
      ASSERT_LE(std::fabs(a.Average(i) - want), ulp * std::fabs(want) * 1.001 + 1e-38) << i;
      const double sign = a.Master(i) > before[i] ? 1 : -1;
      mean += sign * (a.Average(i) - before[i]);
      moved += sign * (want - before[i]);
    }
    /* the mean is right even for small changes */
    EXPECT_NEAR(mean / moved, 1.0, kept == EmaFormat::kBf16 ? 0.6 : 0.01);
  }
}

INSTANTIATE_TEST_SUITE_P(Rows, EveryRow,
                         testing::Combine(testing::ValuesIn(Rows()),
                                          testing::Values(EmaFormat::kBf16, EmaFormat::k24, EmaFormat::kF32)),
                         [](const auto &info) {
                           return Name(std::get<0>(info.param)) + "_ema_" +
                                  kNames[static_cast<int>(std::get<1>(info.param))];
                         });

// With ema_every = 2 only every second step updates the average, with an unchanged decay.
TEST(StepEma, OtherStepsLeaveItAlone) {
  Averaged a(kBf16, 500, EmaFormat::kF32);
  a.every = 2;
  for (int step = 1; step <= 6; step++) {
    const auto before = a.ema.copy();
    ASSERT_EQ(a.Step(1e-2, nullptr, nullptr), TX_OK);
    EXPECT_EQ(a.ema.copy() == before, step % 2 == 1) << step;
    if (step != 2) continue;
    for (int64_t i = 0; i < a.p.n; i++)
      ASSERT_EQ(a.Average(i), a.Master(i));
  }
}

// rms(error) / rms(average) compared with float64, after 100000 steps with decay 0.9999.
TEST(StepEma, AfterManyStepsItIsTheAverage) {
#ifdef TX_SLOW
  const int64_t steps = 3000;
#else
  const int64_t steps = 100000;
#endif
  const int64_t n = 1024;
  const struct {
    EmaFormat kept;
    double most;
  } rows[] = {{EmaFormat::kBf16, 0.008}, {EmaFormat::k24, 0.0002}};
  for (const auto &row : rows) {
    Averaged a({TX_F32, TX_NONE, TX_F32, TX_F32, TX_F32}, n, row.kept);
    a.decay = 0.9999;
    std::vector<double> wanted(static_cast<size_t>(n));
    std::vector<Bytes> pool;
    for (uint32_t i = 0; i < 61; i++) {
      a.p.FillGrad(1000 + i);
      pool.push_back(a.p.grad);
    }
    for (int64_t step = 0; step < steps; step++) {
      a.p.grad = pool[static_cast<size_t>((step * 17 + step / 61) % 61)];
      ASSERT_EQ(a.Step(1e-3, nullptr, nullptr), TX_OK);
      for (int64_t i = 0; i < n; i++) {
        const double master = Get(TX_F32, a.p.param.data(), i);
        wanted[i] = step == 0 ? master : wanted[i] + (1 - a.decay) * (master - wanted[i]);
      }
    }
    double error = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
      error += std::pow(a.Average(i) - wanted[i], 2);
      size += std::pow(wanted[i], 2);
    }
    RecordProperty(row.kept == EmaFormat::kBf16 ? "bf16" : "24bit", std::to_string(std::sqrt(error / size)));
    std::printf("%s: rms(error) / rms(average) after %lld steps %.6f\n",
                row.kept == EmaFormat::kBf16 ? "bf16" : "24bit", static_cast<long long>(steps),
                std::sqrt(error / size));
    EXPECT_LT(std::sqrt(error / size), row.most);
  }
}

// Rounding to 24 bits. A number that fits stays, whatever the threshold. The mean over all thresholds is the exact sum,
// including the part that fp32 cannot hold. Inf, NaN and the largest numbers are kept.
TEST(StepEma, RoundingTo24BitsIsOfTheSumItself) {
  const float numbers[] = {1.0f, -1.0f, 1.9999f, 3e-5f, -7e10f};
  for (const float x : numbers) {
    const float base = tx_f32_from_bits(tx_bits_from_f32(x) & 0xffffff00u), ulp = std::ldexp(1.0f, std::ilogb(x) - 15);
    for (const float share : {0.0f, 0.001f, 0.25f, 0.9f, -0.002f, -0.5f}) {
      double mean = 0;
      const int count = 1 << 14;
      for (int u = 0; u < count; u++) {
        const uint32_t bits = tx_ema_round_24(base, share * ulp, static_cast<uint32_t>(u) << 18);
        mean += static_cast<double>(tx_f32_from_bits(bits & 0xffffff00u)) / count;
      }
      EXPECT_NEAR((mean - base) / ulp, share, 2e-4) << x << " " << share;
    }
  }
  for (const uint32_t u : {0u, 0x80000000u, 0xffffffffu}) {
    const auto kept = [&](float x, float change) {
      return tx_f32_from_bits(tx_ema_round_24(x, change, u) & 0xffffff00u);
    };
    EXPECT_EQ(kept(INFINITY, 1.0f), INFINITY);
    EXPECT_EQ(tx_ema_round_24(1.0f, NAN, u) >> 8, 0x7fc000u);
    EXPECT_TRUE(std::isfinite(kept(3.4028e38f, 1e31f)));
    EXPECT_EQ(kept(0.0f, 0.0f), 0.0f);
    EXPECT_EQ(kept(0x1p-140f, 0.0f), 0x1p-140f);
  }
}

TEST(StepEma, WhatCannotBeAveragedIsRefused) {
  Averaged a({TX_BF16, TX_NONE, TX_BF16, TX_BF16, TX_BF16}, 300, EmaFormat::kBf16);
  tx_error error;
  EXPECT_EQ(a.Step(1e-2, nullptr, &error), TX_ERROR_DTYPE);
  EXPECT_NE(std::string(error.message).find("emas[0] for params[0] of bf16 without a master"), std::string::npos);
  Averaged b(kBf16, 300, EmaFormat::kBf16);
  b.decay = 1.0;
  EXPECT_EQ(b.Step(1e-2, nullptr, &error), TX_ERROR_ILLEGAL_VALUE) << error.message;
  b.decay = 0.9, b.every = 0;
  EXPECT_EQ(b.Step(1e-2, nullptr, &error), TX_ERROR_ILLEGAL_VALUE) << error.message;
}

}  // namespace
