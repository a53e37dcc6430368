// tx_cuda_bucket_accumulate must have the CPU's bits.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <vector>

#include "csrc/torch_ext_cuda.h"
#include "tests/core/arrays.h"

namespace {

class Accumulate : public testing::TestWithParam<std::tuple<tx_dtype, tx_dtype, int>> {};

TEST_P(Accumulate, EqualsTheCpuBitForBit) {
  const auto [main_dtype, grad_dtype, misalign] = GetParam();
  std::vector<Array> ours, theirs, grads;
  for (const int64_t n : kSizes) {
    ours.emplace_back(main_dtype, n, misalign).FillBytes(3);
    theirs.emplace_back(main_dtype, n, misalign).FillBytes(3);
    grads.emplace_back(grad_dtype, n, misalign).FillBytes(4);
  }
  for (int64_t i = 0; main_dtype == TX_F32 && i < static_cast<int64_t>(ours.size()); i++) {
    ours[i].Fill(3);  // the payload of an fp32 NaN depends on the hardware
    theirs[i].Fill(3);
    grads[i].Fill(4);
  }
  std::vector<tx_tensor> to, reference, from;
  for (size_t i = 0; i < ours.size(); i++) {
    to.push_back(ours[i].tensor());
    reference.push_back(theirs[i].tensor());
    from.push_back(grads[i].tensor());
  }
  const int64_t n = static_cast<int64_t>(to.size());
  const tx_cuda_call call = TX_CUDA_CALL_INIT;
  emulated::world = emulated::World();
  EXPECT_OK([&](tx_error *error) { return tx_cuda_bucket_accumulate(n, to.data(), from.data(), &call, error); });
  EXPECT_OK([&](tx_error *error) { return tx_bucket_accumulate(n, reference.data(), from.data(), nullptr, error); });
  for (size_t i = 0; i < ours.size(); i++)
    EXPECT_EQ(ours[i].raw(), theirs[i].raw()) << kSizes[i] << " elements";
  EXPECT_EQ(emulated::world.launches, 1);
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Accumulate,
                         testing::Combine(testing::ValuesIn(kPlain), testing::ValuesIn(kPlain),
                                          testing::Values(0, 1, 2, 4, 8)),
                         [](const auto &info) {
                           return DtypeName(std::get<0>(info.param)) + "_" + DtypeName(std::get<1>(info.param)) +
                                  "_from_" + std::to_string(std::get<2>(info.param));
                         });

TEST(AccumulateMany, ThousandsOfTensorsTakeAFewLaunches) {
  std::vector<Array> mains, grads;
  std::vector<tx_tensor> to, from;
  for (int64_t i = 0; i < 1000; i++) {
    mains.emplace_back(TX_F32, i % 40, 0).Fill(1);
    grads.emplace_back(TX_BF16, i % 40, 0).Fill(2);
  }
  for (size_t i = 0; i < mains.size(); i++) {
    to.push_back(mains[i].tensor());
    from.push_back(grads[i].tensor());
  }
  const tx_cuda_call call = TX_CUDA_CALL_INIT;
  emulated::world = emulated::World();
  EXPECT_OK([&](tx_error *error) { return tx_cuda_bucket_accumulate(1000, to.data(), from.data(), &call, error); });
  EXPECT_LE(emulated::world.launches, 3);
  for (int64_t i = 0; i < 1000; i++) {
    Array expected(TX_F32, i % 40, 0);
    expected.Fill(1);
    for (int64_t j = 0; j < i % 40; j++)
      expected.Set(j, expected.Get(j) + grads[i].Get(j));
    ASSERT_EQ(mains[i].raw(), expected.raw()) << i;
  }
}

}  // namespace
