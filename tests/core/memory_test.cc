// csrc/core/memory: predicted bytes on one rank under each strategy (E1-E3).
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "csrc/torch_ext_advanced.h"
#include "tests/core/memory_question.h"

namespace {

constexpr int64_t kLargest = INT64_MAX / 16;  // the most elements that a buffer may have

class MemoryTest : public testing::TestWithParam<Case> {};

TEST_P(MemoryTest, part_by_part) {
  const Case &c = GetParam();
  const Question question(c);
  tx_memory memory = {};
  tx_error error;
  ASSERT_EQ(tx_memory_plan(&question.args, &memory, &error), TX_OK) << error.message;
  EXPECT_EQ(memory.params, c.bytes.params);
  EXPECT_EQ(memory.grads, c.bytes.grads);
  EXPECT_EQ(memory.masters, c.bytes.masters);
  EXPECT_EQ(memory.moments, c.bytes.moments);
  EXPECT_EQ(memory.scales, c.bytes.scales);
  EXPECT_EQ(memory.steps, c.bytes.steps);
  int64_t largest = 0;
  for (const tx_layout_param &p : c.params) {
    int64_t size = 0;
    ASSERT_EQ(tx_dtype_size(static_cast<tx_dtype>(p.param_dtype), &size, nullptr), TX_OK);
    largest = std::max(largest, p.numel * size);
  }
  EXPECT_EQ(memory.transient, c.bytes.transient + (c.strategy < TX_OPTIM_GRADS ? largest : 0));
  const int64_t total = memory.params + memory.grads + memory.masters + memory.moments + memory.scales + memory.steps;
  EXPECT_EQ(memory.total, total);
  const int64_t moment = memory.params + memory.grads + memory.steps + memory.moving;
  EXPECT_EQ(memory.peak, std::max(total + memory.transient, moment));
}

const std::vector<tx_layout_param> kWide = {Param(1000, TX_BF16, TX_F32, TX_BF16),
                                            Param(38400, TX_BF16, TX_F32, TX_BF16)};
const std::vector<tx_layout_param> kCoded = {Param(1000, TX_BF16, TX_BF16, TX_U8),
                                             Param(38400, TX_BF16, TX_BF16, TX_U8)};

const std::vector<tx_layout_param> kCodedWide = {Param(1000, TX_BF16, TX_F32, TX_U8),
                                                 Param(38400, TX_BF16, TX_F32, TX_U8)};

const Case kCases[] = {
    kNoShard,
    {"optim", kModel, kMixed, 4, 1000, TX_OPTIM, {39424 * 2, 39424 * 2, 9856 * 4, 9856 * 4, 0, 8, 29568 * 2}},
    {"optim_grads_packs_and_fills",
     kModel,
     kMixed,
     4,
     1000,
     TX_OPTIM_GRADS,
     {39424 * 2, 9856 * 2, 9856 * 4, 9856 * 4, 0, 8, (29568 + 39424) * 2 + 38400 * 2}},
    {"optim_grads_params_gathers_the_two_largest_units",
     kModel,
     kMixed,
     4,
     1000,
     TX_OPTIM_GRADS_PARAMS,
     {9856 * 2, 9856 * 2, 9856 * 4, 9856 * 4, 0, 8, (1200 + 2 * 1000) + 1200 + (1200 + 900) + (1000 + 750)},
     {Unit(500), Unit(100), Unit(300, TX_F32), Unit(499)}},
    {"one_unit_is_enough",
     kModel,
     kMixed,
     4,
     1000,
     TX_OPTIM_GRADS_PARAMS,
     {9856 * 2, 9856 * 2, 9856 * 4, 9856 * 4, 0, 8, 1000 + 1000 + (1000 + 750)},
     {Unit(500)}},
    {"wide_gradients_are_packed",
     kWide,
     kMixed,
     4,
     1000,
     TX_NO_SHARD,
     {39400 * 2, 39424 * 4, 39400 * 4, 39400 * 4, 0, 8, (29568 + 39424) * 2}},
    {"wide_gradients_are_packed_once_under_optim_grads",
     kWide,
     kMixed,
     4,
     1000,
     TX_OPTIM_GRADS,
     {39424 * 2, 9856 * 4, 9856 * 4, 9856 * 4, 0, 8, (29568 + 39424) * 2 + 38400 * 4}},
    {"an_8_bit_wire_brings_its_scales",
     kCoded,
     kMixed,
     4,
     1000,
     TX_OPTIM,
     {39424 * 2, 39424 * 2, 9856 * 4, 9856 * 4, 0, 8, (29568 + 231) + (39424 + 308)}},
    {"gradients_being_filled_are_not_on_the_wire_yet",
     kCoded,
     kMixed,
     4,
     1000,
     TX_OPTIM_GRADS,
     {39424 * 2, 9856 * 2, 9856 * 4, 9856 * 4, 0, 8, (29568 + 231) + (39424 + 308) + 38400 * 2}},
    {"sums_of_8_bits_are_gathered_into_16_bit_gradients",
     kCoded,
     State(TX_BF16, TX_BF16, TX_NONE),
     4,
     1000,
     TX_NO_SHARD,
     {39400 * 2, 39424 * 2, 0, 39400 * 4, 0, 8, (29568 + 231) + (39424 + 308)},
     {},
     0,
     4,
     TX_NONE},
    {"sums_of_8_bits_are_gathered_beside_wide_gradients",
     kCodedWide,
     State(TX_BF16, TX_BF16, TX_NONE),
     4,
     1000,
     TX_NO_SHARD,
     {39400 * 2, 39424 * 4, 0, 39400 * 4, 0, 8, (29568 + 231) + (39424 + 308) + 39424 * 2},
     {},
     0,
     4,
     TX_NONE},
    {"sums_gathered_in_8_bits_use_the_packed_bucket",
     kCodedWide,
     State(TX_BF16, TX_BF16, TX_NONE),
     4,
     1000,
     TX_NO_SHARD,
     {39400 * 2, 39424 * 4, 0, 39400 * 4, 0, 8, (29568 + 231) + (39424 + 308)},
     {},
     0,
     4,
     TX_U8},
    {"sums_gathered_in_8_bits_beside_16_on_the_wire",
     kModel,
     State(TX_BF16, TX_BF16, TX_NONE),
     4,
     1000,
     TX_NO_SHARD,
     {39400 * 2, 39424 * 2, 0, 39400 * 4, 0, 8, 29568 * 2 + 39424 + 308},
     {},
     0,
     4,
     TX_U8},
    {"optim_gathers_no_sums",
     kCodedWide,
     State(TX_BF16, TX_BF16, TX_NONE),
     4,
     1000,
     TX_OPTIM,
     {39424 * 2, 39424 * 4, 0, 9856 * 4, 0, 8, (29568 + 231) + (39424 + 308)},
     {},
     0,
     4,
     TX_F16},
    {"moments_of_8_bits_have_a_scale_per_block_of_a_parameter",
     kModel,
     State(TX_U8, TX_U8, TX_I16),
     4,
     1000,
     TX_NO_SHARD,
     {39400 * 2, 39424 * 2, 39400 * 2, 39400 * 2, 2 * (8 + 300), 8, 29568 * 2}},
    {"moments_of_8_bits_have_a_scale_per_block_of_a_shard",
     kModel,
     State(TX_U8, TX_U8, TX_I16),
     4,
     1000,
     TX_OPTIM,
     {39424 * 2, 39424 * 2, 9856 * 2, 9856 * 2, 2 * 77, 8, 29568 * 2}},
    {"one_moment_of_16_bits_with_scales",
     kModel,
     State(TX_F32, TX_F16, TX_NONE),
     4,
     1000,
     TX_OPTIM,
     {39424 * 2, 39424 * 2, 0, 9856 * 6, 77, 8, 29568 * 2}},
    {"the_other_moment_of_16_bits_with_scales",
     kModel,
     State(TX_F16, TX_BF16, TX_NONE),
     4,
     1000,
     TX_OPTIM,
     {39424 * 2, 39424 * 2, 0, 9856 * 4, 77, 8, 29568 * 2}},
    {"fp32_weights_are_their_own_masters",
     {Param(1000, TX_F32)},
     State(TX_F32, TX_F32, TX_NONE),
     1,
     1000,
     TX_OPTIM,
     {1024 * 4, 1024 * 4, 0, 1024 * 8, 0, 4, 0}},
    {"fewer_buckets_in_flight_than_there_are_the_largest_of_any_buffer",
     {Param(256), Param(128), Param(640, TX_F32), Param(384)},
     State(TX_BF16, TX_BF16, TX_NONE),
     2,
     1,
     TX_NO_SHARD,
     {768 * 2 + 640 * 4, 1024 * 2 + 768 * 4, 0, 1408 * 4, 0, 16, 384 * 4 + 256 * 2},
     {},
     0,
     2},
    {"equal_buckets_are_told_apart",
     {Param(128), Param(128), Param(128)},
     State(TX_BF16, TX_BF16, TX_NONE),
     2,
     1,
     TX_NO_SHARD,
     {384 * 2, 768 * 2, 0, 384 * 4, 0, 12, 2 * 128 * 2},
     {},
     0,
     2},
    {"two_ranks_trade_codes_instead_of_gathering_wider_sums",
     {Param(256, TX_BF16, TX_BF16, TX_U8)},
     State(TX_BF16, TX_BF16, TX_NONE),
     2,
     1,
     TX_NO_SHARD,
     {256 * 2, 256 * 2, 0, 256 * 4, 0, 4, 2 * (256 + 2)}},
    {"two_ranks_trade_halves_where_sums_are_gathered_in_fewer_bytes",
     {Param(256)},
     State(TX_BF16, TX_BF16, TX_NONE),
     2,
     1,
     TX_NO_SHARD,
     {256 * 2, 256 * 2, 0, 256 * 4, 0, 4, 128 * 2 + 256 + 2},
     {},
     0,
     4,
     TX_U8},
    {"two_ranks_that_shard_have_a_half_of_the_sum",
     {Param(256)},
     State(TX_BF16, TX_BF16, TX_NONE),
     2,
     1,
     TX_OPTIM,
     {256 * 2, 256 * 2, 0, 128 * 4, 0, 4, 128 * 2}},
    {"the_gradients_being_filled_are_those_of_the_bucket_with_most_bytes",
     {Param(300), Param(200, TX_F32)},
     State(TX_BF16, TX_BF16, TX_NONE),
     1,
     1,
     TX_OPTIM_GRADS,
     {384 * 2 + 256 * 4, 384 * 2 + 256 * 4, 0, 640 * 4, 0, 8, (384 * 2 + 256 * 4) + 200 * 4}},
    {"frozen_parameters_are_whole",
     {Param(128)},
     State(TX_BF16, TX_BF16, TX_NONE),
     4,
     1,
     TX_OPTIM_GRADS,
     {512 * 2 + 1001, 128 * 2, 0, 128 * 4, 0, 4, (384 + 512) * 2 + 128 * 2},
     {},
     1001},
    {"frozen_parameters_are_sharded_with_the_others",
     {Param(128)},
     State(TX_BF16, TX_BF16, TX_NONE),
     4,
     1,
     TX_OPTIM_GRADS_PARAMS,
     {128 * 2 + 251, 128 * 2, 0, 128 * 4, 0, 4, 0},
     {},
     1001},
    {"nothing", {}, kMixed, 4, 1, TX_OPTIM, {}},
    {"a_parameter_without_elements", {Param(0)}, kMixed, 4, 1, TX_OPTIM, {0, 0, 0, 0, 0, 4, 0}},
    {"the_largest_buffer",
     {Param(kLargest / 128 * 128, TX_BF16)},
     State(TX_BF16, TX_BF16, TX_NONE),
     1,
     1,
     TX_NO_SHARD,
     {kLargest / 128 * 256, kLargest / 128 * 256, 0, kLargest / 128 * 512, 0, 4, 0}},
};
INSTANTIATE_TEST_SUITE_P(Cases, MemoryTest, testing::ValuesIn(kCases),
                         [](const auto &info) { return std::string(info.param.id); });

struct Moving {
  const char *id;
  tx_strategy strategy;
  int64_t world, cap, bytes;
  std::vector<tx_layout_param> params = kModel;
};

void PrintTo(const Moving &c, std::ostream *out) {
  *out << c.id;
}

class MovingTest : public testing::TestWithParam<Moving> {};

TEST_P(MovingTest, is_beside_parameters_and_gradients_before_there_are_states) {
  const Moving &c = GetParam();
  Case asked = kNoShard;
  asked.params = c.params;
  asked.strategy = c.strategy;
  asked.world = c.world;
  asked.cap = c.cap;
  asked.state = State(TX_U8, TX_U8, TX_NONE);
  const Question question(asked);
  tx_memory memory = {};
  ASSERT_EQ(tx_memory_plan(&question.args, &memory, nullptr), TX_OK);
  EXPECT_EQ(memory.moving, c.bytes);
  const int64_t moment = memory.params + memory.grads + memory.steps + memory.moving;
  EXPECT_EQ(memory.peak, std::max(memory.total + memory.transient, moment));
}

const Moving kMoving[] = {
    {"no_shard_lays_gradients_out_anew", TX_NO_SHARD, 4, 1000, 39424 * 2},
    {"no_shard_has_one_bucket", TX_NO_SHARD, 4, 100000, 0},
    {"no_shard_alone", TX_NO_SHARD, 1, 1000, 0},
    {"optim_moves_weights", TX_OPTIM, 1, 1000, 39424 * 2},
    {"optim_lays_wide_gradients_out_anew", TX_OPTIM, 4, 1000, 39424 * 4, kWide},
    {"optim_has_one_bucket_of_wide_gradients", TX_OPTIM, 4, 100000, 39424 * 2, kWide},
    {"optim_grads_moves_weights", TX_OPTIM_GRADS, 4, 1000, 39424 * 2, kWide},
    {"optim_grads_params_had_the_whole", TX_OPTIM_GRADS_PARAMS, 4, 1000, (39400 - 9856) * 2},
};
INSTANTIATE_TEST_SUITE_P(Cases, MovingTest, testing::ValuesIn(kMoving),
                         [](const auto &info) { return std::string(info.param.id); });

TEST(Memory, a_narrow_wire_of_a_unit_is_packed_and_frozen_parameters_are_not_reduced) {
  Case c = kNoShard;
  c.strategy = TX_OPTIM_GRADS_PARAMS;
  c.units = {{1280, 256, TX_BF16, TX_F32, TX_U8, 0}};
  const Question question(c);
  tx_memory memory = {};
  ASSERT_EQ(tx_memory_plan(&question.args, &memory, nullptr), TX_OK);
  const int64_t wire = 256 + 2;  // codes and scales; three quarters are received from the other ranks
  EXPECT_EQ(memory.transient, 1280 * 2 + 256 * 2 + 256 * 4 + wire + (wire - wire / 4));
}

TEST(Memory, averages_are_kept_as_masters_are) {
  struct {
    int32_t dtype, lows;
    int64_t bytes;
  } const kAverages[] = {{TX_NONE, 0, 0}, {TX_BF16, 0, 2}, {TX_BF16, 1, 3}, {TX_F32, 0, 4}};
  for (const tx_strategy strategy : {TX_NO_SHARD, TX_OPTIM, TX_OPTIM_GRADS, TX_OPTIM_GRADS_PARAMS}) {
    Case c = kNoShard;
    c.strategy = strategy;
    Question question(c);
    for (const auto &average : kAverages) {
      question.args.ema_dtype = average.dtype;
      question.args.ema_lows = average.lows;
      tx_memory memory = {};
      ASSERT_EQ(tx_memory_plan(&question.args, &memory, nullptr), TX_OK);
      EXPECT_EQ(memory.emas, memory.masters / 4 * average.bytes);
      EXPECT_EQ(memory.total,
                memory.params + memory.grads + memory.masters + memory.moments + memory.steps + memory.emas);
    }
  }
}

TEST(Memory, a_publisher_has_a_bit_each_and_bounds_and_checksums) {
  Case c = kNoShard;
  c.params = {Param(1001), Param(38400), Param(77, TX_F32)};
  for (const tx_strategy strategy : {TX_NO_SHARD, TX_OPTIM, TX_OPTIM_GRADS, TX_OPTIM_GRADS_PARAMS}) {
    for (const int32_t distances : {0, 1}) {
      c.strategy = strategy;
      Question question(c);
      question.args.publishes = 1;
      question.args.distances = distances;
      tx_memory memory = {};
      ASSERT_EQ(tx_memory_plan(&question.args, &memory, nullptr), TX_OK);
      const int64_t noted = (126 + 4800 + 10) + 2 * (8 + 300 + 1) + distances * (501 + 19200);
      const int64_t cut = strategy == TX_NO_SHARD ? noted : (noted + 3) / 4;
      EXPECT_EQ(memory.changes, cut + 8 * 10) << "of 1 + 38 + 1 checksums a quarter";
      question.args.publishes = 0;
      tx_memory without = {};
      ASSERT_EQ(tx_memory_plan(&question.args, &without, nullptr), TX_OK);
      EXPECT_EQ(without.changes, 0);
      EXPECT_EQ(without.total, memory.total - memory.changes);
    }
  }
}

TEST(Memory, a_tied_parameter_counts_once) {
  Case c = kNoShard;
  c.params.push_back(c.params[1]);
  c.params[2].tied = 1;
  const Question question(c);
  tx_memory memory = {};
  ASSERT_EQ(tx_memory_plan(&question.args, &memory, nullptr), TX_OK);
  EXPECT_EQ(memory.params, c.bytes.params);
  EXPECT_EQ(memory.steps, c.bytes.steps);
}

TEST(Memory, each_buffer_has_its_own_states) {
  Case c = kNoShard;
  c.params.push_back(Param(256, TX_F32));
  Question question(c);
  question.states[2] = State(TX_F32, TX_F32, TX_NONE);
  tx_memory memory = {};
  ASSERT_EQ(tx_memory_plan(&question.args, &memory, nullptr), TX_OK);
  EXPECT_EQ(memory.masters, c.bytes.masters);
  EXPECT_EQ(memory.moments, c.bytes.moments + 256 * 8);
}

TEST(Memory, moments_that_differ_in_a_buffer) {
  Case c = kNoShard;
  c.params = {Param(256 * 4), Param(130), Param(128 * 9)};
  for (const int64_t world : {1, 4}) {
    for (const tx_strategy strategy : {TX_NO_SHARD, TX_OPTIM}) {
      c.world = world;
      c.strategy = strategy;
      Question question(c);
      question.states = {State(TX_U8, TX_U8, TX_I16), State(TX_F32, TX_F32, TX_I16), State(TX_U8, TX_F32, TX_I16)};
      question.args.states = question.states.data();
      tx_memory memory = {};
      ASSERT_EQ(tx_memory_plan(&question.args, &memory, nullptr), TX_OK);
      const int64_t ranks = strategy == TX_NO_SHARD ? 1 : world;
      EXPECT_EQ(memory.moments, (1024 * 2 + 130 * 8 + 1152 * 5) / ranks);
      EXPECT_EQ(memory.scales, (8 * 2 + 9 + ranks - 1) / ranks);
    }
  }
}

TEST(Memory, more_ranks_never_need_more) {
  for (const tx_strategy strategy : {TX_OPTIM, TX_OPTIM_GRADS, TX_OPTIM_GRADS_PARAMS}) {
    int64_t before = INT64_MAX;
    for (const int64_t world : {1, 2, 4, 8, 64}) {
      Case c = kNoShard;
      c.params = {Param(1 << 20), Param(1 << 20)};
      c.strategy = strategy;
      c.world = world;
      const Question question(c);
      tx_memory memory = {};
      ASSERT_EQ(tx_memory_plan(&question.args, &memory, nullptr), TX_OK);
      EXPECT_LT(memory.total, before) << strategy << " over " << world;
      before = memory.total;
    }
  }
}

}  // namespace
