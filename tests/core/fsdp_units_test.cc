// tx_fsdp_units: which blocks FSDP2 gathers together as a unit.
#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "csrc/torch_ext_advanced.h"

namespace {

using Numbers = std::vector<int64_t>;

Numbers Ends(const Numbers &numels, int64_t least) {
  Numbers ends(numels.size());
  ends.resize(
      static_cast<size_t>(tx_fsdp_units(numels.data(), static_cast<int64_t>(numels.size()), least, ends.data())));
  return ends;
}

struct Case {
  const char *id;
  Numbers numels;
  int64_t least;
  Numbers ends;
};

void PrintTo(const Case &c, std::ostream *out) {
  *out << c.id;
}

class FsdpUnitsTest : public testing::TestWithParam<Case> {};

TEST_P(FsdpUnitsTest, End) {
  EXPECT_EQ(Ends(GetParam().numels, GetParam().least), GetParam().ends);
}

const Case kCases[] = {
    {"none", {}, 10, {}},
    {"one_that_is_too_small", {3}, 10, {1}},
    {"each_large_enough", {10, 11, 12}, 10, {1, 2, 3}},
    {"two_at_a_time", {5, 5, 5, 5}, 10, {2, 4}},
    {"the_last_goes_with_its_neighbour", {5, 5, 5}, 10, {3}},
    {"the_last_two_too", {9, 1, 4, 4}, 10, {4}},
    {"what_comes_after_a_large_one", {20, 3, 20, 3}, 10, {1, 4}},
    {"empty_ones", {0, 0, 10, 0}, 10, {4}},
    {"all_empty", {0, 0}, 10, {2}},
    {"the_default", {1 << 20, (1 << 20) - 1, 1, 7 << 20}, TX_NO_INT, {1, 3, 4}},
    {"a_sum_beyond_int64", {INT64_MAX - 1, INT64_MAX - 1, INT64_MAX}, INT64_MAX, {2, 3}},
};
INSTANTIATE_TEST_SUITE_P(Cases, FsdpUnitsTest, testing::ValuesIn(kCases),
                         [](const auto &info) { return std::string(info.param.id); });

// The rule: a unit ends with the first block that makes it large enough; the last unit also takes the remaining blocks.
TEST(FsdpUnitsProperty, AUnitIsNoLargerThanItMustBeAndNoneIsSmallerThanTheLeast) {
  std::mt19937_64 random(23);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int round = 0; round < 3000; round++) {
    Numbers numels(static_cast<size_t>(draw(0, 20)));
    for (int64_t &numel : numels)
      numel = draw(0, 10);
    const int64_t least = draw(1, 30);
    const Numbers ends = Ends(numels, least);
    ASSERT_EQ(ends.empty(), numels.empty());
    int64_t begin = 0;
    for (size_t u = 0; u < ends.size(); u++) {
      const bool is_last = u + 1 == ends.size();
      ASSERT_LT(begin, ends[u]);
      const auto first = numels.begin() + begin, last = numels.begin() + ends[u];
      const bool is_enough = std::accumulate(first, last, INT64_C(0)) >= least;
      ASSERT_TRUE(is_enough || ends.size() == 1) << "round " << round;
      if (!is_last) {
        ASSERT_LT(std::accumulate(first, last - 1, INT64_C(0)), least) << "round " << round;
      } else {
        // The last unit: the blocks after those that made it large enough are not enough for another unit.
        int64_t rest = 0, numel = 0;
        for (auto it = first; it != last; it++) {
          if (numel >= least) rest += *it;
          numel += *it;
        }
        ASSERT_LT(rest, least) << "round " << round;
      }
      begin = ends[u];
    }
    if (!ends.empty()) {
      ASSERT_EQ(ends.back(), static_cast<int64_t>(numels.size()));
    }
  }
}

}  // namespace
