// The clamp of gradients in the AdamW step: any finite numbers give finite moments, and the clamp changes nothing else.
// Numbers are tested by classes of exponents.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

extern "C" {
#include "csrc/math/block_scale.h"
}
#include "tests/core/adamw_element.h"

namespace {

constexpr float kMax = std::numeric_limits<float>::max();

// Numbers of every exponent with the smallest, the largest and middle mantissas, of both signs; and the zeros.
std::vector<float> Classes(int stride) {
  std::vector<float> classes = {0.0f, -0.0f, kMax, -kMax};
  for (uint32_t exponent = 0; exponent < 255; exponent += static_cast<uint32_t>(stride))
    for (const uint32_t mantissa : {0x0u, 0x1u, 0x400000u, 0x780001u, 0x7fffffu})
      for (const uint32_t sign : {0u, 1u})
        classes.push_back(tx_f32_from_bits(sign << 31 | exponent << 23 | mantissa));
  for (const uint32_t bits : {TX_ADAMW_GRAD_LIMIT_BITS - 1, TX_ADAMW_GRAD_LIMIT_BITS, TX_ADAMW_GRAD_LIMIT_BITS + 1})
    classes.push_back(tx_f32_from_bits(bits));
  return classes;
}

tx_adamw_constants Constants(double beta1, double beta2, double decay, double factor) {
  const tx_adamw_group group = {1e-3, beta1, beta2, 1e-8, decay, 0, decay == 0.0 ? 1.0 : 0.0};
  return tx_adamw_prepare(&group, group.lr, 7, factor, 1.0, 0.0);
}

// Every gradient with every state, for averages that start from either side and have any weight, with and without
// decay: moments stay between the old moment and the clamped gradient (or its square).
TEST(AdamwLimit, MomentsOfAnyFiniteNumbersStayBetweenOldAndLimited) {
  const float most = tx_adamw_grad_limit(), square = most * most;
  const std::vector<float> gradients = Classes(1), states = Classes(17), weights = {0.0f, 1.0f, kMax, -kMax};
  for (const double factor : {1.0, -1.0, 1e-30, 1e300, 0.0}) {
    for (const double beta : {0.0, 0.3, 0.5, 0.9, 0.999, 1.0 - 0x1p-53}) {
      for (const double decay : {0.0, 1.0, 1e300}) {
        const tx_adamw_constants c = Constants(beta, beta, decay, factor);
        for (const float g : gradients) {
          for (const float state : states) {
            const float p = weights[static_cast<size_t>(&state - states.data()) % weights.size()];
            const tx_adamw_moments r = tx_adamw_average(c, g, p, state, std::fabs(state));
            ASSERT_LE(std::fabs(r.m), std::max(std::fabs(state), most)) << g << " " << p << " " << state << " " << beta;
            ASSERT_GE(r.v, 0.0f) << g << " " << p << " " << state << " " << beta;
            ASSERT_LE(r.v, std::max(std::fabs(state), square)) << g << " " << p << " " << state << " " << beta;
          }
        }
      }
    }
  }
}

// Moments lie between the old moment and the clamped gradient. Both are finite in every format, whatever the rounding,
// so the moments are.
TEST(AdamwLimit, EveryFormatHoldsTheLimitedGradient) {
  const float most = tx_adamw_grad_limit(), square = most * most;
  EXPECT_EQ(static_cast<double>(square), static_cast<double>(most) * static_cast<double>(most));
  for (const float x : {most, square}) {
    EXPECT_TRUE(std::isfinite(tx_f32_from_bf16(tx_bf16_from_f32(x))));
    EXPECT_TRUE(std::isfinite(tx_f32_from_bf16(tx_bf16_round(x, 0xffffffffu))));
  }
  for (const tx_block_format f : {tx_block_e4m3(), tx_block_f16(), tx_block_root_e4m4(), tx_block_root_f16()}) {
    const tx_block_plan plan = tx_block_plan_from(f, tx_magnitude_bits(most));
    EXPECT_NE(plan.keep, 0u);
    EXPECT_NE(tx_block_scale_byte(plan, 0), TX_BLOCK_SCALE_NAN);
    for (const uint32_t u : {0u, 0xffffffffu}) {
      const uint32_t code = tx_block_code(f, plan, most, 1, u);
      const float back = tx_block_value(f, code, tx_scale_decode(f, tx_block_scale_byte(plan, 0)));
      EXPECT_TRUE(std::isfinite(back * (f.sign_bit == 0u ? back : 1.0f)));
    }
  }
}

// The AdamW step without the clamp, written out.
Stepped Unlimited(const tx_adamw_constants &c, float grad, float p, float m, float v) {
  float g = c.factor * grad;
  if (c.l2 != 0.0f) g += c.l2 * p;
  const auto average = [](tx_average a, float old, float added) {
    return a.from_new ? added + a.weight * (old - added) : old + a.weight * (added - old);
  };
  Stepped r;
  r.m = average(c.exp_avg, m, g);
  r.v = average(c.exp_avg_sq, v, g * g);
  r.root = std::sqrt(r.v);
  r.p = p - (c.step_size * (r.m / (r.root * c.rsqrt_bc2 + c.eps)) + c.decay * p);
  return r;
}

TEST(AdamwLimit, OrdinaryGradientsHaveTheBitsThatTheyHad) {
  std::mt19937 random(4);
  const auto pattern = [&](uint32_t below) { return tx_f32_from_bits(static_cast<uint32_t>(random()) % below); };
  for (const double beta : {0.3, 0.9, 0.999}) {
    for (const double decay : {0.0, 0.1}) {
      for (const double factor : {1.0, -0.37}) {
        const tx_adamw_constants c = Constants(beta, beta, decay, factor);
        for (int i = 0; i < 100000; i++) {
          const float g = pattern(TX_ADAMW_GRAD_LIMIT_BITS - 0x800000u) * (i % 2 ? 1.0f : -1.0f);
          const float p = pattern(0x5f000000u), m = -pattern(0x5f000000u), v = pattern(0x7f000000u);
          const Stepped a = Element(c, g, p, m, v), b = Unlimited(c, g, p, m, v);
          ASSERT_EQ(tx_bits_from_f32(a.p), tx_bits_from_f32(b.p)) << g << " " << p << " " << m << " " << v;
          ASSERT_EQ(tx_bits_from_f32(a.m), tx_bits_from_f32(b.m)) << g << " " << p << " " << m << " " << v;
          ASSERT_EQ(tx_bits_from_f32(a.v), tx_bits_from_f32(b.v)) << g << " " << p << " " << m << " " << v;
        }
      }
    }
  }
}

// tx_adamw_average_within is right wherever a loop uses it: when gradient and weight are small enough, or when the root
// is.
TEST(AdamwLimit, TheQuickWayIsRightWhereItIsTaken) {
  const std::vector<float> gradients = Classes(1), states = Classes(23), weights = {0.0f, 3.0f, 1e19f, kMax, -kMax};
  int64_t by_size = 0, by_root = 0;
  for (const double factor : {1.0, -0.5, 1e-30, 3e38, 0.0}) {
    for (const double beta : {0.3, 0.5, 0.9, 1.0 - 0x1p-53}) {
      for (const double decay : {0.0, 0.1, 1e30}) {
        const tx_adamw_constants c = Constants(beta, beta, decay, factor);
        const tx_adamw_within within = tx_adamw_within_of(&c);
        for (const float g : gradients) {
          for (const float state : states) {
            const float p = weights[static_cast<size_t>(&state - states.data()) % weights.size()];
            const tx_adamw_moments full = tx_adamw_average(c, g, p, state, std::fabs(state));
            const bool small = std::fabs(g) <= within.grad && (c.l2 == 0.0f || std::fabs(p) <= within.p);
            const int usual = tx_adamw_is_usual(&c);
            const tx_adamw_moments quick = tx_adamw_average_within(c, usual, g, p, state, std::fabs(state));
            const bool low = usual && tx_magnitude_bits(quick.root) <= TX_ADAMW_ROOT_BITS;
            by_size += small;
            by_root += low;
            if (!small && !low) continue;
            ASSERT_EQ(tx_bits_from_f32(quick.m), tx_bits_from_f32(full.m)) << g << " " << p << " " << state;
            ASSERT_EQ(tx_bits_from_f32(quick.v), tx_bits_from_f32(full.v)) << g << " " << p << " " << state;
          }
        }
      }
    }
  }
  EXPECT_GT(by_size, 1000000);
  EXPECT_GT(by_root, 100000);
}

// An infinite gradient makes the moments non-finite and the weight NaN. NaN makes all of them NaN. An infinite weight
// reaches the moments through L2 decay.
TEST(AdamwLimit, GradientsThatAreNotFinitePropagate) {
  for (const double decay : {0.0, 0.1}) {
    for (const double beta : {0.3, 0.9}) {
      const tx_adamw_constants c = Constants(beta, beta, decay, 1.0);
      for (const float sign : {1.0f, -1.0f}) {
        const Stepped r = Element(c, sign * INFINITY, 1.0f, 0.5f, 0.25f);
        EXPECT_FALSE(std::isfinite(r.m));
        EXPECT_FALSE(std::isfinite(r.v));
        EXPECT_TRUE(std::isnan(r.p));
      }
      const Stepped r = Element(c, NAN, 1.0f, 0.5f, 0.25f);
      EXPECT_TRUE(std::isnan(r.m) && std::isnan(r.v) && std::isnan(r.p));
      EXPECT_TRUE(decay == 0.0 || !std::isfinite(Element(c, 1.0f, INFINITY, 0.5f, 0.25f).m));
    }
  }
  const Stepped usual = Element(Constants(0.9, 0.999, 0.0, 1.0), -INFINITY, 1.0f, 0.5f, 0.25f);
  EXPECT_EQ(usual.m, -INFINITY);
  EXPECT_EQ(usual.v, INFINITY);
}

// Constants beyond fp32's range become its largest number: an infinite constant times 0 would be NaN.
TEST(AdamwLimit, ConstantsAreFinite) {
  const tx_adamw_group group = {1e300, 0.9, 0.999, 1e300, 1e300, 0, 0};
  const tx_adamw_constants c = tx_adamw_prepare(&group, group.lr, 1, 3e38, 1e-45, 0.0);
  for (const float x : {c.factor, c.l2, c.eps, c.step_size, c.decay})
    EXPECT_TRUE(std::isfinite(x));
  const Stepped r = Element(c, 0.0f, 0.0f, 0.0f, 0.0f);
  EXPECT_EQ(r.p, 0.0f);
  EXPECT_EQ(r.m, 0.0f);
}

}  // namespace
