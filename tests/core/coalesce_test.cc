// csrc/core/coalesce: which buckets travel together, and whether they are compressed.
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

constexpr int64_t kMiB = 1 << 20, kMs = 1000;
constexpr double kInf = std::numeric_limits<double>::infinity();

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

// What a call takes; good as long as c and buffer are.
tx_coalesce_args Args(const Case &c, const Numbers &buffer) {
  tx_coalesce_args args = TX_COALESCE_ARGS_INIT;
  args.n_buckets = static_cast<int64_t>(c.bytes.size());
  args.bytes = c.bytes.data();
  args.buffer = buffer.data();
  args.n_ranks = static_cast<int64_t>(c.ended.size());
  args.ready = c.ready.data();
  args.ended = c.ended.data();
  args.tail = c.tail.empty() ? nullptr : c.tail.data();
  args.tail_bytes = c.tail_bytes;
  return args;
}

Found Coalesce(const Case &c) {
  const Numbers buffer = c.buffer.empty() ? Numbers(c.bytes.size(), 0) : c.buffer;
  const tx_coalesce_args args = Args(c, buffer);
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
    {"what_takes_a_little_less_than_2500_us_is_waited_for",
     Each(40, kMiB / 4),
     Every(40, 2400),
     {40 * 2400},
     {5, 10, 15, 20, 25, 30, 35, 40}},
    {"what_takes_2500_us_is_not", Each(40, kMiB / 4), Every(40, 2500), {40 * 2500}, Alone(40)},
    {"half_of_what_waits", Each(40, kMiB), Every(40, kMs / 2), {40 * kMs}, {8, 16, 24, 32, 40}},
    {"the_slowest_rank_counts", Each(4, kMiB), Each(4, 0) + Every(4, 10 * kMs), {12 * kMs, 40 * kMs}, Alone(4)},
    {"never_across_buffers", Each(8, kMiB), Each(8, 0), {16 * kMs}, {2, 4, 6, 8}, {0, 0, 0, 0, 1, 1, 1, 1}},
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
    // Half a millisecond of a tail is the message: 5 ms for all of it, and a little more.
    {"a_small_buffer_on_a_fast_wire_at_once", Each(8, kMiB), Every(8, 20 * kMs), {145 * kMs}, {8}, {}, {1125}, kMiB},
    {"a_small_buffer_on_a_wire_that_is_not_so_fast",
     Each(8, kMiB),
     Every(8, 20 * kMs),
     {145 * kMs},
     {4, 8},
     {},
     {1126},
     kMiB},
    {"a_buffer_a_little_too_large_to_leave_at_once",
     Each(8, kMiB) + Numbers{1},
     Every(9, 20 * kMs),
     {161 * kMs},
     {4, 8, 9},
     {},
     {600},
     kMiB},
    {"small_buffers_on_a_fast_wire",
     Each(6, kMiB),
     Every(6, 20 * kMs),
     {105 * kMs},
     {4, 6},
     {0, 0, 0, 0, 1, 1},
     {600},
     kMiB},
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

// Two messages, both ways, and what they are expanded into: no more than two of uncompressed buckets that are joined.
TEST(Coalesce, compressed_ones_take_no_more_memory) {
  for (const int64_t buffer : {int64_t{0}, 2 * kMiB, 15 * kMiB, 24 * kMiB, 400 * kMiB, INT64_MAX}) {
    for (const int32_t sharded : {0, 1}) {
      const int64_t most = tx_coalesce_most(buffer, sharded, 0), compressed = tx_coalesce_most(buffer, sharded, 1);
      EXPECT_LE(static_cast<double>(compressed) * (2 + 1 / 0.7597), static_cast<double>(most)) << buffer;
      EXPECT_GE(static_cast<double>(compressed) * 3.4, static_cast<double>(most) - 100) << buffer;
    }
  }
}

TEST(Coalesce, compressed_ones_do_not_leave_at_once) {
  const Case c = {"", Each(8, kMiB), Every(8, 20 * kMs), {145 * kMs}, {}, {}, {600}, kMiB};
  const Numbers buffer(8, 0);
  tx_coalesce_args args = Args(c, buffer);
  for (const int32_t compressed : {0, 1}) {
    args.compressed = compressed;
    Numbers ends(8);
    int64_t n = 0;
    ASSERT_EQ(tx_coalesce(&args, ends.data(), &n, nullptr), TX_OK);
    EXPECT_EQ(ends[0], compressed ? 1 : 8);
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
  const Case c = {"", Each(64, kMiB / 2), Each(64, 0), {20 * kMs}, {}};
  const Numbers buffer(64, 0);
  const struct {
    int32_t sharded, compressed;
    int64_t first;
  } cases[] = {{0, 0, 16}, {0, 1, 4}, {1, 0, 8}, {1, 1, 2}};  // of 8, 2.4, 4 and 1.2 MiB
  for (const auto &limits : cases) {
    tx_coalesce_args args = Args(c, buffer);
    args.sharded = limits.sharded;
    args.compressed = limits.compressed;
    Numbers ends(64);
    int64_t n = 0;
    ASSERT_EQ(tx_coalesce(&args, ends.data(), &n, nullptr), TX_OK);
    EXPECT_EQ(ends[0], limits.first) << limits.sharded << limits.compressed;
  }
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

// -- whether compressing pays -------------------------------------------------------------------------------------

constexpr int64_t kMB = 1000 * 1000;  // takes a millisecond at 8 Gbit/s

struct PaysCase {
  const char *id;
  int32_t pays;
  Numbers bytes;
  Numbers ended;
  Numbers tail = {};  // empty: not known
  int64_t tail_bytes = 0;
  double gbps = 8;
};

void PrintTo(const PaysCase &c, std::ostream *out) {
  *out << c.id;
}

class CompressPaysTest : public testing::TestWithParam<PaysCase> {};

TEST_P(CompressPaysTest, says) {
  const PaysCase &p = GetParam();
  const Numbers ready(p.bytes.size() * p.ended.size(), 0);
  const Case c = {p.id, p.bytes, ready, p.ended, {}, {}, p.tail, p.tail_bytes};
  const Numbers buffer(p.bytes.size(), 0);
  const tx_coalesce_args args = Args(c, buffer);
  tx_compression found = {};
  tx_error error = {};
  for (const int32_t pays : {0, p.pays, p.pays}) {  // never at once
    ASSERT_EQ(tx_compress_pays(&args, p.gbps, &found, &error), TX_OK) << error.message;
    EXPECT_EQ(found.on, pays);
  }
}

const PaysCase kPaysCases[] = {
    {"a_fast_wire", 0, Each(8, kMiB), {4 * kMs}},
    {"a_slow_wire", 1, Each(8, kMiB), {96 * kMs}},
    {"a_little_faster_than_the_limit", 0, {kMB}, {999}},
    {"at_the_limit", 0, {kMB}, {1000}},
    {"a_little_slower_than_the_limit", 1, {kMB}, {1001}},
    {"a_little_faster_than_a_low_limit", 0, {kMB}, {15999}, {}, 0, 0.5},
    {"a_little_slower_than_a_low_limit", 1, {kMB}, {16001}, {}, 0, 0.5},
    {"a_little_faster_than_a_high_limit", 0, {kMB}, {79}, {}, 0, 100},
    {"a_little_slower_than_a_high_limit", 1, {kMB}, {81}, {}, 0, 100},
    {"a_limit_of_zero", 0, {kMB}, {INT64_MAX}, {}, 0, 0},
    {"no_limit", 1, {INT64_MAX}, {1}, {}, 0, kInf},
    {"no_limit_but_nothing_measured", 0, {kMB}, {0}, {}, 0, kInf},
    {"no_limit_but_no_buckets", 0, {}, {1}, {}, 0, kInf},
    {"all_bytes_count_fast", 0, {kMB, kMB, 2 * kMB}, {3999}},
    {"all_bytes_count_slow", 1, {kMB, kMB, 2 * kMB}, {4001}},
    {"the_slowest_rank_counts", 1, {kMB}, {500, 1001, 2}},
    {"the_slowest_rank_is_fast", 0, {kMB}, {500, 2, 999}},
    // All of the time is ten times what it takes: half a millisecond of a tail is the message, the rest the bytes.
    {"a_fast_tail", 0, {kMB}, {10 * kMs}, {1499}, kMB},
    {"a_slow_tail", 1, {kMB}, {10 * kMs}, {1501}, kMB},
    {"a_fast_tail_of_few_bytes", 0, {kMB}, {10 * kMs}, {599}, kMB / 10},
    {"a_slow_tail_of_few_bytes", 1, {kMB}, {10 * kMs}, {601}, kMB / 10},
    {"a_tail_as_short_as_an_empty_message", 0, {kMB}, {10 * kMs}, {500}, 1},
    {"a_tail_shorter_than_an_empty_message", 0, {kMB}, {10 * kMs}, {1}, 1},
    {"the_least_tail_counts", 0, {kMB}, {10 * kMs, 10 * kMs, 10 * kMs}, {1501, 1499, 9 * kMs}, kMB},
    {"all_tails_are_slow", 1, {kMB}, {10 * kMs, 10 * kMs, 10 * kMs}, {1501, 1502, 9 * kMs}, kMB},
    {"a_slow_tail_after_a_fast_whole", 0, {kMB}, {999}, {900 * kMs}, kMB},
    {"a_tail_that_nobody_measured", 1, {kMB}, {10 * kMs}, {0}, kMB},
    {"a_tail_that_one_rank_did_not_measure", 1, {kMB}, {10 * kMs, 10 * kMs}, {0, 1501}, kMB},
    {"a_tail_that_one_rank_measured_wrong", 1, {kMB}, {10 * kMs, 10 * kMs}, {-3, 1501}, kMB},
    {"a_tail_of_no_bytes", 1, {kMB}, {10 * kMs}, {400}, 0},
    {"no_buckets", 0, {}, {kMs}},
    {"empty_buckets", 0, {0, 0}, {kMs}, {9 * kMs}, 1},
    {"nothing_measured", 0, {kMB}, {0}},
    {"nothing_measured_but_a_tail", 0, {kMB}, {0}, {100 * kMs}, kMB},
    {"nothing_measured_on_one_rank", 0, {kMB}, {96 * kMs, 0}},
    {"measured_wrong_on_one_rank", 0, {kMB}, {-1, 96 * kMs}},
    {"bytes_beyond_64_bits", 1, {INT64_MAX, INT64_MAX, 1}, {INT64_MAX / 100}},
};

INSTANTIATE_TEST_SUITE_P(Table, CompressPaysTest, testing::ValuesIn(kPaysCases),
                         [](const testing::TestParamInfo<PaysCase> &info) { return std::string(info.param.id); });

// Microseconds that a megabyte took, decision after decision, and what was decided; 1000 are the limit.
struct TrialCase {
  const char *id;
  Numbers took;
  std::vector<int32_t> on;
};

void PrintTo(const TrialCase &c, std::ostream *out) {
  *out << c.id;
}

class CompressTrialTest : public testing::TestWithParam<TrialCase> {};

TEST_P(CompressTrialTest, goes) {
  tx_compression found = {};
  for (size_t i = 0; i < GetParam().took.size(); i++) {
    const Case c = {"", {kMB}, {0}, {GetParam().took[i]}, {}};
    const Numbers buffer(1, 0);
    const tx_coalesce_args args = Args(c, buffer);
    ASSERT_EQ(tx_compress_pays(&args, 8, &found, nullptr), TX_OK);
    EXPECT_EQ(found.on, GetParam().on[i]) << "decision " << i;
  }
}

const TrialCase kTrialCases[] = {
    {"twice_in_a_row", {2000, 900, 2000, 2000, 1500}, {0, 0, 0, 1, 1}},
    {"until_the_wire_is_fast", {2000, 2000, 1500, 1000, 2000, 2000}, {0, 1, 1, 0, 0, 1}},
    {"as_long_as_it_is_no_longer", {2000, 4000, 4200, 4200, 4199}, {0, 1, 1, 1, 1}},
    {"until_it_is_longer_then_not_for_eight_decisions",
     {2000, 4000, 4201, 9000, 9000, 9000, 9000, 9000, 9000, 9000, 9000, 9000, 9000, 9450, 9451},
     {0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0}},
    {"the_time_beside_is_that_of_the_last_plain_cycles",
     {9000, 2000, 2000, 1900, 2101, 2101, 2101},
     {0, 1, 1, 1, 0, 0, 0}},
    {"what_nobody_measured_says_nothing", {2000, 0, 2000, 2000, 0, 2000, 2000}, {0, 0, 0, 1, 0, 0, 1}},
};

INSTANTIATE_TEST_SUITE_P(Table, CompressTrialTest, testing::ValuesIn(kTrialCases),
                         [](const testing::TestParamInfo<TrialCase> &info) { return std::string(info.param.id); });

TEST(CompressPays, what_was_never_plain_goes_on) {
  const Case c = {"", {kMB}, {0}, {2000}, {}};
  const Numbers buffer(1, 0);
  const tx_coalesce_args args = Args(c, buffer);
  tx_compression found = {.plain = 0, .on = 1, .slow = 0, .resting = 0, .reserved = 0};
  ASSERT_EQ(tx_compress_pays(&args, 8, &found, nullptr), TX_OK);
  EXPECT_EQ(found.on, 1);
}

TEST(CompressPays, says_what_is_not_legal) {
  struct Call {
    tx_coalesce_args args;
    double gbps = 8;
  };
  struct Illegal {
    const char *says;
    void (*spoil)(Call &call);
    tx_status status = TX_ERROR_INVALID_ARGUMENT;
  };
  static const int64_t negative[] = {5, -1};
  for (const Illegal &c : {
           Illegal{"TX_COALESCE_ARGS_INIT", [](Call &call) { call.args.size--; }},
           {"-1 buckets", [](Call &call) { call.args.n_buckets = -1; }},
           {"2 buckets, 0 ranks", [](Call &call) { call.args.n_ranks = 0; }},
           {"must not be NULL", [](Call &call) { call.args.bytes = nullptr; }},
           {"must not be NULL", [](Call &call) { call.args.buffer = nullptr; }},
           {"must not be NULL", [](Call &call) { call.args.ready = nullptr; }},
           {"must not be NULL", [](Call &call) { call.args.ended = nullptr; }},
           {"bucket 1 has -1 bytes", [](Call &call) { call.args.bytes = negative; }},
           {"-1 Gbit/s", [](Call &call) { call.gbps = -1; }, TX_ERROR_ILLEGAL_VALUE},
           {"-inf Gbit/s", [](Call &call) { call.gbps = -kInf; }, TX_ERROR_ILLEGAL_VALUE},
           {"nan Gbit/s", [](Call &call) { call.gbps = NAN; }, TX_ERROR_ILLEGAL_VALUE},
       }) {
    SCOPED_TRACE(c.says);
    const Case good = {"", {kMB, kMB}, {0, 0}, {96 * kMs}, {}};
    const Numbers buffer(2, 0);
    Call call = {Args(good, buffer)};
    tx_compression found = {.plain = 0, .on = 0, .slow = 1, .resting = 0, .reserved = 0};
    tx_error error = {};
    ASSERT_EQ(tx_compress_pays(&call.args, call.gbps, &found, nullptr), TX_OK);
    ASSERT_EQ(found.on, 1);
    found = {.plain = 5, .on = 0, .slow = 1, .resting = 0, .reserved = 0};
    c.spoil(call);
    EXPECT_EQ(tx_compress_pays(&call.args, call.gbps, &found, &error), c.status);
    EXPECT_NE(std::string(error.message).find(c.says), std::string::npos) << error.message;
    EXPECT_EQ(tx_compress_pays(&call.args, call.gbps, &found, nullptr), c.status);
    EXPECT_TRUE(found.plain == 5 && found.on == 0 && found.slow == 1) << "a failed call changes nothing";
  }
  tx_coalesce_args args = TX_COALESCE_ARGS_INIT;
  args.n_ranks = 1;
  tx_compression found = {};
  EXPECT_EQ(tx_compress_pays(&args, 8, nullptr, nullptr), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_compress_pays(nullptr, 8, &found, nullptr), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(found.on, 0);
}

}  // namespace
