// csrc/core/layout: the planner of buckets, and its fingerprint (F1-F4, F6).
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "csrc/torch_ext_advanced.h"

namespace {

tx_layout_param Param(int64_t numel, tx_dtype dtype = TX_BF16) {
  tx_layout_param p = {};
  p.numel = numel;
  p.tied = -1;
  p.param_dtype = p.grad_dtype = p.wire_dtype = dtype;
  return p;
}

struct Plan {
  explicit Plan(const tx_layout_args &args) : args(args) {
    places.resize(static_cast<size_t>(args.n));
    buckets.resize(static_cast<size_t>(args.n));
    tx_layout_summary only = {};
    tx_error error;
    EXPECT_EQ(tx_layout_plan(&args, nullptr, nullptr, 0, &only, &error), TX_OK) << error.message;
    EXPECT_EQ(tx_layout_plan(&args, places.data(), buckets.data(), only.n_buckets, &summary, &error), TX_OK)
        << error.message;
    EXPECT_EQ(only.n_buckets, summary.n_buckets);
    EXPECT_EQ(only.n_buffers, summary.n_buffers);
    EXPECT_EQ(only.fingerprint, summary.fingerprint);
    buckets.resize(static_cast<size_t>(summary.n_buckets));
  }
  tx_layout_args args;
  std::vector<tx_layout_place> places;
  std::vector<tx_layout_bucket> buckets;
  tx_layout_summary summary = {};
};

tx_layout_args Args(const std::vector<tx_layout_param> &params, int64_t world, int64_t cap = TX_NO_INT) {
  tx_layout_args args = TX_LAYOUT_ARGS_INIT;
  args.n = static_cast<int64_t>(params.size());
  args.params = params.data();
  args.world = world;
  args.cap = cap;
  return args;
}

TEST(Layout, F4_golden_case) {
  const std::vector<tx_layout_param> params = {Param(100), Param(10000), Param(100)};
  const Plan plan(Args(params, 3, 9000));
  ASSERT_EQ(plan.summary.n_buckets, 2);
  EXPECT_EQ(plan.summary.n_buffers, 1);
  EXPECT_EQ(plan.places[2].start, 0);
  EXPECT_EQ(plan.places[1].start, 128);
  EXPECT_EQ(plan.places[0].start, 10368);
  EXPECT_EQ(plan.places[2].bucket, 0);
  EXPECT_EQ(plan.places[1].bucket, 0);
  EXPECT_EQ(plan.places[0].bucket, 1);
  EXPECT_EQ(plan.buckets[0].offset, 0);
  EXPECT_EQ(plan.buckets[0].size, 10368);
  EXPECT_EQ(plan.buckets[0].used, 10128);
  EXPECT_EQ(plan.buckets[0].n_params, 2);
  EXPECT_EQ(plan.buckets[1].offset, 10368);
  EXPECT_EQ(plan.buckets[1].size, 10752 - 10368);
  EXPECT_EQ(plan.buckets[1].used, 100);
  EXPECT_EQ(plan.buckets[1].n_params, 1);
}

TEST(Layout, F1_a_bucket_closes_after_the_parameter_that_reaches_the_cap) {
  for (const auto &[cap, n_buckets] :
       std::map<int64_t, int64_t>{{1, 3}, {128, 3}, {129, 2}, {256, 2}, {257, 1}, {10000, 1}}) {
    const std::vector<tx_layout_param> params(3, Param(128));
    EXPECT_EQ(Plan(Args(params, 1, cap)).summary.n_buckets, n_buckets) << cap;
  }
}

TEST(Layout, F1_groups_by_dtypes_device_and_key) {
  const auto with = [](void (*change)(tx_layout_param *)) {
    tx_layout_param p = Param(100);
    change(&p);
    return p;
  };
  const std::vector<tx_layout_param> params = {Param(100),
                                               with([](tx_layout_param *p) { p->param_dtype = TX_F32; }),
                                               with([](tx_layout_param *p) { p->grad_dtype = TX_F32; }),
                                               with([](tx_layout_param *p) { p->wire_dtype = TX_F32; }),
                                               with([](tx_layout_param *p) { p->device = 1; }),
                                               with([](tx_layout_param *p) { p->key = 5; }),
                                               Param(100)};
  const Plan plan(Args(params, 2));
  EXPECT_EQ(plan.summary.n_buffers, 6);
  EXPECT_EQ(plan.summary.n_buckets, 6);
  std::set<int64_t> buffers;
  for (size_t i = 0; i < 6; i++)
    buffers.insert(plan.places[i].buffer);
  EXPECT_EQ(buffers.size(), 6u);
  EXPECT_EQ(plan.places[6].buffer, plan.places[0].buffer);
  EXPECT_EQ(plan.places[6].start, 0) << "reverse registration order";
  EXPECT_EQ(plan.places[0].start, 128);
  EXPECT_EQ(plan.places[6].buffer, 0) << "buffers are numbered as they fill";
}

TEST(Layout, F1_a_tied_parameter_is_placed_once) {
  std::vector<tx_layout_param> params = {Param(1000), Param(50), Param(1000)};
  params[2].tied = 0;
  const Plan plan(Args(params, 1));
  EXPECT_EQ(plan.places[1].start, 0);
  EXPECT_EQ(plan.places[0].start, 128);
  EXPECT_EQ(plan.places[2].start, 128);
  EXPECT_EQ(plan.buckets[0].n_params, 2);
  EXPECT_EQ(plan.buckets[0].used, 1128);
}

struct DefaultCap {
  const char *id;
  tx_dtype wire;
  int64_t world, numel, cap;  // elements of the whole buffer, and of a bucket
};

void PrintTo(const DefaultCap &c, std::ostream *out) {
  *out << c.id;
}

class LayoutDefaultCapTest : public testing::TestWithParam<DefaultCap> {};

TEST_P(LayoutDefaultCapTest, F2_closes_a_bucket_and_an_element_less_does_not) {
  const DefaultCap &c = GetParam();
  std::vector<tx_layout_param> params = {Param(c.numel - c.cap - 128), Param(128), Param(c.cap)};
  for (tx_layout_param &p : params)
    p.wire_dtype = c.wire;
  EXPECT_EQ(Plan(Args(params, c.world)).places[1].bucket, 1);
  params[2].numel--;
  EXPECT_EQ(Plan(Args(params, c.world)).places[1].bucket, 0);
}

const DefaultCap kDefaultCaps[] = {
    {"one_of_32_of_19_MB", TX_BF16, 2, 9500032, 296832},
    {"one_of_32_counts_wire_bytes", TX_F32, 2, 9500032, 296832},
    {"one_of_32_of_126_MB", TX_BF16, 4, 63000064, 1968640},
    {"one_of_16_of_8_bit_blocks", TX_U8, 4, 63000064, 3937408},
    {"least_512_KiB", TX_BF16, 1, 1280000, 262144},
    {"least_512_KiB_fp32", TX_F32, 8, 1280000, 131072},
    {"least_1_MiB_of_8_bit_blocks", TX_U8, 2, 9500032, 8128 * 128},
    {"least_grows_past_eight_ranks", TX_BF16, 9, 1280000, 655360},
    {"least_of_64_ranks_is_42_MiB", TX_F32, 64, 128000000, 11141120},
    {"least_of_1024_ranks_is_762_MiB", TX_BF16, 1024, 1280000000, 399769600},
    {"most_is_megatrons", TX_F32, 8, INT64_C(7000000000), 40000000},
    {"most_of_16_bits", TX_BF16, 40, INT64_C(7000000000), 80000000},
    {"most_of_8_bit_blocks", TX_U8, 8, INT64_C(7000000000), 1240310 * 128},
    {"most_of_64_ranks", TX_F16, 64, INT64_C(70000000000), 128000000},
    {"most_of_1024_ranks", TX_F32, 1024, INT64_C(70000000000), 1024000000},
    {"most_of_the_largest_buffer", TX_C128, 1, INT64_MAX / 16 / 128 * 128, 10000000},
};
INSTANTIATE_TEST_SUITE_P(Cases, LayoutDefaultCapTest, testing::ValuesIn(kDefaultCaps),
                         [](const auto &info) { return std::string(info.param.id); });

TEST(Layout, F2_default_cap_is_that_of_each_buffer) {
  // 2.56 MB alone are four buckets of at least 512 KiB. They remain four if there are also 32 times as many elements of
  // another dtype, and if each parameter has tied copies.
  std::vector<tx_layout_param> params(20, Param(64000));
  ASSERT_EQ(Plan(Args(params, 1)).summary.n_buckets, 4);
  params.insert(params.end(), 20, Param(32 * 64000, TX_F32));
  for (int64_t i = 0; i < 2000; i++) {
    params.push_back(params[0]);
    params.back().tied = i % 20;
  }
  std::vector<int64_t> order(params.size());
  std::iota(order.begin(), order.end(), 0);
  tx_layout_args args = Args(params, 1);
  args.order = order.data();
  const Plan plan(args);
  EXPECT_EQ(std::count_if(plan.buckets.begin(), plan.buckets.end(), [](const auto &b) { return b.buffer == 0; }), 4);
}

TEST(Layout, F2_no_overlap_is_one_bucket_per_buffer) {
  const std::vector<tx_layout_param> params = {Param(100), Param(10000), Param(100), Param(7, TX_F32)};
  tx_layout_args args = Args(params, 3, 10);
  args.overlap = 0;
  const Plan plan(args);
  EXPECT_EQ(plan.summary.n_buckets, 2);
  EXPECT_EQ(plan.summary.n_buffers, 2);
}

TEST(Layout, F3_high_bandwidth_ends_are_multiples_of_65536) {
  const std::vector<tx_layout_param> params = {Param(100), Param(70000), Param(100)};
  for (int64_t world : {1, 2, 3, 8, 1000}) {
    tx_layout_args args = Args(params, world, 100);
    args.high_bandwidth = 1;
    for (const tx_layout_bucket &bucket : Plan(args).buckets) {
      EXPECT_EQ(bucket.size % 65536, 0);
      EXPECT_EQ(bucket.size % (world * 128), 0);
    }
  }
}

TEST(Layout, F1_F3_properties) {
  std::mt19937_64 random(11);
  for (int trial = 0; trial < 400; trial++) {
    std::vector<tx_layout_param> params;
    const size_t n = random() % 30;
    for (size_t i = 0; i < n; i++) {
      tx_layout_param p = Param(static_cast<int64_t>(random() % 5 == 0 ? random() % 3 : random() % 3000));
      p.param_dtype = random() % 4 ? TX_BF16 : TX_F32;
      p.key = static_cast<int64_t>(random() % 2);
      if (i > 0 && random() % 8 == 0) {
        const size_t first = random() % i;
        if (params[first].tied == -1) {
          p = params[first];
          p.tied = static_cast<int64_t>(first);
        }
      }
      params.push_back(p);
    }
    const int64_t world = 1 + static_cast<int64_t>(random() % 7);
    tx_layout_args args = Args(params, world, 1 + static_cast<int64_t>(random() % 6000));
    args.overlap = random() % 5 != 0;
    std::vector<int64_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    if (trial % 2) args.order = order.data();
    const Plan plan(args);

    // Every element of a buffer belongs to at most one parameter. Every element of a parameter belongs to one bucket
    // and one shard.
    std::map<int64_t, std::vector<std::tuple<int64_t, int64_t>>> taken;
    std::vector<int64_t> in_bucket(plan.buckets.size());
    for (size_t i = 0; i < n; i++) {
      const tx_layout_place &place = plan.places[i];
      ASSERT_GE(place.bucket, 0);
      ASSERT_LT(place.bucket, plan.summary.n_buckets);
      const tx_layout_bucket &bucket = plan.buckets[static_cast<size_t>(place.bucket)];
      ASSERT_EQ(place.buffer, bucket.buffer);
      ASSERT_EQ(place.start % TX_LAYOUT_ALIGNMENT, 0);
      ASSERT_GE(place.start, bucket.offset);
      ASSERT_LE(place.start + params[i].numel, bucket.offset + bucket.used);
      int64_t covered = 0, end_before = 0;
      for (int64_t rank = 0; rank < world; rank++) {
        int64_t begin, end, first;
        ASSERT_EQ(tx_layout_shard(&bucket, world, rank, &begin, &end, nullptr), TX_OK);
        ASSERT_EQ(begin % TX_LAYOUT_ALIGNMENT, 0) << "shard edges fall on blocks";
        const int64_t count = tx_layout_intersect(place.start, params[i].numel, begin, end, &first);
        if (count == 0) continue;
        ASSERT_EQ(first, end_before) << "shards follow each other without gap or overlap";
        ASSERT_GE(place.start + first, begin);
        ASSERT_LE(place.start + first + count, end);
        end_before = first + count;
        covered += count;
      }
      ASSERT_EQ(covered, params[i].numel);
      if (params[i].tied != -1) {
        ASSERT_EQ(place.start, plan.places[static_cast<size_t>(params[i].tied)].start);
        continue;
      }
      in_bucket[static_cast<size_t>(place.bucket)]++;
      taken[place.buffer].emplace_back(place.start, place.start + params[i].numel);
    }
    for (auto &[buffer, ranges] : taken) {
      std::sort(ranges.begin(), ranges.end());
      for (size_t k = 1; k < ranges.size(); k++)
        ASSERT_LE(std::get<1>(ranges[k - 1]), std::get<0>(ranges[k]));
    }
    // Buckets of a buffer follow each other without gaps; all but the last reached the cap; shards tile each bucket.
    for (size_t b = 0; b < plan.buckets.size(); b++) {
      const tx_layout_bucket &bucket = plan.buckets[b];
      ASSERT_EQ(bucket.n_params, in_bucket[b]);
      ASSERT_GT(bucket.n_params, 0);
      ASSERT_EQ(bucket.size % (world * TX_LAYOUT_ALIGNMENT), 0);
      ASSERT_LE(bucket.used, bucket.size);
      ASSERT_LT(bucket.size - bucket.used, world * TX_LAYOUT_ALIGNMENT);
      const bool last = b + 1 == plan.buckets.size() || plan.buckets[b + 1].buffer != bucket.buffer;
      if (!last) {
        ASSERT_TRUE(args.overlap);
        ASSERT_GE(bucket.used, args.cap);
        ASSERT_EQ(plan.buckets[b + 1].offset, bucket.offset + bucket.size);
      }
      const bool is_first = b == 0 || plan.buckets[b - 1].buffer != bucket.buffer;
      ASSERT_TRUE(!is_first || bucket.offset == 0);
      int64_t expected = bucket.offset;
      for (int64_t rank = 0; rank < world; rank++) {
        int64_t begin, end;
        ASSERT_EQ(tx_layout_shard(&bucket, world, rank, &begin, &end, nullptr), TX_OK);
        ASSERT_EQ(begin, expected);
        expected = end;
      }
      ASSERT_EQ(expected, bucket.offset + bucket.size);
    }
    // Within a buffer, parameters are in the requested order.
    const auto nth = [&](size_t k) { return args.order ? static_cast<size_t>(order[k]) : n - 1 - k; };
    std::map<int64_t, int64_t> last_start;
    for (size_t k = 0; k < n; k++) {
      const size_t i = nth(k);
      if (params[i].tied != -1) continue;
      const auto at = last_start.find(plan.places[i].buffer);
      ASSERT_TRUE(at == last_start.end() || plan.places[i].start >= at->second);
      last_start[plan.places[i].buffer] = plan.places[i].start;
    }
  }
}

TEST(Layout, F6_fingerprint_changes_with_every_input_that_ranks_must_share) {
  const int64_t shape[] = {10, 20};
  const int64_t other_shape[] = {20, 10};
  const int64_t long_shape[] = {10, 20, 1};
  const auto base_params = [&] {
    std::vector<tx_layout_param> params = {Param(200), Param(300), Param(300)};
    params[0].name = "a";
    params[1].name = "b";
    params[2].name = "c";
    params[0].shape = shape;
    params[0].ndim = 2;
    return params;
  };
  const auto fingerprint = [&](auto change) {
    std::vector<tx_layout_param> params = base_params();
    tx_layout_args args = Args(params, 4, 400);
    static const int64_t order[] = {0, 1, 2};
    change(params, args, order);
    args.params = params.data();
    args.n = static_cast<int64_t>(params.size());
    return Plan(args).summary.fingerprint;
  };
  using P = std::vector<tx_layout_param>;
  const uint64_t same = fingerprint([](P &, tx_layout_args &, const int64_t *) {});
  EXPECT_EQ(same, fingerprint([](P &, tx_layout_args &, const int64_t *) {}));
  EXPECT_EQ(same, fingerprint([](P &params, tx_layout_args &, const int64_t *) {
              for (auto &p : params)
                p.device = 3;
            }))
      << "ranks sit on different devices";
  const uint64_t different[] = {
      fingerprint([](P &params, tx_layout_args &, const int64_t *) { params[1].name = "x"; }),
      fingerprint([](P &params, tx_layout_args &, const int64_t *) { params[1].name = nullptr; }),
      fingerprint([&](P &params, tx_layout_args &, const int64_t *) { params[0].shape = other_shape; }),
      fingerprint([&](P &params, tx_layout_args &, const int64_t *) {
        params[0].shape = long_shape;
        params[0].ndim = 3;
      }),
      fingerprint([](P &params, tx_layout_args &, const int64_t *) { params[1].numel++; }),
      fingerprint([](P &params, tx_layout_args &, const int64_t *) { params[1].param_dtype = TX_F32; }),
      fingerprint([](P &params, tx_layout_args &, const int64_t *) { params[1].grad_dtype = TX_F32; }),
      fingerprint([](P &params, tx_layout_args &, const int64_t *) { params[1].wire_dtype = TX_F32; }),
      fingerprint([](P &params, tx_layout_args &, const int64_t *) { params[1].key = 1; }),
      fingerprint([](P &params, tx_layout_args &, const int64_t *) { params[2].tied = 1; }),
      fingerprint([](P &params, tx_layout_args &, const int64_t *) { std::swap(params[1], params[2]); }),
      fingerprint([](P &params, tx_layout_args &, const int64_t *) { params.pop_back(); }),
      fingerprint([](P &, tx_layout_args &args, const int64_t *) { args.world = 8; }),
      fingerprint([](P &, tx_layout_args &args, const int64_t *) { args.cap = 100; }),
      fingerprint([](P &, tx_layout_args &args, const int64_t *) { args.overlap = 0; }),
      fingerprint([](P &, tx_layout_args &args, const int64_t *) { args.high_bandwidth = 1; }),
      fingerprint([](P &, tx_layout_args &args, const int64_t *order) { args.order = order; }),
  };
  std::set<uint64_t> all(std::begin(different), std::end(different));
  all.insert(same);
  EXPECT_EQ(all.size(), std::size(different) + 1);
}

TEST(Layout, F6_fingerprint_sees_what_the_plan_does_not_show) {
  std::vector<tx_layout_param> params = {Param(1024), Param(1024), Param(1024)};
  const auto fingerprint = [&](int64_t world) { return Plan(Args(params, world)).summary.fingerprint; };
  EXPECT_EQ(Plan(Args(params, 4)).buckets[0].size, Plan(Args(params, 8)).buckets[0].size);
  EXPECT_NE(fingerprint(4), fingerprint(8)) << "world";
  params[2].tied = 0;
  const uint64_t tied_to_first = fingerprint(4);
  params[2].tied = 1;
  EXPECT_NE(fingerprint(4), tied_to_first) << "who is tied to whom";
}

TEST(Layout, empty_things_are_no_errors) {
  const Plan nothing(Args({}, 4));
  EXPECT_EQ(nothing.summary.n_buckets, 0);
  EXPECT_EQ(nothing.summary.n_buffers, 0);
  const std::vector<tx_layout_param> params = {Param(0), Param(0)};
  const Plan empty(Args(params, 4));
  ASSERT_EQ(empty.summary.n_buckets, 1);
  EXPECT_EQ(empty.buckets[0].size, 0);
  const std::vector<tx_layout_param> one = {Param(1)};
  EXPECT_EQ(Plan(Args(one, 1)).buckets[0].size, 128);
}

TEST(Layout, many_parameters_in_any_order) {
  const std::vector<tx_layout_param> params(70000, Param(1));
  std::vector<int64_t> order(params.size());
  std::iota(order.begin(), order.end(), 0);
  tx_layout_args args = Args(params, 2, 1280);
  args.order = order.data();
  EXPECT_EQ(Plan(args).summary.n_buckets, 7000 - 7000 / 11);
  tx_layout_summary summary;
  tx_error error;
  order[69999] = 65000;  // 2^15 positions after the first 65000
  EXPECT_EQ(tx_layout_plan(&args, nullptr, nullptr, 0, &summary, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error.message).find("65000 twice"), std::string::npos) << error.message;
}

struct Bad {
  const char *id;
  tx_status status;
  const char *says;
  void (*change)(std::vector<tx_layout_param> &, tx_layout_args &);
};

void PrintTo(const Bad &c, std::ostream *out) {
  *out << c.id;
}

class LayoutBadTest : public testing::TestWithParam<Bad> {};

TEST_P(LayoutBadTest, is_refused_and_nothing_is_written) {
  std::vector<tx_layout_param> params = {Param(200), Param(300), Param(300)};
  params[1].name = "head.weight";
  tx_layout_args args = Args(params, 4, 400);
  GetParam().change(params, args);
  std::vector<tx_layout_place> places(3, {-7, -7, -7});
  std::vector<tx_layout_bucket> buckets(3, {-7, -7, -7, -7, -7});
  tx_layout_summary summary = {-7, -7, 7};
  tx_error error;
  ASSERT_EQ(tx_layout_plan(&args, places.data(), buckets.data(), 3, &summary, &error), GetParam().status);
  EXPECT_NE(std::string(error.message).find(GetParam().says), std::string::npos) << error.message;
  for (const auto &place : places)
    EXPECT_EQ(place.start, -7);
  for (const auto &bucket : buckets)
    EXPECT_EQ(bucket.size, -7);
  EXPECT_EQ(summary.fingerprint, 7u);
}

using Params = std::vector<tx_layout_param>;
constexpr int64_t kTwice[] = {0, 1, 1};
constexpr int64_t kBeyond[] = {0, 1, 3};
constexpr int64_t kShape[] = {299};
constexpr int64_t kHuge[] = {INT64_MAX, 4};

const Bad kBad[] = {
    {"cap_zero", TX_ERROR_INVALID_ARGUMENT, "cap 0", [](Params &, tx_layout_args &args) { args.cap = 0; }},
    {"cap_negative", TX_ERROR_INVALID_ARGUMENT, "cap -5", [](Params &, tx_layout_args &args) { args.cap = -5; }},
    {"world_zero", TX_ERROR_INVALID_ARGUMENT, "world size 0", [](Params &, tx_layout_args &args) { args.world = 0; }},
    {"world_huge", TX_ERROR_INVALID_ARGUMENT, "world size",
     [](Params &, tx_layout_args &args) { args.world = INT64_MAX; }},
    {"numel_negative", TX_ERROR_INVALID_ARGUMENT, "head.weight", [](Params &p, tx_layout_args &) { p[1].numel = -1; }},
    {"numel_overflows", TX_ERROR_INVALID_ARGUMENT, "head.weight",
     [](Params &p, tx_layout_args &) { p[1].numel = INT64_MAX; }},
    {"sum_overflows", TX_ERROR_INVALID_ARGUMENT, "beyond",
     [](Params &p, tx_layout_args &) { p[0].numel = p[1].numel = INT64_MAX / 16 - 1000; }},
    {"sum_overflows_under_the_default_cap", TX_ERROR_INVALID_ARGUMENT, "beyond",
     [](Params &p, tx_layout_args &args) {
       p[0].numel = p[1].numel = p[2].numel = INT64_MAX / 16;
       args.cap = TX_NO_INT;
     }},
    {"dtype_none", TX_ERROR_UNKNOWN_DTYPE, "head.weight",
     [](Params &p, tx_layout_args &) { p[1].wire_dtype = TX_NONE; }},
    {"dtype_unknown", TX_ERROR_UNKNOWN_DTYPE, "99", [](Params &p, tx_layout_args &) { p[1].param_dtype = 99; }},
    {"tied_to_itself", TX_ERROR_INVALID_ARGUMENT, "tied", [](Params &p, tx_layout_args &) { p[1].tied = 1; }},
    {"tied_to_a_later_one", TX_ERROR_INVALID_ARGUMENT, "tied", [](Params &p, tx_layout_args &) { p[1].tied = 2; }},
    {"tied_below_minus_one", TX_ERROR_INVALID_ARGUMENT, "tied", [](Params &p, tx_layout_args &) { p[1].tied = -2; }},
    {"tied_of_another_size", TX_ERROR_SHAPE, "tied", [](Params &p, tx_layout_args &) { p[1].tied = 0; }},
    {"shape_of_another_size", TX_ERROR_SHAPE, "head.weight",
     [](Params &p, tx_layout_args &) {
       p[1].shape = kShape;
       p[1].ndim = 1;
     }},
    {"shape_overflows", TX_ERROR_SHAPE, "head.weight",
     [](Params &p, tx_layout_args &) {
       p[1].shape = kHuge;
       p[1].ndim = 2;
     }},
    {"order_twice", TX_ERROR_INVALID_ARGUMENT, "twice", [](Params &, tx_layout_args &args) { args.order = kTwice; }},
    {"order_beyond", TX_ERROR_INVALID_ARGUMENT, "order[2]",
     [](Params &, tx_layout_args &args) { args.order = kBeyond; }},
    {"n_negative", TX_ERROR_INVALID_ARGUMENT, "-1", [](Params &, tx_layout_args &args) { args.n = -1; }},
    {"params_null", TX_ERROR_INVALID_ARGUMENT, "3 parameters",
     [](Params &, tx_layout_args &args) { args.params = nullptr; }},
    {"size_unset", TX_ERROR_INVALID_ARGUMENT, "TX_LAYOUT_ARGS_INIT",
     [](Params &, tx_layout_args &args) { args.size = 0; }}};
INSTANTIATE_TEST_SUITE_P(Cases, LayoutBadTest, testing::ValuesIn(kBad),
                         [](const auto &info) { return std::string(info.param.id); });

TEST(Layout, room_for_too_few_buckets_is_refused) {
  const std::vector<tx_layout_param> params(3, Param(128));
  const tx_layout_args args = Args(params, 1, 1);
  std::vector<tx_layout_place> places(3, {-7, -7, -7});
  std::vector<tx_layout_bucket> buckets(3);
  tx_layout_summary summary;
  tx_error error;
  EXPECT_EQ(tx_layout_plan(&args, places.data(), buckets.data(), 2, &summary, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(places[0].start, -7);
  EXPECT_EQ(tx_layout_plan(&args, places.data(), nullptr, 0, &summary, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_layout_plan(&args, places.data(), buckets.data(), 3, nullptr, &error), TX_ERROR_INVALID_ARGUMENT);
}

TEST(Layout, shard_refuses_what_is_not_legal) {
  const tx_layout_bucket bucket = {0, 384, 768, 700, 1};
  int64_t begin = -7, end = -7;
  tx_error error;
  for (const auto &[world, rank] : std::vector<std::pair<int64_t, int64_t>>{{0, 0}, {3, 3}, {3, -1}}) {
    EXPECT_EQ(tx_layout_shard(&bucket, world, rank, &begin, &end, &error), TX_ERROR_INVALID_ARGUMENT);
  }
  EXPECT_EQ(tx_layout_shard(&bucket, 5, 0, &begin, &end, &error), TX_ERROR_MISMATCH);
  EXPECT_EQ(begin, -7);
  ASSERT_EQ(tx_layout_shard(&bucket, 3, 2, &begin, &end, &error), TX_OK);
  EXPECT_EQ(begin, 384 + 512);
  EXPECT_EQ(end, 384 + 768);
}

TEST(Layout, intersect_table) {
  const struct {
    int64_t start, numel, begin, end, first, count;
  } cases[] = {{0, 10, 0, 10, 0, 10}, {0, 10, 5, 20, 5, 5},  {5, 10, 0, 8, 0, 3}, {5, 10, 7, 9, 2, 2},
               {5, 10, 0, 5, 0, 0},   {5, 10, 15, 20, 0, 0}, {5, 0, 0, 20, 0, 0}, {5, 10, 6, 6, 0, 0}};
  for (const auto &c : cases) {
    int64_t first = -7;
    EXPECT_EQ(tx_layout_intersect(c.start, c.numel, c.begin, c.end, &first), c.count);
    EXPECT_EQ(first, c.first);
  }
}

}  // namespace
