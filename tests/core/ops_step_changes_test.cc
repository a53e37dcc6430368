// What tx_adamw records about the weights that it changes (changed, moved, distances), compared with the weights before
// and after, in plain C++ and double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "tests/core/adamw_call.h"
#include "tests/core/threads.h"

extern "C" {
#include "csrc/math/weight_change.h"
}

namespace {

using namespace adamw_call;

int64_t Ordered(tx_dtype dtype, const uint8_t *p, int64_t i) {
  const int64_t size = Size(dtype), sign = int64_t{1} << (8 * size - 1);
  int64_t bits = 0;
  std::memcpy(&bits, p + size * i, static_cast<size_t>(size));
  return bits < sign ? bits : sign - 1 - bits; /* -0 is one below 0 */
}

/* The master of each weight, as a double. */
std::vector<double> Masters(Param &p) {
  std::vector<double> found;
  for (int64_t i = 0; i < p.n; i++)
    found.push_back(p.Master(i));
  return found;
}

/* A parameter, what its steps record, and what they should record. */
struct Traced {
  Param p;
  Bytes changed, moved, distance, checksums;
  std::vector<bool> should_change;
  std::vector<int64_t> should_be_away; /* 8: was further than 7 once */
  std::vector<double> should_move;

  Traced(const Combo &c, int64_t n, int64_t misalign)
      : p(c, n, misalign),
        changed((n + 7) / 8, misalign),
        moved(2 * ((n + 127) / 128), misalign),
        distance((n + 1) / 2, misalign),
        should_change(static_cast<size_t>(n)),
        should_be_away(static_cast<size_t>(n)),
        should_move(static_cast<size_t>((n + 127) / 128)) {
    p.Fill(static_cast<uint32_t>(n));
  }

  void Step(double lr, const tx_parallel *parallel, uint32_t seed) {
    p.FillGrad(seed);
    const std::vector<double> before = Masters(p);
    Bytes weights = p.param;
    Call call;
    call.group.lr = lr;
    call.group.weight_decay = 0;
    call.Add(p);
    const tx_tensor marks[] = {T(changed, TX_U8), T(moved, TX_BF16), T(distance, TX_U8)};
    tx_adamw_args args = *call.Args();
    args.changed = &marks[0], args.moved = &marks[1], args.distances = &marks[2];
    tx_error error;
    ASSERT_EQ(tx_adamw(&args, parallel, &error), TX_OK) << error.message;
    const std::vector<double> after = Masters(p);
    std::vector<double> most(should_move.size());
    for (int64_t i = 0; i < p.n; i++) {
      const int64_t by = Ordered(p.combo.param, p.param.data(), i) - Ordered(p.combo.param, weights.data(), i);
      if (by) should_change[i] = true;
      int64_t &away = should_be_away[i];
      if (away != 8) away = std::llabs(away + by) > 7 || std::llabs(by) > 7 ? 8 : away + by;
      most[i / 128] = std::max(most[i / 128], std::fabs(after[i] - before[i]));
    }
    for (size_t b = 0; b < most.size(); b++)
      should_move[b] += most[b];
  }

