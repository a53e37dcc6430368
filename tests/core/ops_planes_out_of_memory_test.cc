// Lets each memory request of the planes functions fail once: the call has to return TX_ERROR_OUT_OF_MEMORY and change
// no byte.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "csrc/torch_ext_advanced.h"

#ifndef TX_SANITIZED
#include "tests/core/refuse_memory.h"

namespace {

using refuse_memory::Attempt;

constexpr int64_t kNumel = 2 * TX_PLANES_BLOCK + 1000;

struct Buffers {
  std::vector<uint16_t> values;
  std::vector<uint8_t> message;
  int64_t bytes = 0;

  // Values with similar exponents, so that their message uses every encoding of a plane.
  Buffers() : values(kNumel), message(static_cast<size_t>(tx_planes_bound(TX_BF16, kNumel))) {
    for (size_t i = 0; i < values.size(); i++)
      values[i] = static_cast<uint16_t>(0x3f80 + i * 7919 % 512);
    EXPECT_EQ(tx_planes_encode(Values(), Message(), &bytes, nullptr), TX_OK);
  }
  tx_tensor Values(int64_t begin = 0, int64_t numel = kNumel) { return {values.data() + begin, numel, TX_BF16, 0}; }
  tx_tensor Message() { return {message.data(), static_cast<int64_t>(message.size()), TX_U8, 0}; }

  // Overwrites the memory that calls write, so that the results are visible.
  void FillWithGarbage() {
    std::memset(values.data(), 0x5a, 2 * values.size());
    bytes = -7;
  }
  bool operator==(const Buffers &other) const {
    return values == other.values && message == other.message && bytes == other.bytes;
  }
};

struct Function {
  const char *name;
  bool allocates;
  tx_status (*run)(Buffers &buffers);
};

const Function kFunctions[] = {
    {"tx_planes_encode", true, [](Buffers &b) { return tx_planes_encode(b.Values(), b.Message(), &b.bytes, nullptr); }},
    {"tx_planes_check", false, [](Buffers &b) { return tx_planes_check(b.Message(), 0, 3, nullptr); }},
    {"tx_planes_decode", true, [](Buffers &b) { return tx_planes_decode(b.Message(), b.Values(), nullptr); }},
    {"tx_planes_decode_range", true,
     [](Buffers &b) { return tx_planes_decode_range(b.Message(), 777, b.Values(100, TX_PLANES_BLOCK), nullptr); }},
};

class Planes : public testing::TestWithParam<Function> {};

TEST_P(Planes, ChangeNothingWhereMemoryIsRefused) {
  Buffers before;
  before.FillWithGarbage();
  int64_t refused = 0;
  for (int64_t failing = 0;; failing++) {
    ASSERT_LT(failing, 20) << "it never ends, or allocates in its loop";
    Buffers buffers = before;
    Attempt attempt(failing);
    const tx_status status = attempt([&](const tx_parallel *) { return GetParam().run(buffers); });
    if (!attempt.failed) {
      EXPECT_EQ(status, TX_OK);
      EXPECT_NE(buffers == before, GetParam().allocates) << "it did what it is for";
      break;
    }
    refused++;
    EXPECT_EQ(status, TX_ERROR_OUT_OF_MEMORY);
    EXPECT_TRUE(buffers == before) << "allocation " << failing;
  }
  EXPECT_EQ(refused > 0, GetParam().allocates) << refused;
}
INSTANTIATE_TEST_SUITE_P(OutOfMemory, Planes, testing::ValuesIn(kFunctions),
                         [](const auto &info) { return info.param.name; });

}  // namespace

#endif
