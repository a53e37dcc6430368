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
const std::vector<Param> kSmall = {{"v", 700, TX_BF16}, {"w", 90, TX_F32}};

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

// Bytes of the body are forged and the checksum is corrected. Such a message may write weights, and nothing else.
TEST(Delta, ForgedBytesWriteNothingElse) {
  for (const Way &way : kWays) {
    Trainer trainer(kSmall, 1, 37, way.exact, way.checks, way.sliceable);
    trainer.Step(1e-4f);
    trainer.Step(1e-4f);
    const Bytes good = trainer.Encode()[0];
    std::mt19937 gen(1);
    int refused = 0;
    for (int t = 0; t < 3000; t++) {
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
    EXPECT_GT(refused, 1000) << way.name;
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

// -- pieces ----------------------------------------------------------------------------------------------------------

TEST(Delta, WeightsGoIntoFusedSlicedAndTransposedTensors) {
  constexpr int64_t kRows = 96, kColumns = 130;
  const std::vector<Param> model = {
      {"k", kRows * kColumns, TX_BF16}, {"q", kRows * kColumns, TX_BF16}, {"t", kRows * kColumns, TX_BF16}};
  for (const bool exact : {false, true}) {
    Trainer trainer(model, 2, 43, exact, false, true);
    const std::vector<tx_delta_param> table = Table(model);
    const std::vector<Bytes> was = {trainer.Weights(0), trainer.Weights(1), trainer.Weights(2)};
    std::vector<uint16_t> fused(2 * kRows * kColumns / 2), turned(kRows * kColumns);
    const int64_t half = kColumns / 2;
    // q and k: the second half of their columns, one above the other; t: transposed.
    std::vector<tx_delta_piece> pieces;
    for (int64_t p = 0; p < 2; p++) {
      pieces.push_back({p, 0, kRows, half, kColumns, nullptr, 0, 0});
      pieces.push_back({p, half, kRows, half, kColumns, fused.data() + p * kRows * half, half, 1});
    }
    pieces.push_back({2, 0, kRows, kColumns, kColumns, turned.data(), 1, kRows});
    const auto expect = [&](const std::vector<Bytes> &now, bool set) {
      for (int64_t r = 0; r < kRows; r++) {
        for (int64_t c = 0; c < kColumns; c++) {
          for (size_t p = 0; p < 3; p++) {
            if (p < 2 && c < half) continue;
            uint16_t &at = p < 2 ? fused[static_cast<size_t>((static_cast<int64_t>(p) * kRows + r) * half + c - half)]
                                 : turned[static_cast<size_t>(c * kRows + r)];
            const auto value = static_cast<uint16_t>(GetWeight(now[p], r * kColumns + c, TX_BF16));
            if (set) at = value;
            ASSERT_EQ(at, value) << p << " " << r << " " << c;
          }
        }
      }
    };
    expect(was, true);
    tx_delta_receiver *receiver = nullptr;
    tx_error error;
    ASSERT_EQ(tx_delta_open(3, table.data(), static_cast<int64_t>(pieces.size()), pieces.data(), &receiver, &error),
              TX_OK)
        << error.message;
    for (const float lr : {1e-5f, 1e-3f, 1e-1f}) {
      trainer.Step(lr);
      const std::vector<Bytes> parts = trainer.Encode();
      const tx_tensor tensors[] = {AsTensor(parts[0]), AsTensor(parts[1])};
      ASSERT_EQ(tx_delta_apply(receiver, 2, tensors, TX_DELTA_TOUCHED, nullptr, &error), TX_OK) << error.message;
      expect({trainer.Weights(0), trainer.Weights(1), trainer.Weights(2)}, false);
    }
    tx_delta_close(receiver);
  }
}

TEST(Delta, PiecesThatCoverTwiceOrNotAtAllAreNamed) {
  const tx_delta_param table[] = {{"a", 100, TX_BF16, 0}, {"b", 100, TX_BF16, 0}};
  std::vector<uint16_t> memory(400);
  uint16_t *m = memory.data();
  struct Case {
    std::vector<tx_delta_piece> pieces;
    tx_status status;
    const char *says;
  };
  const tx_delta_piece b = {1, 0, 1, 100, 0, m + 200, 0, 1};
  const Case cases[] = {
      {{{0, 0, 1, 100, 0, m, 0, 1}, b}, TX_OK, ""},
      {{{0, 0, 1, 99, 0, m, 0, 1}, b}, TX_ERROR_SHAPE, "\"a\": element 99 of 100 is in no piece"},
      {{{0, 0, 1, 100, 0, m, 0, 1}}, TX_ERROR_SHAPE, "\"b\""},
      {{{0, 0, 1, 101, 0, m, 0, 1}, b}, TX_ERROR_SHAPE, "within its 100"},
      {{{0, 0, 1, 60, 0, m, 0, 1}, {0, 59, 1, 41, 0, m + 60, 0, 1}, b}, TX_ERROR_OVERLAP, "element 59 is in two"},
      {{{0, 0, 1, 100, 0, m + 101, 0, 1}, b}, TX_ERROR_OVERLAP, "same memory"},
      {{{0, 0, 10, 10, 10, m, 20, 1}, b}, TX_OK, ""},
      {{{0, 0, 10, 10, 10, m, 20, 2}, b}, TX_OK, ""},
      {{{0, 0, 10, 10, 10, m, 9, 1}, b}, TX_ERROR_OVERLAP, "same memory"},
      {{{0, 0, 10, 10, 10, m, 1, 10}, b}, TX_OK, ""},
      {{{0, 0, 10, 10, 10, m, 20, 1}, {1, 0, 10, 10, 10, m + 10, 20, 1}}, TX_OK, ""},
      {{{0, 0, 10, 10, 10, m, 20, 1}, {1, 0, 10, 10, 10, m + 9, 20, 1}}, TX_ERROR_OVERLAP, "same memory"},
      {{{0, 0, 2, 50, 40, m, 50, 1}, b}, TX_ERROR_SHAPE, "do not overlap"},
      {{{2, 0, 1, 100, 0, m, 0, 1}, b}, TX_ERROR_INVALID_ARGUMENT, "parameter 2"},
  };
  for (const Case &c : cases) {
    tx_delta_receiver *receiver = nullptr;
    tx_error error = {};
    EXPECT_EQ(tx_delta_open(2, table, static_cast<int64_t>(c.pieces.size()), c.pieces.data(), &receiver, &error),
              c.status)
        << c.says << error.message;
    EXPECT_NE(std::string(error.message).find(c.says), std::string::npos) << error.message;
    tx_delta_close(receiver);
  }
}

TEST(Delta, SlicesNeedAPublisherThatMakesThem) {
  const std::vector<Param> model = {{"w", 10000, TX_BF16}};
  Trainer trainer(model, 1, 47);
  const std::vector<tx_delta_param> table = Table(model);
  Bytes weights = trainer.Weights(0);
  const tx_delta_piece pieces[] = {{0, 0, 1, 5000, 0, weights.data(), 0, 1}, {0, 5000, 1, 5000, 0, nullptr, 0, 0}};
  tx_delta_receiver *receiver = nullptr;
  tx_error error;
  ASSERT_EQ(tx_delta_open(1, table.data(), 2, pieces, &receiver, &error), TX_OK);
  trainer.Step(1e-5f);
  const std::vector<Bytes> parts = trainer.Encode();
  const tx_tensor tensor = AsTensor(parts[0]);
  EXPECT_EQ(tx_delta_apply(receiver, 1, &tensor, TX_DELTA_TOUCHED, nullptr, &error), TX_ERROR_MISMATCH);
  EXPECT_NE(std::string(error.message).find("sliceable"), std::string::npos) << error.message;
  EXPECT_EQ(tx_delta_apply(receiver, 1, &tensor, TX_DELTA_FULL, nullptr, &error), TX_ERROR_BAD_STATE);
  tx_delta_close(receiver);
}

// -- publisher -------------------------------------------------------------------------------------------------------

TEST(Delta, APublisherThatCannotIsToldWhy) {
  Trainer trainer(kSmall, 1, 53);
  std::vector<tx_delta_param> table = Table(kSmall);
  std::vector<tx_delta_run> runs = trainer.Runs(0);
  tx_delta_encode_args args = TX_DELTA_ENCODE_ARGS_INIT;
  args.n_params = 2;
  args.params = table.data();
  args.n_runs = 2;
  args.runs = runs.data();
  tx_delta_message message = {};
  tx_error error;
  const auto fails = [&](tx_status status, const char *says) {
    EXPECT_EQ(tx_delta_encode(&args, &trainer.chain(0), nullptr, &message, &error), status);
    EXPECT_NE(std::string(error.message).find(says), std::string::npos) << error.message;
    EXPECT_EQ(message.data, nullptr);
    EXPECT_EQ(trainer.chain(0).version, 0);
  };
  table[1].numel++;
  fails(TX_ERROR_MISMATCH, "not the chain's");
  table[1].numel--;
  std::swap(runs[0], runs[1]);
  fails(TX_ERROR_OVERLAP, "overlaps");
  std::swap(runs[0], runs[1]);
  runs[0].offset = 1;
  fails(TX_ERROR_SHAPE, "within its 700");
  runs[0].offset = 0;
  runs[1].changed.numel--;
  fails(TX_ERROR_SHAPE, "runs[1]: changed has");
  runs[1].changed.numel++;
  void *const moved = runs[1].moved.data;
  runs[1].moved.data = runs[1].weights.data;
  fails(TX_ERROR_OVERLAP, "runs[1]: weights[0] and moved[0] share memory");
  EXPECT_EQ(tx_delta_renew(2, runs.data(), nullptr, &error), TX_ERROR_OVERLAP);
  runs[1].moved.data = moved;
  args.kind = TX_DELTA_WHOLE;
  trainer.Step(1e-3f);
  fails(TX_ERROR_BAD_STATE, "has changed since version 0");
  args.size = 8;
  fails(TX_ERROR_INVALID_ARGUMENT, "args.size");
}

// Random weights with masters, a few of them changed, on every instruction set: the blocks that are marked equal those
// found by a loop over single weights.
TEST(Delta, BlocksThatAreNotTheirMastersAreMarked) {
  const Threads threads(3);
  std::mt19937 gen(67);
  for (int32_t isa = 0; tx_isa_name(isa); isa++) {
    ASSERT_EQ(tx_isa_select(tx_isa_name(isa), nullptr), TX_OK);
    for (int t = 0; t < 60; t++) {
      const tx_dtype dtype = t % 2 ? TX_F16 : TX_BF16;
      const int64_t n = t % 3 == 2 ? 65536 + gen() % 9000 : gen() % 3000;
      std::vector<float> masters(static_cast<size_t>(n));
      Bytes weights(static_cast<size_t>(2 * n));
      for (int64_t i = 0; i < n; i++) {
        masters[static_cast<size_t>(i)] = std::ldexp(static_cast<float>(gen()) - 2e9f, -static_cast<int>(gen() % 70));
        if (gen() % 50 == 0) masters[static_cast<size_t>(i)] = gen() % 2 ? NAN : 0.0f;
        SetWeight(&weights, i, dtype, Round(masters[static_cast<size_t>(i)], dtype));
      }
      std::vector<uint16_t> moved(static_cast<size_t>((n + TX_BLOCK - 1) / TX_BLOCK), 0x3a00), wanted = moved;
      int64_t blocks = 0;
      for (uint32_t k = gen() % 5; n > 0 && k > 0; k--) {
        const int64_t at = gen() % n;
        const uint32_t was = GetWeight(weights, at, dtype), sizes = 0x7fff,
                       infinity = dtype == TX_F16 ? 0x7c00 : 0x7f80;
        const uint32_t now = was ^ (gen() % 3 ? 1u << gen() % 16 : 0x8001u);
        SetWeight(&weights, at, dtype, now);
        const uint32_t mine = Round(masters[static_cast<size_t>(at)], dtype);
        const bool alike =
            now == mine || ((now | mine) & sizes) == 0 || ((now & sizes) > infinity && (mine & sizes) > infinity);
        uint16_t &bound = wanted[static_cast<size_t>(at / TX_BLOCK)];
        if (alike || bound == 0x7f80) continue;
        bound = 0x7f80;
        blocks++;
      }
      tx_error error;
      tx_delta_written tensors[2] = {};
      tensors[1].weights = {weights.data(), n, dtype, 0};
      tensors[1].masters = {masters.data(), n, TX_F32, 0};
      tensors[1].moved = {moved.data(), static_cast<int64_t>(moved.size()), TX_BF16, 0};
      tensors[0].weights.dtype = dtype;
      ASSERT_EQ(tx_delta_mark(2, tensors, t % 4 ? nullptr : threads.parallel(), &error), TX_OK) << error.message;
      ASSERT_EQ(moved, wanted) << t;
      ASSERT_EQ(tensors[1].marked, blocks) << t;
    }
  }
  ASSERT_EQ(tx_isa_select(nullptr, nullptr), TX_OK);
}

TEST(Delta, MarkKnowsWritesByChecksums) {
  std::mt19937_64 gen(5);
  const Threads threads(3);
  for (int32_t t = 0; t < 60; t++) {
    std::vector<std::vector<uint16_t>> weights, moved, wanted;
    std::vector<std::vector<uint64_t>> sums;
    std::vector<tx_delta_written> tensors(gen() % 5);
    for (tx_delta_written &one : tensors) {
      const int64_t n = t % 10 ? static_cast<int64_t>(gen() % 5000) : 200000;
      std::vector<uint16_t> &w = weights.emplace_back(static_cast<size_t>(n));
      for (uint16_t &value : w)
        value = static_cast<uint16_t>(gen());
      std::vector<uint64_t> &kept = sums.emplace_back(static_cast<size_t>((n + TX_CHECKSUM - 1) / TX_CHECKSUM));
      tx_delta_run run = {};
      run.weights = {w.data(), n, TX_BF16, 0};
      run.checksums = {kept.data(), static_cast<int64_t>(kept.size()), TX_I64, 0};
      ASSERT_EQ(tx_delta_renew(1, &run, nullptr, nullptr), TX_OK);
      moved.emplace_back(static_cast<size_t>((n + TX_BLOCK - 1) / TX_BLOCK), static_cast<uint16_t>(0x3f80));
      wanted.push_back(moved.back());
      for (uint64_t k = gen() % 3; n > 0 && k > 0; k--) {
        const int64_t at = static_cast<int64_t>(gen() % static_cast<uint64_t>(n)), first = at - at % TX_CHECKSUM;
        w[static_cast<size_t>(at)] ^= static_cast<uint16_t>(1u << (k % 16));
        for (int64_t i = first; i < std::min(first + TX_CHECKSUM, n); i++)
          wanted.back()[static_cast<size_t>(i / TX_BLOCK)] = 0x7f80;
      }
      one = {};
      one.weights = {w.data(), n, TX_BF16, 0};
      one.checksums = {kept.data(), static_cast<int64_t>(kept.size()), TX_I64, 0};
      one.moved = {moved.back().data(), static_cast<int64_t>(moved.back().size()), TX_BF16, 0};
    }
    tx_error error;
    ASSERT_EQ(tx_delta_mark(static_cast<int64_t>(tensors.size()), tensors.data(), t % 2 ? nullptr : threads.parallel(),
                            &error),
              TX_OK)
        << error.message;
    ASSERT_EQ(moved, wanted) << t;
    for (size_t i = 0; i < tensors.size(); i++)
      EXPECT_EQ(tensors[i].marked, std::count(wanted[i].begin(), wanted[i].end(), 0x7f80)) << t;
  }
}

TEST(Delta, MarkRefusesWhatItCannotCompare) {
  uint16_t weights[300] = {0}, moved[3] = {0};
  float masters[300] = {0};
  uint64_t sums[1] = {1};
  tx_error error;
  const tx_tensor w = {weights, 300, TX_BF16, 0}, m = {masters, 300, TX_F32, 0}, b = {moved, 3, TX_BF16, 0};
  const tx_tensor c = {sums, 1, TX_I64, 0}, none = {nullptr, 0, TX_NONE, 0};
  const auto mark = [&](tx_tensor x, tx_tensor y, tx_tensor z, tx_tensor sum) {
    tx_delta_written tensors[] = {{w, none, c, b, 0, 0}, {x, y, sum, z, 0, 0}};
    return tx_delta_mark(2, tensors, nullptr, &error);
  };
  EXPECT_EQ(mark(m, m, b, none), TX_ERROR_DTYPE);
  EXPECT_NE(std::string(error.message).find("tensors[1]: weights are fp32; bf16 and fp16"), std::string::npos)
      << error.message;
  EXPECT_EQ(mark(w, {masters, 299, TX_F32, 0}, b, none), TX_ERROR_SHAPE);
  EXPECT_EQ(mark(w, m, {moved, 2, TX_BF16, 0}, none), TX_ERROR_SHAPE);
  EXPECT_EQ(mark(w, none, b, {sums, 2, TX_I64, 0}), TX_ERROR_SHAPE);
  EXPECT_NE(std::string(error.message).find("tensors[1]: checksums has 2"), std::string::npos) << error.message;
  EXPECT_EQ(mark(w, w, b, none), TX_ERROR_DTYPE);
  EXPECT_EQ(mark(w, m, {weights + 7, 3, TX_BF16, 0}, none), TX_ERROR_OVERLAP);
  EXPECT_EQ(mark(w, m, b, c), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(mark(w, none, b, none), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(moved[0] | moved[1] | moved[2], 0) << "nothing is written where something is refused";
  EXPECT_EQ(tx_delta_mark(1, nullptr, nullptr, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(mark(w, m, b, none), TX_OK) << error.message;
}

}  // namespace
