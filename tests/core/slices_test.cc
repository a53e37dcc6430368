// tx_layout_slices: which parts of placed parameters are in which range.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "csrc/torch_ext_advanced.h"

namespace {

using Slices = std::vector<tx_layout_slice>;
using Ranges = std::vector<tx_layout_range>;

struct Found {
  tx_status status;
  Slices slices;
  std::string message;
};

Found Cut(const Slices &placed, const Ranges &ranges, size_t capacity) {
  Slices slices(capacity);
  int64_t n = -1;
  tx_error error = {};
  const tx_status status =
      tx_layout_slices(placed.data(), static_cast<int64_t>(placed.size()), ranges.data(),
                       static_cast<int64_t>(ranges.size()), slices.data(), static_cast<int64_t>(capacity), &n, &error);
  if (status == TX_OK) slices.resize(static_cast<size_t>(n));
  return {status, slices, error.message};
}

Found Cut(const Slices &placed, const Ranges &ranges) {
  return Cut(placed, ranges, placed.size() + ranges.size());
}

std::string Text(const Slices &slices) {
  std::string text;
  for (const tx_layout_slice &s : slices) {
    text += std::to_string(s.param) + ":" + std::to_string(s.first) + "+" + std::to_string(s.numel) + "@" +
            std::to_string(s.at) + " ";
  }
  return text;
}

struct Case {
  const char *id;
  Slices placed;
  Ranges ranges;
  const char *slices;  // param:first+numel@at
};

void PrintTo(const Case &c, std::ostream *out) {
  *out << c.id;
}

class SlicesTest : public testing::TestWithParam<Case> {};

TEST_P(SlicesTest, OfEachRangeInTurn) {
  const Found found = Cut(GetParam().placed, GetParam().ranges);
  ASSERT_EQ(found.status, TX_OK) << found.message;
  EXPECT_EQ(Text(found.slices), GetParam().slices);
}

const Slices kThree = {{7, 0, 100, 0}, {5, 0, 300, 128}, {6, 0, 50, 512}};

const Case kCases[] = {
    {"nothing_placed", {}, {{0, 9}}, ""},
    {"no_range", kThree, {}, ""},
    {"everything", kThree, {{0, 640}}, "7:0+100@0 5:0+300@128 6:0+50@512 "},
    {"counted_from_the_range", kThree, {{128, 640}}, "5:0+300@0 6:0+50@384 "},
    {"both_ends_inside", kThree, {{50, 520}}, "7:50+50@0 5:0+300@78 6:0+8@462 "},
    {"inside_of_one", kThree, {{200, 300}}, "5:72+100@0 "},
    {"between_two", kThree, {{100, 128}}, ""},
    {"an_empty_range", kThree, {{200, 200}}, ""},
    {"side_by_side", kThree, {{0, 64}, {128, 256}, {64, 128}}, "7:0+64@0 5:0+128@64 7:64+36@192 "},
    {"the_same_twice", kThree, {{512, 640}, {512, 640}}, "6:0+50@0 6:0+50@128 "},
    {"a_slice_of_a_slice", {{3, 40, 60, 10}}, {{20, 30}}, "3:50+10@0 "},
    {"empty_ones_are_left_out", {{1, 0, 0, 0}, {2, 0, 8, 0}, {3, 0, 0, 8}}, {{0, 128}}, "2:0+8@0 "},
    {"below_zero", {{1, 0, 20, -10}}, {{-5, 5}}, "1:5+10@0 "},
    {"in_any_order",
     {{1, 0, 10, 20}, {2, 0, 9, 0}, {3, 0, 0, 0}, {1, 0, 10, 20}},
     {{5, 22}},
     "1:0+2@15 2:5+4@0 1:0+2@15 "},
    {"a_negative_count_is_none", {{1, 0, -4, 5}}, {{0, 10}}, ""},
    {"as_far_as_numbers_go", {{1, 0, 5, INT64_MAX - 5}}, {{INT64_MAX - 2, INT64_MAX}}, "1:3+2@0 "},
};
INSTANTIATE_TEST_SUITE_P(Cases, SlicesTest, testing::ValuesIn(kCases),
                         [](const auto &info) { return std::string(info.param.id); });

struct Refusal {
  const char *id;
  Slices placed;
  Ranges ranges;
  size_t capacity;
  const char *says;
};

void PrintTo(const Refusal &c, std::ostream *out) {
  *out << c.id;
}

class SlicesRefusalTest : public testing::TestWithParam<Refusal> {};

TEST_P(SlicesRefusalTest, NamesWhatIsNotLegal) {
  const Found found = Cut(GetParam().placed, GetParam().ranges, GetParam().capacity);
  EXPECT_EQ(found.status, TX_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(found.message.find(GetParam().says), std::string::npos) << found.message;
}

const Refusal kRefusals[] = {
    {"a_range_that_ends_before_it_begins", {}, {{0, 1}, {2, 1}}, 2, "ranges[1] is [2, 1)"},
    {"a_range_that_overflows", {}, {{INT64_MIN, INT64_MAX}}, 2, "ranges[0]"},
    {"ranges_that_overflow", {}, {{0, INT64_MAX}, {0, 1}}, 2, "ranges[1]"},
    {"an_element_that_overflows", {{0, INT64_MAX, 9, 0}}, {{1, 2}}, 2, "that an int64 counts"},
    {"too_little_room", kThree, {{0, 640}}, 2, "room for 2; legal: n + n_ranges"},
};
INSTANTIATE_TEST_SUITE_P(Cases, SlicesRefusalTest, testing::ValuesIn(kRefusals),
                         [](const auto &info) { return std::string(info.param.id); });

TEST(SlicesRefusal, NullArrays) {
  int64_t n;
  tx_layout_slice slice = {0, 0, 1, 0};
  tx_layout_range range = {0, 1};
  EXPECT_EQ(tx_layout_slices(nullptr, 1, &range, 1, &slice, 1, &n, nullptr), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_layout_slices(&slice, 1, nullptr, 1, &slice, 1, &n, nullptr), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_layout_slices(&slice, 1, &range, 1, nullptr, 1, &n, nullptr), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_layout_slices(&slice, 1, &range, 1, &slice, 1, nullptr, nullptr), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_layout_slices(&slice, -1, &range, 1, &slice, 1, &n, nullptr), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_layout_slices(&slice, 1, &range, -1, &slice, 1, &n, nullptr), TX_ERROR_INVALID_ARGUMENT);
}

// The oracle: for each element of the ranges, its parameter and its index there; -1: none.
using Element = std::pair<int64_t, int64_t>;
constexpr Element kNone = {-1, -1};

TEST(SlicesProperty, EveryElementIsWhereElementByElementSaysItIs) {
  std::mt19937_64 random(23);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int round = 0; round < 2000; round++) {
    Slices placed;
    int64_t end = draw(-20, 20);
    const int64_t begin = end;
    std::vector<Element> memory;
    for (int64_t i = 0, n = draw(0, 6); i < n; i++) {
      const tx_layout_slice p = {draw(0, 99), draw(0, 9), draw(0, 3) ? draw(0, 30) : 0, end + draw(0, 1) * draw(0, 9)};
      memory.resize(static_cast<size_t>(p.at - begin), kNone);
      for (int64_t e = 0; e < p.numel; e++)
        memory.emplace_back(p.param, p.first + e);
      placed.push_back(p);
      end = p.at + p.numel;
    }
    Ranges ranges;
    std::vector<Element> wanted;
    for (int64_t r = draw(0, 5), at = begin - 5; r > 0; r--) {
      const int64_t from = at + draw(0, 20), to = from + draw(0, 40);
      ranges.push_back({from, to});
      for (int64_t e = from; e < to; e++)
        wanted.push_back(e < begin || e >= end ? kNone : memory[static_cast<size_t>(e - begin)]);
      at = to;
    }
    const Found found = Cut(placed, ranges);
    ASSERT_EQ(found.status, TX_OK) << found.message;
    std::vector<Element> is(wanted.size(), kNone);
    for (const tx_layout_slice &s : found.slices) {
      ASSERT_GT(s.numel, 0);
      for (int64_t e = 0; e < s.numel; e++) {
        Element &element = is.at(static_cast<size_t>(s.at + e));
        ASSERT_EQ(element, kNone) << "twice";
        element = {s.param, s.first + e};
      }
    }
    ASSERT_EQ(is, wanted) << "round " << round;
  }
}

}  // namespace
