// Random programs of steps over tensors whose blocks hold usual and unusual values side by side: a kernel that has a
// path for usual tiles (cuda/adamw_usual.h) changes between its paths from tile to tile and from round to round, and
// the bits must be the CPU's all the same. Copies into shared memory are late or early by the seed.
#include <iterator>

#include "tests/cuda/adamw_pair.h"

namespace {

using namespace adamw_pair;

constexpr int64_t kBlock = 128;

// What a block of 128 elements is given before a step.
enum class Kind {
  kUsual,
  kNoMomentum,   // exp_avg and gradients are zeros, exp_avg_sq is not
  kUntouched,    // exp_avg, exp_avg_sq and gradients are zeros
  kSparse,       // every third gradient is not zero
  kTiny,         // gradients near the least fp32
  kHuge,         // gradients near the largest bf16
  kNotANumber,   // one gradient is NaN
  kInfinite,     // one gradient is infinite
  kTie,          // one remainder is -32768, between two weights
  kZeroWeights,  // weights and masters are zeros
  kCount,
};

// A copy of a parameter on one side, changed as the program says.
struct Changes {
  Param &p;

  void Grad(int64_t i, float value) { tx_store(p.grad.data(), i, p.combo.grad, value); }
  static void Zero(Bytes &bytes, int64_t elements, int64_t begin, int64_t count) {
    const int64_t size = bytes.size() / elements;
    std::memset(bytes.data() + begin * size, 0, static_cast<size_t>(count * size));
  }
  void Apply(Kind kind, int64_t begin, int64_t count, uint32_t seed) {
    const int64_t one = begin + seed % count;
    if (kind == Kind::kNoMomentum || kind == Kind::kUntouched) {
      Zero(p.grad, p.n, begin, count);
      Zero(p.exp_avg, p.n, begin, count);
    }
    if (kind == Kind::kUntouched) Zero(p.exp_avg_sq, p.n, begin, count);
    for (int64_t i = begin; i < begin + count; i++) {
      if (kind == Kind::kSparse && i % 3 != 0) Grad(i, 0.0f);
      if (kind == Kind::kTiny) Grad(i, i % 2 ? 1e-38f : -1e-36f);
      if (kind == Kind::kHuge) Grad(i, i % 2 ? 1e38f : -1e37f);
    }
    if (kind == Kind::kNotANumber) Grad(one, std::nanf(""));
    if (kind == Kind::kInfinite) Grad(one, -INFINITY);
    const int16_t tie = -32768;
    if (kind == Kind::kTie && p.combo.master == TX_I16) std::memcpy(p.master.data() + 2 * one, &tie, sizeof tie);
    if (kind == Kind::kZeroWeights) {
      Zero(p.param, p.n, begin, count);
      if (p.combo.master != TX_NONE) Zero(p.master, p.n, begin, count);
    }
  }
};

class MixedTiles : public testing::TestWithParam<Combo> {
 protected:
  void SetUp() override { emulated::world = emulated::World(); }
  void TearDown() override { emulated::world = emulated::World(); }

  // Around a tile's length, and of several tiles per warp.
  static int64_t Length(std::mt19937 &random) {
    static const int64_t kAround[] = {256, 1023, 1024, 1025, 2048, 3072, 4097, 5000, 9216};
    return random() % 8 ? kAround[random() % std::size(kAround)] : 1 + random() % 1500;
  }

