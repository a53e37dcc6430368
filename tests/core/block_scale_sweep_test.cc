// Block-scaled formats: the encoder picks the smallest exponent that fits, decoding is exact, encoding a decoded block
// gives the same bytes, and how zeros and non-finite values are encoded.
#include "csrc/math/block_scale.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "tests/core/reference.h"
#include "tests/core/sweep.h"

namespace {

struct Format {
  const char *name;
  tx_block_format format;
  ReferenceFormat reference;
  bool root;
};
const Format kFormats[] = {
    {"e4m3", tx_block_e4m3(), kE4m3, false},          {"e3m4", tx_block_e3m4(), kE3m4, false},
    {"root_e4m4", tx_block_root_e4m4(), kE4m4, true}, {"f16", tx_block_f16(), kF16, false},
    {"root_f16", tx_block_root_f16(), kF16, true},
};

struct Block {
  uint8_t scale = 0;
  std::vector<uint32_t> codes;
  bool operator==(const Block &) const = default;
};

// The rounding thresholds of a block; empty: round to nearest.
using Thresholds = std::vector<uint32_t>;

Block Encode(tx_block_format f, const std::vector<float> &x, const Thresholds &u) {
  const tx_block_plan plan = tx_block_plan_from(f, tx_block_amax_bits(x.data(), static_cast<int32_t>(x.size())));
  Block block;
  uint32_t largest = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    block.codes.push_back(tx_block_code(f, plan, x[i], !u.empty(), u.empty() ? 0 : u[i]));
    largest = std::max(largest, block.codes[i]);
  }
  const uint32_t doubling = tx_block_doubling(f, plan, largest);
  for (size_t i = 0; i < x.size(); ++i)
    block.codes[i] = tx_block_finish(f, plan, x[i], block.codes[i], doubling);
  block.scale = tx_block_scale_byte(plan, doubling);
  return block;
}

std::vector<float> Decode(tx_block_format f, const Block &block) {
  std::vector<float> x;
  for (const uint32_t code : block.codes)
    x.push_back(tx_block_value(f, code, tx_scale_decode(f, block.scale)));
  return x;
}

// The values after a round trip through the logical state: formats that store sqrt(v) are squared in fp32, and the root
// is taken again.
std::vector<float> ThroughLogical(const Format &c, std::vector<float> x) {
  if (c.root) {
    for (float &value : x)
      value = std::sqrt(value * value);
  }
  return x;
}

// Blocks of all kinds: narrow and wide ranges, one large element, some zeros, and magnitudes near the limits of fp32.
std::vector<float> RandomBlock(const Format &c, std::mt19937 &random, int kind) {
  std::normal_distribution<float> normal;
  const size_t n = kind % 5 == 0 ? 1 + random() % 127 : 128;
  // The sqrt of a positive fp32 number is never below 2^-75 nor above 2^64.
  const int lowest = c.root ? -74 : -148, highest = c.root ? 60 : 122;
  const int centre = lowest + static_cast<int>(random() % static_cast<uint32_t>(highest - lowest + 1));
  const float spread = kind % 3 == 0 ? 0.0f : kind % 3 == 1 ? 2.0f : 12.0f;
  std::vector<float> x(n);
  for (float &value : x) {
    const int exponent = std::min(highest, centre + static_cast<int>(spread * normal(random)));
    value = std::ldexp(normal(random), exponent);
    if (random() % 16 == 0) value = 0.0f;
    if (c.root) value = std::sqrt(value * value);
  }
  return x;
}

Thresholds RandomThresholds(std::mt19937 &random, size_t n, int kind) {
  Thresholds u;
  if (kind % 4 == 0) return u;
  for (size_t i = 0; i < n; ++i) {
    u.push_back(kind % 4 == 1 ? static_cast<uint32_t>(random()) : kind % 4 == 2 ? 0u : 0xffffffffu);
  }
  return u;
}

constexpr int kBlocks = kExhaustive ? 20000 : 2000;

