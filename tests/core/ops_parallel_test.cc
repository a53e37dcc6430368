// tx_parallel_work_run: visits every element exactly once, in pieces that start at block edges, for any tensors and
// number of threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <numeric>
#include <vector>

extern "C" {
#include "csrc/ops/parallel.h"
}
#include "tests/core/flush_mode.h"
#include "tests/core/threads.h"

namespace {

struct Shape {
  const char *name;
  std::vector<int64_t> numels;
};

const std::vector<Shape> kShapes = {
    {"nothing", {}},
    {"no_elements", {0, 0, 0}},
    {"one_element", {1}},
    {"block_edges", {127, 128, 129}},
    {"one_unit", {TX_UNIT}},
    {"just_over_a_unit", {TX_UNIT + 1}},
    {"just_under_a_unit", {TX_UNIT - 1, 1}},
    {"large_between_small", {3, 0, 5 * TX_UNIT + 77, 0, 1}},
    {"ends_with_none", {200, 0}},
    {"thousand_tiny", std::vector<int64_t>(1000, 64)},
    {"longer_units", {70 * TX_UNIT + 5, 1, 3000, 150 * TX_UNIT}},
    {"odd_mix", {1000, 16383, 16385, 1, 0, 40000, 128, 7}},
};

struct Seen {
  std::vector<tx_tensor> tensors;
  std::vector<std::unique_ptr<std::atomic<int>[]>> visits;
  std::atomic<int> bad_begin{0}, bad_count{0}, dirty_local{0}, pieces{0}, bad_mode{0};
  int64_t merged = 0, merges = 0, alignment = TX_BLOCK;

