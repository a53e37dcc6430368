// tx_cuda_grad_stats and tx_cuda_grad_norm must have the CPU's bits, on any grid.
#include <limits>
#include <random>

#include "tests/cuda/both.h"

namespace {

const float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

struct Found {
  AlignedCounts stats = ZeroStats();
  AlignedCounts first_bad = AlignedCounts({INT64_MAX});
};

void ExpectSame(const Found &ours, const Found &theirs) {
  EXPECT_EQ(ours.stats.raw(), theirs.stats.raw());
  EXPECT_EQ(ours.first_bad.raw(), theirs.first_bad.raw());
}

void Add(const std::vector<tx_tensor> &grads, Found *found) {
  const auto n = static_cast<int64_t>(grads.size());
  EXPECT_OK([&](tx_error *e) {
    return tx_cuda_grad_stats(n, grads.data(), found->stats.tensor(), found->first_bad.tensor(), Call(), e);
  });
}
void AddOnCpu(const std::vector<tx_tensor> &grads, Found *found) {
  const auto n = static_cast<int64_t>(grads.size());
  EXPECT_OK([&](tx_error *e) {
    return tx_grad_stats(n, grads.data(), found->stats.tensor(), found->first_bad.tensor(), nullptr, e);
  });
}

// Compares on every grid, in one launch each.
void ExpectSameStats(std::vector<Array> &arrays, const Found &before = Found()) {
  Found theirs = before;
  AddOnCpu(Tensors(arrays), &theirs);
  for (const Grid &grid : kGrids) {
    SCOPED_TRACE(std::to_string(grid.processors) + " processors");
    Arrange(grid);
    Found ours = before;
    Add(Tensors(arrays), &ours);
    ExpectSame(ours, theirs);
    EXPECT_EQ(emulated::world.launches, 1);
    EXPECT_EQ(emulated::world.synchronisations, 0);
  }
}

class EveryPlain : public testing::TestWithParam<std::tuple<tx_dtype, int>> {};

// The magnitudes of Fill differ widely within a block, so another order of additions would give other sums.
TEST_P(EveryPlain, AllSizesInOneCall) {
  std::vector<Array> arrays;
  for (const int64_t n : kSizes)
    arrays.emplace_back(std::get<0>(GetParam()), n, std::get<1>(GetParam())).Fill(static_cast<uint32_t>(n + 1), 1e-3f);
  ExpectSameStats(arrays);
}

TEST_P(EveryPlain, AnyBytesAtAll) {
  std::vector<Array> arrays;
  for (const int64_t n : kSizes)
    arrays.emplace_back(std::get<0>(GetParam()), n, std::get<1>(GetParam())).FillBytes(static_cast<uint32_t>(n));
  ExpectSameStats(arrays);
}

TEST_P(EveryPlain, CountsWhatIsNotFiniteAndNamesTheFirst) {
  struct Case {
    std::vector<std::pair<int64_t, float>> bad; /* element, value */
  };
  for (const Case &c : {Case{{{0, kNan}}}, Case{{{127, kInf}}}, Case{{{128, -kInf}, {129, kNan}}},
                        Case{{{20000, kInf}, {32766, -kNan}, {40, -kInf}}}}) {
    std::vector<Array> arrays;
    for (const int64_t n : {300, 32767, 2})
      arrays.emplace_back(std::get<0>(GetParam()), n, std::get<1>(GetParam())).Fill(static_cast<uint32_t>(n));
    for (auto [i, value] : c.bad)
      arrays[1].Set(i, value);
    if (c.bad.size() == 3) arrays[2].Set(1, kNan);
    ExpectSameStats(arrays);
  }
}
INSTANTIATE_TEST_SUITE_P(Dtypes, EveryPlain,
                         testing::Combine(testing::ValuesIn(kPlain), testing::Values(0, 1, 2, 4, 8)),
                         [](const auto &info) {
                           return DtypeName(std::get<0>(info.param)) + "_from_" +
                                  std::to_string(std::get<1>(info.param));
                         });

TEST(GradStats, ExtremesAreExact) {
  const float tiny = std::numeric_limits<float>::denorm_min(), huge = std::numeric_limits<float>::max();
  for (const std::vector<float> &values : std::vector<std::vector<float>>{{},
                                                                          {0.0f, -0.0f},
                                                                          {3.0f, -4.0f},
                                                                          {tiny},
                                                                          {tiny, tiny, tiny, tiny},
                                                                          {huge, huge, huge, huge},
                                                                          {huge, tiny},
                                                                          std::vector<float>(5000, huge),
                                                                          std::vector<float>(5000, tiny)}) {
    std::vector<Array> arrays;
    arrays.emplace_back(TX_F32, values);
    ExpectSameStats(arrays);
  }
}

// Sums are collected in windows of limbs, which move: up, down, back and forth, and past zeros and non-finite blocks.
TEST_P(EveryPlain, BlocksOfAnySizeBesideEachOther) {
  const float sizes[] = {0.0f, 1e-7f, 1.0f, 3e4f}, far[] = {0.0f, 1e-37f, 1e-18f, 1e-9f, 1.0f, 1e15f, 1e30f};
  const bool narrow = std::get<0>(GetParam()) == TX_F16;
  for (uint32_t seed = 0; seed < 4; seed++) {
    std::mt19937 random(seed);
    std::vector<Array> arrays;
    for (const int64_t n : {128, 1024, 5000, 70000}) {
      Array &array = arrays.emplace_back(std::get<0>(GetParam()), n, std::get<1>(GetParam()));
      const uint32_t run = seed ? 1u << (3 * seed) : 1u; /* number of consecutive blocks of similar values */
      float size = 0;
      for (int64_t i = 0; i < n; i++) {
        if (i % (128 * run) == 0) size = narrow ? sizes[random() % 4] : far[random() % 7];
        array.Set(i, size * (1.0f + static_cast<float>(random() % 64) / 64.0f));
      }
      if (seed == 3) array.Set(n / 2, kInf);
    }
    ExpectSameStats(arrays);
  }
}

// Carries left by an all-reduce are propagated, whether or not there is something to add.
TEST(GradStats, LimbsAreCarriedAsOnTheCpu) {
  std::vector<Array> arrays;
  arrays.emplace_back(TX_BF16, 20000).Fill(1);
  Found before;
  AddOnCpu(Tensors(arrays), &before);
  for (int64_t i = 0; i < TX_STATS_LEN; i++)
    before.stats.SetWord(i, 1000003 * before.stats[i] - 17 * i);
  ExpectSameStats(arrays, before);
  std::vector<Array> nothing;
  ExpectSameStats(nothing, before);
  nothing.emplace_back(TX_F32, 0);
  ExpectSameStats(nothing, before);
}

TEST(GradStats, FirstBadKeepsTheSmallerAndMayBeNone) {
  std::vector<Array> arrays;
  arrays.emplace_back(TX_F32, 0);
  arrays.emplace_back(TX_F32, std::vector<float>{kNan});
  arrays.emplace_back(TX_F32, std::vector<float>{kNan});
  for (const int64_t before : {INT64_MAX, int64_t{7}, int64_t{0}, int64_t{-3}}) {
    Found found;
    found.first_bad.SetWord(0, before);
    ExpectSameStats(arrays, found);
  }
  Arrange();
  AlignedCounts ours = ZeroStats(), theirs = ZeroStats();
  const std::vector<tx_tensor> grads = Tensors(arrays);
  EXPECT_OK([&](tx_error *e) { return tx_cuda_grad_stats(3, grads.data(), ours.tensor(), None(), Call(), e); });
  EXPECT_OK([&](tx_error *e) { return tx_grad_stats(3, grads.data(), theirs.tensor(), None(), nullptr, e); });
  EXPECT_EQ(ours.raw(), theirs.raw());
}

TEST(GradStats, ThousandsOfTensorsTakeAFewLaunches) {
  std::vector<Array> arrays;
  for (int64_t i = 0; i < 2000; i++)
    arrays.emplace_back(kPlain[static_cast<size_t>(i % 3)], i % 300).Fill(static_cast<uint32_t>(i));
  arrays[1900].Set(3, kInf);
  arrays[1950].Set(3, kInf);
  Arrange();
  Found ours, theirs;
  Add(Tensors(arrays), &ours);
  AddOnCpu(Tensors(arrays), &theirs);
  ExpectSame(ours, theirs);
  EXPECT_EQ(theirs.first_bad[0], 1900);
  EXPECT_LE(emulated::world.launches, 3);
}

// Tickets come from a ring buffer. After one round, and for captured launches, which have their own, the last block
// must still be recognized.
TEST(GradStats, TicketsComeBack) {
  std::vector<Array> arrays;
  arrays.emplace_back(TX_BF16, 9 * 1024).Fill(1); /* two blocks */
  Arrange({1, 2});
  Found round;
  for (int i = 0; i < 1022; i++)
    Add({arrays[0].slice(0, 1)}, &round);
  for (const bool capturing : {false, true}) {
    emulated::world.capturing = capturing;
    Found ours, theirs;
    for (int i = 0; i < 5; i++) {
      Add(Tensors(arrays), &ours);
      AddOnCpu(Tensors(arrays), &theirs);
      ExpectSame(ours, theirs);
    }
  }
}

TEST(GradStats, RefusesAsTheCpuDoes) {
  Arrange();
  Array grad(TX_F32, 5), wide(TX_F64, 5);
  AlignedCounts stats = ZeroStats(), first_bad({INT64_MAX}), short_stats({1, 2, 3});
  const tx_tensor good[] = {grad.tensor(), grad.tensor()}, bad_dtype[] = {grad.tensor(), wide.tensor()};
  const tx_tensor negative[] = {{grad.data(), -1, TX_F32, 0}}, inside[] = {{stats.data() + 8, 2, TX_F32, 0}};
  const tx_tensor s = stats.tensor(), f = first_bad.tensor();
  struct Case {
    int64_t n;
    const tx_tensor *grads;
    tx_tensor stats, first_bad;
  };
  for (const Case &c : {Case{2, bad_dtype, s, f},
                        {2, nullptr, s, f},
                        {-1, good, s, f},
                        {1, negative, s, f},
                        {2, good, short_stats.tensor(), f},
                        {2, good, None(), f},
                        {2, good, s, s},
                        {1, inside, s, f}}) {
    ExpectRefusedAlike([&](tx_error *e) { return tx_cuda_grad_stats(c.n, c.grads, c.stats, c.first_bad, Call(), e); },
                       [&](tx_error *e) { return tx_grad_stats(c.n, c.grads, c.stats, c.first_bad, nullptr, e); },
                       {&stats, &first_bad, &short_stats});
  }
}

TEST(GradStats, RefusesCountersThatAtomicsDoNotTake) {
  Arrange();
  Array grad(TX_F32, 5);
  const tx_tensor g = grad.tensor();
  Counts odd_stats(std::vector<int64_t>(TX_STATS_LEN, 0)), odd_first_bad({INT64_MAX});
  AlignedCounts stats = ZeroStats();
  ExpectRefused([&](tx_error *e) { return tx_cuda_grad_stats(1, &g, odd_stats.tensor(), None(), Call(), e); },
                TX_ERROR_INVALID_ARGUMENT, "stats begins at", {&odd_stats});
  ExpectRefused(
      [&](tx_error *e) { return tx_cuda_grad_stats(1, &g, stats.tensor(), odd_first_bad.tensor(), Call(), e); },
      TX_ERROR_INVALID_ARGUMENT, "first_bad begins at", {&stats, &odd_first_bad});
  EXPECT_EQ(emulated::world.launches, 0);
}

// -- norm -------------------------------------------------------------------------------------------------------------

struct Norms {
  Array norm, coef{TX_F32, 1}, found_inf{TX_F32, 1};
  explicit Norms(tx_dtype dtype) : norm(dtype, 1) {}
};

void ExpectSameNorm(Array &stats, tx_tensor grad_scale, double max_norm) {
  for (const tx_dtype dtype : {TX_F32, TX_F64}) {
    Arrange();
    Norms ours(dtype), theirs(dtype);
    EXPECT_OK([&](tx_error *e) {
      return tx_cuda_grad_norm(stats.tensor(), grad_scale, max_norm, ours.norm.tensor(), ours.coef.tensor(),
                               ours.found_inf.tensor(), Call(), e);
    });
    EXPECT_OK([&](tx_error *e) {
      return tx_grad_norm(stats.tensor(), grad_scale, max_norm, theirs.norm.tensor(), theirs.coef.tensor(),
                          theirs.found_inf.tensor(), e);
    });
    EXPECT_EQ(ours.norm.raw(), theirs.norm.raw());
    EXPECT_EQ(ours.coef.raw(), theirs.coef.raw());
    EXPECT_EQ(ours.found_inf.raw(), theirs.found_inf.raw());
    EXPECT_EQ(emulated::world.launches, 1);
  }
}

TEST(GradNorm, G2_ClipsAndFindsInf) {
  for (const std::vector<float> &values : std::vector<std::vector<float>>{
           {3.0f, 4.0f}, {0.0f}, {}, {3.0f, kInf, 4.0f}, {kNan}, std::vector<float>(4000, 3e38f), {1e-45f}, {1.1f}}) {
    std::vector<Array> arrays;
    arrays.emplace_back(TX_F32, values);
    Found found;
    AddOnCpu(Tensors(arrays), &found);
    for (const double max_norm : {1.0, 6.0, 5.0, 1e-300, static_cast<double>(INFINITY)}) {
      ExpectSameNorm(found.stats, None(), max_norm);
      for (const float scale : {2.0f, 65536.0f, -0.0f, 1e-40f, kNan, kInf}) {
        Array grad_scale(TX_F32, {scale});
        ExpectSameNorm(found.stats, grad_scale.tensor(), max_norm);
      }
    }
  }
}

TEST(GradNorm, TakesLimbsAsAnAllReduceLeavesThem) {
  std::vector<Array> arrays;
  arrays.emplace_back(TX_F32, 5000).Fill(1);
  Found found;
  AddOnCpu(Tensors(arrays), &found);
  for (int64_t i = 0; i < TX_NORM_LIMBS; i++)
    found.stats.SetWord(i, 9 * found.stats[i]);
  ExpectSameNorm(found.stats, None(), 1.0);
}

TEST(GradNorm, EachOutputMayBeNone) {
  Arrange();
  AlignedCounts stats = ZeroStats();
  EXPECT_OK(
      [&](tx_error *e) { return tx_cuda_grad_norm(stats.tensor(), None(), 1.0, None(), None(), None(), Call(), e); });
  Array coef(TX_F32, 1);
  EXPECT_OK([&](tx_error *e) {
    return tx_cuda_grad_norm(stats.tensor(), None(), 1.0, None(), coef.tensor(), None(), Call(), e);
  });
  EXPECT_EQ(coef.raw(), Array(TX_F32, {1.0f}).raw());
}

TEST(GradNorm, RefusesAsTheCpuDoes) {
  Arrange();
  AlignedCounts stats = ZeroStats();
  Array scale(TX_F32, {2.0f}), norm(TX_F64, 1), coef(TX_F32, 1), found_inf(TX_F32, 1), two(TX_F32, 2), half(TX_F16, 1);
  const tx_tensor s = stats.tensor(), g = scale.tensor(), n = norm.tensor(), c = coef.tensor(), f = found_inf.tensor();
  struct Case {
    tx_tensor stats, scale;
    double max_norm;
    tx_tensor norm, coef, found_inf;
  };
  for (const Case &k : {Case{s, g, 0.0, n, c, f},
                        {s, g, kNan, n, c, f},
                        {two.tensor(), g, 1.0, n, c, f},
                        {s, half.tensor(), 1.0, n, c, f},
                        {s, g, 1.0, half.tensor(), c, f},
                        {s, g, 1.0, n, two.tensor(), f},
                        {s, g, 1.0, n, c, c},
                        {s, g, 1.0, n, c, g}}) {
    ExpectRefusedAlike(
        [&](tx_error *e) {
          return tx_cuda_grad_norm(k.stats, k.scale, k.max_norm, k.norm, k.coef, k.found_inf, Call(), e);
        },
        [&](tx_error *e) { return tx_grad_norm(k.stats, k.scale, k.max_norm, k.norm, k.coef, k.found_inf, e); },
        {&norm, &coef, &found_inf, &scale});
  }
}

}  // namespace
