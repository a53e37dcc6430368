// tx_bucket_pack, _unpack and _accumulate: gradients into a wire buffer and back. Also the bits of all tx_bucket_*
// operators.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

extern "C" {
#include "csrc/math/block_scale.h"
#include "csrc/math/dither.h"
}
#include "tests/core/arrays.h"
#include "tests/core/blocks.h"
#include "tests/core/bucket_layouts.h"
#include "tests/core/same_bits.h"
#include "tests/core/wires.h"

namespace {

const float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

// -- pack -------------------------------------------------------------------------------------------------------

struct PackCase {
  Layout layout;
  tx_dtype wire;
};

std::vector<PackCase> PackCases() {
  std::vector<PackCase> cases;
  for (const Layout &layout : kLayouts) {
    for (tx_dtype wire : kWires)
      cases.push_back({Filled(layout), wire});
  }
  return cases;
}

uint32_t Threshold(int32_t rounding, uint64_t seed, int64_t step, int64_t i) {
  if (rounding == TX_DITHERED) return tx_lattice_base(seed, 0, TX_LANE_WIRE, step, i);
  return tx_stochastic(tx_stochastic_key(seed, 0, TX_LANE_WIRE, step), static_cast<uint32_t>(i));
}

// The expected bucket, encoded element by element with csrc/math's scalar functions.
Wire ExpectedBucket(const std::vector<float> &values, tx_dtype wire, int32_t rounding, uint64_t seed, int64_t step) {
  const int64_t n = static_cast<int64_t>(values.size());
  Wire bucket(wire, n);
  if (wire != TX_U8) {
    for (int64_t i = 0; i < n; i++)
      bucket.data.Set(i, values[i]);
    return bucket;
  }
  for (int64_t at = 0; at < n; at += TX_BLOCK) {
    const int32_t count = static_cast<int32_t>(std::min<int64_t>(TX_BLOCK, n - at));
    uint32_t u[TX_BLOCK];
    for (int32_t i = 0; i < count; i++)
      u[i] = Threshold(rounding, seed, step, at + i);
    uint32_t codes[TX_BLOCK];
    bucket.scales.data()[at / TX_BLOCK] =
        EncodeBlock(tx_block_e4m3(), values.data() + at, count, rounding == TX_NEAREST ? nullptr : u, codes);
    for (int32_t i = 0; i < count; i++)
      bucket.data.SetWord(at + i, static_cast<uint8_t>(codes[i]));
  }
  return bucket;
}

class EveryLayout : public testing::TestWithParam<PackCase> {};

TEST_P(EveryLayout, E3_PacksWhatIsThereAndZeroesWhatIsNot) {
  const auto &[layout, wire] = GetParam();
  for (int32_t rounding : {TX_NEAREST, TX_DITHERED, TX_STOCHASTIC}) {
    std::vector<Array> grads;
    std::vector<float> values(static_cast<size_t>(layout.bucket), 0.0f);
    for (size_t i = 0; i < layout.numels.size(); i++) {
      grads.emplace_back(Array(kPlain[i % 3], layout.numels[i]).Fill(static_cast<uint32_t>(i), 1e-2f));
      for (int64_t j = 0; j < layout.numels[i]; j++)
        values[layout.offsets[i] + j] = grads[i].Get(j);
    }
    std::vector<tx_tensor> tensors;
    for (Array &grad : grads)
      tensors.push_back(grad.tensor());
    Wire bucket(wire, layout.bucket);
    bucket.data.FillBytes(1); /* left over from an earlier use */
    bucket.scales.FillBytes(2);
    tx_bucket_pack_args args = TX_BUCKET_PACK_ARGS_INIT;
    args.n = static_cast<int64_t>(tensors.size());
    args.grads = tensors.data();
    args.offsets = layout.offsets.data();
    args.bucket = bucket.data.tensor();
    args.scales = bucket.scales_or_none();
    args.seed = 77;
    args.step = 5;
    args.rounding = rounding;
    tx_error error = {};
    Threads threads(3);
    ASSERT_EQ(tx_bucket_pack(&args, threads.parallel(), &error), TX_OK) << error.message;
    EXPECT_TRUE(bucket == ExpectedBucket(values, wire, rounding, 77, 5)) << "rounding " << rounding;

    /* Unpack into tensors of other dtypes; unused parameters are skipped. */
    std::vector<Array> back;
    std::vector<tx_tensor> back_tensors;
    for (size_t i = 0; i < layout.numels.size(); i++)
      back.emplace_back(kPlain[(i + 1) % 3], layout.numels[i]);
    for (Array &array : back)
      back_tensors.push_back(array.tensor());
    ASSERT_EQ(tx_bucket_unpack(args.bucket, args.scales, args.n, args.offsets, back_tensors.data(), threads.parallel(),
                               &error),
              TX_OK)
        << error.message;
    for (size_t i = 0; i < back.size(); i++) {
      Array expected(back[i].dtype(), back[i].size());
      for (int64_t j = 0; j < expected.size(); j++)
        expected.Set(j, bucket.Get(layout.offsets[i] + j));
      ASSERT_EQ(back[i].raw(), expected.raw()) << i;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Layouts, EveryLayout, testing::ValuesIn(PackCases()), [](const auto &info) {
  return std::string(info.param.layout.name) + "_" + DtypeName(info.param.wire);
});

// Offsets have to be at block edges only if the bucket has blocks.
TEST(Pack, PlainBucketsTakeAnyOffset) {
  Array a(TX_F32, {1, 2, 3}), b(TX_BF16, {4, 5}), bucket(TX_BF16, 8);
  const tx_tensor grads[] = {a.tensor(), b.tensor()};
  const int64_t offsets[] = {1, 5};
  tx_bucket_pack_args args = TX_BUCKET_PACK_ARGS_INIT;
  args.n = 2;
  args.grads = grads;
  args.offsets = offsets;
  args.bucket = bucket.FillBytes(3).tensor();
  EXPECT_OK([&](tx_error *e) { return tx_bucket_pack(&args, nullptr, e); });
  EXPECT_EQ(bucket.raw(), Array(TX_BF16, {0, 1, 2, 3, 0, 4, 5, 0}).raw());
}

TEST(Pack, SameDtypeKeepsEveryBit) {
  for (tx_dtype dtype : kPlain) {
    Array grad(dtype, 5000);
    grad.FillBytes(8); /* includes signalling NaNs and NaN payloads */
    EXPECT_EQ(Pack(grad, dtype).data.bytes(), grad.bytes()) << DtypeName(dtype);
  }
}

// In 8 bits the whole block becomes NaN: the position is lost, but not the fact.
TEST(Pack, ANonFiniteGradientStaysLoudOnTheWire) {
  for (tx_dtype wire : kWires) {
    Array grad(TX_F32, 300);
    grad.Fill(1).Set(130, kInf);
    const Wire bucket = Pack(grad, wire);
    EXPECT_FALSE(std::isfinite(bucket.Get(130))) << DtypeName(wire);
    EXPECT_TRUE(std::isfinite(bucket.Get(127)) && std::isfinite(bucket.Get(256))) << DtypeName(wire);
  }
}

struct Packing {
  std::vector<tx_tensor> grads;
  std::vector<int64_t> offsets;
  tx_bucket_pack_args args = TX_BUCKET_PACK_ARGS_INIT;
};

TEST(Pack, RefusesWithAMessageAndWritesNothing) {
  Array grad(TX_F32, 200), wide(TX_F64, 10), bucket(TX_U8, 512), scales(TX_U8, 4), plain(TX_BF16, 512);
  struct Case {
    const char *says;
    tx_status status;
    void (*spoil)(Packing &);
  };
  for (const Case &c : std::vector<Case>{
           {"args.size is 3", TX_ERROR_INVALID_ARGUMENT, [](Packing &p) { p.args.size = 3; }},
           {"rounding is 5", TX_ERROR_ILLEGAL_VALUE, [](Packing &p) { p.args.rounding = 5; }},
           {"n is -1", TX_ERROR_INVALID_ARGUMENT, [](Packing &p) { p.args.n = -1; }},
           {"offsets is NULL", TX_ERROR_INVALID_ARGUMENT, [](Packing &p) { p.args.offsets = nullptr; }},
           {"grads is NULL", TX_ERROR_INVALID_ARGUMENT, [](Packing &p) { p.args.grads = nullptr; }},
           {"grads[1] is", TX_ERROR_DTYPE, [](Packing &p) { p.grads[1].dtype = TX_I16; }},
           {"offsets[1] is 200; in a uint8 bucket multiples of 128", TX_ERROR_ILLEGAL_VALUE,
            [](Packing &p) { p.offsets[1] = 200; }},
           {"offsets[1] is 384, and with the 200 elements of grads[1]", TX_ERROR_SHAPE,
            [](Packing &p) { p.offsets[1] = 384; }},
           {"offsets[0] is -128", TX_ERROR_SHAPE, [](Packing &p) { p.offsets[0] = -128; }},
           {"offsets[1] is 9223372036854775807", TX_ERROR_SHAPE, [](Packing &p) { p.offsets[1] = INT64_MAX; }},
           {"offsets[1] is 128 and grads[0] ends at 200", TX_ERROR_OVERLAP, [](Packing &p) { p.offsets[1] = 128; }},
           {"offsets[1] is 0 and grads[0] ends at 456", TX_ERROR_OVERLAP,
            [](Packing &p) {
              p.offsets = {256, 0};
            }},
           {"bucket is", TX_ERROR_DTYPE, [](Packing &p) { p.args.scales = None(); }},
           {"bucket is", TX_ERROR_DTYPE, [](Packing &p) { p.args.bucket.dtype = TX_F32; }},
           {"bucket is", TX_ERROR_DTYPE, [](Packing &p) { p.args.bucket.dtype = TX_F16; }},
           {"scales is 3 elements", TX_ERROR_SHAPE, [](Packing &p) { p.args.scales.numel = 3; }},
           {"scales is 4 elements", TX_ERROR_SHAPE, [](Packing &p) { p.args.scales.dtype = TX_I16; }},
           {"grads[0] and bucket[0] share memory", TX_ERROR_OVERLAP,
            [](Packing &p) {
              p.grads[0].data = p.args.bucket.data;
              p.grads[0].numel = 4;
            }},
           {"bucket[0] and scales[0] share memory", TX_ERROR_OVERLAP,
            [](Packing &p) { p.args.scales.data = static_cast<char *>(p.args.bucket.data) + 100; }},
       }) {
    SCOPED_TRACE(c.says);
    Packing p;
    p.grads = {grad.tensor(), grad.tensor()};
    p.offsets = {0, 256};
    p.args.n = 2;
    p.args.grads = p.grads.data();
    p.args.offsets = p.offsets.data();
    p.args.bucket = bucket.tensor();
    p.args.scales = scales.tensor();
    c.spoil(p);
    if (p.args.offsets) p.args.offsets = p.offsets.data();
    ExpectRefused([&](tx_error *e) { return tx_bucket_pack(&p.args, nullptr, e); }, c.status, c.says,
                  {&bucket, &scales});
  }
}

TEST(Unpack, RefusesWithAMessageAndWritesNothing) {
  Array a(TX_F32, 200), b(TX_F32, 200), half(TX_I16, 200), bucket(TX_BF16, 512), codes(TX_U8, 512);
  const tx_tensor good[] = {a.tensor(), b.tensor()}, twice[] = {a.tensor(), a.tensor()};
  const tx_tensor dtype[] = {a.tensor(), half.tensor()}, inside[] = {a.tensor(), {bucket.data(), 4, TX_F32, 0}};
  const int64_t offsets[] = {0, 256}, late[] = {0, 400};
  struct Case {
    const char *says;
    tx_status status;
    tx_tensor bucket;
    const int64_t *offsets;
    const tx_tensor *tensors;
  };
  for (const Case &c : {Case{"tensors[1] is", TX_ERROR_DTYPE, bucket.tensor(), offsets, dtype},
                        {"elements of tensors[1]", TX_ERROR_SHAPE, bucket.tensor(), late, good},
                        {"offsets is NULL", TX_ERROR_INVALID_ARGUMENT, bucket.tensor(), nullptr, good},
                        {"tensors is NULL", TX_ERROR_INVALID_ARGUMENT, bucket.tensor(), offsets, nullptr},
                        {"bucket is", TX_ERROR_DTYPE, codes.tensor(), offsets, good},
                        {"tensors[0] and tensors[1] share", TX_ERROR_OVERLAP, bucket.tensor(), offsets, twice},
                        {"bucket[0] and tensors[1] share", TX_ERROR_OVERLAP, bucket.tensor(), offsets, inside}}) {
    SCOPED_TRACE(c.says);
    ExpectRefused([&](tx_error *e) { return tx_bucket_unpack(c.bucket, None(), 2, c.offsets, c.tensors, nullptr, e); },
                  c.status, c.says, {&a, &b, &half, &bucket, &codes});
  }
}

// -- accumulate -------------------------------------------------------------------------------------------------

TEST(Accumulate, E3_AddsInFp32AndRoundsOnce) {
  for (tx_dtype main_dtype : kPlain) {
    for (tx_dtype grad_dtype : kPlain) {
      SCOPED_TRACE(DtypeName(main_dtype) + " += " + DtypeName(grad_dtype));
      std::vector<Array> mains, grads, expected;
      std::vector<tx_tensor> main_tensors, grad_tensors;
      for (int64_t n : kSizes) {
        mains.emplace_back(Array(main_dtype, n).Fill(1));
        grads.emplace_back(Array(grad_dtype, n).Fill(2));
        expected.emplace_back(main_dtype, n);
        for (int64_t i = 0; i < n; i++)
          expected.back().Set(i, mains.back().Get(i) + grads.back().Get(i));
      }
      for (size_t i = 0; i < mains.size(); i++) {
        main_tensors.push_back(mains[i].tensor());
        grad_tensors.push_back(grads[i].tensor());
      }
      Threads threads(2);
      tx_error error = {};
      ASSERT_EQ(tx_bucket_accumulate(static_cast<int64_t>(mains.size()), main_tensors.data(), grad_tensors.data(),
                                     threads.parallel(), &error),
                TX_OK)
          << error.message;
      for (size_t i = 0; i < mains.size(); i++)
        EXPECT_EQ(mains[i].raw(), expected[i].raw()) << mains[i].size();
    }
  }
}

TEST(Accumulate, RefusesWithAMessageAndWritesNothing) {
  Array a(TX_F32, 200), b(TX_BF16, 100), g(TX_F32, 200), h(TX_BF16, 100), wide(TX_F64, 100);
  const tx_tensor mains[] = {a.tensor(), b.tensor()}, grads[] = {g.tensor(), h.tensor()};
  const tx_tensor shorter[] = {g.tensor(), {h.data(), 99, TX_BF16, 0}}, wide_grads[] = {g.tensor(), wide.tensor()};
  const tx_tensor wide_mains[] = {a.tensor(), wide.tensor()}, same[] = {a.tensor(), {a.data(), 100, TX_BF16, 0}};
  struct Case {
    const char *says;
    tx_status status;
    const tx_tensor *mains, *grads;
  };
  for (const Case &c : {Case{"main_grads[1] has 100 elements and grads[1] has 99", TX_ERROR_SHAPE, mains, shorter},
                        {"grads[1] is", TX_ERROR_DTYPE, mains, wide_grads},
                        {"main_grads[1] is", TX_ERROR_DTYPE, wide_mains, grads},
                        {"main_grads is NULL", TX_ERROR_INVALID_ARGUMENT, nullptr, grads},
                        {"grads is NULL", TX_ERROR_INVALID_ARGUMENT, mains, nullptr},
                        {"main_grads[0] and main_grads[1] share", TX_ERROR_OVERLAP, same, grads},
                        {"main_grads[0] and grads[0] share", TX_ERROR_OVERLAP, mains, same}}) {
    SCOPED_TRACE(c.says);
    ExpectRefused([&](tx_error *e) { return tx_bucket_accumulate(2, c.mains, c.grads, nullptr, e); }, c.status, c.says,
                  {&a, &b, &g, &h, &wide});
  }
}

// -- all of them ------------------------------------------------------------------------------------------------

TEST(Bucket, BitsAreTheSameEverywhere) {
  ExpectSameBits([](const Caller &caller) {
    Outputs outputs;
    for (tx_dtype wire : kWires) {
      Array a(TX_F32, 40000), b(TX_BF16, 3001);
      a.Fill(1, 1e-6f).Set(17, 1e-40f);
      b.Fill(2).Set(3000, kNan);
      const tx_tensor grads[] = {a.tensor(), b.tensor()};
      const int64_t offsets[] = {128, 40960};
      Wire bucket(wire, 45000);
      tx_bucket_pack_args args = TX_BUCKET_PACK_ARGS_INIT;
      args.n = 2;
      args.grads = grads;
      args.offsets = offsets;
      args.bucket = bucket.data.tensor();
      args.scales = bucket.scales_or_none();
      args.seed = 3;
      args.step = 9;
      caller([&](const tx_parallel *parallel, tx_error *error) { return tx_bucket_pack(&args, parallel, error); });
      outputs.push_back(bucket.data.bytes());
      outputs.push_back(bucket.scales.bytes());
      for (tx_dtype other : kPlain) {
        Array main(other, 45000), back(other, 45000);
        main.Fill(3, 1e-38f);
        main.FillBytes(4);
        const tx_tensor to = main.tensor(), from = back.tensor();
        const int64_t start = 0;
        caller([&](const tx_parallel *parallel, tx_error *error) {
          return tx_bucket_unpack(args.bucket, args.scales, 1, &start, &from, parallel, error);
        });
        caller([&](const tx_parallel *parallel, tx_error *error) {
          return tx_bucket_accumulate(1, &to, &from, parallel, error);
        });
        Counts stats = NoStats();
        Array shard(other, 45000);
        shard.FillBytes(5);
        const tx_tensor chunks[] = {args.bucket, args.bucket, args.bucket},
                        scales[] = {args.scales, args.scales, args.scales};
        tx_bucket_reduce_args reduce = TX_BUCKET_REDUCE_ARGS_INIT;
        reduce.n = 3;
        reduce.chunks = chunks;
        reduce.scales = wire == TX_U8 ? scales : nullptr;
        reduce.shard = shard.tensor();
        reduce.stats = stats.tensor();
        reduce.scale = 1.0 / 3;
        reduce.accumulate = 1;
        caller(
            [&](const tx_parallel *parallel, tx_error *error) { return tx_bucket_reduce(&reduce, parallel, error); });
        for (const Array *array : {&main, &back, &shard, static_cast<Array *>(&stats)})
          outputs.push_back(array->bytes());
      }
    }
    return outputs;
  });
}

}  // namespace
