// tx_cuda_bucket_pack and tx_cuda_bucket_unpack must have the CPU's bits.
#include "tests/core/bucket_layouts.h"
#include "tests/core/wires.h"
#include "tests/cuda/both.h"

namespace {

struct Packing {
  std::vector<Array> grads;
  std::vector<tx_tensor> tensors;
  Layout layout;
  tx_bucket_pack_args args = TX_BUCKET_PACK_ARGS_INIT;

  // Gradients of all dtypes. any_bytes: also NaN, Inf and subnormals.
  Packing(const Layout &l, int64_t misalign, bool any_bytes) : layout(l) {
    for (size_t i = 0; i < layout.numels.size(); i++) {
      grads.emplace_back(kPlain[i % 3], layout.numels[i], misalign);
      any_bytes ? grads[i].FillBytes(static_cast<uint32_t>(i)) : grads[i].Fill(static_cast<uint32_t>(i), 1e-2f);
    }
    tensors = Tensors(grads);
    args.n = static_cast<int64_t>(tensors.size());
    args.grads = tensors.data();
    args.offsets = layout.offsets.data();
    args.seed = 77;
    args.step = 5;
  }
  const tx_bucket_pack_args &Into(Wire &bucket, int32_t rounding) {
    args.bucket = bucket.data.tensor();
    args.scales = bucket.scales_or_none();
    args.rounding = rounding;
    return args;
  }
};

class EveryLayout : public testing::TestWithParam<std::tuple<Layout, tx_dtype, int>> {};

TEST_P(EveryLayout, PacksAndUnpacksAsTheCpuDoes) {
  const auto &[unfilled, wire, misalign] = GetParam();
  const Layout layout = Filled(unfilled);
  for (const bool any_bytes : {false, true}) {
    Packing packing(layout, misalign, any_bytes);
    for (const int32_t rounding : {TX_NEAREST, TX_DITHERED, TX_STOCHASTIC}) {
      if (rounding != TX_NEAREST && wire != TX_U8) continue; /* only these use the rounding */
      Arrange();
      Wire ours(wire, layout.bucket, misalign), theirs(wire, layout.bucket, misalign);
      ours.data.FillBytes(1); /* the contents of an earlier use */
      theirs.data.FillBytes(1);
      ours.scales.FillBytes(2);
      theirs.scales.FillBytes(2);
      EXPECT_OK([&](tx_error *e) { return tx_cuda_bucket_pack(&packing.Into(ours, rounding), Call(), e); });
      EXPECT_LE(emulated::world.launches, 1 + packing.args.n / 100);
      EXPECT_OK([&](tx_error *e) { return tx_bucket_pack(&packing.Into(theirs, rounding), nullptr, e); });
      ASSERT_EQ(ours.data.raw(), theirs.data.raw()) << "rounding " << rounding;
      ASSERT_EQ(ours.scales.raw(), theirs.scales.raw()) << "rounding " << rounding;
    }
    for (size_t shift = 0; shift < 3; shift++) {
      Arrange();
      Wire bucket(wire, layout.bucket, misalign);
      EXPECT_OK([&](tx_error *e) { return tx_bucket_pack(&packing.Into(bucket, TX_NEAREST), nullptr, e); });
      std::vector<Array> ours, theirs;
      for (size_t i = 0; i < layout.numels.size(); i++) {
        ours.emplace_back(kPlain[(i + shift) % 3], layout.numels[i], misalign);
        theirs.emplace_back(kPlain[(i + shift) % 3], layout.numels[i], misalign);
      }
      const std::vector<tx_tensor> to = Tensors(ours), reference = Tensors(theirs);
      EXPECT_OK([&](tx_error *e) {
        return tx_cuda_bucket_unpack(bucket.data.tensor(), bucket.scales_or_none(), packing.args.n,
                                     layout.offsets.data(), to.data(), Call(), e);
      });
      EXPECT_OK([&](tx_error *e) {
        return tx_bucket_unpack(bucket.data.tensor(), bucket.scales_or_none(), packing.args.n, layout.offsets.data(),
                                reference.data(), nullptr, e);
      });
      ExpectSameBytes(ours, theirs);
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Layouts, EveryLayout,
                         testing::Combine(testing::ValuesIn(kLayouts), testing::ValuesIn(kWires),
                                          testing::Values(0, 1)),
                         [](const auto &info) {
                           return std::string(std::get<0>(info.param).name) + "_" + DtypeName(std::get<1>(info.param)) +
                                  "_from_" + std::to_string(std::get<2>(info.param));
                         });

TEST(Pack, PlainBucketsTakeAnyOffset) {
  for (const tx_dtype wire : kPlain) {
    Packing packing({"odd", 3000, {1, 1001, 1031}, {999, 29, 1500}}, 0, true);
    Arrange();
    Wire ours(wire, 3000, 0), theirs(wire, 3000, 0);
    ours.data.FillBytes(1);
    theirs.data.FillBytes(1);
    EXPECT_OK([&](tx_error *e) { return tx_cuda_bucket_pack(&packing.Into(ours, TX_NEAREST), Call(), e); });
    EXPECT_OK([&](tx_error *e) { return tx_bucket_pack(&packing.Into(theirs, TX_NEAREST), nullptr, e); });
    EXPECT_EQ(ours.data.raw(), theirs.data.raw()) << DtypeName(wire);
  }
}

TEST(Pack, SameDtypeKeepsEveryBit) {
  for (const tx_dtype dtype : kPlain) {
    Array grad(dtype, 5000), bucket(dtype, 5000);
    grad.FillBytes(8); /* including NaN payloads and signalling NaNs */
    const tx_tensor tensor = grad.tensor();
    const int64_t offset = 0;
    tx_bucket_pack_args args = TX_BUCKET_PACK_ARGS_INIT;
    args.n = 1;
    args.grads = &tensor;
    args.offsets = &offset;
    args.bucket = bucket.tensor();
    EXPECT_OK([&](tx_error *e) { return tx_cuda_bucket_pack(&args, Call(), e); });
    EXPECT_EQ(bucket.raw(), grad.raw()) << DtypeName(dtype);
  }
}

TEST(Pack, RefusesAsTheCpuDoes) {
  Arrange();
  Array grad(TX_F32, 200), bucket(TX_U8, 512), scales(TX_U8, 4);
  for (void (*spoil)(tx_bucket_pack_args &, std::vector<tx_tensor> &, std::vector<int64_t> &) :
       std::vector<void (*)(tx_bucket_pack_args &, std::vector<tx_tensor> &, std::vector<int64_t> &)>{
           [](auto &a, auto &, auto &) { a.size = 3; }, [](auto &a, auto &, auto &) { a.rounding = 5; },
           [](auto &a, auto &, auto &) { a.grads = nullptr; }, [](auto &, auto &g, auto &) { g[1].dtype = TX_I16; },
           [](auto &, auto &, auto &o) { o[1] = 200; }, [](auto &, auto &, auto &o) { o[1] = 384; },
           [](auto &, auto &, auto &o) { o[1] = 128; }, [](auto &a, auto &, auto &) { a.scales = None(); },
           [](auto &a, auto &, auto &) { a.scales.numel = 3; },
           [](auto &a, auto &g, auto &) {
             g[0] = {a.bucket.data, 4, TX_F32, 0};
           }}) {
    std::vector<tx_tensor> grads = {grad.tensor(), grad.tensor()};
    std::vector<int64_t> offsets = {0, 256};
    tx_bucket_pack_args args = TX_BUCKET_PACK_ARGS_INIT;
    args.n = 2;
    args.grads = grads.data();
    args.offsets = offsets.data();
    args.bucket = bucket.tensor();
    args.scales = scales.tensor();
    spoil(args, grads, offsets);
    ExpectRefusedAlike([&](tx_error *e) { return tx_cuda_bucket_pack(&args, Call(), e); },
                       [&](tx_error *e) { return tx_bucket_pack(&args, nullptr, e); }, {&bucket, &scales});
  }
}

TEST(Unpack, RefusesAsTheCpuDoes) {
  Arrange();
  Array a(TX_F32, 200), b(TX_F32, 200), half(TX_I16, 200), bucket(TX_BF16, 512), codes(TX_U8, 512);
  const tx_tensor good[] = {a.tensor(), b.tensor()}, twice[] = {a.tensor(), a.tensor()};
  const tx_tensor dtype[] = {a.tensor(), half.tensor()};
  const int64_t offsets[] = {0, 256}, late[] = {0, 400};
  struct Case {
    tx_tensor bucket;
    const int64_t *offsets;
    const tx_tensor *tensors;
  };
  for (const Case &c : {Case{bucket.tensor(), offsets, dtype},
                        {bucket.tensor(), late, good},
                        {bucket.tensor(), nullptr, good},
                        {bucket.tensor(), offsets, nullptr},
                        {codes.tensor(), offsets, good},
                        {bucket.tensor(), offsets, twice}}) {
    ExpectRefusedAlike(
        [&](tx_error *e) { return tx_cuda_bucket_unpack(c.bucket, None(), 2, c.offsets, c.tensors, Call(), e); },
        [&](tx_error *e) { return tx_bucket_unpack(c.bucket, None(), 2, c.offsets, c.tensors, nullptr, e); },
        {&a, &b, &half, &bucket, &codes});
  }
}

}  // namespace
