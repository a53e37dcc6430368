// Copies between the host and an (emulated) device: their order over streams and events, the current device, and
// failures.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "csrc/torch_ext_cuda.h"
#include "tests/core/adamw_call.h"
#include "tests/core/threads.h"

namespace {

using namespace adamw_call;

void *Stream(uintptr_t i) {
  return reinterpret_cast<void *>(0x100 + i);
}

class CopyStreams : public testing::Test {
 protected:
  void SetUp() override { emulated::world = emulated::World(); }
  void TearDown() override { emulated::world = emulated::World(); }
  tx_error error_ = {};
};

// As on a device, copies are made late, and only those that something waits for.
TEST_F(CopyStreams, TheStepHasTheBitsOfTheStepInPlace) {
  for (const Combo &c : {kF32, kBf16, kRemainder, kBlocks}) {
    for (const int64_t n_threads : {1, 3}) {
      emulated::world.late = true;
      std::vector<Param> here, there;
      for (const int64_t n : {70000, 3, 9001, 4096}) {
        here.emplace_back(c, n);
        here.back().Fill(static_cast<uint32_t>(n));
        there.push_back(here.back());
      }
      Call in_place, staged;
      for (size_t i = 0; i < here.size(); i++) {
        in_place.Add(here[i], static_cast<int64_t>(i));
        staged.Add(there[i], static_cast<int64_t>(i));
      }
      const Threads threads(n_threads);
      tx_copy_ops copy_ops = TX_COPY_OPS_INIT;
      ASSERT_EQ(tx_cuda_copies_make(0, Stream(0), Stream(1), 2 * n_threads, &copy_ops, &error_), TX_OK)
          << error_.message;
      tx_staging staging = TX_STAGING_INIT;
      staging.copy_ops = &copy_ops;
      staging.batch = TX_SAMPLED;
      staging.slots = 2;
      staging.bytes = n_threads * 2 * TX_SAMPLED * 8;
      std::vector<uint64_t> memory(static_cast<size_t>(staging.bytes / 8 + 8), 0xb3b3b3b3b3b3b3b3u);
      const auto begin = reinterpret_cast<uintptr_t>(memory.data());
      staging.memory = reinterpret_cast<void *>((begin + 63) / 64 * 64);
      for (int step = 0; step < 2; step++) {
        ASSERT_EQ(tx_adamw(in_place.Args(), nullptr, &error_), TX_OK) << error_.message;
        ASSERT_EQ(tx_adamw_offloaded(staged.Args(), &staging, threads.parallel(), &error_), TX_OK) << error_.message;
        ASSERT_EQ(copy_ops.mark(copy_ops.ctx, 1, 0, &error_), TX_OK);
        ASSERT_EQ(copy_ops.wait(copy_ops.ctx, 1, 0, &error_), TX_OK);
        for (size_t i = 0; i < here.size(); i++)
          ASSERT_EQ(here[i].State(), there[i].State()) << Name(c) << " parameter " << i << " step " << step;
      }
      EXPECT_GT(emulated::world.events, 0);
      EXPECT_EQ(emulated::world.spinning_events, 0) << "ranks share a host's cores";
      tx_cuda_copies_free(&copy_ops);
      EXPECT_EQ(emulated::world.events, 0);
      tx_cuda_copies_free(&copy_ops);
    }
  }
}

TEST_F(CopyStreams, WorkOnTheirDeviceAndPutTheCurrentOneBack) {
  emulated::world.devices = 4;
  ASSERT_EQ(cudaSetDevice(2), cudaSuccess);
  tx_copy_ops copy_ops = TX_COPY_OPS_INIT;
  ASSERT_EQ(tx_cuda_copies_make(3, Stream(0), Stream(1), 1, &copy_ops, &error_), TX_OK) << error_.message;
  char from = 7, to = 0;
  EXPECT_EQ(copy_ops.wait(copy_ops.ctx, 0, 0, &error_), TX_OK) << "nothing is marked yet";
  EXPECT_EQ(copy_ops.follow(copy_ops.ctx, 0, &error_), TX_OK);
  EXPECT_EQ(copy_ops.copy(copy_ops.ctx, 0, &to, &from, 1, &error_), TX_OK);
  EXPECT_EQ(copy_ops.mark(copy_ops.ctx, 0, 0, &error_), TX_OK);
  EXPECT_EQ(copy_ops.mark(copy_ops.ctx, 0, 0, &error_), TX_OK);
  EXPECT_EQ(copy_ops.wait(copy_ops.ctx, 0, 0, &error_), TX_OK);
  EXPECT_EQ(to, 7);
  EXPECT_EQ(emulated::world.current, 2);
  EXPECT_EQ(emulated::world.events, 1) << "a slot has one for each way that it uses";
  tx_cuda_copies_free(&copy_ops);
}

// As on rank 3, from threads of torch's pool and from the thread that collects garbage.
TEST_F(CopyStreams, ThreadsWithoutADeviceMakeNoContextOnAnotherOne) {
  emulated::world.devices = 4;
  ASSERT_EQ(cudaSetDevice(3), cudaSuccess);
  tx_copy_ops copy_ops = TX_COPY_OPS_INIT;
  ASSERT_EQ(tx_cuda_copies_make(3, Stream(0), Stream(1), 3, &copy_ops, &error_), TX_OK) << error_.message;
  char bytes[3] = {1, 2, 3}, to[3] = {};
  const auto each = [&](tx_status (*call)(const tx_copy_ops &copy_ops, int64_t i, char *to, char *from,
                                          tx_error *error)) {
    for (int64_t i = 0; i < 3; i++)
      std::thread([&, i] { EXPECT_EQ(call(copy_ops, i, to + i, bytes + i, &error_), TX_OK) << error_.message; }).join();
  };
  each([](const tx_copy_ops &l, int64_t, char *t, char *f, tx_error *e) { return l.copy(l.ctx, 1, t, f, 1, e); });
  each([](const tx_copy_ops &l, int64_t i, char *, char *, tx_error *e) { return l.mark(l.ctx, 1, i, e); });
  each([](const tx_copy_ops &l, int64_t i, char *, char *, tx_error *e) { return l.follow(l.ctx, i, e); });
  each([](const tx_copy_ops &l, int64_t i, char *, char *, tx_error *e) { return l.wait(l.ctx, 1, i, e); });
  std::thread([&] { tx_cuda_copies_free(&copy_ops); }).join();
  EXPECT_EQ(to[2], 3);
  EXPECT_EQ(emulated::world.events, 0);
  EXPECT_EQ(emulated::world.contexts, 1u << 3);
}

TEST_F(CopyStreams, AnErrorOfTheDeviceIsNamed) {
  tx_copy_ops copy_ops = TX_COPY_OPS_INIT;
  ASSERT_EQ(tx_cuda_copies_make(0, Stream(0), Stream(1), 1, &copy_ops, &error_), TX_OK) << error_.message;
  ASSERT_EQ(copy_ops.mark(copy_ops.ctx, 1, 0, &error_), TX_OK);
  emulated::world.sticky = cudaErrorECCUncorrectable;
  char byte = 0;
  EXPECT_NE(copy_ops.copy(copy_ops.ctx, 1, &byte, &byte, 1, &error_), TX_OK);
  EXPECT_NE(std::string(error_.message).find("an emulated error"), std::string::npos) << error_.message;
  EXPECT_NE(copy_ops.copy(copy_ops.ctx, 0, &byte, &byte, 1, &error_), TX_OK);
  EXPECT_NE(copy_ops.mark(copy_ops.ctx, 1, 0, &error_), TX_OK);
  EXPECT_NE(copy_ops.wait(copy_ops.ctx, 1, 0, &error_), TX_OK);
  EXPECT_NE(copy_ops.follow(copy_ops.ctx, 0, &error_), TX_OK);
  emulated::world.sticky = cudaSuccess;
  tx_cuda_copies_free(&copy_ops);
}

TEST_F(CopyStreams, WhatIsNotLegalIsRefused) {
  tx_copy_ops copy_ops = TX_COPY_OPS_INIT;
  EXPECT_EQ(tx_cuda_copies_make(0, Stream(0), Stream(1), 0, &copy_ops, &error_), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_cuda_copies_make(0, Stream(0), Stream(1), 1, nullptr, &error_), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(tx_cuda_copies_make(7, Stream(0), Stream(1), 1, &copy_ops, &error_), TX_OK) << "there is no such device";
  ASSERT_EQ(tx_cuda_copies_make(0, Stream(0), Stream(1), 2, &copy_ops, &error_), TX_OK) << error_.message;
  for (const int64_t slot : {-1, 2}) {
    EXPECT_EQ(copy_ops.mark(copy_ops.ctx, 0, slot, &error_), TX_ERROR_ILLEGAL_VALUE);
    EXPECT_NE(std::string(error_.message).find("of copy_ops; slots in [0, 2) are legal"), std::string::npos)
        << error_.message;
    EXPECT_EQ(copy_ops.wait(copy_ops.ctx, 1, slot, &error_), TX_ERROR_ILLEGAL_VALUE);
    EXPECT_EQ(copy_ops.follow(copy_ops.ctx, slot, &error_), TX_ERROR_ILLEGAL_VALUE);
  }
  tx_cuda_copies_free(&copy_ops);
}

}  // namespace
