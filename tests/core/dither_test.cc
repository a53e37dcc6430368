// Rounding thresholds: fixed values, independence of shards, equidistribution over steps, and what dithering improves.
#include "csrc/math/dither.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <vector>

#include "tests/core/sweep.h"

namespace {

constexpr tx_lane kLanes[] = {TX_LANE_EXP_AVG, TX_LANE_EXP_AVG_SQ, TX_LANE_PARAM, TX_LANE_WIRE, TX_LANE_CAST};

// These numbers must never change: a run resumed from a checkpoint has to get the same thresholds.
TEST(Dither, ValuesArePinned) {
  EXPECT_EQ(tx_lattice_base(0, 0, TX_LANE_EXP_AVG, 0, 0), 0x33fe8bd4u);
  EXPECT_EQ(tx_lattice_base(1234, 987654321, TX_LANE_PARAM, 1000, 65536), 0x0473ca33u);
  EXPECT_EQ(tx_stochastic(tx_stochastic_key(0, 0, TX_LANE_EXP_AVG, 0), 0), 0xbe00bb7bu);
  EXPECT_EQ(tx_stochastic(tx_stochastic_key(1234, 987654321, TX_LANE_PARAM, 1000), 65536), 0x1a54dd5au);
}

TEST(Dither, AShardHasTheThresholdsOfTheWhole) {
  const int64_t past_32_bits = (int64_t{1} << 33) + 384;
  for (const int64_t start : {int64_t{0}, int64_t{1}, int64_t{128}, int64_t{4294967295}, past_32_bits}) {
    const uint32_t whole = tx_lattice_base(7, 11, TX_LANE_WIRE, 3, 0);
    const uint32_t shard = tx_lattice_base(7, 11, TX_LANE_WIRE, 3, start);
    for (const uint32_t j : {0u, 1u, 127u, 128u, 100000u}) {
      EXPECT_EQ(tx_dithered(shard, j), tx_dithered(whole, static_cast<uint32_t>(start) + j)) << start << " " << j;
    }
  }
}

TEST(Dither, EverySeedIdAndLaneHasAStreamOfItsOwn) {
  std::set<uint32_t> bases;
  std::set<uint64_t> keys;
  size_t n = 0;
  for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32, ~uint64_t{0}}) {
    for (const int64_t id : {int64_t{0}, int64_t{1}, int64_t{1} << 32, INT64_MAX}) {
      for (const tx_lane lane : kLanes) {
        for (const int64_t step : {int64_t{1}, int64_t{2}, int64_t{1} << 32}) {
          bases.insert(tx_lattice_base(seed, id, lane, step, 0));
          const tx_noise_key key = tx_stochastic_key(seed, id, lane, step);
          keys.insert(uint64_t{key.a} << 32 | key.b);
          ++n;
        }
      }
    }
  }
  EXPECT_EQ(bases.size(), n);
  EXPECT_EQ(keys.size(), n);
}

// The largest difference between x and the share of thresholds below x.
double Discrepancy(std::vector<uint32_t> u) {
  std::sort(u.begin(), u.end());
  double worst = 0;
  const auto n = static_cast<double>(u.size());
  for (size_t i = 0; i < u.size(); ++i) {
    const double x = u[i] / 4294967296.0;
    worst = std::max({worst, x - static_cast<double>(i) / n, static_cast<double>(i + 1) / n - x});
  }
  return worst;
}

// Over n steps or n elements, a lattice's discrepancy is a few times 1/n; that of random numbers is 1/sqrt(n).
TEST(Dither, ThresholdsAreEquidistributedOverStepsAndOverElements) {
  const int n = 1000;
  for (const uint32_t element : {0u, 1u, 12345u}) {
    std::vector<uint32_t> over_steps, over_elements;
    for (int i = 0; i < n; ++i) {
      over_steps.push_back(tx_dithered(tx_lattice_base(5, 6, TX_LANE_EXP_AVG, 1 + i, 0), element));
      over_elements.push_back(
          tx_dithered(tx_lattice_base(5, 6, TX_LANE_EXP_AVG, 1, element), static_cast<uint32_t>(i)));
    }
    EXPECT_LT(Discrepancy(over_steps), 5.0 / n);
    EXPECT_LT(Discrepancy(over_elements), 5.0 / n);
  }
}

