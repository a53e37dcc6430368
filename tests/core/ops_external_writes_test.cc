// Writes to weights from outside are noticed if the weights have masters: tx_master_checksum, and on_external_write of
// tx_adamw.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "tests/core/adamw_call.h"
#include "tests/core/threads.h"

namespace {

using adamw_call::Bytes;
using adamw_call::Call;
using adamw_call::Combo;
using adamw_call::Param;

const Combo kHalf = {TX_F16, TX_F32, TX_F16, TX_F32, TX_F32};
const Combo kStaged = {TX_BF16, TX_I16, TX_F16, TX_F16, TX_BF16};

int64_t Block(const Combo &c) {
  return c.master == TX_I16 ? TX_CHECKSUM : TX_SAMPLED;
}

/* A parameter with its checksums, and the call that steps it. */
struct Watched {
  Param param;
  Bytes checksums;
  int64_t resynced = 0;

  explicit Watched(const Combo &combo, int64_t n, int64_t misalign = 0)
      : param(combo, n, misalign), checksums((n + Block(combo) - 1) / Block(combo) * 8, misalign) {
    param.Fill(static_cast<uint32_t>(n));
    Look(TX_CHECKSUM_RENEW);
  }
  tx_tensor Weights() { return adamw_call::T(param.param, param.combo.param); }
  tx_tensor Master() { return adamw_call::T(param.master, param.combo.master); }
  tx_tensor Checksums() { return {checksums.data(), checksums.size() / 8, TX_I64, 0}; }

