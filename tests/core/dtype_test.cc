// csrc/core/dtype, dtype_key: names and sizes of dtypes, and the values that a configuration may have (C2-C4, E10).
#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>

#include "csrc/torch_ext.h"

namespace {

struct Name {
  const char *text;
  tx_dtype dtype;
};

class DtypeNameTest : public testing::TestWithParam<Name> {};

TEST_P(DtypeNameTest, C2_parses) {
  tx_dtype dtype = TX_C128;
  tx_error error;
  ASSERT_EQ(tx_dtype_parse(GetParam().text, &dtype, &error), TX_OK) << error.message;
  EXPECT_EQ(dtype, GetParam().dtype);
}

const Name kNames[] = {{"fp32", TX_F32},        {"float32", TX_F32}, {"float", TX_F32},   {"bf16", TX_BF16},
                       {"bfloat16", TX_BF16},   {"fp16", TX_F16},    {"float16", TX_F16}, {"half", TX_F16},
                       {"fp8", TX_U8},          {"float8", TX_U8},   {"uint8", TX_U8},    {"auto", TX_NONE},
                       {"  BF16\t\n", TX_BF16}, {"Half", TX_F16},    {" AUTO ", TX_NONE}};
INSTANTIATE_TEST_SUITE_P(Names, DtypeNameTest, testing::ValuesIn(kNames));

class DtypeUnknownNameTest : public testing::TestWithParam<const char *> {};

TEST_P(DtypeUnknownNameTest, C4_names_value_and_legal_names) {
  tx_dtype dtype = TX_C128;
  tx_error error;
  ASSERT_EQ(tx_dtype_parse(GetParam(), &dtype, &error), TX_ERROR_UNKNOWN_DTYPE);
  EXPECT_EQ(dtype, TX_C128) << "a failed call wrote its result";
  const std::string message = error.message;
  for (const char *name :
       {"fp32", "float32", "float", "bf16", "bfloat16", "fp16", "float16", "half", "fp8", "float8", "uint8", "auto"}) {
    EXPECT_NE(message.find(name), std::string::npos) << name << " is missing in: " << message;
  }
  EXPECT_NE(message.find(std::string(GetParam()).substr(0, 64)), std::string::npos) << message;
  EXPECT_EQ(tx_dtype_parse(GetParam(), &dtype, nullptr), TX_ERROR_UNKNOWN_DTYPE) << "without a buffer";
}

const char *const kUnknownNames[] = {"int4",
                                     "",
                                     "   ",
                                     "fp32 bf16",
                                     "f32",
                                     "float64",
                                     "bf16,",
                                     "bf16|bfloat16",
                                     "fp32float32floatfp32float32floatfp32float32floatfp32float32floatfp32float32"};
INSTANTIATE_TEST_SUITE_P(Names, DtypeUnknownNameTest, testing::ValuesIn(kUnknownNames));

struct Size {
  tx_dtype dtype;
  int64_t bytes;
};

TEST(Dtype, E10_sizes) {
  const Size sizes[] = {{TX_F64, 8}, {TX_I64, 8}, {TX_C64, 8},  {TX_C32, 4},     {TX_C128, 16},
                        {TX_F32, 4}, {TX_I32, 4}, {TX_F16, 2},  {TX_BF16, 2},    {TX_I16, 2},
                        {TX_U8, 1},  {TX_I8, 1},  {TX_BOOL, 1}, {TX_F8_E4M3, 1}, {TX_F8_E5M2, 1}};
  std::set<int> seen;
  for (const Size &size : sizes) {
    int64_t bytes = -1;
    ASSERT_EQ(tx_dtype_size(size.dtype, &bytes, nullptr), TX_OK) << tx_dtype_name(size.dtype);
    EXPECT_EQ(bytes, size.bytes) << tx_dtype_name(size.dtype);
    seen.insert(size.dtype);
  }
  for (int code = 1; tx_dtype_torch_name(static_cast<tx_dtype>(code)); code++) {
    EXPECT_TRUE(seen.count(code)) << tx_dtype_torch_name(static_cast<tx_dtype>(code)) << " has no case here";
  }
}

TEST(Dtype, E10_unknown_is_an_error_and_never_a_default) {
  for (int code : {0, -1, 16, 1000, INT32_MAX, INT32_MIN}) {
    int64_t bytes = -7;
    tx_error error;
    EXPECT_EQ(tx_dtype_size(static_cast<tx_dtype>(code), &bytes, &error), TX_ERROR_UNKNOWN_DTYPE) << code;
    EXPECT_EQ(bytes, -7) << code;
  }
}

TEST(Dtype, names_are_distinct_and_floating_types_are_told) {
  std::set<std::string> names, torch_names;
  int codes = 0;
  for (int code = 1; tx_dtype_torch_name(static_cast<tx_dtype>(code)); code++, codes++) {
    names.insert(tx_dtype_name(static_cast<tx_dtype>(code)));
    torch_names.insert(tx_dtype_torch_name(static_cast<tx_dtype>(code)));
  }
  EXPECT_EQ(codes, TX_F8_E5M2);
  EXPECT_EQ(names.size(), static_cast<size_t>(codes));
  EXPECT_EQ(torch_names.size(), static_cast<size_t>(codes));
  EXPECT_STREQ(tx_dtype_torch_name(TX_BF16), "bfloat16");
  EXPECT_STREQ(tx_dtype_torch_name(TX_BOOL), "bool");
  EXPECT_STREQ(tx_dtype_name(TX_BF16), "bf16");
  EXPECT_STREQ(tx_dtype_name(TX_NONE), "none");
  EXPECT_EQ(tx_dtype_torch_name(TX_NONE), nullptr);
  EXPECT_STREQ(tx_dtype_name(static_cast<tx_dtype>(99)), "unknown dtype");
  for (tx_dtype dtype : {TX_F32, TX_F16, TX_BF16, TX_F64, TX_F8_E4M3, TX_F8_E5M2})
    EXPECT_TRUE(tx_dtype_is_floating(dtype));
  for (tx_dtype dtype : {TX_NONE, TX_U8, TX_I64, TX_BOOL, TX_C64})
    EXPECT_FALSE(tx_dtype_is_floating(dtype));
}

struct Key {
  const char *key;
  const char *text;
  tx_status status;
};

class DtypeKeyTest : public testing::TestWithParam<Key> {};

TEST_P(DtypeKeyTest, C3_C4) {
  const Key &c = GetParam();
  tx_dtype dtype = TX_C128;
  tx_error error;
  ASSERT_EQ(tx_dtype_coerce(c.key, c.text, &dtype, &error), c.status) << c.key << "=" << c.text;
  if (c.status == TX_OK) {
    tx_dtype parsed;
    ASSERT_EQ(tx_dtype_parse(c.text, &parsed, nullptr), TX_OK);
    EXPECT_EQ(dtype, parsed);
    EXPECT_EQ(tx_dtype_check_key(c.key, parsed, &error), TX_OK) << "a code is checked like a name";
    return;
  }
  EXPECT_EQ(dtype, TX_C128) << "a failed call wrote its result";
  const std::string message = error.message;
  for (const char *word : {c.key, c.text, "fp32", "fp16"})
    EXPECT_NE(message.find(word), std::string::npos) << message;
  const bool is_state = std::strncmp(c.key, "exp_avg", 7) == 0;
  if (is_state) {
    EXPECT_NE(message.find("fp8"), std::string::npos) << message;
  }
  if (c.status == TX_ERROR_ILLEGAL_VALUE) {
    tx_dtype parsed;
    ASSERT_EQ(tx_dtype_parse(c.text, &parsed, nullptr), TX_OK);
    EXPECT_EQ(tx_dtype_check_key(c.key, parsed, &error), TX_ERROR_ILLEGAL_VALUE);
  }
}

const Key kKeys[] = {{"main_params_dtype", "fp32", TX_OK},
                     {"main_params_dtype", "half", TX_OK},
                     {"main_params_dtype", "auto", TX_OK},
                     {"main_params_dtype", "bf16", TX_ERROR_ILLEGAL_VALUE},
                     {"main_params_dtype", "fp8", TX_ERROR_ILLEGAL_VALUE},
                     {"exp_avg_dtype", "fp32", TX_OK},
                     {"exp_avg_dtype", "fp16", TX_OK},
                     {"exp_avg_dtype", "bf16", TX_OK},
                     {"exp_avg_dtype", "fp8", TX_OK},
                     {"exp_avg_sq_dtype", "uint8", TX_OK},
                     {"exp_avg_sq_dtype", "bf17", TX_ERROR_UNKNOWN_DTYPE},
                     {"exp_avg_dtype", "double", TX_ERROR_UNKNOWN_DTYPE},
                     {"params_dtype", "fp8", TX_OK},
                     {"anything_at_all_dtype", "bf16", TX_OK},
                     {"anything_at_all_dtype", "word", TX_ERROR_UNKNOWN_DTYPE}};
INSTANTIATE_TEST_SUITE_P(Cases, DtypeKeyTest, testing::ValuesIn(kKeys));

TEST(DtypeKey, C3_codes_without_a_name_are_checked_too) {
  tx_error error;
  EXPECT_EQ(tx_dtype_check_key("exp_avg_dtype", TX_F64, &error), TX_ERROR_ILLEGAL_VALUE);
  EXPECT_NE(std::string(error.message).find("float64"), std::string::npos) << error.message;
  EXPECT_EQ(tx_dtype_check_key("exp_avg_dtype", TX_F8_E4M3, &error), TX_ERROR_ILLEGAL_VALUE);
  EXPECT_EQ(tx_dtype_check_key("other_dtype", TX_F64, &error), TX_OK);
  EXPECT_EQ(tx_dtype_check_key("other_dtype", static_cast<tx_dtype>(77), &error), TX_ERROR_UNKNOWN_DTYPE);
  EXPECT_EQ(tx_dtype_check_key(nullptr, TX_F32, &error), TX_ERROR_INVALID_ARGUMENT);
}

}  // namespace