  void ExpectRight(int steps) {
    for (int64_t i = 0; i < 8 * changed.size(); i++)
      ASSERT_EQ((changed.data()[i / 8] >> (i % 8)) & 1, i < p.n && should_change[i]) << i << " of " << p.n;
    for (int64_t i = 0; i < 2 * distance.size(); i++) {
      const int found = (distance.data()[i / 2] >> (4 * (i % 2))) & 15;
      const int64_t want = i < p.n ? should_be_away[i] : 0;
      ASSERT_EQ(found >= 8 ? found - 16 : found, want == 8 ? -8 : want) << i << " of " << p.n;
    }
    for (size_t b = 0; b < should_move.size(); b++) {
      const double bound = Get(TX_BF16, moved.data(), static_cast<int64_t>(b));
      ASSERT_GE(bound, should_move[b]) << b;
      ASSERT_LE(bound, should_move[b] * (1 + steps / 127.0)) << b; /* one ulp for each addition */
    }
  }
  std::vector<std::vector<uint8_t>> Left() const {
    auto all = p.State();
    for (const Bytes *b : {&changed, &moved, &distance})
      all.push_back(b->copy());
    return all;
  }
};

std::vector<Combo> Rows() {
  std::vector<Combo> rows;
#define ROW(i, P, M, ...) rows.push_back({TX_##P, TX_##M, TX_BF16, TX_BF16, TX_BF16});
  TX_FOR_EACH_WEIGHT(ROW, )
#undef ROW
  rows.push_back(kBlocks);
  rows.push_back({TX_BF16, TX_F32, TX_F32, TX_U8, TX_F16});
  return rows;
}

class EveryRow : public testing::TestWithParam<Combo> {};

TEST_P(EveryRow, ChangesAreNamedOnEveryInstructionSetAndNumberOfThreads) {
  for (const double lr : {3e-2, 1e-4, 0.0}) {
    for (const int64_t n : {1, 7, 127, 129, 1030, 2 * 16384 + 333}) {
      std::vector<std::vector<uint8_t>> first;
      for (int32_t isa = 0; tx_isa_name(isa); isa++) {
        ASSERT_EQ(tx_isa_select(tx_isa_name(isa), nullptr), TX_OK);
        for (const int64_t count : {1, 3}) {
          if (count > 1 && n < 16384) continue;
          Threads threads(count);
          Traced t(GetParam(), n, isa % 2);
          for (uint32_t step = 0; step < 4; step++)
            t.Step(lr, threads.parallel(), 10 + step);
          SCOPED_TRACE(std::string(tx_isa_name(isa)) + ", lr " + std::to_string(lr));
          t.ExpectRight(4);
          if (first.empty()) first = t.Left();
          ASSERT_TRUE(t.Left() == first) << n << ", threads " << count;
        }
      }
    }
  }
  ASSERT_EQ(tx_isa_select(nullptr, nullptr), TX_OK);
}

// Recording changes does not change the step.
TEST_P(EveryRow, StatesAreThoseOfAStepThatNobodyAsks) {
  Traced traced(GetParam(), 40001, 1);
  Param alone(GetParam(), 40001, 1);
  alone.Fill(40001);
  for (uint32_t step = 0; step < 3; step++) {
    traced.Step(1e-2, nullptr, 10 + step);
    alone.FillGrad(10 + step);
    Call call;
    call.group.weight_decay = 0;
    call.Add(alone);
    ASSERT_EQ(tx_adamw(call.Args(), nullptr, nullptr), TX_OK);
  }
  EXPECT_EQ(traced.p.State(), alone.State());
}

TEST_P(EveryRow, NumbersThatAreNoneAreNamedAndNotBounded) {
  if (GetParam().param == TX_F32) return; /* the bits of an fp32 NaN are not promised */
  std::vector<std::vector<uint8_t>> first;
  for (int32_t isa = 0; tx_isa_name(isa); isa++) {
    ASSERT_EQ(tx_isa_select(tx_isa_name(isa), nullptr), TX_OK);
    Traced t(GetParam(), 1500, 0);
    const float odd[] = {NAN, INFINITY, -INFINITY};
    Call call;
    for (int64_t i = 0; i < 3; i++)
      tx_store(t.p.grad.data(), 300 * i, t.p.combo.grad, odd[i]);
    const Bytes before = t.p.param;
    call.Add(t.p);
    const tx_tensor marks[] = {T(t.changed, TX_U8), T(t.moved, TX_BF16)};
    tx_adamw_args args = *call.Args();
    args.changed = &marks[0], args.moved = &marks[1];
    ASSERT_EQ(tx_adamw(&args, nullptr, nullptr), TX_OK);
    for (int64_t i = 0; i < t.p.n; i++) {
      const bool same = std::memcmp(t.p.param.data() + 2 * i, before.raw.data() + 2 * i, 2) == 0;
      ASSERT_EQ((t.changed.data()[i / 8] >> (i % 8)) & 1, !same) << i;
    }
    for (int64_t b = 0; b < 12; b++)
      EXPECT_EQ(std::isinf(Get(TX_BF16, t.moved.data(), b)), b == 0 || b == 2 || b == 4) << b;
    if (first.empty()) first = t.Left();
    EXPECT_TRUE(t.Left() == first) << tx_isa_name(isa);
  }
  ASSERT_EQ(tx_isa_select(nullptr, nullptr), TX_OK);
}

INSTANTIATE_TEST_SUITE_P(Weights, EveryRow, testing::ValuesIn(Rows()),
                         [](const auto &info) { return Name(info.param); });

// Blocks with weights that were written from outside have no bound. With remainders those are the 1024 weights of a
// checksum, whether the step resyncs or ignores the write; with fp32 masters, the whole parameter if the step resyncs.
TEST(StepChanges, OfWeightsThatOthersWroteNobodyKnowsHowFar) {
  for (const Combo &c : {kRemainder, kBlocks, kBf16}) {
    for (const int32_t external : {TX_EXTERNAL_RESYNC, TX_EXTERNAL_IGNORE}) {
      for (int32_t isa = 0; tx_isa_name(isa); isa++) {
        ASSERT_EQ(tx_isa_select(tx_isa_name(isa), nullptr), TX_OK);
        const int64_t n = 2 * 4096 + 1500;
        Traced t(c, n, 0);
        Bytes checksums(8 * ((n + 1023) / 1024));
        Call call;
        call.Add(t.p);
        const int64_t per = c.master == TX_I16 ? TX_CHECKSUM : TX_SAMPLED;
        const tx_tensor seen = {checksums.data(), (n + per - 1) / per, TX_I64, 0};
        const tx_tensor none = {nullptr, 0, TX_NONE, 0};
        ASSERT_EQ(tx_master_checksum(1, call.params.data(), call.masters.data(), &seen, TX_CHECKSUM_RENEW, none,
                                     nullptr, nullptr),
                  TX_OK);
        for (const int64_t i : {int64_t{4096}, n - 3}) /* both are in samples */
          t.p.param.data()[2 * i] ^= 1;
        const tx_tensor marks[] = {T(t.changed, TX_U8), T(t.moved, TX_BF16)};
        tx_adamw_args args = *call.Args();
        args.changed = &marks[0], args.moved = &marks[1], args.checksums = &seen, args.on_external_write = external;
        tx_error error;
        ASSERT_EQ(tx_adamw(&args, nullptr, &error), TX_OK) << error.message;
        for (int64_t b = 0; b < (n + 127) / 128; b++) {
          const bool beside_remainders = c.master == TX_I16 && (b / 8 == 4 || b / 8 == 9);
          const bool taken_over = c.master == TX_F32 && external == TX_EXTERNAL_RESYNC;
          EXPECT_EQ(std::isinf(Get(TX_BF16, t.moved.data(), b)), beside_remainders || taken_over)
              << b << " " << Name(c) << " " << tx_isa_name(isa);
        }
      }
    }
  }
  ASSERT_EQ(tx_isa_select(nullptr, nullptr), TX_OK);
}

TEST(StepChanges, OtherLengthsAndDtypesAreRefused) {
  Traced t(kBf16, 300, 0);
  Call call;
  call.Add(t.p);
  const auto refused = [&](tx_tensor changed, tx_tensor moved, const char *says) {
    tx_adamw_args args = *call.Args();
    args.changed = &changed, args.moved = &moved;
    tx_error error;
    EXPECT_EQ(tx_adamw(&args, nullptr, &error), TX_ERROR_SHAPE);
    EXPECT_NE(std::string(error.message).find(says), std::string::npos) << error.message;
  };
  const tx_tensor changed = T(t.changed, TX_U8), moved = T(t.moved, TX_BF16), none = {nullptr, 0, TX_NONE, 0};
  refused({changed.data, changed.numel - 1, TX_U8, 0}, moved, "changed[0] is 37 elements of uint8; none, or 38");
  refused(changed, {moved.data, moved.numel, TX_F16, 0}, "moved[0] is 3 elements of fp16");
  refused(none, moved, "without changed[0]");
}

// Every bf16 pattern, compared with its two neighbours as a number.
TEST(StepChanges, DistancesAreThoseOfOrderedNumbers) {
  for (uint32_t bits = 0; bits < 0x7f80; bits++) {
    const int32_t here = tx_ordered_16(static_cast<uint16_t>(bits));
    ASSERT_EQ(tx_ordered_16(static_cast<uint16_t>(bits + 1)), here + 1);
    ASSERT_EQ(tx_ordered_16(static_cast<uint16_t>(bits | 0x8000)), -1 - here);
  }
  for (int32_t by = -40; by <= 40; by++)
    ASSERT_EQ(tx_ulps_between(100, 100 + by), std::abs(by) <= 7 ? by : -8);
  EXPECT_EQ(tx_ulps_between(INT32_MIN, INT32_MAX), -8);
  EXPECT_EQ(tx_ulps_between(INT32_MAX, INT32_MIN), -8);
  for (int32_t a = -8; a <= 7; a++) {
    for (int32_t b = -8; b <= 7; b++) {
      const bool beyond = a == -8 || b == -8 || std::abs(a + b) > 7;
      ASSERT_EQ(tx_distance_added(a, b), beyond ? -8 : a + b);
      ASSERT_EQ(tx_distance_of(tx_distance_pair(a, b), 0), a);
      ASSERT_EQ(tx_distance_of(tx_distance_pair(a, b), 1), b);
    }
  }
}

}  // namespace
