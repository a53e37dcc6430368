// Rounding and decoding of bf16, fp16 and the small floats, for all 2^16 codes and all 2^32 fp32 patterns.
#include "csrc/math/numeric.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/core/reference.h"
#include "tests/core/sweep.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

struct SmallCase {
  const char *name;
  tx_small_float format;
  ReferenceFormat reference;
};
const SmallCase kSmallCases[] = {
    {"e4m3", tx_small_e4m3(), kE4m3},
    {"e4m4", tx_small_e4m4(), kE4m4},
    {"f16", tx_small_f16(), kF16},
    {"e3m4", tx_small_e3m4(), kE3m4},
};

TEST(Numeric, PowersOfTwoIncludeTheSubnormalOne) {
  for (int k = -127; k <= 127; ++k)
    EXPECT_EQ(tx_exp2i(k), std::ldexp(1.0f, k)) << k;
}

// The two 16-bit formats with a common interface for the tests.
struct Bf16 {
  static constexpr ReferenceFormat kReference = kBf16;
  static constexpr uint16_t kInf = 0x7f80u, kNan = 0x7fc0u;
  static float Decode(uint16_t h) { return tx_f32_from_bf16(h); }
  static uint16_t Nearest(float x) { return tx_bf16_from_f32(x); }
  static uint16_t Round(float x, uint32_t u) { return tx_bf16_round(x, u); }
};
struct F16 {
  static constexpr ReferenceFormat kReference = kF16;
  static constexpr uint16_t kInf = 0x7c00u, kNan = 0x7e00u;
  static float Decode(uint16_t h) { return tx_f32_from_f16(h); }
  static uint16_t Nearest(float x) { return tx_f16_from_f32(x); }
  static uint16_t Round(float x, uint32_t u) { return tx_f16_round(x, u); }
};

template <typename T>
class HalfFormat : public testing::Test {};
using HalfFormats = testing::Types<Bf16, F16>;
TYPED_TEST_SUITE(HalfFormat, HalfFormats);

TYPED_TEST(HalfFormat, EveryCodeDecodesExactly) {
  for (uint32_t code = 0; code <= 0xffffu; ++code) {
    const float x = TypeParam::Decode(static_cast<uint16_t>(code));
    const uint32_t magnitude = code & 0x7fffu;
    ASSERT_EQ(std::signbit(x), code >= 0x8000u) << code;
    if (magnitude > TypeParam::kInf) {
      ASSERT_TRUE(std::isnan(x)) << code;
    } else if (magnitude == TypeParam::kInf) {
      ASSERT_TRUE(std::isinf(x)) << code;
    } else {
      ASSERT_EQ(std::fabs(static_cast<double>(x)), ReferenceValue(TypeParam::kReference, magnitude)) << code;
    }
  }
}

double Magnitude(uint32_t pattern) {
  return std::fabs(static_cast<double>(tx_f32_from_bits(pattern)));
}

TYPED_TEST(HalfFormat, NearestOnEveryFinitePattern) {
  const ReferenceTable table(TypeParam::kReference);
  EXPECT_EQ(
      Describe(WrongCodes([](uint32_t pattern, uint32_t) { return TypeParam::Nearest(tx_f32_from_bits(pattern)); },
                          [&](uint32_t pattern, uint32_t) {
                            const uint32_t sign = pattern >> 31 << 15;
                            return static_cast<uint16_t>(sign | table.Nearest(Magnitude(pattern), TypeParam::kInf));
                          })),
      "");
}

TYPED_TEST(HalfFormat, ThresholdOnEveryFinitePattern) {
  const ReferenceTable table(TypeParam::kReference);
  EXPECT_EQ(
      Describe(WrongCodes([](uint32_t pattern, uint32_t u) { return TypeParam::Round(tx_f32_from_bits(pattern), u); },
                          [&](uint32_t pattern, uint32_t u) {
                            const uint32_t sign = pattern >> 31 << 15;
                            return static_cast<uint16_t>(sign | table.Threshold(Magnitude(pattern), u));
                          })),
      "");
}

