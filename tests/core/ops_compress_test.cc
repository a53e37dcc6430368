// tx_compress and tx_expand: every value comes back bit for bit, and messages have the documented format.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "csrc/torch_ext_advanced.h"
#include "tests/core/arrays.h"
#include "tests/core/same_bits.h"

namespace {

using Patterns = std::vector<uint16_t>;  // bf16 values, as stored

constexpr int64_t kHeader = sizeof(int64_t), kNot = -1;
// Bytes of a block without its escapes.
constexpr int64_t kFixed = 2 + TX_BLOCK + TX_BLOCK / 2;

int64_t Most(int64_t blocks) {
  return blocks / 4 + 16;
}

int Exponent(uint16_t pattern) {
  return pattern >> 7 & 0xff;
}

uint16_t Pattern(int sign, int exponent, int significand) {
  return static_cast<uint16_t>(sign << 15 | exponent << 7 | significand);
}

Array AsArray(const Patterns &patterns, int64_t misalign = 1) {
  Array array(TX_BF16, static_cast<int64_t>(patterns.size()), misalign);
  std::memcpy(array.data(), patterns.data(), array.byte_count());
  return array;
}

// The message as described in csrc/core/compressed.h and csrc/math/compress_block.h, built element by element. It ends
// with the last escape; the limit on their number is ignored.
struct Expected {
  explicit Expected(const Patterns &values) {
    const size_t blocks = values.size() / TX_BLOCK;
    std::vector<uint8_t> tops(blocks), counts(blocks), low(values.size()), codes(values.size() / 2), found;
    for (size_t b = 0; b < blocks; b++) {
      const uint16_t *block = &values[b * TX_BLOCK];
      for (int i = 0; i < TX_BLOCK; i++)
        tops[b] = static_cast<uint8_t>(std::max<int>(tops[b], Exponent(block[i])));
      for (int i = 0; i < TX_BLOCK; i++) {
        const int exponent = Exponent(block[i]), below = tops[b] - exponent, half = TX_BLOCK / 2;
        const int code = std::min(below, 15);
        low[b * TX_BLOCK + i] = static_cast<uint8_t>(block[i] >> 15 << 7 | (block[i] & 0x7f));
        codes[b * half + i % half] |= static_cast<uint8_t>(i < half ? code : code << 4);
        if (below < 15 || exponent == 0) continue;
        counts[b]++;
        escapes++;
        found.push_back(static_cast<uint8_t>(i));
        found.push_back(static_cast<uint8_t>(exponent));
      }
    }
    bytes.resize(kHeader);
    std::memcpy(bytes.data(), &escapes, kHeader);
    for (const std::vector<uint8_t> *part : {&tops, &counts, &low, &codes, &found})
      bytes.insert(bytes.end(), part->begin(), part->end());
  }
  int64_t escapes = 0;
  std::vector<uint8_t> bytes;
};

// What is sent: a message, and the number of plain bytes that follow it.
struct Sent {
  explicit Sent(int64_t numel, uint32_t seed = 1, int64_t misalign = 3)
      : message(TX_U8, tx_compressed_bytes(numel), misalign) {
    message.FillBytes(seed); /* left over from an earlier use */
  }
  int64_t escapes() const { return message.Word<int64_t>(0); }
  Array message;
  int64_t rest = -7;
};

Sent Compress(Array &values, uint32_t seed = 1, int64_t misalign = 3) {
  Sent sent(values.size(), seed, misalign);
  const std::vector<uint8_t> before = values.raw();
  EXPECT_OK([&](tx_error *e) { return tx_compress(values.tensor(), sent.message.tensor(), &sent.rest, e); });
  EXPECT_TRUE(sent.message.GuardsIntact());
  EXPECT_EQ(values.raw(), before) << "values changed";
  return sent;
}

// The receiver: expands the message into an array that has other contents, checks that the rest of the array was not
// written, and copies the plain bytes there.
Array Arrive(Sent &sent, const Array &values, int64_t misalign = 5) {
  Array back(TX_BF16, values.size(), misalign);
  back.FillBytes(2);
  const std::vector<uint8_t> before = back.bytes(), message = sent.message.raw();
  int64_t rest = -7;
  EXPECT_OK([&](tx_error *e) { return tx_expand(sent.message.tensor(), back.tensor(), &rest, e); });
  EXPECT_TRUE(back.GuardsIntact());
  EXPECT_EQ(sent.message.raw(), message) << "the message changed";
  EXPECT_EQ(rest, sent.rest);
  if (rest <= 0 || rest > static_cast<int64_t>(back.byte_count())) return back;
  const size_t from = back.byte_count() - static_cast<size_t>(rest);
  EXPECT_TRUE(std::equal(before.begin() + static_cast<std::ptrdiff_t>(from), before.end(), back.data() + from))
      << "the rest was written";
  std::memcpy(back.data() + from, values.data() + from, static_cast<size_t>(rest));
  return back;
}

template <typename Run>
void OnEveryIsa(Run run) {
  const std::string selected = tx_isa_selected();
  for (int32_t isa = 0; tx_isa_name(isa); isa++) {
    SCOPED_TRACE(tx_isa_name(isa));
    ASSERT_EQ(tx_isa_select(tx_isa_name(isa), nullptr), TX_OK);
    run();
  }
  EXPECT_EQ(tx_isa_select(selected.c_str(), nullptr), TX_OK);
}

// On every instruction set the message has the expected bytes, and the values come back.
void ExpectComesBack(const Patterns &patterns, int64_t misalign = 1) {
  const int64_t numel = static_cast<int64_t>(patterns.size()), blocks = numel / TX_BLOCK;
  const Expected expected(patterns);
  Array values = AsArray(patterns, misalign);
  OnEveryIsa([&] {
    Sent sent = Compress(values, 1, misalign + 2);
    if (expected.escapes <= Most(blocks)) {
      EXPECT_EQ(sent.rest, 0);
      std::vector<uint8_t> whole = expected.bytes; /* zeros in place of unused escapes */
      whole.resize(sent.message.byte_count());
      EXPECT_TRUE(sent.message.bytes() == whole) << sent.escapes() << " escapes, not " << expected.escapes << "?";
    } else {
      EXPECT_EQ(sent.escapes(), kNot);
      EXPECT_GT(sent.rest, 0);
      EXPECT_EQ(sent.message.size() + sent.rest, 2 * numel + kHeader);
      const size_t n = sent.message.byte_count() - kHeader;
      EXPECT_TRUE(std::equal(values.data(), values.data() + n, sent.message.data() + kHeader));
    }
    EXPECT_TRUE(Arrive(sent, values, misalign + 4).bytes() == values.bytes());
  });
}

// -- what comes back ----------------------------------------------------------------------------------------------

using Random = std::mt19937;

int Below(Random &random, int n) {
  return static_cast<int>(random() % static_cast<uint32_t>(n));
}

enum Fits { kFits, kDoesNot, kMay };

struct Kind {
  const char *id;
  Fits fits;  // at every size; at none; or depending on size and chance
  uint16_t (*element)(Random &random, int64_t block, int64_t i);
};

uint16_t WithExponent(Random &random, int exponent) {
  return Pattern(Below(random, 2), exponent, Below(random, 128));
}

const Kind kKinds[] = {
    {"zeros", kFits, [](Random &, int64_t, int64_t) { return Pattern(0, 0, 0); }},
    {"negative_zeros", kFits, [](Random &, int64_t, int64_t) { return Pattern(1, 0, 0); }},
    {"zeros_of_both_signs", kFits, [](Random &r, int64_t, int64_t) { return Pattern(Below(r, 2), 0, 0); }},
    {"subnormals", kFits, [](Random &r, int64_t, int64_t) { return WithExponent(r, 0); }},
    {"subnormals_beside_the_smallest_normals", kFits,
     [](Random &r, int64_t, int64_t) { return WithExponent(r, Below(r, 16)); }},
    {"zeros_beside_large_numbers", kFits,
     [](Random &r, int64_t, int64_t) {
       return Below(r, 2) ? Pattern(Below(r, 2), 0, 0) : WithExponent(r, 240 + Below(r, 15));
     }},
    {"subnormals_beside_large_numbers", kFits,
     [](Random &r, int64_t, int64_t) { return WithExponent(r, Below(r, 3) ? 0 : 254); }},
    {"one_exponent", kFits, [](Random &r, int64_t, int64_t) { return WithExponent(r, 120); }},
    {"fifteen_exponents", kFits, [](Random &r, int64_t, int64_t) { return WithExponent(r, 106 + Below(r, 15)); }},
    {"fifteen_exponents_of_each_block", kFits,
     [](Random &r, int64_t block, int64_t) {
       return WithExponent(r, static_cast<int>(block * 37 % 241) + Below(r, 15));
     }},
    {"infinities_and_nans", kFits, [](Random &r, int64_t, int64_t) { return WithExponent(r, 255); }},
    {"infinities", kFits, [](Random &r, int64_t, int64_t) { return Pattern(Below(r, 2), 255, 0); }},
    {"zeros_beside_nans", kFits, [](Random &r, int64_t, int64_t) { return WithExponent(r, Below(r, 2) ? 0 : 255); }},
    {"one_number_among_nans_in_a_quarter_of_the_blocks", kFits,
     [](Random &r, int64_t block, int64_t i) {
       return WithExponent(r, block % 4 == 3 && i == block % TX_BLOCK ? 127 : 255);
     }},
    {"an_escape_among_zeros", kFits,
     [](Random &r, int64_t block, int64_t i) {
       return WithExponent(r, i == 90 && block % 4 == 0 ? 100 : i % 3 == 0 ? 127 : 0);
     }},
    {"one_number_among_nans_in_each_block", kMay,
     [](Random &r, int64_t block, int64_t i) { return WithExponent(r, i == block % TX_BLOCK ? 127 : 255); }},
    {"one_infinity_in_all", kMay,
     [](Random &r, int64_t block, int64_t i) {
       return block == 0 && i == 100 ? Pattern(1, 255, 0) : WithExponent(r, 127);
     }},
    {"one_infinity_in_each_block", kDoesNot,
     [](Random &r, int64_t, int64_t i) { return i == 127 ? Pattern(0, 255, 0) : WithExponent(r, 127); }},
    {"any", kDoesNot, [](Random &r, int64_t, int64_t) { return static_cast<uint16_t>(r()); }},
};

struct KindOfSize {
  Kind kind;
  int64_t blocks;
};

class EveryKind : public testing::TestWithParam<KindOfSize> {};

TEST_P(EveryKind, ComesBackBitForBit) {
  const auto &[kind, blocks] = GetParam();
  Random random(7);
  Patterns patterns;
  for (int64_t b = 0; b < blocks; b++) {
    for (int64_t i = 0; i < TX_BLOCK; i++)
      patterns.push_back(kind.element(random, b, i));
  }
  const bool fits = Expected(patterns).escapes <= Most(blocks);
  if (kind.fits != kMay) {
    ASSERT_EQ(fits, kind.fits == kFits);
  }
  ExpectComesBack(patterns);
}

std::vector<KindOfSize> KindsOfSizes() {
  std::vector<KindOfSize> all;
  for (const Kind &kind : kKinds) {
    for (const int64_t blocks : {1, 2, 3, 7, 64, 1000})
      all.push_back({kind, blocks});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Kinds, EveryKind, testing::ValuesIn(KindsOfSizes()), [](const auto &info) {
  return std::string(info.param.kind.id) + "_" + std::to_string(info.param.blocks);
});

TEST(Compress, EveryPatternComesBack) {
  Patterns sorted, mixed;
  for (int sign = 0; sign < 2; sign++) {
    for (int rest = 0; rest < 1 << 15; rest++)
      sorted.push_back(static_cast<uint16_t>(sign << 15 | rest));
  }
  /* as many different exponents next to each other as a block can have without an escape */
  for (int begin = 0, end = 16; begin < 256; begin = end, end += 15) {
    for (int low = 0; low < 256; low++) {
      for (int exponent = begin; exponent < end; exponent++)
        mixed.push_back(Pattern(low >> 7, exponent, low & 0x7f));
    }
  }
  for (const Patterns &patterns : {sorted, mixed}) {
    ASSERT_EQ(patterns.size(), 65536u);
    ASSERT_EQ(Expected(patterns).escapes, 0);
    ExpectComesBack(patterns);
  }
}

// Every highest exponent of a block, with every lower exponent: a difference of up to 14 is a code, 15 or more an
// escape; exponent 0 is never an escape.
TEST(Compress, OnlyWhatIsFifteenBelowTheTopIsAnEscape) {
  OnEveryIsa([] {
    for (int top = 0; top < 256; top++) {
      for (int exponent = 0; exponent <= top; exponent++) {
        const size_t at = static_cast<size_t>(top * 11 + exponent * 3) % TX_BLOCK;
        Patterns values(TX_BLOCK, Pattern(0, top, 0x55)), back(TX_BLOCK);
        values[at] = Pattern(1, exponent, 0x2a);
        std::vector<uint8_t> message(static_cast<size_t>(tx_compressed_bytes(TX_BLOCK)));
        const tx_tensor in = {values.data(), TX_BLOCK, TX_BF16, 0}, out = {back.data(), TX_BLOCK, TX_BF16, 0};
        const tx_tensor sent = {message.data(), static_cast<int64_t>(message.size()), TX_U8, 0};
        int64_t rest = -7, escapes = -7;
        ASSERT_EQ(tx_compress(in, sent, &rest, nullptr), TX_OK);
        ASSERT_EQ(rest, 0);
        std::memcpy(&escapes, message.data(), sizeof escapes);
        ASSERT_EQ(escapes, exponent != 0 && top - exponent >= 15) << exponent << " below " << top;
        ASSERT_EQ(tx_expand(sent, out, &rest, nullptr), TX_OK);
        ASSERT_EQ(back, values) << exponent << " below " << top;
      }
    }
  });
}

// Typical gradients: normal numbers of one magnitude have a few escapes. Any gradients have to come back.
TEST(Compress, GradientsComeBack) {
  for (const int64_t blocks : {1, 2, 3, 7, 64, 1000}) {
    SCOPED_TRACE(blocks);
    Patterns normal, stretches;
    Random random(3);
    std::normal_distribution<float> distribution(0.0f, 1e-3f);
    Array array(TX_BF16, blocks * TX_BLOCK);
    for (int64_t i = 0; i < array.size(); i++)
      array.Set(i, distribution(random));
    for (int64_t i = 0; i < array.size(); i++)
      normal.push_back(array.Word<uint16_t>(i));
    array.Fill(4, 1e-3f);
    for (int64_t i = 0; i < array.size(); i++)
      stretches.push_back(array.Word<uint16_t>(i));
    const int64_t escapes = Expected(normal).escapes;
    EXPECT_LE(escapes, Most(blocks));
    EXPECT_TRUE(blocks < 1000 || escapes > 0);
    ExpectComesBack(normal);
    ExpectComesBack(stretches);
  }
}

TEST(Compress, AnyAddressWillDo) {
  Random random(5);
  Patterns patterns;
  for (int64_t i = 0; i < 5 * TX_BLOCK; i++)
    patterns.push_back(WithExponent(random, Below(random, 90) ? 120 + Below(random, 15) : 3));
  ASSERT_GT(Expected(patterns).escapes, 0);
  ASSERT_LE(Expected(patterns).escapes, Most(5));
  for (int64_t misalign = 0; misalign < 8; misalign++)
    ExpectComesBack(patterns, misalign);
}

// Unused bytes after the last escape are zeros.
TEST(Compress, WhatWasInTheMessageBeforeDoesNotMatter) {
  Patterns patterns(3 * TX_BLOCK, Pattern(0, 100, 1));
  patterns[200] = Pattern(1, 50, 2);
  Array values = AsArray(patterns);
  for (const uint32_t seed : {1u, 2u, 3u}) {
    Sent sent = Compress(values, seed);
    EXPECT_EQ(sent.escapes(), 1);
    EXPECT_EQ(Arrive(sent, values).bytes(), values.bytes());
  }
}

TEST(Compress, BitsAreTheSameEverywhere) {
  ExpectSameBits([](const Caller &caller) {
    Outputs outputs;
    Array subnormal(TX_BF16, 4 * TX_BLOCK), gradients(TX_BF16, 400 * TX_BLOCK), any(TX_BF16, 4 * TX_BLOCK);
    for (int64_t i = 0; i < subnormal.size(); i++)
      subnormal.SetWord(i, Pattern(i % 3 == 0, 0, static_cast<int>(i % 128)));
    for (const Array *made : {&subnormal, &gradients.Fill(6), &any.FillBytes(7)}) {
      Array values = *made, back(TX_BF16, values.size());
      Sent sent(values.size());
      int64_t rest = -7;
      caller([&](const tx_parallel *, tx_error *error) {
        return tx_compress(values.tensor(), sent.message.tensor(), &sent.rest, error);
      });
      caller([&](const tx_parallel *, tx_error *error) {
        return tx_expand(sent.message.tensor(), back.tensor(), &rest, error);
      });
      EXPECT_EQ(rest, sent.rest);
      outputs.push_back(sent.message.bytes());
      outputs.push_back(back.bytes());
    }
    return outputs;
  });
}

// -- sizes --------------------------------------------------------------------------------------------------------

TEST(CompressedBytes, AreThoseOfWholeBlocksOnly) {
  const int64_t block = TX_BLOCK, largest = INT64_MAX / 2 / block * block;
  struct {
    const char *id;
    int64_t numel, bytes;
  } const cases[] = {
      {"nothing", 0, 0},
      {"less than nothing", -1, 0},
      {"a block less than nothing", -block, 0},
      {"as little as there is", INT64_MIN, 0},
      {"one", 1, 0},
      {"one less than a block", block - 1, 0},
      {"a block", block, kHeader + kFixed + 2 * 16},
      {"one more than a block", block + 1, 0},
      {"3 blocks", 3 * block, kHeader + 3 * kFixed + 2 * 16},
      {"4 blocks", 4 * block, kHeader + 4 * kFixed + 2 * 17},
      {"100 blocks", 100 * block, kHeader + 100 * kFixed + 2 * 41},
      {"as much as there is memory", largest, kHeader + largest / block * kFixed + 2 * (largest / block / 4 + 16)},
      {"more than there is memory", largest + block, 0},
      {"as much as there are numbers", INT64_MAX, 0},
      {"as many blocks as there are numbers", INT64_MAX / block * block, 0},
  };
  for (const auto &c : cases)
    EXPECT_EQ(tx_compressed_bytes(c.numel), c.bytes) << c.id;
}

TEST(CompressedBytes, AreFewerThanOfTheElements) {
  for (int64_t blocks = 1; blocks <= INT64_MAX / 2 / TX_BLOCK; blocks += 1 + blocks / 50) {
    const int64_t numel = blocks * TX_BLOCK, bytes = tx_compressed_bytes(numel);
    ASSERT_GT(bytes, 0) << blocks;
    ASSERT_LT(bytes, 2 * numel) << blocks;
    if (blocks >= 1000) {
      ASSERT_LE(static_cast<double>(bytes), 0.762 * 2 * static_cast<double>(numel)) << blocks;
    }
  }
  EXPECT_NEAR(static_cast<double>(tx_compressed_bytes(INT64_C(1) << 30)) / (1 << 30), 1.52, 0.001);
}

// -- capacity -----------------------------------------------------------------------------------------------------

struct Crowd {
  const char *id;
  int64_t blocks;
  int64_t (*block)(int64_t escape, int64_t blocks);  // the block that contains this escape
};

int64_t Last(int64_t escape, int64_t blocks) {
  return blocks - 1 - escape / (TX_BLOCK - 1);
}
int64_t First(int64_t escape, int64_t) {
  return escape / (TX_BLOCK - 1);
}
int64_t Each(int64_t escape, int64_t blocks) {
  return escape % blocks;
}

const Crowd kCrowds[] = {
    {"one_block", 1, First},          {"three_blocks_each", 3, Each},
    {"three_blocks_last", 3, Last},   {"four_blocks_each", 4, Each},
    {"four_blocks_first", 4, First},  {"64_blocks_each", 64, Each},
    {"64_blocks_first", 64, First},   {"64_blocks_last", 64, Last},
    {"1000_blocks_each", 1000, Each}, {"1000_blocks_first", 1000, First},
    {"1000_blocks_last", 1000, Last},
};

class Capacity : public testing::TestWithParam<Crowd> {};

Patterns WithEscapes(const Crowd &crowd, int64_t escapes) {
  Patterns patterns(static_cast<size_t>(crowd.blocks * TX_BLOCK), Pattern(0, 200, 0x33));
  std::vector<int64_t> used(static_cast<size_t>(crowd.blocks));
  for (int64_t e = 0; e < escapes; e++) {
    const int64_t b = crowd.block(e, crowd.blocks), i = used[static_cast<size_t>(b)]++;
    patterns[static_cast<size_t>(b * TX_BLOCK + (i * 5 + 1) % TX_BLOCK)] =
        Pattern(e % 2, 1 + static_cast<int>(e % 185), static_cast<int>(e % 128));
  }
  return patterns;
}

TEST_P(Capacity, HoldsAsManyEscapesAsItSaysAndNoMore) {
  const Crowd &crowd = GetParam();
  const int64_t most = Most(crowd.blocks);
  for (const int64_t escapes : {most - 1, most, most + 1, most + 100}) {
    const Patterns patterns = WithEscapes(crowd, escapes);
    ASSERT_EQ(Expected(patterns).escapes, escapes);
    Array values = AsArray(patterns);
    EXPECT_EQ(Compress(values).rest > 0, escapes > most) << escapes;
    ExpectComesBack(patterns);
  }
}
INSTANTIATE_TEST_SUITE_P(Crowds, Capacity, testing::ValuesIn(kCrowds),
                         [](const auto &info) { return std::string(info.param.id); });

TEST(Compress, DisorderTravelsAsItIs) {
  for (const int64_t blocks : {1, 2, 5, 16, 17, 333}) {
    for (uint32_t seed = 0; seed < 4; seed++) {
      SCOPED_TRACE(std::to_string(blocks) + " blocks, seed " + std::to_string(seed));
      Array values(TX_BF16, blocks * TX_BLOCK);
      values.FillBytes(seed);
      OnEveryIsa([&] {
        Sent sent = Compress(values);
        EXPECT_EQ(sent.escapes(), kNot);
        EXPECT_EQ(sent.rest, 2 * values.size() + kHeader - tx_compressed_bytes(values.size()));
        EXPECT_TRUE(Arrive(sent, values).bytes() == values.bytes());
      });
    }
  }
}

// -- refusals -----------------------------------------------------------------------------------------------------

struct Call {
  tx_tensor values, message;
  int64_t *rest;
};

TEST(Compress, RefusesWithAMessageAndWritesNothing) {
  Array values = AsArray(Patterns(3 * TX_BLOCK, Pattern(0, 100, 3))), elsewhere(TX_BF16, 3 * TX_BLOCK);
  Sent sent = Compress(values);
  ASSERT_EQ(sent.rest, 0);
  struct Case {
    const char *says;
    tx_status status;
    void (*spoil)(Call &);
  };
  for (const Case &c : {
           Case{"rest must not be NULL", TX_ERROR_INVALID_ARGUMENT, [](Call &call) { call.rest = nullptr; }},
           {"values are fp16 and message is uint8", TX_ERROR_DTYPE, [](Call &call) { call.values.dtype = TX_F16; }},
           {"values are int16 and", TX_ERROR_DTYPE, [](Call &call) { call.values.dtype = TX_I16; }},
           {"values are fp32 and", TX_ERROR_DTYPE,
            [](Call &call) {
              call.values.dtype = TX_F32;
              call.values.numel = TX_BLOCK;
              call.message.numel = tx_compressed_bytes(TX_BLOCK);
            }},
           {"values[0] is int8", TX_ERROR_DTYPE, [](Call &call) { call.values.dtype = TX_I8; }},
           {"values are bf16 and message is int16", TX_ERROR_DTYPE,
            [](Call &call) {
              call.values.numel = TX_BLOCK;
              call.message.dtype = TX_I16;
              call.message.numel = tx_compressed_bytes(TX_BLOCK);
            }},
           {"message[0] is int8", TX_ERROR_DTYPE, [](Call &call) { call.message.dtype = TX_I8; }},
           {"values have 383 elements", TX_ERROR_SHAPE, [](Call &call) { call.values.numel--; }},
           {"values have 127 elements and message has 0 bytes", TX_ERROR_SHAPE,
            [](Call &call) {
              call.values.numel = TX_BLOCK - 1;
              call.message.numel = 0;
            }},
           {"values have 0 elements and message has 0 bytes", TX_ERROR_SHAPE,
            [](Call &call) { call.values.numel = call.message.numel = 0; }},
           {"values[0] has numel -128", TX_ERROR_SHAPE, [](Call &call) { call.values.numel = -TX_BLOCK; }},
           {"message has 621 bytes", TX_ERROR_SHAPE, [](Call &call) { call.message.numel--; }},
           {"of it (622) are legal", TX_ERROR_SHAPE, [](Call &call) { call.message.numel++; }},
           {"values have 256 elements and message has 622 bytes", TX_ERROR_SHAPE,
            [](Call &call) { call.values.numel -= TX_BLOCK; }},
           {"values[0] has 384 elements but no memory", TX_ERROR_INVALID_ARGUMENT,
            [](Call &call) { call.values.data = nullptr; }},
           {"message[0] has 622 elements but no memory", TX_ERROR_INVALID_ARGUMENT,
            [](Call &call) { call.message.data = nullptr; }},
           {"values[0] and message[0] share memory", TX_ERROR_OVERLAP,
            [](Call &call) { call.message.data = call.values.data; }},
           {"share memory", TX_ERROR_OVERLAP,
            [](Call &call) { call.message.data = static_cast<char *>(call.values.data) + 2 * 3 * TX_BLOCK - 1; }},
           {"share memory", TX_ERROR_OVERLAP,
            [](Call &call) { call.values.data = static_cast<char *>(call.message.data) + 621; }},
       }) {
    for (const bool expands : {false, true}) {
      SCOPED_TRACE(std::string(expands ? "expand: " : "compress: ") + c.says);
      int64_t rest = -7;
      Call call = {expands ? elsewhere.tensor() : values.tensor(), sent.message.tensor(), &rest};
      c.spoil(call);
      ExpectRefused(
          [&](tx_error *e) {
            return expands ? tx_expand(call.message, call.values, call.rest, e)
                           : tx_compress(call.values, call.message, call.rest, e);
          },
          c.status, c.says, {&values, &elsewhere, &sent.message});
      EXPECT_EQ(rest, -7);
    }
  }
}

// Adjacent memory is not an overlap.
TEST(Compress, AMessageMayFollowItsValues) {
  const int64_t bytes = 2 * TX_BLOCK, all = bytes + tx_compressed_bytes(TX_BLOCK);
  Array memory(TX_U8, all);
  int64_t rest = -7;
  const tx_tensor values = {memory.data(), TX_BLOCK, TX_BF16, 0};
  EXPECT_OK([&](tx_error *e) { return tx_compress(values, memory.slice(bytes, all), &rest, e); });
  EXPECT_OK([&](tx_error *e) { return tx_expand(memory.slice(bytes, all), values, &rest, e); });
  EXPECT_EQ(rest, 0);
}

// A message of 8 blocks with access to its parts. The bytes behind it would be valid escapes if they were read.
struct Damaged {
  static constexpr int64_t kBlocks = 8, kEscapes = 5, kBehind = 2 * 255 * kBlocks;
  Damaged() : values(AsArray(WithEscapes({"", kBlocks, Each}, kEscapes))), memory(TX_U8, Bytes() + kBehind) {
    const Sent sent = Compress(values);
    std::memcpy(memory.data(), sent.message.data(), sent.message.byte_count());
  }
  static int64_t Bytes() { return tx_compressed_bytes(kBlocks * TX_BLOCK); }
  tx_tensor message() { return memory.slice(0, Bytes()); }
  void Say(int64_t escapes) { memory.SetWord(0, escapes); }
  uint8_t &Count(int64_t block) { return memory.data()[kHeader + kBlocks + block]; }
  uint8_t &Index(int64_t escape) { return memory.data()[kHeader + kBlocks * kFixed + 2 * escape]; }
  // Sets the counts so that their sum is `escapes`.
  void CountAll(int64_t escapes) {
    for (int64_t b = 0; b < kBlocks; b++) {
      Count(b) = static_cast<uint8_t>(std::min<int64_t>(escapes, 255));
      escapes -= Count(b);
    }
  }
  Array values, memory;
};

TEST(Expand, RefusesADamagedMessage) {
  struct Case {
    const char *id, *says;
    void (*damage)(Damaged &);
  };
  for (const Case &c : {
           Case{"one escape more", "it says 6 escapes", [](Damaged &d) { d.Say(6); }},
           {"one less", "it says 4 escapes", [](Damaged &d) { d.Say(4); }},
           {"none", "it says 0 escapes", [](Damaged &d) { d.Say(0); }},
           {"more than there is space for", "it says 19 escapes",
            [](Damaged &d) {
              for (int64_t e = 0; e < Most(Damaged::kBlocks); e++)
                d.Index(e) = 1;
              d.Say(Most(Damaged::kBlocks) + 1);
              d.CountAll(Most(Damaged::kBlocks) + 1);
            }},
           {"far more", "it says 2040 escapes",
            [](Damaged &d) {
              for (int64_t e = 0; e < Most(Damaged::kBlocks); e++)
                d.Index(e) = 1;
              d.Say(8 * 255);
              d.CountAll(8 * 255);
            }},
           {"as many as there are numbers", "it says 9223372036854775807", [](Damaged &d) { d.Say(INT64_MAX); }},
           {"less than none, and not what stands for that", "it says -2 escapes", [](Damaged &d) { d.Say(-2); }},
           {"as few as there are numbers", "it says -9223372036854775808", [](Damaged &d) { d.Say(INT64_MIN); }},
           {"the sum of the counts, less 256", "it says 5", [](Damaged &d) { d.CountAll(256 + 5); }},
           {"a count that is too large", "it says 5", [](Damaged &d) { d.Count(7)++; }},
           {"a count that is too small", "it says 5", [](Damaged &d) { d.Count(0)--; }},
           {"the first escape behind its block", "message is not one", [](Damaged &d) { d.Index(0) = TX_BLOCK; }},
           {"the last escape far behind its block", "of 1024 elements", [](Damaged &d) { d.Index(4) = 255; }},
       }) {
    SCOPED_TRACE(c.id);
    Damaged d;
    Array back(TX_BF16, d.values.size());
    back.FillBytes(3);
    c.damage(d);
    int64_t rest = -7;
    ExpectRefused([&](tx_error *e) { return tx_expand(d.message(), back.tensor(), &rest, e); }, TX_ERROR_BAD_STATE,
                  c.says, {&back, &d.memory});
    EXPECT_EQ(rest, -7);
  }
}

// The undamaged message is accepted: the helper's access to its parts is right.
TEST(Expand, TakesTheSameMessageUndamaged) {
  Damaged d;
  d.Say(Damaged::kEscapes);
  for (int64_t e = 0; e < Damaged::kEscapes; e++) {
    EXPECT_EQ(d.Count(e), 1);
    EXPECT_EQ(d.Index(e), 1);
  }
  Array back(TX_BF16, d.values.size());
  int64_t rest = -7;
  EXPECT_OK([&](tx_error *e) { return tx_expand(d.message(), back.tensor(), &rest, e); });
  EXPECT_EQ(rest, 0);
  EXPECT_EQ(back.bytes(), d.values.bytes());
}

}  // namespace
