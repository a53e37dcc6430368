// csrc/core/memory_messages.c: predicted bytes of messages that are under way.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "csrc/torch_ext_advanced.h"
#include "tests/core/memory_question.h"

namespace {

TEST(Memory, slots_are_two_of_each_class_and_role) {
  Case c = kNoShard;
  c.params = std::vector<tx_layout_param>(5, Param(1024, TX_BF16, TX_F32, TX_BF16));
  c.cap = 1000;
  Question question(c);
  question.args.slots = 1;
  tx_memory memory = {};
  ASSERT_EQ(tx_memory_plan(&question.args, &memory, nullptr), TX_OK);
  EXPECT_EQ(memory.transient, 2 * 2048 * 2 + 1024 * 2) << "received whole, and packed; a gradient";
  question.args.in_flight = 1;
  ASSERT_EQ(tx_memory_plan(&question.args, &memory, nullptr), TX_OK);
  EXPECT_EQ(memory.transient, 2 * 2048 * 2 + 1024 * 2);

  c.params = {Param(1024 + 128 * 4), Param(512 * 5), Param(512)};
  c.cap = 1;
  Question mixed(c);
  mixed.args.slots = 1;
  ASSERT_EQ(tx_memory_plan(&mixed.args, &memory, nullptr), TX_OK);
  EXPECT_EQ(memory.transient, (3072 + 5120 + 1024) + 512 * 5 * 2) << "one of each; classes are no larger than these";
  c.params = {Param(512 * 9), Param(512 * 9 + 1)};
  Question rounded(c);
  rounded.args.slots = 1;
  ASSERT_EQ(tx_memory_plan(&rounded.args, &memory, nullptr), TX_OK);
  EXPECT_EQ(memory.transient, 2 * 10240 + (512 * 9 + 1) * 2) << "9216 and 10240 bytes are of one class";
}

// The plan of the same case without and with compressed messages.
struct Plans {
  explicit Plans(const Case &c) {
    Question question(c);
    EXPECT_EQ(tx_memory_plan(&question.args, &plain, nullptr), TX_OK);
    question.args.compressed = 1;
    EXPECT_EQ(tx_memory_plan(&question.args, &compressed, nullptr), TX_OK);
  }
  tx_memory plain = {}, compressed = {};
};

// Compressed parts in both directions; and if all ranks get the sums, the sums on their way back.
TEST(Memory, compressed_messages_are_beside_the_buckets) {
  const int64_t numel = 1 << 15;
  Case c = kNoShard;
  c.params = {Param(numel)};
  c.cap = 1;
  const struct {
    int64_t world;
    tx_strategy strategy;
    int64_t both_ways, back;
  } cases[] = {
      {2, TX_NO_SHARD, numel, numel},
      {4, TX_NO_SHARD, 2 * numel / 4 * 3, numel},
      {2, TX_OPTIM, numel, 0},
      {4, TX_OPTIM_GRADS, 2 * numel / 4 * 3, 0},
      {1, TX_OPTIM, 0, 0},
  };
  for (const auto &[world, strategy, both_ways, back] : cases) {
    c.world = world;
    c.strategy = strategy;
    const auto [plain, compressed] = Plans(c);
    EXPECT_EQ(compressed.transient - plain.transient, tx_compressed_bytes(both_ways) + tx_compressed_bytes(back))
        << world << " ranks, strategy " << strategy;
    EXPECT_EQ(compressed.total, plain.total);
  }
  c.params = {Param(numel, TX_BF16, TX_F32, TX_F32)}; /* nothing is sent in bf16 */
  const auto [plain, compressed] = Plans(c);
  EXPECT_EQ(compressed.transient, plain.transient);
}

TEST(Memory, joined_buckets_are_two_messages_of_as_many_as_travel_together) {
  const struct {
    int64_t n, numel;
  } buffers[] = {{16, 1 << 18}, {32, 1 << 18}, {32, 1 << 20}, {32, 1 << 21}, {32, 1 << 22}};
  for (const auto &[n, numel] : buffers) {
    Case c = kNoShard;
    c.params = std::vector<tx_layout_param>(static_cast<size_t>(n), Param(numel));
    c.cap = TX_NO_INT;
    for (const tx_strategy strategy : {TX_NO_SHARD, TX_OPTIM, TX_OPTIM_GRADS}) {
      c.strategy = strategy;
      const Question question(c);
      tx_memory memory = {};
      ASSERT_EQ(tx_memory_plan(&question.args, &memory, nullptr), TX_OK);
      const int64_t bucket = numel * 2, most = tx_coalesce_most(n * bucket, strategy != TX_NO_SHARD, 0);
      const int64_t whole = tx_coalesce_whole(n * bucket);
      /* 0 if it is less than two neighbouring buckets */
      const int64_t together = !whole && most < 2 * bucket ? 0 : most;
      // Other ranks' parts are received. A message needs memory of its own if a rank's parts of it are not contiguous.
      const int64_t one = strategy == TX_OPTIM_GRADS ? 7 : 3, joined = strategy == TX_NO_SHARD ? 3 : 7;
      const int64_t held = whole ? n * bucket : together;
      const int64_t grads = strategy == TX_OPTIM_GRADS ? std::max(bucket, held) : bucket;
      EXPECT_EQ(memory.transient, std::max(std::min<int64_t>(4, n) * bucket * one, 2 * together * joined) / 4 + grads)
          << n << " of " << numel << ", strategy " << strategy;
    }
  }
}

TEST(Memory, known_messages_are_counted_as_they_are) {
  Case c = kNoShard;
  c.params = std::vector<tx_layout_param>(32, Param(1 << 18));
  c.cap = TX_NO_INT;
  const int64_t bucket = 2 << 18;
  for (const tx_strategy strategy : {TX_NO_SHARD, TX_OPTIM, TX_OPTIM_GRADS}) {
    c.strategy = strategy;
    Question question(c);
    ASSERT_EQ(question.args.n_buckets, 32);
    const auto planned = [&](std::vector<int64_t> ends) {
      question.args.ends = ends.data();
      question.args.n_messages = static_cast<int64_t>(ends.size());
      tx_memory memory = {};
      tx_error error = {};
      EXPECT_EQ(tx_memory_plan(&question.args, &memory, &error), TX_OK) << error.message;
      return memory.transient;
    };
    std::vector<int64_t> alone, last;
    for (int64_t b = 1; b <= 32; b++) {
      alone.push_back(b);
      if (b < 27 || b == 32) last.push_back(b);
    }
    const int64_t one = strategy == TX_OPTIM_GRADS ? 7 : 3, joined = strategy == TX_NO_SHARD ? 3 : 7;
    const int64_t grads = strategy == TX_OPTIM_GRADS;
    EXPECT_EQ(planned(alone), 4 * bucket * one / 4 + bucket) << "four at a time, and a gradient";
    EXPECT_EQ(planned({8, 32}), (8 + 24) * bucket * joined / 4 + (grads ? 24 : 1) * bucket);
    EXPECT_EQ(planned({8, 16, 30, 32}), (8 + 14) * bucket * joined / 4 + (grads ? 14 : 1) * bucket);
    EXPECT_EQ(planned(last), 6 * bucket * joined / 4 + (grads ? 6 : 1) * bucket) << "one that is joined";
  }
}

TEST(Memory, ends_that_are_none_are_refused) {
  Case c = kNoShard;
  c.params = std::vector<tx_layout_param>(4, Param(1 << 18));
  c.params.push_back(Param(1 << 18, TX_F32)); /* in a buffer of its own */
  c.cap = 1 << 18;
  Question question(c);
  question.args.n_buckets = 5;
  for (const std::vector<int64_t> &ends : {std::vector<int64_t>{4}, {1, 1, 4, 5}, {0, 4, 5}, {4, 6}, {5}, {-1}, {}}) {
    tx_memory memory = {};
    tx_error error = {};
    static const int64_t none = 0;
    question.args.ends = ends.empty() ? &none : ends.data();
    question.args.n_messages = static_cast<int64_t>(ends.size());
    EXPECT_EQ(tx_memory_plan(&question.args, &memory, &error), TX_ERROR_INVALID_ARGUMENT);
    EXPECT_NE(std::string(error.message).find("ends are not those"), std::string::npos) << error.message;
  }
}

TEST(Memory, one_rank_joins_nothing) {
  Case c = kNoShard;
  c.params = std::vector<tx_layout_param>(16, Param(1 << 18));
  c.cap = TX_NO_INT;
  c.world = 1;
  c.strategy = TX_OPTIM;
  const Question question(c);
  tx_memory memory = {};
  ASSERT_EQ(tx_memory_plan(&question.args, &memory, nullptr), TX_OK);
  EXPECT_EQ(memory.transient, 2 << 18) << "a gradient, as backward made it";
}

TEST(Memory, joined_buckets_that_are_compressed_take_about_as_much) {
  Case c = kNoShard;
  c.params = std::vector<tx_layout_param>(64, Param(1 << 18));
  c.cap = TX_NO_INT;
  for (const int64_t world : {2, 4}) {
    c.world = world;
    const auto [plain, compressed] = Plans(c);
    EXPECT_LE(compressed.transient, plain.transient * (world == 2 ? 1.21 : 1.11)) << world;
    EXPECT_GT(compressed.transient, plain.transient * 3 / 4) << world;
  }
}

}  // namespace
