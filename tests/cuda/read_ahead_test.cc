// What a step with remainders reads ahead into shared memory: every vector of every full tile once, of the streams
// that it reads. Other steps read no vectors ahead. Every step reads ahead what a warp needs to know of its next
// tensor, in words of 4 bytes. The emulator makes a copy at once or as late as possible, by a seed; no bit of the
// result depends on it.
#include <algorithm>
#include <utility>
#include <vector>

#include "tests/cuda/adamw_pair.h"

namespace {

using namespace adamw_pair;

constexpr int64_t kTile = 1024;  // elements

class ReadAhead : public testing::TestWithParam<Combo> {
 protected:
  void SetUp() override { emulated::world = emulated::World(); }
  void TearDown() override { emulated::world = emulated::World(); }
};

struct Stream {
  const char *data;
  int64_t bytes;
};

// The streams that the step reads; no weights beside fp32 masters.
std::vector<Stream> StreamsOf(Param &p) {
  std::vector<Stream> streams;
  for (Bytes *bytes : {&p.grad, &p.exp_avg, &p.exp_avg_sq})
    streams.push_back({reinterpret_cast<const char *>(bytes->data()), bytes->size()});
  if (p.combo.master != TX_F32) streams.push_back({reinterpret_cast<const char *>(p.param.data()), p.param.size()});
  if (p.combo.master != TX_NONE) streams.push_back({reinterpret_cast<const char *>(p.master.data()), p.master.size()});
  return streams;
}

// Whether a multiple of 4 GB may divide tile i of one of the streams (far_addresses_test.cc); chance decides that here.
bool DividesTile(const std::vector<Stream> &streams, int64_t n, int64_t i) {
  bool divides = false;
  for (const Stream &stream : streams) {
    const auto begin = reinterpret_cast<uintptr_t>(stream.data + stream.bytes / n * kTile * i);
    divides = divides || begin >> 32 != (begin + 2 * kTile - 1) >> 32;
  }
  return divides;
}

typedef std::pair<const char *, int64_t> Copy;  // the address that is read, and how many bytes

// What was read ahead of vectors.
std::vector<Copy> Vectors() {
  std::vector<Copy> copied;
  for (const emulated::Copied &each : emulated::world.copied)
    if (each.bytes > 4) copied.emplace_back(each.from, each.bytes);
  return copied;
}

TEST_P(ReadAhead, EveryFullTileOnce) {
  emulated::Use(2, 2);
  Pair pair;
  const std::vector<int64_t> numels = {90000, 5, 3000, 16 * 1024};
  for (const int64_t n : numels)
    pair.Add(GetParam(), n);
  ASSERT_EQ(pair.Take(Arguments()), TX_OK);
  pair.ExpectEqual();
  std::vector<Copy> copied = Vectors();
  std::sort(copied.begin(), copied.end());
  for (size_t i = 1; i < copied.size(); i++)
    ASSERT_GE(copied[i].first, copied[i - 1].first + copied[i - 1].second) << "copied twice";
  int64_t found = 0, expected = 0;
  size_t tensor = 0;
  for (Watched &w : pair.ours.params) {
    const int64_t n = numels[tensor++], tiles = n / kTile;
    const std::vector<Stream> streams = StreamsOf(w.param);
    for (int64_t i = 0; i < tiles; i++)
      for (const Stream &stream : streams)
        expected += DividesTile(streams, n, i) ? 0 : stream.bytes / n * kTile;
    for (const Stream &stream : streams) {
      const int64_t whole = stream.bytes / n * (tiles * kTile);
      for (const auto &[from, bytes] : copied) {
        const bool begins_here = from >= stream.data && from < stream.data + stream.bytes;
        ASSERT_TRUE(!begins_here || from + bytes <= stream.data + whole) << "beyond the full tiles";
        found += begins_here ? bytes : 0;
      }
    }
  }
  const bool reads_ahead = GetParam().master == TX_I16;
  EXPECT_EQ(found, reads_ahead ? expected : 0);
  EXPECT_EQ(copied.empty(), !reads_ahead);
}

TEST_P(ReadAhead, OneWordOfATensorForEachWarpThatEntersIt) {
  emulated::Use(2, 2);
  Pair pair;
  for (const int64_t n : {90000, 5, 3000, 16 * 1024, 1024})
    pair.Add(GetParam(), n);
  ASSERT_EQ(pair.Take(Arguments()), TX_OK);
  for (Watched &w : pair.ours.params) {
    const int64_t tiles = (w.param.n + kTile - 1) / kTile;
    const auto *const step = reinterpret_cast<const char *>(w.param.step.data());
    int64_t words = 0;
    for (const emulated::Copied &each : emulated::world.copied)
      words += each.bytes == 4 && each.from == step;
    EXPECT_GE(words, 1);
    EXPECT_LE(words, std::min<int64_t>(tiles, 2 * 2 * 8)) << w.param.n;
  }
}

// Each seed makes other copies late.
TEST_P(ReadAhead, NoBitDependsOnWhenACopyIsMade) {
  for (uint32_t seed = 2; seed < 12; seed++) {
    emulated::world = emulated::World();
    emulated::Use(2, 2);
    emulated::world.copies = seed;
    Pair pair;
    for (const int64_t n : {20000, 300, 4096})
      pair.Add(GetParam(), n);
    ASSERT_EQ(pair.Take(Arguments()), TX_OK);
    pair.ExpectEqual();
  }
}

TEST_P(ReadAhead, WhatIsNotAlignedIsReadDirectly) {
  Pair pair;
  pair.Add(GetParam(), 5000, 1);
  ASSERT_EQ(pair.Take(Arguments()), TX_OK);
  EXPECT_TRUE(Vectors().empty());
  pair.ExpectEqual();
}

const Combo kNoMasters = {TX_BF16, TX_NONE, TX_BF16, TX_BF16, TX_BF16};

INSTANTIATE_TEST_SUITE_P(Adamw, ReadAhead,
                         testing::Values(kF32, kBf16, kRemainder, kBlocks, kNoMasters, kBlocksAndMasters),
                         [](const auto &info) { return adamw_call::Name(info.param); });

}  // namespace
