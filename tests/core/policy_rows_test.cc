// csrc/core/policy: parameters of another dtype in the same model (A2), and properties that hold for any settings (A4,
// A6).
#include <gtest/gtest.h>

#include <cstring>

#include "tests/core/policy_load.h"

namespace {

// -- parameters of another dtype in the same model --------------------------------------------------------------------

struct Row {
  const char *id;
  const char *load;
  tx_dtype dtype;
  const char *expected;
};

class PolicyRowTest : public testing::TestWithParam<Row> {};

TEST_P(PolicyRowTest, A2_other_parameters_follow_their_own_row) {
  Resolved r = Resolve(GetParam().load);
  ASSERT_EQ(r.status, TX_OK) << r.error.message;
  Resolved row = r;
  ASSERT_EQ(tx_policy_row(&r.policy, r.origins, GetParam().dtype, &row.policy, &row.error), TX_OK) << row.error.message;
  for (const auto &[field, value] : Pairs(GetParam().expected))
    EXPECT_EQ(row[field], value) << field;
}

constexpr Row kRows[] = {
    {"same_dtype", "", TX_BF16, BF16},
    {"fp32_norms", "", TX_F32, FP32},
    {"fp16_in_bf16", "bf16=1", TX_F16, FP16},
    {"bf16_in_fp32", "model=fp32", TX_BF16, BF16},
    {"explicit_values_stay", "opt.exp_avg_dtype=fp16 opt.lr=0.5", TX_F32,
     FP32 " exp_avg_dtype=fp16 use_precision_aware_optimizer=True lr=0.5"},
    {"what_followed_an_explicit_value_follows_again", "ddp.grad_reduce_in_fp32=False", TX_F16,
     FP16 " main_grads_dtype=fp16 grad_comm_dtype=fp16 grad_reduce_in_fp32=False"},
    {"remainders_are_for_bf16", "opt.store_param_remainders=True", TX_F32, FP32 " store_param_remainders=False"},
    {"remainders_stay_beside_bf16", "opt.store_param_remainders=True", TX_BF16, BF16 " store_param_remainders=True"},
    {"gradients_None_follow_the_row", "opt.main_grads_dtype=None", TX_F32, FP32},
    {"no_masters_stay_none", "ddp.preserve_fp32_weights=False", TX_F32, FP32 " main_params_dtype=None"},
    {"full_shard_stays", "full_shard=1 ddp.data_parallel_sharding_strategy=optim", TX_F32,
     FULL_SHARD " data_parallel_sharding_strategy=optim"},
    {"conservative_stays", "preset=conservative", TX_F32, ALL_FP32},
    {"config_stays", FIVE("config."), TX_F32, FP32 " " FIVE("")},
    {"fp32_shards_are_the_masters_of_bf16", "model=bf16 shard=fp32", TX_F32,
     BF16 " param_dtype=fp32 main_grads_dtype=fp32 bf16=False shard_dtype=fp32"},
    {"what_is_computed_in_bf16", "model=bf16 shard=fp32", TX_BF16, BF16 " main_grads_dtype=fp32 shard_dtype=fp32"},
    {"fp16_beside_fp32_shards", "model=bf16 shard=fp32", TX_F16, FP16 " shard_dtype=None"},
    {"fp32_shards_are_the_masters_of_fp16", "model=fp16 shard=fp32", TX_F32, FP16 " param_dtype=fp32 fp16=False"},
    {"shards_without_remainders", "model=bf16 shard=fp32 opt.store_param_remainders=True", TX_F32,
     "param_dtype=fp32 store_param_remainders=False exp_avg_dtype=bf16"},
    {"explicit_gradients_of_shards", "model=bf16 shard=fp32 opt.main_grads_dtype=bf16", TX_F32,
     "main_grads_dtype=bf16 grad_comm_dtype=bf16"},
    {"gradients_None_of_shards", "model=bf16 shard=fp32 opt.main_grads_dtype=None", TX_F32, "main_grads_dtype=fp32"},
    {"shards_by_an_override", "model=bf16 opt.shard_dtype=fp32", TX_F32, "exp_avg_dtype=bf16 grad_comm_dtype=bf16"},
    {"shards_that_are_no_masters", "model=bf16 shard=fp32 opt.shard_dtype=None", TX_F32, FP32},
    {"conservative_shards", "model=bf16 shard=fp32 preset=conservative", TX_F32, ALL_FP32},
    {"hooks_stay", "opt_hook.exp_avg_sq_dtype=fp8", TX_F16, FP16 " exp_avg_sq_dtype=uint8"},
};
INSTANTIATE_TEST_SUITE_P(Rows, PolicyRowTest, testing::ValuesIn(kRows), Id<Row>);

TEST(PolicyRow, refuses_what_is_not_legal) {
  const Resolved r = Resolve("");
  tx_policy row = TX_POLICY_INIT;
  tx_error error;
  EXPECT_EQ(tx_policy_row(&r.policy, r.origins, TX_I64, &row, &error), TX_ERROR_ILLEGAL_VALUE);
  EXPECT_NE(std::string(error.message).find("int64"), std::string::npos) << error.message;
  EXPECT_EQ(tx_policy_row(&r.policy, nullptr, TX_F32, &row, &error), TX_ERROR_INVALID_ARGUMENT);
  row.size = 0;
  EXPECT_EQ(tx_policy_row(&r.policy, r.origins, TX_F32, &row, &error), TX_ERROR_INVALID_ARGUMENT);
}

// -- all pairs of settings --------------------------------------------------------------------------------------------

// A policy that resolves keeps every explicit value, is consistent, and is the same each time.
TEST(PolicyProperties, A4_A6_hold_for_all_pairs_of_overrides) {
  const char *choices[] = {"opt.exp_avg_dtype=fp32",
                           "opt.exp_avg_dtype=fp16",
                           "opt.exp_avg_dtype=bf16",
                           "opt.exp_avg_dtype=uint8",
                           "opt.exp_avg_sq_dtype=fp32",
                           "opt.exp_avg_sq_dtype=fp16",
                           "opt.exp_avg_sq_dtype=bf16",
                           "opt.exp_avg_sq_dtype=uint8",
                           "opt.main_grads_dtype=fp32",
                           "opt.main_grads_dtype=fp16",
                           "opt.main_grads_dtype=bf16",
                           "ddp.grad_comm_dtype=fp32",
                           "ddp.grad_comm_dtype=fp16",
                           "ddp.grad_comm_dtype=bf16",
                           "ddp.grad_comm_dtype=uint8",
                           "opt.main_params_dtype=fp32",
                           "opt.main_params_dtype=fp16",
                           "opt.main_params_dtype=None",
                           "opt.use_precision_aware_optimizer=False",
                           "opt.use_precision_aware_optimizer=True",
                           "opt.store_param_remainders=False",
                           "opt.store_param_remainders=True",
                           "ddp.grad_reduce_in_fp32=False",
                           "ddp.grad_reduce_in_fp32=True",
                           "ddp.preserve_fp32_weights=False",
                           "ddp.preserve_fp32_weights=True",
                           "ddp.use_distributed_optimizer=False",
                           "ddp.use_distributed_optimizer=True",
                           "opt.states=fp32",
                           "opt.states=bf16",
                           "opt.states=bf16_remainder",
                           "opt.states=8bit",
                           "opt.shard_dtype=fp32"};
  int resolved = 0, refused = 0;
  for (const char *mode :
       {"model=fp32", "model=fp16", "model=bf16", "model=fp32 preset=conservative", "model=fp16 preset=conservative",
        "model=bf16 preset=conservative", "model=bf16 shard=fp32"}) {
    for (const std::string a : choices) {
      for (const std::string b : choices) {
        if (a.substr(0, a.find('=')) == b.substr(0, b.find('='))) continue;
        const std::string load = std::string(mode) + " " + a + " " + b;
        const Resolved r = Resolve(load);
        if (r.status != TX_OK) {
          refused++;
          ASSERT_EQ(r.status, TX_ERROR_CONFLICT) << load << ": " << r.error.message;
          ASSERT_NE(std::string(r.error.message).find(" contradicts "), std::string::npos);
          continue;
        }
        resolved++;
        for (const std::string &given : {a, b}) {
          const std::string key = given.substr(4, given.find('=') - 4);
          ASSERT_EQ(r[key], given.substr(given.find('=') + 1)) << load;
          ASSERT_EQ(r.Origin(key), "override") << load;
        }
        const tx_policy &p = r.policy;
        const bool all_fp32 = p.exp_avg_dtype == TX_F32 && p.exp_avg_sq_dtype == TX_F32;
        ASSERT_TRUE(p.use_precision_aware_optimizer || all_fp32) << load;
        ASSERT_TRUE(!p.grad_reduce_in_fp32 || p.grad_comm_dtype == TX_F32) << load;
        ASSERT_TRUE(p.grad_reduce_in_fp32 || p.grad_comm_dtype != TX_F32 || p.param_dtype == TX_F32) << load;
        ASSERT_EQ(p.preserve_fp32_weights, p.main_params_dtype == TX_F32) << load;
        ASSERT_TRUE(!p.store_param_remainders || (p.param_dtype == TX_BF16 && p.main_params_dtype == TX_F32)) << load;
        ASSERT_NE(p.main_grads_dtype, TX_NONE) << load;
        if (p.states != TX_STATES_BY_KEY) {
          const int32_t moments[] = {0, TX_F32, TX_BF16, TX_BF16, TX_U8};
          ASSERT_EQ(p.exp_avg_dtype, moments[p.states]) << load;
          ASSERT_EQ(p.exp_avg_sq_dtype, moments[p.states]) << load;
          ASSERT_TRUE(p.param_dtype == TX_F32 || p.main_params_dtype == TX_F32) << load;
          const bool beside_bf16 = p.param_dtype == TX_BF16 && p.shard_dtype == TX_NONE;
          ASSERT_EQ(p.store_param_remainders, p.states >= TX_STATES_BF16_REMAINDER && beside_bf16) << load;
        }
        const Resolved again = Resolve(load);
        ASSERT_EQ(std::memcmp(&p, &again.policy, sizeof p), 0) << load;
        tx_policy row = TX_POLICY_INIT;
        ASSERT_EQ(tx_policy_row(&p, r.origins, static_cast<tx_dtype>(p.param_dtype), &row, nullptr), TX_OK) << load;
        ASSERT_EQ(std::memcmp(&p, &row, sizeof p), 0) << load << ": the model's own row is its policy";
      }
    }
  }
  EXPECT_GT(resolved, 1000);
  EXPECT_GT(refused, 100);
}

}  // namespace
