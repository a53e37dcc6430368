// tx_cuda_adamw as a call: the number of launches, skipped steps, counters, and what it rejects.
#include "tests/cuda/adamw_pair.h"

namespace {

using namespace adamw_pair;

class AdamwCall : public testing::Test {
 protected:
  void SetUp() override { emulated::world = emulated::World(); }
  void TearDown() override { emulated::world = emulated::World(); }
};

// The tensors of GPT-2, each size divided by the width of a layer.
std::vector<int64_t> Gpt2() {
  std::vector<int64_t> numels = {50257, 1024};
  for (int layer = 0; layer < 12; layer++)
    for (const int64_t n : {1, 1, 2304, 3, 768, 1, 1, 1, 3072, 4, 3072, 1})
      numels.push_back(n);
  numels.push_back(1);
  numels.push_back(1);
  return numels;
}

TEST_F(AdamwCall, Gpt2sTensorsAreOneLaunchForEachCombination) {
  const auto numels = Gpt2();
  ASSERT_EQ(numels.size(), 148u);
  for (const Combo &c : {kF32, kBf16, kRemainder, kBlocks}) {
    Pair pair;
    for (const int64_t n : numels)
      pair.Add(c, n);
    emulated::world.launches = 0;
    ASSERT_EQ(pair.Take(Arguments()), TX_OK);
    EXPECT_EQ(emulated::world.launches, 1) << adamw_call::Name(c);
    pair.ExpectEqual();
  }
}

// Detecting external writes, resyncing and stepping together need no workspace and no second launch.
TEST_F(AdamwCall, AStepThatLooksForWritesIsOneLaunchToo) {
  for (const Combo &c : {kBf16, kHalf, kRemainder, kBlocks}) {
    SCOPED_TRACE(adamw_call::Name(c));
    Pair pair;
    for (const int64_t n : Gpt2())
      pair.Add(c, n, 0, true);
    pair.Renew();
    tx_adamw_args args = Arguments();
    args.on_external_write = TX_EXTERNAL_RESYNC;
    for (const size_t written : {0u, 1u, 5u, 2u, 4u, 147u}) {
      if (written > 0)
        for (Side *side : {&pair.ours, &pair.theirs})
          side->params[written].Write(0);
      emulated::world.launches = 0;
      ASSERT_EQ(pair.Take(args), TX_OK);
      EXPECT_EQ(emulated::world.launches, 1);
      pair.ExpectEqual();
    }
    EXPECT_GE(pair.ours.resynced, 5);
  }
}

// Suspects are stored next to a launch's ticket. The ticket is reused, and must not carry suspects over to another
// step.
TEST_F(AdamwCall, SuspectsOfOneStepAreNotThoseOfAnother) {
  emulated::Use(1, 1);
  Pair pair;
  for (const int64_t n : {4097, 40})
    pair.Add(kBf16, n, 0, true);
  pair.Renew();
  tx_adamw_args args = Arguments();
  args.on_external_write = TX_EXTERNAL_RESYNC;
  for (Side *side : {&pair.ours, &pair.theirs})
    for (Watched &w : side->params)
      w.Write(0);
  ASSERT_EQ(pair.Take(args), TX_OK);
  EXPECT_EQ(pair.ours.resynced, 2);
  pair.ExpectEqual();
  // Between the samples, where only a check of all elements would find it.
  pair.ours.params[0].Write(100);
  for (int step = 0; step < 1030; step++)
    ASSERT_EQ(tx_cuda_adamw(Step(pair.ours, args).Args(), &pair.call, nullptr), TX_OK);
  EXPECT_EQ(pair.ours.resynced, 2);
}

TEST_F(AdamwCall, AThousandTensorsOfSeveralCombinationsTakeAFewLaunches) {
  Pair pair;
  for (int64_t i = 0; i < 1000; i++)
    pair.Add(i % 3 == 0 ? kBf16 : i % 3 == 1 ? kBlocks : kF32, i % 23);
  ASSERT_EQ(pair.Take(Arguments()), TX_OK);
  EXPECT_EQ(emulated::world.launches, 6);  // 333 of each, about 270 in a table
  ASSERT_EQ(pair.Take(Arguments()), TX_OK);
  EXPECT_LE(emulated::world.largest_parameters, 32764);
  pair.ExpectEqual();
}

TEST_F(AdamwCall, MoreGroupsThanATableHoldsTakeMoreLaunches) {
  Pair pair;
  for (int i = 0; i < 150; i++)
    pair.Add(kF32, 40);
  std::vector<tx_adamw_group> groups(150, {1e-2, 0.9, 0.999, 1e-8, 0.1, 0, 1});
  for (size_t i = 0; i < groups.size(); i++)
    groups[i].lr = 1e-3 * static_cast<double>(i);
  tx_adamw_args args[2];
  Step ours(pair.ours, Arguments()), theirs(pair.theirs, Arguments());
  args[0] = *ours.Args();
  args[1] = *theirs.Args();
  std::vector<tx_meta> meta;
  for (int64_t i = 0; i < 150; i++)
    meta.push_back({i, 0, 149 - i});
  for (tx_adamw_args &a : args) {
    a.n_groups = 150;
    a.groups = groups.data();
    a.meta = meta.data();
  }
  ASSERT_EQ(tx_cuda_adamw(&args[0], &pair.call, nullptr), TX_OK);
  ASSERT_EQ(tx_adamw(&args[1], nullptr, nullptr), TX_OK);
  EXPECT_EQ(emulated::world.launches, 3);
  pair.ExpectEqual();
}

// G2, G3: a step that must be skipped changes nothing but the count of skipped steps, by one however many launches
// there are.
TEST_F(AdamwCall, G2_G3_SkipsWithoutAByteChangedAndCountsOnce) {
  struct Case {
    const char *name;
    float grad_scale, clip_coef, found_inf;
  };
  const float nan = std::nanf(""), inf = INFINITY;
  for (const Case &c : {Case{"found_inf", 1, 1, 1},
                        {"found_nan", 1, 1, nan},
                        {"clip_nan", 1, nan, 0},
                        {"clip_inf", 1, inf, 0},
                        {"scale_zero", 0, 1, 0},
                        {"scale_nan", nan, 1, 0}}) {
    SCOPED_TRACE(c.name);
    for (const bool empty : {false, true}) {
      Pair pair;
      for (int64_t n : {300, 0, 5000}) {
        if (empty) break;
        pair.Add(kBf16, n, 0, true);
        pair.Add(kBlocks, n, 0, true);
        pair.Add(kF32, n);
      }
      pair.Renew();
      if (!empty) pair.ours.params[0].Write(3);
      if (!empty) pair.theirs.params[0].Write(3);
      const auto before = pair.ours.State();
      float values[3] = {c.grad_scale, c.clip_coef, c.found_inf};
      tx_adamw_args args = Arguments();
      args.grad_scale = {&values[0], 1, TX_F32, 0};
      args.clip_coef = {&values[1], 1, TX_F32, 0};
      args.found_inf = {&values[2], 1, TX_F32, 0};
      args.on_external_write = TX_EXTERNAL_RESYNC;
      ASSERT_EQ(pair.Take(args), TX_OK);
      pair.ExpectEqual();
      EXPECT_TRUE(pair.ours.State() == before);
      EXPECT_EQ(pair.ours.skipped, 1);
      values[0] = values[1] = 1;
      values[2] = 0;
      ASSERT_EQ(pair.Take(args), TX_OK);
      EXPECT_EQ(pair.ours.skipped, 1);
      pair.ExpectEqual();
    }
  }
}

TEST_F(AdamwCall, CountsTheStepsOfEmptyParametersToo) {
  Pair pair;
  pair.Add(kF32, 0);
  pair.Add(kBlocks, 0, 1);
  for (int step = 0; step < 3; step++)
    ASSERT_EQ(pair.Take(Arguments()), TX_OK);
  float steps;
  std::memcpy(&steps, pair.ours.params[1].param.step.data(), 4);
  EXPECT_EQ(steps, 3.0f);
  pair.ExpectEqual();
}

TEST_F(AdamwCall, StepsAreWrittenOnceByTheLastBlockOfMany) {
  emulated::Use(5, 4);
  Pair pair;
  pair.Add(kF32, 200000);
  pair.Add(kF32, 3);
  for (int step = 0; step < 2; step++)
    ASSERT_EQ(pair.Take(Arguments()), TX_OK);
  pair.ExpectEqual();
}

TEST_F(AdamwCall, WhatAStepRefusesChangesNothing) {
  Pair pair;
  pair.Add(kBf16, 300, 0, true);
  pair.Renew();
  const auto before = pair.ours.State();
  tx_adamw_args args = Arguments();
  tx_error error = {};
  const auto refused = [&](const tx_adamw_args &like, tx_status status, const char *says) {
    Step step(pair.ours, like);
    EXPECT_EQ(tx_cuda_adamw(step.Args(), &pair.call, &error), status);
    EXPECT_NE(std::string(error.message).find(says), std::string::npos) << error.message;
    EXPECT_EQ(emulated::world.launches, 0);
    EXPECT_TRUE(pair.ours.State() == before);
  };
  args.moment_rounding = 9;
  refused(args, TX_ERROR_ILLEGAL_VALUE, "moment_rounding");
  args = Arguments();
  std::vector<int64_t> sums(TX_HEALTH_LEN + 1);
  const tx_tensor health = {reinterpret_cast<char *>(sums.data()) + 1, TX_HEALTH_LEN, TX_I64, 0};
  args = Arguments();
  args.healths = &health;
  refused(args, TX_ERROR_INVALID_ARGUMENT, "healths[0] must begin at a multiple of 8 bytes");
  args = Arguments();
  args.on_external_write = TX_EXTERNAL_CHECK;
  refused(args, TX_ERROR_INVALID_ARGUMENT,
          "call.workspace has 0 bytes; on_external_write = 2 (check) needs 16 for 1 tensors");
  pair.GiveWorkspace();
  pair.call.workspace_bytes = 15;
  refused(args, TX_ERROR_INVALID_ARGUMENT, "call.workspace has 15 bytes");
  pair.GiveWorkspace();
  pair.call.workspace = reinterpret_cast<char *>(pair.workspace.data()) + 4;
  refused(args, TX_ERROR_INVALID_ARGUMENT, "a multiple of 8 is legal");
  pair.GiveWorkspace();
  pair.call.size = 3;
  refused(args, TX_ERROR_INVALID_ARGUMENT, "call.size is 3");
  pair.call.size = sizeof pair.call;

  emulated::world.capturing = true;
  args.on_external_write = TX_EXTERNAL_RESYNC;
  refused(args, TX_ERROR_BAD_STATE, "pass it as a tensor in lrs");
  args.on_external_write = TX_EXTERNAL_CHECK;
  refused(args, TX_ERROR_BAD_STATE, "which waits for the device");

  Step step(pair.ours, Arguments());
  int64_t counters[2] = {};
  step.call.args.resynced.data = reinterpret_cast<char *>(counters) + 1;
  EXPECT_EQ(tx_cuda_adamw(step.Args(), &pair.call, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error.message).find("resynced begins at"), std::string::npos) << error.message;
}

TEST_F(AdamwCall, IsCapturedWithItsLrsInTensors) {
  emulated::world.capturing = true;
  Pair pair;
  pair.Add(kBlocks, 1300, 0, true);
  pair.Add(kBf16, 1300, 0, true);
  pair.Renew();
  float rate = 1e-2f;
  const tx_tensor lr = {&rate, 1, TX_F32, 0};
  tx_adamw_args args = Arguments();
  args.lrs = &lr;
  args.on_external_write = TX_EXTERNAL_RESYNC;
  for (int step = 0; step < 2; step++)
    ASSERT_EQ(pair.Take(args), TX_OK);
  EXPECT_EQ(emulated::world.synchronisations, 0);
  pair.ExpectEqual();
}

}  // namespace