TEST(BlockScale, ScaleBytesDecodeAsE8m0WithinTheRangeThatEncodersUse) {
  for (const Format &c : kFormats) {
    for (int byte = 0; byte < 255; ++byte) {
      const tx_block_scale scale = tx_scale_decode(c.format, static_cast<uint8_t>(byte));
      const int k = std::clamp(byte - 127, c.format.min_exponent, c.format.max_exponent);
      const uint32_t one = static_cast<uint32_t>(c.format.element.bias) << c.format.element.mantissa_bits;
      EXPECT_EQ(tx_block_value(c.format, one, scale), std::ldexp(1.0f, k)) << c.name << " " << byte;
      EXPECT_EQ(tx_block_value(c.format, 0, scale), 0.0f) << c.name << " " << byte;
    }
    const tx_block_scale nan = tx_scale_decode(c.format, 255);
    for (uint32_t code = 0; code <= c.format.element.max_code; ++code) {
      EXPECT_TRUE(std::isnan(tx_block_value(c.format, code, nan))) << c.name << " " << code;
    }
  }
}

TEST(BlockScale, TheExponentIsTheLeastThatHoldsAmax) {
  for (const Format &c : kFormats) {
    const double max = c.reference.max;
    for (uint32_t upper = 0; upper < 0x7f80u; ++upper) {
      for (const uint32_t lower :
           {0u, 1u, 0x7fffu, 0x8000u, Scramble(upper) & 0xffffu, 0xdfffu, 0xe000u, 0xe001u, 0xffffu}) {
        const auto bits = static_cast<int32_t>(upper << 16 | lower);
        const double amax = tx_f32_from_bits(static_cast<uint32_t>(bits));
        const int k = tx_scale_exponent(c.format, bits);
        ASSERT_GE(k, c.format.min_exponent);
        ASSERT_LE(k, c.format.max_exponent);
        const bool too_large = amax > std::ldexp(max, c.format.max_exponent);
        ASSERT_EQ(amax <= std::ldexp(max, k), !too_large) << c.name << " " << amax;
        ASSERT_TRUE(k == c.format.min_exponent || amax > std::ldexp(max, k - 1)) << c.name << " " << amax;
        ASSERT_EQ(tx_block_plan_from(c.format, bits).special == 255u, too_large) << c.name << " " << amax;
      }
    }
  }
}

// Every code at every exponent that the encoder uses is exact in fp32, and so is the square of a root. So a block
// survives decoding and encoding.
TEST(BlockScale, EveryCodeAtEveryExponentIsExactAndStays) {
  for (const Format &c : kFormats) {
    const uint32_t step = kExhaustive ? 1 : 7;
    for (int k = c.format.min_exponent; k <= c.format.max_exponent; ++k) {
      const tx_block_scale scale = tx_scale_decode(c.format, static_cast<uint8_t>(k + 127));
      for (uint32_t code = 0; code <= c.format.element.max_code; code += step) {
        const double exact = std::ldexp(ReferenceValue(c.reference, code), k);
        const float value = tx_block_value(c.format, code, scale);
        ASSERT_EQ(value, exact) << c.name << " " << code << " " << k;
        if (c.root) {
          ASSERT_EQ(static_cast<double>(value * value), exact * exact) << c.name << " " << code << " " << k;
          ASSERT_EQ(std::sqrt(value * value), value) << c.name << " " << code << " " << k;
        } else {
          ASSERT_EQ(tx_block_value(c.format, code | c.format.sign_bit, scale), -exact) << c.name;
          ASSERT_EQ(std::signbit(tx_block_value(c.format, code | c.format.sign_bit, scale)), true) << c.name;
        }
      }
    }
  }
}

