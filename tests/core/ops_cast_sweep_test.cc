// tx_cast: from every form to every other, with every rounding.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

extern "C" {
#include "csrc/core/forms.h"
#include "csrc/math/block_scale.h"
#include "csrc/math/dither.h"
}
#include "tests/core/arrays.h"
#include "tests/core/blocks.h"
#include "tests/core/same_bits.h"

namespace {

const float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr uint64_t kSeed = 11;
constexpr int64_t kId = 1234, kStep = 42;
const std::vector<int32_t> kRoundings = {TX_NEAREST, TX_DITHERED, TX_STOCHASTIC};

struct Form {
  tx_dtype dtype;
  bool scaled;
};

const std::vector<Form> kForms = {
    {TX_F32, false}, {TX_BF16, false}, {TX_F16, false}, {TX_U8, true}, {TX_F16, true},
};

// A tensor in one of the forms.
struct Formed {
  Form form;
  tx_format format;
  Array data, scales;

  Formed(Form form, tx_format format, int64_t n)
      : form(form), format(format), data(form.dtype, n), scales(TX_U8, form.scaled ? tx_blocks(n) : 0) {}

  tx_tensor scales_or_none() { return scales.size() ? scales.tensor() : None(); }
  tx_block_format block_format() const {
    if (form.dtype == TX_U8 && format == TX_FORMAT_MOMENTUM) return tx_block_e3m4();
    if (form.dtype == TX_U8) return format == TX_FORMAT_SQRT ? tx_block_root_e4m4() : tx_block_e4m3();
    return format == TX_FORMAT_SQRT ? tx_block_root_f16() : tx_block_f16();
  }
  float Get(int64_t i) const {
    if (!form.scaled) return data.Get(i);
    const uint32_t code = form.dtype == TX_U8 ? data.Word<uint8_t>(i) : data.Word<uint16_t>(i);
    const float value =
        tx_block_value(block_format(), code, tx_scale_decode(block_format(), scales.Word<uint8_t>(i / TX_BLOCK)));
    return format == TX_FORMAT_SQRT ? value * value : value;
  }

