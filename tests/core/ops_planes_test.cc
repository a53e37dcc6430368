// tx_planes_encode and tx_planes_decode: every bit comes back, the message is the same on every instruction set, and
// damage is found and named.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "csrc/torch_ext_advanced.h"

extern "C" {
#include "csrc/math/planes.h"
#include "csrc/ops/planes_layout.h"
}

namespace {

using Bytes = std::vector<uint8_t>;

const std::map<tx_dtype, int64_t> kWidths = {{TX_F32, 4}, {TX_BF16, 2}, {TX_F16, 2}, {TX_I16, 2}, {TX_U8, 1}};
const std::vector<int64_t> kNumels = {0, 1, 63, 64, 65, 700, 5000, TX_PLANES_BLOCK, TX_PLANES_BLOCK + 1, 150001};

class Isas : public ::testing::Test {
 protected:
  void TearDown() override { tx_isa_select(nullptr, nullptr); }
};

// Contents, by their bytes: each fills n values of a width.
using Fill = std::function<void(std::mt19937 &, int64_t, int64_t, uint8_t *)>;

void Words(int64_t n, int64_t width, uint8_t *to, const std::function<uint32_t()> &word) {
  for (int64_t i = 0; i < n; i++) {
    const uint32_t value = word();
    std::memcpy(to + i * width, reinterpret_cast<const uint8_t *>(&value) + (4 - width), width);
  }
}

uint32_t Float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

const std::map<std::string, Fill> kContents = {
    {"random bits",
     [](auto &r, auto n, auto width, auto *to) { Words(n, width, to, [&] { return static_cast<uint32_t>(r()); }); }},
    {"zeros", [](auto &, auto n, auto width, auto *to) { std::fill_n(to, n * width, uint8_t{0}); }},
    {"one", [](auto &, auto n, auto width, auto *to) { std::fill_n(to, n * width, uint8_t{0x3f}); }},
    {"NaN and infinities",
     [](auto &r, auto n, auto width, auto *to) {
       Words(n, width, to, [&] {
         return static_cast<uint32_t>((r() & 1 ? 0x7f800000u : 0xff800001u) | (r() % 3 ? 0 : r() & 0x7fffff));
       });
     }},
    {"trained",
     [](auto &r, auto n, auto width, auto *to) {
       std::normal_distribution<float> normal(0.0f, 0.02f);
       Words(n, width, to, [&] { return Float(normal(r)); });
     }},
    {"trained, of some zeros",
     [](auto &r, auto n, auto width, auto *to) {
       std::normal_distribution<float> normal;
       Words(n, width, to, [&] { return r() % 5 ? Float(std::pow(normal(r), 5.0f)) : 0u; });
     }},
    {"two symbols, one of them once",
     [](auto &, auto n, auto width, auto *to) {
       std::fill_n(to, n * width, uint8_t{7});
       if (n) to[n * width / 2] = 9;
     }},
    {"all symbols, half of them one",
     [](auto &r, auto n, auto width, auto *to) {
       for (int64_t i = 0; i < n * width; i++)
         to[i] = static_cast<uint8_t>(r() % 2 ? 128 : r());
     }},
};

Bytes Made(const Fill &fill, int64_t n, int64_t width, uint32_t seed = 1) {
  std::mt19937 random(seed);
  Bytes values(static_cast<size_t>(n * width));
  fill(random, n, width, values.data());
  return values;
}

tx_tensor Tensor(Bytes &bytes, int64_t n, tx_dtype dtype) {
  return {bytes.data(), n, dtype, 0};
}

tx_tensor Tensor(Bytes &bytes) {
  return Tensor(bytes, static_cast<int64_t>(bytes.size()), TX_U8);
}

Bytes Encoded(Bytes values, tx_dtype dtype) {
  const int64_t n = static_cast<int64_t>(values.size()) / kWidths.at(dtype);
  Bytes out(static_cast<size_t>(tx_planes_bound(dtype, n)) + 64, 0xa5);
  int64_t bytes = -1;
  tx_error error = {};
  const int64_t bound = tx_planes_bound(dtype, n);
  EXPECT_EQ(tx_planes_encode(Tensor(values, n, dtype), {out.data(), bound, TX_U8, 0}, &bytes, &error), TX_OK)
      << error.message;
  EXPECT_LE(bytes, bound);
  for (size_t i = static_cast<size_t>(bound); i < out.size(); i++)
    EXPECT_EQ(out[i], 0xa5) << "beyond the bound";
  out.resize(static_cast<size_t>(bytes));
  return out;
}

tx_status Decode(Bytes message, tx_dtype dtype, int64_t begin, int64_t n, Bytes *values, std::string *why = nullptr) {
  const int64_t width = kWidths.at(dtype), guard = 64;
  Bytes guarded(static_cast<size_t>(n * width + 2 * guard), 0xa5);
  tx_error error = {};
  const tx_status status =
      tx_planes_decode_range(Tensor(message), begin, {guarded.data() + guard, n, dtype, 0}, &error);
  for (int64_t i = 0; i < guard; i++) {
    EXPECT_EQ(guarded[i], 0xa5);
    EXPECT_EQ(guarded[guarded.size() - 1 - i], 0xa5);
  }
  values->assign(guarded.begin() + guard, guarded.end() - guard);
  if (why) *why = error.message;
  return status;
}

TEST_F(Isas, EveryBitComesBackAndMessagesAreTheSameOnAll) {
  for (const auto &[dtype, width] : kWidths) {
    for (const auto &[name, fill] : kContents) {
      for (const int64_t n : kNumels) {
        SCOPED_TRACE(name + ", " + std::to_string(n) + " " + tx_dtype_name(dtype));
        const Bytes values = Made(fill, n, width);
        Bytes first, back;
        for (int32_t i = 0; tx_isa_name(i); i++) {
          ASSERT_EQ(tx_isa_select(tx_isa_name(i), nullptr), TX_OK);
          const Bytes message = Encoded(values, dtype);
          if (i == 0) first = message;
          ASSERT_EQ(message, first) << tx_isa_name(i);
          ASSERT_EQ(Decode(message, dtype, 0, n, &back), TX_OK) << tx_isa_name(i);
          ASSERT_EQ(back, values) << tx_isa_name(i);
        }
      }
    }
  }
}

TEST_F(Isas, RangesAreReadAlone) {
  const int64_t n = 2 * TX_PLANES_BLOCK + 777;
  const Bytes values = Made(kContents.at("trained"), n, 2);
  const Bytes message = Encoded(values, TX_BF16);
  std::mt19937 random(3);
  for (int i = 0; i < 50; i++) {
    const int64_t begin = random() % (n + 1), count = random() % (n - begin + 1);
    Bytes back;
    ASSERT_EQ(Decode(message, TX_BF16, begin, count, &back), TX_OK);
    ASSERT_EQ(back, Bytes(values.begin() + 2 * begin, values.begin() + 2 * (begin + count)));
  }
}

TEST_F(Isas, TrainedWeightsTakeTwoThirdsAndNoiseNoMoreThanItself) {
  const int64_t n = 1 << 20;
  const auto per_element = [&](const std::string &name) {
    return static_cast<double>(Encoded(Made(kContents.at(name), n, 2), TX_BF16).size()) / n;
  };
  EXPECT_LT(per_element("trained"), 1.33);
  EXPECT_LT(per_element("zeros"), 0.001);
  EXPECT_LT(per_element("random bits"), 2.001);
}

TEST_F(Isas, DamageIsFoundAndNamed) {
  const int64_t n = TX_PLANES_BLOCK + 5000;
  const Bytes values = Made(kContents.at("trained"), n, 2);
  const Bytes whole = Encoded(values, TX_BF16);
  const int64_t second = tx_planes_head_bytes(n) + tx_planes_row_at(whole.data(), 0).bytes;
  std::mt19937 random(4);
  for (int i = 0; i < 400; i++) {
    Bytes message = whole, back;
    const size_t at = random() % message.size();
    message[at] ^= static_cast<uint8_t>(1 << random() % 8);
    std::string why;
    ASSERT_EQ(Decode(message, TX_BF16, 0, n, &back, &why), TX_ERROR_BAD_STATE) << at;
    ASSERT_EQ(back, Bytes(back.size(), 0xa5)) << "nothing is written";
    const bool in_block = static_cast<int64_t>(at) >= tx_planes_head_bytes(n);
    const std::string named = !in_block ? "message " : static_cast<int64_t>(at) < second ? "block 0," : "block 1,";
    ASSERT_NE(why.find(named), std::string::npos) << why;
  }
  for (int i = 0; i < 100; i++) {
    Bytes message(whole.begin(), whole.begin() + random() % whole.size()), back;
    std::string why;
    ASSERT_EQ(Decode(message, TX_BF16, 0, n, &back, &why), TX_ERROR_BAD_STATE);
    ASSERT_NE(why.find("truncated"), std::string::npos) << why;
  }
  Bytes message = whole, back; /* a block that is not wanted may be damaged */
  message[static_cast<size_t>(second) + 9] ^= 1;
  EXPECT_EQ(Decode(message, TX_BF16, 5, 1000, &back), TX_OK);
  EXPECT_EQ(tx_planes_check(Tensor(message), 0, 1, nullptr), TX_OK);
  EXPECT_EQ(tx_planes_check(Tensor(message), 0, 2, nullptr), TX_ERROR_BAD_STATE);
}

// Blocks whose checksums are right and whose content is anything.
TEST_F(Isas, BlocksOfAnyContentAreRefusedOrAreValues) {
  const int64_t n = 3000;
  const Bytes whole = Encoded(Made(kContents.at("trained"), n, 2), TX_BF16);
  const size_t head = static_cast<size_t>(tx_planes_head_bytes(n));
  std::mt19937 random(5);
  for (int32_t isa = 0; tx_isa_name(isa); isa++) {
    ASSERT_EQ(tx_isa_select(tx_isa_name(isa), nullptr), TX_OK);
    int refused = 0;
    for (int i = 0; i < 300; i++) {
      Bytes message = whole, back;
      for (int changes = 1 + random() % 4; changes > 0; changes--)
        message[head + random() % (changes % 2 ? 600 : message.size() - head)] = static_cast<uint8_t>(random());
      uint32_t lanes[TX_PLANES_SUM_LANES] = {};
      for (size_t at = head; at < message.size(); at += TX_PLANES_SUM_BYTES) {
        uint32_t words[TX_PLANES_SUM_LANES] = {};
        std::memcpy(words, &message[at], std::min<size_t>(TX_PLANES_SUM_BYTES, message.size() - at));
        for (int lane = 0; lane < TX_PLANES_SUM_LANES; lane++)
          lanes[lane] = tx_planes_sum_word(lanes[lane], words[lane]);
      }
      const tx_planes_row row = {static_cast<uint32_t>(message.size() - head),
                                 tx_planes_sum_end(lanes, message.size() - head)};
      std::memcpy(&message[sizeof(tx_planes_header)], &row, sizeof row);
      tx_planes_seal(message.data(), TX_BF16, n);
      std::string why;
      const tx_status status = Decode(message, TX_BF16, 0, n, &back, &why);
      ASSERT_TRUE(status == TX_OK || why.find("its block 0 cannot be decoded") != std::string::npos) << why;
      refused += status != TX_OK;
    }
    EXPECT_GT(refused, 50) << tx_isa_name(isa);
  }
}

TEST(Planes, OtherArgumentsAreRefused) {
  Bytes values(200), out(1000), back(200);
  int64_t bytes = 7;
  tx_error error = {};
  EXPECT_EQ(tx_planes_bound(TX_I64, 5), 0);
  EXPECT_EQ(tx_planes_bound(TX_BF16, -1), 0);
  EXPECT_EQ(tx_planes_encode(Tensor(values, 100, TX_BF16), Tensor(out), nullptr, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_planes_encode(Tensor(values, 25, TX_I64), Tensor(out), &bytes, &error), TX_ERROR_DTYPE);
  EXPECT_EQ(tx_planes_encode(Tensor(values, 100, TX_BF16), Tensor(out, 100, TX_U8), &bytes, &error), TX_ERROR_SHAPE);
  EXPECT_EQ(tx_planes_encode(Tensor(values, 100, TX_BF16), Tensor(values), &bytes, &error), TX_ERROR_OVERLAP);
  EXPECT_EQ(bytes, 7);
  Bytes message = Encoded(values, TX_BF16);
  EXPECT_EQ(tx_planes_decode(Tensor(message), Tensor(back, 99, TX_BF16), &error), TX_ERROR_SHAPE);
  EXPECT_EQ(tx_planes_decode(Tensor(message), Tensor(back, 100, TX_F16), &error), TX_ERROR_SHAPE);
  EXPECT_EQ(tx_planes_decode_range(Tensor(message), 1, Tensor(back, 100, TX_BF16), &error), TX_ERROR_SHAPE);
  tx_planes about = TX_PLANES_INIT;
  EXPECT_EQ(tx_planes_read(Tensor(message), &about, &error), TX_OK);
  EXPECT_EQ(about.numel, 100);
  EXPECT_EQ(about.dtype, TX_BF16);
  EXPECT_EQ(about.n_blocks, 1);
  about.size = 3;
  EXPECT_EQ(tx_planes_read(Tensor(message), &about, &error), TX_ERROR_INVALID_ARGUMENT);
}

TEST(Planes, QuotientsByFactorsAreThoseOfDivision) {
  tx_rans_encoder encoder;
  std::mt19937 random(6);
  for (uint32_t f = 1; f < TX_RANS_SCALE; f++) {
    uint16_t freq[256] = {};
    freq[3] = static_cast<uint16_t>(f);
    tx_rans_encoder_of(freq, &encoder);
    const uint32_t shift = encoder.parts[3] >> 24, most = f << TX_RANS_ROOM;
    for (int i = 0; i < 60; i++) {
      const uint32_t x = i < 20 ? most - 1 - i : i < 40 ? f * (i % 20 + 1) - (i & 1) : random() % most;
      ASSERT_EQ((static_cast<uint64_t>(x << shift) * encoder.factor[3]) >> 43, x / f) << x << " / " << f;
    }
  }
}

}  // namespace
