// tests/core/cycle_cost.h: predicted times that can be computed by hand, and relations between predictions.
// tests/distributed/test_predicted_bytes.py compares the bytes with real ranks.
#include "tests/core/cycle_cost.h"

#include <gtest/gtest.h>

#include <stdexcept>

using namespace cycle_cost;

namespace {

#ifdef TX_SLOW
constexpr int kLarge = 12;
#else
constexpr int kLarge = 32;
#endif

constexpr double kLatency = 1e-3, kSpeed = 1e8;

// One bucket of 128 * 1024 elements in bf16, without computation.
Case One(int kind, int world) {
  Case one;
  one.cluster.ranks_per_node = 1;
  one.cluster.between = {kLatency, kSpeed, 0};
  one.model.params = {{128 * 1024, 1024, 0, 0}};
  one.kind = kind;
  one.world = world;
  one.check_for_nan = 0;
  return one;
}

// A model of 12 layers, on nodes of 4 ranks.
Case Many(int kind, How how, int world) {
  Case many = One(kind, world);
  many.how = how;
  many.cluster = {4, {1e-5, 1e10, 1e-6}, {1e-4, 1e9, 1e-6}, 2e9, 1e-6, 1e10, 4};
  many.model.params.clear();
  for (int64_t layer = 0; layer < 12; layer++)
    many.model.params.push_back({100000 + 1000 * layer, 100 + layer, layer, 11 - layer});
  many.cap = 250000;
  many.model.forward_seconds = 1e-3;
  many.model.backward_seconds = 2e-3;
  many.check_for_nan = 1;
  return many;
}

TEST(CycleCost, OneMessageOnALink) {
  // Two ranks send each other the whole bucket in fp8, because the sums would be gathered in bf16. In addition they
  // send a report of 16 bytes plus one byte for the parameter.
  Case one = One(TX_CYCLE_NO_SHARD, 2);
  one.model.wire_dtype = TX_U8;
  const Cost cost = Predict(one);
  const double bytes = 129 * 1024;
  EXPECT_EQ(cost.gradient_bytes, 129 * 1024);
  EXPECT_EQ(cost.report_bytes, 17);
  EXPECT_EQ(cost.messages, 2);
  EXPECT_NEAR(cost.seconds, kLatency + (bytes + 17) / kSpeed, 1e-9);
}

TEST(CycleCost, AllToAllAndGatherTakeTheirPartsInTurn) {
  const Cost cost = Predict(One(TX_CYCLE_NO_SHARD, 4));
  const double part = 2 * 128 * 1024 / 4;
  EXPECT_EQ(cost.gradient_bytes, 6 * 2 * 128 * 1024 / 4);
  EXPECT_EQ(cost.report_bytes, 3 * 17);
  EXPECT_EQ(cost.messages, 9);
  // Three parts are sent while three are received; then the same for the sums. Reports are sent in parallel.
  EXPECT_NEAR(cost.seconds, 2 * kLatency + 6 * part / kSpeed, 3 * 17 / kSpeed);
}

TEST(CycleCost, ARingTakesAsManyTripsAsThereAreOthersTwice) {
  Case ring = One(TX_CYCLE_DDP_HOOK, 8);
  ring.how = How::kRing;
  const Cost cost = Predict(ring);
  const double part = 2 * 128 * 1024 / 8;
  EXPECT_EQ(cost.messages, 14);
  EXPECT_EQ(cost.gradient_bytes, 14 * 2 * 128 * 1024 / 8);
  EXPECT_NEAR(cost.seconds, 14 * (kLatency + part / kSpeed), 1e-9);
}

TEST(CycleCost, TwoLevelsSendLessBetweenNodes) {
  const Cost flat = Predict(Many(TX_CYCLE_OPTIM, How::kAllToAll, 16));
  const Cost two = Predict(Many(TX_CYCLE_OPTIM, How::kTwoLevel, 16));
  EXPECT_LT(two.messages, flat.messages);
  EXPECT_LT(two.node_bytes, flat.node_bytes * 2 / 3);
  EXPECT_LT(two.seconds, flat.seconds);
  EXPECT_EQ(two.buckets, flat.buckets);
}

TEST(CycleCost, WhatBackwardCoversIsNotPaid) {
  Case slow = Many(TX_CYCLE_NO_SHARD, How::kAllToAll, 8);
  const double exposed = Predict(slow).seconds - 3e-3;
  slow.model.backward_seconds = 10;
  const Cost covered = Predict(slow);
  EXPECT_LT(covered.seconds - covered.compute_seconds, exposed / 3);
  EXPECT_GT(covered.seconds, covered.compute_seconds) << "the last bucket is not covered";
}

TEST(CycleCost, NothingCoversTheOptimizersWork) {
  for (int kind = 0; kind < 5; kind++) {
    Case one = Many(kind, How::kAllToAll, 8);
    const Cost before = Predict(one);
    one.model.step_seconds = 0.5;
    const Cost with = Predict(one);
    EXPECT_NEAR(with.seconds, before.seconds + 0.5, 1e-9) << kind;
    EXPECT_NEAR(with.compute_seconds, before.compute_seconds + 0.5, 1e-9) << kind;
    EXPECT_EQ(with.bytes(), before.bytes()) << kind;
  }
}

TEST(CycleCost, AnInjectionLimitIsANodesNotARanks) {
  Case free = Many(TX_CYCLE_NO_SHARD, How::kAllToAll, 16);
  free.model.forward_seconds = free.model.backward_seconds = 0;
  free.cluster.node_bytes_per_second = 0;
  Case limited = free;
  limited.cluster.node_bytes_per_second = 1e9;  // the bandwidth of one rank, for four
  const double ratio = Predict(limited).seconds / Predict(free).seconds;
  EXPECT_GT(ratio, 3);
  EXPECT_LT(ratio, 4.1);
}

// Nodes that behave identically are simulated by one node: the results have to equal those of simulating all.
TEST(CycleCost, OneNodeStandsForAll) {
  for (int kind = 0; kind < 5; kind++) {
    for (How how : {How::kAllToAll, How::kTwoLevel, How::kRing}) {
      for (int world : {8, 16, kLarge}) {
        Case one = Many(kind, how, world), all = one;
        all.every_node = true;
        const Cost a = Predict(one), b = Predict(all);
        EXPECT_NEAR(a.seconds, b.seconds, 1e-3 * b.seconds) << kind << ' ' << static_cast<int>(how) << ' ' << world;
        EXPECT_EQ(a.bytes(), b.bytes());
        EXPECT_EQ(a.node_bytes, b.node_bytes);
        EXPECT_EQ(a.messages, b.messages);
        EXPECT_EQ(a.in_flight_bytes, b.in_flight_bytes);
      }
    }
  }
}

TEST(CycleCost, MemoryUnderWayIsWithinThePlan) {
  for (int kind = 0; kind <= TX_CYCLE_OPTIM_GRADS; kind++) {
    for (int world : {2, 4, 8, kLarge, 8 * kLarge}) {
      for (int64_t cap : {int64_t{TX_NO_INT}, int64_t{100000}}) {
        Case many = Many(kind, How::kAllToAll, world);
        many.cap = cap;
        many.model.backward_seconds = 0;  // buckets become ready faster than they can be sent
        const Cost cost = Predict(many);
        EXPECT_GT(cost.in_flight_bytes, 0);
        EXPECT_LE(cost.in_flight_bytes, cost.planned_bytes) << kind << ' ' << world << ' ' << cap;
      }
    }
  }
}

TEST(CycleCost, TheLargestWorlds) {
#ifdef TX_SLOW
  const int world = 256;
#else
  const int world = 4096;
#endif
  for (int kind = 0; kind < 5; kind++) {
    Case many = Many(kind, How::kAllToAll, world);
    many.cap = TX_NO_INT;
    many.model.params.resize(2);
    for (Param &param : many.model.params)
      param.bucket = param.unit = 0;
    const Cost cost = Predict(many);
    EXPECT_GT(cost.messages, world);
    EXPECT_GT(cost.seconds, cost.compute_seconds);
  }
}

TEST(CycleCost, WhatIsNotLegalIsRefused) {
  EXPECT_THROW((void)Predict(Many(TX_CYCLE_OPTIM, How::kAllToAll, 6)), std::invalid_argument);
  Case none = One(TX_CYCLE_OPTIM, 2);
  none.model.params.clear();
  EXPECT_THROW((void)Predict(none), std::invalid_argument);
}

}  // namespace
