// tx_muon_mirror: copies one side of a symmetric matrix's diagonal to the other.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "csrc/torch_ext.h"
#include "tests/core/expect_refused.h"
#include "tests/core/same_bits.h"

namespace {

TEST(Mirror, MovesWhatIsBelowThePanels) {
  std::mt19937 random(5);
  for (int program = 0; program < 60; program++) {
    const int64_t n = 1 + random() % 300, panel = 1 + random() % 320;
    const bool wide = program % 2;
    const size_t size = wide ? 4 : 2, first = program % 3;  // elements may start at any address
    std::vector<uint8_t> before(first + static_cast<size_t>(n * n) * size), memory;
    for (uint8_t &byte : before)
      byte = static_cast<uint8_t>(random());
    const auto offset = [&](int64_t row, int64_t column) {
      return first + static_cast<size_t>(row * n + column) * size;
    };
    const auto made = [&](const Caller &call) {
      memory = before;
      const tx_tensor square = {memory.data() + first, n * n, wide ? TX_F32 : TX_BF16, 0};
      call([&](const tx_parallel *parallel, tx_error *error) {
        return tx_muon_mirror(square, n, panel, parallel, error);
      });
      return std::vector<std::vector<uint8_t>>{memory};
    };
    for (int64_t threads : {1, 3}) {
      Threads pool(threads);
      const std::vector<uint8_t> after = made(Caller(pool.parallel()))[0];
      for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j++) {
          const size_t from = i < j / panel * panel ? offset(j, i) : offset(i, j);
          ASSERT_EQ(std::memcmp(&after[offset(i, j)], &before[from], size), 0) << n << ' ' << panel << ' ' << i;
        }
    }
  }
}

TEST(Mirror, RefusesWhatIsNoSquare) {
  float memory[9] = {};
  tx_tensor square = {memory, 9, TX_F32, 0};
  tx_error error = {};
  ExpectRefused(tx_muon_mirror(square, 2, 1, nullptr, &error), TX_ERROR_SHAPE, error, "square");
  ExpectRefused(tx_muon_mirror(square, 3, 0, nullptr, &error), TX_ERROR_ILLEGAL_VALUE, error, "panel");
  square.dtype = TX_I32;
  ExpectRefused(tx_muon_mirror(square, 3, 1, nullptr, &error), TX_ERROR_DTYPE, error, "square");
}
}  // namespace
