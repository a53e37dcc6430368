// tx_cuda_muon_update's optional outputs must have the CPU's bits: changes, bounds, distances, averages, sums.
#include <random>

#include "tests/cuda/muon_update_pair.h"

namespace {

enum class EmaFormat { kNone, kBf16, k24, kF32 };

struct Asked {
  bool changed = true, moved = true, distances = true, health = true;
  EmaFormat ema = EmaFormat::k24;
};

// One side with its optional outputs.
struct Noting : Update {
  std::vector<Array> changed, moved, distances, emas, lows, healths;
  std::vector<tx_tensor> left[6];

  Noting(const Weight &w, tx_dtype update, int64_t misalign, const Asked &asked = {}) : Update(w, update, misalign) {
    const bool averages = asked.ema != EmaFormat::kNone && (w.param == TX_F32 || w.master != TX_NONE);
    for (const Array &param : params) {
      const int64_t n = param.size();
      changed.emplace_back(TX_U8, asked.changed ? (n + 7) / 8 : 0, misalign);
      moved.emplace_back(TX_BF16, asked.moved ? tx_blocks(n) : 0, misalign);
      distances.emplace_back(TX_U8, asked.distances ? (n + 1) / 2 : 0, misalign);
      emas.emplace_back(asked.ema == EmaFormat::kF32 ? TX_F32 : TX_BF16, averages ? n : 0, misalign);
      lows.emplace_back(TX_U8, averages && asked.ema == EmaFormat::k24 ? n : 0, misalign);
      healths.emplace_back(TX_I64, asked.health && n ? TX_HEALTH_LEN : 0, 0);
    }
    args.ema_decay = 0.9;
  }
  const tx_muon_update_args *Args() {
    std::vector<Array> *const arrays[] = {&changed, &moved, &distances, &emas, &lows, &healths};
    for (size_t i = 0; i < std::size(arrays); i++)
      left[i] = Tensors(*arrays[i]);
    args.changed = left[0].data(), args.moved = left[1].data(), args.distances = left[2].data();
    args.emas = left[3].data(), args.ema_lows = left[4].data(), args.healths = left[5].data();
    return Update::Args();
  }
  // Cuts the tensors into matrices of any size, including one of a single element. Some have the rates of the matrix
  // before.
  void CutIntoMatrices(uint32_t seed) {
    std::mt19937 random(seed);
    parts.clear(), rates.clear();
    for (size_t t = 0; t < params.size(); t++) {
      const int64_t most = random() % 2 ? 1 + random() % 3 : 1 + random() % 900;
      for (int64_t begin = 0; begin < params[t].size(); begin += 1 + random() % most) {
        parts.push_back({static_cast<int64_t>(t), begin});
        const bool same = random() % 3 == 0 && rates.size() > 0;
        rates.push_back(same ? rates.back() : tx_muon_rate{1e-3 * static_cast<double>(random() % 30), 1e-4});
      }
    }
  }
  int64_t Unbounded() const {
    int64_t count = 0;
    for (const Array &of : moved)
      for (int64_t b = 0; b < of.size(); b++)
        count += std::isinf(of.Get(b));
    return count;
  }
};

void ExpectSame(const Noting &ours, const Noting &theirs) {
  ExpectSameUpdates(ours, theirs);
  ExpectSameBytes(ours.changed, theirs.changed);
  ExpectSameBytes(ours.moved, theirs.moved);
  ExpectSameBytes(ours.distances, theirs.distances);
  ExpectSameBytes(ours.emas, theirs.emas);
  ExpectSameBytes(ours.lows, theirs.lows);
  ExpectSameBytes(ours.healths, theirs.healths);
}

// Both sides take a step with updates of the given size.
void Step(Noting *ours, Noting *theirs, uint32_t seed, float size = 1.0f) {
  for (Noting *u : {ours, theirs})
    for (size_t i = 0; i < u->updates.size(); i++)
      u->updates[i].Fill(seed + static_cast<uint32_t>(i), size);
  EXPECT_OK([&](tx_error *e) { return tx_cuda_muon_update(ours->Args(), &ours->call, e); });
  EXPECT_OK([&](tx_error *e) { return tx_muon_update(theirs->Args(), nullptr, e); });
}

class EveryNoting : public testing::TestWithParam<std::tuple<Weight, tx_dtype>> {};

TEST_P(EveryNoting, LeavesTheCpusBitsBehind) {
  const auto &[weight, update] = GetParam();
  for (const int64_t misalign : kMisaligned) {
    for (const int32_t external : {TX_EXTERNAL_IGNORE, TX_EXTERNAL_RESYNC}) {
      SCOPED_TRACE(testing::Message() << "misaligned by " << misalign << ", external writes " << external);
      Arrange(kGrids[static_cast<size_t>(misalign)]);
      Noting ours(weight, update, misalign), theirs(weight, update, misalign);
      for (uint32_t step = 0; step < 4; step++) {
        for (Noting *u : {&ours, &theirs}) {
          u->args.on_external_write = step == 0 ? TX_EXTERNAL_IGNORE : external;  // the first step makes the checksums
          u->args.ema_every = misalign == 1 ? 2 : 1;
          if (step == 2) u->Spoil();
        }
        Step(&ours, &theirs, step, step == 3 ? 1e-4f : 1.0f);
        ExpectSame(ours, theirs);
        if (HasFailure()) return;
      }
      EXPECT_EQ(ours.resynced[0] > 0, weight.master != TX_NONE && external == TX_EXTERNAL_RESYNC);
      const bool known = weight.master == TX_NONE || (weight.master == TX_F32 && external == TX_EXTERNAL_IGNORE);
      EXPECT_EQ(ours.Unbounded() > 0, !known) << "others wrote to weights";
      EXPECT_EQ(emulated::world.synchronisations, 0);
    }
  }
}

TEST_P(EveryNoting, OfMatricesThatAreCutAnyhow) {
  const auto &[weight, update] = GetParam();
  for (uint32_t seed = 0; seed < 6; seed++) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Arrange(kGrids[seed % 3]);
    Noting ours(weight, update, seed % 3), theirs(weight, update, seed % 3);
    ours.CutIntoMatrices(seed), theirs.CutIntoMatrices(seed);
    for (uint32_t step = 0; step < 2; step++)
      Step(&ours, &theirs, 10 * seed + step);
    ExpectSame(ours, theirs);
    if (HasFailure()) return;
  }
}

