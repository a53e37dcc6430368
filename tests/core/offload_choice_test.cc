// tx_offload_choose: which parameters the host steps.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "csrc/torch_ext_advanced.h"

namespace {

using Numbers = std::vector<int64_t>;

Numbers Choose(const Numbers &bytes, double fraction) {
  Numbers heap(bytes.size()), positions;
  std::vector<int32_t> chosen(bytes.size(), -1);
  tx_error error = {};
  EXPECT_EQ(
      tx_offload_choose(bytes.data(), static_cast<int64_t>(bytes.size()), fraction, heap.data(), chosen.data(), &error),
      TX_OK)
      << error.message;
  for (size_t i = 0; i < bytes.size(); i++) {
    EXPECT_TRUE(chosen[i] == 0 || chosen[i] == 1);
    if (chosen[i]) positions.push_back(static_cast<int64_t>(i));
  }
  return positions;
}

struct Case {
  const char *id;
  Numbers bytes;
  double fraction;
  Numbers chosen;
};

void PrintTo(const Case &c, std::ostream *out) {
  *out << c.id;
}

class OffloadChoiceTest : public testing::TestWithParam<Case> {};

TEST_P(OffloadChoiceTest, IsAFunctionOfBytesAndFraction) {
  EXPECT_EQ(Choose(GetParam().bytes, GetParam().fraction), GetParam().chosen);
}

constexpr int64_t kHalf = INT64_MAX / 2;

const Case kCases[] = {
    {"nothing", {5, 7}, 0.0, {}},
    {"minus_nothing", {5, 7}, -0.0, {}},
    {"everything", {5, 7, 3}, 1.0, {0, 1, 2}},
    {"what_has_no_bytes_stays", {5, 0, 3}, 1.0, {0, 2}},
    {"nobody", {}, 0.5, {}},
    {"nothing_but_zeros", {0, 0}, 0.5, {}},
    {"largest_first", {1, 4, 2, 1}, 0.5, {1}},
    {"the_first_of_equal_ones", {2, 2, 2, 2}, 0.5, {0, 1}},
    {"larger_ones_that_do_not_fit_are_passed_over", {10, 3, 2, 1}, 0.25, {1, 3}},
    {"one_too_many_is_nearer_than_one_too_few", {10, 10, 10}, 0.6, {0, 1}},
    {"as_near_either_way_less", {2, 2}, 0.25, {}},
    {"one_below_a_half", {8}, 0.4, {}},
    {"one_above_a_half", {8}, 0.6, {0}},
    {"one_above_a_half_by_a_bit", {1}, 0.5 + 0x1p-52, {0}},
    {"a_fraction_that_no_binary_number_is", Numbers(10, 1), 0.3, {0, 1, 2}},
    {"beyond_2_to_53", {(INT64_C(1) << 60) + 1, INT64_C(1) << 60}, 0.5, {1}},
    {"as_many_as_there_can_be", {kHalf, kHalf}, 1.0, {0, 1}},
    {"all_of_them_but_a_bit", {kHalf, kHalf}, 1.0 - 0x1p-53, {0, 1}},
    {"a_fraction_of_almost_nothing", {kHalf, kHalf}, 0x1p-60, {}},
    {"the_least_fraction_there_is", {kHalf, 1}, std::numeric_limits<double>::denorm_min(), {}},
};
INSTANTIATE_TEST_SUITE_P(Cases, OffloadChoiceTest, testing::ValuesIn(kCases),
                         [](const auto &info) { return std::string(info.param.id); });

TEST(OffloadChoiceRefusal, NamesWhatIsNotLegal) {
  int64_t bytes[] = {INT64_MAX, 1}, heap[2];
  int32_t chosen[2];
  tx_error error;
  for (const double fraction : {-0.1, 1.5, std::nan(""), HUGE_VAL}) {
    EXPECT_EQ(tx_offload_choose(bytes, 1, fraction, heap, chosen, &error), TX_ERROR_ILLEGAL_VALUE);
    EXPECT_NE(std::string(error.message).find("; a number in [0, 1] is legal"), std::string::npos) << error.message;
  }
  EXPECT_EQ(tx_offload_choose(bytes, 2, 0.5, heap, chosen, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error.message).find("bytes[1] is 1"), std::string::npos) << error.message;
  bytes[0] = -1;
  EXPECT_EQ(tx_offload_choose(bytes, 2, 0.5, heap, chosen, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error.message).find("bytes[0] is -1"), std::string::npos) << error.message;
  EXPECT_EQ(tx_offload_choose(bytes, -1, 0.5, heap, chosen, nullptr), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_offload_choose(nullptr, 1, 0.5, heap, chosen, nullptr), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_offload_choose(bytes, 1, 0.5, nullptr, chosen, nullptr), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_offload_choose(bytes, 1, 0.5, heap, nullptr, nullptr), TX_ERROR_INVALID_ARGUMENT);
}

// The rule of the header, with a sort and exact numbers: fractions are multiples of 1/1024 here.
Numbers Oracle(const Numbers &bytes, int64_t of_1024) {
  Numbers order(bytes.size());
  std::iota(order.begin(), order.end(), 0);
  const auto size = [&](int64_t i) { return bytes[static_cast<size_t>(i)]; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return size(i) > size(j); });
  int64_t wanted = of_1024 * std::accumulate(bytes.begin(), bytes.end(), INT64_C(0)), smallest = -1;
  Numbers chosen;
  for (const int64_t i : order) {
    if (size(i) == 0) continue;
    if (1024 * size(i) <= wanted) {
      chosen.push_back(i);
      wanted -= 1024 * size(i);
    } else if (smallest < 0 || size(i) < size(smallest)) {
      smallest = i;
    }
  }
  if (smallest >= 0 && 1024 * size(smallest) - wanted < wanted) chosen.push_back(smallest);
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

TEST(OffloadChoiceProperty, IsTheOraclesAndOffByHalfOfTheSmallestLeftOutAtMost) {
  std::mt19937_64 random(23);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int round = 0; round < 3000; round++) {
    const int64_t most = INT64_C(1) << draw(0, 40);
    Numbers bytes(static_cast<size_t>(draw(0, 40)));
    for (int64_t &size : bytes)
      size = draw(0, 9) ? draw(1, most) : 0;
    const int64_t of_1024 = draw(0, 1024);
    const Numbers chosen = Choose(bytes, static_cast<double>(of_1024) / 1024);
    ASSERT_EQ(chosen, Oracle(bytes, of_1024)) << "round " << round;
    int64_t missing = of_1024 * std::accumulate(bytes.begin(), bytes.end(), INT64_C(0)), least = INT64_MAX;
    for (size_t i = 0; i < bytes.size(); i++) {
      if (std::binary_search(chosen.begin(), chosen.end(), static_cast<int64_t>(i))) {
        missing -= 1024 * bytes[i];
      } else if (bytes[i] > 0) {
        least = std::min(least, bytes[i]);
      }
    }
    if (least < INT64_MAX) {
      ASSERT_LE(2 * std::abs(missing), 1024 * least);
    } else if (of_1024 == 1024) {
      ASSERT_EQ(missing, 0);
    }
  }
}

}  // namespace