TEST(BlockScale, EncodingADecodedBlockGivesTheSameBytesWhateverTheRounding) {
  std::mt19937 random(1);
  for (const Format &c : kFormats) {
    int doubled = 0;
    for (int kind = 0; kind < kBlocks; ++kind) {
      const std::vector<float> x = RandomBlock(c, random, kind);
      const Block block = Encode(c.format, x, RandomThresholds(random, x.size(), kind));
      const std::vector<float> decoded = ThroughLogical(c, Decode(c.format, block));
      for (int again = 0; again < 4; ++again) {
        ASSERT_EQ(Encode(c.format, decoded, RandomThresholds(random, x.size(), again)), block) << c.name << " " << kind;
      }
      const int32_t amax = tx_block_amax_bits(x.data(), static_cast<int32_t>(x.size()));
      doubled += block.scale + 1 == tx_scale_exponent(c.format, amax) + 127;
    }
    // The rule that ensures this, doubling the codes, was exercised. If MAX is near a power of two, rounding down to
    // MAX/2 is rare.
    if (c.reference.mantissa_bits < 10) {
      EXPECT_GT(doubled, 0) << c.name;
    }
  }
}

// Compared with a table of all values: nearest rounding gives the nearest value, threshold rounding one of the two
// neighbours.
TEST(BlockScale, CodesAreThoseOfTheTable) {
  std::mt19937 random(2);
  for (const Format &c : kFormats) {
    const ReferenceTable table(c.reference);
    for (int kind = 0; kind < kBlocks; ++kind) {
      const std::vector<float> x = RandomBlock(c, random, kind);
      const Thresholds u = RandomThresholds(random, x.size(), kind);
      const tx_block_plan plan =
          tx_block_plan_from(c.format, tx_block_amax_bits(x.data(), static_cast<int32_t>(x.size())));
      const Block block = Encode(c.format, x, u);
      const uint32_t one = 1u << c.reference.mantissa_bits;
      const bool doubled = plan.keep != 0 && block.scale != plan.exponent + 127;
      for (size_t i = 0; i < x.size(); ++i) {
        const double scaled = std::ldexp(std::fabs(static_cast<double>(x[i])), -plan.exponent);
        uint32_t code = u.empty() ? table.Nearest(scaled, ~0u) : table.Threshold(scaled, u[i]);
        if (c.root && x[i] > 0 && code == 0) code = 1;
        if (plan.keep == 0) code = 0; /* a block of zeros, or of values too small for any code */
        if (doubled) code = code < one ? 2 * code : code + one;
        if (!c.root && std::signbit(x[i]) && plan.keep != 0) code |= c.format.sign_bit;
        ASSERT_EQ(block.codes[i], code) << c.name << " " << x[i];
      }
    }
  }
}

TEST(BlockScale, ARoundedDownMaximumDoublesTheCodes) {
  // 225 rounds to 224 = MAX/2 at k = 0. So k becomes -1, 224 gets the code of 448, and 0.01 (subnormal code 5) the code
  // 10.
  const Block e4m3 = Encode(tx_block_e4m3(), {225.0f, 0.01f, -16.0f}, {});
  EXPECT_EQ(e4m3, (Block{126, {0x7eu, 0x0au, 0x80u | 0x60u}}));
  const Block e4m4 = Encode(tx_block_root_e4m4(), {249.0f, 0.01f}, {});
  EXPECT_EQ(e4m4, (Block{126, {0xffu, 0x14u}}));
  const Block f16 = Encode(tx_block_f16(), {32753.0f, 0x1p-24f}, {});
  EXPECT_EQ(f16, (Block{126, {0x7bffu, 0x0002u}}));
  // At the smallest exponent the codes cannot be doubled.
  for (const Format &c : kFormats) {
    const float least = std::ldexp(static_cast<float>(c.reference.max) / 2, c.format.min_exponent);
    const uint32_t half = c.format.element.max_code - (1u << c.reference.mantissa_bits);
    EXPECT_EQ(Encode(c.format, {least}, {}), (Block{static_cast<uint8_t>(c.format.min_exponent + 127), {half}}))
        << c.name;
  }
}

