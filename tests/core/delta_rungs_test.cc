// Weight deltas: the table of code lengths equals the formula, and a receiver that has the old weight decodes every
// possible new one.
#include "csrc/math/delta_rungs.h"

#include <gtest/gtest.h>

namespace {

struct Case {
  tx_dtype dtype;
  uint32_t weights, by; /* step through the weights */
  int32_t bounds_by;
};
constexpr Case kCases[] = {{TX_BF16, 1u << 16, 7, 31}, {TX_F16, 1u << 16, 7, 13}, {TX_F32, 0xffffffff, 900001, 47}};

int64_t Code(uint32_t weight, int32_t bits, tx_dtype dtype) {
  return tx_delta_sent(tx_delta_ordered(weight, dtype), bits);
}

TEST(DeltaRungs, EveryWeightOfAWindowIsFound) {
  static tx_delta_rungs rungs;
  for (const Case &c : kCases) {
    const uint32_t infinity = c.dtype == TX_F32 ? 0x7f800000 : c.dtype == TX_F16 ? 0x7c00 : 0x7f80;
    int64_t found_by_table = 0;
    for (int returns = 0; returns < 2; returns++) {
      tx_delta_rungs_make(&rungs, c.dtype, returns);
      for (uint64_t old = 0; old < c.weights; old += c.by) {
        const auto weight = static_cast<uint32_t>(old);
        if (tx_delta_size_of(weight, c.dtype) >= infinity) continue;
        const int32_t exponent = static_cast<int32_t>(tx_delta_size_of(weight, c.dtype) >> tx_delta_mantissa(c.dtype));
        const int32_t here = 16 * (exponent + tx_delta_rebias(c.dtype));
        for (int32_t rung = -460; rung < 120; rung += c.bounds_by) {
          const int32_t bound = here + rung + static_cast<int32_t>(old % 11);
          if (bound < TX_DELTA_BOUND_LEAST || bound > TX_DELTA_BOUND_MOST) continue;
          const tx_delta_range window = tx_delta_window(weight, bound, c.dtype);
          const int64_t at = tx_delta_ordered(weight, c.dtype);
          const int64_t step = 1 + (window.high - window.low) / 24;
          for (int64_t v = window.low; v <= window.high; v += step) {
            const uint32_t now = tx_delta_unordered(v, c.dtype);
            if (tx_delta_size_of(now, c.dtype) >= infinity || (v == at && !returns)) continue;
            const int32_t bits = tx_delta_bits(now, bound, returns, c.dtype);
            ASSERT_EQ(tx_delta_rung_bits(&rungs, now, bound, c.dtype), bits) << now << " " << bound;
            const uint64_t noise = UINT64_C(0x5a5a5a5a5a5a) << bits; /* the bits of the next codes */
            const auto next = static_cast<uint64_t>(Code(now, bits, c.dtype)) | noise;
            const tx_delta_found found = tx_delta_rung_find(&rungs, weight, bound, next, c.dtype);
            ASSERT_EQ(found.weight, now) << "from " << weight << ", bound " << bound << ", returns " << returns;
            ASSERT_EQ(found.bits, bits);
            found_by_table += tx_delta_rung_of(&rungs, exponent, bound, c.dtype)->high >= 0;
          }
        }
      }
    }
    EXPECT_GT(found_by_table, 50000) << c.dtype;
  }
}

}  // namespace
