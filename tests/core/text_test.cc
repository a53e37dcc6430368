// csrc/core/text, nearest: the parts that messages are made of.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

extern "C" {
#include "csrc/core/suggest.h"
#include "csrc/core/text.h"
#include "csrc/torch_ext.h"
}

namespace {

TEST(Text, is_cut_and_never_overrun_but_counts_everything) {
  for (size_t capacity = 0; capacity < 12; capacity++) {
    std::vector<char> buffer(capacity + 1, '#');
    tx_text text = tx_text_in(buffer.data(), capacity);
    tx_text_add(&text, "abc");
    tx_text_add(&text, "%d", 45);
    tx_text_add(&text, "%s", "");
    tx_text_add(&text, "%s", "fgh");
    EXPECT_EQ(text.length, 8u);
    EXPECT_EQ(buffer[capacity], '#') << capacity;
    if (capacity > 0) {
      EXPECT_EQ(std::string(buffer.data()), std::string("abc45fgh").substr(0, capacity - 1));
    }
  }
}

TEST(Text, walks_lists) {
  const auto items = [](const char *list, const char *separators) {
    std::vector<std::string> found;
    const char *item;
    for (int64_t length; (length = tx_text_item(&list, separators, &item)) >= 0;)
      found.emplace_back(item, length);
    return found;
  };
  using Items = std::vector<std::string>;
  EXPECT_EQ(items("", ","), Items{});
  EXPECT_EQ(items("one", ","), Items{"one"});
  EXPECT_EQ(items("one, two,three", ","), (Items{"one", "two", "three"}));
  EXPECT_EQ(items("a|b, ", "|,"), (Items{"a", "b"}));
  EXPECT_TRUE(tx_text_is("onetwo", 3, "one"));
  EXPECT_FALSE(tx_text_is("onetwo", 3, "onetwo"));
  EXPECT_FALSE(tx_text_is("onetwo", 3, "on"));
}

struct Distance {
  const char *a, *b;
  int64_t distance;
};

TEST(Nearest, edit_distance) {
  const Distance cases[] = {
      {"", "", 0},         {"", "abc", 3},           {"abc", "abc", 0}, {"abc", "abd", 1},           {"ab", "ba", 1},
      {"lr", "min_lr", 4}, {"kitten", "sitting", 3}, {"ca", "abc", 3},  {"exp_avg", "exp_avg_sq", 3}};
  for (const Distance &c : cases) {
    EXPECT_EQ(tx_edit_distance(c.a, c.b), c.distance) << c.a << " " << c.b;
    EXPECT_EQ(tx_edit_distance(c.b, c.a), c.distance) << c.b << " " << c.a;
  }
  const std::string long_name(5000, 'x');
  EXPECT_EQ(tx_edit_distance(long_name.c_str(), ""), 63) << "long names are cut, not overrun";
}

TEST(Nearest, first_among_equals_and_none_of_nothing) {
  const char *const names[] = {"beta", "bets", "zeta"};
  EXPECT_STREQ(tx_nearest("betx", names, 3), "beta");
  EXPECT_STREQ(tx_nearest("zta", names, 3), "zeta");
  EXPECT_EQ(tx_nearest("x", names, 0), nullptr);
}

// The UTF-8 encoding of a code point (RFC 3629), built from the number.
std::string Encoded(uint32_t point) {
  const auto last = [&](int shift) { return static_cast<char>(0x80 | (point >> shift & 0x3f)); };
  if (point < 0x80) return {static_cast<char>(point)};
  if (point < 0x800) return {static_cast<char>(0xc0 | point >> 6), last(0)};
  if (point < 0x10000) return {static_cast<char>(0xe0 | point >> 12), last(6), last(0)};
  return {static_cast<char>(0xf0 | point >> 18), last(12), last(6), last(0)};
}

TEST(Text, every_character_is_kept_and_every_part_of_one_is_not) {
  for (uint32_t point = 1; point < 0x110000; point += point < 0x3000 ? 1 : 61) {
    if (point >= 0xd800 && point < 0xe000) continue;
    const std::string character = Encoded(point);
    std::string text = "a" + character + "b";
    tx_text_repair(text.data());
    ASSERT_EQ(text, "a" + character + "b") << point;
    for (size_t bytes = 1; bytes < character.size(); bytes++) {
      std::string cut = character.substr(0, bytes) + "'" + character.substr(bytes);
      tx_text_repair(cut.data());
      ASSERT_EQ(cut, std::string(bytes, '?') + "'" + std::string(character.size() - bytes, '?')) << point;
    }
  }
  for (const char *none : {"\xc0\x80", "\xc1\xbf", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xed\xbf\xbf", "\xf0\x8f\xbf\xbf",
                           "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "\x80"}) {
    std::string text = none;
    tx_text_repair(text.data());
    EXPECT_EQ(text, std::string(text.size(), '?'));
  }
}

// Keys and values with arbitrary bytes, truncated wherever messages truncate them.
TEST(Text, messages_are_utf8_whatever_they_name) {
  std::mt19937 gen(1);
  for (int round = 0; round < 3000; round++) {
    std::string word;
    for (uint32_t n = gen() % 1500; n > 0; n--)
      word += gen() % 9 ? Encoded(1 + gen() % 0x2fff) : std::string(1, static_cast<char>(1 + gen() % 255));
    word = ("word" + word).substr(gen() % 4, 1 + gen() % 1400);
    tx_dtype dtype;
    tx_error error = {};
    ASSERT_NE(tx_dtype_coerce(gen() % 2 ? "main_grads_dtype" : word.c_str(), word.c_str(), &dtype, &error), TX_OK);
    std::string mended = error.message;
    ASSERT_GT(mended.size(), 10u);
    tx_text_repair(mended.data());
    ASSERT_EQ(mended, error.message) << round;
  }
}

}  // namespace
