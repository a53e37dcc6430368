// tx_cuda_adamw must have the CPU's bits, for every combination of dtypes and roundings, and for many sizes, addresses,
// constants and grids.
#include "tests/cuda/adamw_pair.h"

namespace {

using namespace adamw_pair;

// Around the sizes of vectors, blocks, rounds and tiles.
const int64_t kLengths[] = {0, 1, 7, 8, 9, 127, 128, 129, 255, 257, 1023, 1025};

class EveryCombination : public testing::TestWithParam<Combo> {
 protected:
  void SetUp() override { emulated::world = emulated::World(); }
};

TEST_P(EveryCombination, HasTheCpusBitsInEveryRounding) {
  for (int rounding : {TX_NEAREST, TX_DITHERED, TX_STOCHASTIC}) {
    SCOPED_TRACE(rounding);
    Pair pair;
    // one aligned and one unaligned parameter
    pair.Add(GetParam(), 1300);
    pair.Add(GetParam(), 400, 1);
    tx_adamw_args args = Arguments();
    args.moment_rounding = args.weight_rounding = rounding;
    for (int step = 0; step < 3; step++) {
      pair.NewGradients(static_cast<uint32_t>(10 * step), step == 2 ? 1e-5f : 1e-2f);
      ASSERT_EQ(pair.Take(args), TX_OK);
    }
    pair.ExpectEqual();
  }
}

INSTANTIATE_TEST_SUITE_P(Adamw, EveryCombination, testing::ValuesIn(adamw_call::Combos()),
                         [](const auto &info) { return adamw_call::Name(info.param); });

class Kinds : public testing::TestWithParam<Combo> {
 protected:
  void SetUp() override { emulated::world = emulated::World(); }
};

TEST_P(Kinds, HaveTheCpusBitsAtEveryLengthAndAddressInOneLaunch) {
  Pair pair;
  for (const int64_t n : kLengths)
    for (const int64_t misalign : {0, 1, 2, 4, 8})
      pair.Add(GetParam(), n, misalign);
  pair.Add(GetParam(), 4096 + 5);
  for (int step = 0; step < 2; step++) {
    emulated::world.launches = 0;
    ASSERT_EQ(pair.Take(Arguments()), TX_OK);
    EXPECT_EQ(emulated::world.launches, 1);
    EXPECT_EQ(emulated::world.synchronisations, 0);
  }
  pair.ExpectEqual();
}

TEST_P(Kinds, HaveTheCpusBitsWithUnusualConstants) {
  const tx_adamw_group groups[] = {
      {1e-2, 0.9, 0.999, 1e-8, 0.1, 0, 0},  // weight decay in the gradient
      {1e-2, 0.9, 0.999, 1e-8, 0.1, 1, 1},  // maximize
      {1e-2, 0.3, 0.2, 1e-8, 0.0, 0, 1},    // the new value has the larger weight in the averages
      {1e-2, 0.0, 0.999, 1e-3, 0.1, 1, 0}, {1e-2, 0.9, 0.999, 0.0, 0.1, 0, 1},  // 0 / 0 in padding next to elements
  };
  for (const tx_adamw_group &group : groups) {
    Pair pair;
    pair.Add(GetParam(), 1300);
    pair.Add(GetParam(), 77, 2);
    for (int step = 0; step < 2; step++)
      ASSERT_EQ(pair.Take(Arguments(), &group), TX_OK);
    pair.ExpectEqual();
  }
}

// Values for which the fast arithmetic for the middle of fp32's range would be wrong: roots, quotients, scales.
TEST_P(Kinds, HaveTheCpusBitsFarFromOne) {
  for (const double eps : {1e-8, 0.0, 1e-30}) {
    const tx_adamw_group group = {1e-2, 0.9, 0.999, eps, 0.1, 0, 1};
    for (const float size : {1e-42f, 1e-30f, 1e-26f, 1e-22f, 1e-18f, 1e-15f, 1e6f, 1e12f, 1e18f, 1e30f}) {
      SCOPED_TRACE(testing::Message() << "eps " << eps << ", gradients about " << size);
      Pair pair;
      pair.Add(GetParam(), 600);
      for (int step = 0; step < 3; step++) {
        pair.NewGradients(static_cast<uint32_t>(step), step == 1 ? size / 16 : size);
        ASSERT_EQ(pair.Take(Arguments(), &group), TX_OK);
      }
      pair.ExpectEqual();
    }
  }
}

TEST_P(Kinds, HaveTheCpusBitsOnAnyGrid) {
  for (const int processors : {1, 2, 7}) {
    for (const int per_processor : {1, 3}) {
      emulated::Use(processors, per_processor);
      Pair pair;
      for (const int64_t n : {20000, 5, 3000})
        pair.Add(GetParam(), n);
      for (int step = 0; step < 2; step++)
        ASSERT_EQ(pair.Take(Arguments()), TX_OK);
      pair.ExpectEqual();
    }
  }
}

TEST_P(Kinds, ScaleAndClipFromTheDevice) {
  Pair pair;
  pair.Add(GetParam(), 1300);
  float scale = 1024.0f, clip = 0.3f, found = 0.0f;
  double wide = 3e-3;
  const tx_tensor lr = {&wide, 1, TX_F64, 0};
  tx_adamw_args args = Arguments();
  args.grad_scale = {&scale, 1, TX_F32, 0};
  args.clip_coef = {&clip, 1, TX_F32, 0};
  args.found_inf = {&found, 1, TX_F32, 0};
  args.lrs = &lr;
  for (int step = 0; step < 2; step++) {
    pair.NewGradients(static_cast<uint32_t>(step), 10.0f);
    ASSERT_EQ(pair.Take(args), TX_OK);
    wide = 1e-3;
  }
  pair.ExpectEqual();
}

// Blocks and thresholds are counted in the logical parameter.
TEST_P(Kinds, CutAtBlocksHaveTheBitsOfTheWhole) {
  Side whole, parts;
  const int64_t n = 2048 + 300, cuts[] = {0, 128, 1024 + 384, n};
  whole.Add(GetParam(), n);
  for (int step = 0; step < 2; step++) {
    Step once(whole, Arguments()), by_parts(whole, Arguments());
    Side before;
    before.params = whole.params;
    const tx_cuda_call call = TX_CUDA_CALL_INIT;
    ASSERT_EQ(tx_cuda_adamw(once.Args(), &call, nullptr), TX_OK);
    Step cut(before, Arguments());
    const tx_adamw_args all = *cut.Args();
    std::vector<tx_tensor> lists[7];
    std::vector<tx_meta> meta;
    std::vector<float> steps(3, static_cast<float>(step));
    for (int part = 0; part < 3; part++) {
      const int64_t begin = cuts[part], count = cuts[part + 1] - begin;
      const auto slice = [&](const tx_tensor &t) {
        return t.numel ? tx_tensor{static_cast<char *>(t.data) + begin * adamw_call::Size(t.dtype), count, t.dtype, 0}
                       : t;
      };
      const tx_tensor *from[] = {all.params, all.grads, all.exp_avgs, all.exp_avg_sqs, all.masters};
      for (int list = 0; list < 5; list++)
        lists[list].push_back(slice(from[list][0]));
      lists[6].push_back({&steps[static_cast<size_t>(part)], 1, TX_F32, 0});
      meta.push_back({100, begin, 0});
    }
    // The scales of both moments of a part are adjacent.
    std::vector<std::vector<uint8_t>> scales;
    Bytes &both = before.params[0].param.scales;
    const int64_t blocks = (n + 127) / 128, moments = both.size() / blocks;
    for (int part = 0; part < 3; part++) {
      const int64_t begin = cuts[part] / 128, end = (cuts[part + 1] + 127) / 128;
      std::vector<uint8_t> of_part;
      for (int64_t m = 0; m < moments; m++)
        of_part.insert(of_part.end(), both.data() + m * blocks + begin, both.data() + m * blocks + end);
      scales.push_back(of_part);
    }
    for (auto &of_part : scales)
      lists[5].push_back({of_part.data(), static_cast<int64_t>(of_part.size()), TX_U8, 0});
    tx_adamw_args args = all;
    args.n = 3;
    args.params = lists[0].data();
    args.grads = lists[1].data();
    args.exp_avgs = lists[2].data();
    args.exp_avg_sqs = lists[3].data();
    args.masters = lists[4].data();
    args.scales = lists[5].data();
    args.steps = lists[6].data();
    args.meta = meta.data();
    args.checksums = nullptr;
    tx_error error = {};
    ASSERT_EQ(tx_cuda_adamw(&args, &call, &error), TX_OK) << error.message;
    for (int part = 0; part < 3; part++) {
      const int64_t begin = cuts[part] / 128,
                    count = static_cast<int64_t>(scales[part].size()) / std::max<int64_t>(moments, 1);
      for (int64_t m = 0; m < moments; m++)
        std::memcpy(both.data() + m * blocks + begin, scales[part].data() + m * count, static_cast<size_t>(count));
    }
    const float completed = static_cast<float>(step + 1);
    std::memcpy(before.params[0].param.step.data(), &completed, 4);
    EXPECT_EQ(steps, std::vector<float>(3, completed));
    EXPECT_TRUE(before.State() == whole.State()) << "step " << step;
  }
}

INSTANTIATE_TEST_SUITE_P(Adamw, Kinds,
                         testing::Values(kF32, kBf16, kRemainder, kBlocks, kHalf,
                                         Combo{TX_F16, TX_NONE, TX_F32, TX_F16, TX_U8},
                                         Combo{TX_BF16, TX_NONE, TX_BF16, TX_BF16, TX_BF16}),
                         [](const auto &info) { return adamw_call::Name(info.param); });

// Values that no state should have, and more of those for which fast conversions must fall back to the ordinary ones:
// zeros, and ties between two weights. With lr = 0 the values are kept, so they are also what is written.
TEST(Adamw, HasTheCpusBitsForEveryPatternOfWeightAndState) {
  for (const Combo &c : {kBlocks, kRemainder, Combo{TX_F16, TX_NONE, TX_F16, TX_BF16, TX_F16},
                         Combo{TX_BF16, TX_NONE, TX_BF16, TX_U8, TX_BF16}}) {
    for (const double lr : {1e-2, 0.0}) {
      SCOPED_TRACE(adamw_call::Name(c));
      Pair pair;
      pair.Add(c, 20000);
      for (Side *side : {&pair.ours, &pair.theirs}) {
        std::mt19937 random(5);
        Param &p = side->params[0].param;
        for (Bytes *bytes : {&p.param, &p.exp_avg, &p.exp_avg_sq, &p.master, &p.scales, &p.grad})
          for (int64_t i = 0; i < bytes->size(); i++)
            bytes->data()[i] = static_cast<uint8_t>(random());
        for (Bytes *bytes : {&p.param, &p.master}) {
          for (int64_t i = 0; i < bytes->size() / 2; i++) {
            const uint16_t special = random() % 2 ? 0x8000 : 0;
            if (random() % 16 == 0) std::memcpy(bytes->data() + 2 * i, &special, 2);
          }
        }
      }
      emulated::world = emulated::World();
      const tx_adamw_group group = {lr, 0.9, 0.999, 1e-8, 0.0, 0, 1};
      ASSERT_EQ(pair.Take(Arguments(), &group), TX_OK);
      pair.ExpectEqual();
    }
  }
}

}  // namespace
