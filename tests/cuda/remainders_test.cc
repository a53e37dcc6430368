// tx_cuda_master_encode and tx_cuda_master_decode must have the CPU's bits.
#include "tests/cuda/both.h"

namespace {

struct Lists {
  std::vector<Array> masters, params, remainders;
  // Any bytes: every kind of NaN, subnormals, ties.
  Lists(int64_t misalign, uint32_t seed) {
    for (const int64_t n : kSizes) {
      masters.emplace_back(TX_F32, n, misalign).FillBytes(seed);
      params.emplace_back(TX_BF16, n, misalign).FillBytes(seed + 1);
      remainders.emplace_back(TX_I16, n, misalign).FillBytes(seed + 2);
      for (int64_t i = 0; i < n; i += 7) { /* the upper tie, and remainders of zeros */
        masters.back().SetWord(i, masters.back().Word<uint32_t>(i) << 16 | 0x8000u);
        params.back().SetWord(i, static_cast<uint16_t>(i % 2 ? 0x8000 : 0));
        if (i % 3 == 0) remainders.back().SetWord(i, static_cast<int16_t>(-32768));
      }
    }
  }
  int64_t n() const { return static_cast<int64_t>(masters.size()); }
};

class EveryAlignment : public testing::TestWithParam<int> {};

TEST_P(EveryAlignment, EncodesAsTheCpuDoes) {
  Arrange();
  Lists ours(GetParam(), 1), theirs(GetParam(), 1);
  EXPECT_OK([&](tx_error *e) {
    return tx_cuda_master_encode(ours.n(), Tensors(ours.masters).data(), Tensors(ours.params).data(),
                                 Tensors(ours.remainders).data(), Call(), e);
  });
  EXPECT_OK([&](tx_error *e) {
    return tx_master_encode(theirs.n(), Tensors(theirs.masters).data(), Tensors(theirs.params).data(),
                            Tensors(theirs.remainders).data(), nullptr, e);
  });
  ExpectSameBytes(ours.params, theirs.params);
  ExpectSameBytes(ours.remainders, theirs.remainders);
  ExpectSameBytes(ours.masters, theirs.masters);
  EXPECT_EQ(emulated::world.launches, 1);
}

TEST_P(EveryAlignment, DecodesAsTheCpuDoes) {
  Arrange();
  Lists ours(GetParam(), 4), theirs(GetParam(), 4);
  EXPECT_OK([&](tx_error *e) {
    return tx_cuda_master_decode(ours.n(), Tensors(ours.params).data(), Tensors(ours.remainders).data(),
                                 Tensors(ours.masters).data(), Call(), e);
  });
  EXPECT_OK([&](tx_error *e) {
    return tx_master_decode(theirs.n(), Tensors(theirs.params).data(), Tensors(theirs.remainders).data(),
                            Tensors(theirs.masters).data(), nullptr, e);
  });
  ExpectSameBytes(ours.masters, theirs.masters);
  EXPECT_EQ(emulated::world.launches, 1);
}
INSTANTIATE_TEST_SUITE_P(From, EveryAlignment, testing::Values(0, 1, 2, 4, 8), testing::PrintToStringParamName());

TEST(Remainders, RefusesAsTheCpuDoes) {
  Arrange();
  Array master(TX_F32, 100), param(TX_BF16, 100), remainder(TX_I16, 100), half(TX_F16, 100);
  const tx_tensor m = master.tensor(), p = param.tensor(), r = remainder.tensor(), h = half.tensor();
  tx_tensor shorter = r, inside = r;
  shorter.numel = 99;
  inside.data = static_cast<char *>(p.data) + 100;
  struct Case {
    const tx_tensor *masters, *params, *remainders;
  };
  for (const Case &c : {Case{&m, &h, &r},
                        {&h, &p, &r},
                        {&m, &p, &h},
                        {&m, &p, &shorter},
                        {&m, nullptr, &r},
                        {&m, &p, nullptr},
                        {nullptr, &p, &r}}) {
    const std::vector<const Array *> all = {&master, &param, &remainder, &half};
    ExpectRefusedAlike(
        [&](tx_error *e) { return tx_cuda_master_encode(1, c.masters, c.params, c.remainders, Call(), e); },
        [&](tx_error *e) { return tx_master_encode(1, c.masters, c.params, c.remainders, nullptr, e); }, all);
    ExpectRefusedAlike(
        [&](tx_error *e) { return tx_cuda_master_decode(1, c.params, c.remainders, c.masters, Call(), e); },
        [&](tx_error *e) { return tx_master_decode(1, c.params, c.remainders, c.masters, nullptr, e); }, all);
  }
  ExpectRefusedAlike([&](tx_error *e) { return tx_cuda_master_encode(1, &m, &p, &inside, Call(), e); },
                     [&](tx_error *e) { return tx_master_encode(1, &m, &p, &inside, nullptr, e); },
                     {&param, &remainder});
}

}  // namespace