  // Encodes `values` with csrc/math's scalar functions, with the thresholds of the elements start, start + 1, ...
  void Encode(const std::vector<float> &values, int32_t rounding, int64_t start) {
    const auto n = static_cast<int64_t>(values.size());
    for (int64_t at = 0; at < n; at += TX_BLOCK) {
      const int64_t count = std::min<int64_t>(TX_BLOCK, n - at);
      uint32_t u[TX_BLOCK], codes[TX_BLOCK];
      float x[TX_BLOCK];
      for (int64_t i = 0; i < count; i++) {
        const int64_t index = start + at + i;
        u[i] = rounding == TX_DITHERED
                   ? tx_lattice_base(kSeed, kId, TX_LANE_CAST, kStep, index)
                   : tx_stochastic(tx_stochastic_key(kSeed, kId, TX_LANE_CAST, kStep), static_cast<uint32_t>(index));
        x[i] = format == TX_FORMAT_SQRT && form.scaled ? std::sqrt(values[at + i]) : values[at + i];
      }
      if (form.scaled) {
        const uint32_t *thresholds = rounding == TX_NEAREST ? nullptr : u;
        scales.data()[at / TX_BLOCK] = EncodeBlock(block_format(), x, static_cast<int32_t>(count), thresholds, codes);
      }
      for (int64_t i = 0; i < count; i++) {
        if (form.scaled && form.dtype == TX_U8) {
          data.SetWord(at + i, static_cast<uint8_t>(codes[i]));
        } else if (form.scaled) {
          data.SetWord(at + i, static_cast<uint16_t>(codes[i]));
        } else if (rounding == TX_NEAREST) {
          data.Set(at + i, x[i]);
        } else {
          tx_store_threshold(data.data(), at + i, form.dtype, x[i], u[i]);
        }
      }
    }
  }
};

std::string Name(Form form) {
  return DtypeName(form.dtype) + (form.scaled ? "_scaled" : "");
}

tx_status Cast(std::vector<Formed> &srcs, std::vector<Formed> &dsts, int32_t rounding, const std::vector<tx_meta> &meta,
               const tx_parallel *parallel = nullptr, tx_error *error = nullptr) {
  std::vector<tx_tensor> src, dst, src_scales, dst_scales;
  for (Formed &f : srcs)
    src.push_back(f.data.tensor()), src_scales.push_back(f.scales_or_none());
  for (Formed &f : dsts)
    dst.push_back(f.data.tensor()), dst_scales.push_back(f.scales_or_none());
  tx_cast_args args = TX_CAST_ARGS_INIT;
  args.n = static_cast<int64_t>(src.size());
  args.srcs = src.data();
  args.dsts = dst.data();
  args.src_scales = src_scales.data();
  args.dst_scales = dst_scales.data();
  args.meta = meta.empty() ? nullptr : meta.data();
  args.seed = kSeed;
  args.step = kStep;
  args.format = srcs[0].format;
  args.rounding = rounding;
  return tx_cast(&args, parallel, error);
}

// Values to cast; for roots they have to be >= 0.
std::vector<float> Inputs(int64_t n, tx_format format) {
  Array values(TX_F32, n);
  values.Fill(static_cast<uint32_t>(n) + 1, 1e-3f);
  std::vector<float> inputs;
  for (int64_t i = 0; i < n; i++) {
    inputs.push_back(format == TX_FORMAT_SQRT ? std::fabs(values.Get(i)) : values.Get(i));
  }
  if (n > 200) inputs[5] = 0.0f, inputs[6] = -0.0f, inputs[199] = 1e-30f;
  return inputs;
}

const char *FormatName(tx_format format) {
  return format == TX_FORMAT_SQRT ? "_sqrt" : format == TX_FORMAT_MOMENTUM ? "_momentum" : "_signed";
}

class EveryPair : public testing::TestWithParam<std::tuple<Form, Form, tx_format>> {};

TEST_P(EveryPair, EqualsTheScalarConversionElementByElement) {
  const auto &[from, to, format] = GetParam();
  const bool copies = from.dtype == to.dtype && from.scaled == to.scaled;
  for (int32_t rounding : kRoundings) {
    std::vector<Formed> srcs, dsts, expected;
    std::vector<tx_meta> meta;
    for (int64_t n : kSizes) {
      const int64_t start = 128 * n;
      srcs.emplace_back(from, format, n);
      srcs.back().Encode(Inputs(n, format), TX_NEAREST, 0);
      dsts.emplace_back(to, format, n);
      dsts.back().data.FillBytes(3);
      expected.emplace_back(to, format, n);
      std::vector<float> values;
      for (int64_t i = 0; i < n; i++)
        values.push_back(srcs.back().Get(i));
      expected.back().Encode(values, rounding, start);
      meta.push_back({kId, start, 0});
    }
    Threads threads(3);
    tx_error error = {};
    ASSERT_EQ(Cast(srcs, dsts, rounding, meta, threads.parallel(), &error), TX_OK) << error.message;
    for (size_t k = 0; k < dsts.size(); k++) {
      ASSERT_EQ(dsts[k].data.raw(), expected[k].data.raw()) << dsts[k].data.size() << " rounding " << rounding;
      ASSERT_EQ(dsts[k].scales.raw(), expected[k].scales.raw()) << dsts[k].data.size() << " rounding " << rounding;
      /* The same form: equal bytes, not only equal numbers, whatever the rounding (re-encoding is stable). */
      if (copies) {
        EXPECT_EQ(dsts[k].data.raw(), srcs[k].data.raw());
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Forms, EveryPair,
                         testing::Combine(testing::ValuesIn(kForms), testing::ValuesIn(kForms),
                                          testing::Values(TX_FORMAT_SIGNED, TX_FORMAT_SQRT, TX_FORMAT_MOMENTUM)),
                         [](const auto &info) {
                           return Name(std::get<0>(info.param)) + "_to_" + Name(std::get<1>(info.param)) +
                                  FormatName(std::get<2>(info.param));
                         });

// Decoding to fp32 and encoding again gives the same bytes, with any rounding.
TEST(Cast, ReEncodingADecodedTensorChangesNoByte) {
  for (Form form : kForms) {
    for (tx_format format : {TX_FORMAT_SIGNED, TX_FORMAT_SQRT, TX_FORMAT_MOMENTUM}) {
      for (int32_t rounding : kRoundings) {
        const int64_t n = 40000;
        std::vector<Formed> stored, plain, again;
        stored.emplace_back(form, format, n).Encode(Inputs(n, format), TX_DITHERED, 0);
        plain.emplace_back(Form{TX_F32, false}, format, n);
        again.emplace_back(form, format, n);
        ASSERT_EQ(Cast(stored, plain, rounding, {}), TX_OK);
        ASSERT_EQ(Cast(plain, again, rounding, {{kId, 0, 0}}), TX_OK);
        EXPECT_EQ(again[0].data.raw(), stored[0].data.raw()) << Name(form) << " " << format << " " << rounding;
        EXPECT_EQ(again[0].scales.raw(), stored[0].scales.raw()) << Name(form) << " " << format << " " << rounding;
      }
    }
  }
}

// Thresholds belong to the logical element: a shard that knows its start gets the bits of the whole tensor.
TEST(Cast, ShardsCutAtBlocksGiveTheBitsOfTheWhole) {
  const int64_t n = 40000, cut = 128 * 77;
  for (Form form : kForms) {
    for (int32_t rounding : kRoundings) {
      const std::vector<float> values = Inputs(n, TX_FORMAT_SIGNED);
      std::vector<Formed> whole, whole_to, shards, shards_to;
      whole.emplace_back(Form{TX_F32, false}, TX_FORMAT_SIGNED, n).Encode(values, TX_NEAREST, 0);
      whole_to.emplace_back(form, TX_FORMAT_SIGNED, n);
      for (auto [begin, end] : {std::pair{cut, n}, {int64_t{0}, cut}}) {
        shards.emplace_back(Form{TX_F32, false}, TX_FORMAT_SIGNED, end - begin)
            .Encode({values.begin() + begin, values.begin() + end}, TX_NEAREST, 0);
        shards_to.emplace_back(form, TX_FORMAT_SIGNED, end - begin);
      }
      ASSERT_EQ(Cast(whole, whole_to, rounding, {{kId, 0, 0}}), TX_OK);
      ASSERT_EQ(Cast(shards, shards_to, rounding, {{kId, cut, 0}, {kId, 0, 0}}), TX_OK);
      std::vector<uint8_t> joined = shards_to[1].data.bytes();
      const std::vector<uint8_t> tail = shards_to[0].data.bytes();
      joined.insert(joined.end(), tail.begin(), tail.end());
      EXPECT_EQ(joined, whole_to[0].data.bytes()) << Name(form) << " " << rounding;
    }
  }
}

// The mean over many steps is the value itself, which nearest rounding cannot give.
TEST(Cast, ThresholdsRoundWithoutBias) {
  const float value = 1.0f + 0.3f / 128; /* three tenths of the way from 1 to the next bf16 number */
  for (int32_t rounding : {TX_DITHERED, TX_STOCHASTIC}) {
    double sum = 0;
    const int64_t n = 1000;
    Array from(TX_F32, std::vector<float>(n, value)), to(TX_BF16, n);
    for (int64_t step = 0; step < 100; step++) {
      const tx_tensor src = from.tensor(), dst = to.tensor();
      tx_cast_args args = TX_CAST_ARGS_INIT;
      args.n = 1;
      args.srcs = &src;
      args.dsts = &dst;
      args.rounding = rounding;
      args.step = step;
      ASSERT_EQ(tx_cast(&args, nullptr, nullptr), TX_OK);
      for (int64_t i = 0; i < n; i++)
        sum += to.Get(i);
    }
    EXPECT_NEAR(sum / (100.0 * n), value, 1e-5);
  }
}

TEST(Cast, BitsAreTheSameEverywhere) {
  ExpectSameBits([](const Caller &caller) {
    Outputs outputs;
    for (Form from : kForms) {
      for (Form to : kForms) {
        for (tx_format format : {TX_FORMAT_SIGNED, TX_FORMAT_SQRT, TX_FORMAT_MOMENTUM}) {
          for (int32_t rounding : kRoundings) {
            std::vector<Formed> srcs, dsts;
            /* every code, including NaN, Inf and subnormals */
            srcs.emplace_back(from, format, 20000).data.FillBytes(1);
            srcs.back().scales.FillBytes(2);
            srcs.emplace_back(from, format, 333).Encode(Inputs(333, format), TX_NEAREST, 0);
            for (const Formed &f : srcs)
              dsts.emplace_back(to, format, f.data.size());
            caller([&](const tx_parallel *parallel, tx_error *error) {
              return Cast(srcs, dsts, rounding, {}, parallel, error);
            });
            for (const Formed &f : dsts)
              outputs.push_back(f.data.bytes()), outputs.push_back(f.scales.bytes());
          }
        }
      }
    }
    return outputs;
  });
}

TEST(Cast, ABlockWithANanIsNanThroughout) {
  std::vector<Formed> from, to, back;
  std::vector<float> values(300, 1.0f);
  values[130] = kNan;
  from.emplace_back(Form{TX_F32, false}, TX_FORMAT_SIGNED, 300).Encode(values, TX_NEAREST, 0);
  to.emplace_back(Form{TX_U8, true}, TX_FORMAT_SIGNED, 300);
  back.emplace_back(Form{TX_F32, false}, TX_FORMAT_SIGNED, 300);
  ASSERT_EQ(Cast(from, to, TX_DITHERED, {}), TX_OK);
  ASSERT_EQ(Cast(to, back, TX_DITHERED, {}), TX_OK);
  for (int64_t i = 0; i < 300; i++)
    EXPECT_EQ(std::isnan(back[0].data.Get(i)), i / 128 == 1) << i;
}

TEST(Cast, NoTensorsAndEmptyTensorsAreNotErrors) {
  tx_cast_args args = TX_CAST_ARGS_INIT;
  EXPECT_EQ(tx_cast(&args, nullptr, nullptr), TX_OK);
  const tx_tensor empty[] = {None(), {nullptr, 0, TX_I64, 0}};
  args.n = 2;
  args.srcs = args.dsts = empty;
  EXPECT_EQ(tx_cast(&args, nullptr, nullptr), TX_OK);
}

struct Casting {
  std::vector<tx_tensor> srcs, dsts, src_scales, dst_scales;
  std::vector<tx_meta> meta = {{1, 0, 0}, {2, 0, 0}};
  tx_cast_args args = TX_CAST_ARGS_INIT;
};

TEST(Cast, RefusesWithAMessageAndWritesNothing) {
  Array a(TX_F32, 300), b(TX_F32, 300), half(TX_BF16, 300), codes(TX_U8, 300), scales(TX_U8, 3), spare(TX_U8, 3);
  struct Case {
    const char *says;
    tx_status status;
    void (*spoil)(Casting &);
  };
  for (const Case &c : std::vector<Case>{
           {"args.size is 9", TX_ERROR_INVALID_ARGUMENT, [](Casting &k) { k.args.size = 9; }},
           {"rounding is -1", TX_ERROR_ILLEGAL_VALUE, [](Casting &k) { k.args.rounding = -1; }},
           {"format is 3", TX_ERROR_ILLEGAL_VALUE, [](Casting &k) { k.args.format = 3; }},
           {"srcs is NULL", TX_ERROR_INVALID_ARGUMENT, [](Casting &k) { k.args.srcs = nullptr; }},
           {"dsts is NULL", TX_ERROR_INVALID_ARGUMENT, [](Casting &k) { k.args.dsts = nullptr; }},
           {"n is -3", TX_ERROR_INVALID_ARGUMENT, [](Casting &k) { k.args.n = -3; }},
           {"srcs[1] has 300 elements and dsts[1] has 299", TX_ERROR_SHAPE, [](Casting &k) { k.dsts[1].numel = 299; }},
           {"srcs[0] is int16 without scales", TX_ERROR_DTYPE, [](Casting &k) { k.srcs[0].dtype = TX_I16; }},
           {"dsts[1] is uint8 without scales", TX_ERROR_DTYPE, [](Casting &k) { k.args.dst_scales = nullptr; }},
           {"uint8 and fp16 with dst_scales[0]", TX_ERROR_DTYPE, [](Casting &k) { k.dst_scales[0] = k.dst_scales[1]; }},
           {"dst_scales[1] is 2 elements", TX_ERROR_SHAPE, [](Casting &k) { k.dst_scales[1].numel = 2; }},
           {"meta[1] has start -1", TX_ERROR_ILLEGAL_VALUE, [](Casting &k) { k.meta[1].start = -1; }},
           {"dsts[0] and dsts[1] share", TX_ERROR_OVERLAP, [](Casting &k) { k.dsts[1].data = k.dsts[0].data; }},
           {"share memory", TX_ERROR_OVERLAP, [](Casting &k) { k.dsts[0] = k.srcs[0]; }},
           {"share memory", TX_ERROR_OVERLAP, [](Casting &k) { k.dst_scales[1].data = k.dsts[1].data; }},
       }) {
    SCOPED_TRACE(c.says);
    Casting k;
    k.srcs = {a.tensor(), b.tensor()};
    k.dsts = {half.tensor(), codes.tensor()};
    k.dst_scales = {None(), scales.tensor()};
    k.args.n = 2;
    k.args.srcs = k.srcs.data();
    k.args.dsts = k.dsts.data();
    k.args.dst_scales = k.dst_scales.data();
    k.args.meta = k.meta.data();
    c.spoil(k);
    ExpectRefused([&](tx_error *e) { return tx_cast(&k.args, nullptr, e); }, c.status, c.says,
                  {&a, &b, &half, &codes, &scales, &spare});
  }
}

}  // namespace
