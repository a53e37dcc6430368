// tx_dither_lag: the reduction of 1 - beta2 for exp_avg_sq in dithered 8-bit codes, and a simulation that shows why it
// is needed.
#include <gtest/gtest.h>

#include <cmath>

extern "C" {
#include "csrc/math/dither.h"
#include "csrc/math/dither_lag.h"
}

namespace {

TEST(DitherLag, IsOfDitheredEightBitCodesOnly) {
  for (int32_t dtype : {TX_F32, TX_BF16, TX_F16, TX_U8}) {
    for (int32_t rounding : {TX_NEAREST, TX_STOCHASTIC, TX_DITHERED}) {
      const double lag = tx_dither_lag(dtype, rounding, 0.999, 100000);
      EXPECT_EQ(lag > 0.0, dtype == TX_U8 && rounding == TX_DITHERED) << dtype << " " << rounding;
    }
  }
}

TEST(DitherLag, FadesWhereAStepMovesVByACode) {
  const auto lag = [](double beta2, int64_t step) { return tx_dither_lag(TX_U8, TX_DITHERED, beta2, step); };
  for (int64_t step = 1; step <= 11; step++)
    EXPECT_EQ(lag(0.999, step), 0.0) << step;
  for (double beta2 : {0.0, 0.5, 0.9})
    EXPECT_EQ(lag(beta2, 1000000), 0.0) << beta2;
  for (int64_t step = 1; step < 10000; step++)
    ASSERT_LE(lag(0.9999, step), lag(0.9999, step + 1)) << step;
  EXPECT_NEAR(lag(0.9999, 1000000), TX_E4M4_LAG, 1e-4);
  EXPECT_LT(lag(0.95, 1000), lag(0.99, 1000));
}

// x rounded by threshold to 16 numbers per octave.
float Rounded(float x, uint32_t u) {
  const uint32_t bits = tx_bits_from_f32(x) + (u >> 13);
  return tx_f32_from_bits(bits & ~0x7ffffu);
}

// How much faster sqrt(v) decays than exactly, over `octaves` without gradients, as a fraction.
double Excess(double beta2, double octaves, bool corrected) {
  const int kElements = 512;
  const auto steps = static_cast<int64_t>(octaves * 2 * std::log(2.0) / (1.0 - beta2));
  double fallen = 0;
  for (uint32_t i = 0; i < kElements; i++) {
    const float first = Rounded(std::exp2(static_cast<float>(i) / kElements), tx_mix32(i));
    float root = first;
    for (int64_t t = 0; t < steps; t++) {
      const double lag = corrected ? tx_dither_lag(TX_U8, TX_DITHERED, beta2, 1000 + t) : 0.0;
      root = Rounded(root * static_cast<float>(std::sqrt(1.0 - (1.0 - beta2) * (1.0 - lag))),
                     i * TX_LATTICE_ELEMENT + static_cast<uint32_t>(t) * TX_LATTICE_STEP);
    }
    fallen += std::log(static_cast<double>(root) / first) / kElements;
  }
  return fallen / (static_cast<double>(steps) * std::log(beta2) / 2) - 1;
}

TEST(DitherLag, SteadyDecaysAreCloserToTheTruth) {
  for (double beta2 : {0.95, 0.98, 0.99, 0.995, 0.997, 0.998, 0.999, 0.9995}) {
    const double without = Excess(beta2, 6, false), with = Excess(beta2, 6, true);
    EXPECT_GT(without, 0.015) << beta2; /* there is a lag to correct */
    EXPECT_GT(with, 0.0) << beta2;      /* it is not over-corrected */
    EXPECT_LT(with, 0.9 * without) << beta2;
  }
}

// 0.995 and 0.998 are left out: there the lattice's intervals coincide with changes of spacing, which adds an error
// that no constant corrects.
TEST(DitherLag, MostSteadyDecaysAreRightWithinAHundredth) {
  for (double beta2 : {0.95, 0.98, 0.99, 0.997, 0.999})
    EXPECT_NEAR(Excess(beta2, 6, true), 0.0, 0.01) << beta2;
}

}  // namespace
