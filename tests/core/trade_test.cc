// tx_trades: when two ranks send each other whole buckets instead of parts whose sums are then gathered.
#include <gtest/gtest.h>

#include <string>

#include "csrc/torch_ext_advanced.h"

namespace {

struct Case {
  const char *name;
  int64_t world, wire, sum;
  int32_t trades;
};

const Case kCases[] = {
    {"two_in_one_dtype", 2, 256, 256, 0}, {"sums_in_more_bytes", 2, 129, 256, 1},  {"sums_in_fewer", 2, 256, 129, 0},
    {"by_a_single_byte", 2, 255, 256, 1}, {"an_empty_bucket", 2, 0, 0, 0},         {"one_rank", 1, 256, 256, 0},
    {"three_ranks", 3, 256, 256, 0},      {"four_that_sum_wider", 4, 129, 256, 0},
};

class Trades : public testing::TestWithParam<Case> {};

TEST_P(Trades, WhereTwoRanksSendFewerBytes) {
  const Case &c = GetParam();
  EXPECT_EQ(tx_trades(c.world, c.wire, c.sum), c.trades);
}
INSTANTIATE_TEST_SUITE_P(Cases, Trades, testing::ValuesIn(kCases),
                         [](const auto &info) { return std::string(info.param.name); });

}  // namespace
