// tx_master_encode, _decode and _resync: fp32 masters as 16-bit remainders, and masters beside weights that somebody
// else wrote.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

extern "C" {
#include "csrc/math/remainder.h"
}
#include "tests/core/arrays.h"
#include "tests/core/same_bits.h"

namespace {

const float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<tx_tensor> Tensors(std::vector<Array> &arrays) {
  std::vector<tx_tensor> tensors;
  for (Array &array : arrays)
    tensors.push_back(array.tensor());
  return tensors;
}

tx_status Encode(std::vector<Array> &masters, std::vector<Array> &params, std::vector<Array> &remainders,
                 const tx_parallel *parallel = nullptr, tx_error *error = nullptr) {
  return tx_master_encode(static_cast<int64_t>(masters.size()), Tensors(masters).data(), Tensors(params).data(),
                          Tensors(remainders).data(), parallel, error);
}

tx_status Decode(std::vector<Array> &params, std::vector<Array> &remainders, std::vector<Array> &masters,
                 const tx_parallel *parallel = nullptr, tx_error *error = nullptr) {
  return tx_master_decode(static_cast<int64_t>(masters.size()), Tensors(params).data(), Tensors(remainders).data(),
                          Tensors(masters).data(), parallel, error);
}

// -- remainders -------------------------------------------------------------------------------------------------

TEST(Remainder, G4_TheWeightIsTheNearestAndThePairTheMaster) {
  std::vector<Array> masters, params, remainders, back;
  for (int64_t n : kSizes) {
    masters.emplace_back(Array(TX_F32, n).FillBytes(static_cast<uint32_t>(n)));
    params.emplace_back(TX_BF16, n);
    remainders.emplace_back(TX_I16, n);
    back.emplace_back(TX_F32, n);
  }
  Threads threads(3);
  ASSERT_EQ(Encode(masters, params, remainders, threads.parallel()), TX_OK);
  ASSERT_EQ(Decode(params, remainders, back, threads.parallel()), TX_OK);
  int64_t exact = 0, lower = 0;
  for (size_t k = 0; k < masters.size(); k++) {
    EXPECT_TRUE(params[k].GuardsIntact() && remainders[k].GuardsIntact() && back[k].GuardsIntact());
    for (int64_t i = 0; i < masters[k].size(); i++) {
      const float master = masters[k].Word<float>(i);
      ASSERT_EQ(params[k].Word<uint16_t>(i), tx_bf16_from_f32(master));
      ASSERT_EQ(remainders[k].Word<int16_t>(i), tx_remainder_encode(master));
      const uint32_t was = masters[k].Word<uint32_t>(i), is = back[k].Word<uint32_t>(i);
      if (std::isnan(master)) {
        ASSERT_EQ(is, 0x7fc00000u);
        continue;
      }
      exact += is == was;
      lower += is == was - 1 && (was & 0xffffu) == 0x8000u; /* the upper tie of an even weight */
      ASSERT_TRUE(is == was || (is == was - 1 && (was & 0xffffu) == 0x8000u)) << std::hex << was;
    }
  }
  EXPECT_GT(exact, 1000);
  EXPECT_LE(lower, 10);
}

TEST(Remainder, G4_EncodeAfterDecodeIsTheIdentityOnPairs) {
  const int64_t n = 40000;
  std::vector<Array> params, remainders, masters, params2, remainders2;
  params.emplace_back(TX_BF16, n);
  masters.emplace_back(TX_F32, n);
  masters[0].FillBytes(7);
  remainders.emplace_back(TX_I16, n);
  params2.emplace_back(TX_BF16, n);
  remainders2.emplace_back(TX_I16, n);
  ASSERT_EQ(Encode(masters, params, remainders), TX_OK); /* pairs as they are stored */
  ASSERT_EQ(Decode(params, remainders, masters), TX_OK);
  ASSERT_EQ(Encode(masters, params2, remainders2), TX_OK);
  EXPECT_EQ(params2[0].bytes(), params[0].bytes());
  EXPECT_EQ(remainders2[0].bytes(), remainders[0].bytes());
}

TEST(Remainder, RefusesWithAMessageAndWritesNothing) {
  Array master(TX_F32, 100), param(TX_BF16, 100), remainder(TX_I16, 100), half(TX_F16, 100);
  const tx_tensor m = master.tensor(), p = param.tensor(), r = remainder.tensor(), h = half.tensor();
  tx_tensor shorter = r, inside = r;
  shorter.numel = 99;
  inside.data = static_cast<char *>(p.data) + 100;
  struct Case {
    const char *says;
    tx_status status;
    const tx_tensor *masters, *params, *remainders;
  };
  for (const Case &c : {Case{"params[0] is", TX_ERROR_DTYPE, &m, &h, &r},
                        {"masters[0] is", TX_ERROR_DTYPE, &h, &p, &r},
                        {"remainders[0] is", TX_ERROR_DTYPE, &m, &p, &h},
                        {"remainders[0] has 99 elements", TX_ERROR_SHAPE, &m, &p, &shorter},
                        {"params is NULL", TX_ERROR_INVALID_ARGUMENT, &m, nullptr, &r},
                        {"remainders is NULL", TX_ERROR_INVALID_ARGUMENT, &m, &p, nullptr},
                        {"masters is NULL", TX_ERROR_INVALID_ARGUMENT, nullptr, &p, &r}}) {
    SCOPED_TRACE(c.says);
    const std::vector<const Array *> all = {&master, &param, &remainder, &half};
    ExpectRefused([&](tx_error *e) { return tx_master_encode(1, c.masters, c.params, c.remainders, nullptr, e); },
                  c.status, c.says, all);
    ExpectRefused([&](tx_error *e) { return tx_master_decode(1, c.params, c.remainders, c.masters, nullptr, e); },
                  c.status, c.says, all);
  }
  ExpectRefused([&](tx_error *e) { return tx_master_encode(1, &m, &p, &inside, nullptr, e); }, TX_ERROR_OVERLAP,
                "params[0] and remainders[0] share memory", {&master, &param, &remainder});
}

// -- resync -----------------------------------------------------------------------------------------------------

struct Row {
  tx_dtype param, master;
};
const std::vector<Row> kRows = {{TX_BF16, TX_F32}, {TX_F16, TX_F32}, {TX_BF16, TX_I16}};

// One resync; returns what it counted on top of 100.
int64_t Resync(Array &param, Array &master, int32_t force, const tx_parallel *parallel = nullptr) {
  Counts changed({100});
  const tx_tensor p = param.tensor(), m = master.tensor();
  tx_error error = {};
  EXPECT_EQ(tx_master_resync(1, &p, &m, force, changed.tensor(), parallel, &error), TX_OK) << error.message;
  EXPECT_TRUE(param.GuardsIntact() && master.GuardsIntact() && changed.GuardsIntact());
  return changed[0] - 100;
}

class EveryFp32Master : public testing::TestWithParam<tx_dtype> {};

// D4: a full resume keeps masters bit for bit.
TEST_P(EveryFp32Master, D4_MastersThatRoundToTheirWeightsStay) {
  for (int64_t n : kSizes) {
    Array master(TX_F32, n), param(GetParam(), n);
    master.FillBytes(static_cast<uint32_t>(n)); /* NaN, Inf and subnormals too */
    for (int64_t i = 0; i < n; i++)
      param.Set(i, master.Get(i));
    const auto before = master.raw();
    EXPECT_EQ(Resync(param, master, 0), 0) << n;
    EXPECT_EQ(master.raw(), before) << n;
  }
}

// D2, D6, D7: a weight that was written becomes its master, and only there.
TEST_P(EveryFp32Master, D7_AMasterFollowsAWeightThatWasWritten) {
  for (int64_t n : {1, 127, 128, 129, 1025, 40000}) {
    Array master(TX_F32, n), param(GetParam(), n);
    master.Fill(1);
    for (int64_t i = 0; i < n; i++)
      param.Set(i, master.Get(i));
    int64_t written = 0;
    std::vector<float> expected;
    for (int64_t i = 0; i < n; i++)
      expected.push_back(master.Get(i));
    for (int64_t i = 0; i < n; i += 37) {
      param.Set(i, param.Get(i) * 1.5f + 1.0f);
      expected[i] = param.Get(i);
      written++;
    }
    Threads threads(2);
    EXPECT_EQ(Resync(param, master, 0, threads.parallel()), written) << n;
    for (int64_t i = 0; i < n; i++)
      ASSERT_EQ(master.Get(i), expected[i]) << i;
    EXPECT_EQ(Resync(param, master, 0), 0) << "a second time";
  }
}

// D3, D5: forced, every master is its weight.
TEST_P(EveryFp32Master, D3_ForcedEveryMasterIsItsWeight) {
  const int64_t n = 2000;
  Array master(TX_F32, n), param(GetParam(), n);
  master.Fill(1);
  int64_t inexact = 0;
  for (int64_t i = 0; i < n; i++) {
    param.Set(i, master.Get(i));
    inexact += param.Get(i) != master.Get(i);
  }
  EXPECT_EQ(Resync(param, master, 1), inexact);
  for (int64_t i = 0; i < n; i++)
    ASSERT_EQ(master.Get(i), param.Get(i)) << i;
  EXPECT_EQ(Resync(param, master, 1), 0) << "a second time";
}

TEST_P(EveryFp32Master, ZerosAreEqualAndNansAre) {
  struct Case {
    const char *name;
    float param, master;
    bool changes;
  };
  for (const Case &c : {Case{"signs_of_zero", -0.0f, 0.0f, false},
                        {"tiny_master_under_zero", 0.0f, -1e-44f, false},
                        {"nan", kNan, -kNan, false},
                        {"inf", kInf, kInf, false},
                        {"rounds_to_inf", kInf, std::numeric_limits<float>::max(), false},
                        {"inf_signs", kInf, -kInf, true},
                        {"nan_weight", kNan, 1.0f, true},
                        {"nan_master", 1.0f, kNan, true},
                        {"next_weight", 1.0f, 1.01f, true}}) {
    Array param(GetParam(), {c.param}), master(TX_F32, {c.master});
    const auto before = master.raw();
    EXPECT_EQ(Resync(param, master, 0), c.changes) << c.name;
    EXPECT_EQ(master.raw() != before, c.changes) << c.name;
  }
}

// NaN equals NaN whatever the sign and payload, in 16 bits as in 32; the smallest NaN is next to Inf.
TEST_P(EveryFp32Master, AnyNanWeightIsThatOfAnyNanMaster) {
  const uint16_t infinity = GetParam() == TX_BF16 ? 0x7f80 : 0x7c00;
  for (int code : {infinity + 1, 0x7fff, 0x8001 + infinity, 0xffff}) {
    const auto weight = static_cast<uint16_t>(code);
    for (uint32_t bits : {0x7f800001u, 0x7fc00000u, 0xffffffffu}) {
      Array param(GetParam(), 1), master(TX_F32, 1);
      param.SetWord(0, weight);
      master.SetWord(0, bits);
      EXPECT_EQ(Resync(param, master, 0), 0) << std::hex << weight << " " << bits;
      EXPECT_EQ(master.Word<uint32_t>(0), bits);
    }
    Array param(GetParam(), 1), master(TX_F32, {kInf});
    param.SetWord(0, weight);
    EXPECT_EQ(Resync(param, master, 0), 1) << std::hex << weight;
    EXPECT_TRUE(std::isnan(master.Get(0)));
  }
}
INSTANTIATE_TEST_SUITE_P(Dtypes, EveryFp32Master, testing::Values(TX_BF16, TX_F16),
                         [](const auto &info) { return DtypeName(info.param); });

TEST(Resync, D6_RemaindersAreZeroedOnlyByForce) {
  const int64_t n = 40000;
  Array param(TX_BF16, n), remainder(TX_I16, n);
  param.Fill(1);
  remainder.FillBytes(2);
  int64_t not_zero = 0;
  for (int64_t i = 0; i < n; i++)
    not_zero += remainder.Word<int16_t>(i) != 0;
  const auto before = remainder.raw();
  EXPECT_EQ(Resync(param, remainder, 0), 0);
  EXPECT_EQ(remainder.raw(), before);
  EXPECT_EQ(Resync(param, remainder, 1), not_zero);
  EXPECT_EQ(remainder.bytes(), std::vector<uint8_t>(2 * n, 0));
}

TEST(Resync, CountsPerTensorAndPassesOverWhatHasNoMaster) {
  Array p0(TX_BF16, 20000), m0(TX_F32, 20000), p1(TX_F32, 10), p2(TX_F16, 5), m2(TX_F32, 5), p3(TX_BF16, 0);
  m0.Set(19999, 1.0f);
  m2.Set(0, 1.0f);
  m2.Set(4, 2.0f);
  const tx_tensor params[] = {p0.tensor(), p1.tensor(), p2.tensor(), p3.tensor()};
  const tx_tensor masters[] = {m0.tensor(), None(), m2.tensor(), None()};
  Counts changed({0, 10, 20, 30});
  Threads threads(3);
  ASSERT_EQ(tx_master_resync(4, params, masters, 0, changed.tensor(), threads.parallel(), nullptr), TX_OK);
  EXPECT_EQ(changed.raw(), Counts({1, 10, 22, 30}).raw());
  m0.Set(0, 1.0f);
  ASSERT_EQ(tx_master_resync(4, params, masters, 0, None(), threads.parallel(), nullptr), TX_OK); /* not counted */
  EXPECT_EQ(m0.Get(0), 0.0f);
  EXPECT_EQ(tx_master_resync(0, nullptr, nullptr, 0, None(), nullptr, nullptr), TX_OK);
}

TEST(Master, BitsAreTheSameEverywhere) {
  ExpectSameBits([](const Caller &caller) {
    std::vector<Array> masters, params, remainders, back;
    masters.emplace_back(Array(TX_F32, 50001).FillBytes(1));
    params.emplace_back(TX_BF16, 50001);
    remainders.emplace_back(TX_I16, 50001);
    back.emplace_back(TX_F32, 50001);
    caller([&](const tx_parallel *p, tx_error *e) { return Encode(masters, params, remainders, p, e); });
    caller([&](const tx_parallel *p, tx_error *e) { return Decode(params, remainders, back, p, e); });
    Outputs outputs = {params[0].bytes(), remainders[0].bytes(), back[0].bytes()};
    for (int32_t mode : {TX_RESYNC_STALE, TX_RESYNC_ALL, TX_RESYNC_COUNT}) {
      for (const Row &row : kRows) {
        Array param(row.param, 50001), master(row.master, 50001);
        param.FillBytes(2);
        master.FillBytes(3);
        Counts changed({0});
        const tx_tensor p = param.tensor(), m = master.tensor();
        caller([&](const tx_parallel *parallel, tx_error *error) {
          return tx_master_resync(1, &p, &m, mode, changed.tensor(), parallel, error);
        });
        outputs.push_back(master.bytes());
        outputs.push_back(changed.bytes());
      }
    }
    return outputs;
  });
}

TEST(Resync, RefusesWithAMessageAndWritesNothing) {
  Array param(TX_BF16, 100), master(TX_F32, 100), half(TX_F16, 100), remainder(TX_I16, 100), plain(TX_F32, 100);
  Counts changed({5}), two({1, 2});
  const tx_tensor p = param.tensor(), m = master.tensor(), h = half.tensor(), r = remainder.tensor(),
                  f = plain.tensor();
  tx_tensor shorter = m;
  shorter.numel = 99;
  struct Case {
    const char *says;
    tx_status status;
    const tx_tensor *params, *masters;
    int32_t mode;
    tx_tensor changed;
  };
  const tx_tensor c1 = changed.tensor();
  for (const Case &c :
       {Case{"mode is 3", TX_ERROR_ILLEGAL_VALUE, &p, &m, 3, c1},
        {"params is NULL", TX_ERROR_INVALID_ARGUMENT, nullptr, &m, 0, c1},
        {"masters is NULL", TX_ERROR_INVALID_ARGUMENT, &p, nullptr, 0, c1},
        {"masters[0] has 99 elements and params[0] has 100", TX_ERROR_SHAPE, &p, &shorter, 0, c1},
        {"masters[0] is fp16 with params[0] of bf16; fp32 or int16 is legal there", TX_ERROR_DTYPE, &p, &h, 0, c1},
        {"int16 with params[0] of fp16; fp32 is legal there", TX_ERROR_DTYPE, &h, &r, 0, c1},
        {"fp32 with params[0] of fp32; none is legal there", TX_ERROR_DTYPE, &f, &m, 0, c1},
        {"changed has 2 elements; 1", TX_ERROR_SHAPE, &p, &m, 0, two.tensor()},
        {"share memory", TX_ERROR_OVERLAP, &p, &m, 0, {master.data() + 8, 1, TX_I64, 0}}}) {
    SCOPED_TRACE(c.says);
    ExpectRefused([&](tx_error *e) { return tx_master_resync(1, c.params, c.masters, c.mode, c.changed, nullptr, e); },
                  c.status, c.says, {&param, &master, &half, &remainder, &plain, &changed, &two});
  }
}

}  // namespace
