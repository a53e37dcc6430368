// csrc/core/coalesce: which buckets travel together.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "csrc/torch_ext.h"

namespace {

using Numbers = std::vector<int64_t>;

constexpr int64_t kMiB = 1 << 20, kMs = 1000;

struct Case {
  const char *id;
  Numbers bytes;
  Numbers ready;  // rank after rank
  Numbers ended;
  Numbers ends;
  Numbers buffer = {};  // empty: all in one
  Numbers tail = {};    // empty: not known
  int64_t tail_bytes = 0;
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
  args.n_ranks = static_cast<int64_t>(c.ended.size());
  args.ready = c.ready.data();
  args.ended = c.ended.data();
  args.tail = c.tail.empty() ? nullptr : c.tail.data();
  args.tail_bytes = c.tail_bytes;
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

// 0, step, 2 * step, ...
Numbers Every(int64_t n, int64_t step) {
  Numbers found;
  for (int64_t i = 0; i < n; i++)
    found.push_back(i * step);
  return found;
}

Numbers Alone(int64_t n) {
  Numbers found;
  for (int64_t i = 1; i <= n; i++)
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
    {"none", {}, {}, {0}, {}},
    {"one", {kMiB}, {0}, {9 * kMs}, {1}},
    {"complete_at_once_half_of_a_small_buffer_at_a_time", Each(8, kMiB), Each(8, 0), {30 * kMs}, {4, 8}},
    {"complete_at_once_a_quarter_at_a_time", Each(24, kMiB), Each(24, 0), {48 * kMs}, {6, 12, 18, 24}},
    {"nothing_measured", Each(8, kMiB), Each(8, 0), {0}, Alone(8)},
    {"nothing_measured_on_one_rank", Each(8, kMiB), Each(16, 0), {30 * kMs, 0}, Alone(8)},
    // 12 ms for each on the wire: two would be longer than 16 ms.
    {"a_slow_wire", Each(8, kMiB), Each(8, 0), {96 * kMs}, Alone(8)},
    // 7 ms each; backward is as fast as the wire, then is done, and the rest goes two at a time.
    {"a_wire_that_keeps_up", Each(16, kMiB), Every(16, 7 * kMs), {112 * kMs}, Alone(16)},
    {"a_wire_that_does_not", Each(8, kMiB), Every(8, 2 * kMs), {56 * kMs}, {1, 2, 4, 6, 8}},
    // 2 ms each: five of them would take 10, but four are the most.
    {"short_ones_are_waited_for", Each(12, kMiB), Every(12, 2 * kMs), {24 * kMs}, {4, 8, 12}},
    {"short_ones_make_messages_of_10_ms",
     Each(40, kMiB / 4),
     Every(40, 2 * kMs),
     {80 * kMs},
     {5, 10, 15, 20, 25, 30, 35, 40}},
    {"what_takes_4_ms_is_not_waited_for", Each(40, kMiB / 4), Every(40, 4 * kMs), {160 * kMs}, Alone(40)},
    {"half_of_what_waits", Each(40, kMiB), Every(40, kMs / 2), {40 * kMs}, {8, 16, 24, 32, 40}},
    {"the_slowest_rank_counts", Each(4, kMiB), Each(4, 0) + Every(4, 10 * kMs), {12 * kMs, 40 * kMs}, Alone(4)},
    {"never_across_buffers", Each(8, kMiB), Each(8, 0), {8 * kMs}, {2, 4, 6, 8}, {0, 0, 0, 0, 1, 1, 1, 1}},
    {"by_buffer",
     Each(16, kMiB),
     Each(16, 0),
     {16 * kMs},
     {4, 8, 12, 16},
     {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1}},
    {"eight_megabytes_at_most",
     Each(64, 3 * kMiB),
     Each(64, 0),
     {20 * kMs},
     [] {
       Numbers pairs;
       for (int64_t i = 2; i <= 64; i += 2)
         pairs.push_back(i);
       return pairs;
     }()},
    {"large_ones_alone", Each(8, 9 * kMiB), Each(8, 0), {8 * kMs}, Alone(8)},
    {"empty_ones", {0, 0, 0}, Each(3, 0), {kMs}, {3}},
    // Backward takes 20 ms for each, the wire 1: ten would take 10, but a quarter are four.
    {"a_long_backward_beside_a_fast_wire",
     Each(16, kMiB),
     Every(16, 20 * kMs),
     {301 * kMs},
     {4, 8, 12, 16},
     {},
     {kMs},
     kMiB},
    {"a_long_backward_beside_a_slow_wire",
     Each(16, kMiB),
     Every(16, 20 * kMs),
     {308 * kMs},
     Alone(16),
     {},
     {8 * kMs},
     kMiB},
    {"the_last_message_was_of_several",
     Each(16, kMiB),
     Every(16, 20 * kMs),
     {302 * kMs},
     {4, 8, 12, 16},
     {},
     {8 * kMs},
     4 * kMiB},
    {"a_rank_that_waits_knows_nothing_of_the_wire",
     Each(16, kMiB),
     Every(16, 10 * kMs) + Every(16, 20 * kMs),
     {301 * kMs, 301 * kMs},
     {4, 8, 12, 16},
     {},
     {151 * kMs, kMs},
     kMiB},
    {"a_tail_that_nobody_measured", Each(16, kMiB), Every(16, 20 * kMs), {301 * kMs}, Alone(16), {}, {0}, kMiB},
    {"a_tail_with_a_backlog", Each(8, kMiB), Each(8, 0), {30 * kMs}, {4, 8}, {}, {30 * kMs}, kMiB},
};

INSTANTIATE_TEST_SUITE_P(Table, CoalesceTest, testing::ValuesIn(kCases),
                         [](const testing::TestParamInfo<Case> &info) { return std::string(info.param.id); });

TEST(Coalesce, every_bucket_leaves_once_and_joined_ones_keep_their_bounds) {
  std::mt19937_64 random(0);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  for (int round = 0; round < 2000; round++) {
    Case c = {};
    const int64_t n = below(40), ranks = 1 + below(3);
    for (int64_t b = 0, buffer = 0; b < n; b++) {
      c.bytes.push_back(below(4 * kMiB));
      c.buffer.push_back(buffer += below(9) == 0);
    }
    for (int64_t i = 0; i < n * ranks; i++)
      c.ready.push_back(below(100 * kMs));
    for (int64_t r = 0; r < ranks; r++)
      c.ended.push_back(1 + below(200 * kMs));
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
        ASSERT_LE(bytes, TX_COALESCE_BYTES);
      }
      begin = end;
    }
    ASSERT_EQ(begin, n);
  }
}