  // Gives some blocks of both sides something unusual; `rarely`: one block in so many.
  static void ChangeSome(Pair &pair, std::mt19937 &random, uint32_t rarely) {
    for (size_t k = 0; k < pair.ours.params.size(); k++) {
      const int64_t n = pair.ours.params[k].param.n;
      for (int64_t begin = 0; begin < n; begin += kBlock) {
        if (random() % rarely != 0) continue;
        const auto kind = static_cast<Kind>(random() % static_cast<uint32_t>(Kind::kCount));
        const uint32_t seed = random();
        for (Side *side : {&pair.ours, &pair.theirs})
          Changes{side->params[k].param}.Apply(kind, begin, std::min(kBlock, n - begin), seed);
      }
    }
  }
  // Some tensors have taken more steps than others: a warp needs other constants for them.
  static void CountSteps(Pair &pair, std::mt19937 &random) {
    for (size_t k = 0; k < pair.ours.params.size(); k++) {
      const float steps = random() % 2 ? 0.0f : static_cast<float>(random() % 2000);
      for (Side *side : {&pair.ours, &pair.theirs})
        std::memcpy(side->params[k].param.step.data(), &steps, sizeof steps);
    }
  }
  // Writes to weights outside the steps.
  static void WriteSome(Pair &pair, std::mt19937 &random) {
    for (size_t k = 0; k < pair.ours.params.size(); k++) {
      const int64_t at = static_cast<int64_t>(random() % static_cast<uint32_t>(pair.ours.params[k].param.n));
      if (random() % 2 || pair.ours.params[k].param.combo.param == TX_F32) continue;
      for (Side *side : {&pair.ours, &pair.theirs})
        side->params[k].Write(at);
    }
  }
};

TEST_P(MixedTiles, HaveTheCpusBits) {
  for (uint32_t seed = 1; seed <= 40; seed++) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    emulated::world = emulated::World();
    emulated::Use(1 + static_cast<int>(random() % 3), 1);
    emulated::world.copies = seed;
    Pair pair;
    const bool watched = random() % 4 != 0;
    const int tensors = 1 + static_cast<int>(random() % 5);
    for (int k = 0; k < tensors; k++)
      pair.Add(GetParam(), Length(random), random() % 8 == 0 ? 2 : 0, watched);
    CountSteps(pair, random);
    pair.Renew();
    tx_adamw_args args = Arguments();
    args.on_external_write = random() % 3 ? TX_EXTERNAL_RESYNC : TX_EXTERNAL_IGNORE;
    if (random() % 6 == 0) args.moment_rounding = random() % 2 ? TX_STOCHASTIC : TX_NEAREST;
    const tx_adamw_group usual = {1e-2, 0.9, 0.999, 1e-8, 0.1, 0, 1}, unusual = {1e-2, 0.9, 0.999, 1e-8, 0.1, 0, 0};
    const tx_adamw_group &group = random() % 6 ? usual : unusual;
    const uint32_t rarely = 2 + random() % 12;
    for (int step = 0; step < 4; step++) {
      pair.NewGradients(random(), 1e-2f);
      if (step > 0) ChangeSome(pair, random, rarely);
      if (random() % 3 == 0) WriteSome(pair, random);
      ASSERT_EQ(pair.Take(args, &group), TX_OK);
      pair.ExpectEqual();
      if (HasFailure()) return;
    }
  }
}

// A warp that has read ahead of a tile finds that it was written, steps it in another way, and reads ahead of its next
// one into the same places.
TEST_P(MixedTiles, WrittenOnesAreAmongManyOfAWarp) {
  constexpr int64_t kTile = 1024, kTiles = 96;
  const bool writes = GetParam().param != TX_F32;  // of fp32 weights there are no masters that could differ
  for (uint32_t seed = 1; seed <= 3; seed++) {
    SCOPED_TRACE(seed);
    emulated::world = emulated::World();
    emulated::Use(1, 1);
    emulated::world.copies = seed;
    Pair pair;
    pair.Add(GetParam(), kTiles * kTile, 0, true);
    pair.Renew();
    tx_adamw_args args = Arguments();
    args.on_external_write = TX_EXTERNAL_RESYNC;
    const tx_adamw_group group = {1e-2, 0.9, 0.999, 1e-8, 0.1, 0, 1};
    for (uint32_t step = 0; step < 3; step++) {
      pair.NewGradients(seed + step, 1e-2f);
      for (int64_t tile = 0; writes && step > 0 && tile < kTiles; tile += 1 + (tile + step) % 3)
        for (Side *side : {&pair.ours, &pair.theirs})
          side->params[0].Write(tile * kTile + tile);
      ASSERT_EQ(pair.Take(args, &group), TX_OK);
      pair.ExpectEqual();
      if (HasFailure()) return;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Adamw, MixedTiles,
                         testing::Values(kRemainder, kBlocks, kBf16, kF32, kBlocksAndMasters,
                                         Combo{TX_BF16, TX_I16, TX_F32, TX_BF16, TX_BF16},
                                         Combo{TX_BF16, TX_I16, TX_F32, TX_U8, TX_U8}),
                         [](const auto &info) { return adamw_call::Name(info.param); });

}  // namespace
