// The exact sum of squares: equals Shewchuk's exact summation, for any order and any split, rounded once.
#include "csrc/math/exact_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <vector>

namespace {

using Limbs = std::array<int64_t, TX_NORM_LIMBS>;

Limbs Add(const std::vector<double> &terms) {
  Limbs limbs{};
  for (const double x : terms)
    EXPECT_EQ(tx_exact_add(limbs.data(), x), 0) << x;
  return limbs;
}

double Sum(const std::vector<double> &terms) {
  return tx_exact_double(Add(terms).data());
}

// Shewchuk 1997: non-overlapping partial sums, rounded once at the end (as Python's math.fsum does).
double ShewchukSum(const std::vector<double> &terms) {
  std::vector<double> partials;
  for (double x : terms) {
    size_t kept = 0;
    for (double y : partials) {
      if (std::fabs(x) < std::fabs(y)) std::swap(x, y);
      const double high = x + y, low = y - (high - x);
      if (low != 0) partials[kept++] = low;
      x = high;
    }
    partials.resize(kept);
    partials.push_back(x);
  }
  double high = 0, low = 0;
  while (!partials.empty()) {
    const double x = high, y = partials.back();
    partials.pop_back();
    high = x + y;
    low = y - (high - x);
    if (low != 0) break;
  }
  // The last addition was a tie, which it decided without the remaining lower parts.
  if (!partials.empty() && (low < 0) == (partials.back() < 0)) {
    const double twice = 2 * low, up = high + twice;
    if (twice == up - high) high = up;
  }
  return high;
}

// Random numbers like sums of squares of fp32 numbers: multiples of 2^-298, up to 2^263.
std::vector<double> RandomTerms(std::mt19937_64 &random, size_t n, int lowest, int highest) {
  std::vector<double> terms(n);
  for (double &x : terms) {
    const int exponent = lowest + static_cast<int>(random() % static_cast<uint64_t>(highest - lowest + 1));
    x = std::ldexp(std::floor(std::ldexp(static_cast<double>(random() >> 11), exponent - 52 + 298)), -298);
  }
  return terms;
}

TEST(ExactSum, EqualsShewchuksSum) {
  std::mt19937_64 random(1);
  const struct { int lowest, highest; } ranges[] = {{-298, 262}, {-298, -200}, {-20, 20}, {0, 0}, {200, 262}, {-60, 0}};
  for (const auto &range : ranges) {
    for (size_t n = 0; n < 300; ++n) {
      const std::vector<double> terms = RandomTerms(random, n, range.lowest, range.highest);
      ASSERT_EQ(Sum(terms), ShewchukSum(terms)) << n << " " << range.lowest;
    }
  }
}

TEST(ExactSum, OneNumberComesBack) {
  std::mt19937_64 random(2);
  for (int e = -298; e < 299; ++e) {
    EXPECT_EQ(Sum({std::ldexp(1.0, e)}), std::ldexp(1.0, e));
    const std::vector<double> term = RandomTerms(random, 1, e, e);
    EXPECT_EQ(Sum(term), term[0]) << e;
  }
  EXPECT_EQ(Sum({}), 0.0);
  EXPECT_EQ(Sum({0.0, -0.0}), 0.0);
}

TEST(ExactSum, OrderSplitAndCarriesChangeNoLimb) {
  std::mt19937_64 random(3);
  std::vector<double> terms = RandomTerms(random, 1000, -298, 262);
  Limbs whole = Add(terms);
  tx_exact_carry(whole.data());
  for (int round = 0; round < 20; ++round) {
    std::shuffle(terms.begin(), terms.end(), random);
    Limbs merged{};
    for (size_t begin = 0; begin < terms.size();) {
      const size_t end = std::min(terms.size(), begin + 1 + random() % 300);
      Limbs part =
          Add({terms.begin() + static_cast<std::ptrdiff_t>(begin), terms.begin() + static_cast<std::ptrdiff_t>(end)});
      if (random() % 2 == 0) tx_exact_carry(part.data());
      tx_exact_merge(merged.data(), part.data());
      begin = end;
    }
    ASSERT_EQ(merged, whole);
  }
  // As after an all-reduce over many ranks: sums of carried limbs without another carry.
  Limbs reduced{};
  for (int rank = 0; rank < 1000; ++rank) {
    for (size_t i = 0; i < reduced.size(); ++i)
      reduced[i] += whole[i];
  }
  const double once = tx_exact_double(reduced.data());
  tx_exact_carry(reduced.data());
  EXPECT_EQ(tx_exact_double(reduced.data()), once);
  for (size_t i = 0; i + 1 < reduced.size(); ++i)
    EXPECT_TRUE(reduced[i] >= 0 && reduced[i] < int64_t{1} << 32);
}

TEST(ExactSum, RoundsOnceToNearestEven) {
  const double u = 0x1p-53; /* half an ulp of 1 */
  EXPECT_EQ(Sum({1.0, u}), 1.0);
  for (int e = -54; e >= -298; --e)
    EXPECT_EQ(Sum({1.0, u, std::ldexp(1.0, e)}), 1.0 + 2 * u) << e;
  EXPECT_EQ(Sum({1.0, 2 * u, u}), 1.0 + 4 * u);
  EXPECT_EQ(Sum({1.0, 2 * u, u / 2, u / 4}), 1.0 + 2 * u);
  EXPECT_EQ(Sum({2.0 - 2 * u, u}), 2.0); /* a carry through the whole mantissa */
  EXPECT_EQ(Sum({0x1p263, 0x1p-298}), 0x1p263);
  EXPECT_EQ(Sum({0x1p263, 0x1p210, 0x1p-298}), 0x1p263 + 0x1p211);
}

// 2^30 additions of the largest parts keep a limb below 2^63; so do 2^31 ranks with carried limbs.
TEST(ExactSum, LimbsCannotOverflowBeforeACarryIsDue) {
  const Limbs one = Add({0x1.fffffffffffffp262});
  Limbs many = one;
  int64_t largest = 0;
  for (int64_t &limb : many) {
    ASSERT_LE(limb, INT64_MAX / TX_EXACT_ADDS_PER_CARRY);
    limb *= TX_EXACT_ADDS_PER_CARRY;
    largest = std::max(largest, limb);
  }
  EXPECT_GT(largest, int64_t{1} << 61);
  EXPECT_EQ(tx_exact_double(many.data()), 0x1.fffffffffffffp292);
  tx_exact_carry(many.data());
  for (const int64_t limb : many)
    EXPECT_LE(limb, INT64_MAX >> 31);
}

TEST(ExactSum, WhatIsNotASumOfSquaresIsRefusedAndChangesNothing) {
  Limbs limbs = Add({1.0});
  const Limbs before = limbs;
  for (const double bad : {static_cast<double>(NAN), -static_cast<double>(NAN), static_cast<double>(INFINITY),
                           -static_cast<double>(INFINITY), -1.0, 0x1p300, 0x1p1023}) {
    EXPECT_EQ(tx_exact_add(limbs.data(), bad), 1) << bad;
    EXPECT_EQ(limbs, before) << bad;
  }
  // Bits below the least significant one are dropped.
  EXPECT_EQ(tx_exact_add(limbs.data(), 0x1p-299), 0);
  EXPECT_EQ(tx_exact_add(limbs.data(), 0x1p-1074), 0);
  EXPECT_EQ(limbs, before);
}

}  // namespace
