// tx_adamw_offloaded: gives the bits of tx_adamw for any batch size, number of slots and copies; and the errors if a
// copy fails.
#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "csrc/torch_ext_advanced.h"
#include "tests/core/adamw_call.h"
#include "tests/core/flush_mode.h"
#include "tests/core/late_copies.h"
#include "tests/core/threads.h"

namespace {

using namespace adamw_call;

// Parameters, the checksums of their masters, and a step of all of them.
struct Model {
  std::deque<Param> params;
  std::deque<std::vector<uint64_t>> checksums;
  Call call;
  std::vector<tx_tensor> seen;
  int64_t skipped = 0, resynced = 0;

  void Add(const Combo &c, int64_t n, bool watched = true) {
    params.emplace_back(c, n);
    params.back().Fill(static_cast<uint32_t>(17 * params.size()));
    call.Add(params.back(), static_cast<int64_t>(params.size()));
    const int64_t block = c.master == TX_I16 ? TX_CHECKSUM : TX_SAMPLED;
    checksums.emplace_back(watched && c.master ? static_cast<size_t>((n + block - 1) / block) : 0);
    seen.push_back({checksums.back().data(), static_cast<int64_t>(checksums.back().size()), TX_I64, 0});
  }
  const tx_adamw_args *Args() {
    call.Args();
    call.args.checksums = seen.data();
    call.args.on_external_write = TX_EXTERNAL_RESYNC;
    call.args.skipped = {&skipped, 1, TX_I64, 0};
    call.args.resynced = {&resynced, 1, TX_I64, 0};
    return &call.args;
  }
  void Renew() {
    for (size_t i = 0; i < seen.size(); i++) {
      if (seen[i].numel == 0) continue;
      ASSERT_EQ(
          tx_master_checksum(1, &call.params[i], &call.masters[i], &seen[i], TX_CHECKSUM_RENEW, {}, nullptr, nullptr),
          TX_OK);
    }
  }
  void FillGrads(uint32_t seed) {
    for (Param &p : params)
      p.FillGrad(seed++);
  }
  std::vector<std::vector<uint8_t>> State() const {
    std::vector<std::vector<uint8_t>> all;
    for (const Param &p : params)
      for (auto &bytes : p.State())
        all.push_back(bytes);
    for (const auto &w : checksums) {
      const auto *begin = reinterpret_cast<const uint8_t *>(w.data());
      all.emplace_back(begin, begin + 8 * w.size());
    }
    return all;
  }
};

// Sizes around the batch size, small tensors that share a batch, and an empty one.
void AddAll(Model *model, const std::vector<Combo> &combos) {
  int i = 0;
  for (const int64_t n : {3, 4096, 0, 1, 9001, 127, 129, 70000, 4095, 1024, 300}) {
    for (const Combo &c : combos)
      model->Add(c, n, i % 3 != 2);
    i++;
  }
  model->Renew();
}

const std::vector<Combo> kAll = {kF32, kBf16, kRemainder, kBlocks};

// Staging memory of exactly the required size, so that AddressSanitizer finds any access beyond it.
struct Staged {
  tx_staging staging = TX_STAGING_INIT;
  std::unique_ptr<uint8_t[]> memory;

  Staged(int64_t batch, int32_t slots, int64_t threads, tx_copy_ops *copy_ops, int64_t element = 8) {
    staging.batch = batch;
    staging.slots = slots;
    staging.copy_ops = copy_ops;
    staging.bytes = threads * slots * batch * element;
    memory.reset(new uint8_t[static_cast<size_t>(staging.bytes) + 64]);
    std::memset(memory.get(), 0x5a, static_cast<size_t>(staging.bytes) + 64);
    staging.memory = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64) % 64;
  }
};

class EveryWay : public testing::TestWithParam<std::tuple<int64_t, int32_t, int64_t, bool>> {};

