// tx_muon_momentum, compared with arithmetic in double that is independent of csrc/math.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "csrc/torch_ext.h"
#include "tests/core/muon_calls.h"

namespace {

struct Form {
  tx_dtype grad, momentum, work;
};
constexpr Form kForms[] = {{TX_F32, TX_F32, TX_F32},   {TX_BF16, TX_BF16, TX_BF16}, {TX_BF16, TX_BF16, TX_F32},
                           {TX_BF16, TX_F32, TX_BF16}, {TX_F32, TX_BF16, TX_F32},   {TX_F16, TX_U8, TX_F32},
                           {TX_BF16, TX_F16, TX_BF16}};

class EveryForm : public testing::TestWithParam<Form> {};

TEST_P(EveryForm, MomentumHasTheSameBitsEverywhere) {
  for (int nesterov : {0, 1}) {
    ExpectSameBits([&](const Caller &call) {
      Momentum m(GetParam().grad, GetParam().momentum, GetParam().work);
      m.args.nesterov = nesterov;
      return m.Run(call);
    });
  }
}

TEST_P(EveryForm, MomentumHasTheSameBitsPastTheCaches) {
  for (int nesterov : {0, 1}) {
    Outputs found[2];
    for (int more : {0, 1}) {
      Momentum m(GetParam().grad, GetParam().momentum, GetParam().work);
      m.args.nesterov = nesterov;
      if (more) m.AddMore();
      found[more] = m.Run(Caller(nullptr));
    }
    EXPECT_TRUE(found[0] == found[1]) << "nesterov " << nesterov;
  }
}
INSTANTIATE_TEST_SUITE_P(Muon, EveryForm, testing::ValuesIn(kForms));

// torch.optim.Muon's formula for three steps in fp32, for several momenta, clip coefficients and scales.
TEST(Momentum, FollowsTheFloat64Oracle) {
  for (double momentum : {0.0, 0.3, 0.95, 1.0}) {
    for (int nesterov : {0, 1}) {
      Momentum m(TX_F32, TX_F32, TX_F32);
      float clip = 0.5f, scale = 8.0f;
      m.args.momentum = momentum;
      m.args.nesterov = nesterov;
      m.args.clip_coef = {&clip, 1, TX_F32, 0};
      m.args.grad_scale = {&scale, 1, TX_F32, 0};
      std::vector<std::vector<double>> averages, largest; /* the largest gradient that an element had so far */
      for (int64_t numel : kNumels) {
        averages.emplace_back(static_cast<size_t>(numel));
        largest.emplace_back(static_cast<size_t>(numel));
      }
      for (int step = 0; step < 3; step++) {
        m.grads.Fill(50 + step, 1.0);
        tx_error error;
        ASSERT_EQ(tx_muon_momentum(m.Args(), nullptr, &error), TX_OK) << error.message;
        for (size_t t = 0; t < std::size(kNumels); t++) {
          for (int64_t i = 0; i < kNumels[t]; i++) {
            const double g = m.grads.At(t, i) * clip / scale, old = averages[t][static_cast<size_t>(i)];
            const double average = momentum * old + (1 - momentum) * g;
            const double u = nesterov ? momentum * average + (1 - momentum) * g : average;
            averages[t][static_cast<size_t>(i)] = average;
            double &most = largest[t][static_cast<size_t>(i)];
            most = std::max(most, std::fabs(g));
            ASSERT_LE(std::fabs(m.momentums.At(t, i) - average), most * std::ldexp(4.0, -23));
            ASSERT_LE(std::fabs(m.updates.At(t, i) - u), most * std::ldexp(6.0, -23));
          }
        }
      }
    }
  }
}

// In 8 bits (e3m4, dithered), the average of 1000 gradients that are mostly noise stays close to the average in double.
// With e4m3 the error would be 12 %.
TEST(Momentum, EightBitsKeepTheDirection) {
  Momentum m(TX_F32, TX_U8, TX_F32);
  const size_t t = 4;
  std::mt19937 random(7);
  std::normal_distribution<double> normal(0.0, 1.0);
  std::vector<double> signal(static_cast<size_t>(kNumels[t])), average(signal.size());
  for (double &s : signal)
    s = 0.1 * normal(random);
  for (int step = 0; step < 1000; step++) {
    for (size_t i = 0; i < signal.size(); i++) {
      m.grads.Put(t, static_cast<int64_t>(i), signal[i] + normal(random));
      average[i] = 0.95 * average[i] + 0.05 * m.grads.At(t, static_cast<int64_t>(i));
    }
    m.steps.Put(t, 0, step);
    ASSERT_EQ(tx_muon_momentum(m.Args(), nullptr, nullptr), TX_OK);
  }
  double error = 0.0, size = 0.0;
  for (size_t i = 0; i < average.size(); i++) {
    const tx_block_scale scale = tx_scale_decode(tx_block_e3m4(), m.scales.memory[t][i / TX_BLOCK]);
    const double stored = tx_block_value(tx_block_e3m4(), m.momentums.memory[t][i], scale);
    error += (stored - average[i]) * (stored - average[i]);
    size += average[i] * average[i];
  }
  RecordProperty("error", std::to_string(std::sqrt(error / size)));
  EXPECT_LE(std::sqrt(error / size), 0.07);
}

TEST(Momentum, NoFiniteGradientMakesAStateNonFinite) {
  for (tx_dtype momentum : {TX_F32, TX_BF16, TX_F16, TX_U8}) {
    Momentum m(TX_F32, momentum, TX_F32);
    for (double most : {3.4e38, -3.4e38}) {
      for (size_t t = 0; t < std::size(kNumels); t++)
        for (int64_t i = 0; i < kNumels[t]; i++)
          m.grads.Put(t, i, i % 2 ? most : -most);
      ASSERT_EQ(tx_muon_momentum(m.Args(), nullptr, nullptr), TX_OK);
      for (size_t t = 0; t < std::size(kNumels); t++)
        for (int64_t i = 0; i < kNumels[t]; i++)
          ASSERT_TRUE(std::isfinite(m.updates.At(t, i)));
    }
  }
}

// Loops that process whole tiles at once must not miss a non-finite gradient at any position.
TEST(Momentum, NonFiniteGradientsAreNonFiniteResultsAndOthersAreTheirs) {
  for (double wrong : {std::numeric_limits<double>::infinity(), std::nan("")}) {
    for (int64_t at : {int64_t{0}, int64_t{31}, int64_t{3000}, int64_t{4999}}) {
      Momentum plain(TX_BF16, TX_BF16, TX_BF16), m = plain;
      m.grads.Put(2, at, wrong);
      ASSERT_EQ(tx_muon_momentum(plain.Args(), nullptr, nullptr), TX_OK);
      ASSERT_EQ(tx_muon_momentum(m.Args(), nullptr, nullptr), TX_OK);
      for (size_t t = 0; t < std::size(kNumels); t++) {
        for (int64_t i = 0; i < kNumels[t]; i++) {
          if (t == 2 && i == at) {
            ASSERT_FALSE(std::isfinite(m.updates.At(t, i)) || std::isfinite(m.momentums.At(t, i)));
          } else {
            ASSERT_EQ(m.updates.At(t, i), plain.updates.At(t, i));
            ASSERT_EQ(m.momentums.At(t, i), plain.momentums.At(t, i));
          }
        }
      }
    }
  }
}

// A loaded momentum near fp32's largest number, next to tiny elements.
TEST(Momentum, LargeStatesStayWhatTheyAre) {
  Momentum wide(TX_BF16, TX_F32, TX_BF16), narrow(TX_BF16, TX_BF16, TX_BF16);
  for (int64_t i = 0; i < 5000; i++) {
    const double value = i % 3 ? 3e38 : 1e-40;
    narrow.momentums.Put(2, i, value);
    wide.momentums.Put(2, i, narrow.momentums.At(2, i));
  }
  ASSERT_EQ(tx_muon_momentum(wide.Args(), nullptr, nullptr), TX_OK);
  ASSERT_EQ(tx_muon_momentum(narrow.Args(), nullptr, nullptr), TX_OK);
  for (int64_t i = 0; i < 5000; i++) {
    ASSERT_TRUE(std::isfinite(narrow.momentums.At(2, i)));
    ASSERT_EQ(narrow.updates.At(2, i), wide.updates.At(2, i)) << i;
  }
}

}  // namespace
