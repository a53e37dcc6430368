// tx_layout_boxes: divides a flat slice of a tensor into boxes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "csrc/torch_ext_advanced.h"

namespace {

using Numbers = std::vector<int64_t>;

struct Found {
  tx_status status;
  std::vector<Numbers> boxes;  // for each box the offsets, then the sizes
  std::string message;
};

Found Boxes(const Numbers &shape, const Numbers &order, int64_t start, int64_t stop, int64_t limit) {
  const int64_t ndim = static_cast<int64_t>(shape.size());
  const int64_t *by = order.empty() ? nullptr : order.data();
  int64_t n = -1, again = -1;
  tx_error error = {};
  tx_status status = tx_layout_boxes(shape.data(), by, ndim, start, stop, limit, nullptr, 0, &n, &error);
  if (status != TX_OK) return {status, {}, error.message};
  Numbers flat(static_cast<size_t>(n * 2 * ndim) + 1);
  status = tx_layout_boxes(shape.data(), by, ndim, start, stop, limit, flat.data(), n, &again, &error);
  EXPECT_EQ(n, again);
  std::vector<Numbers> boxes;
  for (int64_t b = 0; b < n; b++)
    boxes.emplace_back(flat.begin() + b * 2 * ndim, flat.begin() + (b + 1) * 2 * ndim);
  return {status, boxes, error.message};
}

struct Case {
  const char *id;
  Numbers shape, order;
  int64_t start, stop, limit;
  std::vector<Numbers> boxes;
};

void PrintTo(const Case &c, std::ostream *out) {
  *out << c.id;
}

class BoxesTest : public testing::TestWithParam<Case> {};

TEST_P(BoxesTest, InMemoryOrder) {
  const Case &c = GetParam();
  const Found found = Boxes(c.shape, c.order, c.start, c.stop, c.limit);
  ASSERT_EQ(found.status, TX_OK) << found.message;
  EXPECT_EQ(found.boxes, c.boxes);
}

const Case kCases[] = {
    {"a_vector", {10}, {}, 2, 7, INT64_MAX, {{2, 5}}},
    {"inside_of_a_row", {4, 10}, {}, 12, 17, INT64_MAX, {{1, 2, 1, 5}}},
    {"two_rows_both_in_part", {4, 10}, {}, 15, 23, INT64_MAX, {{1, 5, 1, 5}, {2, 0, 1, 3}}},
    {"head_rows_and_tail", {4, 10}, {}, 5, 32, INT64_MAX, {{0, 5, 1, 5}, {1, 0, 2, 10}, {3, 0, 1, 2}}},
    {"by_columns", {4, 10}, {1, 0}, 2, 9, INT64_MAX, {{2, 0, 2, 1}, {0, 1, 4, 1}, {0, 2, 1, 1}}},
    {"five_of_three_dimensions",
     {4, 3, 2},
     {},
     1,
     23,
     INT64_MAX,
     {{0, 0, 1, 1, 1, 1}, {0, 1, 0, 1, 2, 2}, {1, 0, 0, 2, 3, 2}, {3, 0, 0, 1, 2, 2}, {3, 2, 0, 1, 1, 1}}},
    {"rows_within_the_limit", {4, 10}, {}, 0, 40, 25, {{0, 0, 2, 10}, {2, 0, 2, 10}}},
    {"parts_of_rows_above_the_limit", {2, 10}, {}, 0, 20, 6, {{0, 0, 1, 6}, {0, 6, 1, 4}, {1, 0, 1, 6}, {1, 6, 1, 4}}},
    {"a_scalar", {}, {}, 0, 1, INT64_MAX, {{}}},
    {"nothing_of_a_scalar", {}, {}, 0, 0, INT64_MAX, {}},
    {"nothing_of_it", {4, 10}, {}, 40, 40, INT64_MAX, {}},
    {"nothing_of_nothing", {0, 3}, {}, 0, 0, INT64_MAX, {}},
    {"a_whole_tensor", {4, 10}, {0, 1}, 0, 40, INT64_MAX, {{0, 0, 4, 10}}},
};
INSTANTIATE_TEST_SUITE_P(Cases, BoxesTest, testing::ValuesIn(kCases),
                         [](const auto &info) { return std::string(info.param.id); });

struct Refusal {
  const char *id;
  Numbers shape, order;
  int64_t start, stop, limit;
  tx_status status;
  const char *says;
};

void PrintTo(const Refusal &c, std::ostream *out) {
  *out << c.id;
}

class BoxesRefusalTest : public testing::TestWithParam<Refusal> {};

TEST_P(BoxesRefusalTest, NamesWhatIsNotLegal) {
  const Refusal &c = GetParam();
  const Found found = Boxes(c.shape, c.order, c.start, c.stop, c.limit);
  EXPECT_EQ(found.status, c.status);
  EXPECT_NE(found.message.find(c.says), std::string::npos) << found.message;
}

const Refusal kRefusals[] = {
    {"a_limit_of_0", {4}, {}, 0, 4, 0, TX_ERROR_INVALID_ARGUMENT, "boxes of 0 elements"},
    {"a_negative_size", {4, -1}, {}, 0, 0, 1, TX_ERROR_SHAPE, "shape[1] is -1"},
    {"too_many_elements", {INT64_MAX, 2}, {}, 0, 4, 1, TX_ERROR_SHAPE, "shape[1] is 2"},
    {"a_dimension_twice", {4, 4}, {1, 1}, 0, 4, 1, TX_ERROR_INVALID_ARGUMENT, "order[1] is 1"},
    {"no_such_dimension", {4, 4}, {2, 0}, 0, 4, 1, TX_ERROR_INVALID_ARGUMENT, "order[0] is 2; legal: 0 ... 1"},
    {"before_its_begin", {4}, {}, -1, 4, 1, TX_ERROR_SHAPE, "[-1, 4) of 4"},
    {"behind_its_end", {4}, {}, 0, 5, 1, TX_ERROR_SHAPE, "[0, 5) of 4"},
    {"backwards", {4}, {}, 3, 2, 1, TX_ERROR_SHAPE, "[3, 2) of 4"},
};
INSTANTIATE_TEST_SUITE_P(Cases, BoxesRefusalTest, testing::ValuesIn(kRefusals),
                         [](const auto &info) { return std::string(info.param.id); });

TEST(BoxesRefusal, NullArraysAndTooLittleRoom) {
  const int64_t shape[] = {4, 10};
  int64_t boxes[4], n;
  EXPECT_EQ(tx_layout_boxes(nullptr, nullptr, 1, 0, 1, 1, nullptr, 0, &n, nullptr), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_layout_boxes(shape, nullptr, 2, 0, 1, 1, nullptr, 0, nullptr, nullptr), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_layout_boxes(shape, nullptr, -1, 0, 1, 1, nullptr, 0, &n, nullptr), TX_ERROR_INVALID_ARGUMENT);
  tx_error error;
  EXPECT_EQ(tx_layout_boxes(shape, nullptr, 2, 5, 15, 99, boxes, 1, &n, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_STREQ(error.message, "tx_layout_boxes: there are more than 1 boxes");
}

TEST(BoxesProperty, EveryElementOnceInMemoryOrderAndAtMost2kMinus1Boxes) {
  std::mt19937_64 random(23);
  const auto draw = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  const int64_t limits[] = {INT64_MAX, 1, 2, 7, 20};
  for (int round = 0; round < 4000; round++) {
    const size_t ndim = static_cast<size_t>(draw(0, 4));
    Numbers shape(ndim), order(ndim), strides(ndim);
    for (int64_t &size : shape)
      size = draw(1, 5);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    int64_t numel = 1;
    for (size_t i = ndim; i-- > 0;) {
      strides[static_cast<size_t>(order[i])] = numel;
      numel *= shape[static_cast<size_t>(order[i])];
    }
    const int64_t start = draw(0, numel), stop = draw(start, numel), limit = limits[draw(0, 4)];
    const Found found = Boxes(shape, order, start, stop, limit);
    ASSERT_EQ(found.status, TX_OK) << found.message;
    if (limit == INT64_MAX) {
      ASSERT_LE(found.boxes.size(), std::max<size_t>(2 * ndim, 2) - 1);
    }
    int64_t at = start;
    for (const Numbers &box : found.boxes) {
      // The addresses of the box's elements, ascending.
      Numbers addresses = {0};
      for (size_t d = 0; d < ndim; d++) {
        Numbers longer;
        for (const int64_t address : addresses)
          for (int64_t i = 0; i < box[ndim + d]; i++)
            longer.push_back(address + (box[d] + i) * strides[d]);
        addresses = longer;
      }
      ASSERT_GE(addresses.size(), 1u);
      ASSERT_LE(static_cast<int64_t>(addresses.size()), limit);
      std::sort(addresses.begin(), addresses.end());
      for (const int64_t address : addresses)
        ASSERT_EQ(address, at++);
    }
    ASSERT_EQ(at, stop);
  }
}

}  // namespace
