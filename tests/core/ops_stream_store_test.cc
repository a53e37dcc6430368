// tx_adamw with so many weights that weights with fp32 masters are written by non-temporal stores: the same bits, and
// no write outside the weights.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

extern "C" {
#include "csrc/ops/step.h"
}
#include "tests/core/adamw_call.h"
#include "tests/core/threads.h"

namespace {

using namespace adamw_call;

struct Place {
  int64_t n, past_line; /* offset of the weights from the start of a cache line */
};

const Place kPlaces[] = {{40001, 0}, {2500, 0}, {2500, 2}, {2500, 32}, {2048, 0}, {256, 0}, {129, 0}, {32, 0}, {31, 0}};

/* A parameter whose weights are at such an offset, between bytes that must not be written, and the expected result. */
struct Placed {
  static constexpr int64_t kLine = 64;
  static constexpr uint8_t kOthers = 0xa5;

  Placed(const Combo &combo, Place place)
      : ours(combo, place.n),
        theirs(combo, place.n),
        checksums((place.n + TX_SAMPLED - 1) / TX_SAMPLED * 8),
        memory(static_cast<size_t>(ours.param.size() + 4 * kLine), kOthers) {
    ours.Fill(static_cast<uint32_t>(place.n));
    theirs.Fill(static_cast<uint32_t>(place.n));
    uint8_t *line = memory.data() + kLine;
    line += (kLine - static_cast<int64_t>(reinterpret_cast<uintptr_t>(line) % kLine)) % kLine;
    weights = line + place.past_line;
    std::memcpy(weights, ours.param.data(), static_cast<size_t>(ours.param.size()));
    tx_error error;
    int64_t none = 0;
    EXPECT_EQ(Look(TX_CHECKSUM_RENEW, &none, &error), TX_OK) << error.message;
  }
  tx_tensor Weights() { return {weights, ours.n, ours.combo.param, 0}; }
  tx_tensor Checksums() { return {checksums.data(), checksums.size() / 8, TX_I64, 0}; }
  tx_status Look(int32_t mode, int64_t *stale, tx_error *error) {
    const tx_tensor at = Weights(), master = T(ours.master, TX_F32), seen = Checksums();
    return tx_master_checksum(1, &at, &master, &seen, mode, {stale, 1, TX_I64, 0}, nullptr, error);
  }
  std::vector<uint8_t> Around() const {
    const uint8_t *begin = memory.data(), *end = weights + ours.param.size();
    std::vector<uint8_t> around(begin, begin + (weights - begin));
    around.insert(around.end(), end, begin + memory.size());
    return around;
  }

  Param ours, theirs;
  Bytes checksums;
  std::vector<uint8_t> memory;
  uint8_t *weights = nullptr;
};

class PastCaches : public testing::TestWithParam<Combo> {};

void StepsAsTheReferenceDoes(const Combo &combo) {
  /* makes the call large; its result is not checked */
  static Param filler({TX_BF16, TX_NONE, TX_BF16, TX_U8, TX_U8}, TX_STEP_CACHED);
  Threads threads(2);
  std::vector<Placed> placed;
  placed.reserve(std::size(kPlaces));
  for (const Place &place : kPlaces)
    placed.emplace_back(combo, place);
  for (int step = 0; step < 2; step++) {
    Call call;
    std::vector<tx_tensor> checksums;
    for (Placed &p : placed) {
      call.Add(p.ours);
      call.params.back() = p.Weights();
      checksums.push_back(p.Checksums());
    }
    call.Add(filler);
    checksums.push_back({nullptr, 0, TX_NONE, 0});
    call.Args();
    call.args.checksums = checksums.data();
    tx_error error;
    ASSERT_EQ(tx_adamw(&call.args, threads.parallel(), &error), TX_OK) << error.message;
    for (Placed &p : placed) {
      ReferenceStep(p.theirs, call, 7);
      std::memcpy(p.ours.param.data(), p.weights, static_cast<size_t>(p.ours.param.size()));
      ASSERT_EQ(p.ours.State(), p.theirs.State()) << p.ours.n << " at " << (p.weights - p.memory.data());
      const auto around = p.Around();
      EXPECT_EQ(std::count(around.begin(), around.end(), Placed::kOthers), static_cast<int64_t>(around.size()));
      int64_t stale = 0;
      ASSERT_EQ(p.Look(TX_CHECKSUM_CHECK, &stale, &error), TX_OK) << error.message;
      EXPECT_EQ(stale, 0) << "checksums are not those of the weights, " << p.ours.n;
    }
  }
}

TEST_P(PastCaches, BitsAreThoseOfTheReferenceWhereverTheWeightsLie) {
  for (int32_t isa = 0; tx_isa_name(isa); isa++) {
    SCOPED_TRACE(tx_isa_name(isa));
    ASSERT_EQ(tx_isa_select(tx_isa_name(isa), nullptr), TX_OK);
    StepsAsTheReferenceDoes(GetParam());
  }
  ASSERT_EQ(tx_isa_select(nullptr, nullptr), TX_OK);
}

INSTANTIATE_TEST_SUITE_P(Combos, PastCaches,
                         testing::Values(kBf16, Combo{TX_BF16, TX_F32, TX_F32, TX_F32, TX_F32},
                                         Combo{TX_BF16, TX_F32, TX_BF16, TX_F32, TX_F32},
                                         Combo{TX_BF16, TX_F32, TX_BF16, TX_U8, TX_U8},
                                         Combo{TX_BF16, TX_F32, TX_F32, TX_U8, TX_U8},
                                         Combo{TX_BF16, TX_F32, TX_F16, TX_BF16, TX_U8},
                                         Combo{TX_F16, TX_F32, TX_F16, TX_F16, TX_F16}),
                         [](const auto &info) { return Name(info.param); });

}  // namespace
