// Random numbers that no caller would pass on purpose: huge ones, negative ones, and ones whose sums and products
// overflow.
#ifndef TESTS_CORE_ABSURD_H
#define TESTS_CORE_ABSURD_H

#include <cstdint>
#include <limits>
#include <random>

namespace absurd {

class Random {
 public:
  explicit Random(uint32_t seed) : gen_(seed) {}
  uint32_t Below(uint32_t bound) { return static_cast<uint32_t>(gen_() % bound); }
  int64_t Negative() { return -1 - static_cast<int64_t>(Below(9)); }
  bool OneIn(uint32_t bound) { return Below(bound) == 0; }
  template <typename Value, size_t N>
  Value Of(const Value (&values)[N]) {
    return values[Below(N)];
  }

  // A number next to a power of two, of either sign; now and then one near the limits, or any bit pattern.
  int64_t I64() {
    if (OneIn(4)) return static_cast<int64_t>(gen_() << 32 ^ gen_());
    if (OneIn(8)) return std::numeric_limits<int64_t>::min() + Below(3);
    if (OneIn(8)) return std::numeric_limits<int64_t>::max() - Below(3);
    const uint64_t power = uint64_t{1} << Below(64);
    const uint64_t near = power + Below(3) - 1;
    return static_cast<int64_t>(OneIn(3) ? 0 - near : near);
  }
  // An element count that is larger than any memory, or negative. The tensor's memory does not exist, so the call must
  // be rejected before it touches it.
  int64_t Numel() {
    const int64_t n = I64();
    return n >= 0 && n <= int64_t{1} << 56 ? -1 - n : n;
  }
  int32_t I32() { return static_cast<int32_t>(I64()); }
  double F64() {
    const double values[] = {0.0,
                             -0.0,
                             1.0,
                             -1.0,
                             1e-300,
                             1e300,
                             -1e300,
                             0x1p63,
                             -0x1p63,
                             0x1p53 + 2,
                             std::numeric_limits<double>::infinity(),
                             -std::numeric_limits<double>::infinity(),
                             std::numeric_limits<double>::quiet_NaN(),
                             std::numeric_limits<double>::denorm_min()};
    return Of(values);
  }

 private:
  std::mt19937_64 gen_;
};

#ifdef TX_SLOW
inline constexpr uint32_t kRounds = 10000;
#else
inline constexpr uint32_t kRounds = 50000;
#endif

}  // namespace absurd

#endif
