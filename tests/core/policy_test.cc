// csrc/core/policy: the loader (A1-A8), full sharding in one flag (B1), old names (E1), strategies (E2).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/core/policy_load.h"

namespace {

using Expected = std::map<std::string, std::string>;

// -- what resolves, and to what -------------------------------------------------------------------------------------

struct Legal {
  const char *id;
  Load load;
  Expected expected;
};

void PrintTo(const Legal &c, std::ostream *out) {
  *out << c.id;
}

class PolicyTest : public testing::TestWithParam<Legal> {};

TEST_P(PolicyTest, resolves) {
  const Resolved r = Resolve(GetParam().load);
  ASSERT_EQ(r.status, TX_OK) << r.error.message;
  for (const auto &[field, value] : GetParam().expected)
    EXPECT_EQ(r[field], value) << field << ": " << r.Origin(field);
}

const Expected kBf16 = {{"param_dtype", "bf16"},
                        {"main_params_dtype", "fp32"},
                        {"exp_avg_dtype", "bf16"},
                        {"exp_avg_sq_dtype", "bf16"},
                        {"main_grads_dtype", "bf16"},
                        {"grad_comm_dtype", "bf16"},
                        {"grad_reduce_in_fp32", "False"},
                        {"use_precision_aware_optimizer", "True"},
                        {"store_param_remainders", "False"},
                        {"bf16", "True"},
                        {"fp16", "False"}};
const Expected kFp16 = {{"param_dtype", "fp16"},
                        {"main_params_dtype", "fp32"},
                        {"exp_avg_dtype", "fp32"},
                        {"exp_avg_sq_dtype", "fp32"},
                        {"main_grads_dtype", "fp32"},
                        {"grad_comm_dtype", "fp32"},
                        {"grad_reduce_in_fp32", "True"},
                        {"use_precision_aware_optimizer", "True"},
                        {"store_param_remainders", "False"},
                        {"initial_loss_scale", "32768"},
                        {"min_loss_scale", "1"},
                        {"bf16", "False"},
                        {"fp16", "True"}};
const Expected kFp32 = {{"param_dtype", "fp32"},
                        {"main_params_dtype", "fp32"},
                        {"exp_avg_dtype", "fp32"},
                        {"exp_avg_sq_dtype", "fp32"},
                        {"main_grads_dtype", "fp32"},
                        {"grad_comm_dtype", "fp32"},
                        {"grad_reduce_in_fp32", "True"},
                        {"use_precision_aware_optimizer", "False"},
                        {"bf16", "False"},
                        {"fp16", "False"}};

// `base` with some values replaced.
Expected But(Expected base, const Expected &changes) {
  for (const auto &[field, value] : changes)
    base[field] = value;
  return base;
}

const tx_preset kSeed = TX_PRESET_SEED;
const tx_preset kConservative = TX_PRESET_CONSERVATIVE;

INSTANTIATE_TEST_SUITE_P(
    A1_A2_mode, PolicyTest,
    testing::Values(
        Legal{"A1_nothing_means_bf16", {}, kBf16}, Legal{"A2_bf16_flag", {.bf16 = 1}, kBf16},
        Legal{"A2_fp16_flag", {.fp16 = 1}, kFp16}, Legal{"A2_fp32_by_bf16_off", {.bf16 = 0}, kFp32},
        Legal{"A1_both_flags_fp16_wins", {.bf16 = 1, .fp16 = 1}, kFp16},
        Legal{"A1_fp16_off_alone_leaves_bf16", {.fp16 = 0}, kBf16},
        Legal{"A1_both_off_is_fp32", {.bf16 = 0, .fp16 = 0}, kFp32},
        Legal{"A1_fp16_with_bf16_off", {.bf16 = 0, .fp16 = 1}, kFp16},
        Legal{"A2_bf16_model", {.model = TX_BF16}, kBf16}, Legal{"A2_fp16_model", {.model = TX_F16}, kFp16},
        Legal{"A2_fp32_model", {.model = TX_F32}, kFp32},
        Legal{"A6_flag_that_agrees_with_the_model", {.model = TX_BF16, .bf16 = 1, .fp16 = 0}, kBf16},
        Legal{"A6_both_flags_agree_with_an_fp16_model", {.model = TX_F16, .bf16 = 1, .fp16 = 1}, kFp16},
        Legal{"A6_flags_off_agree_with_an_fp32_model", {.model = TX_F32, .bf16 = 0, .fp16 = 0}, kFp32},
        Legal{"A1_flags_as_keys", {.optimizer = {{"fp16", true}}}, kFp16},
        Legal{"A4_key_wins_over_the_argument_of_its_name", {.bf16 = 1, .optimizer = {{"bf16", false}}}, kFp32},
        Legal{"A6_default_mode_gives_way_to_param_dtype", {.optimizer = {{"param_dtype", "fp32"}}}, kFp32},
        Legal{"A2_param_dtype_as_the_model_says", {.model = TX_F16, .optimizer = {{"param_dtype", TX_F16}}}, kFp16}),
    [](const auto &info) { return std::string(info.param.id); });

INSTANTIATE_TEST_SUITE_P(
    A3_A4_overrides, PolicyTest,
    testing::Values(
        Legal{"A3_bf16_buckets_are_not_fp32", {.bf16 = 1}, {{"grad_reduce_in_fp32", "False"}}},
        Legal{"A3_without_bf16_they_are", {.bf16 = 0}, {{"grad_reduce_in_fp32", "True"}}},
        Legal{"A4_each_key_on_its_own",
              {.optimizer = {{"exp_avg_dtype", "fp32"}}},
              But(kBf16, {{"exp_avg_dtype", "fp32"}})},
        Legal{"A4_8_bit_moments",
              {.optimizer = {{"exp_avg_dtype", "fp8"}, {"exp_avg_sq_dtype", TX_U8}}},
              But(kBf16, {{"exp_avg_dtype", "uint8"}, {"exp_avg_sq_dtype", "uint8"}})},
        Legal{"A4_gradient_dtype_of_the_optimizer_side_moves_the_bucket",
              {.optimizer = {{"main_grads_dtype", "fp32"}}},
              But(kBf16, {{"main_grads_dtype", "fp32"}, {"grad_comm_dtype", "fp32"}, {"grad_reduce_in_fp32", "True"}})},
        Legal{"A4_bucket_dtype_of_the_ddp_side_moves_the_gradients",
              {.ddp = {{"grad_reduce_in_fp32", true}}},
              But(kBf16, {{"main_grads_dtype", "fp32"}, {"grad_comm_dtype", "fp32"}, {"grad_reduce_in_fp32", "True"}})},
        Legal{
            "A4_fp16_with_fp16_buckets",
            {.fp16 = 1, .ddp = {{"grad_reduce_in_fp32", false}}},
            But(kFp16, {{"main_grads_dtype", "fp16"}, {"grad_comm_dtype", "fp16"}, {"grad_reduce_in_fp32", "False"}})},
        Legal{
            "A4_fp32_with_bf16_gradients",
            {.bf16 = 0, .optimizer = {{"main_grads_dtype", "bf16"}}},
            But(kFp32, {{"main_grads_dtype", "bf16"}, {"grad_comm_dtype", "bf16"}, {"grad_reduce_in_fp32", "False"}})},
        Legal{"A4_fp32_gradients_over_a_bf16_wire",
              {.optimizer = {{"main_grads_dtype", "fp32"}}, .ddp = {{"grad_comm_dtype", "bf16"}}},
              But(kBf16, {{"main_grads_dtype", "fp32"}})},
        Legal{"A4_fp32_gradients_with_reduction_not_in_fp32",
              {.optimizer = {{"main_grads_dtype", "fp32"}}, .ddp = {{"grad_reduce_in_fp32", false}}},
              But(kBf16, {{"main_grads_dtype", "fp32"}})},
        Legal{"A4_8_bit_wire", {.ddp = {{"grad_comm_dtype", "fp8"}}}, But(kBf16, {{"grad_comm_dtype", "uint8"}})},
        Legal{"A4_narrow_wire_leaves_fp32_gradients",
              {.fp16 = 1, .ddp = {{"grad_comm_dtype", "bf16"}}},
              But(kFp16, {{"grad_comm_dtype", "bf16"}, {"grad_reduce_in_fp32", "False"}})},
        Legal{"A4_fp32_wire_leaves_bf16_gradients",
              {.ddp = {{"grad_comm_dtype", "fp32"}}},
              But(kBf16, {{"grad_comm_dtype", "fp32"}, {"grad_reduce_in_fp32", "True"}})},
        Legal{"A4_fp32_model_may_say_that_its_wire_is_its_own_dtype",
              {.bf16 = 0, .ddp = {{"grad_reduce_in_fp32", false}}},
              But(kFp32, {{"grad_reduce_in_fp32", "False"}})},
        Legal{"A4_None_decides_nothing",
              {.optimizer = {{"exp_avg_dtype", None{}}, {"weight_decay", None{}}, {"bf16", None{}}}},
              But(kBf16, {{"weight_decay", "0.01"}})},
        Legal{"C2_auto_decides_nothing",
              {.optimizer = {{"exp_avg_dtype", "auto"}}, .ddp = {{"grad_comm_dtype", "Auto"}}},
              kBf16},
        Legal{"A4_the_mode_may_be_overridden", {.bf16 = 1, .optimizer = {{"bf16", false}, {"fp16", true}}}, kFp16},
        Legal{
            "A6_moments_give_way_to_precision_aware_off",
            {.optimizer = {{"use_precision_aware_optimizer", false}}},
            But(kBf16,
                {{"use_precision_aware_optimizer", "False"}, {"exp_avg_dtype", "fp32"}, {"exp_avg_sq_dtype", "fp32"}})},
        Legal{"A6_precision_aware_gives_way_to_a_moment",
              {.bf16 = 0, .optimizer = {{"exp_avg_sq_dtype", "bf16"}}},
              But(kFp32, {{"use_precision_aware_optimizer", "True"}, {"exp_avg_sq_dtype", "bf16"}})},
        Legal{"A6_precision_aware_on_changes_no_dtype",
              {.bf16 = 0, .optimizer = {{"use_precision_aware_optimizer", true}}},
              But(kFp32, {{"use_precision_aware_optimizer", "True"}})},
        Legal{"A6_precision_aware_off_with_fp32_moments",
              {.optimizer = {{"use_precision_aware_optimizer", false},
                             {"exp_avg_dtype", "float"},
                             {"exp_avg_sq_dtype", "fp32"}}},
              {{"exp_avg_dtype", "fp32"}}},
        Legal{"A6_precision_aware_off_keeps_explicit_gradients",
              {.optimizer = {{"use_precision_aware_optimizer", false}, {"main_grads_dtype", "bf16"}}},
              {{"main_grads_dtype", "bf16"}, {"grad_comm_dtype", "bf16"}, {"grad_reduce_in_fp32", "False"}}},
        Legal{"G4_remainders",
              {.optimizer = {{"store_param_remainders", true}}},
              But(kBf16, {{"store_param_remainders", "True"}})},
        Legal{"A6_minimum_scale_gives_way",
              {.fp16 = 1, .optimizer = {{"initial_loss_scale", 0.25}}},
              But(kFp16, {{"initial_loss_scale", "0.25"}, {"min_loss_scale", "0.25"}})},
        Legal{"A6_initial_scale_gives_way",
              {.fp16 = 1, .optimizer = {{"min_loss_scale", 65536}}},
              But(kFp16, {{"initial_loss_scale", "65536"}, {"min_loss_scale", "65536"}})}),
    [](const auto &info) { return std::string(info.param.id); });

INSTANTIATE_TEST_SUITE_P(
    E1_E2_masters_and_strategies, PolicyTest,
    testing::Values(
        Legal{"E1_no_masters",
              {.optimizer = {{"main_params_dtype", None{}}}},
              But(kBf16, {{"main_params_dtype", "None"}, {"preserve_fp32_weights", "False"}})},
        Legal{"E1_auto_masters_are_the_weights",
              {.optimizer = {{"main_params_dtype", "auto"}}},
              But(kBf16, {{"main_params_dtype", "None"}})},
        Legal{"E1_preserve_fp32_weights_off",
              {.ddp = {{"preserve_fp32_weights", false}}},
              But(kBf16, {{"main_params_dtype", "None"}})},
        Legal{"E1_preserve_fp32_weights_on", {.ddp = {{"preserve_fp32_weights", true}}}, kBf16},
        Legal{
            "E1_gradients_None_are_of_the_parameters_dtype",
            {.fp16 = 1, .optimizer = {{"main_grads_dtype", None{}}}},
            But(kFp16, {{"main_grads_dtype", "fp16"}, {"grad_comm_dtype", "fp16"}, {"grad_reduce_in_fp32", "False"}})},
        Legal{"E1_wire_None_is_that_of_the_gradients",
              {.optimizer = {{"main_grads_dtype", "fp16"}}, .ddp = {{"grad_comm_dtype", None{}}}},
              But(kBf16, {{"main_grads_dtype", "fp16"}, {"grad_comm_dtype", "fp16"}})},
        Legal{"C3_fp16_masters_are_a_legal_name",
              {.optimizer = {{"main_params_dtype", "half"}}},
              But(kBf16, {{"main_params_dtype", "fp16"}})},
        Legal{"C3_fp16_masters_need_the_precision_aware_optimizer",
              {.bf16 = 0, .optimizer = {{"main_params_dtype", "fp16"}}},
              But(kFp32, {{"main_params_dtype", "fp16"}, {"use_precision_aware_optimizer", "True"}})},
        Legal{"E2_default_is_no_shard",
              {},
              {{"data_parallel_sharding_strategy", "no_shard"}, {"use_distributed_optimizer", "False"}}},
        Legal{"E2_by_name",
              {.ddp = {{"data_parallel_sharding_strategy", "optim_grads"}}},
              {{"data_parallel_sharding_strategy", "optim_grads"}, {"use_distributed_optimizer", "True"}}},
        Legal{"E2_0",
              {.ddp = {{"data_parallel_sharding_strategy", 0}}},
              {{"data_parallel_sharding_strategy", "no_shard"}}},
        Legal{
            "E2_1", {.ddp = {{"data_parallel_sharding_strategy", 1}}}, {{"data_parallel_sharding_strategy", "optim"}}},
        Legal{"E2_2",
              {.ddp = {{"data_parallel_sharding_strategy", 2}}},
              {{"data_parallel_sharding_strategy", "optim_grads"}}},
        Legal{"E2_3",
              {.ddp = {{"data_parallel_sharding_strategy", 3}}},
              {{"data_parallel_sharding_strategy", "optim_grads_params"}}},
        Legal{"E2_no_shard_beside_a_distributed_optimizer_is_what_Megatron_writes",
              {.optimizer = {{"use_distributed_optimizer", true}},
               .ddp = {{"data_parallel_sharding_strategy", "no_shard"}}},
              {{"data_parallel_sharding_strategy", "no_shard"}, {"use_distributed_optimizer", "True"}}}),
    [](const auto &info) { return std::string(info.param.id); });

// A7's table: (precision-aware, main_grads_dtype) -> grad_reduce_in_fp32, and an explicit value that wins.
Load Conservative(bool precision_aware, const char *main_grads) {
  return {.preset = kConservative,
          .optimizer = {{"use_precision_aware_optimizer", precision_aware}, {"main_grads_dtype", main_grads}}};
}
Load Conservative(bool precision_aware, const char *main_grads, bool explicit_value) {
  Load load = Conservative(precision_aware, main_grads);
  load.ddp = {{"grad_reduce_in_fp32", explicit_value}};
  return load;
}

const Expected kAllFp32 = {{"main_params_dtype", "fp32"}, {"exp_avg_dtype", "fp32"},   {"exp_avg_sq_dtype", "fp32"},
                           {"main_grads_dtype", "fp32"},  {"grad_comm_dtype", "fp32"}, {"grad_reduce_in_fp32", "True"},
                           {"preset", "conservative"}};
const Expected kTrue = {{"grad_reduce_in_fp32", "True"}, {"grad_comm_dtype", "fp32"}};
const Expected kFalse = {{"grad_reduce_in_fp32", "False"}, {"grad_comm_dtype", "bf16"}};

INSTANTIATE_TEST_SUITE_P(
    A7_conservative, PolicyTest,
    testing::Values(
        Legal{"A7_bf16",
              {.preset = kConservative},
              But(kAllFp32, {{"param_dtype", "bf16"}, {"use_precision_aware_optimizer", "False"}})},
        Legal{"A7_fp16",
              {.fp16 = 1, .preset = kConservative},
              But(kAllFp32, {{"param_dtype", "fp16"}, {"initial_loss_scale", "32768"}})},
        Legal{"A7_fp32", {.bf16 = 0, .preset = kConservative}, But(kAllFp32, {{"param_dtype", "fp32"}})},
        Legal{"A7_off_fp32", Conservative(false, "fp32"), kTrue},
        Legal{"A7_off_bf16", Conservative(false, "bf16"), kTrue},
        Legal{"A7_on_fp32", Conservative(true, "fp32"), kTrue}, Legal{"A7_on_bf16", Conservative(true, "bf16"), kFalse},
        Legal{"A7_default_off_bf16", {.preset = kConservative, .optimizer = {{"main_grads_dtype", "bf16"}}}, kTrue},
        Legal{"A7_off_fp32_explicit_False", Conservative(false, "fp32", false), kFalse},
        Legal{"A7_off_bf16_explicit_False", Conservative(false, "bf16", false), kFalse},
        Legal{"A7_on_fp32_explicit_False", Conservative(true, "fp32", false), kFalse},
        Legal{"A7_on_bf16_explicit_False", Conservative(true, "bf16", false), kFalse},
        Legal{"A7_off_fp32_explicit_True", Conservative(false, "fp32", true), kTrue},
        Legal{"A7_off_bf16_explicit_True", Conservative(false, "bf16", true), kTrue},
        Legal{"A7_on_fp32_explicit_True", Conservative(true, "fp32", true), kTrue},
        Legal{"A7_on_bf16_explicit_True", Conservative(true, "bf16", true), kTrue},
        Legal{"A7_a_moment_that_was_asked_for",
              {.preset = kConservative, .optimizer = {{"exp_avg_dtype", "bf16"}}},
              But(kAllFp32, {{"exp_avg_dtype", "bf16"}, {"use_precision_aware_optimizer", "True"}})}),
    [](const auto &info) { return std::string(info.param.id); });

const Settings kFive = {
    {"optimizer", "lion"}, {"lr", 1.5e-6}, {"min_lr", 0}, {"clip_grad", 0.7}, {"weight_decay", 0.33}};
const Expected kFiveValues = {
    {"optimizer", "lion"}, {"lr", "1.5e-06"}, {"min_lr", "0"}, {"clip_grad", "0.7"}, {"weight_decay", "0.33"}};

INSTANTIATE_TEST_SUITE_P(
    A8_upstream_cases, PolicyTest,
    testing::Values(
        Legal{"A8_1_bf16_pins_three_dtypes_and_leaves_the_master", {.bf16 = 1}, kBf16},
        Legal{"A8_2_fp16_keeps_fp32_moments_with_scaler_and_no_remainders", {.fp16 = 1}, kFp16},
        Legal{"A8_3_fp32_keeps_defaults", {.bf16 = 0}, But(kFp32, {{"initial_loss_scale", "65536"}})},
        Legal{"A8_4_defaults_are_bf16", {}, kBf16}, Legal{"A8_5_fp16_and_bf16_is_fp16", {.bf16 = 1, .fp16 = 1}, kFp16},
        Legal{"A8_6_use_distributed_optimizer_on",
              {.config = {{"use_distributed_optimizer", true}}},
              {{"use_distributed_optimizer", "True"}}},
        Legal{"A8_6_use_distributed_optimizer_off",
              {.config = {{"use_distributed_optimizer", false}}},
              {{"use_distributed_optimizer", "False"}}},
        Legal{"A8_6_use_distributed_optimizer_on_as_override",
              {.optimizer = {{"use_distributed_optimizer", true}}},
              {{"use_distributed_optimizer", "True"}, {"data_parallel_sharding_strategy", "optim"}}},
        Legal{"A8_6_use_distributed_optimizer_off_as_override",
              {.ddp = {{"use_distributed_optimizer", false}}},
              {{"use_distributed_optimizer", "False"}}},
        Legal{"A8_7_verbatim", {.config = kFive}, kFiveValues},
        Legal{"A8_7_verbatim_as_overrides", {.optimizer = kFive}, kFiveValues},
        Legal{"A8_7_None_is_verbatim",
              {.config = {{"lr", None{}}, {"min_lr", None{}}}},
              {{"lr", "None"}, {"min_lr", "None"}}},
        Legal{"A8_8_an_override_wins_and_the_rest_survive",
              {.config = kFive, .optimizer = {{"lr", 0.5}, {"exp_avg_dtype", "fp32"}}},
              But(But(kFiveValues, kBf16), {{"lr", "0.5"}, {"exp_avg_dtype", "fp32"}})},
        Legal{"A8_9_missing_overrides", {.config = kFive, .optimizer = {}, .ddp = {}}, But(kFiveValues, kBf16)},
        Legal{"A4_config_is_above_the_default_and_agrees_with_the_dtype",
              {.config = {{"exp_avg_dtype", "bf16"}, {"adam_beta2", 0.95}}},
              But(kBf16, {{"adam_beta2", "0.95"}})},
        Legal{"A4_config_that_an_override_replaces",
              {.config = {{"exp_avg_dtype", "fp32"}}, .optimizer = {{"exp_avg_dtype", "fp16"}}},
              But(kBf16, {{"exp_avg_dtype", "fp16"}})}),
    [](const auto &info) { return std::string(info.param.id); });

const Expected kFullShard = {{"use_distributed_optimizer", "True"},
                             {"check_for_nan_in_grad", "True"},
                             {"data_parallel_sharding_strategy", "optim_grads_params"},
                             {"overlap_grad_reduce", "True"},
                             {"overlap_param_gather", "True"}};

INSTANTIATE_TEST_SUITE_P(
    B1_full_shard, PolicyTest,
    testing::Values(Legal{"B1_defaults", {.full_shard = true}, But(kFullShard, kBf16)},
                    Legal{"B1_without_the_flag",
                          {},
                          {{"use_distributed_optimizer", "False"},
                           {"check_for_nan_in_grad", "False"},
                           {"data_parallel_sharding_strategy", "no_shard"},
                           {"overlap_grad_reduce", "False"},
                           {"overlap_param_gather", "False"}}},
                    Legal{"B1_use_distributed_optimizer",
                          {.full_shard = true, .ddp = {{"use_distributed_optimizer", false}}},
                          But(kFullShard, {{"use_distributed_optimizer", "False"}})},
                    Legal{"B1_check_for_nan_in_grad",
                          {.full_shard = true, .ddp = {{"check_for_nan_in_grad", false}}},
                          But(kFullShard, {{"check_for_nan_in_grad", "False"}})},
                    Legal{"B1_strategy",
                          {.full_shard = true, .ddp = {{"data_parallel_sharding_strategy", "optim"}}},
                          But(kFullShard, {{"data_parallel_sharding_strategy", "optim"}})},
                    Legal{"B1_no_shard",
                          {.full_shard = true, .ddp = {{"data_parallel_sharding_strategy", "no_shard"}}},
                          But(kFullShard, {{"data_parallel_sharding_strategy", "no_shard"}})},
                    Legal{"B1_overlap_grad_reduce",
                          {.full_shard = true, .ddp = {{"overlap_grad_reduce", false}}},
                          But(kFullShard, {{"overlap_grad_reduce", "False"}})},
                    Legal{"B1_overlap_param_gather",
                          {.full_shard = true, .ddp = {{"overlap_param_gather", false}}},
                          But(kFullShard, {{"overlap_param_gather", "False"}})},
                    Legal{"B1_hook_wins_too",
                          {.full_shard = true, .ddp_hook = {{"check_for_nan_in_grad", false}}},
                          But(kFullShard, {{"check_for_nan_in_grad", "False"}})}),
    [](const auto &info) { return std::string(info.param.id); });

INSTANTIATE_TEST_SUITE_P(
    A5_hooks, PolicyTest,
    testing::Values(
        Legal{"A5_the_answer_wins_over_the_dtype",
              {.optimizer_hook = {{"exp_avg_dtype", "fp32"}}},
              But(kBf16, {{"exp_avg_dtype", "fp32"}})},
        Legal{"A5_the_answer_wins_over_an_override",
              {.optimizer = {{"lr", 1.0}}, .optimizer_hook = {{"lr", 2.0}}},
              But(kBf16, {{"lr", "2"}})},
        Legal{"A5_the_answer_is_resolved_again_across_sides",
              {.ddp_hook = {{"grad_reduce_in_fp32", true}}},
              But(kBf16, {{"grad_reduce_in_fp32", "True"}, {"main_grads_dtype", "fp32"}, {"grad_comm_dtype", "fp32"}})},
        Legal{"A5_the_answer_may_change_the_mode", {.optimizer_hook = {{"fp16", true}}}, kFp16},
        Legal{"A5_both_sides",
              {.optimizer_hook = {{"clip_grad", 2.5}}, .ddp_hook = {{"bucket_size", 4e7}}},
              But(kBf16, {{"clip_grad", "2.5"}, {"bucket_size", "40000000"}})},
        Legal{"A5_contradictions_are_looked_for_after_the_hooks",
              {.optimizer = {{"use_precision_aware_optimizer", false}, {"exp_avg_dtype", "bf16"}},
               .optimizer_hook = {{"exp_avg_dtype", "fp32"}}},
              {{"use_precision_aware_optimizer", "False"}, {"exp_avg_dtype", "fp32"}, {"exp_avg_sq_dtype", "fp32"}}},
        Legal{"A5_a_hook_settles_what_two_mappings_disagree_on",
              {.optimizer = {{"use_distributed_optimizer", true}},
               .ddp = {{"use_distributed_optimizer", false}},
               .ddp_hook = {{"use_distributed_optimizer", false}}},
              {{"use_distributed_optimizer", "False"}}},
        Legal{"A5_None_is_no_answer",
              {.optimizer = {{"exp_avg_dtype", "fp32"}}, .optimizer_hook = {{"exp_avg_dtype", None{}}}},
              But(kBf16, {{"exp_avg_dtype", "fp32"}})}),
    [](const auto &info) { return std::string(info.param.id); });

TEST(PolicyHook, A5_is_called_once_and_sees_the_resolved_policy) {
  const Resolved r = Resolve({.optimizer = {{"main_grads_dtype", "fp32"}},
                              .optimizer_hook = {{"exp_avg_dtype", "fp32"}},
                              .ddp_hook = {{"overlap_grad_reduce", true}}});
  ASSERT_EQ(r.status, TX_OK) << r.error.message;
  for (const Hook &hook : r.hooks) {
    ASSERT_EQ(hook.seen.size(), 1u);
    EXPECT_EQ(hook.seen[0].size, sizeof(tx_policy));
    EXPECT_EQ(hook.seen[0].grad_reduce_in_fp32, 1) << "the overrides are in it, resolved";
    EXPECT_EQ(hook.seen[0].exp_avg_dtype, TX_BF16) << "no hook sees another's answer";
  }
  EXPECT_EQ(r["overlap_grad_reduce"], "True");
  EXPECT_EQ(r.Origin("overlap_grad_reduce"), "hook");
}

TEST(PolicyHook, A5_that_fails_ends_the_resolution_in_its_own_words) {
  const Resolved r = Resolve({.optimizer_hook = {{"lr", 1.0}}}, TX_ERROR_UNAVAILABLE);
  EXPECT_EQ(r.status, TX_ERROR_UNAVAILABLE);
  EXPECT_STREQ(r.error.message, "the hook's own words");
  EXPECT_EQ(r.policy.param_dtype, 0) << "nothing is written";
}

// -- what is refused, and in which words ------------------------------------------------------------------------------

struct Illegal {
  const char *id;
  Load load;
  tx_status status;
  std::vector<std::string> says;
};

void PrintTo(const Illegal &c, std::ostream *out) {
  *out << c.id;
}

class PolicyIllegalTest : public testing::TestWithParam<Illegal> {};

TEST_P(PolicyIllegalTest, is_refused_by_name_and_nothing_is_written) {
  const Resolved r = Resolve(GetParam().load);
  ASSERT_EQ(r.status, GetParam().status) << r.error.message;
  const std::string message = r.error.message;
  for (const std::string &word : GetParam().says)
    EXPECT_NE(message.find(word), std::string::npos) << word << " in: " << message;
  const tx_policy untouched = TX_POLICY_INIT;
  EXPECT_EQ(std::memcmp(&r.policy, &untouched, sizeof untouched), 0);
  for (const tx_origin &origin : r.origins)
    EXPECT_EQ(origin.source + origin.cause, 0);
}

INSTANTIATE_TEST_SUITE_P(
    A6_contradictions, PolicyIllegalTest,
    testing::Values(
        Illegal{"A6_precision_aware_and_exp_avg",
                {.optimizer = {{"use_precision_aware_optimizer", false}, {"exp_avg_dtype", "bf16"}}},
                TX_ERROR_CONFLICT,
                {"use_precision_aware_optimizer=False", "exp_avg_dtype=bf16"}},
        Illegal{"A6_precision_aware_and_exp_avg_sq",
                {.optimizer = {{"use_precision_aware_optimizer", false}, {"exp_avg_sq_dtype", "fp8"}}},
                TX_ERROR_CONFLICT,
                {"use_precision_aware_optimizer=False", "exp_avg_sq_dtype=uint8"}},
        Illegal{"A6_precision_aware_and_main_params",
                {.optimizer = {{"use_precision_aware_optimizer", false}, {"main_params_dtype", "fp16"}}},
                TX_ERROR_CONFLICT,
                {"use_precision_aware_optimizer=False", "main_params_dtype=fp16"}},
        Illegal{"A6_precision_aware_and_remainders",
                {.optimizer = {{"use_precision_aware_optimizer", false}, {"store_param_remainders", true}}},
                TX_ERROR_CONFLICT,
                {"use_precision_aware_optimizer=False", "store_param_remainders=True"}},
        Illegal{
            "A6_contradiction_by_a_hook",
            {.optimizer = {{"use_precision_aware_optimizer", false}}, .optimizer_hook = {{"exp_avg_dtype", "bf16"}}},
            TX_ERROR_CONFLICT,
            {"override_optimizer_config use_precision_aware_optimizer",
             "override_optimizer_config (hook) exp_avg_dtype"}},
        Illegal{"A6_contradiction_in_conservative",
                {.preset = kConservative,
                 .optimizer = {{"use_precision_aware_optimizer", false}, {"exp_avg_dtype", "bf16"}}},
                TX_ERROR_CONFLICT,
                {"use_precision_aware_optimizer", "exp_avg_dtype"}},
        Illegal{"A6_bf16_model_fp16_flag",
                {.model = TX_BF16, .fp16 = 1},
                TX_ERROR_CONFLICT,
                {"fp16=True", "the model", "param_dtype=bf16"}},
        Illegal{"A6_bf16_model_both_flags",
                {.model = TX_BF16, .bf16 = 1, .fp16 = 1},
                TX_ERROR_CONFLICT,
                {"fp16=True", "param_dtype=bf16"}},
        Illegal{"A6_bf16_model_bf16_off",
                {.model = TX_BF16, .bf16 = 0},
                TX_ERROR_CONFLICT,
                {"bf16=False", "param_dtype=bf16"}},
        Illegal{"A6_fp32_model_bf16_flag",
                {.model = TX_F32, .bf16 = 1},
                TX_ERROR_CONFLICT,
                {"bf16=True", "param_dtype=fp32"}},
        Illegal{"A6_fp16_model_bf16_flag",
                {.model = TX_F16, .bf16 = 1},
                TX_ERROR_CONFLICT,
                {"bf16=True", "param_dtype=fp16"}},
        Illegal{"A6_fp16_model_fp16_off",
                {.model = TX_F16, .fp16 = 0},
                TX_ERROR_CONFLICT,
                {"fp16=False", "param_dtype=fp16"}},
        Illegal{"A6_fp32_model_fp16_key",
                {.model = TX_F32, .optimizer = {{"fp16", true}}},
                TX_ERROR_CONFLICT,
                {"override_optimizer_config fp16=True", "param_dtype=fp32"}},
        Illegal{"A6_model_and_param_dtype",
                {.model = TX_F32, .optimizer = {{"param_dtype", "bf16"}}},
                TX_ERROR_CONFLICT,
                {"param_dtype=bf16", "the model's param_dtype=fp32"}},
        Illegal{"A6_flag_and_param_dtype",
                {.fp16 = 1, .optimizer = {{"param_dtype", "bf16"}}},
                TX_ERROR_CONFLICT,
                {"fp16=True", "param_dtype=bf16"}},
        Illegal{"A4_A6_gradients_and_bucket",
                {.optimizer = {{"main_grads_dtype", "bf16"}}, .ddp = {{"grad_reduce_in_fp32", true}}},
                TX_ERROR_CONFLICT,
                {"override_ddp_config grad_reduce_in_fp32=True", "override_optimizer_config main_grads_dtype=bf16"}},
        Illegal{"E1_A6_gradients_None_and_bucket",
                {.optimizer = {{"main_grads_dtype", None{}}}, .ddp = {{"grad_reduce_in_fp32", true}}},
                TX_ERROR_CONFLICT,
                {"grad_reduce_in_fp32=True", "main_grads_dtype=None"}},
        Illegal{"A6_bucket_and_narrow_wire",
                {.ddp = {{"grad_reduce_in_fp32", true}, {"grad_comm_dtype", "bf16"}}},
                TX_ERROR_CONFLICT,
                {"grad_reduce_in_fp32=True", "grad_comm_dtype=bf16"}},
        Illegal{"A6_bucket_and_wide_wire",
                {.ddp = {{"grad_reduce_in_fp32", false}, {"grad_comm_dtype", "fp32"}}},
                TX_ERROR_CONFLICT,
                {"grad_reduce_in_fp32=False", "grad_comm_dtype=fp32"}},
        Illegal{"E1_old_and_new_name_of_the_masters",
                {.optimizer = {{"main_params_dtype", "fp32"}}, .ddp = {{"preserve_fp32_weights", false}}},
                TX_ERROR_CONFLICT,
                {"preserve_fp32_weights=False", "main_params_dtype=fp32"}},
        Illegal{"E1_no_masters_and_preserve",
                {.optimizer = {{"main_params_dtype", None{}}}, .ddp = {{"preserve_fp32_weights", true}}},
                TX_ERROR_CONFLICT,
                {"preserve_fp32_weights=True", "main_params_dtype=None"}},
        Illegal{"A6_remainders_in_fp16",
                {.fp16 = 1, .optimizer = {{"store_param_remainders", true}}},
                TX_ERROR_CONFLICT,
                {"store_param_remainders=True", "fp16=True"}},
        Illegal{"A6_remainders_in_fp32",
                {.bf16 = 0, .optimizer = {{"store_param_remainders", true}}},
                TX_ERROR_CONFLICT,
                {"store_param_remainders=True", "bf16=False"}},
        Illegal{"A6_remainders_of_an_fp16_model",
                {.model = TX_F16, .optimizer = {{"store_param_remainders", true}}},
                TX_ERROR_CONFLICT,
                {"store_param_remainders=True", "param_dtype=fp16"}},
        Illegal{"A6_remainders_without_masters",
                {.optimizer = {{"store_param_remainders", true}, {"main_params_dtype", None{}}}},
                TX_ERROR_CONFLICT,
                {"store_param_remainders=True", "main_params_dtype=None"}},
        Illegal{"A6_remainders_without_masters_by_the_old_name",
                {.optimizer = {{"store_param_remainders", true}}, .ddp = {{"preserve_fp32_weights", false}}},
                TX_ERROR_CONFLICT,
                {"store_param_remainders=True", "preserve_fp32_weights=False"}},
        Illegal{"A6_strategy_without_the_distributed_optimizer",
                {.ddp = {{"use_distributed_optimizer", false}, {"data_parallel_sharding_strategy", "optim"}}},
                TX_ERROR_CONFLICT,
                {"use_distributed_optimizer=False", "data_parallel_sharding_strategy=optim"}},
        Illegal{"A6_the_two_sides_of_one_key",
                {.optimizer = {{"use_distributed_optimizer", true}}, .ddp = {{"use_distributed_optimizer", false}}},
                TX_ERROR_CONFLICT,
                {"override_optimizer_config use_distributed_optimizer=True",
                 "override_ddp_config use_distributed_optimizer=False"}},
        Illegal{"A6_the_hooks_of_one_key",
                {.optimizer_hook = {{"overlap_param_gather", true}}, .ddp_hook = {{"overlap_param_gather", false}}},
                TX_ERROR_CONFLICT,
                {"override_optimizer_config (hook) overlap_param_gather",
                 "override_ddp_config (hook) overlap_param_gather"}},
        Illegal{"A6_scale_below_its_minimum",
                {.fp16 = 1, .optimizer = {{"initial_loss_scale", 2}, {"min_loss_scale", 4}}},
                TX_ERROR_CONFLICT,
                {"initial_loss_scale=2", "min_loss_scale=4"}},
        Illegal{"A4_config_that_the_dtype_would_swallow",
                {.config = {{"exp_avg_dtype", "fp32"}}},
                TX_ERROR_CONFLICT,
                {"optimizer_config exp_avg_dtype=fp32", "the dtype's exp_avg_dtype=bf16", "override_optimizer_config"}},
        Illegal{"A4_config_that_full_shard_would_swallow",
                {.full_shard = true, .config = {{"use_distributed_optimizer", false}}},
                TX_ERROR_CONFLICT,
                {"use_distributed_optimizer=False", "override_optimizer_config"}}),
    [](const auto &info) { return std::string(info.param.id); });

const double kNan = std::numeric_limits<double>::quiet_NaN();
const double kInf = std::numeric_limits<double>::infinity();

INSTANTIATE_TEST_SUITE_P(
    Keys_and_values, PolicyIllegalTest,
    testing::Values(
        Illegal{"unknown_key_names_the_nearest",
                {.ddp = {{"overlap_grad_reduc", true}}},
                TX_ERROR_UNKNOWN_KEY,
                {"override_ddp_config", "'overlap_grad_reduc'", "overlap_grad_reduce"}},
        Illegal{"unknown_key_nearest_on_the_other_side",
                {.ddp = {{"weigth_decay", 0.1}}},
                TX_ERROR_UNKNOWN_KEY,
                {"'weigth_decay'", "weight_decay", "override_optimizer_config"}},
        Illegal{"key_of_the_other_side",
                {.ddp = {{"lr", 0.1}}},
                TX_ERROR_UNKNOWN_KEY,
                {"override_ddp_config", "lr", "override_optimizer_config"}},
        Illegal{"key_of_the_other_side_too",
                {.optimizer = {{"bucket_size", 5}}},
                TX_ERROR_UNKNOWN_KEY,
                {"bucket_size", "override_ddp_config"}},
        Illegal{"preset_is_no_key", {.optimizer = {{"preset", "seed"}}}, TX_ERROR_UNKNOWN_KEY, {"'preset'"}},
        Illegal{"unknown_key_in_config",
                {.config = {{"learning_rate", 1.0}}},
                TX_ERROR_UNKNOWN_KEY,
                {"optimizer_config", "'learning_rate'"}},
        Illegal{"unknown_key_in_a_hook",
                {.ddp_hook = {{"bucketsize", 1}}},
                TX_ERROR_UNKNOWN_KEY,
                {"override_ddp_config (hook)", "bucket_size"}},
        Illegal{
            "key_given_twice", {.optimizer = {{"lr", 1.0}, {"lr", 1.0}}}, TX_ERROR_INVALID_ARGUMENT, {"lr", "twice"}},
        Illegal{"C4_unknown_dtype",
                {.optimizer = {{"exp_avg_dtype", "int4"}}},
                TX_ERROR_UNKNOWN_DTYPE,
                {"exp_avg_dtype", "'int4'", "fp32", "bf16", "fp8"}},
        Illegal{"C3_bf16_masters",
                {.optimizer = {{"main_params_dtype", "bf16"}}},
                TX_ERROR_ILLEGAL_VALUE,
                {"main_params_dtype", "bf16", "fp32", "fp16"}},
        Illegal{"C4_dtype_code_outside_the_set",
                {.optimizer = {{"exp_avg_dtype", TX_F64}}},
                TX_ERROR_ILLEGAL_VALUE,
                {"exp_avg_dtype", "float64"}},
        Illegal{"E1_gradients_must_be_floating",
                {.optimizer = {{"main_grads_dtype", "fp8"}}},
                TX_ERROR_ILLEGAL_VALUE,
                {"main_grads_dtype", "fp8", "fp32, fp16, bf16"}},
        Illegal{
            "dtype_from_a_number", {.optimizer = {{"exp_avg_dtype", 3}}}, TX_ERROR_ILLEGAL_VALUE, {"exp_avg_dtype=3"}},
        Illegal{"E2_unknown_strategy_lists_the_legal_ones",
                {.ddp = {{"data_parallel_sharding_strategy", "zero3"}}},
                TX_ERROR_ILLEGAL_VALUE,
                {"zero3", "no_shard, optim, optim_grads, optim_grads_params"}},
        Illegal{"E2_strategy_4",
                {.ddp = {{"data_parallel_sharding_strategy", 4}}},
                TX_ERROR_ILLEGAL_VALUE,
                {"=4", "no_shard"}},
        Illegal{"E2_strategy_minus_1",
                {.ddp = {{"data_parallel_sharding_strategy", -1}}},
                TX_ERROR_ILLEGAL_VALUE,
                {"=-1", "no_shard"}},
        Illegal{"E2_strategy_by_a_part_of_its_name",
                {.ddp = {{"data_parallel_sharding_strategy", "optim_grad"}}},
                TX_ERROR_ILLEGAL_VALUE,
                {"optim_grad"}},
        Illegal{"rounding_unknown",
                {.optimizer = {{"moment_rounding", "up"}}},
                TX_ERROR_ILLEGAL_VALUE,
                {"moment_rounding", "'up'", "nearest, dithered, stochastic"}},
        Illegal{"lr_negative", {.optimizer = {{"lr", -1.0}}}, TX_ERROR_ILLEGAL_VALUE, {"lr=-1", "[0, inf)"}},
        Illegal{"lr_NaN", {.optimizer = {{"lr", kNan}}}, TX_ERROR_ILLEGAL_VALUE, {"lr=", "nan"}},
        Illegal{"lr_infinite", {.config = {{"lr", kInf}}}, TX_ERROR_ILLEGAL_VALUE, {"lr=inf"}},
        Illegal{"lr_text", {.config = {{"lr", "1e-4"}}}, TX_ERROR_ILLEGAL_VALUE, {"lr='1e-4'"}},
        Illegal{"lr_bool", {.config = {{"lr", true}}}, TX_ERROR_ILLEGAL_VALUE, {"lr=True"}},
        Illegal{"beta_one", {.optimizer = {{"adam_beta1", 1.0}}}, TX_ERROR_ILLEGAL_VALUE, {"adam_beta1=1", "[0, 1)"}},
        Illegal{
            "backoff_zero", {.optimizer = {{"loss_scale_backoff_factor", 0.0}}}, TX_ERROR_ILLEGAL_VALUE, {"(0, 1)"}},
        Illegal{"growth_one", {.optimizer = {{"loss_scale_growth_factor", 1}}}, TX_ERROR_ILLEGAL_VALUE, {"(1, inf)"}},
        Illegal{
            "bucket_size_zero", {.ddp = {{"bucket_size", 0}}}, TX_ERROR_ILLEGAL_VALUE, {"bucket_size=0", "[1, inf)"}},
        Illegal{"bucket_size_negative", {.ddp = {{"bucket_size", -5}}}, TX_ERROR_ILLEGAL_VALUE, {"bucket_size=-5"}},
        Illegal{"bucket_size_fraction", {.ddp = {{"bucket_size", 0.5}}}, TX_ERROR_ILLEGAL_VALUE, {"bucket_size=0.5"}},
        Illegal{"bucket_size_huge", {.ddp = {{"bucket_size", 1e300}}}, TX_ERROR_ILLEGAL_VALUE, {"bucket_size=1e+300"}},
        Illegal{"bool_from_a_number",
                {.ddp = {{"overlap_grad_reduce", 1}}},
                TX_ERROR_ILLEGAL_VALUE,
                {"overlap_grad_reduce=1", "True, False"}},
        Illegal{"bool_from_text", {.ddp = {{"overlap_grad_reduce", "yes"}}}, TX_ERROR_ILLEGAL_VALUE, {"'yes'"}},
        Illegal{"text_too_long",
                {.optimizer = {{"optimizer", "a_name_that_has_32_bytes_exactly"}}},
                TX_ERROR_ILLEGAL_VALUE,
                {"optimizer", "31 bytes"}},
        Illegal{"text_empty", {.optimizer = {{"optimizer", ""}}}, TX_ERROR_ILLEGAL_VALUE, {"optimizer"}},
        Illegal{"text_from_a_number", {.optimizer = {{"optimizer", 5}}}, TX_ERROR_ILLEGAL_VALUE, {"optimizer=5"}},
        Illegal{"model_of_another_dtype", {.model = TX_F64}, TX_ERROR_ILLEGAL_VALUE, {"float64", "fp32, fp16, bf16"}},
        Illegal{
            "model_of_no_dtype", {.model = static_cast<tx_dtype>(77)}, TX_ERROR_ILLEGAL_VALUE, {"fp32, fp16, bf16"}},
        Illegal{"flag_7", {.bf16 = 7}, TX_ERROR_INVALID_ARGUMENT, {"bf16=7"}},
        Illegal{
            "preset_9", {.preset = static_cast<tx_preset>(9)}, TX_ERROR_ILLEGAL_VALUE, {"preset=9", "conservative"}}),
    [](const auto &info) { return std::string(info.param.id); });

TEST(PolicyArguments, are_checked_before_anything_is_read) {
  tx_policy_args args = TX_POLICY_ARGS_INIT;
  tx_policy policy = TX_POLICY_INIT;
  tx_error error;
  EXPECT_EQ(tx_policy_resolve(nullptr, &policy, nullptr, 0, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_policy_resolve(&args, nullptr, nullptr, 0, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_policy_resolve(&args, &policy, nullptr, 3, &error), TX_ERROR_INVALID_ARGUMENT);
  tx_policy unsized_policy = {};
  EXPECT_EQ(tx_policy_resolve(&args, &unsized_policy, nullptr, 0, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error.message).find("TX_POLICY_INIT"), std::string::npos) << error.message;
  args.size = 8;
  EXPECT_EQ(tx_policy_resolve(&args, &policy, nullptr, 0, nullptr), TX_ERROR_INVALID_ARGUMENT) << "no message wanted";
  args.size = sizeof args;
  args.ddp.n = 1;
  EXPECT_EQ(tx_policy_resolve(&args, &policy, nullptr, 0, &error), TX_ERROR_INVALID_ARGUMENT);
  args.ddp.n = -1;
  EXPECT_EQ(tx_policy_resolve(&args, &policy, nullptr, 0, &error), TX_ERROR_INVALID_ARGUMENT);
  args.ddp.n = 1;
  tx_setting setting = {};
  args.ddp.settings = &setting;
  EXPECT_EQ(tx_policy_resolve(&args, &policy, nullptr, 0, &error), TX_ERROR_INVALID_ARGUMENT) << "a key that is NULL";
  setting.key = "bucket_size";
  setting.kind = 42;
  EXPECT_EQ(tx_policy_resolve(&args, &policy, nullptr, 0, &error), TX_ERROR_INVALID_ARGUMENT);
  setting.kind = TX_VALUE_TEXT;
  EXPECT_EQ(tx_policy_resolve(&args, &policy, nullptr, 0, &error), TX_ERROR_INVALID_ARGUMENT) << "a text that is NULL";
  args.ddp.n = 0;
  tx_origin one = {-7, -7};
  EXPECT_EQ(tx_policy_resolve(&args, &policy, &one, 1, &error), TX_OK) << "fewer origins than fields: the first ones";
  EXPECT_EQ(one.source, TX_SOURCE_DEFAULT);
}

// -- where values come from -------------------------------------------------------------------------------------------

TEST(PolicyOrigin, tells_each_source) {
  const Resolved r = Resolve({.model = TX_BF16,
                              .full_shard = true,
                              .config = {{"lr", 0.1}},
                              .optimizer = {{"exp_avg_dtype", "fp32"}},
                              .ddp = {{"grad_reduce_in_fp32", true}},
                              .optimizer_hook = {{"clip_grad", 1.0}}});
  ASSERT_EQ(r.status, TX_OK) << r.error.message;
  const Expected origins = {{"weight_decay", "default"},
                            {"lr", "config"},
                            {"param_dtype", "dtype"},
                            {"exp_avg_sq_dtype", "dtype"},
                            {"main_params_dtype", "default"},
                            {"check_for_nan_in_grad", "preset"},
                            {"exp_avg_dtype", "override"},
                            {"grad_reduce_in_fp32", "override"},
                            {"main_grads_dtype", "follows grad_reduce_in_fp32"},
                            {"grad_comm_dtype", "follows grad_reduce_in_fp32"},
                            {"clip_grad", "hook"}};
  for (const auto &[field, origin] : origins)
    EXPECT_EQ(r.Origin(field), origin) << field;
}

TEST(PolicyOrigin, A8_the_dtype_branch_leaves_what_it_does_not_name) {
  const Resolved bf16 = Resolve({.bf16 = 1});
  std::set<std::string> pinned;
  for (int32_t f = 0; f < TX_POLICY_FIELDS; f++) {
    if (bf16.origins[f].source == TX_SOURCE_DTYPE) pinned.insert(tx_policy_field_at(f)->name);
  }
  EXPECT_EQ(pinned,
            (std::set<std::string>{"param_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype",
                                   "grad_comm_dtype", "grad_reduce_in_fp32", "use_precision_aware_optimizer", "fp16"}));
  EXPECT_EQ(bf16.Origin("bf16"), "override");
  const Resolved fp32 = Resolve({.bf16 = 0});
  for (const char *field : {"main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype",
                            "grad_comm_dtype", "use_precision_aware_optimizer"}) {
    EXPECT_EQ(fp32.Origin(field), "default") << field;
  }
}

TEST(PolicyDescribe, is_one_line_per_field_and_never_overruns) {
  const Resolved r = Resolve({.ddp = {{"grad_reduce_in_fp32", true}}});
  const int64_t length = tx_policy_describe(&r.policy, r.origins, nullptr, 0);
  ASSERT_GT(length, 0);
  std::vector<char> buffer(static_cast<size_t>(length) + 1);
  ASSERT_EQ(tx_policy_describe(&r.policy, r.origins, buffer.data(), length + 1), length);
  const std::string text = buffer.data();
  EXPECT_EQ(text.size(), static_cast<size_t>(length));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), TX_POLICY_FIELDS);
  for (int32_t f = 0; f < TX_POLICY_FIELDS; f++)
    EXPECT_NE(text.find(tx_policy_field_at(f)->name), std::string::npos);
  EXPECT_NE(text.find("follows grad_reduce_in_fp32"), std::string::npos) << text;
  std::vector<char> cut(10, 'x');
  EXPECT_EQ(tx_policy_describe(&r.policy, r.origins, cut.data(), 9), length);
  EXPECT_EQ(cut[8], '\0');
  EXPECT_EQ(cut[9], 'x');
  EXPECT_EQ(tx_policy_describe(&r.policy, nullptr, buffer.data(), 1) > 0, true);
  EXPECT_EQ(tx_policy_describe(nullptr, nullptr, nullptr, 0), -1);
}

TEST(PolicyFields, are_the_struct_in_order_without_gaps) {
  int64_t offset = sizeof(uint64_t);
  std::set<std::string> names;
  for (int32_t f = 0; f < TX_POLICY_FIELDS; f++) {
    const tx_policy_field *field = tx_policy_field_at(f);
    ASSERT_NE(field, nullptr);
    EXPECT_EQ(field->offset, offset) << field->name;
    const int64_t sizes[] = {8, 8, 4, 4, 4, TX_TEXT_CAPACITY};
    EXPECT_EQ(field->bytes, sizes[field->type]) << field->name;
    EXPECT_EQ(field->side & ~(TX_SIDE_OPTIMIZER | TX_SIDE_DDP), 0) << field->name;
    offset += field->bytes;
    names.insert(field->name);
  }
  EXPECT_EQ(offset, static_cast<int64_t>(sizeof(tx_policy)));
  EXPECT_EQ(names.size(), static_cast<size_t>(TX_POLICY_FIELDS));
  EXPECT_EQ(tx_policy_field_at(TX_POLICY_FIELDS), nullptr);
  EXPECT_EQ(tx_policy_field_at(-1), nullptr);
  EXPECT_STREQ(tx_policy_field_at(TX_POLICY_main_grads_dtype)->name, "main_grads_dtype");
  EXPECT_EQ(tx_policy_field_at(TX_POLICY_main_grads_dtype)->offset,
            static_cast<int64_t>(offsetof(tx_policy, main_grads_dtype)));
}

TEST(PolicyFields, defaults_are_legal_and_enums_match_their_names) {
  const tx_policy defaults = tx_policy_defaults();
  for (int32_t f = 0; f < TX_POLICY_FIELDS; f++) {
    const tx_policy_field *field = tx_policy_field_at(f);
    if (field->side == 0) continue;
    char value[64];
    tx_text text = tx_text_in(value, sizeof value);
    tx_policy_format(&defaults, f, &text);
    tx_setting setting = {};
    setting.key = field->name;
    setting.kind = TX_VALUE_TEXT;
    setting.text = value;
    if (std::string(value) == "None") {
      setting.kind = TX_VALUE_NONE;
    } else if (field->type == TX_FIELD_F64 || field->type == TX_FIELD_I64) {
      setting.kind = TX_VALUE_FLOAT;
      setting.number = std::stod(value);
    } else if (field->type == TX_FIELD_BOOL) {
      setting.kind = TX_VALUE_BOOL;
      setting.integer = std::string(value) == "True";
    }
    tx_policy read = TX_POLICY_INIT;
    int32_t found;
    int decided;
    tx_error error;
    EXPECT_EQ(tx_policy_read(&setting, "test", field->side, &read, &found, &decided, &error), TX_OK) << error.message;
    EXPECT_TRUE(decided) << field->name;
    EXPECT_TRUE(tx_policy_equal(&read, &defaults, f)) << field->name << "=" << value;
  }
  const auto name = [](int32_t f, int32_t value) {
    tx_policy p = tx_policy_defaults();
    std::memcpy(reinterpret_cast<char *>(&p) + tx_policy_field_at(f)->offset, &value, sizeof value);
    char buffer[64];
    tx_text text = tx_text_in(buffer, sizeof buffer);
    tx_policy_format(&p, f, &text);
    return std::string(buffer);
  };
  EXPECT_EQ(name(TX_POLICY_moment_rounding, TX_NEAREST), "nearest");
  EXPECT_EQ(name(TX_POLICY_moment_rounding, TX_DITHERED), "dithered");
  EXPECT_EQ(name(TX_POLICY_weight_rounding, TX_STOCHASTIC), "stochastic");
  EXPECT_EQ(name(TX_POLICY_data_parallel_sharding_strategy, TX_NO_SHARD), "no_shard");
  EXPECT_EQ(name(TX_POLICY_data_parallel_sharding_strategy, TX_OPTIM), "optim");
  EXPECT_EQ(name(TX_POLICY_data_parallel_sharding_strategy, TX_OPTIM_GRADS), "optim_grads");
  EXPECT_EQ(name(TX_POLICY_data_parallel_sharding_strategy, TX_OPTIM_GRADS_PARAMS), "optim_grads_params");
  EXPECT_EQ(name(TX_POLICY_preset, TX_PRESET_CONSERVATIVE), "conservative");
}

// -- parameters of another dtype in the same model
// ---------------------------------------------------------------------

struct Row {
  const char *id;
  Load load;
  tx_dtype dtype;
  Expected expected;
};

void PrintTo(const Row &c, std::ostream *out) {
  *out << c.id;
}

class PolicyRowTest : public testing::TestWithParam<Row> {};

TEST_P(PolicyRowTest, A2_other_parameters_follow_their_own_row) {
  Resolved r = Resolve(GetParam().load);
  ASSERT_EQ(r.status, TX_OK) << r.error.message;
  Resolved row = r;
  ASSERT_EQ(tx_policy_row(&r.policy, r.origins, GetParam().dtype, &row.policy, &row.error), TX_OK) << row.error.message;
  for (const auto &[field, value] : GetParam().expected)
    EXPECT_EQ(row[field], value) << field;
}

INSTANTIATE_TEST_SUITE_P(
    Rows, PolicyRowTest,
    testing::Values(
        Row{"same_dtype", {}, TX_BF16, kBf16}, Row{"fp32_norms", {}, TX_F32, kFp32},
        Row{"fp16_in_bf16", {.bf16 = 1}, TX_F16, kFp16}, Row{"bf16_in_fp32", {.model = TX_F32}, TX_BF16, kBf16},
        Row{"explicit_values_stay",
            {.optimizer = {{"exp_avg_dtype", "fp16"}, {"lr", 0.5}}},
            TX_F32,
            But(kFp32, {{"exp_avg_dtype", "fp16"}, {"use_precision_aware_optimizer", "True"}, {"lr", "0.5"}})},
        Row{"what_followed_an_explicit_value_follows_again",
            {.ddp = {{"grad_reduce_in_fp32", false}}},
            TX_F16,
            But(kFp16, {{"main_grads_dtype", "fp16"}, {"grad_comm_dtype", "fp16"}, {"grad_reduce_in_fp32", "False"}})},
        Row{"remainders_are_for_bf16",
            {.optimizer = {{"store_param_remainders", true}}},
            TX_F32,
            But(kFp32, {{"store_param_remainders", "False"}})},
        Row{"remainders_stay_beside_bf16",
            {.optimizer = {{"store_param_remainders", true}}},
            TX_BF16,
            But(kBf16, {{"store_param_remainders", "True"}})},
        Row{"gradients_None_follow_the_row", {.optimizer = {{"main_grads_dtype", None{}}}}, TX_F32, kFp32},
        Row{"no_masters_stay_none",
            {.ddp = {{"preserve_fp32_weights", false}}},
            TX_F32,
            But(kFp32, {{"main_params_dtype", "None"}})},
        Row{"full_shard_stays",
            {.full_shard = true, .ddp = {{"data_parallel_sharding_strategy", "optim"}}},
            TX_F32,
            But(kFullShard, {{"data_parallel_sharding_strategy", "optim"}})},
        Row{"conservative_stays", {.preset = kConservative}, TX_F32, kAllFp32},
        Row{"config_stays", {.config = kFive}, TX_F32, But(kFp32, kFiveValues)},
        Row{"hooks_stay",
            {.optimizer_hook = {{"exp_avg_sq_dtype", "fp8"}}},
            TX_F16,
            But(kFp16, {{"exp_avg_sq_dtype", "uint8"}})}),
    [](const auto &info) { return std::string(info.param.id); });

TEST(PolicyRow, refuses_what_is_not_legal) {
  const Resolved r = Resolve({});
  tx_policy row = TX_POLICY_INIT;
  tx_error error;
  EXPECT_EQ(tx_policy_row(&r.policy, r.origins, TX_I64, &row, &error), TX_ERROR_ILLEGAL_VALUE);
  EXPECT_NE(std::string(error.message).find("int64"), std::string::npos) << error.message;
  EXPECT_EQ(tx_policy_row(&r.policy, nullptr, TX_F32, &row, &error), TX_ERROR_INVALID_ARGUMENT);
  row.size = 0;
  EXPECT_EQ(tx_policy_row(&r.policy, r.origins, TX_F32, &row, &error), TX_ERROR_INVALID_ARGUMENT);
}

// -- everything with everything ---------------------------------------------------------------------------------------

// Whatever is given, a policy that resolves keeps every explicit value, agrees with itself, and is the same each time.
TEST(PolicyProperties, A4_A6_hold_for_all_pairs_of_overrides) {
  std::vector<std::pair<bool, Setting>> choices;  // (optimizer side, setting)
  for (const char *key : {"exp_avg_dtype", "exp_avg_sq_dtype"}) {
    for (const char *value : {"fp32", "fp16", "bf16", "fp8"})
      choices.push_back({true, {key, value}});
  }
  for (const char *value : {"fp32", "fp16", "bf16"})
    choices.push_back({true, {"main_grads_dtype", value}});
  for (const char *value : {"fp32", "fp16", "bf16", "fp8"})
    choices.push_back({false, {"grad_comm_dtype", value}});
  for (const char *value : {"fp32", "fp16"})
    choices.push_back({true, {"main_params_dtype", value}});
  choices.push_back({true, {"main_params_dtype", None{}}});
  for (bool value : {false, true}) {
    for (const char *key : {"use_precision_aware_optimizer", "store_param_remainders"})
      choices.push_back({true, {key, value}});
    for (const char *key : {"grad_reduce_in_fp32", "preserve_fp32_weights", "use_distributed_optimizer"})
      choices.push_back({false, {key, value}});
  }
  int resolved = 0, refused = 0;
  for (tx_dtype model : {TX_F32, TX_F16, TX_BF16}) {
    for (tx_preset preset : {kSeed, kConservative}) {
      for (const auto &[a_optimizer, a] : choices) {
        for (const auto &[b_optimizer, b] : choices) {
          if (std::strcmp(a.key, b.key) == 0) continue;
          Load load = {.model = model, .preset = preset};
          (a_optimizer ? load.optimizer : load.ddp).push_back(a);
          (b_optimizer ? load.optimizer : load.ddp).push_back(b);
          const Resolved r = Resolve(load);
          if (r.status != TX_OK) {
            refused++;
            ASSERT_EQ(r.status, TX_ERROR_CONFLICT) << r.error.message;
            ASSERT_NE(std::string(r.error.message).find(" contradicts "), std::string::npos);
            continue;
          }
          resolved++;
          const tx_policy &p = r.policy;
          for (const Setting *s : {&a, &b}) {
            ASSERT_EQ(r.Origin(s->key), "override") << s->key;
            if (const auto *v = std::get_if<bool>(&s->value)) {
              ASSERT_EQ(r[s->key], *v ? "True" : "False");
            } else if (const auto *name = std::get_if<const char *>(&s->value)) {
              ASSERT_EQ(r[s->key], std::string(*name) == "fp8" ? "uint8" : *name);
            }
          }
          const bool all_fp32 = p.exp_avg_dtype == TX_F32 && p.exp_avg_sq_dtype == TX_F32;
          ASSERT_TRUE(p.use_precision_aware_optimizer || all_fp32);
          ASSERT_TRUE(!p.grad_reduce_in_fp32 || p.grad_comm_dtype == TX_F32);
          ASSERT_TRUE(p.grad_reduce_in_fp32 || p.grad_comm_dtype != TX_F32 || p.param_dtype == TX_F32);
          ASSERT_EQ(p.preserve_fp32_weights, p.main_params_dtype == TX_F32);
          ASSERT_TRUE(!p.store_param_remainders || (p.param_dtype == TX_BF16 && p.main_params_dtype == TX_F32));
          ASSERT_NE(p.main_grads_dtype, TX_NONE);
          const Resolved again = Resolve(load);
          ASSERT_EQ(std::memcmp(&p, &again.policy, sizeof p), 0);
          Resolved row = r;
          ASSERT_EQ(tx_policy_row(&p, r.origins, model, &row.policy, nullptr), TX_OK);
          ASSERT_EQ(std::memcmp(&p, &row.policy, sizeof p), 0) << "the model's own row is its policy";
        }
      }
    }
  }
  EXPECT_GT(resolved, 1000);
  EXPECT_GT(refused, 100);
}

}  // namespace
