// csrc/core/policy: the loader, statement by statement (A1-A5, A7, A8); full sharding in one flag (B1), old names and
// masters (E1), strategies (E2).
#include <gtest/gtest.h>

#include "tests/core/policy_load.h"

namespace {

// A case is plain text: the settings of a load (policy_load.h), and the expected fields as readable text; of equal
// fields the last one counts.
struct Legal {
  const char *id;
  const char *load;
  const char *expected;
};

class PolicyTest : public testing::TestWithParam<Legal> {};

TEST_P(PolicyTest, resolves) {
  const Resolved r = Resolve(GetParam().load);
  ASSERT_EQ(r.status, TX_OK) << r.error.message;
  for (const auto &[field, value] : Pairs(GetParam().expected))
    EXPECT_EQ(r[field], value) << field << ": " << r.Origin(field);
}

constexpr Legal kA1A2Mode[] = {
    {"A1_nothing_means_bf16", "", BF16},
    {"A2_bf16_flag", "bf16=1", BF16},
    {"A2_fp16_flag", "fp16=1", FP16},
    {"A2_fp32_by_bf16_off", "bf16=0", FP32},
    {"A1_both_flags_fp16_wins", "bf16=1 fp16=1", FP16},
    {"A1_fp16_off_alone_leaves_bf16", "fp16=0", BF16},
    {"A1_both_off_is_fp32", "bf16=0 fp16=0", FP32},
    {"A1_fp16_with_bf16_off", "bf16=0 fp16=1", FP16},
    {"A2_bf16_model", "model=bf16", BF16},
    {"A2_fp16_model", "model=fp16", FP16},
    {"A2_fp32_model", "model=fp32", FP32},
    {"A6_flag_that_agrees_with_the_model", "model=bf16 bf16=1 fp16=0", BF16},
    {"A6_both_flags_agree_with_an_fp16_model", "model=fp16 bf16=1 fp16=1", FP16},
    {"A6_flags_off_agree_with_an_fp32_model", "model=fp32 bf16=0 fp16=0", FP32},
    {"A1_flags_as_keys", "opt.fp16=True", FP16},
    {"A4_key_wins_over_the_argument_of_its_name", "bf16=1 opt.bf16=False", FP32},
    {"A6_default_mode_gives_way_to_param_dtype", "opt.param_dtype=fp32", FP32},
    {"A2_param_dtype_as_the_model_says", "model=fp16 opt.param_dtype=dtype:fp16", FP16},
};
INSTANTIATE_TEST_SUITE_P(A1_A2_mode, PolicyTest, testing::ValuesIn(kA1A2Mode), Id<Legal>);

constexpr Legal kA3A4Overrides[] = {
    {"A3_bf16_buckets_are_not_fp32", "bf16=1", "grad_reduce_in_fp32=False"},
    {"A3_without_bf16_they_are", "bf16=0", "grad_reduce_in_fp32=True"},
    {"A4_each_key_on_its_own", "opt.exp_avg_dtype=fp32", BF16 " exp_avg_dtype=fp32"},
    {"A4_8_bit_moments", "opt.exp_avg_dtype=fp8 opt.exp_avg_sq_dtype=dtype:uint8",
     BF16 " exp_avg_dtype=uint8 exp_avg_sq_dtype=uint8"},
    {"A4_gradient_dtype_of_the_optimizer_side_moves_the_bucket", "opt.main_grads_dtype=fp32",
     BF16 " main_grads_dtype=fp32 grad_comm_dtype=fp32 grad_reduce_in_fp32=True"},
    {"A4_bucket_dtype_of_the_ddp_side_moves_the_gradients", "ddp.grad_reduce_in_fp32=True",
     BF16 " main_grads_dtype=fp32 grad_comm_dtype=fp32 grad_reduce_in_fp32=True"},
    {"A4_fp16_with_fp16_buckets", "fp16=1 ddp.grad_reduce_in_fp32=False",
     FP16 " main_grads_dtype=fp16 grad_comm_dtype=fp16 grad_reduce_in_fp32=False"},
    {"A4_fp32_with_bf16_gradients", "bf16=0 opt.main_grads_dtype=bf16",
     FP32 " main_grads_dtype=bf16 grad_comm_dtype=bf16 grad_reduce_in_fp32=False"},
    {"A4_fp32_gradients_over_a_bf16_wire", "opt.main_grads_dtype=fp32 ddp.grad_comm_dtype=bf16",
     BF16 " main_grads_dtype=fp32"},
    {"A4_fp32_gradients_with_reduction_not_in_fp32", "opt.main_grads_dtype=fp32 ddp.grad_reduce_in_fp32=False",
     BF16 " main_grads_dtype=fp32"},
    {"A4_8_bit_wire", "ddp.grad_comm_dtype=fp8", BF16 " grad_comm_dtype=uint8"},
    {"A4_narrow_wire_leaves_fp32_gradients", "fp16=1 ddp.grad_comm_dtype=bf16",
     FP16 " grad_comm_dtype=bf16 grad_reduce_in_fp32=False"},
    {"A4_narrow_wire_that_says_so_twice_leaves_fp32_gradients",
     "fp16=1 ddp.grad_reduce_in_fp32=False ddp.grad_comm_dtype=bf16",
     FP16 " grad_comm_dtype=bf16 grad_reduce_in_fp32=False"},
    {"A4_fp32_wire_leaves_bf16_gradients", "ddp.grad_comm_dtype=fp32",
     BF16 " grad_comm_dtype=fp32 grad_reduce_in_fp32=True"},
    {"A4_fp32_model_may_say_that_its_wire_is_its_own_dtype", "bf16=0 ddp.grad_reduce_in_fp32=False",
     FP32 " grad_reduce_in_fp32=False"},
    {"A4_None_decides_nothing", "opt.exp_avg_dtype=None opt.weight_decay=None opt.bf16=None",
     BF16 " weight_decay=0.01"},
    {"C2_auto_decides_nothing", "opt.exp_avg_dtype=auto ddp.grad_comm_dtype=Auto", BF16},
    {"A4_the_mode_may_be_overridden", "bf16=1 opt.bf16=False opt.fp16=True", FP16},
    {"A6_moments_give_way_to_precision_aware_off", "opt.use_precision_aware_optimizer=False",
     BF16 " use_precision_aware_optimizer=False exp_avg_dtype=fp32 exp_avg_sq_dtype=fp32"},
    {"A6_precision_aware_gives_way_to_a_moment", "bf16=0 opt.exp_avg_sq_dtype=bf16",
     FP32 " use_precision_aware_optimizer=True exp_avg_sq_dtype=bf16"},
    {"A6_precision_aware_on_changes_no_dtype", "bf16=0 opt.use_precision_aware_optimizer=True",
     FP32 " use_precision_aware_optimizer=True"},
    {"A6_precision_aware_off_with_fp32_moments",
     "opt.use_precision_aware_optimizer=False opt.exp_avg_dtype=float opt.exp_avg_sq_dtype=fp32", "exp_avg_dtype=fp32"},
    {"A6_precision_aware_off_keeps_explicit_gradients",
     "opt.use_precision_aware_optimizer=False opt.main_grads_dtype=bf16",
     "main_grads_dtype=bf16 grad_comm_dtype=bf16 grad_reduce_in_fp32=False"},
    {"G4_remainders", "opt.store_param_remainders=True", BF16 " store_param_remainders=True"},
    {"A6_minimum_scale_gives_way", "fp16=1 opt.initial_loss_scale=0.25",
     FP16 " initial_loss_scale=0.25 min_loss_scale=0.25"},
    {"A6_initial_scale_gives_way", "fp16=1 opt.min_loss_scale=65536",
     FP16 " initial_loss_scale=65536 min_loss_scale=65536"},
};
INSTANTIATE_TEST_SUITE_P(A3_A4_overrides, PolicyTest, testing::ValuesIn(kA3A4Overrides), Id<Legal>);

constexpr Legal kE1E2MastersAndStrategies[] = {
    {"E1_no_masters", "opt.main_params_dtype=None", BF16 " main_params_dtype=None preserve_fp32_weights=False"},
    {"E1_auto_masters_are_the_weights", "opt.main_params_dtype=auto", BF16 " main_params_dtype=None"},
    {"E1_preserve_fp32_weights_off", "ddp.preserve_fp32_weights=False", BF16 " main_params_dtype=None"},
    {"E1_preserve_fp32_weights_on", "ddp.preserve_fp32_weights=True", BF16},
    {"E1_gradients_None_are_of_the_parameters_dtype", "fp16=1 opt.main_grads_dtype=None",
     FP16 " main_grads_dtype=fp16 grad_comm_dtype=fp16 grad_reduce_in_fp32=False"},
    {"E1_wire_None_is_that_of_the_gradients", "opt.main_grads_dtype=fp16 ddp.grad_comm_dtype=None",
     BF16 " main_grads_dtype=fp16 grad_comm_dtype=fp16"},
    {"C3_fp16_masters_are_a_legal_name", "opt.main_params_dtype=half", BF16 " main_params_dtype=fp16"},
    {"C3_fp16_masters_need_the_precision_aware_optimizer", "bf16=0 opt.main_params_dtype=fp16",
     FP32 " main_params_dtype=fp16 use_precision_aware_optimizer=True"},
    {"E2_default_is_no_shard", "", "data_parallel_sharding_strategy=no_shard use_distributed_optimizer=False"},
    {"E2_by_name", "ddp.data_parallel_sharding_strategy=optim_grads",
     "data_parallel_sharding_strategy=optim_grads use_distributed_optimizer=True"},
    {"E2_0", "ddp.data_parallel_sharding_strategy=0", "data_parallel_sharding_strategy=no_shard"},
    {"E2_1", "ddp.data_parallel_sharding_strategy=1", "data_parallel_sharding_strategy=optim"},
    {"E2_2", "ddp.data_parallel_sharding_strategy=2", "data_parallel_sharding_strategy=optim_grads"},
    {"E2_3", "ddp.data_parallel_sharding_strategy=3", "data_parallel_sharding_strategy=optim_grads_params"},
    {"E2_no_shard_beside_a_distributed_optimizer_is_what_Megatron_writes",
     "opt.use_distributed_optimizer=True ddp.data_parallel_sharding_strategy=no_shard",
     "data_parallel_sharding_strategy=no_shard use_distributed_optimizer=True"},
};
INSTANTIATE_TEST_SUITE_P(E1_E2_masters_and_strategies, PolicyTest, testing::ValuesIn(kE1E2MastersAndStrategies),
                         Id<Legal>);

// The last four use the key's former name.
constexpr Legal kCompression[] = {
    {"compression_by_default", "", "grad_comm_compression=auto"},
    {"compression_None_is_the_default", "ddp.grad_comm_compression=None", "grad_comm_compression=auto"},
    {"compression_auto", "ddp.grad_comm_compression=auto", "grad_comm_compression=auto"},
    {"compression_off", "ddp.grad_comm_compression=off", "grad_comm_compression=off"},
    {"compression_on", "ddp.grad_comm_compression=on", "grad_comm_compression=on"},
    {"compression_by_number", "ddp.grad_comm_compression=2", "grad_comm_compression=on"},
    {"compression_by_a_hook", "ddp.grad_comm_compression=off ddp_hook.grad_comm_compression=on",
     "grad_comm_compression=on"},
    {"compression_below_0", "ddp.compress_below_gbps=0.0", "grad_comm_compression=off"},
    {"compression_below_inf", "ddp.compress_below_gbps=inf", "grad_comm_compression=on"},
    {"compression_below_3", "ddp.compress_below_gbps=3", "grad_comm_compression=auto"},
    {"compression_below_None", "ddp.compress_below_gbps=None", "grad_comm_compression=auto"},
};
INSTANTIATE_TEST_SUITE_P(compression, PolicyTest, testing::ValuesIn(kCompression), Id<Legal>);
// A7's table: (precision-aware, main_grads_dtype) -> grad_reduce_in_fp32; an explicit value wins.
#define REDUCE_FP32 "grad_reduce_in_fp32=True grad_comm_dtype=fp32"
#define REDUCE_BF16 "grad_reduce_in_fp32=False grad_comm_dtype=bf16"

constexpr Legal kA7Conservative[] = {
    {"A7_bf16", "preset=conservative", ALL_FP32 " param_dtype=bf16 use_precision_aware_optimizer=False"},
    {"A7_fp16", "fp16=1 preset=conservative", ALL_FP32 " param_dtype=fp16 initial_loss_scale=32768"},
    {"A7_fp32", "bf16=0 preset=conservative", ALL_FP32 " param_dtype=fp32"},
    {"A7_off_fp32", "preset=conservative opt.use_precision_aware_optimizer=False opt.main_grads_dtype=fp32",
     REDUCE_FP32},
    {"A7_off_bf16", "preset=conservative opt.use_precision_aware_optimizer=False opt.main_grads_dtype=bf16",
     REDUCE_FP32},
    {"A7_on_fp32", "preset=conservative opt.use_precision_aware_optimizer=True opt.main_grads_dtype=fp32", REDUCE_FP32},
    {"A7_on_bf16", "preset=conservative opt.use_precision_aware_optimizer=True opt.main_grads_dtype=bf16", REDUCE_BF16},
    {"A7_default_off_bf16", "preset=conservative opt.main_grads_dtype=bf16", REDUCE_FP32},
    {"A7_off_fp32_explicit_False",
     "preset=conservative opt.use_precision_aware_optimizer=False opt.main_grads_dtype=fp32 "
     "ddp.grad_reduce_in_fp32=False",
     REDUCE_BF16},
    {"A7_off_bf16_explicit_False",
     "preset=conservative opt.use_precision_aware_optimizer=False opt.main_grads_dtype=bf16 "
     "ddp.grad_reduce_in_fp32=False",
     REDUCE_BF16},
    {"A7_on_fp32_explicit_False",
     "preset=conservative opt.use_precision_aware_optimizer=True opt.main_grads_dtype=fp32 "
     "ddp.grad_reduce_in_fp32=False",
     REDUCE_BF16},
    {"A7_on_bf16_explicit_False",
     "preset=conservative opt.use_precision_aware_optimizer=True opt.main_grads_dtype=bf16 "
     "ddp.grad_reduce_in_fp32=False",
     REDUCE_BF16},
    {"A7_off_fp32_explicit_True",
     "preset=conservative opt.use_precision_aware_optimizer=False opt.main_grads_dtype=fp32 "
     "ddp.grad_reduce_in_fp32=True",
     REDUCE_FP32},
    {"A7_off_bf16_explicit_True",
     "preset=conservative opt.use_precision_aware_optimizer=False opt.main_grads_dtype=bf16 "
     "ddp.grad_reduce_in_fp32=True",
     REDUCE_FP32},
    {"A7_on_fp32_explicit_True",
     "preset=conservative opt.use_precision_aware_optimizer=True opt.main_grads_dtype=fp32 "
     "ddp.grad_reduce_in_fp32=True",
     REDUCE_FP32},
    {"A7_on_bf16_explicit_True",
     "preset=conservative opt.use_precision_aware_optimizer=True opt.main_grads_dtype=bf16 "
     "ddp.grad_reduce_in_fp32=True",
     REDUCE_FP32},
    {"A7_a_moment_that_was_asked_for", "preset=conservative opt.exp_avg_dtype=bf16",
     ALL_FP32 " exp_avg_dtype=bf16 use_precision_aware_optimizer=True"},
};
INSTANTIATE_TEST_SUITE_P(A7_conservative, PolicyTest, testing::ValuesIn(kA7Conservative), Id<Legal>);

constexpr Legal kA8UpstreamCases[] = {
    {"A8_1_bf16_pins_three_dtypes_and_leaves_the_master", "bf16=1", BF16},
    {"A8_2_fp16_keeps_fp32_moments_with_scaler_and_no_remainders", "fp16=1", FP16},
    {"A8_3_fp32_keeps_defaults", "bf16=0", FP32 " initial_loss_scale=65536"},
    {"A8_4_defaults_are_bf16", "", BF16},
    {"A8_5_fp16_and_bf16_is_fp16", "bf16=1 fp16=1", FP16},
    {"A8_6_use_distributed_optimizer_on", "config.use_distributed_optimizer=True", "use_distributed_optimizer=True"},
    {"A8_6_use_distributed_optimizer_off", "config.use_distributed_optimizer=False", "use_distributed_optimizer=False"},
    {"A8_6_use_distributed_optimizer_on_as_override", "opt.use_distributed_optimizer=True",
     "use_distributed_optimizer=True data_parallel_sharding_strategy=optim"},
    {"A8_6_use_distributed_optimizer_off_as_override", "ddp.use_distributed_optimizer=False",
     "use_distributed_optimizer=False"},
    {"A8_7_verbatim", FIVE("config."), FIVE("")},
    {"A8_7_verbatim_as_overrides", FIVE("opt."), FIVE("")},
    {"A8_7_None_is_verbatim", "config.lr=None config.min_lr=None", "lr=None min_lr=None"},
    {"A8_8_an_override_wins_and_the_rest_survive", FIVE("config.") " opt.lr=0.5 opt.exp_avg_dtype=fp32",
     FIVE("") " " BF16 " lr=0.5 exp_avg_dtype=fp32"},
    {"A8_9_missing_overrides", FIVE("config."), FIVE("") " " BF16},
    {"A4_config_is_above_the_default_and_agrees_with_the_dtype", "config.exp_avg_dtype=bf16 config.adam_beta2=0.95",
     BF16 " adam_beta2=0.95"},
    {"A4_config_that_an_override_replaces", "config.exp_avg_dtype=fp32 opt.exp_avg_dtype=fp16",
     BF16 " exp_avg_dtype=fp16"},
};
INSTANTIATE_TEST_SUITE_P(A8_upstream_cases, PolicyTest, testing::ValuesIn(kA8UpstreamCases), Id<Legal>);

constexpr Legal kB1FullShard[] = {
    {"B1_defaults", "full_shard=1", FULL_SHARD " " BF16},
    {"B1_without_the_flag", "",
     "use_distributed_optimizer=False check_for_nan_in_grad=False data_parallel_sharding_strategy=no_shard "
     "overlap_grad_reduce=True overlap_param_gather=False"},
    {"B1_use_distributed_optimizer", "full_shard=1 ddp.use_distributed_optimizer=False",
     FULL_SHARD " use_distributed_optimizer=False"},
    {"B1_check_for_nan_in_grad", "full_shard=1 ddp.check_for_nan_in_grad=False",
     FULL_SHARD " check_for_nan_in_grad=False"},
    {"B1_strategy", "full_shard=1 ddp.data_parallel_sharding_strategy=optim",
     FULL_SHARD " data_parallel_sharding_strategy=optim"},
    {"B1_no_shard", "full_shard=1 ddp.data_parallel_sharding_strategy=no_shard",
     FULL_SHARD " data_parallel_sharding_strategy=no_shard"},
    {"B1_overlap_grad_reduce", "full_shard=1 ddp.overlap_grad_reduce=False", FULL_SHARD " overlap_grad_reduce=False"},
    {"B1_overlap_param_gather", "full_shard=1 ddp.overlap_param_gather=False",
     FULL_SHARD " overlap_param_gather=False"},
    {"B1_hook_wins_too", "full_shard=1 ddp_hook.check_for_nan_in_grad=False",
     FULL_SHARD " check_for_nan_in_grad=False"},
};
INSTANTIATE_TEST_SUITE_P(B1_full_shard, PolicyTest, testing::ValuesIn(kB1FullShard), Id<Legal>);

constexpr Legal kA5Hooks[] = {
    {"A5_the_answer_wins_over_the_dtype", "opt_hook.exp_avg_dtype=fp32", BF16 " exp_avg_dtype=fp32"},
    {"A5_the_answer_wins_over_an_override", "opt.lr=1.0 opt_hook.lr=2.0", BF16 " lr=2"},
    {"A5_the_answer_is_resolved_again_across_sides", "ddp_hook.grad_reduce_in_fp32=True",
     BF16 " grad_reduce_in_fp32=True main_grads_dtype=fp32 grad_comm_dtype=fp32"},
    {"A5_the_answer_may_change_the_mode", "opt_hook.fp16=True", FP16},
    {"A5_both_sides", "opt_hook.clip_grad=2.5 ddp_hook.bucket_size=4e7", BF16 " clip_grad=2.5 bucket_size=40000000"},
    {"A5_contradictions_are_looked_for_after_the_hooks",
     "opt.use_precision_aware_optimizer=False opt.exp_avg_dtype=bf16 opt_hook.exp_avg_dtype=fp32",
     "use_precision_aware_optimizer=False exp_avg_dtype=fp32 exp_avg_sq_dtype=fp32"},
    {"A5_a_hook_settles_what_two_mappings_disagree_on",
     "opt.use_distributed_optimizer=True ddp.use_distributed_optimizer=False ddp_hook.use_distributed_optimizer=False",
     "use_distributed_optimizer=False"},
    {"A5_a_hook_of_one_side_wins_over_a_mapping_of_the_other",
     "opt_hook.use_distributed_optimizer=True ddp.use_distributed_optimizer=False", "use_distributed_optimizer=True"},
    {"A5_None_is_no_answer", "opt.exp_avg_dtype=fp32 opt_hook.exp_avg_dtype=None", BF16 " exp_avg_dtype=fp32"},
};
INSTANTIATE_TEST_SUITE_P(A5_hooks, PolicyTest, testing::ValuesIn(kA5Hooks), Id<Legal>);

TEST(PolicyHook, A5_is_called_once_and_sees_the_resolved_policy) {
  const Resolved r = Resolve("opt.main_grads_dtype=fp32 opt_hook.exp_avg_dtype=fp32 ddp_hook.overlap_grad_reduce=True");
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
  const Resolved r = Resolve("opt_hook.lr=1.0", TX_ERROR_UNAVAILABLE);
  EXPECT_EQ(r.status, TX_ERROR_UNAVAILABLE);
  EXPECT_STREQ(r.error.message, "the hook's own words");
  EXPECT_EQ(r.policy.param_dtype, 0) << "nothing is written";
}

}  // namespace