TEST(Dither, StochasticThresholdsLookUniformAndIndependent) {
  const uint32_t n = 1u << 16;
  std::vector<uint32_t> u;
  double product = 0, over_steps = 0;
  const tx_noise_key now = tx_stochastic_key(5, 6, TX_LANE_EXP_AVG, 1),
                     next = tx_stochastic_key(5, 6, TX_LANE_EXP_AVG, 2);
  int bits[32] = {0};
  for (uint32_t i = 0; i < n; ++i) {
    u.push_back(tx_stochastic(now, i));
    const double centred = u[i] / 4294967296.0 - 0.5;
    if (i > 0) product += centred * (u[i - 1] / 4294967296.0 - 0.5);
    over_steps += centred * (tx_stochastic(next, i) / 4294967296.0 - 0.5);
    for (int b = 0; b < 32; ++b)
      bits[b] += u[i] >> b & 1;
  }
  const double sigma = std::sqrt(n) / 12.0;
  EXPECT_LT(std::fabs(product), 4 * sigma);
  EXPECT_LT(std::fabs(over_steps), 4 * sigma);
  for (int b = 0; b < 32; ++b)
    EXPECT_NEAR(bits[b], n / 2.0, 4 * std::sqrt(n) / 2) << b;
  EXPECT_LT(Discrepancy(u), 2.0 / std::sqrt(n));
  EXPECT_GT(Discrepancy(u), 0.2 / std::sqrt(n)); /* a hash, not a lattice */
}

// What dithering is for: an exponential average with beta 0.999 kept in bf16, of squares of normal numbers that shrink
// tenfold. With nearest rounding the average stops moving. Thresholds keep its mean right, and the lattice adds less
// noise than the hash.
struct Averages {
  double mean;      // of v, divided by the true mean
  double step_rms;  // relative error of 1/sqrt(v) against fp32
};
template <typename Round>
Averages RunAverages(Round round) {
  const uint32_t n = 256;
  const int warm_up = 1000, after = 3000;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> exact(n, 1.0f), kept(n, 1.0f);
  for (int t = 1; t <= warm_up + after; ++t) {
    for (uint32_t i = 0; i < n; ++i) {
      const float g = normal(random) * (t > warm_up ? 0.1f : 1.0f);
      exact[i] += 0.001f * (g * g - exact[i]);
      kept[i] = tx_f32_from_bf16(round(kept[i] + 0.001f * (g * g - kept[i]), t, i));
    }
  }
  Averages result = {0, 0};
  for (uint32_t i = 0; i < n; ++i) {
    result.mean += static_cast<double>(kept[i]) / n;
    const double ratio = std::sqrt(static_cast<double>(exact[i] / kept[i])) - 1;
    result.step_rms += ratio * ratio / n;
  }
  double true_mean = 0;
  for (const float v : exact)
    true_mean += static_cast<double>(v) / n;
  return {result.mean / true_mean, std::sqrt(result.step_rms)};
}

TEST(Dither, ASlowAverageMovesInBf16) {
  const Averages nearest = RunAverages([](float x, int, uint32_t) { return tx_bf16_from_f32(x); });
  const Averages stochastic = RunAverages([](float x, int t, uint32_t i) {
    return tx_bf16_round(x, tx_stochastic(tx_stochastic_key(1, 2, TX_LANE_EXP_AVG_SQ, t), i));
  });
  const Averages dithered = RunAverages([](float x, int t, uint32_t i) {
    return tx_bf16_round(x, tx_dithered(tx_lattice_base(1, 2, TX_LANE_EXP_AVG_SQ, t, 0), i));
  });
  EXPECT_GT(nearest.mean, 2.0);
  EXPECT_NEAR(stochastic.mean, 1.0, 0.02);
  EXPECT_NEAR(dithered.mean, 1.0, 0.01);
  EXPECT_LT(dithered.step_rms, 0.02);
  EXPECT_LT(dithered.step_rms, stochastic.step_rms / 1.5);
}

}  // namespace
