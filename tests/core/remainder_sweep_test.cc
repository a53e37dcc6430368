// G4: a bf16 weight and a 16-bit remainder together are the fp32 master. Tests all 2^32 masters and all 2^32 pairs.
#include "csrc/math/remainder.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/core/sweep.h"

namespace {

struct Pair {
  uint16_t weight;
  int16_t remainder;
  bool operator==(const Pair &) const = default;
};

Pair Encode(float master) {
  const uint16_t weight = tx_bf16_from_f32(master);
  return {weight, tx_remainder_encode(master)};
}

// The upper tie of an even, finite, non-zero weight: the fp32 number halfway to the next weight; NaN for other weights.
float UpperTie(uint32_t upper) {
  const bool even = upper % 2 == 0 && (upper & 0x7fffu) != 0 && IsFiniteHalf(upper);
  if (!even) return NAN;
  const double weight = tx_f32_from_bf16(static_cast<uint16_t>(upper));
  const double next = std::isinf(tx_f32_from_bf16(static_cast<uint16_t>(upper + 1)))
                          ? 0x1p128
                          : static_cast<double>(tx_f32_from_bf16(static_cast<uint16_t>(upper + 1)));
  return static_cast<float>(weight + (next - weight) / 2);
}

TEST(Remainder, G4_EveryMasterRoundTripsButTheUpperTies) {
  EXPECT_EQ(Describe(Failing([](uint32_t upper) {
              const float tie = UpperTie(upper);
              return [=](uint32_t pattern) {
                const float master = tx_f32_from_bits(pattern);
                const uint16_t weight = tx_bf16_from_f32(master);
                const int16_t remainder = tx_remainder_encode(master);
                const float decoded = tx_remainder_decode(weight, remainder);
                const uint16_t weight_again = tx_bf16_from_f32(decoded);
                const int16_t remainder_again = tx_remainder_encode(decoded);
                /* one fp32 ulp towards zero */
                const uint32_t finite = master == tie ? pattern - 1u : pattern;
                const uint32_t expected = master != master ? 0x7fc00000u : finite;
                return (tx_bits_from_f32(decoded) == expected) & (weight_again == weight) &
                       (remainder_again == remainder);
              };
            })),
            "");
}

// The test above shows that no other pattern is inexact.
TEST(Remainder, G4_Exactly32638PatternsAreInexact) {
  int inexact = 0;
  for (uint32_t upper = 0; upper < kHalf; ++upper) {
    const float tie = UpperTie(upper);
    const Pair pair = Encode(tie);
    inexact += !std::isnan(tie) && tx_remainder_decode(pair.weight, pair.remainder) != tie;
  }
  EXPECT_EQ(inexact, 32638);
}

// Every pair with a finite weight decodes to a master that rounds to the weight. Encoding the master again gives the
// same pair, except for pairs that encode never produces: an odd weight with -32768, and a zero with -32767 to -1. Inf
// with a positive remainder decodes to NaN; NaN becomes the canonical NaN.
TEST(Remainder, G4_EncodeAfterDecodeIsTheIdentityOnEveryPairThatIsWritten) {
  EXPECT_EQ(Describe(Failing([](uint32_t upper) {
              const auto weight = static_cast<uint16_t>(upper);
              const uint32_t magnitude = upper & 0x7fffu;
              const bool nan = magnitude > 0x7f80u, inf = magnitude == 0x7f80u;
              /* The remainders that encode produces for this weight, from lowest to highest. A zero's are read as
               * unsigned numbers. */
              const bool zero = magnitude == 0;
              const int32_t lowest = nan || zero ? 0 : magnitude % 2 == 0 ? -32768 : -32767;
              const int32_t highest = nan || inf ? 0 : zero ? 32768 : 32767;
              const bool canonical = !nan || upper == 0x7fc0u;
              return [=](uint32_t pattern) {
                const auto remainder = static_cast<int16_t>(static_cast<uint16_t>(pattern & 0xffffu));
                const float master = tx_remainder_decode(weight, remainder);
                const uint16_t weight_again = tx_bf16_from_f32(master);
                const int16_t remainder_again = tx_remainder_encode(master);
                const int32_t value = zero ? remainder & 0xffff : remainder;
                const int written = (value >= lowest) & (value <= highest) & canonical;
                const int same = (remainder_again == remainder) & (weight_again == weight);
                const uint16_t expected_weight = nan | (inf & (value > 0)) ? 0x7fc0u : weight;
                return (weight_again == expected_weight) & (same == written);
              };
            })),
            "");
}

TEST(Remainder, EdgesByHand) {
  const struct {
    const char *what;
    uint32_t master;
    Pair pair;
    uint32_t decoded;
  } cases[] = {
      {"zero", 0x00000000u, {0x0000u, 0}, 0x00000000u},
      {"minus zero", 0x80000000u, {0x8000u, 0}, 0x80000000u},
      {"the tie above zero is exact", 0x00008000u, {0x0000u, INT16_MIN}, 0x00008000u},
      {"one past it belongs to the next weight", 0x00008001u, {0x0001u, -32767}, 0x00008001u},
      {"one", 0x3f800000u, {0x3f80u, 0}, 0x3f800000u},
      {"lower tie of an even weight", 0x3f7f8000u, {0x3f80u, INT16_MIN}, 0x3f7f8000u},
      {"upper tie of an even weight: one ulp lower", 0x3f808000u, {0x3f80u, 32767}, 0x3f807fffu},
      {"an odd weight's last", 0x3f817fffu, {0x3f81u, 32767}, 0x3f817fffu},
      {"an odd weight's first", 0xbf808001u, {0xbf81u, -32767}, 0xbf808001u},
      {"the largest finite master", 0x7f7fffffu, {0x7f80u, -1}, 0x7f7fffffu},
      {"Inf", 0x7f800000u, {0x7f80u, 0}, 0x7f800000u},
      {"-Inf", 0xff800000u, {0xff80u, 0}, 0xff800000u},
      {"a NaN that naive rounding wraps to -0", 0x7fffffffu, {0x7fc0u, 0}, 0x7fc00000u},
      {"a negative signalling NaN", 0xff800001u, {0x7fc0u, 0}, 0x7fc00000u},
  };
  for (const auto &c : cases) {
    const Pair pair = Encode(tx_f32_from_bits(c.master));
    EXPECT_EQ(pair, c.pair) << c.what;
    EXPECT_EQ(tx_bits_from_f32(tx_remainder_decode(pair.weight, pair.remainder)), c.decoded) << c.what;
  }
}

}  // namespace
