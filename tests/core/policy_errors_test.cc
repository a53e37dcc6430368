// csrc/core/policy: what is rejected, and with which message: contradictions (A6), keys, values, dtypes (C4),
// arguments.
#include <gtest/gtest.h>

#include <cstring>

#include "tests/core/policy_load.h"

namespace {

struct Illegal {
  const char *id;
  const char *load;
  tx_status status;
  const char *says;  // separated by " | "
};

class PolicyIllegalTest : public testing::TestWithParam<Illegal> {};

TEST_P(PolicyIllegalTest, is_refused_by_name_and_nothing_is_written) {
  const Resolved r = Resolve(GetParam().load);
  ASSERT_EQ(r.status, GetParam().status) << r.error.message;
  const std::string message = r.error.message;
  for (const std::string &word : Split(GetParam().says, " | "))
    EXPECT_NE(message.find(word), std::string::npos) << word << " in: " << message;
  const tx_policy untouched = TX_POLICY_INIT;
  EXPECT_EQ(std::memcmp(&r.policy, &untouched, sizeof untouched), 0);
  for (const tx_origin &origin : r.origins)
    EXPECT_EQ(origin.source + origin.cause, 0);
}

constexpr Illegal kA6Contradictions[] = {
    {"A6_precision_aware_and_exp_avg", "opt.use_precision_aware_optimizer=False opt.exp_avg_dtype=bf16",
     TX_ERROR_CONFLICT, "use_precision_aware_optimizer=False | exp_avg_dtype=bf16"},
    {"A6_precision_aware_and_exp_avg_sq", "opt.use_precision_aware_optimizer=False opt.exp_avg_sq_dtype=fp8",
     TX_ERROR_CONFLICT, "use_precision_aware_optimizer=False | exp_avg_sq_dtype=uint8"},
    {"A6_precision_aware_and_main_params", "opt.use_precision_aware_optimizer=False opt.main_params_dtype=fp16",
     TX_ERROR_CONFLICT, "use_precision_aware_optimizer=False | main_params_dtype=fp16"},
    {"A6_precision_aware_and_remainders", "opt.use_precision_aware_optimizer=False opt.store_param_remainders=True",
     TX_ERROR_CONFLICT, "use_precision_aware_optimizer=False | store_param_remainders=True"},
    {"A6_contradiction_by_a_hook", "opt.use_precision_aware_optimizer=False opt_hook.exp_avg_dtype=bf16",
     TX_ERROR_CONFLICT,
     "override_optimizer_config use_precision_aware_optimizer | override_optimizer_config (hook) exp_avg_dtype"},
    {"A6_contradiction_in_conservative",
     "preset=conservative opt.use_precision_aware_optimizer=False opt.exp_avg_dtype=bf16", TX_ERROR_CONFLICT,
     "use_precision_aware_optimizer | exp_avg_dtype"},
    {"A6_bf16_model_fp16_flag", "model=bf16 fp16=1", TX_ERROR_CONFLICT, "fp16=True | the model | param_dtype=bf16"},
    {"A6_bf16_model_both_flags", "model=bf16 bf16=1 fp16=1", TX_ERROR_CONFLICT, "fp16=True | param_dtype=bf16"},
    {"A6_bf16_model_bf16_off", "model=bf16 bf16=0", TX_ERROR_CONFLICT, "bf16=False | param_dtype=bf16"},
    {"A6_fp32_model_bf16_flag", "model=fp32 bf16=1", TX_ERROR_CONFLICT, "bf16=True | param_dtype=fp32"},
    {"A6_fp16_model_bf16_flag", "model=fp16 bf16=1", TX_ERROR_CONFLICT, "bf16=True | param_dtype=fp16"},
    {"A6_fp16_model_fp16_off", "model=fp16 fp16=0", TX_ERROR_CONFLICT, "fp16=False | param_dtype=fp16"},
    {"A6_fp32_model_fp16_key", "model=fp32 opt.fp16=True", TX_ERROR_CONFLICT,
     "override_optimizer_config fp16=True | param_dtype=fp32"},
    {"A6_model_and_param_dtype", "model=fp32 opt.param_dtype=bf16", TX_ERROR_CONFLICT,
     "param_dtype=bf16 | the model's param_dtype=fp32"},
    {"A6_flag_and_param_dtype", "fp16=1 opt.param_dtype=bf16", TX_ERROR_CONFLICT, "fp16=True | param_dtype=bf16"},
    {"A4_A6_gradients_and_bucket", "opt.main_grads_dtype=bf16 ddp.grad_reduce_in_fp32=True", TX_ERROR_CONFLICT,
     "override_ddp_config grad_reduce_in_fp32=True | override_optimizer_config main_grads_dtype=bf16"},
    {"E1_A6_gradients_None_and_bucket", "opt.main_grads_dtype=None ddp.grad_reduce_in_fp32=True", TX_ERROR_CONFLICT,
     "grad_reduce_in_fp32=True | main_grads_dtype=None"},
    {"A6_bucket_and_narrow_wire", "ddp.grad_reduce_in_fp32=True ddp.grad_comm_dtype=bf16", TX_ERROR_CONFLICT,
     "grad_reduce_in_fp32=True | grad_comm_dtype=bf16"},
    {"A6_bucket_and_wide_wire", "ddp.grad_reduce_in_fp32=False ddp.grad_comm_dtype=fp32", TX_ERROR_CONFLICT,
     "grad_reduce_in_fp32=False | grad_comm_dtype=fp32"},
    {"E1_old_and_new_name_of_the_masters", "opt.main_params_dtype=fp32 ddp.preserve_fp32_weights=False",
     TX_ERROR_CONFLICT, "preserve_fp32_weights=False | main_params_dtype=fp32"},
    {"E1_no_masters_and_preserve", "opt.main_params_dtype=None ddp.preserve_fp32_weights=True", TX_ERROR_CONFLICT,
     "preserve_fp32_weights=True | main_params_dtype=None"},
    {"A6_remainders_in_fp16", "fp16=1 opt.store_param_remainders=True", TX_ERROR_CONFLICT,
     "store_param_remainders=True | fp16=True"},
    {"A6_remainders_in_fp32", "bf16=0 opt.store_param_remainders=True", TX_ERROR_CONFLICT,
     "store_param_remainders=True | bf16=False"},
    {"A6_remainders_of_an_fp16_model", "model=fp16 opt.store_param_remainders=True", TX_ERROR_CONFLICT,
     "store_param_remainders=True | param_dtype=fp16"},
    {"A6_remainders_without_masters", "opt.store_param_remainders=True opt.main_params_dtype=None", TX_ERROR_CONFLICT,
     "store_param_remainders=True | main_params_dtype=None"},
    {"A6_remainders_without_masters_by_the_old_name", "opt.store_param_remainders=True ddp.preserve_fp32_weights=False",
     TX_ERROR_CONFLICT, "store_param_remainders=True | preserve_fp32_weights=False"},
    {"A6_strategy_without_the_distributed_optimizer",
     "ddp.use_distributed_optimizer=False ddp.data_parallel_sharding_strategy=optim", TX_ERROR_CONFLICT,
     "use_distributed_optimizer=False | data_parallel_sharding_strategy=optim"},
    {"A6_the_two_sides_of_one_key", "opt.use_distributed_optimizer=True ddp.use_distributed_optimizer=False",
     TX_ERROR_CONFLICT,
     "override_optimizer_config use_distributed_optimizer=True | override_ddp_config use_distributed_optimizer=False"},
    {"A6_the_hooks_of_one_key", "opt_hook.overlap_param_gather=True ddp_hook.overlap_param_gather=False",
     TX_ERROR_CONFLICT,
     "override_optimizer_config (hook) overlap_param_gather | override_ddp_config (hook) overlap_param_gather"},
    {"shards_in_bf16", "model=bf16 shard=bf16", TX_ERROR_ILLEGAL_VALUE, "shard_dtype=bf16 | bf16 | none, and fp32"},
    {"shards_of_nothing", "shard=fp32", TX_ERROR_ILLEGAL_VALUE, "shard_dtype=fp32 | a model's dtype"},
    {"shards_by_key", "opt.shard_dtype=bf16", TX_ERROR_ILLEGAL_VALUE, "shard_dtype='bf16' | none, fp32"},
    {"A6_scale_below_its_minimum", "fp16=1 opt.initial_loss_scale=2 opt.min_loss_scale=4", TX_ERROR_CONFLICT,
     "initial_loss_scale=2 | min_loss_scale=4"},
    {"A4_config_that_the_dtype_would_swallow", "config.exp_avg_dtype=fp32", TX_ERROR_CONFLICT,
     "optimizer_config exp_avg_dtype=fp32 | the dtype's exp_avg_dtype=bf16 | override_optimizer_config"},
    {"A4_config_that_fp16_would_swallow", "fp16=1 config.store_param_remainders=True", TX_ERROR_CONFLICT,
     "store_param_remainders=True | override_optimizer_config"},
    {"A4_config_that_full_shard_would_swallow", "full_shard=1 config.use_distributed_optimizer=False",
     TX_ERROR_CONFLICT, "use_distributed_optimizer=False | override_optimizer_config"},
};
INSTANTIATE_TEST_SUITE_P(A6_contradictions, PolicyIllegalTest, testing::ValuesIn(kA6Contradictions), Id<Illegal>);

constexpr Illegal kKeysAndValues[] = {
    {"unknown_key_names_the_nearest", "ddp.overlap_grad_reduc=True", TX_ERROR_UNKNOWN_KEY,
     "override_ddp_config | 'overlap_grad_reduc' | overlap_grad_reduce"},
    {"unknown_key_nearest_on_the_other_side", "ddp.weigth_decay=0.1", TX_ERROR_UNKNOWN_KEY,
     "'weigth_decay' | weight_decay | override_optimizer_config"},
    {"key_of_the_other_side", "ddp.lr=0.1", TX_ERROR_UNKNOWN_KEY,
     "override_ddp_config | lr | override_optimizer_config"},
    {"key_of_the_other_side_too", "opt.bucket_size=5", TX_ERROR_UNKNOWN_KEY, "bucket_size | override_ddp_config"},
    {"preset_is_no_key", "opt.preset=seed", TX_ERROR_UNKNOWN_KEY, "'preset'"},
    {"unknown_key_in_config", "config.learning_rate=1.0", TX_ERROR_UNKNOWN_KEY, "optimizer_config | 'learning_rate'"},
    {"unknown_key_in_a_hook", "ddp_hook.bucketsize=1", TX_ERROR_UNKNOWN_KEY,
     "override_ddp_config (hook) | bucket_size"},
    {"key_given_twice", "opt.lr=1.0 opt.lr=1.0", TX_ERROR_INVALID_ARGUMENT, "lr | twice"},
    {"C4_unknown_dtype", "opt.exp_avg_dtype=int4", TX_ERROR_UNKNOWN_DTYPE,
     "exp_avg_dtype | 'int4' | fp32 | bf16 | fp8"},
    {"C3_bf16_masters", "opt.main_params_dtype=bf16", TX_ERROR_ILLEGAL_VALUE, "main_params_dtype | bf16 | fp32 | fp16"},
    {"C4_dtype_code_outside_the_set", "opt.exp_avg_dtype=dtype:float64", TX_ERROR_ILLEGAL_VALUE,
     "exp_avg_dtype | float64"},
    {"E1_gradients_must_be_floating", "opt.main_grads_dtype=fp8", TX_ERROR_ILLEGAL_VALUE,
     "main_grads_dtype | fp8 | fp32, fp16, bf16"},
    {"dtype_from_a_number", "opt.exp_avg_dtype=3", TX_ERROR_ILLEGAL_VALUE, "exp_avg_dtype=3"},
    {"E2_unknown_strategy_lists_the_legal_ones", "ddp.data_parallel_sharding_strategy=zero3", TX_ERROR_ILLEGAL_VALUE,
     "zero3 | no_shard, optim, optim_grads, optim_grads_params"},
    {"E2_strategy_4", "ddp.data_parallel_sharding_strategy=4", TX_ERROR_ILLEGAL_VALUE, "=4 | no_shard"},
    {"E2_strategy_minus_1", "ddp.data_parallel_sharding_strategy=-1", TX_ERROR_ILLEGAL_VALUE, "=-1 | no_shard"},
    {"E2_strategy_by_a_part_of_its_name", "ddp.data_parallel_sharding_strategy=optim_grad", TX_ERROR_ILLEGAL_VALUE,
     "optim_grad"},
    {"compression_unknown", "ddp.grad_comm_compression=always", TX_ERROR_ILLEGAL_VALUE,
     "grad_comm_compression='always' | auto, off, on"},
    {"compression_below_what_is_negative", "ddp.compress_below_gbps=-1.0", TX_ERROR_ILLEGAL_VALUE,
     "compress_below_gbps=-1 | [0, inf]"},
    {"compression_below_NaN", "ddp.compress_below_gbps=nan", TX_ERROR_ILLEGAL_VALUE, "compress_below_gbps= | [0, inf]"},
    {"compression_below_a_name", "ddp.compress_below_gbps=on", TX_ERROR_ILLEGAL_VALUE,
     "compress_below_gbps='on' | [0, inf]"},
    {"compression_by_both_names", "ddp.grad_comm_compression=on ddp.compress_below_gbps=inf", TX_ERROR_INVALID_ARGUMENT,
     "twice"},
    {"former_compression_on_the_other_side", "opt.compress_below_gbps=0.0", TX_ERROR_UNKNOWN_KEY,
     "compress_below_gbps | override_ddp_config"},
    {"rounding_unknown", "opt.moment_rounding=up", TX_ERROR_ILLEGAL_VALUE,
     "moment_rounding | 'up' | nearest, dithered, stochastic"},
    {"lr_negative", "opt.lr=-1.0", TX_ERROR_ILLEGAL_VALUE, "lr=-1 | [0, inf)"},
    {"lr_NaN", "opt.lr=nan", TX_ERROR_ILLEGAL_VALUE, "lr= | nan"},
    {"lr_infinite", "config.lr=inf", TX_ERROR_ILLEGAL_VALUE, "lr=inf"},
    {"lr_text", "config.lr='1e-4'", TX_ERROR_ILLEGAL_VALUE, "lr='1e-4'"},
    {"lr_bool", "config.lr=True", TX_ERROR_ILLEGAL_VALUE, "lr=True"},
    {"beta_one", "opt.adam_beta1=1.0", TX_ERROR_ILLEGAL_VALUE, "adam_beta1=1 | [0, 1)"},
    {"backoff_zero", "opt.loss_scale_backoff_factor=0.0", TX_ERROR_ILLEGAL_VALUE, "(0, 1)"},
    {"growth_one", "opt.loss_scale_growth_factor=1", TX_ERROR_ILLEGAL_VALUE, "(1, inf)"},
    {"bucket_size_zero", "ddp.bucket_size=0", TX_ERROR_ILLEGAL_VALUE, "bucket_size=0 | [1, inf)"},
    {"bucket_size_negative", "ddp.bucket_size=-5", TX_ERROR_ILLEGAL_VALUE, "bucket_size=-5"},
    {"bucket_size_fraction", "ddp.bucket_size=0.5", TX_ERROR_ILLEGAL_VALUE, "bucket_size=0.5"},
    {"bucket_size_and_a_half", "ddp.bucket_size=2.5", TX_ERROR_ILLEGAL_VALUE, "bucket_size=2.5"},
    {"bucket_size_huge", "ddp.bucket_size=1e300", TX_ERROR_ILLEGAL_VALUE, "bucket_size=1e+300"},
    {"bool_from_a_number", "ddp.overlap_grad_reduce=1", TX_ERROR_ILLEGAL_VALUE, "overlap_grad_reduce=1 | True, False"},
    {"bool_from_text", "ddp.overlap_grad_reduce=yes", TX_ERROR_ILLEGAL_VALUE, "'yes'"},
    {"text_too_long", "opt.optimizer=a_name_that_has_32_bytes_exactly", TX_ERROR_ILLEGAL_VALUE, "optimizer | 31 bytes"},
    {"text_empty", "opt.optimizer=''", TX_ERROR_ILLEGAL_VALUE, "optimizer"},
    {"text_from_a_number", "opt.optimizer=5", TX_ERROR_ILLEGAL_VALUE, "optimizer=5"},
    {"model_of_another_dtype", "model=float64", TX_ERROR_ILLEGAL_VALUE, "float64 | fp32, fp16, bf16"},
    {"model_of_no_dtype", "model=77", TX_ERROR_ILLEGAL_VALUE, "fp32, fp16, bf16"},
    {"flag_7", "bf16=7", TX_ERROR_INVALID_ARGUMENT, "bf16=7"},
    {"preset_9", "preset=9", TX_ERROR_ILLEGAL_VALUE, "preset=9 | conservative"},
};
INSTANTIATE_TEST_SUITE_P(Keys_and_values, PolicyIllegalTest, testing::ValuesIn(kKeysAndValues), Id<Illegal>);

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

}  // namespace
