// tx_grad_stats and tx_grad_norm: an exact norm that depends on no order, and the count of non-finite elements.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

extern "C" {
#include "csrc/math/exact_sum.h"
#include "csrc/math/reduce.h"
}
#include "tests/core/arrays.h"
#include "tests/core/same_bits.h"

namespace {

const float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

Counts NoStats() {
  return Counts(std::vector<int64_t>(TX_STATS_LEN, 0));
}

std::vector<tx_tensor> Tensors(std::vector<Array> &arrays) {
  std::vector<tx_tensor> tensors;
  for (Array &array : arrays)
    tensors.push_back(array.tensor());
  return tensors;
}

// The bytes of stats, and first_bad.
std::pair<std::vector<uint8_t>, int64_t> Stats(const std::vector<tx_tensor> &grads,
                                               const tx_parallel *parallel = nullptr) {
  Counts stats = NoStats(), first_bad({INT64_MAX});
  tx_error error = {};
  EXPECT_EQ(tx_grad_stats(static_cast<int64_t>(grads.size()), grads.data(), stats.tensor(), first_bad.tensor(),
                          parallel, &error),
            TX_OK)
      << error.message;
  EXPECT_TRUE(stats.GuardsIntact() && first_bad.GuardsIntact());
  return {stats.bytes(), first_bad[0]};
}

double Norm(Counts &stats, double max_norm = INFINITY, float *coef = nullptr, float *found_inf = nullptr,
            const float *grad_scale = nullptr) {
  double norm = -1;
  float unused[2];
  float scale = grad_scale ? *grad_scale : 1.0f;
  const tx_tensor scale_tensor = grad_scale ? tx_tensor{&scale, 1, TX_F32, 0} : None();
  EXPECT_EQ(tx_grad_norm(stats.tensor(), scale_tensor, max_norm, {&norm, 1, TX_F64, 0},
                         {coef ? coef : &unused[0], 1, TX_F32, 0}, {found_inf ? found_inf : &unused[1], 1, TX_F32, 0},
                         nullptr),
            TX_OK);
  return norm;
}

double NormOf(const std::vector<tx_tensor> &grads) {
  Counts stats = NoStats();
  EXPECT_EQ(tx_grad_stats(static_cast<int64_t>(grads.size()), grads.data(), stats.tensor(), None(), nullptr, nullptr),
            TX_OK);
  return Norm(stats);
}

class EveryPlain : public testing::TestWithParam<tx_dtype> {};

// Compared with long double: a block's tree of sums has seven roundings, the sum over blocks none.
TEST_P(EveryPlain, IsTheNormWithin1e15) {
  for (int64_t n : kSizes) {
    for (int64_t misalign : {0, 1}) {
      Array grad(GetParam(), n, misalign);
      grad.Fill(static_cast<uint32_t>(n + 1));
      long double sum = 0;
      for (int64_t i = 0; i < n; i++)
        sum += static_cast<long double>(grad.Get(i)) * grad.Get(i);
      const double expected = static_cast<double>(std::sqrt(sum));
      EXPECT_NEAR(NormOf({grad.tensor()}), expected, 1e-15 * expected) << n;
      EXPECT_TRUE(grad.GuardsIntact());
    }
  }
}

// Blocks start at the tensor's start, and each is summed by the tree of csrc/math/reduce.h. Other back ends have to do
// the same.
TEST_P(EveryPlain, LimbsAreThoseOfItsBlocks) {
  Array grad(GetParam(), 1000);
  grad.Fill(3);
  Counts expected = NoStats();
  int64_t limbs[TX_NORM_LIMBS] = {0};
  for (int64_t at = 0; at < 1000; at += TX_BLOCK) {
    std::vector<float> x;
    for (int64_t i = at; i < std::min<int64_t>(1000, at + TX_BLOCK); i++)
      x.push_back(grad.Get(i));
    x.resize(TX_BLOCK);
    ASSERT_EQ(tx_exact_add(limbs, tx_sum_squares_full(x.data())), 0);
  }
  tx_exact_carry(limbs);
  for (int64_t i = 0; i < TX_NORM_LIMBS; i++)
    expected.SetWord(i, limbs[i]);
  EXPECT_EQ(Stats({grad.tensor()}).first, expected.bytes());
}

TEST_P(EveryPlain, BitsDoNotDependOnSplitsAtBlockEdgesNorOnTheirOrder) {
  const int64_t n = 2 * 16384 + 333;
  Array grad(GetParam(), n);
  grad.Fill(4);
  const auto whole = Stats({grad.tensor()});
  std::vector<tx_tensor> parts;
  for (int64_t at = 0; at < n;) {
    const int64_t end = std::min(n, at + TX_BLOCK * (1 + (at / 128) % 5));
    parts.push_back(grad.slice(at, end));
    at = end;
  }
  EXPECT_EQ(Stats(parts), whole);
  std::reverse(parts.begin(), parts.end());
  EXPECT_EQ(Stats(parts), whole);
}

TEST_P(EveryPlain, CountsWhatIsNotFiniteAndNamesTheFirst) {
  struct Case {
    std::vector<std::pair<int64_t, float>> bad; /* element, value */
  };
  for (const Case &c : {Case{{}}, Case{{{0, kNan}}}, Case{{{127, kInf}}}, Case{{{128, -kInf}, {129, kNan}}},
                        Case{{{20000, kInf}, {32766, -kNan}, {40, -kInf}}}}) {
    Array first(GetParam(), 300), second(GetParam(), 32767), third(GetParam(), 2);
    first.Fill(1);
    second.Fill(2);
    third.Fill(3);
    for (auto [i, value] : c.bad)
      second.Set(i, value);
    if (c.bad.size() == 3) third.Set(1, kNan);
    const auto [stats, first_bad] = Stats({first.tensor(), second.tensor(), third.tensor()});
    int64_t count;
    std::memcpy(&count, stats.data() + 8 * TX_NORM_LIMBS, 8);
    EXPECT_EQ(count, static_cast<int64_t>(c.bad.size()) + (c.bad.size() == 3));
    EXPECT_EQ(first_bad, c.bad.empty() ? INT64_MAX : 1);
  }
}
INSTANTIATE_TEST_SUITE_P(Dtypes, EveryPlain, testing::ValuesIn(kPlain),
                         [](const auto &info) { return DtypeName(info.param); });

TEST(GradStats, BitsAreTheSameEverywhere) {
  ExpectSameBits([](const Caller &caller) {
    std::vector<Array> arrays;
    for (tx_dtype dtype : kPlain) {
      for (int64_t n : kSizes)
        arrays.emplace_back(Array(dtype, n).Fill(static_cast<uint32_t>(n)));
      arrays.emplace_back(Array(dtype, 50000).Fill(9, 1e-3f));
      arrays.emplace_back(Array(dtype, 700).FillBytes(5)); /* includes NaN, Inf and subnormals */
    }
    Counts stats = NoStats(), first_bad({INT64_MAX});
    const std::vector<tx_tensor> grads = Tensors(arrays);
    caller([&](const tx_parallel *parallel, tx_error *error) {
      return tx_grad_stats(static_cast<int64_t>(grads.size()), grads.data(), stats.tensor(), first_bad.tensor(),
                           parallel, error);
    });
    Array norm(TX_F64, 1), coef(TX_F32, 1), found_inf(TX_F32, 1);
    Counts finite = stats;
    finite.SetWord<int64_t>(TX_NORM_LIMBS, 0);
    caller([&](const tx_parallel *, tx_error *error) {
      return tx_grad_norm(finite.tensor(), None(), 1.0, norm.tensor(), coef.tensor(), found_inf.tensor(), error);
    });
    return Outputs{stats.bytes(), first_bad.bytes(), norm.bytes(), coef.bytes(), found_inf.bytes()};
  });
}

// The gradients of a loss that was multiplied by a negative scale have the same norm.
TEST(GradStats, TheSignOfTheLossScaleIsInNoNorm) {
  Array grad(TX_F32, {3.0f, 4.0f}), norm(TX_F32, 1), coef(TX_F32, 1), found_inf(TX_F32, 1);
  Counts stats = NoStats();
  const tx_tensor grads[] = {grad.tensor()};
  EXPECT_EQ(tx_grad_stats(1, grads, stats.tensor(), None(), nullptr, nullptr), TX_OK);
  for (const float scale : {2.0f, -2.0f}) {
    Array grad_scale(TX_F32, {scale});
    EXPECT_OK([&](tx_error *error) {
      return tx_grad_norm(stats.tensor(), grad_scale.tensor(), 1.25, norm.tensor(), coef.tensor(), found_inf.tensor(),
                          error);
    });
    EXPECT_EQ(norm.Get(0), 2.5f) << scale;
    EXPECT_NEAR(coef.Get(0), 0.5f, 1e-6) << scale;
    EXPECT_EQ(found_inf.Get(0), 0.0f) << scale;
  }
}

TEST(GradStats, ExtremesAreExact) {
  const float tiny = std::numeric_limits<float>::denorm_min(), huge = std::numeric_limits<float>::max();
  struct Case {
    const char *name;
    std::vector<float> values;
    double norm;
  };
  for (const Case &c : {Case{"nothing", {}, 0.0},
                        {"zeros", {0.0f, -0.0f}, 0.0},
                        {"three_four", {3.0f, -4.0f}, 5.0},
                        {"smallest", {tiny}, static_cast<double>(tiny)},
                        {"four_smallest", {tiny, tiny, tiny, tiny}, 2 * static_cast<double>(tiny)},
                        {"largest", {huge}, static_cast<double>(huge)},
                        {"beyond_fp32", {huge, huge, huge, huge}, 2 * static_cast<double>(huge)},
                        {"both_ends", {huge, tiny}, static_cast<double>(huge)}}) {
    Array grad(TX_F32, c.values);
    EXPECT_EQ(NormOf({grad.tensor()}), c.norm) << c.name;
  }
}

TEST(GradStats, CallsAddUpAndRanksMayAddTheirLimbs) {
  Array a(TX_BF16, 20000), b(TX_F32, 777);
  a.Fill(1);
  b.Fill(2).Set(5, kInf);
  const auto together = Stats({a.tensor(), b.tensor()}).first;
  Counts one_by_one = NoStats(), rank0 = NoStats(), rank1 = NoStats(), all_reduced = NoStats();
  for (auto [array, rank] : {std::pair<Array *, Counts *>{&a, &rank0}, {&b, &rank1}}) {
    const tx_tensor grad = array->tensor();
    ASSERT_EQ(tx_grad_stats(1, &grad, one_by_one.tensor(), None(), nullptr, nullptr), TX_OK);
    ASSERT_EQ(tx_grad_stats(1, &grad, rank->tensor(), None(), nullptr, nullptr), TX_OK);
  }
  EXPECT_EQ(one_by_one.bytes(), together);
  for (int64_t i = 0; i < TX_STATS_LEN; i++)
    all_reduced.SetWord(i, rank0[i] + rank1[i]);
  const tx_tensor grad = None();
  /* only propagates carries */
  ASSERT_EQ(tx_grad_stats(1, &grad, all_reduced.tensor(), None(), nullptr, nullptr), TX_OK);
  EXPECT_EQ(all_reduced.bytes(), together);
}

TEST(GradStats, FirstBadKeepsTheSmaller) {
  Array bad(TX_F32, {kNan});
  const tx_tensor grads[] = {None(), bad.tensor(), bad.tensor()};
  for (auto [before, after] : std::vector<std::pair<int64_t, int64_t>>{{INT64_MAX, 1}, {7, 1}, {0, 0}, {-3, -3}}) {
    Counts stats = NoStats(), first_bad({before});
    ASSERT_EQ(tx_grad_stats(3, grads, stats.tensor(), first_bad.tensor(), nullptr, nullptr), TX_OK);
    EXPECT_EQ(first_bad[0], after);
    EXPECT_EQ(stats[TX_NORM_LIMBS], 2);
  }
}

TEST(GradStats, NothingToLookAtIsNotAnError) {
  Counts stats = NoStats();
  EXPECT_EQ(tx_grad_stats(0, nullptr, stats.tensor(), None(), nullptr, nullptr), TX_OK);
  EXPECT_EQ(stats.bytes(), NoStats().bytes());
}

TEST(GradStats, RefusesWithAMessageAndWritesNothing) {
  Array grad(TX_F32, 5), wide(TX_F64, 5);
  Counts stats = NoStats(), first_bad({INT64_MAX}), short_stats({1, 2, 3});
  const tx_tensor good[] = {grad.tensor(), grad.tensor()}, bad_dtype[] = {grad.tensor(), wide.tensor()};
  const tx_tensor negative[] = {{grad.data(), -1, TX_F32, 0}}, inside[] = {{stats.data() + 8, 2, TX_F32, 0}};
  tx_parallel old = TX_PARALLEL_INIT;
  old.size = 8;
  const tx_tensor s = stats.tensor(), f = first_bad.tensor();
  struct Case {
    const char *says;
    tx_status status;
    int64_t n;
    const tx_tensor *grads;
    tx_tensor stats, first_bad;
    const tx_parallel *parallel;
  };
  for (const Case &c : {Case{"grads[1] is", TX_ERROR_DTYPE, 2, bad_dtype, s, f, nullptr},
                        {"grads is NULL", TX_ERROR_INVALID_ARGUMENT, 2, nullptr, s, f, nullptr},
                        {"n is -1", TX_ERROR_INVALID_ARGUMENT, -1, good, s, f, nullptr},
                        {"grads[0] has numel -1", TX_ERROR_SHAPE, 1, negative, s, f, nullptr},
                        {"stats has 3 elements; 21", TX_ERROR_SHAPE, 2, good, short_stats.tensor(), f, nullptr},
                        {"stats has 0 elements", TX_ERROR_SHAPE, 2, good, None(), f, nullptr},
                        {"first_bad has 21 elements", TX_ERROR_SHAPE, 2, good, s, s, nullptr},
                        {"stats[0] and grads[0] share memory", TX_ERROR_OVERLAP, 1, inside, s, f, nullptr},
                        {"parallel.size", TX_ERROR_INVALID_ARGUMENT, 2, good, s, f, &old}}) {
    SCOPED_TRACE(c.says);
    ExpectRefused([&](tx_error *e) { return tx_grad_stats(c.n, c.grads, c.stats, c.first_bad, c.parallel, e); },
                  c.status, c.says, {&stats, &first_bad, &short_stats});
  }
}

// -- norm -------------------------------------------------------------------------------------------------------

TEST(GradNorm, G2_ClipsAndFindsInf) {
  Array three_four(TX_F32, {3.0f, 4.0f}), zero(TX_F32, {0.0f}), bad(TX_F32, {3.0f, kInf, 4.0f});
  struct Case {
    const char *name;
    Array *grad;
    float scale; /* 0: no grad_scale */
    double max_norm, norm, coef;
    float found_inf;
  };
  for (const Case &c : {Case{"clipped", &three_four, 0, 1.0, 5.0, 1.0 / (5.0 + 1e-6), 0},
                        {"not_clipped", &three_four, 0, 6.0, 5.0, 1.0, 0},
                        {"at_the_bound", &three_four, 0, 5.0, 5.0, 5.0 / (5.0 + 1e-6), 0},
                        {"no_clipping", &three_four, 0, INFINITY, 5.0, 1.0, 0},
                        {"scaled", &three_four, 2.0f, 1.0, 2.5, 1.0 / (2.5 + 1e-6), 0},
                        {"zero", &zero, 0, 1.0, 0.0, 1.0, 0},
                        {"inf", &bad, 0, 1.0, NAN, 0.0, 1},
                        {"inf_without_clipping", &bad, 0, INFINITY, NAN, 0.0, 1},
                        {"scale_zero", &three_four, -0.0f, 1.0, INFINITY, 0.0, 1},
                        {"scale_nan", &three_four, kNan, 1.0, NAN, 0.0, 1}}) {
    SCOPED_TRACE(c.name);
    Counts stats = NoStats();
    const tx_tensor grad = c.grad->tensor();
    ASSERT_EQ(tx_grad_stats(1, &grad, stats.tensor(), None(), nullptr, nullptr), TX_OK);
    float coef = -1, found_inf = -1;
    const bool given = c.scale != 0 || std::signbit(c.scale);
    const double norm = Norm(stats, c.max_norm, &coef, &found_inf, given ? &c.scale : nullptr);
    EXPECT_TRUE(norm == c.norm || (std::isnan(norm) && std::isnan(c.norm))) << norm;
    EXPECT_EQ(coef, static_cast<float>(c.coef));
    EXPECT_EQ(found_inf, c.found_inf);
  }
}

TEST(GradNorm, TakesLimbsAsAnAllReduceLeavesThem) {
  Counts stats = NoStats();
  Array grad(TX_F32, 5000);
  grad.Fill(1);
  const tx_tensor tensor = grad.tensor();
  ASSERT_EQ(tx_grad_stats(1, &tensor, stats.tensor(), None(), nullptr, nullptr), TX_OK);
  Counts times_9 = stats;
  for (int64_t i = 0; i < TX_NORM_LIMBS; i++)
    times_9.SetWord(i, 9 * stats[i]); /* sums of nine ranks, without carries */
  EXPECT_DOUBLE_EQ(Norm(times_9), 3 * Norm(stats));
}

TEST(GradNorm, EachOutputMayBeNoneAndTheNormFp32) {
  Counts stats = NoStats();
  Array grad(TX_F32, {3.0f, 4.0f}), norm(TX_F32, 1);
  const tx_tensor tensor = grad.tensor();
  ASSERT_EQ(tx_grad_stats(1, &tensor, stats.tensor(), None(), nullptr, nullptr), TX_OK);
  EXPECT_EQ(tx_grad_norm(stats.tensor(), None(), 1.0, None(), None(), None(), nullptr), TX_OK);
  EXPECT_EQ(tx_grad_norm(stats.tensor(), None(), 1.0, norm.tensor(), None(), None(), nullptr), TX_OK);
  EXPECT_EQ(norm.Get(0), 5.0f);
  EXPECT_TRUE(norm.GuardsIntact());
}

TEST(GradNorm, RefusesWithAMessageAndWritesNothing) {
  Counts stats = NoStats();
  Array scale(TX_F32, {2.0f}), norm(TX_F64, 1), coef(TX_F32, 1), found_inf(TX_F32, 1), two(TX_F32, 2), half(TX_F16, 1);
  const tx_tensor s = stats.tensor(), g = scale.tensor(), n = norm.tensor(), c = coef.tensor(), f = found_inf.tensor();
  struct Case {
    const char *says;
    tx_status status;
    tx_tensor stats, scale;
    double max_norm;
    tx_tensor norm, coef, found_inf;
  };
  for (const Case &k : {Case{"max_norm is 0", TX_ERROR_ILLEGAL_VALUE, s, g, 0.0, n, c, f},
                        {"max_norm is -1", TX_ERROR_ILLEGAL_VALUE, s, g, -1.0, n, c, f},
                        {"max_norm is nan", TX_ERROR_ILLEGAL_VALUE, s, g, kNan, n, c, f},
                        {"stats has 2", TX_ERROR_SHAPE, two.tensor(), g, 1.0, n, c, f},
                        {"grad_scale is", TX_ERROR_DTYPE, s, half.tensor(), 1.0, n, c, f},
                        {"norm is", TX_ERROR_DTYPE, s, g, 1.0, half.tensor(), c, f},
                        {"clip_coef has 2", TX_ERROR_SHAPE, s, g, 1.0, n, two.tensor(), f},
                        {"found_inf is", TX_ERROR_DTYPE, s, g, 1.0, n, c, half.tensor()},
                        {"share memory", TX_ERROR_OVERLAP, s, g, 1.0, n, c, c},
                        {"grad_scale[0] and found_inf[0] share", TX_ERROR_OVERLAP, s, g, 1.0, n, c, g}}) {
    SCOPED_TRACE(k.says);
    ExpectRefused(
        [&](tx_error *e) { return tx_grad_norm(k.stats, k.scale, k.max_norm, k.norm, k.coef, k.found_inf, e); },
        k.status, k.says, {&stats, &scale, &norm, &coef, &found_inf, &two, &half});
  }
}

}  // namespace
