// csrc/core/text, nearest: what messages are made of.
#include <gtest/gtest.h>

#include <string>
#include <vector>

extern "C" {
#include "csrc/core/suggest.h"
#include "csrc/core/text.h"
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

}  // namespace
