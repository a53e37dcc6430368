// The processor's own conversion to bf16 and the fix-up for its exceptions. Models replace the two instructions, so
// this runs on any machine.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "csrc/math/numeric.h"

namespace {

int special_groups = 0;

// Model of vcvtne2ps2bf16: rounds to nearest even, treats subnormals as zeros, makes NaNs quiet and keeps their sign
// and payload.
void ConvertGroup(const void *from, void *to) {
  for (int i = 0; i < 32; ++i) {
    uint32_t bits;
    std::memcpy(&bits, static_cast<const char *>(from) + 4 * i, 4);
    uint32_t upper = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    if ((bits & 0x7f800000u) == 0) upper = (bits >> 16) & 0x8000u;
    if ((bits & 0x7fffffffu) > 0x7f800000u) upper = bits >> 16 | 0x40u;
    const auto half = static_cast<uint16_t>(upper);
    std::memcpy(static_cast<char *>(to) + 2 * i, &half, 2);
  }
}

// Model of vfpclassps with the classes subnormal, quiet NaN and signalling NaN.
bool GroupIsSpecial(const void *from) {
  for (int i = 0; i < 32; ++i) {
    float x;
    std::memcpy(&x, static_cast<const char *>(from) + 4 * i, 4);
    if (std::isnan(x) || std::fpclassify(x) == FP_SUBNORMAL) {
      ++special_groups;
      return true;
    }
  }
  return false;
}

}  // namespace

#define TX_CONVERT_GROUP ConvertGroup
#define TX_GROUP_IS_SPECIAL GroupIsSpecial
#include "csrc/cpu/round_bf16.h"

namespace {

void ExpectNearest(const std::vector<float> &x, const char *what) {
  std::vector<uint16_t> to(x.size() + 1, 0xabcd);
  tx_nearest_bf16(x.data(), static_cast<int64_t>(x.size()), to.data());
  for (size_t i = 0; i < x.size(); ++i)
    ASSERT_EQ(to[i], tx_bf16_from_f32(x[i])) << what << " " << tx_bits_from_f32(x[i]);
  ASSERT_EQ(to.back(), 0xabcd) << what;
}

// Every upper half of an fp32 pattern, with lower halves at and around the tie: normals, subnormals, zeros, Inf and NaN
// of both signs.
TEST(NearestBf16, EveryUpperHalfIsRoundedAsEverywhereElse) {
  special_groups = 0;
  for (const uint32_t lower : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
    std::vector<float> x;
    for (uint32_t upper = 0; upper <= 0xffffu; ++upper)
      x.push_back(tx_f32_from_bits(upper << 16 | lower));
    ExpectNearest(x, "sweep");
  }
  // Exponents 0 and 255 are 4 + 4 groups per sign. Lower half 0 may have fewer: its zeros and Infs are not special.
  EXPECT_GE(special_groups, 6 * 16 - 2);
  EXPECT_LE(special_groups, 6 * 16);
}

TEST(NearestBf16, OneOddValueInAnyPlaceOfAGroupIsSeen) {
  for (const float odd : {0x1p-130f, -0x1p-149f, 0x1.fffffcp-127f, NAN, -NAN, tx_f32_from_bits(0x7fffffffu)}) {
    for (size_t at = 0; at < 32; ++at) {
      std::vector<float> x(64, 1.0f + 0x1p-8f);
      x[32 + at] = odd;
      ExpectNearest(x, "one odd value");
    }
  }
}

TEST(NearestBf16, RunsOfEveryLengthEndWhereTheyEnd) {
  for (size_t n = 0; n <= 70; ++n) {
    std::vector<float> x;
    for (size_t i = 0; i < n; ++i)
      x.push_back(std::ldexp(1.0f + 0x1p-8f, static_cast<int>(i)) * (i % 2 ? -1.0f : 1.0f));
    ExpectNearest(x, "length");
  }
}

}  // namespace
