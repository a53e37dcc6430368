// csrc/core/policy_states: one word for all states (tx_states), settings on top of a policy (tx_policy_with), the
// moments of one parameter (tx_policy_moments), and other libraries' names for our values (other_names.def).
#include <gtest/gtest.h>

#include <cstring>

extern "C" {
#include "csrc/core/suggest.h"
}
#include "tests/core/policy_load.h"

namespace {

#define MOMENTS(dtype) " exp_avg_dtype=" dtype " exp_avg_sq_dtype=" dtype

struct Word {
  const char *id;
  const char *load;
  const char *expected;
};

class StatesTest : public testing::TestWithParam<Word> {};

TEST_P(StatesTest, decides_the_fields) {
  const Resolved r = Resolve(GetParam().load);
  ASSERT_EQ(r.status, TX_OK) << r.error.message;
  for (const auto &[field, value] : Pairs(GetParam().expected))
    EXPECT_EQ(r[field], value) << field << ": " << r.Origin(field);
}

constexpr Word kWords[] = {
    {"none", "model=bf16 opt.states=None", BF16 " states=None"},
    {"none_by_text", "model=bf16 opt.states=none", BF16 " states=None"},
    {"bf16_fp32", "model=bf16 opt.states=fp32", BF16 MOMENTS("fp32") " states=fp32"},
    {"bf16_bf16", "model=bf16 opt.states=bf16", BF16 " states=bf16"},
    {"bf16_remainder", "model=bf16 opt.states=bf16_remainder", BF16 " store_param_remainders=True"},
    {"bf16_8bit", "model=bf16 opt.states=8bit", BF16 MOMENTS("uint8") " store_param_remainders=True"},
    {"bf16_8bit_by_number", "model=bf16 opt.states=4", BF16 MOMENTS("uint8") " store_param_remainders=True"},
    {"fp32_fp32", "model=fp32 opt.states=fp32", FP32},
    {"fp32_bf16", "model=fp32 opt.states=bf16", FP32 MOMENTS("bf16") " use_precision_aware_optimizer=True"},
    {"fp32_8bit", "model=fp32 opt.states=8bit",
     FP32 MOMENTS("uint8") " use_precision_aware_optimizer=True store_param_remainders=False"},
    {"fp16_fp32", "model=fp16 opt.states=fp32", FP16},
    {"fp16_bf16", "model=fp16 opt.states=bf16", FP16 MOMENTS("bf16")},
    {"fp16_8bit", "model=fp16 opt.states=8bit", FP16 MOMENTS("uint8") " main_params_dtype=fp32"},
    {"conservative_bf16", "model=bf16 preset=conservative opt.states=bf16",
     ALL_FP32 MOMENTS("bf16") " use_precision_aware_optimizer=True"},
    {"conservative_8bit", "model=bf16 preset=conservative opt.states=8bit",
     ALL_FP32 MOMENTS("uint8") " use_precision_aware_optimizer=True store_param_remainders=True"},
    {"shards_8bit", "model=bf16 shard=fp32 opt.states=8bit", "exp_avg_dtype=uint8 exp_avg_sq_dtype=uint8"},
    {"shards_8bit_have_no_remainders", "model=bf16 shard=fp32 opt.states=8bit", "store_param_remainders=False"},
    {"config_counts_like_an_override", "model=bf16 config.states=8bit",
     BF16 MOMENTS("uint8") " store_param_remainders=True"},
    {"override_over_config", "model=bf16 config.states=8bit opt.states=bf16", BF16},
    {"hook_over_override", "model=bf16 opt.states=bf16 opt_hook.states=8bit",
     BF16 MOMENTS("uint8") " store_param_remainders=True"},
    {"keys_that_agree", "model=bf16 opt.states=8bit opt.exp_avg_dtype=fp8 opt.store_param_remainders=True",
     BF16 MOMENTS("uint8") " store_param_remainders=True"},
    {"min_8bit_size", "model=bf16 opt.min_8bit_size=4096", BF16 " min_8bit_size=4096"},
    {"min_8bit_size_from_a_float", "model=bf16 opt.min_8bit_size=4e3", "min_8bit_size=4000"},
};
INSTANTIATE_TEST_SUITE_P(States, StatesTest, testing::ValuesIn(kWords), Id<Word>);

TEST(StatesOrigin, what_a_word_decides_follows_it) {
  const Resolved r = Resolve("model=bf16 opt.states=8bit opt.exp_avg_dtype=fp8");
  EXPECT_EQ(r.Origin("states"), "override");
  EXPECT_EQ(r.Origin("exp_avg_dtype"), "override");
  EXPECT_EQ(r.Origin("exp_avg_sq_dtype"), "follows states");
  EXPECT_EQ(r.Origin("store_param_remainders"), "follows states");
  EXPECT_EQ(r.Origin("main_params_dtype"), "default");
  EXPECT_EQ(r.Origin("main_grads_dtype"), "dtype");
}

TEST(StatesRow, other_parameters_follow_the_word) {
  const Resolved r = Resolve("model=bf16 opt.states=8bit");
  ASSERT_EQ(r.status, TX_OK);
  for (const tx_dtype dtype : {TX_F32, TX_F16, TX_BF16}) {
    tx_policy row = TX_POLICY_INIT;
    ASSERT_EQ(tx_policy_row(&r.policy, r.origins, dtype, &row, nullptr), TX_OK);
    EXPECT_EQ(row.exp_avg_dtype, TX_U8);
    EXPECT_EQ(row.states, TX_STATES_8BIT);
    EXPECT_EQ(row.store_param_remainders, dtype == TX_BF16);
    EXPECT_EQ(row.main_params_dtype, TX_F32);
  }
  const Resolved remainder = Resolve("model=bf16 opt.states=bf16_remainder");
  tx_policy row = TX_POLICY_INIT;
  ASSERT_EQ(tx_policy_row(&remainder.policy, remainder.origins, TX_F32, &row, nullptr), TX_OK);
  EXPECT_EQ(row.exp_avg_dtype, TX_BF16) << "fp32 norms of a bf16 model: the word's moments, and no remainders";
  EXPECT_EQ(row.store_param_remainders, 0);
}

struct Refused {
  const char *id;
  const char *load;
  tx_status status;
  const char *message;
};

class StatesRefusedTest : public testing::TestWithParam<Refused> {};

TEST_P(StatesRefusedTest, in_these_words) {
  const Resolved r = Resolve(GetParam().load);
  EXPECT_EQ(r.status, GetParam().status);
  EXPECT_STREQ(r.error.message, GetParam().message);
}

#define SETS_ALL ": states sets both moments and the masters; change one of them"
#define OF_STATES "; legal: none, fp32, bf16, bf16_remainder, 8bit"
#define OF_STRATEGIES "; legal: no_shard, optim, optim_grads, optim_grads_params"
#define STATES(word) "override_optimizer_config states=" word " contradicts "
#define UNKNOWN(word) "override_optimizer_config: states='" word "' is not legal"
#define STRATEGY(word) "override_ddp_config: data_parallel_sharding_strategy='" word "' is not legal"

constexpr Refused kRefused[] = {
    {"moment", "model=bf16 opt.states=8bit opt.exp_avg_dtype=bf16", TX_ERROR_CONFLICT,
     STATES("8bit") "override_optimizer_config exp_avg_dtype=bf16" SETS_ALL},
    {"other_moment", "model=bf16 opt.states=bf16 opt.exp_avg_sq_dtype=fp32", TX_ERROR_CONFLICT,
     STATES("bf16") "override_optimizer_config exp_avg_sq_dtype=fp32" SETS_ALL},
    {"moment_of_a_hook", "model=bf16 opt.states=8bit opt_hook.exp_avg_dtype=bf16", TX_ERROR_CONFLICT,
     STATES("8bit") "override_optimizer_config (hook) exp_avg_dtype=bf16" SETS_ALL},
    {"no_remainders", "model=bf16 opt.states=8bit opt.store_param_remainders=False", TX_ERROR_CONFLICT,
     STATES("8bit") "override_optimizer_config store_param_remainders=False" SETS_ALL},
    {"remainders", "model=bf16 opt.states=bf16 opt.store_param_remainders=True", TX_ERROR_CONFLICT,
     STATES("bf16") "override_optimizer_config store_param_remainders=True" SETS_ALL},
    {"no_masters", "model=bf16 opt.states=8bit opt.main_params_dtype=None", TX_ERROR_CONFLICT,
     STATES("8bit") "override_optimizer_config main_params_dtype=None: every value of states keeps masters in 32 bits; "
                    "change one of them"},
    {"no_masters_by_the_old_name", "model=bf16 opt.states=bf16 ddp.preserve_fp32_weights=False", TX_ERROR_CONFLICT,
     STATES("bf16") "override_ddp_config preserve_fp32_weights=False: every value of states keeps masters in 32 bits; "
                    "change one of them"},
    {"precision_aware_off", "model=bf16 opt.states=bf16 opt.use_precision_aware_optimizer=False", TX_ERROR_CONFLICT,
     STATES("bf16") "override_optimizer_config use_precision_aware_optimizer=False: without the precision-aware "
                    "optimizer every state is fp32; change one of them"},
    {"remainders_of_fp32", "model=fp32 opt.states=bf16_remainder", TX_ERROR_CONFLICT,
     STATES("bf16_remainder") "the model's param_dtype=fp32: remainders need bf16 weights; "
                              "change one of them"},
    {"remainders_of_fp16", "model=fp16 opt.states=bf16_remainder", TX_ERROR_CONFLICT,
     STATES("bf16_remainder") "the model's param_dtype=fp16: remainders need bf16 weights; "
                              "change one of them"},
    {"remainders_without_bf16", "bf16=0 opt.states=bf16_remainder", TX_ERROR_CONFLICT,
     STATES("bf16_remainder") "the argument bf16=False: remainders need bf16 weights; change one of them"},
    {"remainders_of_shards", "model=bf16 shard=fp32 opt.states=bf16_remainder", TX_ERROR_CONFLICT,
     STATES("bf16_remainder") "the model's shard_dtype=fp32: fp32 shards are their own masters, and have no "
                              "remainders; change one of them"},
    {"config_against_itself", "model=bf16 config.states=8bit config.exp_avg_dtype=bf16", TX_ERROR_CONFLICT,
     "optimizer_config exp_avg_dtype=bf16 contradicts the word states=8bit: the latter is stronger, and "
     "override_optimizer_config is stronger than both; change one of them"},
    {"config_against_an_override", "model=bf16 config.states=8bit opt.exp_avg_dtype=bf16", TX_ERROR_CONFLICT,
     "optimizer_config states=8bit contradicts override_optimizer_config exp_avg_dtype=bf16" SETS_ALL},
    {"others_8bit", "model=bf16 opt.states=int8", TX_ERROR_ILLEGAL_VALUE,
     UNKNOWN("int8") ": int8 is 8bit here" OF_STATES},
    {"others_bf16", "model=bf16 opt.states=BFloat16", TX_ERROR_ILLEGAL_VALUE,
     UNKNOWN("BFloat16") ": BFloat16 is bf16 here" OF_STATES},
    {"nearest", "model=bf16 opt.states=bf61", TX_ERROR_ILLEGAL_VALUE,
     UNKNOWN("bf61") ": the nearest is bf16" OF_STATES},
    {"hyphen", "model=bf16 opt.states=bf16-remainder", TX_ERROR_ILLEGAL_VALUE,
     UNKNOWN("bf16-remainder") ": the nearest is bf16_remainder" OF_STATES},
    {"nothing_near", "model=bf16 opt.states=adafactor", TX_ERROR_ILLEGAL_VALUE, UNKNOWN("adafactor") OF_STATES},
    {"a_number", "model=bf16 opt.states=5", TX_ERROR_ILLEGAL_VALUE,
     "override_optimizer_config: states=5 is not legal" OF_STATES},
    {"size_below_0", "model=bf16 opt.min_8bit_size=-1", TX_ERROR_ILLEGAL_VALUE,
     "override_optimizer_config: min_8bit_size=-1 is not legal; legal: [0, 2147483647]"},
    {"size_too_large", "model=bf16 opt.min_8bit_size=2147483648", TX_ERROR_ILLEGAL_VALUE,
     "override_optimizer_config: min_8bit_size=2147483648 is not legal; legal: [0, 2147483647]"},
    {"zero2", "ddp.data_parallel_sharding_strategy=zero2", TX_ERROR_ILLEGAL_VALUE,
     STRATEGY("zero2") ": ZeRO-2 is optim_grads here" OF_STRATEGIES},
    {"ZeRO_3", "ddp.data_parallel_sharding_strategy=ZeRO-3", TX_ERROR_ILLEGAL_VALUE,
     STRATEGY("ZeRO-3") ": ZeRO-3 is optim_grads_params here" OF_STRATEGIES},
    {"fsdp", "ddp.data_parallel_sharding_strategy=FSDP", TX_ERROR_ILLEGAL_VALUE,
     STRATEGY("FSDP") ": FSDP is optim_grads_params here" OF_STRATEGIES},
    {"misspelt_strategy", "ddp.data_parallel_sharding_strategy=optim_grad", TX_ERROR_ILLEGAL_VALUE,
     STRATEGY("optim_grad") ": the nearest is optim_grads" OF_STRATEGIES},
};
INSTANTIATE_TEST_SUITE_P(States, StatesRefusedTest, testing::ValuesIn(kRefused), Id<Refused>);

TEST(OtherNames, are_for_values_that_exist_and_are_no_values_themselves) {
  const struct {
    const char *key, *word, *what, *ours;
  } names[] = {
#define X(key, word, what, ours) {key, word, what, ours},
#include "csrc/core/other_names.def"
#undef X
  };
  for (const auto &name : names) {
    const int32_t field = tx_policy_find(name.key);
    ASSERT_LT(field, TX_POLICY_FIELDS) << name.key;
    const auto legal = Split(tx_policy_field_at(field)->legal, ", ");
    EXPECT_NE(std::find(legal.begin(), legal.end(), name.ours), legal.end()) << name.ours;
    if (std::strcmp(name.word, "none") != 0) {
      EXPECT_EQ(std::find(legal.begin(), legal.end(), name.word), legal.end()) << name.word;
    }
    const char *what = nullptr;
    EXPECT_STREQ(tx_other_name(name.key, name.word, &what), name.ours) << name.word << ": no other row before it";
    EXPECT_STREQ(what, *name.what ? name.what : name.word);
  }
  const char *what = nullptr;
  EXPECT_STREQ(tx_other_name("states", "F_l.o a-t32", &what), "fp32");
  EXPECT_EQ(tx_other_name("states", "zero2", &what), nullptr) << "of another key";
  EXPECT_EQ(tx_other_name("states", "float323", &what), nullptr);
  EXPECT_EQ(tx_other_name("states", "", &what), nullptr);
}

TEST(StrategyFind, knows_names_and_says_what_others_mean) {
  int32_t strategy = -1;
  tx_error error;
  ASSERT_EQ(tx_strategy_find("strategy ", "optim_grads", &strategy, &error), TX_OK);
  EXPECT_EQ(strategy, TX_OPTIM_GRADS);
  ASSERT_EQ(tx_strategy_find("strategy ", "zero-1", &strategy, &error), TX_ERROR_ILLEGAL_VALUE);
  EXPECT_STREQ(error.message, "strategy 'zero-1' is not legal: ZeRO-1 is optim here" OF_STRATEGIES);
  EXPECT_EQ(tx_strategy_find("strategy ", nullptr, &strategy, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_strategy_find(nullptr, "optim", &strategy, nullptr), TX_ERROR_INVALID_ARGUMENT);
}

// -- settings on top of a policy

tx_setting Text(const char *key, const char *text) {
  tx_setting s = {};
  s.key = key;
  s.kind = TX_VALUE_TEXT;
  s.text = text;
  return s;
}

Resolved With(const Resolved &base, const std::vector<tx_setting> &settings) {
  Resolved r;
  r.status = tx_policy_with(&base.policy, base.origins, settings.data(), static_cast<int64_t>(settings.size()),
                            &r.policy, r.origins, &r.error);
  return r;
}

TEST(PolicyWith, nothing_changes_nothing) {
  for (const char *load : {"", "model=bf16", "bf16=1", "model=fp16 opt.states=8bit", "model=bf16 full_shard=1",
                           "model=fp32 preset=conservative opt.exp_avg_dtype=bf16", "model=bf16 shard=fp32",
                           "model=bf16 config.lr=0.1 opt_hook.clip_grad=1.0 ddp.bucket_size=5",
                           "bf16=1 fp16=1 opt.main_grads_dtype=None", "opt.param_dtype=fp32"}) {
    const Resolved base = Resolve(load);
    ASSERT_EQ(base.status, TX_OK) << load;
    const Resolved r = With(base, {});
    ASSERT_EQ(r.status, TX_OK) << load << r.error.message;
    EXPECT_EQ(std::memcmp(&r.policy, &base.policy, sizeof r.policy), 0) << load;
    for (int32_t f = 0; f < TX_POLICY_FIELDS; f++) {
      EXPECT_EQ(r.Origin(tx_policy_field_at(f)->name),
                base.origins[f].source == TX_SOURCE_HOOK ? "hook" : base.Origin(tx_policy_field_at(f)->name))
          << load;
    }
  }
}

TEST(PolicyWith, is_the_policy_that_an_override_would_have_made) {
  for (const std::string load :
       {"model=bf16", "model=fp16", "model=fp32", "model=bf16 preset=conservative", "model=bf16 shard=fp32",
        "model=bf16 opt.exp_avg_dtype=fp32", "model=bf16 opt.states=8bit", "model=bf16 opt.store_param_remainders=True",
        "model=fp32 opt.use_precision_aware_optimizer=False", "model=bf16 full_shard=1"}) {
    for (const char *word : {"fp32", "bf16", "bf16_remainder", "8bit"}) {
      if (load.find("states") != std::string::npos && std::strcmp(word, "8bit") != 0) continue;
      const Resolved r = With(Resolve(load), {Text("states", word)});
      const std::string more = load.find("states") == std::string::npos ? std::string(" opt.states=") + word : "";
      const Resolved expected = Resolve(load + more);
      ASSERT_EQ(r.status, expected.status) << load << more << r.error.message;
      if (r.status == TX_OK) {
        EXPECT_EQ(std::memcmp(&r.policy, &expected.policy, sizeof r.policy), 0) << load << more;
      }
    }
  }
}

TEST(PolicyWith, a_contradiction_names_both) {
  const Resolved base = Resolve("model=bf16 opt.exp_avg_dtype=fp32 opt_hook.min_8bit_size=7");
  EXPECT_STREQ(With(base, {Text("states", "8bit")}).error.message,
               "the argument states=8bit contradicts the policy's exp_avg_dtype=fp32" SETS_ALL);
  tx_setting size = {};
  size.key = "min_8bit_size";
  size.kind = TX_VALUE_INT;
  size.integer = 8;
  const Resolved r = With(base, {size});
  EXPECT_EQ(r.status, TX_ERROR_CONFLICT);
  EXPECT_STREQ(r.error.message,
               "the argument min_8bit_size=8 contradicts the policy's min_8bit_size=7: both set the "
               "same key; change one of them");
  size.integer = 7;
  EXPECT_EQ(With(base, {size}).status, TX_OK);
  EXPECT_STREQ(With(Resolve("model=bf16 opt.states=bf16"), {Text("states", "8bit")}).error.message,
               "the argument states=8bit contradicts the policy's states=bf16: both set the same key; change one of "
               "them");
  EXPECT_STREQ(With(Resolve("model=fp32"), {Text("states", "bf16_remainder")}).error.message,
               "the argument states=bf16_remainder contradicts the model's param_dtype=fp32: remainders need bf16 "
               "weights; change one of them");
  EXPECT_STREQ(With(base, {Text("states", "8-bit")}).error.message,
               "the argument: states='8-bit' is not legal: the nearest is 8bit" OF_STATES);
  EXPECT_EQ(With(base, {Text("state", "8bit")}).status, TX_ERROR_UNKNOWN_KEY);
}

TEST(PolicyWith, arguments) {
  const Resolved base = Resolve("model=bf16");
  tx_policy result = TX_POLICY_INIT, unsized = {};
  tx_origin origins[TX_POLICY_FIELDS];
  tx_error error;
  EXPECT_EQ(tx_policy_with(nullptr, base.origins, nullptr, 0, &result, origins, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_policy_with(&base.policy, nullptr, nullptr, 0, &result, origins, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_policy_with(&base.policy, base.origins, nullptr, 1, &result, origins, &error),
            TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_policy_with(&base.policy, base.origins, nullptr, 0, &unsized, origins, &error),
            TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_policy_with(&base.policy, base.origins, nullptr, 0, &result, nullptr, nullptr),
            TX_ERROR_INVALID_ARGUMENT);
}

// -- the moments of one parameter

TEST(PolicyMoments, small_and_kept_parameters_have_fp32) {
  const struct {
    const char *load;
    int64_t numel;
    int32_t keep;
    tx_dtype exp_avg, exp_avg_sq;
  } cases[] = {
      {"model=bf16 opt.states=8bit", 0, 0, TX_U8, TX_U8},
      {"model=bf16 opt.states=8bit", 1 << 20, 1, TX_F32, TX_F32},
      {"model=bf16 opt.states=8bit opt.min_8bit_size=4096", 4095, 0, TX_F32, TX_F32},
      {"model=bf16 opt.states=8bit opt.min_8bit_size=4096", 4096, 0, TX_U8, TX_U8},
      {"model=bf16 opt.states=8bit opt.min_8bit_size=4096", int64_t{1} << 40, 0, TX_U8, TX_U8},
      {"model=bf16 opt.states=bf16 opt.min_8bit_size=4096", 1, 0, TX_BF16, TX_BF16},
      {"model=bf16 opt.states=bf16", 1, 1, TX_F32, TX_F32},
      {"model=bf16 opt.exp_avg_sq_dtype=fp8 opt.min_8bit_size=4096", 1, 0, TX_F32, TX_F32},
      {"model=bf16 opt.exp_avg_sq_dtype=fp8 opt.min_8bit_size=4096", 4096, 0, TX_BF16, TX_U8},
      {"model=fp32 opt.min_8bit_size=4096", 1, 0, TX_F32, TX_F32},
  };
  for (const auto &c : cases) {
    const Resolved r = Resolve(c.load);
    tx_dtype exp_avg = TX_NONE, exp_avg_sq = TX_NONE;
    ASSERT_EQ(tx_policy_moments(&r.policy, c.numel, c.keep, &exp_avg, &exp_avg_sq, nullptr), TX_OK) << c.load;
    EXPECT_EQ(exp_avg, c.exp_avg) << c.load << " " << c.numel;
    EXPECT_EQ(exp_avg_sq, c.exp_avg_sq) << c.load << " " << c.numel;
  }
  const Resolved r = Resolve("model=bf16");
  tx_dtype exp_avg, exp_avg_sq;
  const tx_policy unsized = {};
  EXPECT_EQ(tx_policy_moments(nullptr, 0, 0, &exp_avg, &exp_avg_sq, nullptr), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_policy_moments(&unsized, 0, 0, &exp_avg, &exp_avg_sq, nullptr), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_policy_moments(&r.policy, -1, 0, &exp_avg, &exp_avg_sq, nullptr), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_policy_moments(&r.policy, 0, 2, &exp_avg, &exp_avg_sq, nullptr), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_policy_moments(&r.policy, 0, 0, nullptr, &exp_avg_sq, nullptr), TX_ERROR_INVALID_ARGUMENT);
}

// A caller may have built the policy itself, so `states` is checked before it is used as a table index.
TEST(States, APolicyWithAnUnknownWordIsRefused) {
  for (const int32_t states : {-1, 5, INT32_MIN, INT32_MAX}) {
    Resolved r = Resolve("model=bf16");
    r.policy.states = states;
    tx_policy row = TX_POLICY_INIT;
    tx_origin origins[TX_POLICY_FIELDS];
    tx_error error = {};
    EXPECT_EQ(tx_policy_row(&r.policy, r.origins, TX_BF16, &row, &error), TX_ERROR_ILLEGAL_VALUE);
    EXPECT_NE(std::string(error.message).find("states=" + std::to_string(states)), std::string::npos) << error.message;
    EXPECT_EQ(tx_policy_with(&r.policy, r.origins, nullptr, 0, &row, origins, &error), TX_ERROR_ILLEGAL_VALUE);
    EXPECT_NE(std::string(error.message).find("tx_policy_with: the policy has states="), std::string::npos);
  }
}

}  // namespace
