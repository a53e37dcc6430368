// Streams that lie across a multiple of 4 GB: the path of usual tiles adds to the lower 32 bits of an address only
// (cuda/shared_cells.h, tx_within), so a tile that such a multiple divides has to take the general path.
#include <sys/mman.h>

#include <string>
#include <tuple>
#include <vector>

#include "tests/cuda/adamw_pair.h"

namespace {

using namespace adamw_pair;

constexpr int64_t kTile = 1024, kTiles = 6;
constexpr uintptr_t k4Gb = uintptr_t{1} << 32;

// Memory on both sides of a multiple of 4 GB.
class Memory {
 public:
  static constexpr size_t kHalf = 1 << 16;

  Memory() {
    for (uintptr_t i = 1; i < 64 && at_ == nullptr; i++) {
      auto *const wanted = reinterpret_cast<char *>(0x100000000000 + i * k4Gb - kHalf);
      void *const got = mmap(wanted, 2 * kHalf, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (got == wanted) at_ = wanted + kHalf;
      if (got != MAP_FAILED && got != wanted) munmap(got, 2 * kHalf);
    }
  }
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;
  ~Memory() {
    if (at_ != nullptr) munmap(at_ - kHalf, 2 * kHalf);
  }
  // The multiple; nullptr if there is no room at any.
  char *at() const { return at_; }

 private:
  char *at_ = nullptr;
};

enum class Stream { kParam, kGrad, kExpAvg, kExpAvgSq, kMaster };
constexpr Stream kStreams[] = {Stream::kParam, Stream::kGrad, Stream::kExpAvg, Stream::kExpAvgSq, Stream::kMaster};
constexpr const char *kNames[] = {"param", "grad", "exp_avg", "exp_avg_sq", "master"};

Bytes &BytesOf(Param &p, Stream stream) {
  Bytes *const all[] = {&p.param, &p.grad, &p.exp_avg, &p.exp_avg_sq, &p.master};
  return *all[static_cast<int>(stream)];
}

tx_tensor &TensorOf(AdamwLists &lists, Stream stream) {
  tx_tensor *const all[] = {lists.params.data(), lists.grads.data(), lists.exp_avgs.data(), lists.exp_avg_sqs.data(),
                            lists.masters.data()};
  return *all[static_cast<int>(stream)];
}

// Combo, the stream that lies across the multiple, and how many elements of its fourth tile lie before it.
class FarAddresses : public testing::TestWithParam<std::tuple<Combo, Stream, int64_t>> {
 protected:
  void SetUp() override { emulated::world = emulated::World(); }
  void TearDown() override { emulated::world = emulated::World(); }
};

TEST_P(FarAddresses, HaveTheSameBits) {
  const auto [combo, stream, before] = GetParam();
  const Memory memory;
  ASSERT_NE(memory.at(), nullptr);
  Pair pair;
  pair.Add(combo, kTiles * kTile, 0, true);
  pair.Renew();
  Step far(pair.ours, Arguments()), near(pair.theirs, Arguments());
  Bytes &bytes = BytesOf(pair.ours.params[0].param, stream);
  const int64_t size = bytes.size() / (kTiles * kTile);
  char *const data = memory.at() - (3 * kTile + before) * size;
  std::memcpy(data, bytes.data(), static_cast<size_t>(bytes.size()));
  TensorOf(far.call, stream).data = data;
  pair.call.device = emulated::world.current;
  ASSERT_EQ(tx_cuda_adamw(far.Args(), &pair.call, nullptr), TX_OK);
  ASSERT_EQ(tx_adamw(near.Args(), nullptr, nullptr), TX_OK);
  std::memcpy(bytes.data(), data, static_cast<size_t>(bytes.size()));
  pair.ExpectEqual();
  int64_t copied = 0;  // bytes of weights: only of tiles that may be usual
  const auto *const weights = static_cast<const char *>(far.call.params[0].data);
  for (const emulated::Copied &each : emulated::world.copied)
    copied += each.from >= weights && each.from < weights + 2 * kTiles * kTile ? each.bytes : 0;
  EXPECT_EQ(copied, 2 * kTile * (before > 0 ? kTiles - 1 : kTiles)) << "the divided tile alone is not read ahead";
}

std::string NameOf(const testing::TestParamInfo<FarAddresses::ParamType> &info) {
  const auto [combo, stream, before] = info.param;
  return adamw_call::Name(combo) + "_" + kNames[static_cast<int>(stream)] + "_" + std::to_string(before);
}

INSTANTIATE_TEST_SUITE_P(Adamw, FarAddresses,
                         testing::Combine(testing::Values(kRemainder, kBlocks), testing::ValuesIn(kStreams),
                                          testing::Values(0, 16, 256, 1008)),
                         NameOf);

}  // namespace
