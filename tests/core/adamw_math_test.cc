// G1: the AdamW step of one element compared with extended precision; its constants; and the cases that have to be
// exact.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tests/core/adamw_element.h"

namespace {

tx_adamw_group Group(double weight_decay, bool decoupled, bool maximize = false) {
  return {3e-4, 0.9, 0.999, 1e-8, weight_decay, maximize ? 1.0 : 0.0, decoupled ? 1.0 : 0.0};
}

// Algorithm 2 of Loshchilov & Hutter in long double, in the paper's notation.
struct Exact {
  long double p, m, v;
};
Exact Reference(const tx_adamw_group &h, int64_t t, long double scale, long double g, Exact s) {
  g *= scale;
  if (h.maximize != 0) g = -g;
  const long double lr = h.lr, b1 = h.beta1, b2 = h.beta2, wd = h.weight_decay;
  if (h.decoupled == 0) g += wd * s.p;
  s.m = b1 * s.m + (1 - b1) * g;
  s.v = b2 * s.v + (1 - b2) * g * g;
  const long double m_hat = s.m / (1 - std::pow(b1, static_cast<long double>(t)));
  const long double v_hat = s.v / (1 - std::pow(b2, static_cast<long double>(t)));
  const long double decay = h.decoupled != 0 ? wd * s.p : 0;
  s.p -= lr * (m_hat / (std::sqrt(v_hat) + static_cast<long double>(h.eps)) + decay);
  return s;
}

// One unit in the last place of an fp32 number.
double Ulp(long double x) {
  const float a = std::fabs(static_cast<float>(x));
  return static_cast<double>(std::nextafter(a, INFINITY)) - static_cast<double>(a);
}

struct Case {
  const char *name;
  tx_adamw_group group;
  double clip, scale;
};
const Case kCases[] = {
    {"adamw", Group(0.01, true), 1.0, 1.0},
    {"adam", Group(0.01, false), 1.0, 1.0},
    {"no_decay", Group(0.0, true), 1.0, 1.0},
    {"maximize", Group(0.01, true, true), 1.0, 1.0},
    {"adam_maximize", Group(0.01, false, true), 1.0, 1.0},
    {"clipped_and_scaled", Group(0.01, true), 0.37, 65536.0},
};

TEST(AdamwMath, G1_OneStepIsWithinAFewUlpOfExtendedPrecision) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const float u = 0x1p-24f;
  for (const Case &c : kCases) {
    for (int i = 0; i < 20000; ++i) {
      const int64_t t = int64_t{1} << (i % 21);
      const float p = normal(random), m = t == 1 ? 0 : 0.1f * normal(random);
      const float root = t == 1 ? 0 : 0.2f * normal(random), v = root * root;
      const float grad = normal(random) * static_cast<float>(c.scale / c.clip);
      const tx_adamw_constants k = tx_adamw_prepare(&c.group, c.group.lr, t, c.clip, c.scale, 0.0);
      const Stepped r = Element(k, grad, p, m, v);
      const Exact exact =
          Reference(c.group, t, static_cast<long double>(c.clip) / static_cast<long double>(c.scale), grad, {p, m, v});
      // The magnitudes of the terms of m and v. Each term has a few rounding errors, the sum one.
      const double g = std::fabs(static_cast<double>(grad) * c.clip / c.scale) + c.group.weight_decay * std::fabs(p);
      const double m_bound = 6 * u * (std::fabs(m) + 0.1 * g) + Ulp(exact.m);
      const double v_bound = 6 * u * 0.001 * (g * g + v) + Ulp(exact.v);
      ASSERT_NEAR(r.m, exact.m, m_bound) << c.name << " " << i;
      ASSERT_NEAR(r.v, exact.v, v_bound) << c.name << " " << i;
      ASSERT_EQ(r.root, std::sqrt(r.v));
      // Error of the update: m's error, propagated; v's relative error, which is small; and a few roundings.
      const long double root_exact =
          std::sqrt(exact.v / (1 - std::pow(static_cast<long double>(c.group.beta2), static_cast<long double>(t))));
      const double per_m = static_cast<double>(
          c.group.lr / (1 - std::pow(static_cast<long double>(c.group.beta1), static_cast<long double>(t))) /
          root_exact);
      const double update = std::fabs(static_cast<double>(exact.p - p));
      const double v_relative = v_bound / static_cast<double>(exact.v);
      const double p_bound = 0.51 * Ulp(exact.p) +
                             per_m * (m_bound + std::fabs(static_cast<double>(exact.m)) * v_relative) +
                             8 * u * (update + 3e-4 * 0.02 * std::fabs(p));
      ASSERT_NEAR(r.p, exact.p, p_bound) << c.name << " " << i;
    }
  }
}

