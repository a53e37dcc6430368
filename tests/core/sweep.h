// Tests functions on all 2^32 fp32 bit patterns. The work is divided by upper halves (sign, exponent, seven mantissa
// bits) between two threads. Unoptimised and sanitizer builds only test every 61st upper half, with all its lower
// halves.
#ifndef TX_TESTS_CORE_SWEEP_H
#define TX_TESTS_CORE_SWEEP_H

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#if defined(__OPTIMIZE__) && !defined(TX_SLOW)
inline constexpr bool kExhaustive = true;
#else
inline constexpr bool kExhaustive = false;
#endif

inline constexpr uint32_t kHalf = 0x10000u;  // patterns that share one upper half; also the number of upper halves

// A hash of x, for thresholds and samples that look random.
inline uint32_t Scramble(uint32_t x) {
  x = (x ^ (x >> 15)) * 0x2c1b3c6du;
  x = (x ^ (x >> 12)) * 0x297a2d39u;
  return x ^ (x >> 15);
}

inline bool IsFiniteHalf(uint32_t upper) {
  return (upper & 0x7f80u) != 0x7f80u;
}

struct Count {
  uint64_t patterns = 0;
  uint32_t first = 0xffffffffu;  // the lowest pattern that was counted

  void Add(uint32_t pattern) {
    ++patterns;
    first = std::min(first, pattern);
  }
};

// Returns a message, or "" if nothing was counted.
inline std::string Describe(const Count &count) {
  if (count.patterns == 0) return "";
  char message[80];
  std::snprintf(message, sizeof message, "%llu patterns, the first 0x%08x",
                static_cast<unsigned long long>(count.patterns), count.first);
  return message;
}

// Calls visit(upper, &count) for each upper half below `end`. Each thread has its own counter; returns their total.
template <typename Visit>
Count SweepHalves(Visit visit, uint32_t end = kHalf) {
  const uint32_t stride = kExhaustive ? 1 : 61;
  Count counts[2];
  const auto run = [&](uint32_t thread) {
    for (uint32_t upper = thread * stride; upper < end; upper += 2 * stride)
      visit(upper, &counts[thread]);
  };
  std::thread other(run, 1u);
  run(0u);
  other.join();
  return {counts[0].patterns + counts[1].patterns, std::min(counts[0].first, counts[1].first)};
}

// Counts the patterns for which make(upper)(pattern) is false. make(upper) computes once what depends on the upper half
// only.
template <typename Make>
Count Failing(Make make) {
  return SweepHalves([&](uint32_t upper, Count *count) {
    const auto check = make(upper);
    uint32_t wrong = 0;
    for (uint32_t lower = 0; lower < kHalf; ++lower)
      wrong += check(upper << 16 | lower) ? 0u : 1u;
    if (wrong == 0) return;
    for (uint32_t lower = 0; lower < kHalf; ++lower) {
      if (!check(upper << 16 | lower)) count->Add(upper << 16 | lower);
    }
  });
}

// Counts the finite patterns, in upper halves below `end`, for which a rounding function gives a wrong code.
// `encode(pattern, u)` is the function under test, called for every pattern. `code(pattern, u)` is a slow reference.
// Within an upper half it is a step function of the pattern, so it is only evaluated to find the steps by bisection.
// The threshold u depends on the upper half only.
template <typename Encode, typename Code>
Count WrongCodes(Encode encode, Code code, uint32_t end = kHalf) {
  return SweepHalves(
      [&](uint32_t upper, Count *count) {
        if (!IsFiniteHalf(upper)) return;
        thread_local std::vector<uint16_t> actual(kHalf), expected(kHalf);
        const uint32_t base = upper << 16, u = Scramble(upper);
        uint16_t *to = actual.data();
        for (uint32_t lower = 0; lower < kHalf; ++lower)
          to[lower] = static_cast<uint16_t>(encode(base | lower, u));
        for (uint32_t begin = 0; begin < kHalf;) {
          const uint16_t step = code(base | begin, u);
          uint32_t inside = begin, outside = kHalf;  // the step contains `inside` and ends before `outside`
          while (outside - inside > 1) {
            const uint32_t middle = inside + (outside - inside) / 2;
            (code(base | middle, u) == step ? inside : outside) = middle;
          }
          std::fill(expected.begin() + begin, expected.begin() + outside, step);
          begin = outside;
        }
        if (actual == expected) return;
        for (uint32_t lower = 0; lower < kHalf; ++lower) {
          if (actual[lower] != expected[lower]) count->Add(base | lower);
        }
      },
      end);
}

#endif
