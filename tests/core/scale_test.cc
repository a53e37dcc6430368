// csrc/core/scale: the dynamic loss scale (G3).
#include <gtest/gtest.h>

#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "csrc/torch_ext.h"

namespace {

tx_scale Make(double scale, double min_scale, int64_t interval, int64_t hysteresis) {
  tx_scale s = TX_SCALE_INIT;
  s.scale = scale;
  s.min_scale = min_scale;
  s.growth_interval = interval;
  s.hysteresis = s.hysteresis_left = hysteresis;
  return s;
}

struct Sequence {
  const char *id;
  tx_scale start;
  const char *steps;  // '.' clean, 'x' overflow
  double scale;
  int64_t clean_steps;
  int64_t hysteresis_left;
};

void PrintTo(const Sequence &c, std::ostream *out) {
  *out << c.id;
}

class ScaleSequenceTest : public testing::TestWithParam<Sequence> {};

TEST_P(ScaleSequenceTest, G3) {
  tx_scale s = GetParam().start;
  for (const char *step = GetParam().steps; *step; step++) {
    tx_error error;
    ASSERT_EQ(tx_scale_update(&s, *step == 'x', &error), TX_OK) << error.message;
  }
  EXPECT_EQ(s.scale, GetParam().scale);
  EXPECT_EQ(s.clean_steps, GetParam().clean_steps);
  EXPECT_EQ(s.hysteresis_left, GetParam().hysteresis_left);
}

const Sequence kSequences[] = {{"nothing", Make(8, 1, 3, 2), "", 8, 0, 2},
                               {"grows_at_the_interval", Make(8, 1, 3, 2), "...", 16, 0, 2},
                               {"not_before", Make(8, 1, 3, 2), "..", 8, 2, 2},
                               {"grows_each_interval", Make(8, 1, 3, 2), ".......", 32, 1, 2},
                               {"first_overflow_is_forgiven", Make(8, 1, 3, 2), "x", 8, 0, 1},
                               {"second_overflow_halves", Make(8, 1, 3, 2), "xx", 4, 0, 0},
                               {"then_each_overflow_halves", Make(8, 1, 3, 2), "xxx", 2, 0, 0},
                               {"clean_steps_alone_do_not_forgive", Make(8, 1, 3, 2), "x.x", 4, 0, 0},
                               {"overflow_starts_the_count_again", Make(8, 1, 3, 2), "..x..", 8, 2, 1},
                               {"growth_makes_hysteresis_whole", Make(8, 1, 3, 2), "x...x", 16, 0, 1},
                               {"hysteresis_1_halves_at_once", Make(8, 1, 3, 1), "x", 4, 0, 0},
                               {"minimum", Make(8, 3, 3, 1), "xx", 3, 0, 0},
                               {"stays_at_minimum", Make(8, 3, 3, 1), "xxxx", 3, 0, 0},
                               {"interval_1", Make(8, 1, 1, 1), "..", 32, 0, 1},
                               {"recovers_from_minimum", Make(2, 1, 2, 1), "xx..", 2, 0, 1},
                               {"never_beyond_fp32", Make(0x1p127, 1, 1, 1), "..", 0x1p127, 0, 1}};
INSTANTIATE_TEST_SUITE_P(Sequences, ScaleSequenceTest, testing::ValuesIn(kSequences),
                         [](const auto &info) { return std::string(info.param.id); });

TEST(Scale, G3_doubles_after_1000_clean_steps_by_default) {
  tx_scale s = TX_SCALE_INIT;
  for (int i = 0; i < 999; i++)
    ASSERT_EQ(tx_scale_update(&s, 0, nullptr), TX_OK);
  EXPECT_EQ(s.scale, 32768.0);
  ASSERT_EQ(tx_scale_update(&s, 0, nullptr), TX_OK);
  EXPECT_EQ(s.scale, 65536.0);
}

TEST(Scale, G3_stays_legal_under_any_sequence_and_survives_a_copy) {
  for (uint32_t seed = 1; seed < 200; seed++) {
    tx_scale s = Make(1024, 0.25, 1 + seed % 5, 1 + seed % 3);
    tx_scale copy = s;
    uint32_t random = seed * 2654435761u;
    for (int i = 0; i < 300; i++) {
      random = random * 1664525u + 1013904223u;
      const int32_t found = (random >> 16) % 3 == 0;
      tx_scale saved;
      std::memcpy(&saved, &copy, sizeof saved);  // the bytes are the whole state
      copy = saved;
      ASSERT_EQ(tx_scale_update(&s, found, nullptr), TX_OK);
      ASSERT_EQ(tx_scale_update(&copy, found, nullptr), TX_OK);
      ASSERT_EQ(std::memcmp(&s, &copy, sizeof s), 0);
      ASSERT_GE(s.scale, s.min_scale);
      ASSERT_TRUE(std::isfinite(static_cast<float>(s.scale)));
      ASSERT_LT(s.clean_steps, s.growth_interval);
    }
  }
}

TEST(Scale, G3_illegal_state_is_an_error_and_stays) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const struct {
    const char *name;
    void (*damage)(tx_scale *, double);
  } cases[] = {
      {"growth_factor", [](tx_scale *s, double) { s->growth_factor = 1; }},
      {"growth_factor", [](tx_scale *s, double x) { s->growth_factor = x; }},
      {"backoff_factor", [](tx_scale *s, double) { s->backoff_factor = 1; }},
      {"backoff_factor", [](tx_scale *s, double) { s->backoff_factor = 0; }},
      {"backoff_factor", [](tx_scale *s, double x) { s->backoff_factor = x; }},
      {"min_scale", [](tx_scale *s, double) { s->min_scale = 0; }},
      {"min_scale", [](tx_scale *s, double x) { s->min_scale = x; }},
      {"scale", [](tx_scale *s, double) { s->scale = s->min_scale / 2; }},
      {"scale", [](tx_scale *s, double x) { s->scale = x; }},
      {"scale", [](tx_scale *s, double) { s->scale = 1e39; }},
      {"growth_interval", [](tx_scale *s, double) { s->growth_interval = 0; }},
      {"hysteresis", [](tx_scale *s, double) { s->hysteresis = 0; }},
      {"clean_steps", [](tx_scale *s, double) { s->clean_steps = s->growth_interval; }},
      {"clean_steps", [](tx_scale *s, double) { s->clean_steps = -1; }},
      {"hysteresis_left", [](tx_scale *s, double) { s->hysteresis_left = s->hysteresis + 1; }},
      {"hysteresis_left", [](tx_scale *s, double) { s->hysteresis_left = -1; }},
  };
  for (const auto &c : cases) {
    tx_scale s = TX_SCALE_INIT;
    c.damage(&s, nan);
    const tx_scale before = s;
    tx_error error;
    EXPECT_EQ(tx_scale_update(&s, 1, &error), TX_ERROR_ILLEGAL_VALUE) << c.name;
    EXPECT_EQ(std::memcmp(&s, &before, sizeof s), 0) << c.name;
    EXPECT_NE(std::string(error.message).find(c.name), std::string::npos) << error.message;
  }
  tx_scale s = TX_SCALE_INIT;
  s.size = 0;
  EXPECT_EQ(tx_scale_update(&s, 0, nullptr), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_scale_update(nullptr, 0, nullptr), TX_ERROR_INVALID_ARGUMENT);
}

