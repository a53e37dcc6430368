// Weight deltas: every bit arrives, whatever happens to the weights and to the messages. A message that cannot be
// applied is rejected with a reason, before anything is written.
#include <cstring>
#include <string>

#include "csrc/core/delta_part.h"
#include "tests/core/delta_trainer.h"
#include "tests/core/threads.h"

namespace {

const std::vector<Param> kModel = {{"a.bias", 1, TX_BF16},   {"b.norm", 300, TX_BF16},   {"c.weight", 20011, TX_BF16},
                                   {"d.half", 9000, TX_F16}, {"e.single", 5000, TX_F32}, {"f.empty", 0, TX_BF16}};
struct Way {
  const char *name;
  bool exact, checks, sliceable;
};
constexpr Way kWays[] = {{"bounds", false, true, false},
                         {"exact", true, true, false},
                         {"sliceable", false, false, true},
                         {"exact and sliceable", true, false, true}};

TEST(Delta, EveryBitArrives) {
  for (const Way &way : kWays) {
    for (const float lr : {1e-6f, 1e-5f, 3e-4f, 1e-2f, 1.0f}) {
      SCOPED_TRACE(std::string(way.name) + " at " + std::to_string(lr));
      Trainer trainer(kModel, 3, 7, way.exact, way.checks, way.sliceable);
      Engine engine(trainer);
      for (const int steps : {1, 0, 4, 1, 16}) {
        for (int i = 0; i < steps; i++)
          trainer.Step(lr);
        ASSERT_EQ(engine.Apply(trainer.Encode(), way.checks ? TX_DELTA_FULL : TX_DELTA_TOUCHED), TX_OK)
            << engine.error.message;
        ASSERT_TRUE(engine.Equals(trainer)) << steps;
      }
      EXPECT_EQ(tx_delta_version(engine.receiver), 5);
    }
  }
}

TEST(Delta, LargeRunsHaveManySegmentsAndThreadsChangeNoBit) {
  const std::vector<Param> model = {{"w", 500000, TX_BF16}};
  Trainer one(model, 2, 3), four(model, 2, 3);
  Engine engine(one);
  const Threads threads(4);
  for (const float lr : {1e-6f, 1e-4f}) {
    one.Step(lr);
    four.Step(lr);
    const std::vector<Bytes> parts = one.Encode();
    EXPECT_EQ(parts, four.Encode(TX_DELTA_CHANGES, threads.parallel()));
    ASSERT_EQ(engine.Apply(parts, TX_DELTA_FULL, threads.parallel()), TX_OK) << engine.error.message;
    EXPECT_TRUE(engine.Equals(one));
  }
}

TEST(Delta, InstructionSetsMakeTheSameBytes) {
  std::vector<Bytes> first;
  for (int32_t i = 0; tx_isa_name(i); i++) {
    ASSERT_EQ(tx_isa_select(tx_isa_name(i), nullptr), TX_OK);
    std::vector<Bytes> all;
    for (const Way &way : kWays) {
      Trainer trainer(kModel, 2, 5, way.exact, way.checks, way.sliceable);
      Engine engine(trainer);
      for (const float lr : {1e-5f, 1e-3f}) {
        trainer.Step(lr);
        trainer.Step(lr);
        for (Bytes &part : trainer.Encode())
          all.push_back(std::move(part));
        ASSERT_EQ(engine.Apply({all.end() - 2, all.end()}), TX_OK) << engine.error.message;
        ASSERT_TRUE(engine.Equals(trainer));
      }
    }
    if (i == 0) first = all;
    EXPECT_EQ(all, first) << tx_isa_name(i);
  }
  ASSERT_EQ(tx_isa_select(nullptr, nullptr), TX_OK);
}

// Gaps of every length between changed weights, after many short gaps: their codes have all possible lengths.
TEST(Delta, GapsOfAnyLengthArrive) {
  for (int32_t isa = 0; tx_isa_name(isa); isa++) {
    ASSERT_EQ(tx_isa_select(tx_isa_name(isa), nullptr), TX_OK);
    for (uint64_t seed = 0; seed < 8; seed++) {
      Trainer trainer({{"w", 400001, seed % 2 ? TX_F16 : TX_BF16}}, 1, seed, seed % 4 == 3);
      Engine engine(trainer);
      Shard &shard = trainer.shards()[0][0];
      std::uniform_real_distribution<float> octaves(0, 17);
      for (int64_t at = 0, left = 0; at < shard.numel(); left--) {
        const float was = shard.masters[static_cast<size_t>(at)];
        const uint32_t next = GetWeight(shard.weights, at, shard.dtype) ^ 1u;
        const float is = shard.dtype == TX_F16 ? tx_f32_from_f16(static_cast<uint16_t>(next))
                                               : tx_f32_from_bf16(static_cast<uint16_t>(next));
        shard.masters[static_cast<size_t>(at)] = is;
        SetWeight(&shard.weights, at, shard.dtype, next);
        shard.changed[static_cast<size_t>(at / 8)] |= static_cast<uint8_t>(1 << at % 8);
        shard.AddBound(at / TX_BLOCK, std::fabs(is - was));
        if (left < 0) left = static_cast<int64_t>(std::exp2(octaves(trainer.gen()) / 2)); /* short gaps follow */
        at += left > 0 ? 1 + at % 3 : static_cast<int64_t>(std::exp2(octaves(trainer.gen())));
      }
      shard.KeepDistances();
      ASSERT_EQ(engine.Apply(trainer.Encode(), TX_DELTA_FULL), TX_OK) << seed << ": " << engine.error.message;
      ASSERT_TRUE(engine.Equals(trainer)) << seed;
    }
  }
  ASSERT_EQ(tx_isa_select(nullptr, nullptr), TX_OK);
}

TEST(Delta, FullMessagesBeginAndMergedOnesAreAppliedAsOne) {
  Trainer trainer(kModel, 3, 11);
  Engine follower(trainer), late(trainer, false);
  trainer.Step(1e-5f);
  ASSERT_EQ(follower.Apply(trainer.Encode()), TX_OK);
  std::vector<Bytes> list = trainer.Encode(TX_DELTA_WHOLE);
  const Bytes joined = list[0];
  for (int v = 0; v < 3; v++) {
    trainer.Step(1e-5f);
    trainer.Step(1e-5f);
    for (Bytes &part : trainer.Encode())
      list.push_back(std::move(part));
  }
  std::vector<tx_tensor> tensors;
  for (const Bytes &m : list)
    tensors.push_back(AsTensor(m));
  tx_delta_message merged = {};
  tx_error error;
  ASSERT_EQ(tx_delta_merge(static_cast<int64_t>(tensors.size()), tensors.data(), &merged, &error), TX_OK)
      << error.message;
  const auto *data = static_cast<const uint8_t *>(merged.data);
  ASSERT_EQ(late.Apply({Bytes(data, data + merged.bytes)}, TX_DELTA_FULL), TX_OK) << late.error.message;
  tx_delta_free(&merged);
  EXPECT_TRUE(late.Equals(trainer));
  EXPECT_EQ(tx_delta_version(late.receiver), 4);
  EXPECT_EQ(follower.Apply({list.begin() + 3, list.end()}), TX_OK) << follower.error.message;
  EXPECT_TRUE(follower.Equals(trainer));

  tx_delta_info info = TX_DELTA_INFO_INIT;
  ASSERT_EQ(tx_delta_info_of(AsTensor(joined), &info, &error), TX_OK);
  EXPECT_EQ(info.kind, TX_DELTA_WHOLE);
  EXPECT_EQ(info.last_version, 1);
  ASSERT_EQ(info.n_params, 6);
  tx_delta_param params[6];
  ASSERT_EQ(tx_delta_params_of(AsTensor(joined), 6, params, &error), TX_OK) << error.message;
  EXPECT_STREQ(params[2].name, "c.weight");
  EXPECT_EQ(params[2].numel, 20011);
  EXPECT_EQ(tx_delta_params_of(AsTensor(joined), 5, params, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_delta_params_of(AsTensor(list.back()), 0, nullptr, &error), TX_OK) << error.message;
  EXPECT_EQ(tx_delta_params_of(AsTensor(joined), 6, nullptr, &error), TX_ERROR_INVALID_ARGUMENT);
}

TEST(Delta, ATableOfAnotherModelIsNone) {
  Trainer trainer(kModel, 1, 12);
  Bytes whole = trainer.Encode(TX_DELTA_WHOLE)[0];
  const auto with_checksum = [&] {
    const uint64_t sum = tx_xxh64(whole.data(), static_cast<int64_t>(whole.size()) - TX_DELTA_CHECKSUM_BYTES);
    std::memcpy(whole.data() + whole.size() - TX_DELTA_CHECKSUM_BYTES, &sum, sizeof sum);
  };
  tx_delta_info info = TX_DELTA_INFO_INIT;
  tx_error error;
  for (size_t i = TX_DELTA_HEADER; i < TX_DELTA_HEADER + tx_get_u64(whole.data() + TX_DELTA_AT_TABLE); i++) {
    whole[i] ^= 0x41;
    with_checksum();
    std::vector<tx_delta_param> params(6);
    ASSERT_EQ(tx_delta_info_of(AsTensor(whole), &info, &error), TX_OK) << error.message;
    EXPECT_EQ(tx_delta_params_of(AsTensor(whole), 6, params.data(), &error), TX_ERROR_INVALID_ARGUMENT) << i;
    whole[i] ^= 0x41;
  }
  whole[TX_DELTA_AT_PARAMS + 3] = 0x7f; /* memory for that many parameters could not be allocated */
  with_checksum();
  EXPECT_EQ(tx_delta_info_of(AsTensor(whole), &info, &error), TX_ERROR_INVALID_ARGUMENT);
}

TEST(Delta, WhatSomebodyElseWroteTravelsToo) {
  Trainer trainer(kModel, 2, 13);
  Engine engine(trainer);
  trainer.Step(1e-7f);
  Shard &unseen = trainer.shards()[1][1];
  unseen.Overwrite(0.5f);
  unseen.changed.assign(unseen.changed.size(), 0);
  ASSERT_EQ(engine.Apply(trainer.Encode(), TX_DELTA_FULL), TX_OK) << engine.error.message;
  EXPECT_TRUE(engine.Equals(trainer));

  trainer.Step(1e-7f);
  Shard &shard = trainer.shards()[0][2];  // a resync, which the step has noted
  shard.Overwrite(0.25f);
  std::fill(shard.moved.begin(), shard.moved.end(), static_cast<uint16_t>(0x7f80));
  std::fill(shard.changed.begin(), shard.changed.end(), static_cast<uint8_t>(0xff));
  ASSERT_EQ(engine.Apply(trainer.Encode(), TX_DELTA_FULL), TX_OK) << engine.error.message;
  EXPECT_TRUE(engine.Equals(trainer));
}

// A run whose changes were not tracked is sent whole: its bounds and distances are meaningless.
TEST(Delta, ARunWithoutChangedBitsGoesWhole) {
  for (const bool exact : {false, true}) {
    Trainer trainer(kModel, 2, 67, exact);
    Engine engine(trainer);
    for (Shard &shard : trainer.shards()[0])
      shard.has_changed = false;
    trainer.Step(1e-5f);
    ASSERT_EQ(engine.Apply(trainer.Encode(), TX_DELTA_FULL), TX_OK) << engine.error.message;
    EXPECT_TRUE(engine.Equals(trainer)) << exact;
  }
}

// A saturated distance stays "further", even if the weight later returns. The weight has to be sent as it is.
TEST(Delta, WhatCameBackFromFarIsTakenAsItIs) {
  Trainer trainer({{"w", 9000, TX_BF16}}, 1, 61, true);
  Engine engine(trainer);
  Shard &shard = trainer.shards()[0][0];
  const Bytes was = shard.weights;
  const std::vector<float> masters = shard.masters;
  trainer.Step(1e-4f);
  trainer.Step(1e-4f);
  shard.weights = was;
  shard.masters = masters;
  for (size_t i = 0; i < shard.distances.size(); i++)
    shard.distances[i] = 0x88;
  ASSERT_EQ(engine.Apply(trainer.Encode(), TX_DELTA_FULL), TX_OK) << engine.error.message;
  EXPECT_TRUE(engine.Equals(trainer));
}

// If a bound reaches the size of numbers that round to infinity, a weight may have been on the other side of any
// boundary of its class.
TEST(Delta, WhatWasInfiniteComesBackToAnything) {
  struct Far {
    tx_dtype dtype;
    float infinite, most;  // a value that rounds to infinity; the largest magnitude to which a weight returns
  };
  for (const Far &far : {Far{TX_F16, 1e5f, 3e4f}, Far{TX_BF16, 3.4e38f, 1.1e37f}}) {
    for (const bool exact : {false, true}) {
      Trainer trainer({{"w", 9000, far.dtype}}, 1, 71, exact);
      Engine engine(trainer);
      Shard &shard = trainer.shards()[0][0];
      const auto move = [&](int64_t i, float x) {
        float &master = shard.masters[static_cast<size_t>(i)];
        shard.AddBound(i / TX_BLOCK, std::fabs(x - master));
        master = x;
        SetWeight(&shard.weights, i, far.dtype, Round(x, far.dtype));
        shard.changed[static_cast<size_t>(i / 8)] |= static_cast<uint8_t>(1 << i % 8);
      };
      const float to[] = {far.most, -far.most / 30, far.most / 1e3f, 0.0f, far.most / 2, 1e-3f};
      for (const float x : {far.infinite, 0.0f}) {
        for (int64_t i = 1; i < 6; i++)
          move(1000 * i, x > 0 ? (i % 2 ? x : -x) : to[i]);
        for (int64_t i = 325; i < 8600; i += 50)
          move(i, x > 0 ? 1.0f : -1.0f);
        shard.KeepDistances();
        ASSERT_EQ(engine.Apply(trainer.Encode(), TX_DELTA_FULL), TX_OK) << engine.error.message;
        EXPECT_TRUE(engine.Equals(trainer)) << exact;
      }
    }
  }
}

TEST(Delta, WeightsThatSomebodyChangedInTheEngineAreNamed) {
  Trainer trainer(kModel, 2, 17);
  Engine engine(trainer);
  trainer.Step(1e-5f);
  const std::vector<Bytes> parts = trainer.Encode();
  engine.weights[2][2000] ^= 0x10;  // an element that rarely changes
  const std::vector<Bytes> before = engine.weights;
  EXPECT_EQ(engine.Apply(parts, TX_DELTA_FULL), TX_ERROR_MISMATCH);
  EXPECT_NE(std::string(engine.error.message).find("c.weight"), std::string::npos) << engine.error.message;
  EXPECT_EQ(engine.weights, before);
  std::fill(engine.weights[2].begin(), engine.weights[2].end(), 0x11);
  EXPECT_EQ(engine.Apply(parts, TX_DELTA_TOUCHED), TX_ERROR_MISMATCH);
  EXPECT_EQ(tx_delta_version(engine.receiver), 0);
}

TEST(Delta, WhatDoesNotFollowIsNamed) {
  Trainer trainer(kSmall, 2, 19), stranger(kSmall, 2, 23), other({{"v", 701, TX_BF16}}, 2, 23);
  Engine engine(trainer);
  std::vector<std::vector<Bytes>> versions;
  for (int v = 0; v < 4; v++) {
    trainer.Step(1e-5f);
    versions.push_back(trainer.Encode());
  }
  stranger.Step(1e-5f);
  other.Step(1e-5f);
  const std::vector<Bytes> foreign = stranger.Encode();
  const auto fails = [&](const std::vector<Bytes> &messages, tx_status status, const char *says) {
    const std::vector<Bytes> before = engine.weights;
    EXPECT_EQ(engine.Apply(messages), status) << engine.error.message;
    EXPECT_NE(std::string(engine.error.message).find(says), std::string::npos) << engine.error.message;
    EXPECT_EQ(engine.weights, before);
  };
  fails(versions[1], TX_ERROR_BAD_STATE, "lost");
  fails({versions[0][0]}, TX_ERROR_BAD_STATE, "part 1 of 2 of version 1 is missing");
  fails({versions[0][0], versions[1][1]}, TX_ERROR_BAD_STATE, "is missing");
  fails({versions[0][0], versions[0][0], versions[0][1]}, TX_ERROR_BAD_STATE, "twice");
  fails({versions[0][0], foreign[1]}, TX_ERROR_MISMATCH, "chain");
  fails(other.Encode(), TX_ERROR_MISMATCH, "another model");
  fails({}, TX_ERROR_INVALID_ARGUMENT, "at least one");
  fails({Bytes{}}, TX_ERROR_INVALID_ARGUMENT, "no part of a delta");
  ASSERT_EQ(engine.Apply(versions[0]), TX_OK);
  fails(versions[0], TX_ERROR_BAD_STATE, "already");
  fails(foreign, TX_ERROR_MISMATCH, "chain");
  fails(versions[3], TX_ERROR_BAD_STATE, "lost");
  ASSERT_EQ(engine.Apply({versions[2][1], versions[1][0], versions[2][0], versions[1][1]}), TX_OK);
  ASSERT_EQ(engine.Apply(versions[3]), TX_OK);
  EXPECT_TRUE(engine.Equals(trainer));
}

TEST(Delta, AChainWithAnotherHistoryIsNamed) {
  Trainer trainer(kSmall, 1, 29);
  Engine engine(trainer);
  trainer.Step(1e-5f);
  const tx_delta_chain before = trainer.chain(0);
  ASSERT_EQ(engine.Apply(trainer.Encode()), TX_OK);
  trainer.chain(0) = before;  // the trainer goes back and takes another path
  trainer.Step(1e-4f);
  (void)trainer.Encode();
  trainer.Step(1e-4f);
  EXPECT_EQ(engine.Apply(trainer.Encode()), TX_ERROR_MISMATCH);
  EXPECT_NE(std::string(engine.error.message).find("history"), std::string::npos) << engine.error.message;
}

TEST(Delta, AnyDamagedByteIsFound) {
  Trainer trainer(kSmall, 1, 31);
  Engine engine(trainer);
  trainer.Step(1e-4f);
  const Bytes good = trainer.Encode()[0];
  const std::vector<Bytes> before = engine.weights;
  for (size_t i = 0; i < good.size(); i++) {
    Bytes bad = good;
    bad[i] ^= static_cast<uint8_t>(1u << i % 8);
    const tx_status status = engine.Apply({bad});
    ASSERT_TRUE(status == TX_ERROR_INVALID_ARGUMENT || status == TX_ERROR_UNAVAILABLE) << i << engine.error.message;
    bad = Bytes(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(i));
    ASSERT_EQ(engine.Apply({bad}), TX_ERROR_INVALID_ARGUMENT) << i;
  }
  EXPECT_EQ(engine.weights, before);
  EXPECT_EQ(engine.Apply({good}), TX_OK);
}

#ifdef TX_SLOW
constexpr int kForged = 600;
#else
constexpr int kForged = 3000;
#endif

// Bytes of the body are forged and the checksum is corrected. Such a message may write weights, and nothing else.
TEST(Delta, ForgedBytesWriteNothingElse) {
  for (const Way &way : kWays) {
    Trainer trainer(kSmall, 1, 37, way.exact, way.checks, way.sliceable);
    trainer.Step(1e-4f);
    trainer.Step(1e-4f);
    const Bytes good = trainer.Encode()[0];
    std::mt19937 gen(1);
    int refused = 0;
    for (int t = 0; t < kForged; t++) {
      Engine engine(trainer);
      Bytes bad = good;
      for (uint32_t k = 0; k <= gen() % 3; k++)
        bad[8 + gen() % (bad.size() - 16)] = static_cast<uint8_t>(gen());
      const uint64_t sum = tx_xxh64(bad.data(), static_cast<int64_t>(bad.size()) - 8);
      std::memcpy(bad.data() + bad.size() - 8, &sum, 8);
      const std::vector<Bytes> before = engine.weights;
      if (engine.Apply({bad}) == TX_OK) continue;
      refused++;
      ASSERT_EQ(engine.weights, before);
    }
    EXPECT_GT(refused, kForged / 3) << way.name;
  }
}

TEST(Delta, AThousandVersionsOfWhichOneInAHundredGoesWrong) {
  Trainer trainer({{"v", 3000, TX_BF16}, {"w", 500, TX_BF16}}, 2, 41);
  Engine engine(trainer);
  std::mt19937 gen(2);
  std::vector<Bytes> last;
  for (int v = 0; v < 1000; v++) {
    trainer.Step(1e-5f);
    std::vector<Bytes> parts = trainer.Encode();
    const bool wrong = gen() % 100 == 0 && v > 0;
    if (wrong) {
      std::vector<Bytes> sent = parts;
      switch (gen() % 4) {
        case 0:  // this version is lost, and the next one arrives
          trainer.Step(1e-5f);
          sent = trainer.Encode();
          break;
        case 1:
          sent = last;
          break;
        case 2:
          sent = {parts[0], last[1]};
          break;
        default:
          sent[gen() % 2][gen() % sent[0].size() % sent[1].size()] ^= 4;
          break;
      }
      const std::vector<Bytes> before = engine.weights;
      ASSERT_NE(engine.Apply(sent), TX_OK) << v;
      ASSERT_GT(std::string(engine.error.message).size(), 20u);
      ASSERT_EQ(engine.weights, before);
      ASSERT_EQ(engine.Apply(trainer.Encode(TX_DELTA_WHOLE), TX_DELTA_FULL), TX_OK) << engine.error.message;
    } else {
      ASSERT_EQ(engine.Apply(parts, v % 10 ? TX_DELTA_TOUCHED : TX_DELTA_FULL), TX_OK) << v << engine.error.message;
    }
    last = parts;
    ASSERT_TRUE(engine.Equals(trainer)) << v;
  }
  EXPECT_TRUE(engine.Equals(trainer));
}

}  // namespace
