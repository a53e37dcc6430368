// Reference implementation of rounding, in doubles: the values of a format, and which of them a number is rounded to.
// Shares no code with csrc/math, which works on bit patterns.
#ifndef TX_TESTS_CORE_REFERENCE_H
#define TX_TESTS_CORE_REFERENCE_H

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

// The magnitudes of a binary floating-point format: integers times a unit that doubles with each binade above
// 2^min_exponent.
struct ReferenceFormat {
  int mantissa_bits;
  int min_exponent;  // of the normal numbers
  double max;        // the largest finite value
};
inline constexpr ReferenceFormat kBf16 = {7, -126, 0x1.fep127};
inline constexpr ReferenceFormat kF16 = {10, -14, 65504.0};
inline constexpr ReferenceFormat kE4m3 = {3, -6, 448.0};
inline constexpr ReferenceFormat kE3m4 = {4, -2, 31.0};
inline constexpr ReferenceFormat kE4m4 = {4, -6, 496.0};

// The value of a magnitude code, computed from its exponent field and mantissa as integers.
inline double ReferenceValue(ReferenceFormat format, uint32_t code) {
  const int field = static_cast<int>(code / (1u << format.mantissa_bits));
  const int mantissa = static_cast<int>(code % (1u << format.mantissa_bits));
  const int significand = field == 0 ? mantissa : mantissa + (1 << format.mantissa_bits);
  return std::ldexp(significand, (field == 0 ? 0 : field - 1) + format.min_exponent - format.mantissa_bits);
}

// All finite values of a format in ascending order; a value's index is its code.
class ReferenceTable {
 public:
  explicit ReferenceTable(ReferenceFormat format) : format_(format) {
    for (uint32_t code = 0; values_.empty() || values_.back() < format.max; ++code) {
      values_.push_back(ReferenceValue(format, code));
    }
  }

  uint32_t MaxCode() const { return static_cast<uint32_t>(values_.size()) - 1; }

  // The code of the nearest value; of two equally near ones, the even code. Returns `above` if rounding with an
  // unbounded exponent would exceed the largest value.
  uint32_t Nearest(double a, uint32_t above) const {
    const uint32_t below = Below(a);
    const double lower = values_[below];
    const double upper = below == MaxCode() ? 2 * lower - values_[below - 1] : values_[below + 1];
    const double middle = lower + (upper - lower) / 2;
    const bool up = a > middle || (a == middle && below % 2 == 1);
    return !up ? below : below == MaxCode() ? above : below + 1;
  }

  // The code by threshold rounding. The distance to the next lower value, as a fraction of the unit, is taken to 23 -
  // mantissa_bits bits (to nearest, ties to even). It rounds up if its sum with as many leading bits of u reaches one.
  // Never exceeds the largest value.
  uint32_t Threshold(double a, uint32_t u) const {
    const uint32_t below = Below(a);
    if (below == MaxCode()) return below;
    const double steps = std::ldexp(1.0, 23 - format_.mantissa_bits);
    const double lower = values_[below], unit = values_[below + 1] - lower;
    const double fraction = std::nearbyint((a - lower) / unit * steps);
    return fraction + std::floor(u / 4294967296.0 * steps) >= steps ? below + 1 : below;
  }

 private:
  // The code of the largest value <= a.
  uint32_t Below(double a) const {
    return static_cast<uint32_t>(std::upper_bound(values_.begin(), values_.end(), a) - values_.begin()) - 1;
  }

  ReferenceFormat format_;
  std::vector<double> values_;
};

#endif