  explicit Seen(const std::vector<int64_t> &numels) {
    for (int64_t numel : numels) {
      tensors.push_back({nullptr, numel, TX_F32, 0});
      visits.emplace_back(new std::atomic<int>[static_cast<size_t>(numel)]());
    }
  }
};

struct Local {
  int64_t elements;
  int64_t magic; /* 0 before the task's first piece */
};

void Piece(void *ctx, void *local, int64_t tensor, int64_t begin, int64_t count) {
  Seen &seen = *static_cast<Seen *>(ctx);
  Local &mine = *static_cast<Local *>(local);
  const int64_t numel = seen.tensors[tensor].numel;
  if (begin % seen.alignment != 0) seen.bad_begin++;
  if (count <= 0 || begin + count > numel || (count % seen.alignment != 0 && begin + count != numel)) seen.bad_count++;
  if (mine.magic != 0 && mine.magic != 0x5eed) seen.dirty_local++;
  if (mine.magic == 0 && mine.elements != 0) seen.dirty_local++;
  volatile float tiny = 1e-38f; /* half of it is subnormal, and would be 0 in flush mode */
  if (tiny * 0.5f == 0.0f) seen.bad_mode++;
  mine.magic = 0x5eed;
  mine.elements += count;
  for (int64_t i = begin; i < begin + count; i++)
    seen.visits[tensor][i]++;
  seen.pieces++;
}

void Merge(void *ctx, const void *local) {
  Seen &seen = *static_cast<Seen *>(ctx);
  seen.merged += static_cast<const Local *>(local)->elements;
  seen.merges++;
}

class EveryShape : public testing::TestWithParam<std::tuple<Shape, int64_t, int64_t>> {};

TEST_P(EveryShape, VisitsEachElementOnceOnAlignedEdges) {
  const auto &[shape, n_threads, alignment] = GetParam();
  Seen seen(shape.numels);
  seen.alignment = alignment ? alignment : TX_BLOCK;
  Threads threads(n_threads);
  const tx_parallel_work work = {
      static_cast<int64_t>(seen.tensors.size()), seen.tensors.data(), Piece, Merge, sizeof(Local), &seen, alignment};
  ASSERT_EQ(tx_parallel_work_run(&work, n_threads == 1 ? nullptr : threads.parallel(), nullptr), TX_OK);
  int64_t total = 0;
  for (size_t t = 0; t < shape.numels.size(); t++) {
    total += shape.numels[t];
    for (int64_t i = 0; i < shape.numels[t]; i++)
      ASSERT_EQ(seen.visits[t][i], 1) << t << " " << i;
  }
  EXPECT_EQ(seen.bad_begin, 0);
  EXPECT_EQ(seen.bad_count, 0);
  EXPECT_EQ(seen.dirty_local, 0);
  EXPECT_EQ(seen.merged, total);
  EXPECT_LE(seen.merges, n_threads);
}
INSTANTIATE_TEST_SUITE_P(Shapes, EveryShape,
                         testing::Combine(testing::ValuesIn(kShapes), testing::Values(1, 2, 3, 8),
                                          testing::Values(0, 128, 4096)),
                         [](const auto &info) {
                           return std::string(std::get<0>(info.param).name) + "_" +
                                  std::to_string(std::get<1>(info.param)) + "_threads_" +
                                  std::to_string(std::get<2>(info.param));
                         });

// A call uses one parallel region with no more tasks than units of work, so that small calls wake no idle threads.
TEST(Work, RunsOneRegionWithNoMoreTasksThanUnits) {
  struct Regions {
    int64_t calls = 0, tasks = 0;
    static void Run(void *ctx, int64_t n, void (*task)(void *, int64_t), void *arg) {
      static_cast<Regions *>(ctx)->calls++;
      static_cast<Regions *>(ctx)->tasks = n;
      for (int64_t i = 0; i < n; i++)
        task(arg, i);
    }
  };
  for (const auto &[numels, calls, tasks] : std::vector<std::tuple<std::vector<int64_t>, int64_t, int64_t>>{
           {{100, 100}, 0, 0}, {{TX_UNIT + 1}, 1, 2}, {{2 * TX_UNIT, 3 * TX_UNIT}, 1, 4}, {{0}, 0, 0}}) {
    Regions regions;
    const tx_parallel parallel = {sizeof(tx_parallel), 4, &regions, &Regions::Run};
    Seen seen(numels);
    const tx_parallel_work work = {
        static_cast<int64_t>(numels.size()), seen.tensors.data(), Piece, Merge, sizeof(Local), &seen};
    ASSERT_EQ(tx_parallel_work_run(&work, &parallel, nullptr), TX_OK);
    EXPECT_EQ(regions.calls, calls);
    EXPECT_EQ(regions.tasks, tasks);
  }
}

// Units start long and get shorter: none is longer than a quarter of a thread's share of the remaining work, so that no
// thread is left waiting at the end. A single thread has no such limit.
TEST(Work, UnitsAreLongButLeaveWorkForEveryThread) {
  struct Lengths {
    std::vector<int64_t> at;
    static void Piece(void *ctx, void *, int64_t, int64_t begin, int64_t count) {
      static_cast<Lengths *>(ctx)->at[static_cast<size_t>(begin / TX_UNIT)] = count;
    }
  };
  for (int64_t threads : {1, 2, 3, 7}) {
    for (int64_t units : {5, 64, 1000}) {
      const tx_tensor tensor = {nullptr, units * TX_UNIT, TX_F32, 0};
      Lengths lengths = {std::vector<int64_t>(static_cast<size_t>(units))};
      Threads pool(threads);
      const tx_parallel_work work = {1, &tensor, Lengths::Piece, nullptr, 0, &lengths};
      ASSERT_EQ(tx_parallel_work_run(&work, pool.parallel(), nullptr), TX_OK);
      int64_t at = 0;
      for (; at < units * TX_UNIT; at += lengths.at[static_cast<size_t>(at / TX_UNIT)]) {
        const int64_t share = (units * TX_UNIT - at) / (4 * threads);
        const int64_t most = std::max(TX_UNIT, std::min(32 * TX_UNIT, share / TX_UNIT * TX_UNIT));
        const int64_t want = threads == 1 ? std::min(32 * TX_UNIT, units * TX_UNIT - at) : most;
        ASSERT_EQ(lengths.at[static_cast<size_t>(at / TX_UNIT)], want) << at << " of " << units << ", " << threads;
      }
      EXPECT_EQ(at, units * TX_UNIT);
    }
  }
}

TEST(Work, PiecesRunInAKnownFloatingPointMode) {
  Seen seen({TX_UNIT, TX_UNIT, TX_UNIT, TX_UNIT, TX_UNIT});
  const tx_parallel_work work = {5, seen.tensors.data(), Piece, Merge, sizeof(Local), &seen};
  CallInFlushMode([&] { EXPECT_EQ(tx_parallel_work_run(&work, nullptr, nullptr), TX_OK); });
  EXPECT_EQ(seen.bad_mode, 0);
  EXPECT_GE(seen.pieces, 5);
}

}  // namespace
