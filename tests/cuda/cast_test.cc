// tx_cuda_cast must have the CPU's bits, from every form to every other, with every rounding.
extern "C" {
#include "csrc/core/forms.h"
}
#include "tests/cuda/both.h"

namespace {

struct Form {
  const char *name;
  tx_dtype dtype;
  bool scaled;
  tx_format format; /* plain forms: ignored */
};
const std::vector<Form> kForms = {
#define TX_FORM_(index, name, ...) {#name, TX_##name, false, TX_FORMAT_SIGNED},
    TX_FOR_EACH_PLAIN(TX_FORM_)
#undef TX_FORM_
#define TX_FORM_(index, name, format, ...) {#name "_" #format, TX_##name, true, TX_FORMAT_##format},
        TX_FOR_EACH_SCALED(TX_FORM_)
#undef TX_FORM_
};

struct Formed {
  Array data, scales;
  Formed(const Form &form, int64_t n, int64_t misalign)
      : data(form.dtype, n, misalign), scales(TX_U8, form.scaled ? tx_blocks(n) : 0, misalign) {}
};

struct Casting {
  std::vector<tx_tensor> srcs, dsts, src_scales, dst_scales;
  std::vector<tx_meta> meta;
  tx_cast_args args = TX_CAST_ARGS_INIT;

