// The fast roots and quotients must be rounded to nearest, for every estimate within the documented error of the
// hardware instruction. And the check for remainders of half a unit must find all of them.
#include "cuda/fast_path_math.h"

#include <gtest/gtest.h>

#include <cmath>

#include "cuda/adamw_fast_path.h"
#include "cuda/quick_blocks.h"

namespace {

// The adjacent floats, inline for speed.
float Next(float x) {
  return tx_f32_from_bits(tx_bits_from_f32(x) + 1);
}
float Before(float x) {
  return tx_f32_from_bits(tx_bits_from_f32(x) - 1);
}

// Two binades contain every mantissa of a root. PTX documents a largest relative error of 2^-22.9 for rsqrt.approx. The
// sequence is the one that nvcc generates for sqrtf. It fails for two estimates, both at the end of that range, so the
// instruction does not return them.
TEST(QuickMath, ARootIsRoundedToNearestFromEveryEstimate) {
  const double error = std::exp2(-22.9);
  int64_t tried = 0, wrong = 0;
  for (uint32_t i = 0; i < 1u << 24; i++) {
    const float x = tx_f32_from_bits(TX_POWER_BITS(-1) + i), root = std::sqrt(x);
    const double exact = 1.0 / std::sqrt(static_cast<double>(x)), largest = exact * (1 + error);
    float y = static_cast<float>(exact * (1 - error));
    if (y < exact * (1 - error)) y = Next(y);
    for (; y <= largest; y = Next(y)) {
      tried++;
      wrong += tx_root_from(x, y) != root;
    }
  }
  EXPECT_GT(tried, 3 << 24);
  EXPECT_EQ(wrong, 2);
}

TEST(QuickMath, ARootIsRoundedToNearestAtEveryExponent) {
  for (int k = -100; k < 127; k++)
    for (uint32_t mantissa : {0u, 1u, 0x2aaaaau, 0x3504f3u, 0x3504f4u, 0x7fffffu}) {
      const float x = tx_f32_from_bits(TX_POWER_BITS(k) | mantissa);
      ASSERT_EQ(tx_quick_root(x), std::sqrt(x)) << x;
    }
}

// If a root did not show that its argument is out of range, a wrong result would be used.
TEST(QuickMath, RootsBeyondTheRangeShowThatTheyAre) {
  for (float x : {0.0f, -0.0f, 1e-45f, 1e-40f, 1e-38f, std::ldexp(1.0f, -101)}) {
    const float root = tx_quick_root(x);
    EXPECT_FALSE(root >= std::ldexp(1.0f, -50)) << x;
  }
  for (float x : {INFINITY, NAN, -1.0f, -INFINITY})
    EXPECT_TRUE(std::isnan(tx_quick_root(x))) << x;
}

// A quotient a / b is the harder to round the closer it is to the middle between two floats. With integers of 24 bits
// and the middle 2 M + 1: 2^24 a - (2 M + 1) b = n (2^25 a if a < b). What the last addition of the sequence rounds has
// an error below the distance from the middle of a quotient with |n| = 7, so only smaller |n| can be rounded wrongly.
// For each b this solves for all a with small n. PTX documents an error of at most one unit in the last place for
// rcp.approx. The sequence is the one that nvcc generates for a division. It fails for one estimate, of the largest
// mantissa, so the instruction does not return it.
TEST(QuickMath, AQuotientIsRoundedToNearestFromEveryEstimate) {
  constexpr int kLargest = 7;
  int64_t tried = 0, wrong = 0;
  for (uint32_t b = 1u << 23; b < 1u << 24; b++) {
    const int zeros = __builtin_ctz(b);
    if (1 << zeros > kLargest) continue;
    const uint32_t odd = b >> zeros;
    uint32_t inverse = odd;
    for (int i = 0; i < 5; i++)
      inverse *= 2 - odd * inverse;
    const double exact = 1.0 / b;
    float below = static_cast<float>(exact);
    if (below > exact) below = Before(below);
    const float above = below == exact ? below : Next(below);
    for (int n = -kLargest; n <= kLargest; n++) {
      if (n == 0 || n % (1 << zeros) != 0) continue;
      for (const int shift : {24, 25}) {
        const uint64_t period = uint64_t{1} << (shift - zeros);
        const uint64_t first = static_cast<uint64_t>(static_cast<uint32_t>(-(n >> zeros))) * inverse % period;
        if (first % 2 == 0) continue;
        for (uint64_t middle = first; middle < 1u << 25; middle += period) {
          if (middle < 1u << 24) continue;
          const uint64_t a = (middle * b + static_cast<uint64_t>(static_cast<int64_t>(n))) >> shift;
          if (a < 1u << 23 || a >= 1u << 24 || (a >= b) != (shift == 24)) continue;
          const float top = static_cast<float>(a), bottom = static_cast<float>(b), quotient = top / bottom;
          tried += 2;
          wrong += tx_quotient_from(top, bottom, below) != quotient;
          wrong += tx_quotient_from(top, bottom, above) != quotient;
        }
      }
    }
  }
  EXPECT_GT(tried, 1 << 26);
  EXPECT_EQ(wrong, 1);
}

TEST(QuickMath, AQuotientIsRoundedToNearestAtEveryExponentAndKeepsAZerosSign) {
  uint32_t bits = 1;
  for (int i = 0; i < 4000000; i++) {
    bits = bits * 1664525u + 1013904223u;
    const uint32_t a_mantissa = bits >> 9;
    bits = bits * 1664525u + 1013904223u;
    const uint32_t b_mantissa = bits >> 9;
    const float a = tx_f32_from_bits(TX_POWER_BITS(i % 120 - 60) | a_mantissa) * (i % 2 ? 1.0f : -1.0f);
    const float b = tx_f32_from_bits(TX_POWER_BITS(i / 120 % 112 - 50) | b_mantissa);
    ASSERT_EQ(tx_quick_quotient(a, b), a / b) << a << " / " << b;
  }
  EXPECT_FALSE(std::signbit(tx_quick_quotient(0.0f, 3.0f)));
  EXPECT_TRUE(std::signbit(tx_quick_quotient(-0.0f, 3.0f)));
  EXPECT_EQ(tx_quick_quotient(-0.0f, 3.0f), 0.0f);
}

TEST(QuickMath, RemaindersOfHalfAUnitAreNoticedInEitherHalfOfAnyWord) {
  const uint32_t others[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xfffe, 0xffff};
  int64_t noticed = 0;
  for (uint32_t half = 0; half < 0x10000; half++)
    for (const uint32_t other : others)
      for (const uint32_t word : {half << 16 | other, other << 16 | half}) {
        const bool is = half == 0x8000 || other == 0x8000;
        for (const uint32_t seen :
             {tx_see_ties(TX_NO_TIES, word, 0x00017fffu), tx_see_ties(TX_NO_TIES, 0xffff0000u, word),
              tx_see_ties(tx_see_ties(TX_NO_TIES, word, 3u), 0x12348002u, 0u)}) {
          if (is) {
            ASSERT_TRUE(tx_has_tie(seen)) << word;
          } else if (word >> 16 != 0x8001) {
            ASSERT_FALSE(tx_has_tie(seen)) << word;
          }
        }
        // Before sm_90 the words' bits are joined instead.
        ASSERT_TRUE(!is || (tx_tie_bits(word) & 0x80008000u) != 0u) << word;
        noticed += tx_has_tie(tx_see_ties(TX_NO_TIES, word, word));
      }
  EXPECT_GT(noticed, 2 * 0x10000);
}

// Every amax of one exponent, and those next to a code's boundaries at every exponent of the range.
TEST(QuickMath, APlanIsThatOfAnyBlock) {
  for (const tx_format format : {TX_FORMAT_SIGNED, TX_FORMAT_SQRT}) {
    const tx_block_format f = tx_block_format_of(TX_U8, format);
    const int32_t low = format == TX_FORMAT_SQRT ? -50 : -60, high = format == TX_FORMAT_SQRT ? 40 : 60;
    int64_t may_double = 0, all = 0;
    const auto compare = [&](int32_t amax) {
      if (amax < static_cast<int32_t>(TX_POWER_BITS(low)) || amax > static_cast<int32_t>(TX_POWER_BITS(high))) return;
      const tx_quick_plan quick = tx_quick_plan_from(f, amax);
      const tx_block_plan plan = tx_block_plan_from(f, amax);
      ASSERT_EQ(quick.exponent, plan.exponent) << amax;
      ASSERT_EQ(quick.least, tx_bits_from_f32(plan.at.least_normal)) << amax;
      ASSERT_EQ(plan.keep, 0xffffffffu) << amax;
      ASSERT_EQ(tx_quick_may_double(f, quick, amax), tx_block_may_double(f, plan, amax) != 0) << amax;
      may_double += tx_quick_may_double(f, quick, amax);
      all++;
    };
    for (int32_t mantissa = 0; mantissa < 1 << 23; mantissa++)
      compare(static_cast<int32_t>(TX_POWER_BITS(3)) + mantissa);
    EXPECT_NEAR(static_cast<double>(may_double) / static_cast<double>(all), format == TX_FORMAT_SQRT ? 0.06 : 0.12,
                0.01);
    for (int32_t exponent = low; exponent <= high; exponent++)
      for (int32_t boundary = 0; boundary < 64; boundary++)
        for (const int32_t by : {-1, 0, 1})
          compare(static_cast<int32_t>(TX_POWER_BITS(exponent)) + (boundary << 17) + by);
  }
}

TEST(QuickMath, BytesOfFourWordsAreJoined) {
  uint32_t bits = 1;
  for (int i = 0; i < 100000; i++) {
    uint32_t words[4];
    for (uint32_t &word : words)
      word = bits = bits * 1664525u + 1013904223u;
    for (const int from : {16, 19, 20, 24}) {
      uint32_t expected = 0;
      for (int k = 0; k < 4; k++)
        expected |= (words[k] >> from & 0xffu) << (8 * k);
      ASSERT_EQ(tx_join_bytes(words, from), expected) << from;
    }
    ASSERT_EQ(tx_lower_halves(words[0], words[1]), (words[0] & 0xffffu) | words[1] << 16);
    ASSERT_EQ(tx_upper_halves(words[0], words[1]), words[0] >> 16 | (words[1] & 0xffff0000u));
  }
}

}  // namespace
