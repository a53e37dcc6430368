// csrc/core/tracker: which buckets are complete, and in which order gradients become ready (F5).
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

extern "C" {
#include "csrc/core/tracker.h"
}

namespace {

using V = std::vector<int64_t>;

// A tracker and its memory.
struct Tracker {
  Tracker(const V &bucket_of, int64_t n_buckets) {
    const auto n = static_cast<int64_t>(bucket_of.size());
    const int64_t bytes = tx_tracker_bytes(n, n_buckets);
    // Exactly as large as needed, so that a sanitizer finds any access past the end.
    memory.resize(static_cast<size_t>(bytes) / sizeof(int64_t));
    tx_error error;
    EXPECT_EQ(tx_tracker_init(memory.data(), bytes, n, bucket_of.data(), n_buckets, &t, &error), TX_OK)
        << error.message;
  }

  int Mark(int64_t param) { return tx_tracker_mark(t, param); }

  V Drain() {
    V buckets;
    for (int64_t b; (b = tx_tracker_next(t)) >= 0;)
      buckets.push_back(b);
    return buckets;
  }

  V Order(size_t n) const { return V(tx_tracker_order(t), tx_tracker_order(t) + n); }

  V memory;
  tx_tracker *t = nullptr;
};

TEST(Tracker, F5_tells_when_a_bucket_is_complete) {
  Tracker tracker({1, 1, 0, 0, 0}, 2);
  EXPECT_EQ(tracker.Mark(4), 0);
  EXPECT_EQ(tracker.Mark(2), 0);
  EXPECT_EQ(tracker.Mark(1), 0);
  EXPECT_EQ(tracker.Mark(3), 1);
  EXPECT_EQ(tracker.Mark(0), 1);
}

TEST(Tracker, F5_hands_buckets_out_in_one_order_whatever_completes_first) {
  Tracker tracker({2, 1, 0}, 3);
  EXPECT_EQ(tracker.Mark(0), 1);
  EXPECT_EQ(tracker.Drain(), V{});
  EXPECT_EQ(tracker.Mark(2), 1);
  EXPECT_EQ(tracker.Drain(), V{0});
  EXPECT_EQ(tracker.Drain(), V{}) << "each once";
  EXPECT_EQ(tracker.Mark(1), 1);
  EXPECT_EQ(tracker.Drain(), (V{1, 2}));
}

TEST(Tracker, knows_which_gradient_completed_each_bucket) {
  Tracker tracker({1, 1, 0, 0, 2}, 3);
  const auto completed_by = [&] {
    return V(tx_tracker_completed_by(tracker.t), tx_tracker_completed_by(tracker.t) + 3);
  };
  EXPECT_EQ(completed_by(), (V{-1, -1, -1}));
  const V order = {4, 0, 3, 1, 2};
  tx_tracker_expect(tracker.t, order.data());
  EXPECT_EQ(completed_by(), (V{2, 1, 4}));
  for (const int64_t param : {1, 2, 0})
    tracker.Mark(param);
  EXPECT_EQ(completed_by(), (V{2, 0, 4})) << "the others are as before";
  tx_tracker_reset(tracker.t);
  EXPECT_EQ(completed_by(), (V{2, 0, 4})) << "and in the next backward";
  tracker.Mark(2);
  tracker.Mark(3);
  EXPECT_EQ(completed_by(), (V{3, 0, 4}));
}

TEST(Tracker, F5_a_gradient_that_is_ready_twice_is_told_and_changes_nothing) {
  Tracker tracker({0, 0}, 1);
  tracker.Mark(1);
  EXPECT_EQ(tracker.Mark(1), -1);
  EXPECT_EQ(tracker.Mark(0), 1) << "the bucket still counts each once";
}

TEST(Tracker, F5_at_the_end_every_bucket_is_complete_and_nothing_more_is_ready) {
  Tracker tracker({0, 1, 1}, 2);
  tracker.Mark(2);
  EXPECT_FALSE(tx_tracker_is_ready(tracker.t, 0));
  EXPECT_TRUE(tx_tracker_is_ready(tracker.t, 2));
  tx_tracker_finish(tracker.t);
  EXPECT_EQ(tracker.Mark(0), -1);
  EXPECT_EQ(tracker.Drain(), (V{0, 1}));
  tx_tracker_reset(tracker.t);
  EXPECT_EQ(tracker.Drain(), V{});
  EXPECT_EQ(tracker.Mark(0), 1);
  EXPECT_EQ(tracker.Drain(), V{0});
}

TEST(Tracker, F5_learns_the_order_of_the_first_backward_that_was_finished) {
  Tracker tracker({0, 0, 0, 0, 0}, 1);
  tracker.Mark(0);
  tx_tracker_reset(tracker.t);  // a backward that raised does not change the learned order
  tracker.Mark(3);
  tracker.Mark(0);
  tx_tracker_finish(tracker.t);
  EXPECT_EQ(tracker.Order(5), (V{3, 0, 4, 2, 1}));
  tx_tracker_reset(tracker.t);
  for (int64_t i : {4, 3, 1, 0})
    tracker.Mark(i);
  tx_tracker_finish(tracker.t);
  EXPECT_EQ(tracker.Order(5), (V{3, 0, 4, 2, 1})) << "later ones do not move the plan";
}

TEST(Tracker, F5_any_order_completes_each_bucket_once) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 300; trial++) {
    const int64_t n = 1 + random() % 40, n_buckets = 1 + random() % 6;
    V bucket_of(static_cast<size_t>(n));
    for (int64_t &b : bucket_of)
      b = static_cast<int64_t>(random() % n_buckets);
    Tracker tracker(bucket_of, n_buckets);
    V order(static_cast<size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    for (int cycle = 0; cycle < 3; cycle++) {
      std::shuffle(order.begin(), order.end(), random);
      V left(static_cast<size_t>(n_buckets)), handed;
      for (int64_t b : bucket_of)
        left[static_cast<size_t>(b)]++;
      for (int64_t i : order) {
        ASSERT_EQ(tracker.Mark(i), --left[static_cast<size_t>(bucket_of[static_cast<size_t>(i)])] == 0);
        for (int64_t b : tracker.Drain())
          handed.push_back(b);
      }
      tx_tracker_finish(tracker.t);
      for (int64_t b : tracker.Drain())
        handed.push_back(b);
      V all(static_cast<size_t>(n_buckets));
      std::iota(all.begin(), all.end(), 0);
      ASSERT_EQ(handed, all);
      V learnt = tracker.Order(static_cast<size_t>(n));
      std::sort(learnt.begin(), learnt.end());
      V indices(static_cast<size_t>(n));
      std::iota(indices.begin(), indices.end(), 0);
      ASSERT_EQ(learnt, indices);
      tx_tracker_reset(tracker.t);
    }
  }
}

TEST(Tracker, nothing_to_wait_for_is_no_error) {
  Tracker none({}, 0);
  EXPECT_EQ(tx_tracker_next(none.t), -1);
  tx_tracker_finish(none.t);
}

TEST(Tracker, bad_arguments_are_told) {
  tx_error error;
  tx_tracker *tracker = nullptr;
  EXPECT_EQ(tx_tracker_bytes(-1, 0), -1);
  EXPECT_EQ(tx_tracker_bytes(0, INT64_MAX), -1);
  V memory(64);
  const V buckets{0, 2};
  EXPECT_EQ(tx_tracker_init(memory.data(), 8, 2, buckets.data(), 3, &tracker, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_tracker_init(memory.data(), 512, 2, buckets.data(), 2, &tracker, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_STREQ(error.message, "parameter 1 is in bucket 2; legal: 0 ... 1");
}

}  // namespace
