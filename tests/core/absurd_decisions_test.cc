// The planning functions with absurd numbers: they return a result or an error, without undefined behaviour on the way.
// The test suite runs this under the sanitizers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "csrc/torch_ext_advanced.h"
#include "csrc/torch_ext_cycle.h"
#include "tests/core/absurd.h"

namespace {

using absurd::Random;

// A layout of n parameters in which a few numbers are absurd.
struct Layout {
  std::vector<tx_layout_param> params;
  std::vector<int64_t> order, shape;
  tx_layout_args args = TX_LAYOUT_ARGS_INIT;
  std::vector<tx_layout_place> places;
  std::vector<tx_layout_bucket> buckets;
  tx_layout_summary summary = {};

  Layout(Random &random, uint32_t oddness) {
    const int64_t n = random.Below(5);
    const auto odd = [&] { return random.OneIn(oddness); };
    for (int64_t i = 0; i < n; i++) {
      const int32_t dtypes[] = {TX_F32, TX_BF16, TX_U8, TX_C128};
      const int32_t dtype = random.Of(dtypes);
      tx_layout_param p = {nullptr, nullptr, 0, random.Below(100000), -1, 0, dtype, dtype, dtype, 0};
      if (odd()) p.numel = random.I64();
      if (odd()) p.tied = random.I64();
      if (odd()) p.key = random.I64();
      if (odd()) p.param_dtype = random.I32();
      if (odd()) p.device = random.I32();
      params.push_back(p);
      order.push_back(odd() ? random.I64() : n - 1 - i);
    }
    shape = {random.I64(), random.I64(), 3};
    if (n > 0 && odd()) {
      params[0].shape = shape.data();
      params[0].ndim = odd() ? random.Negative() : static_cast<int64_t>(random.Below(4));
    }
    args.n = odd() ? random.Negative() : n;
    args.params = params.data();
    args.order = random.OneIn(2) ? order.data() : nullptr;
    args.world = odd() ? random.I64() : 1 + random.Below(9);
    args.cap = odd() ? random.I64() : random.OneIn(2) ? TX_NO_INT : 1000;
    args.overlap = random.OneIn(4) ? random.I32() : 1;
    args.high_bandwidth = random.OneIn(4) ? random.I32() : 0;
    places.resize(5);
    buckets.resize(5);
  }
  tx_status Plan() {
    tx_error error;
    return tx_layout_plan(&args, places.data(), buckets.data(), static_cast<int64_t>(buckets.size()), &summary, &error);
  }
};

TEST(AbsurdNumbers, LayoutsArePlannedOrRefused) {
  Random random(1);
  uint32_t planned = 0;
  for (uint32_t i = 0; i < absurd::kRounds; i++) {
    Layout layout(random, 6);
    if (layout.Plan() != TX_OK) continue;
    planned++;
    for (int64_t b = 0; b < layout.summary.n_buckets; b++) {
      const tx_layout_bucket &bucket = layout.buckets[static_cast<size_t>(b)];
      ASSERT_TRUE(bucket.offset >= 0 && bucket.size >= 0 && bucket.used >= 0 && bucket.used <= bucket.size);
      int64_t begin, end;
      const int64_t rank = random.Below(static_cast<uint32_t>(std::min<int64_t>(layout.args.world, 1 << 30)));
      ASSERT_EQ(tx_layout_shard(&bucket, layout.args.world, rank, &begin, &end, nullptr), TX_OK);
      ASSERT_TRUE(bucket.offset <= begin && begin <= end && end <= bucket.offset + bucket.size);
    }
  }
  EXPECT_GT(planned, absurd::kRounds / 50);
}

TEST(AbsurdNumbers, ShardsAreInt64OrRefused) {
  Random random(2);
  for (uint32_t i = 0; i < 10 * absurd::kRounds; i++) {
    const tx_layout_bucket bucket = {random.I64(), random.I64(), random.I64(), random.I64(), random.I64()};
    const int64_t world = random.OneIn(2) ? 1 + random.Below(4) : random.I64();
    const int64_t rank = random.OneIn(2) ? random.Below(4) : random.I64();
    int64_t begin = -1, end = -1;
    const tx_status status = tx_layout_shard(&bucket, world, rank, &begin, &end, nullptr);
    if (status != TX_OK) {
      ASSERT_TRUE(begin == -1 && end == -1);
      continue;
    }
    const __int128 share = bucket.size / world;
    ASSERT_TRUE(begin == static_cast<__int128>(bucket.offset) + share * rank && end == begin + share);
  }
}

// The intersection of any integers, compared with 128-bit arithmetic, which cannot overflow.
TEST(AbsurdNumbers, IntersectionsAreThoseOfTheIntegers) {
  Random random(3);
  for (uint32_t i = 0; i < 50 * absurd::kRounds; i++) {
    const int64_t start = random.I64(), numel = random.I64(), begin = random.I64(), end = random.I64();
    const __int128 from = std::max(start, begin);
    const __int128 to = std::min<__int128>(static_cast<__int128>(start) + numel, end);
    int64_t first = -1;
    const int64_t count = tx_layout_intersect(start, numel, begin, end, &first);
    const bool any = from < to;
    ASSERT_TRUE(count == (any ? to - from : 0) && first == (any ? from - start : 0))
        << start << " " << numel << " " << begin << " " << end << ": " << first << " " << count;
  }
}

TEST(AbsurdNumbers, SlicesBoxesAndChoicesAreMadeOrRefused) {
  Random random(5);
  uint32_t made = 0;
  for (uint32_t i = 0; i < absurd::kRounds; i++) {
    const tx_layout_slice placed[] = {{random.I64(), random.I64(), random.I64(), random.I64()},
                                      {random.I64(), random.I64(), random.I64(), random.I64()}};
    const tx_layout_range ranges[] = {{random.I64(), random.I64()}, {random.I64(), random.I64()}};
    tx_layout_slice slices[3];
    int64_t n = 0;
    made += tx_layout_slices(placed, 2, ranges, 2, slices, 3, &n, nullptr) == TX_OK;
    ASSERT_TRUE(n >= 0 && n <= 3);
    const int64_t shape[] = {random.I64(), random.I64()}, order[] = {random.I64(), random.I64()};
    const int64_t start = random.I64(), stop = random.I64(), limit = random.I64();
    int64_t boxes[12];
    made += tx_layout_boxes(shape, order, 2, start, stop, limit, boxes, 3, &n, nullptr) == TX_OK;
    made += tx_layout_boxes(shape, nullptr, 2, start, stop, limit, boxes, 3, &n, nullptr) == TX_OK;
    ASSERT_TRUE(n >= 0 && n <= 3);
    int64_t heap[2];
    int32_t chosen[2];
    made += tx_offload_choose(shape, 2, 0.5, heap, chosen, nullptr) == TX_OK;
  }
  EXPECT_GT(made, 0u);
}

TEST(AbsurdNumbers, MemoryIsPlannedOrRefused) {
  Random random(4);
  uint32_t planned = 0;
  for (uint32_t i = 0; i < absurd::kRounds; i++) {
    Layout layout(random, 40);
    if (layout.Plan() != TX_OK) continue;
    const auto odd = [&] { return random.OneIn(10); };
    std::vector<tx_memory_state> states(5, {TX_BF16, TX_U8, TX_I16, 0});
    std::vector<tx_memory_unit> units;
    for (uint32_t u = random.Below(4); u > 0; u--) {
      const int64_t numel = odd() ? random.I64() : random.Below(1000000);
      units.push_back({numel, odd() ? random.I64() : numel, TX_BF16, TX_F32, random.OneIn(2) ? TX_BF16 : TX_U8, 0});
      if (odd()) units.back().wire_dtype = random.I32();
    }
    tx_memory_args args = TX_MEMORY_ARGS_INIT;
    args.layout = &layout.args;
    args.places = layout.places.data();
    args.buckets = layout.buckets.data();
    args.n_buckets = odd() ? -1 : layout.summary.n_buckets;
    args.states = states.data();
    args.units = units.data();
    args.n_units = odd() ? -3 : static_cast<int64_t>(units.size());
    args.frozen_bytes = odd() ? random.I64() : random.Below(1000);
    args.in_flight = odd() ? random.I64() : 2;
    args.strategy = odd() ? random.I32() : static_cast<int32_t>(random.Below(4));
    args.gather_dtype = odd() ? random.I32() : TX_NONE;
    args.slots = static_cast<int32_t>(random.Below(2));
    args.compressed = static_cast<int32_t>(random.Below(2));
    args.ema_dtype = odd() ? random.I32() : TX_BF16;
    args.ema_lows = static_cast<int32_t>(random.Below(2));
    args.publishes = args.distances = static_cast<int32_t>(random.Below(2));
    if (layout.summary.n_buckets > 0 && odd()) {
      tx_layout_bucket &b = layout.buckets[0];
      int64_t *const fields[] = {&b.buffer, &b.offset, &b.size, &b.used};
      *random.Of(fields) = random.I64() & ~int64_t{127};
    }
    tx_memory memory = {};
    if (tx_memory_plan(&args, &memory, nullptr) != TX_OK) continue;
    planned++;
    for (const int64_t bytes : {memory.params, memory.grads, memory.masters, memory.moments, memory.scales,
                                memory.steps, memory.transient, memory.moving, memory.emas, memory.changes})
      ASSERT_TRUE(bytes >= 0 && bytes <= memory.peak);
  }
  EXPECT_GT(planned, absurd::kRounds / 50);
}

TEST(AbsurdNumbers, BucketsAreCoalescedOrRefused) {
  Random random(5);
  uint32_t answered = 0;
  for (uint32_t i = 0; i < absurd::kRounds; i++) {
    const int64_t n = random.Below(5), ranks = 1 + random.Below(3);
    const uint32_t oddness = 1 + random.Below(20);
    const auto numbers = [&](int64_t count) {
      std::vector<int64_t> list(static_cast<size_t>(count));
      for (int64_t &x : list)
        x = random.OneIn(oddness) ? random.I64() : random.Below(100000);
      return list;
    };
    std::vector<int64_t> bytes = numbers(n), buffer(static_cast<size_t>(n)), ends(static_cast<size_t>(n));
    for (int64_t &x : bytes)
      if (x < 0 && !random.OneIn(10)) x &= std::numeric_limits<int64_t>::max();
    tx_coalesce_args args = TX_COALESCE_ARGS_INIT;
    args.n_buckets = random.OneIn(20) ? -n - 1 : n;
    args.bytes = bytes.data();
    args.buffer = buffer.data();
    args.world = random.OneIn(20) ? -ranks : ranks;
    args.link_gbps = random.OneIn(5) ? random.F64() : static_cast<double>(random.Below(20));
    args.compressed = static_cast<int32_t>(random.Below(2));
    args.sharded = static_cast<int32_t>(random.Below(2));
    int64_t messages = -1;
    if (tx_coalesce(&args, ends.data(), &messages, nullptr) == TX_OK) {
      answered++;
      ASSERT_TRUE(messages >= 0 && messages <= n && (n == 0 || ends[static_cast<size_t>(messages) - 1] == n));
    }
    (void)tx_compresses(random.I32(), random.F64());
    (void)tx_link_part_bytes(random.I64());
    const std::vector<int64_t> took = numbers(ranks * TX_LINK_ROUNDS), waited = numbers(ranks * TX_LINK_ROUNDS);
    EXPECT_GE(tx_link_gbps(took.data(), waited.data(), ranks), 0);
    EXPECT_GE(tx_coalesce_cuts(random.I64(), random.I64(), random.F64(), random.I32()), 1);
    (void)tx_coalesce_most(random.I64(), random.I32(), random.I32());
    (void)tx_coalesce_whole(random.I64());
    (void)tx_trades(random.I64(), random.I64(), random.I64());
    (void)tx_compressed_bytes(random.I64());
  }
  EXPECT_GT(answered, absurd::kRounds / 50);
}

TEST(AbsurdNumbers, CyclesAndScalesGoOnOrRefuse) {
  Random random(6);
  std::vector<int64_t> memory(sizeof(tx_cycle_args) + 8000);
  for (uint32_t i = 0; i < absurd::kRounds; i++) {
    std::vector<int64_t> bucket_of(8);
    for (int64_t &b : bucket_of)
      b = random.OneIn(60) ? random.I64() : static_cast<int64_t>(random.Below(3));
    const int64_t buffer_of[] = {0, 0, 1};
    const char *const names[] = {"a", "b", "c", "d", "e", "f", "g", "h"};
    tx_cycle_args args = {};
    args.size = random.OneIn(20) ? random.Below(200) : sizeof args;
    args.n_params = random.OneIn(8) ? random.Negative() : static_cast<int64_t>(random.Below(9));
    args.n_buckets = random.OneIn(8) ? random.Negative() : 3;
    args.bucket_of = bucket_of.data();
    args.buffer_of = buffer_of;
    args.names = args.units = names;
    args.slots = random.OneIn(8) ? random.Negative() : 4;
    args.kind = random.OneIn(8) ? random.I32() : static_cast<int32_t>(random.Below(5));
    args.world = random.OneIn(8) ? random.I32() : 1;
    args.rank = random.OneIn(20) ? random.I32() : 0;
    (void)tx_cycle_bytes(&args);
    const int64_t bytes = random.OneIn(8) ? random.Negative() : static_cast<int64_t>(memory.size() * 8);
    tx_cycle *cycle;
    if (tx_cycle_init(memory.data(), bytes, &args, &cycle, nullptr) == TX_OK) {
      for (int k = 0; k < 40; k++) {
        const int64_t at = random.OneIn(4) ? random.I64() : static_cast<int64_t>(random.Below(9));
        tx_cycle_action action;
        switch (random.Below(8)) {
          case 0:
            (void)tx_cycle_begin(cycle, random.I32(), random.I32());
            break;
          case 1:
            (void)tx_cycle_accumulate(cycle, at, random.I32());
            break;
          case 2:
            (void)tx_cycle_ready(cycle, at);
            break;
          case 3:
            (void)tx_cycle_given(cycle, at, 1, random.I32(), random.I32());
            break;
          case 4:
            (void)tx_cycle_end(cycle);
            break;
          case 5:
            (void)tx_cycle_missing(cycle, at, random.I32(), random.I32());
            break;
          case 6:
            tx_cycle_zero(cycle, &at, 1);
            break;
          default:
            if (tx_cycle_next(cycle, &action) && random.OneIn(2)) tx_cycle_done(cycle, random.I32());
        }
      }
    }
    tx_scale scale = TX_SCALE_INIT;
    int64_t *const counts[] = {&scale.growth_interval, &scale.hysteresis, &scale.clean_steps, &scale.hysteresis_left};
    double *const numbers[] = {&scale.growth_factor, &scale.backoff_factor, &scale.min_scale, &scale.scale};
    if (random.OneIn(2)) *random.Of(counts) = random.I64();
    if (random.OneIn(2)) *random.Of(counts) = random.I64();
    if (random.OneIn(4)) *random.Of(numbers) = random.F64();
    for (int k = 0; k < 5; k++)
      (void)tx_scale_update(&scale, static_cast<int32_t>(random.Below(2)), nullptr);
  }
}

TEST(AbsurdNumbers, PoliciesAreResolvedOrRefused) {
  Random random(7);
  std::vector<const char *> keys;
  for (int32_t f = 0; tx_policy_field_at(f); f++)
    keys.push_back(tx_policy_field_at(f)->name);
  uint32_t resolved = 0;
  for (uint32_t i = 0; i < absurd::kRounds / 4; i++) {
    tx_setting settings[2] = {};
    for (tx_setting &s : settings) {
      s.key = keys[random.Below(static_cast<uint32_t>(keys.size()))];
      s.kind = random.OneIn(20) ? random.I32() : static_cast<int32_t>(random.Below(6));
      s.text = "auto";
      s.number = random.F64();
      s.integer = random.I64();
    }
    tx_policy_args args = TX_POLICY_ARGS_INIT;
    args.config = settings;
    args.n_config = random.OneIn(8) ? -2 : 0;
    args.optimizer.settings = settings;
    args.optimizer.n = static_cast<int64_t>(random.Below(2));
    args.ddp.settings = settings + 1;
    args.ddp.n = random.OneIn(8) ? -1 : static_cast<int64_t>(random.Below(2));
    args.model_dtype = random.OneIn(8) ? random.I32() : TX_BF16;
    if (random.OneIn(8)) args.bf16 = random.I32();
    if (random.OneIn(8)) args.preset = random.I32();
    if (random.OneIn(8)) args.full_shard = random.I32();
    tx_policy policy = TX_POLICY_INIT;
    std::vector<tx_origin> origins(TX_POLICY_FIELDS);
    if (tx_policy_resolve(&args, &policy, origins.data(), TX_POLICY_FIELDS, nullptr) != TX_OK) continue;
    resolved++;
    char text[64];
    (void)tx_policy_describe(&policy, origins.data(), text, random.OneIn(2) ? random.Negative() : 64);
    tx_scale scale = TX_SCALE_INIT;
    (void)tx_scale_from_policy(&policy, &scale, nullptr);
  }
  EXPECT_GT(resolved, absurd::kRounds / 100);
}

// Any number may be passed as a code.
TEST(AbsurdNumbers, CodesHaveNamesOrNone) {
  Random random(8);
  for (uint32_t i = 0; i < absurd::kRounds; i++) {
    const int32_t code = random.I32();
    int64_t bytes;
    ASSERT_NE(tx_dtype_name(static_cast<tx_dtype>(code)), nullptr);
    (void)tx_dtype_size(static_cast<tx_dtype>(code), &bytes, nullptr);
    (void)tx_dtype_torch_name(static_cast<tx_dtype>(code));
    ASSERT_NE(tx_status_name(static_cast<tx_status>(code)), nullptr);
    ASSERT_NE(tx_source_name(static_cast<tx_source>(code)), nullptr);
    (void)tx_policy_field_at(code);
  }
}

}  // namespace
