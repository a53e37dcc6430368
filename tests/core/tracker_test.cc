// csrc/core/tracker: which bucket is complete, in which order gradients come, and who never came (F5).
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "csrc/torch_ext_advanced.h"

namespace {

// A tracker and the memory under it.
struct Tracker {
  Tracker(const std::vector<int64_t> &bucket_of, int64_t n_buckets, bool allow_unused = false,
          const std::vector<const char *> &names = {})
      : names(names) {
    const auto n = static_cast<int64_t>(bucket_of.size());
    const int64_t bytes = tx_tracker_bytes(n, n_buckets);
    memory.resize(static_cast<size_t>(bytes) / sizeof(int64_t));  // exactly: a sanitizer sees a byte too many
    tx_error error;
    const tx_status status = tx_tracker_init(memory.data(), bytes, n, bucket_of.data(), n_buckets,
                                             names.empty() ? nullptr : this->names.data(), allow_unused, &t, &error);
    EXPECT_EQ(status, TX_OK) << error.message;
  }

  int64_t Mark(int64_t param) {
    int64_t complete = -9;
    tx_error error;
    EXPECT_EQ(tx_tracker_mark(t, param, &complete, &error), TX_OK) << error.message;
    return complete;
  }

  std::vector<int64_t> Drain() {
    std::vector<int64_t> buckets;
    for (int64_t b; (b = tx_tracker_next(t)) >= 0;)
      buckets.push_back(b);
    return buckets;
  }

