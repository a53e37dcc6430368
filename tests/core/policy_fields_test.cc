// csrc/core/policy: the table of fields, the origins of values, and how they are printed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "tests/core/policy_load.h"

namespace {

TEST(PolicyOrigin, tells_each_source) {
  const Resolved r = Resolve(
      "model=bf16 full_shard=1 config.lr=0.1 opt.exp_avg_dtype=fp32 ddp.grad_reduce_in_fp32=True "
      "opt_hook.clip_grad=1.0");
  ASSERT_EQ(r.status, TX_OK) << r.error.message;
  const std::pair<const char *, const char *> origins[] = {{"weight_decay", "default"},
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

std::set<std::string> PinnedByDtype(const char *load) {
  const Resolved r = Resolve(load);
  std::set<std::string> pinned;
  for (int32_t f = 0; f < TX_POLICY_FIELDS; f++) {
    if (r.origins[f].source == TX_SOURCE_DTYPE) pinned.insert(tx_policy_field_at(f)->name);
  }
  return pinned;
}

TEST(PolicyOrigin, A8_the_dtype_branch_leaves_what_it_does_not_name) {
  using Names = std::set<std::string>;
  const Names mode = {"param_dtype", "bf16", "fp16"};
  EXPECT_EQ(PinnedByDtype("model=fp32"), mode);
  Names bf16 = {"exp_avg_dtype",   "exp_avg_sq_dtype",    "main_grads_dtype",
                "grad_comm_dtype", "grad_reduce_in_fp32", "use_precision_aware_optimizer"};
  bf16.insert(mode.begin(), mode.end());
  EXPECT_EQ(PinnedByDtype("model=bf16"), bf16);
  Names fp16 = {"use_precision_aware_optimizer", "store_param_remainders", "initial_loss_scale", "min_loss_scale"};
  fp16.insert(mode.begin(), mode.end());
  EXPECT_EQ(PinnedByDtype("model=fp16"), fp16);
  EXPECT_EQ(Resolve("bf16=1").Origin("bf16"), "override");
  EXPECT_EQ(Resolve("bf16=1 fp16=1").Origin("bf16"), "dtype") << "it lost";
}

TEST(PolicyDescribe, is_one_line_per_field_and_never_overruns) {
  const Resolved r = Resolve("ddp.grad_reduce_in_fp32=True");
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
    const int64_t sizes[] = {8, 8, 4, 4, 4, TX_TEXT_CAPACITY, 4};
    EXPECT_EQ(field->bytes, sizes[field->type]) << field->name;
    EXPECT_EQ(field->side & ~(TX_SIDE_OPTIMIZER | TX_SIDE_DDP), 0) << field->name;
    offset += field->bytes;
    names.insert(field->name);
  }
  EXPECT_EQ(offset, static_cast<int64_t>(offsetof(tx_policy, reserved)));
  EXPECT_EQ(offset + static_cast<int64_t>(sizeof(int32_t)), static_cast<int64_t>(sizeof(tx_policy)));
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
    } else if (field->type == TX_FIELD_F64 || field->type == TX_FIELD_I64 || field->type == TX_FIELD_I32) {
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
  EXPECT_EQ(name(TX_POLICY_states, TX_STATES_BY_KEY), "None");
  EXPECT_EQ(name(TX_POLICY_states, TX_STATES_FP32), "fp32");
  EXPECT_EQ(name(TX_POLICY_states, TX_STATES_BF16), "bf16");
  EXPECT_EQ(name(TX_POLICY_states, TX_STATES_BF16_REMAINDER), "bf16_remainder");
  EXPECT_EQ(name(TX_POLICY_states, TX_STATES_8BIT), "8bit");
}

}  // namespace
