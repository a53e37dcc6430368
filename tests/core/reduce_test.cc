// The sum of squares of a block: its order of additions, accuracy, and non-finite elements.
#include "csrc/math/reduce.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

namespace {

std::vector<float> Random(std::mt19937 &random, int spread) {
  std::normal_distribution<float> normal;
  std::vector<float> x(TX_REDUCE_BLOCK);
  for (float &value : x)
    value = std::ldexp(normal(random), static_cast<int>(static_cast<float>(spread) * normal(random)));
  return x;
}

// The tree by its definition: a node sums every `step`-th element from `first` on. It is the sum of the two nodes with
// twice that step.
double Node(const std::vector<float> &x, size_t first, size_t step) {
  if (step == TX_REDUCE_BLOCK) return static_cast<double>(x[first]) * static_cast<double>(x[first]);
  return Node(x, first, 2 * step) + Node(x, first + step, 2 * step);
}

TEST(Reduce, TheTreeIsTheOneThatIsDocumented) {
  std::mt19937 random(1);
  for (int i = 0; i < 1000; ++i) {
    const std::vector<float> x = Random(random, i % 20);
    ASSERT_EQ(tx_sum_squares_full(x.data()), Node(x, 0, 1));
  }
}

TEST(Reduce, IsWithinSevenRoundingsOfTheExactSum) {
  std::mt19937 random(2);
  for (int i = 0; i < 1000; ++i) {
    const std::vector<float> x = Random(random, i % 20);
    long double exact = 0;
    for (const float value : x)
      exact += static_cast<long double>(value) * static_cast<long double>(value);
    ASSERT_NEAR(static_cast<double>(tx_sum_squares_full(x.data()) / exact), 1.0, 8 * 0x1p-53);
  }
}

TEST(Reduce, IsNotFiniteExactlyWhereAnElementIsNot) {
  const std::vector<float> largest(TX_REDUCE_BLOCK, 0x1.fffffep127f);
  const double sum = tx_sum_squares_full(largest.data());
  EXPECT_TRUE(std::isfinite(sum));
  EXPECT_LT(sum, 0x1p263);
  const std::vector<float> least(TX_REDUCE_BLOCK, 0x1p-149f);
  EXPECT_EQ(tx_sum_squares_full(least.data()), 0x1p-291);
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    for (size_t i = 0; i < TX_REDUCE_BLOCK; ++i) {
      std::vector<float> x(TX_REDUCE_BLOCK, -1.5f);
      x[i] = bad;
      ASSERT_FALSE(std::isfinite(tx_sum_squares_full(x.data()))) << i;
    }
  }
}

}  // namespace