TEST(AdamwMath, G1_TheFirstStepIsTheSignOfTheGradientTimesLr) {
  const tx_adamw_group group = Group(0.0, true);
  const tx_adamw_constants k = tx_adamw_prepare(&group, group.lr, 1, 1.0, 1.0, 0.0);
  for (const float g : {1e-3f, -1e-3f, 5.0f, -70000.0f}) {
    const Stepped r = Element(k, g, 0.0f, 0.0f, 0.0f);
    EXPECT_NEAR(r.p, -std::copysign(3e-4, g), 3e-4 * 1.2e-5) << g; /* eps / |g| at 1e-3 */
  }
}

// E11 and D3: zero gradients and no decay change nothing.
TEST(AdamwMath, ZeroGradientsAndNoDecayLeaveTheWeightExactly) {
  for (const bool decoupled : {true, false}) {
    const tx_adamw_group group = Group(0.0, decoupled);
    for (const int64_t t : {int64_t{1}, int64_t{2}, int64_t{1000000}}) {
      const tx_adamw_constants k = tx_adamw_prepare(&group, group.lr, t, 1.0, 1.0, 0.0);
      for (const float p : {0.0f, -0.0f, 1.0f, -3.7e-5f, 0x1p-149f, 0x1.fffffep127f}) {
        const Stepped r = Element(k, 0.0f, p, 0.0f, 0.0f);
        EXPECT_EQ(r.p, p);
        EXPECT_EQ(r.m, 0.0f);
        EXPECT_EQ(r.v, 0.0f);
      }
    }
  }
}

TEST(AdamwMath, DecoupledDecayIsLrTimesDecayTimesTheWeight) {
  const tx_adamw_group group = Group(0.1, true);
  const tx_adamw_constants k = tx_adamw_prepare(&group, 0.5, 1, 1.0, 1.0, 0.0);
  EXPECT_EQ(k.decay, 0.05f);
  EXPECT_EQ(k.l2, 0.0f);
  EXPECT_EQ(Element(k, 0.0f, 1.0f, 0.0f, 0.0f).p, 1.0f - 0.05f);
  const tx_adamw_group coupled = Group(0.1, false);
  const tx_adamw_constants l2 = tx_adamw_prepare(&coupled, 0.5, 1, 1.0, 1.0, 0.0);
  EXPECT_EQ(l2.decay, 0.0f);
  EXPECT_EQ(l2.l2, 0.1f);
}

TEST(AdamwMath, AscentOnAGradientIsDescentOnItsNegative) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  for (const bool decoupled : {true, false}) {
    const tx_adamw_group up = Group(0.01, decoupled, true), down = Group(0.01, decoupled);
    const tx_adamw_constants ku = tx_adamw_prepare(&up, up.lr, 5, 0.5, 1024.0, 0.0);
    const tx_adamw_constants kd = tx_adamw_prepare(&down, down.lr, 5, 0.5, 1024.0, 0.0);
    for (int i = 0; i < 1000; ++i) {
      const float g = normal(random) * 1024.0f, p = normal(random), m = normal(random), v = std::fabs(normal(random));
      const Stepped a = Element(ku, g, p, m, v), b = Element(kd, -g, p, m, v);
      ASSERT_EQ(a.p, b.p);
      ASSERT_EQ(a.m, b.m);
      ASSERT_EQ(a.v, b.v);
    }
  }
}

TEST(AdamwMath, VNeverBecomesNegative) {
  std::mt19937 random(3);
  for (const double beta2 : {0.0, 0.5, 0.9, 0.999, 0.9999999, 1.0 - 0x1p-53}) {
    tx_adamw_group group = Group(0.0, true);
    group.beta2 = beta2;
    const tx_adamw_constants k = tx_adamw_prepare(&group, group.lr, 3, 1.0, 1.0, 0.0);
    for (int i = 0; i < 200000; ++i) {
      const float v = tx_f32_from_bits(static_cast<uint32_t>(random()) % 0x7f800000u);
      const float g = i % 2 == 0 ? 0.0f : tx_f32_from_bits(static_cast<uint32_t>(random()) % 0x5f800000u);
      const float next = Element(k, g, 0.0f, 0.0f, v).v;
      ASSERT_GE(next, 0.0f) << beta2 << " " << v << " " << g;
    }
  }
}

