// csrc/core/link: estimates a link's speed from the durations of test rounds, and decides whether compression pays off.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "csrc/torch_ext_advanced.h"

namespace {

constexpr int64_t kMs = 1000 * 1000;
using Times = std::vector<int64_t>;  // TX_LINK_ROUNDS entries per rank

TEST(Link, parts_are_4_MiB_together_and_long_enough) {
  EXPECT_EQ(tx_link_part_bytes(2), 4 << 20);
  EXPECT_EQ(tx_link_part_bytes(3), 2 << 20);
  EXPECT_EQ(tx_link_part_bytes(65), 64 << 10);
  EXPECT_EQ(tx_link_part_bytes(66), 64 << 10) << "never less";
  EXPECT_EQ(tx_link_part_bytes(4096), 64 << 10);
  EXPECT_EQ(tx_link_part_bytes(4) % TX_BLOCK, 0);
  for (const int64_t world : {int64_t{1}, int64_t{0}, int64_t{-5}, INT64_MIN})
    EXPECT_EQ(tx_link_part_bytes(world), 0);
}

TEST(Link, the_quickest_round_counts_as_the_slowest_rank_saw_it) {
  const double one_ms = 8.0 * (4 << 20) / static_cast<double>(kMs);  // Gbit/s
  const Times same = {kMs, kMs, kMs, kMs, kMs, kMs};
  static_assert(TX_LINK_ROUNDS == 6, "as many as here");
  Times times = same;
  times.insert(times.end(), same.begin(), same.end());
  EXPECT_DOUBLE_EQ(tx_link_gbps(times.data(), nullptr, 2), one_ms);
  times[0] = 1;
  times[6] = 1;
  EXPECT_DOUBLE_EQ(tx_link_gbps(times.data(), nullptr, 2), one_ms) << "the first one is the warm-up";
  times[3] = kMs / 2;
  EXPECT_DOUBLE_EQ(tx_link_gbps(times.data(), nullptr, 2), one_ms) << "the other rank saw the same round take longer";
  times[9] = kMs / 4;
  EXPECT_DOUBLE_EQ(tx_link_gbps(times.data(), nullptr, 2), 2 * one_ms);
  for (const size_t other : {1, 2, 4, 5, 7, 8, 10, 11})
    times[other] = 900 * kMs;
  EXPECT_DOUBLE_EQ(tx_link_gbps(times.data(), nullptr, 2), 2 * one_ms) << "whatever disturbs the others";
}

TEST(Link, all_that_a_rank_sends_counts) {
  const Times times(5 * TX_LINK_ROUNDS, kMs);
  for (const int64_t world : {2, 3, 5}) {
    const auto sent = static_cast<double>(tx_link_part_bytes(world) * (world - 1));
    EXPECT_DOUBLE_EQ(tx_link_gbps(times.data(), nullptr, world), 8 * sent / static_cast<double>(kMs));
  }
}

TEST(Link, what_nobody_can_know_is_not_known) {
  const Times nothing(2 * TX_LINK_ROUNDS, 0), backwards(2 * TX_LINK_ROUNDS, -kMs);
  EXPECT_EQ(tx_link_gbps(nothing.data(), nullptr, 2), 0);
  EXPECT_EQ(tx_link_gbps(backwards.data(), nullptr, 2), 0);
  EXPECT_EQ(tx_link_gbps(nothing.data(), nullptr, 1), 0);
  EXPECT_EQ(tx_link_gbps(nullptr, nullptr, 2), 0);
}

// Simulated measurements of every rank and round: time on the wire, plus time that threads wait for a processor. They
// wait `load` times as long as they compute, in whole time slices. Part of the wait is hidden, since several threads
// wait at once, or none of them has to go on.
struct Starved {
  Times took, waited;

  Starved(std::mt19937_64 *draw, int64_t world, double gbps, double load) {
    const double sent = 8.0 * static_cast<double>(tx_link_part_bytes(world) * (world - 1));
    std::uniform_real_distribution<double> part(0, 1);
    std::exponential_distribution<double> exponential(1);
    for (int64_t i = 0; i < world * TX_LINK_ROUNDS; i++) {
      double waits = 0;
      for (double computes = 3e6; computes > 0; computes -= 1e6)
        waits += load * 1e6 * exponential(*draw);
      const double counts = 0.8 + 0.2 * part(*draw);
      took.push_back(static_cast<int64_t>(sent / gbps * (1 + 0.05 * part(*draw)) + counts * waits));
      waited.push_back(static_cast<int64_t>(waits));
    }
  }
};

TEST(Link, starved_processors_do_not_make_it_slow) {
  std::mt19937_64 draw(24);
  int fast_was_slow = 0;
  for (int round = 0; round < 2000; round++) {
    const int64_t world = 2 + round % 3;
    const double load = 0.5 * static_cast<double>(round % 16);
    const Starved fast(&draw, world, 10, load), slow(&draw, world, 1, load);
    const double found = tx_link_gbps(fast.took.data(), fast.waited.data(), world);
    EXPECT_EQ(tx_compresses(TX_COMPRESSION_AUTO, found), 0) << found << " of 10 Gbit/s, load " << load;
    const double least = tx_link_gbps(slow.took.data(), slow.waited.data(), world);
    EXPECT_EQ(tx_compresses(TX_COMPRESSION_AUTO, least), 1) << least << " of 1 Gbit/s, load " << load;
    EXPECT_GE(found, tx_link_gbps(fast.took.data(), nullptr, world)) << "never slower than what was seen";
    fast_was_slow += tx_compresses(TX_COMPRESSION_AUTO, tx_link_gbps(fast.took.data(), nullptr, world));
  }
  EXPECT_GT(fast_was_slow, 200) << "where nobody tells what threads waited";
}

TEST(Link, not_all_of_a_round_was_waiting) {
  Times took(2 * TX_LINK_ROUNDS, 16 * kMs), waited(2 * TX_LINK_ROUNDS, 40 * kMs);
  const double one_ms = 8.0 * (4 << 20) / static_cast<double>(kMs);
  EXPECT_DOUBLE_EQ(tx_link_gbps(took.data(), waited.data(), 2), one_ms) << "a sixteenth is left";
  waited.assign(waited.size(), -kMs);
  EXPECT_DOUBLE_EQ(tx_link_gbps(took.data(), waited.data(), 2), one_ms / 16) << "not known";
  waited.assign(waited.size(), INT64_MAX);
  took.assign(took.size(), 15);
  EXPECT_EQ(tx_link_gbps(took.data(), waited.data(), 2), tx_link_gbps(took.data(), nullptr, 2)) << "nothing is left";
  took.assign(took.size(), INT64_MIN);
  EXPECT_EQ(tx_link_gbps(took.data(), waited.data(), 2), 0);
}

TEST(Link, bytes_are_compressed_where_one_asks_for_it_or_the_link_is_slow) {
  const double limit = TX_COMPRESS_BELOW_MBPS / 1000.0;
  const double below = std::nextafter(limit, 0), inf = std::numeric_limits<double>::infinity();
  for (const double gbps : {0.0, 0.001, below, limit, inf, static_cast<double>(NAN), -1.0}) {
    EXPECT_EQ(tx_compresses(TX_COMPRESSION_ON, gbps), 1);
    EXPECT_EQ(tx_compresses(TX_COMPRESSION_OFF, gbps), 0);
    EXPECT_EQ(tx_compresses(TX_COMPRESSION_AUTO, gbps), gbps == 0.001 || gbps == below) << gbps;
    EXPECT_EQ(tx_compresses(7, gbps), 0);
  }
}

}  // namespace