TEST_P(EveryWay, EqualsTheStepInPlaceBitForBit) {
  const auto &[batch, slots, n_threads, late] = GetParam();
  Model here, there;
  AddAll(&here, kAll);
  AddAll(&there, kAll);
  const Threads threads(n_threads);
  LateCopies copy_ops;
  const Staged staged(batch, slots, n_threads, late ? copy_ops.copy_ops() : nullptr);
  for (uint32_t step = 0; step < 3; step++) {
    here.FillGrads(100 * step);
    there.FillGrads(100 * step);
    tx_error error = {};
    ASSERT_EQ(tx_adamw(here.Args(), threads.parallel(), &error), TX_OK) << error.message;
    ASSERT_EQ(tx_adamw_offloaded(there.Args(), &staged.staging, threads.parallel(), &error), TX_OK) << error.message;
    copy_ops.End();
    ASSERT_EQ(here.State(), there.State()) << "step " << step;
  }
  EXPECT_EQ(there.resynced, 0);
  for (const auto &[slot, ids] : copy_ops.who) {
    EXPECT_LT(slot, slots * n_threads);
    EXPECT_LE(ids.size(), 3u) << "one thread's in each of three steps";
  }
  EXPECT_LE(copy_ops.most_under_way, 1) << "a slot has a batch at a time";
}
INSTANTIATE_TEST_SUITE_P(Ways, EveryWay,
                         testing::Combine(testing::Values(4096, 16384), testing::Values(1, 2, 3, TX_MAX_SLOTS),
                                          testing::Values(1, 2, 5), testing::Bool()),
                         [](const auto &info) {
                           return "batch_" + std::to_string(std::get<0>(info.param)) + "_slots_" +
                                  std::to_string(std::get<1>(info.param)) + "_threads_" +
                                  std::to_string(std::get<2>(info.param)) +
                                  (std::get<3>(info.param) ? "_late" : "_host");
                         });

TEST(Staged, GradientsComeDownAndWeightsOnlyWhereTheyAreMasters) {
  struct Case {
    Combo combo;
    int64_t down, up;  // bytes per element copied in each direction
  };
  for (const Case &c : {Case{kF32, 8, 4}, {kBf16, 2, 2}, {kRemainder, 4, 2}, {kBlocks, 4, 2}}) {
    Model model;
    model.Add(c.combo, 10000);
    model.Renew();
    LateCopies copy_ops;
    const Staged staged(4096, 2, 1, copy_ops.copy_ops());
    ASSERT_EQ(tx_adamw_offloaded(model.Args(), &staged.staging, nullptr, nullptr), TX_OK);
    EXPECT_EQ(copy_ops.bytes[0], 10000 * c.down) << Name(c.combo);
    EXPECT_EQ(copy_ops.bytes[1], 10000 * c.up) << Name(c.combo);
    EXPECT_EQ(copy_ops.marks[0], 3) << "batches";
  }
}

// A slot has space for exactly the gradients and weights that it stages.
TEST(Staged, GradientsMayBeWiderOrNarrowerThanWeights) {
  for (const Combo &c :
       {Combo{TX_BF16, TX_F32, TX_F32, TX_BF16, TX_BF16}, {TX_F32, TX_NONE, TX_BF16, TX_F32, TX_F32}}) {
    Model here, there;
    for (Model *model : {&here, &there})
      AddAll(model, {c});
    LateCopies copy_ops;
    const Staged staged(8192, 2, 1, copy_ops.copy_ops(), 6);
    ASSERT_EQ(tx_adamw(here.Args(), nullptr, nullptr), TX_OK);
    ASSERT_EQ(tx_adamw_offloaded(there.Args(), &staged.staging, nullptr, nullptr), TX_OK);
    copy_ops.End();
    EXPECT_EQ(here.State(), there.State()) << Name(c);
  }
}

TEST(Staged, StepsInAKnownFloatingPointMode) {
  Model here, there;
  for (Model *model : {&here, &there}) {
    model->Add(kF32, 5000);
    model->params[0].FillGrad(3, 1e-38f);  // moments become subnormal
  }
  const Staged staged(4096, 1, 1, nullptr);
  ASSERT_EQ(tx_adamw(here.Args(), nullptr, nullptr), TX_OK);
  CallInFlushMode([&] { EXPECT_EQ(tx_adamw_offloaded(there.Args(), &staged.staging, nullptr, nullptr), TX_OK); });
  EXPECT_EQ(here.State(), there.State());
}

TEST(Staged, SmallTensorsShareABatch) {
  Model model;
  for (int i = 0; i < 1000; i++)
    model.Add(kF32, 64, false);
  const Staged staged(16384, 2, 1, nullptr);
  for (const bool watched : {true, false}) {  // with checksums, units consist of whole samples
    LateCopies copy_ops;
    model.Args();
    model.call.args.checksums = watched ? model.seen.data() : nullptr;
    tx_staging staging = staged.staging;
    staging.copy_ops = copy_ops.copy_ops();
    ASSERT_EQ(tx_adamw_offloaded(&model.call.args, &staging, nullptr, nullptr), TX_OK);
    EXPECT_EQ(copy_ops.copies[1], 1000);
    EXPECT_EQ(copy_ops.marks[0], watched ? 16 : 8)
        << "a unit of 128 where each has room for a sample, in 96 and 32; or 128";
    copy_ops.End();
  }
}

