// torch's threads as a tx_parallel: every task runs once, however torch divides the region; and the error before torch
// is registered.
extern "C" {
#include "csrc/torch/torch_pool.h"
}

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace {

typedef void (*Body)(int64_t begin, int64_t end, void *ctx);

// Ways in which torch may run a region of n tasks.
AOTITorchError InOneRange(int64_t begin, int64_t end, int64_t, Body body, void *ctx) {
  body(begin, end, ctx);
  return 0;
}
AOTITorchError OneByOneBackwards(int64_t begin, int64_t end, int64_t grain, Body body, void *ctx) {
  EXPECT_EQ(grain, 1);
  for (int64_t i = end; i > begin; i--)
    body(i - 1, i, ctx);
  return 0;
}
AOTITorchError Refuses(int64_t, int64_t, int64_t, Body, void *) {
  return 1;
}
AOTITorchError RunsTwoAndFails(int64_t begin, int64_t, int64_t, Body body, void *ctx) {
  body(begin, begin + 2, ctx);
  return 1;
}
AOTITorchError Five(uint32_t *n) {
  *n = 5;
  return 0;
}
AOTITorchError Unknown(uint32_t *) {
  return 1;
}

TEST(TorchPool, EveryTaskRunsOnce) {
  for (const auto region : {InOneRange, OneByOneBackwards, Refuses, RunsTwoAndFails}) {
    tx_torch_abi abi = {};
    abi.torch_parallel_for = region;
    abi.torch_get_num_threads = Five;
    const tx_parallel parallel = tx_torch_pool(&abi);
    EXPECT_EQ(parallel.size, sizeof parallel);
    EXPECT_EQ(parallel.num_threads, 5);
    for (const int64_t n : {2, 3, 17}) {
      std::vector<int> ran(static_cast<size_t>(n));
      parallel.run(
          parallel.ctx, n,
          [](void *arg, int64_t i) { (*static_cast<std::vector<int> *>(arg))[static_cast<size_t>(i)]++; }, &ran);
      EXPECT_EQ(ran, std::vector<int>(static_cast<size_t>(n), 1)) << n;
    }
  }
}

TEST(TorchPool, AThreadIsThereWhereTorchDoesNotSay) {
  tx_torch_abi abi = {};
  abi.torch_get_num_threads = Unknown;
  EXPECT_EQ(tx_torch_pool(&abi).num_threads, 1);
}

TEST(TorchPool, IsNotKnownBeforeTorchIs) {
  tx_parallel parallel = TX_PARALLEL_INIT;
  tx_error error = {};
  EXPECT_EQ(tx_torch_parallel(&parallel, &error), TX_ERROR_BAD_STATE);
  EXPECT_NE(std::string(error.message).find("call tx_torch_register first"), std::string::npos) << error.message;
  EXPECT_EQ(parallel.run, nullptr);
}

}  // namespace