  int64_t Look(int32_t mode, const tx_parallel *parallel = nullptr) {
    int64_t stale = 0;
    const tx_tensor weights = Weights(), master = Master(), seen = Checksums();
    tx_error error;
    EXPECT_EQ(tx_master_checksum(1, &weights, &master, &seen, mode, {&stale, 1, TX_I64, 0}, parallel, &error), TX_OK)
        << error.message;
    return stale;
  }
  tx_status Step(int32_t external, const tx_parallel *parallel = nullptr, tx_error *error = nullptr) {
    Call call;
    call.Add(param);
    const tx_tensor seen = Checksums();
    tx_adamw_args args = *call.Args();
    args.checksums = &seen;
    args.on_external_write = external;
    args.resynced = {&resynced, 1, TX_I64, 0};
    return tx_adamw(&args, parallel, error);
  }
  /* Flips the lowest bit of weight i: same sign, similar magnitude. */
  void Write(int64_t i) { param.param.data()[2 * i] ^= 1; }
  std::vector<std::vector<uint8_t>> State() const {
    auto state = param.State();
    state.push_back(checksums.copy());
    return state;
  }
};

const int64_t kLengths[] = {0, 1, 2, 31, 33, 64, 129, 1023, 1024, 1025, 2048, 4095, 4096, 4097, 6145, 3 * 16384 + 700};

class Kinds : public testing::TestWithParam<Combo> {};

/* Each instruction set has loops of its own that check the checksums. */
void ForEachInstructionSet(const std::function<void()> &test) {
  for (int32_t isa = 0; tx_isa_name(isa); isa++) {
    SCOPED_TRACE(tx_isa_name(isa));
    ASSERT_EQ(tx_isa_select(tx_isa_name(isa), nullptr), TX_OK);
    test();
  }
  ASSERT_EQ(tx_isa_select(nullptr, nullptr), TX_OK);
}

void NothingIsNoticed(const Combo &combo) {
  Threads threads(3);
  for (int64_t n : kLengths) {
    Watched w(combo, n, 1), plain(combo, n, 1);
    for (int step = 0; step < 3; step++) {
      ASSERT_EQ(w.Step(TX_EXTERNAL_CHECK), TX_OK);
      ASSERT_EQ(w.Step(TX_EXTERNAL_RESYNC, threads.parallel()), TX_OK);
      ASSERT_EQ(plain.Step(TX_EXTERNAL_IGNORE), TX_OK);
    }
    EXPECT_EQ(w.resynced, 0) << n;
    EXPECT_EQ(w.State(), plain.State()) << n;
  }
}

TEST_P(Kinds, NothingIsNoticedWhereNobodyWrote) {
  ForEachInstructionSet([] { NothingIsNoticed(GetParam()); });
}

TEST_P(Kinds, EveryInstructionSetAndEverySplitSeesTheSameChecksums) {
  for (int64_t n : kLengths) {
    Watched reference(GetParam(), n);
    const auto expected = reference.checksums.copy();
    for (int32_t isa = 0; tx_isa_name(isa); isa++) {
      ASSERT_EQ(tx_isa_select(tx_isa_name(isa), nullptr), TX_OK);
      for (int count : {1, 2, 5}) {
        Threads threads(count);
        Watched w(GetParam(), n, count % 2);
        std::fill(w.checksums.raw.begin(), w.checksums.raw.end(), 0);
        EXPECT_EQ(w.Look(TX_CHECKSUM_RENEW, threads.parallel()), 0);
        EXPECT_EQ(w.checksums.copy(), expected) << tx_isa_name(isa) << " " << n << " " << count;
        EXPECT_EQ(w.Look(TX_CHECKSUM_CHECK, threads.parallel()), 0);
      }
    }
  }
  ASSERT_EQ(tx_isa_select(nullptr, nullptr), TX_OK);
}

void AWriteBecomesTheMaster(const Combo &combo) {
  const int64_t n = 3 * 4096 + 200, whole = Block(combo);
  /* All of these are sampled; the last one is at the beginning of a partial block. */
  for (int64_t at : {0, 31, 2048 + 7, 2 * 4096 + 5, 3 * 4096 + 3}) {
    Watched w(combo, n);
    ASSERT_EQ(w.Step(TX_EXTERNAL_RESYNC), TX_OK);
    w.Write(at);
    Watched expected = w; /* what the step has to give, starting from the weight as its own master */
    const int64_t block = at / whole * whole, end = std::min(block + whole, n);
    if (combo.master == TX_I16) {
      std::memset(expected.param.master.data() + 2 * block, 0, static_cast<size_t>(2 * (end - block)));
    } else {
      const float weight = adamw_call::Get(combo.param, w.param.param.data(), at);
      std::memcpy(expected.param.master.data() + 4 * at, &weight, 4);
    }
    ASSERT_EQ(expected.Step(TX_EXTERNAL_IGNORE), TX_OK);
    ASSERT_EQ(w.Step(TX_EXTERNAL_RESYNC), TX_OK);
    EXPECT_EQ(w.State(), expected.State()) << at;
    EXPECT_EQ(w.resynced, combo.master == TX_I16 ? end - block : 1) << at;
  }
}

TEST_P(Kinds, AWriteBecomesTheMasterBeforeTheStep) {
  ForEachInstructionSet([] { AWriteBecomesTheMaster(GetParam()); });
}

TEST_P(Kinds, ACheckNamesTheParameterAndWritesNothing) {
  Watched w(GetParam(), 5000);
  ASSERT_EQ(w.Step(TX_EXTERNAL_RESYNC), TX_OK);
  const auto clean = w.State();
  ASSERT_EQ(w.Step(TX_EXTERNAL_CHECK), TX_OK);
  EXPECT_EQ(w.State(), clean);
  w.Write(3);
  const auto before = w.State();
  tx_error error;
  EXPECT_EQ(w.Step(TX_EXTERNAL_CHECK, nullptr, &error), TX_ERROR_BAD_STATE);
  EXPECT_NE(std::strstr(error.message, "params[0]"), nullptr) << error.message;
  EXPECT_EQ(w.State(), before);
  EXPECT_EQ(w.Look(TX_CHECKSUM_CHECK), GetParam().master == TX_I16 ? TX_CHECKSUM : 1);
  EXPECT_EQ(w.State(), before);
  EXPECT_EQ(w.Look(TX_CHECKSUM_RESYNC), GetParam().master == TX_I16 ? TX_CHECKSUM : 1);
  EXPECT_EQ(w.Look(TX_CHECKSUM_RESYNC), 0);
  EXPECT_EQ(w.Step(TX_EXTERNAL_CHECK), TX_OK);
}

TEST_P(Kinds, ASkippedStepLooksAtNothing) {
  Watched w(GetParam(), 5000);
  w.Write(3);
  const auto before = w.State();
  Call call;
  call.Add(w.param);
  float found_inf = 1;
  const tx_tensor seen = w.Checksums();
  tx_adamw_args args = *call.Args();
  args.checksums = &seen;
  args.on_external_write = TX_EXTERNAL_RESYNC;
  args.found_inf = {&found_inf, 1, TX_F32, 0};
  ASSERT_EQ(tx_adamw(&args, nullptr, nullptr), TX_OK);
  EXPECT_EQ(w.State(), before);
}

INSTANTIATE_TEST_SUITE_P(Masters, Kinds,
                         testing::Values(adamw_call::kBf16, adamw_call::kRemainder, adamw_call::kBlocks, kHalf,
                                         kStaged),
                         [](const auto &info) { return adamw_call::Name(info.param); });

/* -- what changes a checksum --------------------------------------------------------------------------------------- */

TEST(Checksum, EveryWeightBesideRemaindersCounts) {
  Watched w(adamw_call::kRemainder, 2 * 1024 + 77);
  for (int64_t i = 0; i < w.param.n; i++) {
    w.Write(i);
    ASSERT_EQ(w.Look(TX_CHECKSUM_CHECK), i < 2048 ? 1024 : 77) << i;
    w.Write(i); /* restores the weight */
    ASSERT_EQ(w.Look(TX_CHECKSUM_CHECK), 0) << i;
  }
}

/* Common changes of whole models: none of them may cancel out in a checksum. */
TEST(Checksum, SeesWhatIsDoneToWholeTensors) {
  struct Case {
    const char *what;
    std::function<void(std::vector<uint16_t> &)> write;
  };
  const std::vector<Case> cases = {
      {"negated",
       [](auto &w) {
         for (auto &x : w)
           x ^= 0x8000;
       }},
      {"doubled",
       [](auto &w) {
         for (auto &x : w)
           x = static_cast<uint16_t>(x + 0x80);
       }},
      {"zeroed", [](auto &w) { std::fill(w.begin(), w.end(), 0); }},
      {"ones", [](auto &w) { std::fill(w.begin(), w.end(), 0x3f80); }},
      {"first two swapped", [](auto &w) { std::swap(w[0], w[1]); }},
      {"vectors swapped", [](auto &w) { std::swap_ranges(w.begin(), w.begin() + 32, w.begin() + 32); }},
      {"halves swapped", [](auto &w) { std::rotate(w.begin(), w.begin() + 512, w.begin() + 1024); }},
      {"reversed", [](auto &w) { std::reverse(w.begin(), w.end()); }},
      {"shifted by one", [](auto &w) { std::rotate(w.begin(), w.begin() + 1, w.end()); }},
      {"transposed", [](auto &w) {
         auto old = w;
         for (size_t i = 0; i < 64; i++)
           for (size_t j = 0; j < 64; j++)
             w[64 * i + j] = old[64 * j + i];
       }}};
  for (const Combo &combo : {adamw_call::kRemainder, adamw_call::kBf16}) {
    for (const Case &c : cases) {
      Watched w(combo, 4096);
      std::vector<uint16_t> weights(4096);
      std::memcpy(weights.data(), w.param.param.data(), 8192);
      c.write(weights);
      std::memcpy(w.param.param.data(), weights.data(), 8192);
      EXPECT_GT(w.Look(TX_CHECKSUM_CHECK), 0) << c.what;
    }
  }
}

TEST(Checksum, RandomWritesAreNeverMissed) {
  std::mt19937 gen(5);
  Watched w(adamw_call::kRemainder, 1024);
  const std::vector<uint8_t> clean = w.param.param.copy();
  for (int round = 0; round < 20000; round++) {
    const int writes = 1 + static_cast<int>(gen() % 6);
    for (int k = 0; k < writes; k++)
      w.param.param.data()[gen() % 2048] ^= static_cast<uint8_t>(gen());
    const bool same = w.param.param.copy() == clean;
    ASSERT_EQ(w.Look(TX_CHECKSUM_CHECK), same ? 0 : 1024) << round;
    std::copy(clean.begin(), clean.end(), w.param.param.data());
  }
}

TEST(Checksum, ASampleIs32OfEvery2048AndAllOfASmallTensor) {
  Watched large(adamw_call::kBf16, 4 * 4096 + 33), small(adamw_call::kBf16, 4096);
  for (int64_t i = 0; i < large.param.n; i += 1 + (i % 2048 > 64 && i % 2048 < 1990) * 50) {
    large.Write(i);
    EXPECT_EQ(large.Look(TX_CHECKSUM_CHECK), i % 2048 < 32 ? 1 : 0) << i;
    large.Write(i);
  }
  for (int64_t i = 0; i < small.param.n; i += 7) {
    small.Write(i);
    EXPECT_EQ(small.Look(TX_CHECKSUM_CHECK), 1) << i;
    small.Write(i);
  }
}

TEST(Checksum, ASampleThatDiffersHasTheWholeParameterLookedAt) {
  Watched w(adamw_call::kBf16, 40000);
  for (int64_t i : {0, 777, 5000, 39999})
    w.Write(i);
  EXPECT_EQ(w.Look(TX_CHECKSUM_RESYNC), 4);
  EXPECT_EQ(w.Look(TX_CHECKSUM_CHECK), 0);
}

TEST(Checksum, EntriesWithoutChecksumsArePassedOver) {
  Watched seen(adamw_call::kRemainder, 300), unseen(adamw_call::kRemainder, 300);
  const tx_tensor weights[] = {seen.Weights(), unseen.Weights()}, masters[] = {seen.Master(), unseen.Master()};
  const tx_tensor checksums[] = {seen.Checksums(), {nullptr, 0, TX_NONE, 0}};
  seen.Write(1);
  unseen.Write(1);
  int64_t stale[2] = {0, 0};
  ASSERT_EQ(
      tx_master_checksum(2, weights, masters, checksums, TX_CHECKSUM_CHECK, {stale, 2, TX_I64, 0}, nullptr, nullptr),
      TX_OK);
  EXPECT_EQ(stale[0], 300);
  EXPECT_EQ(stale[1], 0);
}

}  // namespace