TEST_P(EveryNoting, EachAlone) {
  const auto &[weight, update] = GetParam();
  const Asked alone[] = {
      {true, false, false, false, EmaFormat::kNone},  {true, true, false, false, EmaFormat::kNone},
      {true, false, true, false, EmaFormat::kNone},   {false, false, false, true, EmaFormat::kNone},
      {false, false, false, false, EmaFormat::kBf16}, {false, false, false, false, EmaFormat::kF32},
  };
  for (const Asked &asked : alone) {
    Arrange();
    Noting ours(weight, update, 1, asked), theirs(weight, update, 1, asked);
    for (uint32_t step = 0; step < 2; step++)
      Step(&ours, &theirs, step);
    ExpectSame(ours, theirs);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Muon, EveryNoting,
                         testing::Combine(testing::ValuesIn(kWeights), testing::Values(TX_F32, TX_BF16)),
                         [](const auto &c) {
                           const Weight &w = std::get<0>(c.param);
                           return DtypeName(w.param) + "_" + DtypeName(w.master) + "_" +
                                  DtypeName(std::get<1>(c.param));
                         });

TEST(Noting, TakesOneLaunchBesideCountingAndChecksums) {
  Arrange();
  Noting plain({TX_F32, TX_NONE}, TX_F32, 0, {false, false, false, false, EmaFormat::kNone}),
      noted({TX_F32, TX_NONE}, TX_F32, 0);
  const auto launches = [](Noting *of) {
    emulated::world.launches = 0;
    EXPECT_OK([&](tx_error *e) { return tx_cuda_muon_update(of->Args(), &of->call, e); });
    return emulated::world.launches;
  };
  EXPECT_EQ(launches(&noted), launches(&plain));
}

}  // namespace