TEST(Staged, G2_ASkippedStepCopiesNothing) {
  Model model;
  AddAll(&model, kAll);
  const auto before = model.State();
  LateCopies copy_ops;
  const Staged staged(4096, 2, 1, copy_ops.copy_ops());
  float found_inf = 1;
  model.Args();
  model.call.args.found_inf = {&found_inf, 1, TX_F32, 0};
  ASSERT_EQ(tx_adamw_offloaded(&model.call.args, &staged.staging, nullptr, nullptr), TX_OK);
  EXPECT_EQ(copy_ops.copies[0] + copy_ops.copies[1], 0);
  EXPECT_EQ(model.State(), before);
  EXPECT_EQ(model.skipped, 1);
}

// If there are remainders, a write is noticed while the weights are staged. Samples of weights with fp32 masters are
// not checked, only renewed.
TEST(Staged, WritesBesideRemaindersAreNoticed) {
  for (const Combo &c : {kRemainder, kBlocks, kBf16}) {
    Model here, there;
    for (Model *model : {&here, &there}) {
      model->Add(c, 20000);
      model->Renew();
      model->params[0].param.data()[2 * 17001] ^= 1;
    }
    const Staged staged(4096, 1, 1, nullptr);
    const bool remainder = c.master == TX_I16;
    here.Args();
    if (!remainder) here.call.args.on_external_write = TX_EXTERNAL_IGNORE;
    ASSERT_EQ(tx_adamw(&here.call.args, nullptr, nullptr), TX_OK);
    ASSERT_EQ(tx_adamw_offloaded(there.Args(), &staged.staging, nullptr, nullptr), TX_OK);
    EXPECT_EQ(here.State(), there.State()) << Name(c);
    EXPECT_EQ(there.resynced, remainder ? TX_CHECKSUM : 0) << Name(c);
  }
}

TEST(Staged, ACopyThatFailsEndsTheCallWithItsMessage) {
  struct Case {
    const char *name;
    int up;
    int64_t from;
  };
  for (const Case &c : {Case{"copy", 0, 0},
                        {"copy", 0, 9},
                        {"copy", 1, 0},
                        {"copy", 1, 5},
                        {"mark", 0, 0},
                        {"mark", 1, 2},
                        {"wait", 0, 1},
                        {"wait", 1, 1},
                        {"follow", 0, 1}}) {
    for (const int64_t n_threads : {1, 3}) {
      Model model;
      AddAll(&model, kAll);
      const Threads threads(n_threads);
      LateCopies copy_ops;
      copy_ops.fails = c.name;
      copy_ops.fails_up = c.up;
      copy_ops.fails_from = c.from;
      const Staged staged(4096, 2, n_threads, copy_ops.copy_ops());
      tx_error error = {};
      EXPECT_EQ(tx_adamw_offloaded(model.Args(), &staged.staging, threads.parallel(), &error), TX_ERROR_UNAVAILABLE);
      EXPECT_EQ(std::string(error.message), std::string(c.name) + (c.up ? " up" : " down") + " failed");
      copy_ops.End();
      for (Param &p : model.params)
        EXPECT_EQ(p.step.copy(), std::vector<uint8_t>(4)) << "no count has changed";
      EXPECT_EQ(tx_adamw_offloaded(model.Args(), &staged.staging, threads.parallel(), nullptr), TX_ERROR_UNAVAILABLE)
          << "a message is not needed";
      copy_ops.End();
    }
  }
}

TEST(Staged, WhenACopyFailsOtherThreadsStopToo) {
  Model model;
  model.Add(kF32, 1000 * TX_SAMPLED, false);
  const Threads threads(2);
  LateCopies copy_ops;
  copy_ops.fails = "copy";
  copy_ops.fails_for = 1;
  const Staged staged(TX_SAMPLED, 1, 2, copy_ops.copy_ops());
  EXPECT_EQ(tx_adamw_offloaded(model.Args(), &staged.staging, threads.parallel(), nullptr), TX_ERROR_UNAVAILABLE);
  copy_ops.End();
  EXPECT_LT(copy_ops.marks[1], 500) << "of 1000, at most 128 of which went with the thread that failed";
}