TYPED_TEST(HalfFormat, InfStaysAndEveryNanBecomesTheOneNan) {
  for (uint32_t pattern = 0x7f800000u; pattern >= 0x7f800000u; pattern += pattern == 0x7fffffffu ? 0x7f800001u : 1u) {
    const float x = tx_f32_from_bits(pattern);
    const uint32_t inf = (pattern >> 31 << 15) | TypeParam::kInf;
    const uint32_t expected = (pattern & 0x7fffffffu) == 0x7f800000u ? inf : TypeParam::kNan;
    ASSERT_EQ(TypeParam::Nearest(x), expected) << pattern;
    ASSERT_EQ(TypeParam::Round(x, Scramble(pattern)), expected) << pattern;
  }
}

TYPED_TEST(HalfFormat, RepresentableValuesStayWhateverTheThreshold) {
  for (const uint32_t u : {0u, 1u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
    for (uint32_t code = 0; code <= 0xffffu; ++code) {
      const uint16_t h = static_cast<uint16_t>(code);
      if ((code & 0x7fffu) > TypeParam::kInf) continue;
      ASSERT_EQ(TypeParam::Round(TypeParam::Decode(h), u), h);
      ASSERT_EQ(TypeParam::Nearest(TypeParam::Decode(h)), h);
    }
  }
}

TYPED_TEST(HalfFormat, ThresholdRoundingOfFiniteValuesSaturates) {
  const uint16_t largest = TypeParam::kInf - 1;
  for (const uint32_t u : {0u, 0xffffffffu}) {
    EXPECT_EQ(TypeParam::Round(0x1.fffffep127f, u), largest);
    EXPECT_EQ(TypeParam::Round(-0x1.fffffep127f, u), largest | 0x8000u);
    EXPECT_EQ(TypeParam::Round(std::nextafter(TypeParam::Decode(largest), INFINITY), u), largest);
  }
  EXPECT_EQ(TypeParam::Nearest(0x1.fffffep127f), TypeParam::kInf);
}

TEST(SmallFloat, EveryCodeDecodesExactlyAndStays) {
  for (const SmallCase &c : kSmallCases) {
    for (uint32_t code = 0; code <= c.format.max_code; ++code) {
      const float x = tx_small_decode(c.format, tx_small_at(c.format, 0), code);
      ASSERT_EQ(x, ReferenceValue(c.reference, code)) << c.name << " " << code;
      ASSERT_EQ(tx_small_nearest(c.format, x), code) << c.name;
      for (const uint32_t u : {0u, 1u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
        ASSERT_EQ(tx_small_round(c.format, tx_small_at(c.format, 0), x, u), code) << c.name;
      }
    }
    EXPECT_EQ(tx_small_decode(c.format, tx_small_at(c.format, 0), c.format.max_code), c.reference.max) << c.name;
  }
}

// Every pattern of [0, MAX), except those that share an upper half with MAX. EveryCodeDecodesExactlyAndStays covers
// MAX.
template <int kCase>
void ExpectSmallFloatRoundsEveryPattern() {
  const SmallCase c = kSmallCases[kCase];
  const ReferenceTable table(c.reference);
  EXPECT_EQ(table.MaxCode(), c.format.max_code);
  const uint32_t end = tx_bits_from_f32(static_cast<float>(c.reference.max)) >> 16;
  // A copy of the format that is a compile-time constant.
  const auto format = [] {
    return kCase == 0 ? tx_small_e4m3() : kCase == 1 ? tx_small_e4m4() : kCase == 2 ? tx_small_f16() : tx_small_e3m4();
  };
  EXPECT_EQ(
      Describe(WrongCodes(
          [=](uint32_t pattern, uint32_t) { return tx_small_nearest(format(), tx_f32_from_bits(pattern)); },
          [&](uint32_t pattern, uint32_t) { return static_cast<uint16_t>(table.Nearest(Magnitude(pattern), 0xffffu)); },
          end)),
      "");
  EXPECT_EQ(
      Describe(WrongCodes(
          [=](uint32_t pattern, uint32_t u) {
            return tx_small_round(format(), tx_small_at(format(), 0), tx_f32_from_bits(pattern), u);
          },
          [&](uint32_t pattern, uint32_t u) { return static_cast<uint16_t>(table.Threshold(Magnitude(pattern), u)); },
          end)),
      "");
}
TEST(SmallFloat, E4m3OnEveryPattern) {
  ExpectSmallFloatRoundsEveryPattern<0>();
}
TEST(SmallFloat, E4m4OnEveryPattern) {
  ExpectSmallFloatRoundsEveryPattern<1>();
}
TEST(SmallFloat, F16MagnitudesOnEveryPattern) {
  ExpectSmallFloatRoundsEveryPattern<2>();
}
TEST(SmallFloat, E3m4MagnitudesOnEveryPattern) {
  ExpectSmallFloatRoundsEveryPattern<3>();
}

// Over all values of the threshold bits that matter, the share that rounds up is exactly the fraction.
TEST(Threshold, TheShareThatRoundsUpIsTheFraction) {
  for (const uint32_t lower : {0u, 1u, 2u, 0x1234u, 0x8000u, 0xffffu}) {
    uint32_t up = 0;
    for (uint32_t u = 0; u <= 0xffffu; ++u) {
      up += tx_bf16_round(tx_f32_from_bits(0x40490000u | lower), u << 16 | 0x5a5au) == 0x404au;
    }
    EXPECT_EQ(up, lower);
  }
  for (const SmallCase &c : kSmallCases) {
    const int bits = 23 - c.format.mantissa_bits;
    for (const float unit : {0x1p-3f, std::ldexp(1.0f, c.reference.min_exponent - c.format.mantissa_bits)}) {
      const float x = 1.25f * unit; /* a quarter of the way between two normal codes, or two subnormal ones */
      const float value = unit == 0x1p-3f ? 0x1p-3f * static_cast<float>(1 << c.format.mantissa_bits) + x : x;
      const uint32_t below = tx_small_round(c.format, tx_small_at(c.format, 0), value, 0u);
      uint32_t up = 0;
      for (uint32_t u = 0; u < 1u << bits; ++u)
        up += tx_small_round(c.format, tx_small_at(c.format, 0), value, u << (32 - bits)) - below;
      EXPECT_EQ(up, 1u << (bits - 2)) << c.name << " " << value;
    }
  }
}

#if defined(__x86_64__)
// Eight conversions by the processor (F16C), in each direction.
__attribute__((target("avx,f16c"))) void HardwareF16(const float *x, uint16_t *h) {
  _mm_storeu_si128(reinterpret_cast<__m128i *>(h), _mm256_cvtps_ph(_mm256_loadu_ps(x), _MM_FROUND_TO_NEAREST_INT));
}
__attribute__((target("avx,f16c"))) void HardwareF32(const uint16_t *h, float *x) {
  _mm256_storeu_ps(x, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(h))));
}
#endif

