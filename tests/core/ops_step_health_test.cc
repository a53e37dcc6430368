// The health numbers of a measured tx_adamw step, compared with sums in double over the weights before and after it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "tests/core/adamw_call.h"
#include "tests/core/extreme.h"
#include "tests/core/same_bits.h"

extern "C" {
#include "csrc/math/health.h"
}

namespace {

using namespace adamw_call;

tx_status Step(Param &p, std::vector<int64_t> &row, double lr, const tx_parallel *parallel, tx_error *error) {
  Call call;
  call.group.lr = lr;
  call.Add(p);
  const tx_tensor health = {row.data(), static_cast<int64_t>(row.size()), TX_I64, 0};
  tx_adamw_args args = *call.Args();
  args.healths = &health;
  return tx_adamw(&args, parallel, error);
}

tx_health Read(std::vector<int64_t> &row) {
  tx_health found = TX_HEALTH_INIT;
  EXPECT_EQ(tx_health_of({row.data(), TX_HEALTH_LEN, TX_I64, 0}, &found, nullptr), TX_OK);
  return found;
}

class EveryRow : public testing::TestWithParam<Combo> {};

TEST_P(EveryRow, SumsAreThoseOfDouble) {
  for (const double lr : {1e-2, 1e-4, 1e-6}) {
    const Combo c = GetParam();
    Param p(c, 5000);
    p.Fill(3);
    std::vector<double> before;
    for (int64_t i = 0; i < p.n; i++)
      before.push_back(p.Master(i));
    const auto weights = p.param.copy();
    std::vector<int64_t> row(TX_HEALTH_LEN);
    ASSERT_EQ(Step(p, row, lr, nullptr, nullptr), TX_OK);
    double updates = 0, sizes = 0, largest = 0;
    int64_t moved = 0, below = 0;
    const int digits = c.param == TX_BF16 ? 8 : c.param == TX_F16 ? 11 : 24;
    const int64_t size = Size(c.param);
    for (int64_t i = 0; i < p.n; i++) {
      const double now = p.Master(i), update = now - before[i];
      updates += update * update, sizes += now * now, largest = std::max(largest, std::fabs(now));
      moved += std::memcmp(p.param.data() + size * i, weights.data() + size * i, static_cast<size_t>(size)) != 0;
      below += std::fabs(update) < std::ldexp(1.0, std::max(c.param == TX_F16 ? -14 : -126, std::ilogb(now)) - digits);
    }
    const tx_health found = Read(row);
    EXPECT_EQ(found.elements, p.n);
    EXPECT_NEAR(found.update_rms, std::sqrt(updates / 5000), 1e-6 * std::sqrt(updates / 5000));
    EXPECT_NEAR(found.weight_rms, std::sqrt(sizes / 5000), 1e-6 * std::sqrt(sizes / 5000));
    EXPECT_EQ(found.largest, largest);
    EXPECT_EQ(found.moved, moved / 5000.0);
    EXPECT_EQ(found.below, below / 5000.0);
  }
}

TEST_P(EveryRow, BitsDependOnNoInstructionSetNorThread) {
  ExpectSameBits([&](const Caller &call) {
    Outputs all;
    for (const int64_t n : {1, 129, 1100, 2 * 16384 + 333}) {
      Param p(GetParam(), n, n % 2);
      p.Fill(static_cast<uint32_t>(n));
      std::vector<int64_t> row(TX_HEALTH_LEN);
      for (int step = 0; step < 2; step++)
        call([&](const tx_parallel *parallel, tx_error *error) { return Step(p, row, 1e-2, parallel, error); });
      const auto *bytes = reinterpret_cast<const uint8_t *>(row.data());
      all.push_back({bytes, bytes + 8 * row.size()});
    }
    return all;
  });
}

INSTANTIATE_TEST_SUITE_P(Rows, EveryRow,
                         testing::Values(kF32, kBf16, kRemainder, kBlocks,
                                         Combo{TX_F16, TX_F32, TX_F16, TX_F16, TX_F16},
                                         Combo{TX_BF16, TX_NONE, TX_BF16, TX_BF16, TX_BF16}),
                         [](const auto &info) { return Name(info.param); });

// tx_square_added has to equal fma, which it emulates in double if the processor has none. Many of these squares lie
// exactly between two fp32 numbers, and the addend, which decides the rounding, is too small for a double sum.
TEST(StepHealth, ASquareIsAddedAsByFma) {
  extreme::Random random(1);
  const auto pattern = [&random](uint32_t mantissa, int exponent) {
    return tx_f32_from_bits((random.Below(1u << 23) & mantissa) | static_cast<uint32_t>(exponent) << 23);
  };
  for (int turn = 0; turn < 1000000; turn++) {
    const uint32_t few = turn % 2 ? 0x7ff800u : 0x7fffffu; /* half of the squares lie exactly between two numbers */
    const float x = pattern(few, static_cast<int>(random.Below(255)));
    const int near = 2 * std::max(std::ilogb(x), -200) + 127 + static_cast<int>(random.Below(100)) - 80;
    const float sum = pattern(0x7fffffu, std::min(std::max(near, 0), 254));
    const float found = tx_square_added(sum, x), expected = std::fma(x, x, sum);
    ASSERT_EQ(tx_bits_from_f32(found), tx_bits_from_f32(expected)) << x << ' ' << sum;
  }
}

// From the smallest squares to those that overflow, which are reported instead of added.
TEST(StepHealth, SumsOfAnySize) {
  for (const int exponent : {-70, -40, 0, 30, 63}) {
    Param p(kF32, 256);
    for (int64_t i = 0; i < p.n; i++) {
      tx_store(p.param.data(), i, TX_F32, std::ldexp(1.5f, exponent));
      tx_store(p.grad.data(), i, TX_F32, 0.0f);
    }
    std::vector<int64_t> row(TX_HEALTH_LEN);
    ASSERT_EQ(Step(p, row, 0.0, nullptr, nullptr), TX_OK);
    const tx_health found = Read(row);
    EXPECT_EQ(found.largest, std::ldexp(1.5, exponent));
    if (exponent > 60) {
      EXPECT_TRUE(std::isnan(found.update_rms) && std::isnan(found.weight_rms));
    } else {
      EXPECT_EQ(found.update_rms, 0.0);
      EXPECT_NEAR(found.weight_rms / std::ldexp(1.5, exponent), 1.0, exponent < -60 ? 1e-2 : 1e-6);
    }
  }
}

}  // namespace