// G1: with a small beta, a large old value leaves no rounding error behind.
TEST(AdamwMath, G1_SmallBetasForgetALargeState) {
  for (const double beta : {0.0, 0.1, 0.25, 0.49}) {
    tx_adamw_group group{};
    group.beta1 = group.beta2 = beta;
    group.decoupled = 1;
    const tx_adamw_constants c = tx_adamw_prepare(&group, 1e-3, 2, 1.0, 1.0, 0.0);
    const double m = beta * 1e-3 + (1 - beta) * 0.01, v = beta * 1e-6 + (1 - beta) * 1e-4;
    const Stepped r = Element(c, 0.01f, 0.0f, 1e-3f, 1e-6f);
    EXPECT_NEAR(r.m, m, 2e-7 * m) << beta;
    EXPECT_NEAR(r.v, v, 2e-7 * v) << beta;
  }
  tx_adamw_group group{};
  group.decoupled = 1;
  const Stepped r = Element(tx_adamw_prepare(&group, 1e-3, 2, 1.0, 1.0, 0.0), 0.01f, 0.0f, 1000.0f, 1e6f);
  EXPECT_EQ(r.m, 0.01f);
  EXPECT_EQ(r.v, 0.01f * 0.01f);
}

// G1: beta^t by repeated squaring in double; 1 - beta^t is accurate enough at every step.
TEST(AdamwMath, G1_PowersAndBiasCorrections) {
  EXPECT_EQ(tx_power(0.0, 0), 1.0);
  EXPECT_EQ(tx_power(0.0, 5), 0.0);
  EXPECT_EQ(tx_power(0.5, 10), 0x1p-10);
  EXPECT_EQ(tx_power(2.0, 1000), 0x1p1000);
  EXPECT_EQ(tx_power(0.999, INT64_MAX), 0.0);
  EXPECT_EQ(tx_power(0.999, 1), 0.999);
  EXPECT_EQ(tx_power(0.999, 3), 0.999 * (0.999 * 0.999));
  for (const double beta : {0.8, 0.9, 0.95, 0.99, 0.999, 0.9999}) {
    for (int64_t t = 1; t <= 3000; ++t) {
      const long double exact = 1 - std::pow(static_cast<long double>(beta), static_cast<long double>(t));
      ASSERT_NEAR((1.0 - tx_power(beta, t)) / static_cast<double>(exact), 1.0, 1e-11) << beta << " " << t;
      tx_adamw_group group = Group(0.0, true);
      group.beta1 = group.beta2 = beta;
      const tx_adamw_constants k = tx_adamw_prepare(&group, 1.0, t, 1.0, 1.0, 0.0);
      ASSERT_NEAR(k.step_size * static_cast<double>(exact), 1.0, 0x1p-23) << beta << " " << t;
      ASSERT_NEAR(k.rsqrt_bc2 * static_cast<double>(std::sqrt(exact)), 1.0, 0x1p-23) << beta << " " << t;
    }
  }
  // In fp32, 1 - beta2 would be off by 1.3e-5.
  const tx_adamw_group group = Group(0.0, true);
  EXPECT_EQ(tx_adamw_prepare(&group, 1.0, 1, 1.0, 1.0, 0.0).exp_avg_sq.weight, 0.001f);
}

TEST(AdamwMath, LossScaleAndClipCoefficientAreOneFactor) {
  const tx_adamw_group group = Group(0.0, true);
  EXPECT_EQ(tx_adamw_prepare(&group, 1.0, 1, 0.5, 65536.0, 0.0).factor, 0x1p-17f);
  const tx_adamw_constants scaled = tx_adamw_prepare(&group, 1.0, 1, 1.0, 65536.0, 0.0);
  const tx_adamw_constants plain = tx_adamw_prepare(&group, 1.0, 1, 1.0, 1.0, 0.0);
  for (const float g : {1.5f, -3e-7f, 0.1f}) {
    const Stepped a = Element(scaled, g * 65536.0f, 0.5f, 0.1f, 0.01f);
    const Stepped b = Element(plain, g, 0.5f, 0.1f, 0.01f);
    EXPECT_EQ(a.p, b.p);
    EXPECT_EQ(a.v, b.v);
  }
}

}  // namespace
