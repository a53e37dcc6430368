// csrc/core/muon_memory: memory for the products of Muon's matrices, and for matrices in flight during a step.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "csrc/torch_ext_advanced.h"
#include "tests/core/memory_question.h"

namespace {

// Two parameters of 6 x 100 and 8 x 50 in two buckets over two ranks. The second consists of two matrices.
struct Matrices {
  const int64_t shapes[2][2] = {{6, 100}, {8, 50}};
  std::vector<tx_muon_matrix> matrices = {{0, 0, 6, 100, 0, TX_BF16, TX_F32, 0},
                                          {1, 0, 4, 50, 1, TX_BF16, TX_F32, 0},
                                          {1, 200, 4, 50, 1, TX_BF16, TX_F32, 0}};
  std::vector<int64_t> room;
  int64_t threads = 1;
  int64_t start_of_last = -1; /* overrides the place that tx_layout_plan gave it */
  Case c = {"", {Param(600), Param(400)}, State(TX_BF16, TX_NONE, TX_NONE), 2, 100, TX_NO_SHARD, {}, {Unit(1000)}};

  tx_status Plan(tx_strategy strategy, int64_t world, tx_memory *memory, tx_error *error) {
    c.strategy = strategy;
    c.world = world;
    for (size_t i = 0; i < 2; i++) {
      c.params[i].shape = shapes[i];
      c.params[i].ndim = 2;
    }
    Question question(c);
    question.args.n_matrices = static_cast<int64_t>(matrices.size());
    question.args.matrices = matrices.data();
    question.args.threads = threads;
    if (start_of_last != -1) question.places[1].start = start_of_last;
    room.resize(static_cast<size_t>(tx_memory_workspace_bytes(&question.args) / 8));
    question.args.workspace = room.data();
    return tx_memory_plan(&question.args, memory, error);
  }
};

TEST(MemoryOfMatrices, PartByPart) {
  Matrices m;
  tx_memory memory;
  tx_error error;
  // Copied, because the exchange's dtype differs from the products'.
  const int64_t products = 2 * 600 * 4 + 4 * 6 * 6 * 4;
  ASSERT_EQ(m.Plan(TX_NO_SHARD, 1, &memory, &error), TX_OK) << error.message;
  EXPECT_EQ(memory.moments, 1000 * 2);
  EXPECT_EQ(memory.products, products + 600 * 2);
  EXPECT_EQ(memory.stepping, 0);
  ASSERT_EQ(m.Plan(TX_NO_SHARD, 2, &memory, &error), TX_OK) << error.message;
  EXPECT_EQ(memory.products, products);
  EXPECT_EQ(memory.stepping, 1000 * 2);
  EXPECT_EQ(memory.total, memory.params + memory.grads + memory.moments + memory.steps + products);
  // Rows 0 to 2 and 3 to 5; 0 to 3 and 4 to 7.
  ASSERT_EQ(m.Plan(TX_OPTIM_GRADS_PARAMS, 2, &memory, &error), TX_OK) << error.message;
  const tx_muon_run runs[] = {{0, 300}, {300, 600}, {0, 200}, {200, 400}};
  tx_muon_exchange_args args = TX_MUON_EXCHANGE_ARGS_INIT;
  args.n = 3;
  args.matrices = m.matrices.data();
  args.n_params = 2;
  args.runs = runs;
  args.world = 2;
  std::vector<int64_t> room(static_cast<size_t>(tx_muon_exchange_bytes(&args) / 8));
  int64_t most = 0;
  for (args.rank = 0; args.rank < 2; args.rank++)
    most = std::max(most, tx_muon_exchange_peak(&args, room.data()));
  EXPECT_EQ(memory.stepping, most);
  EXPECT_GE(most, 2 * (500 + 600 + 500));
  ASSERT_EQ(m.Plan(TX_OPTIM, 2, &memory, &error), TX_OK) << error.message;
  EXPECT_GT(memory.stepping, 0);
  EXPECT_EQ(memory.peak, memory.total + std::max(memory.transient, memory.stepping));
}

// In bf16 two threads process two matrices at a time, if the matrices are not sharded.
TEST(MemoryOfMatrices, OfLanes) {
  Matrices m;
  for (tx_muon_matrix &one : m.matrices)
    one.product_dtype = TX_BF16;
  m.matrices[2].begin = 192;  // starts at a cache line
  m.matrices[1].columns = m.matrices[2].columns = 48;
  tx_memory memory;
  tx_error error;
  const int64_t products = 600 * 2 + 4 * 6 * 6 * 2;
  ASSERT_EQ(m.Plan(TX_NO_SHARD, 1, &memory, &error), TX_OK) << error.message;
  EXPECT_EQ(memory.products, products + 600 * 2);
  m.threads = 2;
  ASSERT_EQ(m.Plan(TX_NO_SHARD, 1, &memory, &error), TX_OK) << error.message;
  EXPECT_EQ(memory.products, 2 * products + 3 * 1216);  // of three matrices, aligned to cache lines
  m.threads = 5;                                        // as with one thread: each matrix gets all threads
  ASSERT_EQ(m.Plan(TX_NO_SHARD, 1, &memory, &error), TX_OK) << error.message;
  EXPECT_EQ(memory.products, products + 600 * 2);
  m.threads = 3;
  ASSERT_EQ(m.Plan(TX_NO_SHARD, 2, &memory, &error), TX_OK) << error.message;
  EXPECT_EQ(memory.products, 3 * products);
  m.threads = -1;
  EXPECT_EQ(m.Plan(TX_NO_SHARD, 1, &memory, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error.message).find("threads is -1"), std::string::npos) << error.message;
}

// A GPU multiplies as many at a time as fit into a stack, if the matrices are not sharded.
TEST(MemoryOfMatrices, OfStacks) {
  Matrices m;
  m.threads = 0;
  for (tx_muon_matrix &one : m.matrices)
    one.product_dtype = TX_BF16;
  tx_memory memory;
  tx_error error;
  // Copied, because one does not begin at a cache line.
  ASSERT_EQ(m.Plan(TX_OPTIM, 2, &memory, &error), TX_OK) << error.message;
  EXPECT_EQ(memory.products, 2 * (2 * 600 + 4 * 6 * 6));
  m.matrices[2].begin = 192;
  m.matrices[1].columns = m.matrices[2].columns = 48;
  const int64_t numel = 600 + 2 * 192, squares = 6 * 6 + 2 * 4 * 4;
  ASSERT_EQ(m.Plan(TX_NO_SHARD, 1, &memory, &error), TX_OK) << error.message;
  EXPECT_EQ(memory.products, 2 * (numel + 4 * squares) + 1216 + 768);  // momentum is aligned to cache lines
  ASSERT_EQ(m.Plan(TX_NO_SHARD, 2, &memory, &error), TX_OK) << error.message;
  EXPECT_EQ(memory.products, 2 * (2 * numel + 4 * squares));  // a stack is copied, where momentum is in other memory
  m.matrices[0].product_dtype = TX_F32;                       // sent in bf16, so it is copied
  ASSERT_EQ(m.Plan(TX_NO_SHARD, 1, &memory, &error), TX_OK) << error.message;
  EXPECT_EQ(memory.products, 4 * (2 * 600 + 4 * 6 * 6) + 1216 + 2 * (2 * 192 + 4 * 2 * 4 * 4) + 768);
}

// More than a stack or a window holds.
TEST(MemoryOfMatrices, OfManyStacks) {
  const int64_t side = 3000, numel = side * side, n = 8;
  const int64_t shape[2] = {side, side};
  std::vector<tx_layout_param> params(n, Param(numel));
  std::vector<tx_muon_matrix> matrices;
  for (int64_t i = 0; i < n; i++) {
    params[static_cast<size_t>(i)].shape = shape;
    params[static_cast<size_t>(i)].ndim = 2;
    matrices.push_back({i, 0, side, side, 0, TX_BF16, TX_BF16, 0});
  }
  Question question({"", params, State(TX_BF16, TX_NONE, TX_NONE), 1, numel, TX_NO_SHARD, {}, {Unit(n * numel)}});
  question.args.n_matrices = n;
  question.args.matrices = matrices.data();
  question.args.threads = 0;
  std::vector<int64_t> room(static_cast<size_t>(tx_memory_workspace_bytes(&question.args) / 8));
  question.args.workspace = room.data();
  tx_memory memory;
  tx_error error;
  ASSERT_EQ(tx_memory_plan(&question.args, &memory, &error), TX_OK) << error.message;
  EXPECT_EQ(memory.products, 2 * (TX_MUON_STACK + 4 * TX_MUON_STACK) + TX_MUON_WINDOW);
}

TEST(MemoryOfMatrices, IllegalOnes) {
  const auto refused = [](auto change) {
    Matrices m;
    tx_memory memory;
    tx_error error = {};
    change(m.matrices);
    EXPECT_EQ(m.Plan(TX_OPTIM_GRADS_PARAMS, 2, &memory, &error), TX_ERROR_INVALID_ARGUMENT);
    return std::string(error.message);
  };
  EXPECT_NE(refused([](auto &m) { m[1].param = 2; }).find("matrices[1]"), std::string::npos);
  EXPECT_NE(refused([](auto &m) { m[0].rows = 7; }).find("7 x 100"), std::string::npos);
  EXPECT_NE(refused([](auto &m) { m[2].wire_dtype = TX_U8; }).find("fp32 or bf16"), std::string::npos);
  EXPECT_NE(refused([](auto &m) { m[0].owner = 2; }).find("of rank 2"), std::string::npos);
  EXPECT_NE(refused([](auto &m) { m[0].columns = INT64_MAX; }).find("matrices[0]"), std::string::npos);
  Matrices m;
  m.threads = INT64_MAX;  // any number of threads is legal
  tx_memory memory;
  EXPECT_EQ(m.Plan(TX_NO_SHARD, 1, &memory, nullptr), TX_OK);
  Question question(m.c);
  question.args.n_matrices = 3;
  question.args.matrices = m.matrices.data();
  tx_error error;
  EXPECT_EQ(tx_memory_plan(&question.args, &memory, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error.message).find("workspace"), std::string::npos) << error.message;
}

// Places other than those of tx_layout_plan are rejected, because they determine how a matrix is sharded.
TEST(MemoryOfMatrices, OfParametersOutsideOfTheirBucket) {
  for (const int64_t start : {INT64_MIN, int64_t{-128}, int64_t{1} << 40, INT64_MAX}) {
    Matrices m;
    m.start_of_last = start;
    tx_memory memory;
    tx_error error = {};
    EXPECT_EQ(m.Plan(TX_OPTIM, 2, &memory, &error), TX_ERROR_INVALID_ARGUMENT) << start;
    EXPECT_NE(std::string(error.message).find("matrices[1]"), std::string::npos) << error.message;
  }
}

}  // namespace