// Tested at all 2^16 codes and around every point where rounding changes; the sweep above covers the rest.
TEST(Numeric, F16EqualsTheProcessorsConversionButForNan) {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("f16c")) GTEST_SKIP() << "this processor has no F16C";
  for (uint32_t code = 0; code <= 0xffffu; ++code) {
    if ((code & 0x7fffu) > 0x7c00u) continue;
    const uint16_t h[8] = {static_cast<uint16_t>(code)};
    float decoded[8];
    HardwareF32(h, decoded);
    ASSERT_EQ(tx_bits_from_f32(tx_f32_from_f16(h[0])), tx_bits_from_f32(decoded[0])) << code;
    const float middle =
        (code & 0x7fffu) >= 0x7bffu ? 65520.0f : 0.5f * (decoded[0] + tx_f32_from_f16(static_cast<uint16_t>(code + 1)));
    float x[8];
    uint16_t rounded[8];
    for (uint32_t i = 0; i < 8; ++i)
      x[i] = tx_f32_from_bits(tx_bits_from_f32(middle) + i - 4);
    HardwareF16(x, rounded);
    for (uint32_t i = 0; i < 8; ++i)
      ASSERT_EQ(tx_f16_from_f32(x[i]), rounded[i]) << x[i];
  }
#else
  GTEST_SKIP() << "not an x86-64 processor";
#endif
}

}  // namespace