  std::vector<int64_t> memory;
  std::vector<const char *> names;
  tx_tracker *t = nullptr;
};

using V = std::vector<int64_t>;

TEST(Tracker, F5_tells_which_bucket_became_complete) {
  Tracker tracker({1, 1, 0, 0, 0}, 2);
  EXPECT_EQ(tracker.Mark(4), -1);
  EXPECT_EQ(tracker.Mark(2), -1);
  EXPECT_EQ(tracker.Mark(1), -1);
  EXPECT_EQ(tracker.Mark(3), 0);
  EXPECT_EQ(tracker.Mark(0), 1);
  EXPECT_EQ(tx_tracker_finish(tracker.t, nullptr, nullptr, nullptr), TX_OK);
}

TEST(Tracker, F5_hands_buckets_out_in_one_order_whatever_completes_first) {
  Tracker tracker({2, 1, 0}, 3);
  EXPECT_EQ(tracker.Mark(0), 2);
  EXPECT_EQ(tracker.Drain(), V{});
  EXPECT_EQ(tracker.Mark(2), 0);
  EXPECT_EQ(tracker.Drain(), V{0});
  EXPECT_EQ(tracker.Drain(), V{}) << "each once";
  EXPECT_EQ(tracker.Mark(1), 1);
  EXPECT_EQ(tracker.Drain(), (V{1, 2}));
}

TEST(Tracker, F5_a_gradient_that_comes_twice_is_told_and_changes_nothing) {
  Tracker tracker({0, 0}, 1, false, {"first", "second"});
  tracker.Mark(1);
  int64_t complete = -9;
  tx_error error;
  EXPECT_EQ(tx_tracker_mark(tracker.t, 1, &complete, &error), TX_ERROR_BAD_STATE);
  EXPECT_EQ(complete, -9);
  EXPECT_NE(std::string(error.message).find("second"), std::string::npos) << error.message;
  EXPECT_NE(std::string(error.message).find("twice"), std::string::npos) << error.message;
  EXPECT_EQ(tracker.Mark(0), 0) << "the bucket still counts each once";
}

TEST(Tracker, F5_a_gradient_that_never_came_is_named) {
  Tracker tracker({0, 0, -1, 1}, 2, false, {"embed", "norm", "frozen", "head"});
  tracker.Mark(1);
  V missing(4, -9);
  int64_t n_missing = -9;
  tx_error error;
  EXPECT_EQ(tx_tracker_finish(tracker.t, missing.data(), &n_missing, &error), TX_ERROR_BAD_STATE);
  EXPECT_EQ(n_missing, 2);
  EXPECT_EQ(missing, (V{0, 3, -9, -9}));
  const std::string message = error.message;
  EXPECT_NE(message.find("'embed'"), std::string::npos) << message;
  EXPECT_NE(message.find("'head'"), std::string::npos) << message;
  EXPECT_EQ(message.find("frozen"), std::string::npos) << message;
  EXPECT_EQ(message.find("norm"), std::string::npos) << message;
  EXPECT_EQ(tracker.Drain(), V{}) << "nothing is handed out by a finish that failed";
  tracker.Mark(0);
  tracker.Mark(3);
  EXPECT_EQ(tx_tracker_finish(tracker.t, missing.data(), &n_missing, &error), TX_OK) << "the cycle stayed open";
}

TEST(Tracker, F5_many_missing_are_counted_and_unnamed_ones_numbered) {
  Tracker tracker(V(5000, 0), 1);
  tx_error error;
  EXPECT_EQ(tx_tracker_finish(tracker.t, nullptr, nullptr, &error), TX_ERROR_BAD_STATE);
  const std::string message = error.message;
  EXPECT_NE(message.find("5000 of 5000"), std::string::npos) << message;
  EXPECT_NE(message.find("0, 1, 2, 3, 4, 5, 6 and 4993 more"), std::string::npos) << message;
}

TEST(Tracker, F5_unused_counts_as_zero_where_allowed) {
  Tracker tracker({0, 1, 1}, 2, true);
  tracker.Mark(2);
  V missing(3, -9);
  int64_t n_missing = -9;
  EXPECT_EQ(tx_tracker_finish(tracker.t, missing.data(), &n_missing, nullptr), TX_OK);
  EXPECT_EQ(n_missing, 2);
  EXPECT_EQ(missing, (V{0, 1, -9}));
  EXPECT_EQ(tracker.Drain(), (V{0, 1}));
}

TEST(Tracker, F5_a_closed_cycle_takes_nothing_until_reset) {
  Tracker tracker({0}, 1, true);
  EXPECT_EQ(tx_tracker_finish(tracker.t, nullptr, nullptr, nullptr), TX_OK);
  int64_t complete = -9;
  tx_error error;
  EXPECT_EQ(tx_tracker_mark(tracker.t, 0, &complete, &error), TX_ERROR_BAD_STATE);
  EXPECT_NE(std::string(error.message).find("tx_tracker_reset"), std::string::npos) << error.message;
  EXPECT_EQ(tx_tracker_finish(tracker.t, nullptr, nullptr, &error), TX_ERROR_BAD_STATE);
  tx_tracker_reset(tracker.t);
  EXPECT_EQ(tracker.Drain(), V{});
  EXPECT_EQ(tracker.Mark(0), 0);
  EXPECT_EQ(tracker.Drain(), V{0});
}

TEST(Tracker, F5_learns_the_order_of_the_first_cycle) {
  Tracker tracker({0, 0, -1, 0, 0}, 1, true);
  V order(5, -9);
  tx_error error;
  EXPECT_EQ(tx_tracker_order(tracker.t, order.data(), &error), TX_ERROR_BAD_STATE);
  EXPECT_EQ(order, V(5, -9));
  tracker.Mark(0);
  tx_tracker_reset(tracker.t);  // a cycle given up teaches nothing
  tracker.Mark(3);
  tracker.Mark(0);
  EXPECT_EQ(tx_tracker_order(tracker.t, order.data(), &error), TX_ERROR_BAD_STATE);
  ASSERT_EQ(tx_tracker_finish(tracker.t, nullptr, nullptr, &error), TX_OK);
  ASSERT_EQ(tx_tracker_order(tracker.t, order.data(), &error), TX_OK);
  EXPECT_EQ(order, (V{3, 0, 4, 2, 1}));
  tx_tracker_reset(tracker.t);
  for (int64_t i : {4, 3, 1, 0})
    tracker.Mark(i);
  ASSERT_EQ(tx_tracker_finish(tracker.t, nullptr, nullptr, &error), TX_OK);
  ASSERT_EQ(tx_tracker_order(tracker.t, order.data(), &error), TX_OK);
  EXPECT_EQ(order, (V{3, 0, 4, 2, 1})) << "later cycles do not move the plan";
}

TEST(Tracker, F5_any_order_completes_each_bucket_once) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 300; trial++) {
    const int64_t n = 1 + random() % 40, n_buckets = 1 + random() % 6;
    V bucket_of(static_cast<size_t>(n));
    for (int64_t &b : bucket_of)
      b = static_cast<int64_t>(random() % (n_buckets + 1)) - 1;
    Tracker tracker(bucket_of, n_buckets);
    V order(static_cast<size_t>(n));
    std::iota(order.begin(), order.end(), 0);
    for (int cycle = 0; cycle < 3; cycle++) {
      std::shuffle(order.begin(), order.end(), random);
      V left(static_cast<size_t>(n_buckets)), handed;
      for (int64_t b : bucket_of) {
        if (b >= 0) left[b]++;
      }
      for (int64_t i : order) {
        if (bucket_of[i] < 0) continue;
        ASSERT_EQ(tracker.Mark(i), --left[bucket_of[i]] == 0 ? bucket_of[i] : -1);
        for (int64_t b : tracker.Drain())
          handed.push_back(b);
      }
      ASSERT_EQ(tx_tracker_finish(tracker.t, nullptr, nullptr, nullptr), TX_OK);
      for (int64_t b : tracker.Drain())
        handed.push_back(b);
      V all(static_cast<size_t>(n_buckets));
      std::iota(all.begin(), all.end(), 0);
      ASSERT_EQ(handed, all);
      V learnt(static_cast<size_t>(n));
      ASSERT_EQ(tx_tracker_order(tracker.t, learnt.data(), nullptr), TX_OK);
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
  EXPECT_EQ(tx_tracker_finish(none.t, nullptr, nullptr, nullptr), TX_OK);
  EXPECT_EQ(tx_tracker_order(none.t, nullptr, nullptr), TX_OK);
  Tracker frozen({-1, -1}, 1);
  EXPECT_EQ(frozen.Drain(), V{0}) << "a bucket of frozen parameters is complete from the start";
  EXPECT_EQ(tx_tracker_finish(frozen.t, nullptr, nullptr, nullptr), TX_OK);
}

TEST(Tracker, refuses_what_is_not_legal) {
  EXPECT_EQ(tx_tracker_bytes(-1, 0), -1);
  EXPECT_EQ(tx_tracker_bytes(0, -1), -1);
  EXPECT_EQ(tx_tracker_bytes(INT64_MAX, 0), -1);
  const V bucket_of = {0, 1};
  V memory(64);
  tx_tracker *t = nullptr;
  tx_error error;
  const int64_t bytes = tx_tracker_bytes(2, 2);
  const auto init = [&](void *at, int64_t size, int64_t n, const int64_t *of, int64_t buckets) {
    return tx_tracker_init(at, size, n, of, buckets, nullptr, 0, &t, &error);
  };
  EXPECT_EQ(init(memory.data(), bytes - 1, 2, bucket_of.data(), 2), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(init(nullptr, bytes, 2, bucket_of.data(), 2), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(init(reinterpret_cast<char *>(memory.data()) + 1, bytes, 2, bucket_of.data(), 2),
            TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(init(memory.data(), bytes, 2, nullptr, 2), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(init(memory.data(), bytes, -2, bucket_of.data(), 2), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(init(memory.data(), bytes, 2, bucket_of.data(), 1), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error.message).find("parameter 1 is in bucket 1"), std::string::npos) << error.message;
  const V below = {-2, 0};
  EXPECT_EQ(init(memory.data(), bytes, 2, below.data(), 2), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(t, nullptr);
  EXPECT_EQ(memory, V(64)) << "a failed call wrote";

  Tracker tracker({0, -1}, 1);
  int64_t complete;
  for (int64_t param : {-1, 1, 2}) {
    EXPECT_EQ(tx_tracker_mark(tracker.t, param, &complete, &error), TX_ERROR_INVALID_ARGUMENT) << param;
  }
  EXPECT_EQ(tx_tracker_mark(tracker.t, 0, nullptr, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_tracker_mark(nullptr, 0, &complete, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_tracker_finish(nullptr, nullptr, nullptr, &error), TX_ERROR_INVALID_ARGUMENT);
}

}  // namespace
