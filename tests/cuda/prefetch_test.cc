// What a step prefetches: whole vectors of the streams that it reads, each once, and never more than a part of the L2
// cache.
#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "tests/cuda/adamw_pair.h"

namespace {

using namespace adamw_pair;
using adamw_call::kBf16;
using adamw_call::kBlocks;
using adamw_call::kF32;
using adamw_call::kRemainder;

class Prefetch : public testing::TestWithParam<Combo> {
 protected:
  void SetUp() override { emulated::world = emulated::World(); }
  void TearDown() override { emulated::world = emulated::World(); }
};

struct Stream {
  const char *data;
  int64_t bytes;
};

// The streams that the step reads.
std::vector<Stream> StreamsOf(Param &p) {
  std::vector<Stream> streams;
  for (Bytes *bytes : {&p.grad, &p.exp_avg, &p.exp_avg_sq})
    streams.push_back({reinterpret_cast<const char *>(bytes->data()), bytes->size()});
  if (p.combo.master != TX_F32) streams.push_back({reinterpret_cast<const char *>(p.param.data()), p.param.size()});
  if (p.combo.master != TX_NONE) streams.push_back({reinterpret_cast<const char *>(p.master.data()), p.master.size()});
  return streams;
}

int64_t Sum(const std::vector<std::pair<const char *, int64_t>> &asked) {
  int64_t bytes = 0;
  for (const auto &each : asked)
    bytes += each.second;
  return bytes;
}

TEST_P(Prefetch, EveryByteIsAskedForOnceButWhatAWarpBeginsWith) {
  emulated::Use(2, 2);
  Pair pair;
  for (const int64_t n : {90000, 5, 3000, 16 * 1024})
    pair.Add(GetParam(), n);
  ASSERT_EQ(pair.Take(Arguments()), TX_OK);
  pair.ExpectEqual();
  std::vector<std::pair<const char *, int64_t>> asked;
  for (const emulated::Ask &ask : emulated::world.asks)
    asked.emplace_back(ask.from, ask.bytes);
  std::sort(asked.begin(), asked.end());
  for (size_t i = 1; i < asked.size(); i++)
    ASSERT_GE(asked[i].first, asked[i - 1].first + asked[i - 1].second) << "asked for twice";
  int64_t all = 0;
  for (Watched &w : pair.ours.params)
    for (const Stream &stream : StreamsOf(w.param)) {
      all += stream.bytes;
      for (const auto &[from, bytes] : asked) {
        const bool begins_here = from >= stream.data && from < stream.data + stream.bytes;
        ASSERT_TRUE(!begins_here || from + bytes <= stream.data + stream.bytes) << "beyond the tensor";
      }
    }
  // Each of the 4 blocks of 8 warps begins with up to 1024 elements, which nothing prefetches.
  int64_t widest = 0;
  for (const Stream &stream : StreamsOf(pair.ours.params[0].param))
    widest += stream.bytes / 90000;
  EXPECT_LE(Sum(asked), all);
  EXPECT_GE(Sum(asked), all - 32 * 1024 * widest - 16 * 5 * 4);
  EXPECT_GT(Sum(asked), all / 2);
}

// On an H100 or H200 (132 processors, two blocks of eight warps each) every warp prefetches one piece while it reads
// another. This may take half of the 50 MB.
TEST_P(Prefetch, WhatIsAheadIsAPartOfL2) {
  Pair pair;
  pair.Add(GetParam(), 90000);
  ASSERT_EQ(pair.Take(Arguments()), TX_OK);
  std::map<const char *, int64_t> largest;
  for (const emulated::Ask &ask : emulated::world.asks)
    for (const Stream &stream : StreamsOf(pair.ours.params[0].param))
      if (ask.from >= stream.data && ask.from < stream.data + stream.bytes)
        largest[stream.data] = std::max(largest[stream.data], ask.bytes);
  int64_t piece = 0;
  for (const auto &[data, bytes] : largest)
    piece += bytes;
  EXPECT_GE(piece, 4096);
  EXPECT_LE(piece * 132 * 16, int64_t{25} << 20);
}

TEST_P(Prefetch, WhatIsNotAlignedIsNotAskedFor) {
  Pair pair;
  pair.Add(GetParam(), 5000, 1);
  ASSERT_EQ(pair.Take(Arguments()), TX_OK);
  EXPECT_TRUE(emulated::world.asks.empty());
  pair.ExpectEqual();
}

INSTANTIATE_TEST_SUITE_P(Adamw, Prefetch, testing::Values(kF32, kBf16, kRemainder, kBlocks),
                         [](const auto &info) { return adamw_call::Name(info.param); });

}  // namespace
