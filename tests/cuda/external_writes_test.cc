// Detecting external writes on the device: the counts, masters and checksums must be the CPU's, byte for byte.
#include "tests/cuda/adamw_pair.h"

namespace {

using namespace adamw_pair;

const int64_t kLengths[] = {0, 1, 31, 33, 129, 1023, 1024, 1025, 2047, 2048, 2049, 2090, 4096, 4097, 6145, 6150, 13000};

class Checksums : public testing::TestWithParam<Combo> {
 protected:
  void SetUp() override {
    emulated::world = emulated::World();
    for (const int64_t n : kLengths)
      for (const int64_t misalign : {0, 1, 2})
        pair_.Add(GetParam(), n, misalign, true);
    pair_.Renew();
    pair_.GiveWorkspace();
  }
  void TearDown() override { emulated::world = emulated::World(); }

  // Writes to every third parameter: its first and last weight, and some between.
  void WriteSome() {
    for (Side *side : {&pair_.ours, &pair_.theirs}) {
      for (size_t i = 0; i < side->params.size(); i += 3) {
        const int64_t n = side->params[i].param.n;
        for (const int64_t at : {int64_t{0}, n / 2, 2048 + (n % 32), n - 1})
          if (at >= 0 && at < n) side->params[i].Write(at);
      }
    }
  }
  // Runs tx_master_checksum on both sides; returns the counts.
  std::vector<int64_t> Look(int32_t mode) {
    std::vector<int64_t> counts[2];
    for (int side = 0; side < 2; side++) {
      std::vector<tx_tensor> params, masters, checksums;
      for (Watched &w : (side ? pair_.theirs : pair_.ours).params) {
        params.push_back(T(w.param.param, GetParam().param));
        masters.push_back(T(w.param.master, GetParam().master));
        checksums.push_back(w.Checksums());
      }
      const int64_t n = static_cast<int64_t>(params.size());
      counts[side].assign(params.size(), 1000);
      const tx_tensor stale = {counts[side].data(), n, TX_I64, 0};
      tx_error error = {};
      EXPECT_EQ(
          side ? tx_master_checksum(n, params.data(), masters.data(), checksums.data(), mode, stale, nullptr, &error)
               : tx_cuda_master_checksum(n, params.data(), masters.data(), checksums.data(), mode, stale, &pair_.call,
                                         &error),
          TX_OK)
          << error.message;
    }
    EXPECT_EQ(counts[0], counts[1]);
    pair_.ExpectEqual();
    return counts[0];
  }
  Pair pair_;
};

TEST_P(Checksums, AreTheCpusAfterAStepOfEveryMode) {
  for (int32_t mode : {TX_EXTERNAL_IGNORE, TX_EXTERNAL_RESYNC, TX_EXTERNAL_CHECK}) {
    tx_adamw_args args = Arguments();
    args.on_external_write = mode;
    for (int step = 0; step < 2; step++)
      ASSERT_EQ(pair_.Take(args), TX_OK);
    pair_.ExpectEqual();
  }
  EXPECT_EQ(pair_.ours.resynced, 0);
}

TEST_P(Checksums, AWriteBecomesTheMasterBeforeTheStep) {
  tx_adamw_args args = Arguments();
  args.on_external_write = TX_EXTERNAL_RESYNC;
  ASSERT_EQ(pair_.Take(args), TX_OK);
  WriteSome();
  ASSERT_EQ(pair_.Take(args), TX_OK);
  EXPECT_GT(pair_.ours.resynced, 0);
  pair_.ExpectEqual();
  ASSERT_EQ(pair_.Take(args), TX_OK);
  pair_.ExpectEqual();
}

TEST_P(Checksums, AStepThatIgnoresWritesOverwritesThem) {
  WriteSome();
  ASSERT_EQ(pair_.Take(Arguments()), TX_OK);
  EXPECT_EQ(pair_.ours.resynced, 0);
  pair_.ExpectEqual();
}

TEST_P(Checksums, ACheckSaysWhatTheCpuSaysAndStepsNothing) {
  tx_adamw_args args = Arguments();
  args.on_external_write = TX_EXTERNAL_CHECK;
  WriteSome();
  const auto before = pair_.ours.State();
  EXPECT_EQ(pair_.Take(args), TX_ERROR_BAD_STATE);
  EXPECT_TRUE(pair_.ours.State() == before);
  EXPECT_EQ(emulated::world.synchronisations, 1);
  pair_.ExpectEqual();
}

TEST_P(Checksums, AreLookedAtByThemselves) {
  WriteSome();
  EXPECT_NE(Look(TX_CHECKSUM_CHECK), std::vector<int64_t>(pair_.ours.params.size(), 1000));
  EXPECT_NE(Look(TX_CHECKSUM_RESYNC), std::vector<int64_t>(pair_.ours.params.size(), 1000));
  EXPECT_EQ(Look(TX_CHECKSUM_CHECK), std::vector<int64_t>(pair_.ours.params.size(), 1000));
  WriteSome();
  EXPECT_EQ(Look(TX_CHECKSUM_RENEW), std::vector<int64_t>(pair_.ours.params.size(), 1000));
  EXPECT_EQ(Look(TX_CHECKSUM_CHECK), std::vector<int64_t>(pair_.ours.params.size(), 1000));
}

const Combo kMixedMoments = {TX_BF16, TX_F32, TX_BF16, TX_F32, TX_BF16};  // stepped by the kernel for any moments

INSTANTIATE_TEST_SUITE_P(External, Checksums,
                         testing::Values(kRemainder, kBlocks, kBf16, kHalf, kMixedMoments, kBlocksAndMasters),
                         [](const auto &info) { return adamw_call::Name(info.param); });

class Resync : public testing::TestWithParam<Combo> {};

TEST_P(Resync, HasTheCpusMastersAndCounts) {
  emulated::world = emulated::World();
  for (int32_t mode : {TX_RESYNC_STALE, TX_RESYNC_ALL, TX_RESYNC_COUNT}) {
    Pair pair;
    std::vector<int64_t> counts[2];
    for (int side = 0; side < 2; side++) {
      std::vector<tx_tensor> params, masters;
      Side &of = side ? pair.theirs : pair.ours;
      for (const int64_t n : kLengths)
        for (const int64_t misalign : {0, 1, 4})
          of.Add(GetParam(), n, misalign);
      std::mt19937 random(3);
      for (Watched &w : of.params) {
        Bytes &weights = w.param.param;
        for (int64_t i = 0; i < weights.size(); i++)
          if (random() % 8 == 0) weights.data()[i] = static_cast<uint8_t>(random());  // including NaNs and zeros
        if (GetParam().master == TX_I16)
          for (int64_t i = 0; i < w.param.master.size(); i++)
            w.param.master.data()[i] = random() % 3 ? 0 : static_cast<uint8_t>(random());
        params.push_back(T(weights, GetParam().param));
        masters.push_back(T(w.param.master, GetParam().master));
      }
      const int64_t n = static_cast<int64_t>(params.size());
      counts[side].assign(params.size(), 5);
      const tx_tensor changed = {counts[side].data(), n, TX_I64, 0};
      EXPECT_EQ(side ? tx_master_resync(n, params.data(), masters.data(), mode, changed, nullptr, nullptr)
                     : tx_cuda_master_resync(n, params.data(), masters.data(), mode, changed, &pair.call, nullptr),
                TX_OK);
    }
    EXPECT_EQ(counts[0], counts[1]);
    pair.ExpectEqual();
  }
}

INSTANTIATE_TEST_SUITE_P(External, Resync, testing::Values(kRemainder, kBf16, kHalf),
                         [](const auto &info) { return adamw_call::Name(info.param); });

}  // namespace