TEST(Coalesce, most_is_a_quarter_but_half_of_what_is_small) {
  struct {
    int64_t buffer, most;
  } const cases[] = {
      {0, 0},
      {1, 0},
      {2 * kMiB, kMiB},
      {8 * kMiB, 4 * kMiB},
      {15 * kMiB, 4 * kMiB},
      {16 * kMiB, 4 * kMiB},
      {24 * kMiB, 6 * kMiB},
      {32 * kMiB, 8 * kMiB},
      {400 * kMiB, 8 * kMiB},
      {INT64_MAX, TX_COALESCE_BYTES},
  };
  for (const auto &c : cases)
    EXPECT_EQ(tx_coalesce_most(c.buffer), c.most) << c.buffer;
}

TEST(Coalesce, bytes_beyond_64_bits_are_the_most_there_is) {
  const Found found = Coalesce({"", {INT64_MAX, INT64_MAX, 1}, {0, 0, 0}, {1}, {}});
  EXPECT_EQ(found.status, TX_OK);
  EXPECT_EQ(found.ends.back(), 3);
}

TEST(Coalesce, says_what_is_not_legal) {
  EXPECT_NE(Coalesce({"", {5, -1}, {0, 0}, {1}, {}}).message.find("bucket 1 has -1 bytes"), std::string::npos);
  EXPECT_NE(Coalesce({"", {5}, {}, {}, {}}).message.find("1 buckets, 0 ranks"), std::string::npos);
  tx_coalesce_args args = TX_COALESCE_ARGS_INIT;
  int64_t n = 0;
  args.n_ranks = args.n_buckets = 1;
  EXPECT_EQ(tx_coalesce(&args, nullptr, &n, nullptr), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_coalesce(&args, nullptr, nullptr, nullptr), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_coalesce(nullptr, nullptr, &n, nullptr), TX_ERROR_INVALID_ARGUMENT);
}

}  // namespace
