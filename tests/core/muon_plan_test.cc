// What Muon derives from shapes alone: the matrix products, their cost and memory, and the rank that computes them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "csrc/torch_ext.h"
#include "csrc/torch_ext_advanced.h"
#include "tests/core/expect_refused.h"

namespace {

TEST(MuonProducts, AreCountedWhereThereIsRoom) {
  const tx_muon_iteration iteration = {700, 900, 5, 3, 0, 3.4, -4.7, 2.0, TX_MUON_GRAM, 0};
  int32_t found = -1, last = -1;
  const int64_t n = tx_muon_products(&iteration, nullptr, 0, &found, &last);
  ASSERT_GT(n, 0);
  EXPECT_EQ(found, TX_MUON_X);  // after two rounds the result is in X again
  EXPECT_GE(last, TX_MUON_SQUARES);
  std::vector<tx_muon_product> products(static_cast<size_t>(n) + 1);
  products.back().kind = 77;
  EXPECT_EQ(tx_muon_products(&iteration, products.data(), n, &found, &last), n);
  EXPECT_EQ(products.back().kind, 77);
  double operations = 0;
  for (int64_t i = 0; i < n; i++) {
    const tx_muon_product &p = products[static_cast<size_t>(i)];
    if (p.kind != TX_MUON_ADD_PRODUCT) continue;
    const bool of_x = p.left < TX_MUON_SQUARES && p.right < TX_MUON_SQUARES;
    operations += 2.0 * (of_x ? 900 : 700) * static_cast<double>(p.rows) * static_cast<double>(p.columns);
  }
  EXPECT_EQ(operations, tx_muon_operations(700, 900, 5, TX_MUON_GRAM, 3, 0));
  tx_muon_iteration illegal = iteration;
  illegal.steps = 0;
  EXPECT_EQ(tx_muon_products(&illegal, products.data(), n, &found, &last), 0);
  EXPECT_EQ(tx_muon_products(&iteration, nullptr, 1, &found, &last), 0);
}

TEST(MuonProducts, OfBf16HaveAThreadEach) {
  EXPECT_EQ(tx_muon_lanes(768, 3072, TX_BF16, 2), 2);
  EXPECT_EQ(tx_muon_lanes(768, 3072, TX_BF16, 1), 0);
  EXPECT_EQ(tx_muon_lanes(768, 3072, TX_F32, 2), 0);
  EXPECT_EQ(tx_muon_lanes(4096, 2048, TX_BF16, 4), 4);
  EXPECT_EQ(tx_muon_lanes(4096, 2049, TX_BF16, 4), 0);
  EXPECT_EQ(tx_muon_lanes(768, 768, TX_BF16, 64), 0);
}

TEST(MuonProducts, OfAGpuAreStacks) {
  EXPECT_EQ(tx_muon_stack(768, 768), 28);
  EXPECT_EQ(tx_muon_stack(3072, 768), 7);
  EXPECT_EQ(tx_muon_stack(1, 1), TX_MUON_STACK);
  EXPECT_EQ(tx_muon_stack(4096, 4096), 1);
  EXPECT_EQ(tx_muon_stack(4096, 4097), 1);
  EXPECT_EQ(tx_muon_stack(INT64_MAX, INT64_MAX), 1);
  EXPECT_EQ(tx_muon_stack(0, 5), 0);
  EXPECT_EQ(tx_muon_stack(5, -1), 0);
}

// In units of r^3, r being the shorter side: shapes of 4:1, 3:1 and squares; five steps.
TEST(Decisions, OperationsOfBothIterations) {
  const double unit = 64.0 * 64 * 64;
  const auto operations = [](int64_t rows, int64_t columns, int64_t steps, int32_t ns, int64_t restart) {
    return tx_muon_operations(rows, columns, steps, ns, restart, 0);
  };
  EXPECT_EQ(operations(256, 64, 5, TX_MUON_STANDARD, 0), 90 * unit);
  EXPECT_EQ(operations(64, 256, 5, TX_MUON_GRAM, 0), 50 * unit);
  EXPECT_EQ(operations(192, 64, 5, TX_MUON_STANDARD, 0), 70 * unit);
  EXPECT_EQ(operations(64, 192, 5, TX_MUON_GRAM, 0), 46 * unit);
  EXPECT_EQ(operations(64, 64, 5, TX_MUON_AUTO, 0), 30 * unit);
  EXPECT_EQ(operations(64, 256, 5, TX_MUON_AUTO, 0), 50 * unit);
  EXPECT_EQ(operations(64, 256, 5, TX_MUON_GRAM, 2), (4 * 8 + 2 * (5 + 2 * 3 + 3)) * unit);
  EXPECT_EQ(operations(64, 64, 0, TX_MUON_GRAM, 0), 0.0);
}

// A symmetric product costs 3/4 of a full one in two panels, 7/12 in six.
TEST(Decisions, OperationsOfPanels) {
  const double unit = 768.0 * 768 * 768;
  for (const auto &[panel, share] : {std::pair{768, 1.0}, std::pair{384, 3.0 / 4}, std::pair{0, 7.0 / 12}}) {
    const auto operations = [&](int64_t rows, int64_t columns, int32_t ns) {
      return tx_muon_operations(rows, columns, 5, ns, 0, panel);
    };
    EXPECT_DOUBLE_EQ(operations(768, 768, TX_MUON_STANDARD), 5 * (2 * share + 2 * share + 2) * unit);
    EXPECT_DOUBLE_EQ(operations(768, 3072, TX_MUON_STANDARD), 5 * (8 * share + 2 * share + 8) * unit);
    EXPECT_DOUBLE_EQ(operations(3072, 768, TX_MUON_GRAM), (8 + 8 * share + 2 * 17 * share) * unit);
  }
}

TEST(Decisions, Panels) {
  struct {
    int64_t n;
    int32_t dtype;
    int64_t threads;
    int32_t tiles;
    int64_t panel;
  } const rows[] = {
      {0, TX_F32, 1, 0, 0},        {255, TX_BF16, 1, 0, 255},   {256, TX_BF16, 1, 0, 128},  {768, TX_F32, 1, 1, 128},
      {639, TX_BF16, 1, 1, 639},   {768, TX_BF16, 1, 1, 384},   {1024, TX_BF16, 1, 1, 384}, {2048, TX_BF16, 1, 1, 384},
      {1153, TX_BF16, 1, 1, 320},  {639, TX_F32, 2, 0, 639},    {640, TX_F32, 2, 0, 320},   {700, TX_BF16, 8, 1, 384},
      {4097, TX_BF16, 8, 0, 2112}, {100000, TX_F32, 1, 0, 128},
  };
  for (const auto &row : rows) {
    EXPECT_EQ(tx_muon_panel(row.n, row.dtype, row.threads, row.tiles), row.panel) << row.n << ' ' << row.threads;
  }
}

// For every possible panel size, the parts that are multiplied and those that are mirrored cover the square.
TEST(Decisions, PanelsCoverSquares) {
  for (int64_t n : {1, 63, 255, 256, 640, 641, 700, 4097}) {
    for (int64_t threads : {1, 2}) {
      for (int32_t tiles : {0, 1}) {
        const int64_t panel = tx_muon_panel(n, TX_BF16, threads, tiles);
        ASSERT_GE(panel, 1) << n;
        EXPECT_TRUE(panel == n || panel % 64 == 0) << n;
        double whole = 0;
        for (int64_t column = 0; column < n; column += panel)
          whole += static_cast<double>(std::min(panel, n - column) * (n - column));
        const double squared = static_cast<double>(n) * static_cast<double>(n);
        EXPECT_NEAR(tx_muon_operations(n, n, 1, TX_MUON_STANDARD, 0, panel) / (2 * squared * static_cast<double>(n)),
                    1 + 2 * whole / squared, 1e-12)
            << n;
      }
    }
  }
}

// Shapes of well-known models: number of layers, and the matrices of each layer.
struct Model {
  const char *name;
  int64_t layers;
  std::vector<std::pair<int64_t, int64_t>> matrices;
};

const Model kModels[] = {
    {"GPT-2 XL", 48, {{4800, 1600}, {1600, 1600}, {6400, 1600}, {1600, 6400}}},
    {"Qwen3 8B",
     36,
     {{4096, 4096}, {1024, 4096}, {1024, 4096}, {4096, 4096}, {12288, 4096}, {12288, 4096}, {4096, 12288}}},
    {"DeepSeek V2 Lite", 26,
     [] {
       std::vector<std::pair<int64_t, int64_t>> m = {{3072, 2048}, {576, 2048}, {4096, 512}, {2048, 2048}};
       for (int expert = 0; expert < 66; expert++)
         for (std::pair<int64_t, int64_t> shape : {std::pair{1408, 2048}, std::pair{1408, 2048}, std::pair{2048, 1408}})
           m.push_back(shape);
       return m;
     }()},
};

std::vector<double> SizesOf(const Model &model) {
  std::vector<double> sizes;
  for (int64_t layer = 0; layer < model.layers; layer++)
    for (const auto &[rows, columns] : model.matrices)
      sizes.push_back(tx_muon_operations(rows, columns, 5, TX_MUON_AUTO, 0, 0));
  return sizes;
}

tx_status Plan(const std::vector<double> &sizes, int64_t ranks, std::vector<int32_t> *owners, int64_t *fingerprint,
               tx_error *error = nullptr) {
  const auto n = static_cast<int64_t>(sizes.size());
  std::vector<int64_t> room(static_cast<size_t>(std::max(int64_t{0}, tx_plan_owners_bytes(n, ranks)) / 8 + 1));
  owners->assign(sizes.size(), -1);
  return tx_plan_owners(n, sizes.data(), ranks, room.data(), owners->data(), fingerprint, error);
}

double LargestLoad(const std::vector<double> &sizes, const std::vector<int32_t> &owners, int64_t ranks) {
  std::vector<double> loads(static_cast<size_t>(ranks));
  for (size_t i = 0; i < sizes.size(); i++)
    loads.at(static_cast<size_t>(owners[i])) += sizes[i];
  return *std::max_element(loads.begin(), loads.end());
}

// A lower bound on the number of ranks if no rank may have more than `most`: Martello and Toth (1990). Pieces above
// most - k cannot share a rank with a piece of k or more; pieces above most / 2 cannot share a rank with each other.
int64_t RanksNeeded(const std::vector<double> &sizes, double most) {
  int64_t needed = 0;
  std::vector<double> limits = sizes;
  std::sort(limits.begin(), limits.end());
  limits.erase(std::unique(limits.begin(), limits.end()), limits.end());
  for (double k : limits) {
    if (k > most / 2) break;
    int64_t alone = 0, halves = 0;
    double room = 0.0, rest = 0.0;
    for (double size : sizes) {
      if (size > most - k) {
        alone++;
      } else if (size > most / 2) {
        halves++;
        room += most - size;
      } else if (size >= k) {
        rest += size;
      }
    }
    const double over = std::ceil((rest - room) / most - 1e-9);
    needed = std::max(needed, alone + halves + std::max<int64_t>(0, static_cast<int64_t>(over)));
  }
  return needed;
}

// A lower bound on the largest load of any plan.
double LeastMost(const std::vector<double> &sizes, int64_t ranks, double known) {
  double total = 0.0, low = 0.0, high = known;
  for (double size : sizes) {
    total += size;
    low = std::max(low, size);
  }
  low = std::max(low, total / static_cast<double>(ranks));
  for (int i = 0; i < 20 && high > low * (1 + 1e-6); i++) {
    const double middle = low + (high - low) / 2;
    (RanksNeeded(sizes, middle) > ranks ? low : high) = middle;
  }
  return low;
}

// For powers of two up to 128 ranks the plan is close to the lower bound, which is known to be too low where ranks have
// two or three pieces. For any number of ranks it is no worse than giving each piece to the least loaded rank.
TEST(Owners, AreBalancedOnRealLayouts) {
  for (const Model &model : kModels) {
    const std::vector<double> sizes = SizesOf(model);
    std::vector<double> descending = sizes;
    std::sort(descending.rbegin(), descending.rend());
    double total = 0.0;
    int tried = 0;
    for (double size : sizes)
      total += size;
    for (int64_t ranks = 1; ranks <= 128; ranks++) {
      if (sizes.size() > 1000 && ranks % 16 && ranks > 4) continue;
      std::vector<int32_t> owners, again;
      int64_t fingerprint = 0, other = 0;
      ASSERT_EQ(Plan(sizes, ranks, &owners, &fingerprint), TX_OK);
      ASSERT_EQ(Plan(sizes, ranks, &again, &other), TX_OK);
      EXPECT_EQ(owners, again);
      EXPECT_EQ(fingerprint, other);
      const double most = LargestLoad(sizes, owners, ranks);
      std::vector<double> loads(static_cast<size_t>(ranks));
      for (double size : descending)
        *std::min_element(loads.begin(), loads.end()) += size;
      EXPECT_LE(most, *std::max_element(loads.begin(), loads.end()) * (1 + 1e-12)) << model.name << " over " << ranks;
      if (descending[0] * 8 * static_cast<double>(ranks) <= total) {
        EXPECT_LE(most / (total / static_cast<double>(ranks)), 1.10) << model.name << " over " << ranks;
        tried++;
      }
      if (ranks & (ranks - 1)) continue;
      EXPECT_LE(most, 1.09 * LeastMost(sizes, ranks, most)) << model.name << " over " << ranks;
    }
    EXPECT_GT(tried, 0) << model.name;
  }
}

// Operations for whole products: five steps of the iteration that takes fewer.
std::vector<double> WholeSizesOf(const Model &model) {
  std::vector<double> sizes;
  for (int64_t layer = 0; layer < model.layers; layer++)
    for (const auto &[rows, columns] : model.matrices) {
      const auto n = static_cast<double>(std::min(rows, columns)), m = static_cast<double>(std::max(rows, columns));
      sizes.push_back(n * n * std::min(10 * n + 20 * m, 34 * n + 4 * m));
    }
  return sizes;
}

// Sizes for which the best possible plan is known: two large pieces and a small one do not fit.
TEST(Owners, TakeTheBetterPlanWhereARankHasFewPieces) {
  const struct {
    size_t model;
    int64_t ranks;
    double most; /* divided by the mean load */
  } known[] = {{0, 64, 1.046}, {0, 88, 1.042}, {0, 128, 1.394}, {1, 40, 1.025}, {1, 80, 1.029}, {1, 128, 1.355}};
  for (const auto &k : known) {
    const std::vector<double> sizes = WholeSizesOf(kModels[k.model]);
    double total = 0.0;
    for (double size : sizes)
      total += size;
    std::vector<int32_t> owners;
    ASSERT_EQ(Plan(sizes, k.ranks, &owners, nullptr), TX_OK);
    EXPECT_LE(LargestLoad(sizes, owners, k.ranks) / (total / static_cast<double>(k.ranks)), k.most) << k.ranks;
  }
}

TEST(Owners, TakeAnyNumberOfPieces) {
  std::mt19937 random(3);
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  for (int64_t n : {0, 1, 2, 3, 7, 100})
    for (int64_t ranks : {1, 2, 5, 200}) {
      std::vector<double> sizes(static_cast<size_t>(n));
      for (double &size : sizes)
        size = uniform(random) < 0.2 ? 0.0 : uniform(random);
      std::vector<int32_t> owners;
      ASSERT_EQ(Plan(sizes, ranks, &owners, nullptr), TX_OK);
      for (int32_t owner : owners)
        EXPECT_TRUE(owner >= 0 && owner < ranks) << owner;
    }
}

TEST(Owners, FingerprintTellsPlansApart) {
  const std::vector<double> sizes = {5, 4, 3, 3};
  std::vector<int32_t> owners;
  int64_t a, b, c;
  ASSERT_EQ(Plan(sizes, 2, &owners, &a), TX_OK);
  EXPECT_EQ(owners, (std::vector<int32_t>{0, 1, 1, 0}));
  ASSERT_EQ(Plan(sizes, 3, &owners, &b), TX_OK);
  ASSERT_EQ(Plan({5, 4, 3, 2}, 2, &owners, &c), TX_OK);
  EXPECT_NE(a, b);
  EXPECT_NE(a, c);
  tx_error error;
  ExpectRefused(Plan({1, -1}, 2, &owners, nullptr, &error), TX_ERROR_ILLEGAL_VALUE, error, "sizes[1]");
  ExpectRefused(Plan(sizes, 0, &owners, nullptr, &error), TX_ERROR_INVALID_ARGUMENT, error, "0 ranks");
  EXPECT_EQ(tx_plan_owners_bytes(-1, 2), 0);
  EXPECT_EQ(tx_plan_owners_bytes(INT64_MAX, 2), 0);
  int64_t room[32];
  ExpectRefused(tx_plan_owners(4, sizes.data(), 2, nullptr, owners.data(), nullptr, &error), TX_ERROR_INVALID_ARGUMENT,
                error, "workspace");
  ExpectRefused(tx_plan_owners(4, sizes.data(), 2, reinterpret_cast<char *>(room) + 4, owners.data(), nullptr, &error),
                TX_ERROR_INVALID_ARGUMENT, error, "workspace");
}

TEST(Decisions, LearningRateOfAShape) {
  EXPECT_EQ(tx_muon_lr_ratio(4, 1, 0), 2.0);
  EXPECT_EQ(tx_muon_lr_ratio(1, 4, 0), 1.0);
  EXPECT_EQ(tx_muon_lr_ratio(1, 4, 1), 0.4);
  EXPECT_EQ(tx_muon_lr_ratio(100, 4, 1), 2.0);
}
}  // namespace