struct Refusal {
  const char *name;
  void (*spoil)(Model &model, tx_staging &staging, tx_copy_ops &copy_ops);
  tx_status status;
  const char *says;
};

const Refusal kRefusals[] = {
    {"args", [](Model &m, tx_staging &, tx_copy_ops &) { m.call.grads[1].numel--; }, TX_ERROR_SHAPE, "grads[1]"},
    {"size", [](Model &, tx_staging &s, tx_copy_ops &) { s.size = 8; }, TX_ERROR_INVALID_ARGUMENT, "TX_STAGING_INIT"},
    {"no_batch", [](Model &, tx_staging &s, tx_copy_ops &) { s.batch = 0; }, TX_ERROR_ILLEGAL_VALUE, "batch 0"},
    {"batch", [](Model &, tx_staging &s, tx_copy_ops &) { s.batch = 4097; }, TX_ERROR_ILLEGAL_VALUE, "batch 4097"},
    {"no_slots", [](Model &, tx_staging &s, tx_copy_ops &) { s.slots = 0; }, TX_ERROR_ILLEGAL_VALUE, "slots 0"},
    {"slots", [](Model &, tx_staging &s, tx_copy_ops &) { s.slots = 9; }, TX_ERROR_ILLEGAL_VALUE, "1 to 8"},
    {"bytes", [](Model &, tx_staging &s, tx_copy_ops &) { s.bytes--; }, TX_ERROR_SHAPE, "65536"},
    {"no_memory", [](Model &, tx_staging &s, tx_copy_ops &) { s.memory = nullptr; }, TX_ERROR_SHAPE, "staging.memory"},
    {"address", [](Model &, tx_staging &s, tx_copy_ops &) { s.memory = static_cast<char *>(s.memory) + 8; },
     TX_ERROR_SHAPE, "aligned to 64"},
    {"lanes_size", [](Model &, tx_staging &, tx_copy_ops &l) { l.size = 8; }, TX_ERROR_INVALID_ARGUMENT,
     "TX_COPY_OPS_INIT"},
    {"no_copy", [](Model &, tx_staging &, tx_copy_ops &l) { l.copy = nullptr; }, TX_ERROR_INVALID_ARGUMENT, "all four"},
    {"no_mark", [](Model &, tx_staging &, tx_copy_ops &l) { l.mark = nullptr; }, TX_ERROR_INVALID_ARGUMENT, "all four"},
    {"no_wait", [](Model &, tx_staging &, tx_copy_ops &l) { l.wait = nullptr; }, TX_ERROR_INVALID_ARGUMENT, "all four"},
    {"no_follow", [](Model &, tx_staging &, tx_copy_ops &l) { l.follow = nullptr; }, TX_ERROR_INVALID_ARGUMENT,
     "all four"},
    {"check", [](Model &m, tx_staging &, tx_copy_ops &) { m.call.args.on_external_write = TX_EXTERNAL_CHECK; },
     TX_ERROR_ILLEGAL_VALUE, "0 (ignore) and 1 (resync)"},
};

class StagedRefusal : public testing::TestWithParam<Refusal> {};

TEST_P(StagedRefusal, SaysWhatIsLegalAndChangesNothing) {
  Model model;
  model.Add(kBf16, 5000);
  model.Add(kF32, 5000);
  model.Renew();
  const auto before = model.State();
  LateCopies copy_ops;
  Staged staged(4096, 2, 1, copy_ops.copy_ops());
  model.Args();
  GetParam().spoil(model, staged.staging, *copy_ops.copy_ops());
  tx_error error = {};
  EXPECT_EQ(tx_adamw_offloaded(&model.call.args, &staged.staging, nullptr, &error), GetParam().status);
  EXPECT_NE(std::string(error.message).find(GetParam().says), std::string::npos) << error.message;
  EXPECT_EQ(copy_ops.copies[0], 0);
  EXPECT_EQ(model.State(), before);
}
INSTANTIATE_TEST_SUITE_P(All, StagedRefusal, testing::ValuesIn(kRefusals),
                         [](const auto &info) { return std::string(info.param.name); });

TEST(Staged, NothingToStepNeedsNoMemory) {
  Model model;
  model.Add(kBf16, 0);
  tx_staging staging = TX_STAGING_INIT;
  staging.batch = TX_SAMPLED;
  tx_error error = {};
  EXPECT_EQ(tx_adamw_offloaded(model.Args(), &staging, nullptr, &error), TX_OK) << error.message;
}

}  // namespace