  Casting(std::vector<Formed> &from, std::vector<Formed> &to, tx_format format, int32_t rounding) {
    for (size_t i = 0; i < from.size(); i++) {
      srcs.push_back(from[i].data.tensor());
      dsts.push_back(to[i].data.tensor());
      src_scales.push_back(from[i].scales.size() ? from[i].scales.tensor() : None());
      dst_scales.push_back(to[i].scales.size() ? to[i].scales.tensor() : None());
      meta.push_back({1234, 128 * static_cast<int64_t>(i), 0});
    }
    args.n = static_cast<int64_t>(from.size());
    args.srcs = srcs.data();
    args.dsts = dsts.data();
    args.src_scales = src_scales.data();
    args.dst_scales = dst_scales.data();
    args.meta = meta.data();
    args.seed = 11;
    args.step = 42;
    args.format = format;
    args.rounding = rounding;
  }
};

// Tensors of all sizes in a form: encoded gradients, or any bytes.
std::vector<Formed> Sources(const Form &form, int64_t misalign, bool any_bytes) {
  std::vector<Formed> sources;
  for (const int64_t n : kSizes) {
    sources.emplace_back(form, n, misalign);
    Formed &to = sources.back();
    to.data.FillBytes(static_cast<uint32_t>(n) + 3);
    to.scales.FillBytes(static_cast<uint32_t>(n) + 4);
    if (any_bytes) continue;
    std::vector<Formed> values;
    values.emplace_back(Form{"", TX_F32, false, TX_FORMAT_SIGNED}, n, 0).data.Fill(static_cast<uint32_t>(n), 1e-3f);
    for (int64_t i = 0; i < n; i++) { /* roots need v >= 0; in some blocks the largest code is half the format's */
      const float x = values[0].data.Get(i);
      values[0].data.Set(i, form.format == TX_FORMAT_SQRT ? std::fabs(x)
                            : i / 128 % 4 == 1            ? std::copysign(0.99f, x)
                                                          : x);
    }
    std::vector<Formed> one;
    one.push_back(to);
    Casting casting(values, one, form.format, TX_DITHERED);
    EXPECT_OK([&](tx_error *e) { return tx_cast(&casting.args, nullptr, e); });
    to = one[0];
  }
  return sources;
}

// All pairs of forms that one call can convert: a call has only one block format.
std::vector<std::tuple<Form, Form>> Pairs() {
  std::vector<std::tuple<Form, Form>> pairs;
  for (const Form &from : kForms) {
    for (const Form &to : kForms) {
      if (!from.scaled || !to.scaled || from.format == to.format) pairs.emplace_back(from, to);
    }
  }
  return pairs;
}

class EveryPair : public testing::TestWithParam<std::tuple<Form, Form>> {};

TEST_P(EveryPair, EqualsTheCpuBitForBit) {
  const auto &[from, to] = GetParam();
  const tx_format format = from.scaled ? from.format : to.format;
  for (const int64_t misalign : {0, 1, 2}) {
    for (const bool any_bytes : {false, true}) {
      std::vector<Formed> srcs = Sources(from, misalign, any_bytes);
      for (const int32_t rounding : {TX_NEAREST, TX_DITHERED, TX_STOCHASTIC}) {
        Arrange();
        std::vector<Formed> ours, theirs;
        for (const Formed &src : srcs) {
          ours.emplace_back(to, src.data.size(), misalign).data.FillBytes(5);
          theirs.emplace_back(to, src.data.size(), misalign).data.FillBytes(5);
        }
        Casting casting(srcs, ours, format, rounding), reference(srcs, theirs, format, rounding);
        EXPECT_OK([&](tx_error *e) { return tx_cuda_cast(&casting.args, Call(), e); });
        EXPECT_OK([&](tx_error *e) { return tx_cast(&reference.args, nullptr, e); });
        for (size_t i = 0; i < ours.size(); i++) {
          ASSERT_EQ(ours[i].data.raw(), theirs[i].data.raw()) << kSizes[i] << " elements, rounding " << rounding;
          ASSERT_EQ(ours[i].scales.raw(), theirs[i].scales.raw()) << kSizes[i] << " elements, rounding " << rounding;
        }
        EXPECT_EQ(emulated::world.launches, 1);
        EXPECT_EQ(emulated::world.synchronisations, 0);
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Forms, EveryPair, testing::ValuesIn(Pairs()), [](const auto &info) {
  return std::string(std::get<0>(info.param).name) + "_to_" + std::get<1>(info.param).name;
});

// If rounding leaves the largest code at half of the format's maximum, all codes are doubled. This happens for an amax
// just above half of what a scale can represent.
TEST(Cast, CodesAreDoubledWhereRoundingLeavesHalf) {
  for (const Form &form : kForms) {
    if (!form.scaled) continue;
    std::vector<Formed> values, ours, theirs;
    for (int k = 0; k < 40; k++) {
      values.emplace_back(Form{"", TX_F32, false, TX_FORMAT_SIGNED}, 128, 0);
      ours.emplace_back(form, 128, 0);
      theirs.emplace_back(form, 128, 0);
      /* from slightly below to slightly above half of MAX */
      const float max = form.dtype == TX_F16 ? 65504.0f : form.format == TX_FORMAT_SQRT ? 496.0f : 448.0f;
      const float x = 0.5f * max * (1.0f + 1e-6f * static_cast<float>(k - 5));
      for (int64_t i = 0; i < 128; i++)
        values[k].data.Set(i, form.format == TX_FORMAT_SQRT ? x * x : x);
    }
    Casting casting(values, ours, form.format, TX_NEAREST), reference(values, theirs, form.format, TX_NEAREST);
    EXPECT_OK([&](tx_error *e) { return tx_cuda_cast(&casting.args, Call(), e); });
    EXPECT_OK([&](tx_error *e) { return tx_cast(&reference.args, nullptr, e); });
    for (size_t k = 0; k < ours.size(); k++) {
      ASSERT_EQ(ours[k].data.raw(), theirs[k].data.raw()) << form.name << " " << k;
      ASSERT_EQ(ours[k].scales.raw(), theirs[k].scales.raw()) << form.name << " " << k;
    }
  }
}

TEST(Cast, ThousandsOfTensorsTakeAFewLaunches) {
  Arrange();
  std::vector<Formed> srcs, ours, theirs;
  for (int64_t i = 0; i < 1000; i++) {
    srcs.emplace_back(kForms[0], i % 150, 1).data.Fill(static_cast<uint32_t>(i));
    ours.emplace_back(kForms[3], i % 150, 1);
    theirs.emplace_back(kForms[3], i % 150, 1);
  }
  Casting casting(srcs, ours, TX_FORMAT_SIGNED, TX_DITHERED), reference(srcs, theirs, TX_FORMAT_SIGNED, TX_DITHERED);
  casting.args.meta = reference.args.meta = nullptr;
  EXPECT_OK([&](tx_error *e) { return tx_cuda_cast(&casting.args, Call(), e); });
  EXPECT_OK([&](tx_error *e) { return tx_cast(&reference.args, nullptr, e); });
  EXPECT_LE(emulated::world.launches, 5);
  for (size_t i = 0; i < ours.size(); i++)
    ASSERT_EQ(ours[i].data.raw(), theirs[i].data.raw()) << i;
}

TEST(Cast, RefusesAsTheCpuDoes) {
  Arrange();
  Array a(TX_F32, 300), b(TX_F32, 300), half(TX_BF16, 300), codes(TX_U8, 300), scales(TX_U8, 3);
  for (void (*spoil)(Casting &) : std::vector<void (*)(Casting &)>{
           [](Casting &k) { k.args.size = 9; }, [](Casting &k) { k.args.rounding = -1; },
           [](Casting &k) { k.args.format = 3; }, [](Casting &k) { k.args.srcs = nullptr; },
           [](Casting &k) { k.args.n = -3; }, [](Casting &k) { k.dsts[1].numel = 299; },
           [](Casting &k) { k.srcs[0].dtype = TX_I16; }, [](Casting &k) { k.args.dst_scales = nullptr; },
           [](Casting &k) { k.dst_scales[1].numel = 2; }, [](Casting &k) { k.meta[1].start = -1; },
           [](Casting &k) { k.dsts[1].data = k.dsts[0].data; }, [](Casting &k) { k.dsts[0] = k.srcs[0]; }}) {
    std::vector<Formed> none;
    Casting k(none, none, TX_FORMAT_SIGNED, TX_NEAREST);
    k.srcs = {a.tensor(), b.tensor()};
    k.dsts = {half.tensor(), codes.tensor()};
    k.dst_scales = {None(), scales.tensor()};
    k.meta = {{1, 0, 0}, {2, 0, 0}};
    k.args.n = 2;
    k.args.srcs = k.srcs.data();
    k.args.dsts = k.dsts.data();
    k.args.src_scales = nullptr;
    k.args.dst_scales = k.dst_scales.data();
    k.args.meta = k.meta.data();
    spoil(k);
    ExpectRefusedAlike([&](tx_error *e) { return tx_cuda_cast(&k.args, Call(), e); },
                       [&](tx_error *e) { return tx_cast(&k.args, nullptr, e); }, {&a, &b, &half, &codes, &scales});
  }
}

}  // namespace
