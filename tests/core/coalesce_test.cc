// csrc/core/coalesce: which buckets are sent in one message.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "csrc/torch_ext_advanced.h"

namespace {

using Numbers = std::vector<int64_t>;

constexpr int64_t kMiB = 1 << 20;
constexpr double kInf = std::numeric_limits<double>::infinity();

// The speed of a link, in Gbit/s, on which 1 MiB of a bucket takes `ms` milliseconds, for two ranks that both get the
// sum.
double Link(double ms) {
  return static_cast<double>(kMiB) * 8e-6 / ms;
}

struct Case {
  const char *id;
  Numbers bytes;
  double link_gbps;
  Numbers ends;
  Numbers buffer = {};  // empty: all in one buffer
  int64_t world = 2;
  int32_t sharded = 0, compressed = 0;
};

void PrintTo(const Case &c, std::ostream *out) {
  *out << c.id;
}

struct Found {
  tx_status status;
  Numbers ends;
  std::string message;
};

Found Coalesce(const Case &c) {
  const Numbers buffer = c.buffer.empty() ? Numbers(c.bytes.size(), 0) : c.buffer;
  tx_coalesce_args args = TX_COALESCE_ARGS_INIT;
  args.n_buckets = static_cast<int64_t>(c.bytes.size());
  args.bytes = c.bytes.data();
  args.buffer = buffer.data();
  args.world = c.world;
  args.link_gbps = c.link_gbps;
  args.sharded = c.sharded;
  args.compressed = c.compressed;
  Numbers ends(c.bytes.size());
  int64_t n = -1;
  tx_error error = {};
  const tx_status status = tx_coalesce(&args, ends.data(), &n, &error);
  if (status == TX_OK) ends.resize(static_cast<size_t>(n));
  return {status, ends, error.message};
}

Numbers Each(int64_t n, int64_t value) {
  return Numbers(static_cast<size_t>(n), value);
}

// step, 2 * step, ... up to n
Numbers Every(int64_t n, int64_t step) {
  Numbers found;
  for (int64_t i = step; i <= n; i += step)
    found.push_back(i);
  return found;
}

Numbers operator+(Numbers a, const Numbers &b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

class CoalesceTest : public testing::TestWithParam<Case> {};

TEST_P(CoalesceTest, joins) {
  const Found found = Coalesce(GetParam());
  ASSERT_EQ(found.status, TX_OK) << found.message;
  EXPECT_EQ(found.ends, GetParam().ends);
}

const Case kCases[] = {
    {"none", {}, Link(1), {}},
    {"one", {kMiB}, Link(1), {1}},
    {"a_link_that_nobody_knows", Each(8, kMiB), 0, Every(8, 1)},
    {"a_slow_link", Each(8, kMiB), Link(12), Every(8, 1)},
    {"what_takes_a_little_less_than_2500_us_is_joined_until_it_takes_10_ms", Each(40, kMiB / 4), Link(9.9),
     Every(40, 5)},
    {"what_takes_a_little_more_than_2500_us_is_not", Each(40, kMiB / 4), Link(10.1), Every(40, 1)},
    {"until_it_takes_10_ms", Each(64, kMiB / 4), Link(8), Every(64, 5) + Numbers{64}},
    // 2 ms each. Five would take 10 ms, but a message has at most a quarter of the buffer, or half of a small one.
    {"a_quarter_of_the_buffer_at_most", Each(40, kMiB / 2), Link(1), Every(40, 10)},
    {"half_of_a_small_buffer_at_most", Each(8, kMiB), Link(2), {4, 8}},
    {"eight_megabytes_at_most", Each(64, 3 * kMiB), Link(0.7), Every(64, 2)},
    {"large_ones_alone", Each(8, 9 * kMiB), Link(0.1), Every(8, 1)},
    {"never_more_than_16_ms", Numbers{kMiB, 15 * kMiB, kMiB} + Each(20, kMiB), Link(2.4), {1, 2, 7, 12, 17, 22, 23}},
    {"never_across_buffers", Each(8, kMiB), Link(2), {2, 4, 6, 8}, {0, 0, 0, 0, 1, 1, 1, 1}},
    {"by_buffer", Each(16, kMiB), Link(2), {4, 8, 12, 16}, {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1}},
    {"empty_ones", {0, 0, 0}, Link(1), {3}},
    {"a_small_buffer_that_takes_5_ms_at_once", Each(8, kMiB), Link(0.62), {8}},
    {"a_small_buffer_that_takes_a_little_more", Each(8, kMiB), Link(0.63), {4, 8}},
    {"a_buffer_a_little_too_large_to_leave_at_once", Each(8, kMiB) + Numbers{1}, Link(0.1), {4, 8, 9}},
    {"small_buffers_on_a_fast_link", Each(6, kMiB), Link(0.1), {4, 6}, {0, 0, 0, 0, 1, 1}},
    {"a_link_without_bounds", Each(8, kMiB), kInf, {8}},
    // More ranks send more bytes per bucket: the same number of buckets is joined if the link is faster by that factor.
    {"of_many_ranks_nearly_twice_as_much_is_sent", Each(40, kMiB / 4), Link(5.01), Every(40, 1), {}, 1 << 20},
    {"and_of_four_half_more", Each(40, kMiB / 4), Link(9.9 / 1.5), Every(40, 5), {}, 4},
    {"of_sums_that_stay_where_they_are_half", Each(40, kMiB / 4), Link(19.8), Every(40, 5), {}, 2, 1},
    {"one_rank_sends_nothing", Each(8, kMiB), Link(1000), {8}, {}, 1},
    {"compressed_ones_do_not_leave_at_once", Each(8, kMiB), Link(0.1), Every(8, 1), {}, 2, 0, 1},
};

INSTANTIATE_TEST_SUITE_P(Table, CoalesceTest, testing::ValuesIn(kCases),
                         [](const testing::TestParamInfo<Case> &info) { return std::string(info.param.id); });

TEST(Coalesce, every_bucket_leaves_once_and_joined_ones_keep_their_bounds) {
  std::mt19937_64 random(0);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  int64_t joined = 0;
  for (int round = 0; round < 2000; round++) {
    Case c = {};
    for (int64_t b = 0, n = below(40), buffer = 0; b < n; b++) {
      c.bytes.push_back(below(4 * kMiB));
      c.buffer.push_back(buffer += below(9) == 0);
    }
    c.link_gbps = static_cast<double>(below(200)) / 10;
    c.world = 1 + below(9);
    c.sharded = static_cast<int32_t>(below(2));
    c.compressed = static_cast<int32_t>(below(2));
    const Found found = Coalesce(c);
    ASSERT_EQ(found.status, TX_OK);
    int64_t begin = 0;
    for (const int64_t end : found.ends) {
      ASSERT_LT(begin, end);
      int64_t bytes = 0;
      for (int64_t b = begin; b < end; b++) {
        ASSERT_EQ(c.buffer[static_cast<size_t>(b)], c.buffer[static_cast<size_t>(begin)]);
        bytes += c.bytes[static_cast<size_t>(b)];
      }
      if (end - begin > 1) {
        joined++;
        ASSERT_LE(bytes, TX_COALESCE_BYTES);
        const double sent = (1 - 1 / static_cast<double>(c.world)) * (c.sharded ? 1 : 2);
        ASSERT_LE(static_cast<double>(bytes) * sent * 8e-6 / c.link_gbps, 16.001) << "milliseconds";
      }
      begin = end;
    }
    ASSERT_EQ(begin, static_cast<int64_t>(c.bytes.size()));
  }
  EXPECT_GT(joined, 1000);
}

TEST(Coalesce, most_is_a_quarter_but_half_of_what_is_small) {
  struct {
    int64_t buffer, most, sharded;
  } const cases[] = {
      {0, 0, 0},
      {1, 0, 0},
      {2 * kMiB, kMiB, kMiB},
      {8 * kMiB, 4 * kMiB, 4 * kMiB},
      {15 * kMiB, 4 * kMiB, 4 * kMiB},
      {16 * kMiB, 4 * kMiB, 4 * kMiB},
      {24 * kMiB, 6 * kMiB, 4 * kMiB},
      {32 * kMiB, 8 * kMiB, 4 * kMiB},
      {400 * kMiB, 8 * kMiB, 4 * kMiB},
      {INT64_MAX, TX_COALESCE_BYTES, TX_COALESCE_SMALL},
  };
  for (const auto &c : cases) {
    EXPECT_EQ(tx_coalesce_most(c.buffer, 0, 0), c.most) << c.buffer;
    EXPECT_EQ(tx_coalesce_most(c.buffer, 1, 0), c.sharded) << c.buffer;
  }
}

// Memory of two compressed messages in both directions and of their expanded form: at most that of two uncompressed
// messages of joined buckets.
TEST(Coalesce, compressed_ones_take_no_more_memory) {
  for (const int64_t buffer : {int64_t{0}, 2 * kMiB, 15 * kMiB, 24 * kMiB, 400 * kMiB, INT64_MAX}) {
    for (const int32_t sharded : {0, 1}) {
      const int64_t most = tx_coalesce_most(buffer, sharded, 0), compressed = tx_coalesce_most(buffer, sharded, 1);
      EXPECT_LE(static_cast<double>(compressed) * (2 + 1 / 0.7597), static_cast<double>(most)) << buffer;
      EXPECT_GE(static_cast<double>(compressed) * 3.4, static_cast<double>(most) - 100) << buffer;
    }
  }
}

TEST(Coalesce, what_may_leave_at_once_takes_no_more_memory) {
  for (const int64_t buffer : {int64_t{0}, int64_t{1000}, kMiB, 8 * kMiB}) {
    EXPECT_EQ(tx_coalesce_whole(buffer), 1) << buffer;
    for (const int32_t sharded : {0, 1})
      EXPECT_EQ(2 * tx_coalesce_most(buffer, sharded, 0), buffer);
  }
  EXPECT_EQ(tx_coalesce_whole(8 * kMiB + 1), 0);
  EXPECT_EQ(tx_coalesce_whole(INT64_MAX), 0);
}

TEST(Coalesce, compressed_and_sharded_ones_have_limits_of_their_own) {
  const struct {
    int32_t sharded, compressed;
    int64_t first;
  } cases[] = {{0, 0, 16}, {0, 1, 4}, {1, 0, 8}, {1, 1, 2}};  // the limits are 8, 2.4, 4 and 1.2 MiB
  for (const auto &limits : cases) {
    const Found found = Coalesce({"", Each(64, kMiB / 2), Link(0.6), {}, {}, 2, limits.sharded, limits.compressed});
    ASSERT_EQ(found.status, TX_OK);
    EXPECT_EQ(found.ends[0], limits.first) << limits.sharded << limits.compressed;
  }
}

TEST(Coalesce, bytes_beyond_64_bits_are_the_most_there_is) {
  const Found found = Coalesce({"", {INT64_MAX, INT64_MAX, 1}, 1, {}});
  EXPECT_EQ(found.status, TX_OK);
  EXPECT_EQ(found.ends.back(), 3);
}

TEST(Coalesce, says_what_is_not_legal) {
  EXPECT_NE(Coalesce({"", {5, -1}, 1, {}}).message.find("bucket 1 has -1 bytes"), std::string::npos);
  EXPECT_NE(Coalesce({"", {5}, 1, {}, {}, 0}).message.find("1 buckets, 0 ranks"), std::string::npos);
  for (const double gbps : {-1.0, -kInf, static_cast<double>(NAN)}) {
    const Found found = Coalesce({"", {5}, gbps, {}});
    EXPECT_EQ(found.status, TX_ERROR_INVALID_ARGUMENT);
    EXPECT_NE(found.message.find("Gbit/s; legal:"), std::string::npos) << found.message;
  }
  tx_coalesce_args args = TX_COALESCE_ARGS_INIT;
  int64_t n = 0, ends[1];
  const int64_t bytes[] = {5}, buffer[] = {0};
  args.world = args.n_buckets = 1;
  EXPECT_EQ(tx_coalesce(&args, ends, &n, nullptr), TX_ERROR_INVALID_ARGUMENT);
  args.bytes = bytes;
  EXPECT_EQ(tx_coalesce(&args, ends, &n, nullptr), TX_ERROR_INVALID_ARGUMENT);
  args.buffer = buffer;
  EXPECT_EQ(tx_coalesce(&args, nullptr, &n, nullptr), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_coalesce(&args, ends, nullptr, nullptr), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_coalesce(nullptr, ends, &n, nullptr), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_coalesce(&args, ends, &n, nullptr), TX_OK);
}

TEST(Cuts, a_bucket_that_somebody_else_made) {
  const int64_t bucket = 25 << 20;
  struct {
    const char *what;
    int64_t bytes, world;
    double link_gbps;
    int32_t compressed;
    int64_t cuts;
  } const cases[] = {
      {"not known", bucket, 2, 0, 0, 1},
      {"one rank", bucket, 1, 1, 0, 1},
      {"nothing", 0, 2, 1, 0, 1},
      {"none is longer than a quarter", bucket, 2, 1000, 0, 4},
      {"or 16 ms", bucket, 2, 1, 0, 14},
      {"of which four ranks need more", bucket, 4, 1, 0, 20},
      {"compressed ones need memory of their own", bucket, 2, 1000, 1, 14},
      {"none is shorter than 256 KiB", bucket, 2, 1e-6, 0, 100},
      {"little is sent at once where the link is fast", 6 << 20, 2, 1000, 0, 1},
      {"and in parts where it is not", 6 << 20, 2, 10, 0, 2},
      {"as short as it is", 1000, 4, 1e-6, 1, 1},
  };
  for (const auto &c : cases)
    EXPECT_EQ(tx_coalesce_cuts(c.bytes, c.world, c.link_gbps, c.compressed), c.cuts) << c.what;
  EXPECT_EQ(tx_coalesce_cuts(bucket, 2, kInf, 0), 4);
  EXPECT_EQ(tx_coalesce_cuts(bucket, 2, std::numeric_limits<double>::quiet_NaN(), 0), 1);
}

}  // namespace