TEST(Scale, G3_from_the_policy) {
  tx_policy_args args = TX_POLICY_ARGS_INIT;
  args.fp16 = 1;
  tx_setting window = {};
  window.key = "loss_scale_window";
  window.kind = TX_VALUE_INT;
  window.integer = 250;
  args.optimizer.n = 1;
  args.optimizer.settings = &window;
  tx_policy policy = TX_POLICY_INIT;
  tx_error error;
  ASSERT_EQ(tx_policy_resolve(&args, &policy, nullptr, 0, &error), TX_OK) << error.message;
  tx_scale s = TX_SCALE_INIT;
  s.scale = 3;
  ASSERT_EQ(tx_scale_from_policy(&policy, &s, &error), TX_OK) << error.message;
  EXPECT_EQ(s.scale, 32768.0);
  EXPECT_EQ(s.min_scale, 1.0);
  EXPECT_EQ(s.growth_interval, 250);
  EXPECT_EQ(s.hysteresis, 2);
  EXPECT_EQ(s.hysteresis_left, 2);
  EXPECT_EQ(s.growth_factor, 2.0);
  EXPECT_EQ(s.backoff_factor, 0.5);
  EXPECT_EQ(s.clean_steps, 0);
  s.size = 1;
  EXPECT_EQ(tx_scale_from_policy(&policy, &s, nullptr), TX_ERROR_INVALID_ARGUMENT);
}

}  // namespace