TEST(BlockScale, ZerosAreScaleAndCodesZero) {
  for (const Format &c : kFormats) {
    EXPECT_EQ(Encode(c.format, {0.0f, -0.0f, 0.0f}, {}), (Block{0, {0, 0, 0}})) << c.name;
    EXPECT_EQ(Encode(c.format, {0.0f, -0.0f, 0.0f}, {~0u, ~0u, ~0u}), (Block{0, {0, 0, 0}})) << c.name;
    EXPECT_EQ(Encode(c.format, {}, {}), (Block{0, {}})) << c.name;
    // Values below the smallest code give a block of zeros, which survives a round trip. A root is never that small.
    const Block tiny = Encode(c.format, {c.root ? 0x1p-75f : 0x1p-149f, -0.0f}, {});
    EXPECT_EQ(tiny == (Block{0, {0, 0}}), !c.root) << c.name;
    EXPECT_EQ(Decode(c.format, {0, {0, 0}}), (std::vector<float>{0.0f, 0.0f})) << c.name;
  }
}

TEST(BlockScale, ANonFiniteValueOrOneTooLargeMakesTheWholeBlockNan) {
  for (const Format &c : kFormats) {
    const float largest = std::ldexp(static_cast<float>(c.reference.max), c.format.max_exponent);
    for (const float bad : {NAN, -NAN, tx_f32_from_bits(0x7fffffffu), INFINITY, std::nextafter(largest, INFINITY)}) {
      for (const Thresholds &u : {Thresholds{}, Thresholds{0, 0, 0}, Thresholds{~0u, ~0u, ~0u}}) {
        const Block block = Encode(c.format, {1.0f, bad, 3.0f}, u);
        ASSERT_EQ(block, (Block{255, {0, 0, 0}})) << c.name << " " << bad;
      }
    }
    for (const float x : Decode(c.format, {255, {0, 0}}))
      EXPECT_TRUE(std::isnan(x)) << c.name;
    const Block fits = Encode(c.format, {largest, 0.0f}, {~0u, ~0u});
    EXPECT_EQ(Decode(c.format, fits)[0], largest) << c.name;
    // fp32's largest number is at most a little more than twice the largest value (for roots: about an
    // eighth above its square).
    EXPECT_GT(static_cast<double>(largest) * (c.root ? static_cast<double>(largest) : 2.0), 0x1.fffffep127 * 0.87)
        << c.name;
  }
}

TEST(BlockScale, APositiveRootNeverBecomesZeroAndASignedValueMay) {
  for (const Format &c : kFormats) {
    for (const Thresholds &u : {Thresholds{}, Thresholds{0, 0, 0}}) {
      const std::vector<float> x = Decode(c.format, Encode(c.format, {1.0f, 0x1p-70f, 0.0f}, u));
      EXPECT_EQ(x[1] > 0.0f, c.root) << c.name;
      EXPECT_EQ(x[2], 0.0f) << c.name;
    }
  }
  EXPECT_TRUE(std::signbit(Decode(tx_block_e4m3(), Encode(tx_block_e4m3(), {1.0f, -0x1p-70f}, {}))[1]));
}

TEST(BlockScale, TheSmallestValuesOfFp32Survive) {
  for (const Format &c : kFormats) {
    const float tiny = c.root ? std::sqrt(0x1p-149f) : 0x1p-149f;
    const float x = Decode(c.format, Encode(c.format, {tiny}, {}))[0];
    if (c.root) {
      EXPECT_NEAR(x / tiny, 1.0f, 0.5f) << c.name;
    } else {
      EXPECT_LE(x, 0x1p-136f) << c.name; /* the smallest code at the smallest exponent: 2^-128, 2^-135 */
    }
    const float small = c.root ? 0x1p-60f : 0x1p-120f;
    EXPECT_NEAR(Decode(c.format, Encode(c.format, {small}, {}))[0] / small, 1.0f, 0x1p-4f) << c.name;
  }
}

}  // namespace
