// The parser of operator schemas: what it understands, and that it rejects everything else instead of guessing.
extern "C" {
#include "csrc/torch/schema.h"
}

#include <cstring>
#include <string>

#include "gtest/gtest.h"

namespace {

TEST(TorchSchema, EveryKindOfArgument) {
  tx_argument a[TX_MAX_ARGUMENTS];
  int32_t n = 0;
  ASSERT_EQ(tx_schema_parse("Tensor(a!)[] params, Tensor[] grads, Tensor(b!) stats, Tensor meta, int seed=0, "
                            "float scale=1.0, bool force=False",
                            a, &n, nullptr),
            TX_OK);
  const struct {
    const char *name;
    tx_argument_kind kind;
    bool written;
  } expected[] = {{"params", TX_ARG_TENSOR_LIST, true}, {"grads", TX_ARG_TENSOR_LIST, false},
                  {"stats", TX_ARG_TENSOR, true},       {"meta", TX_ARG_TENSOR, false},
                  {"seed", TX_ARG_INT, false},          {"scale", TX_ARG_FLOAT, false},
                  {"force", TX_ARG_BOOL, false}};
  ASSERT_EQ(n, 7);
  for (int i = 0; i < n; i++) {
    EXPECT_STREQ(a[i].name, expected[i].name);
    EXPECT_EQ(a[i].kind, expected[i].kind) << a[i].name;
    EXPECT_EQ(a[i].written, expected[i].written) << a[i].name;
  }
}

TEST(TorchSchema, TablesAreTheHosts) {
  tx_argument a[TX_MAX_ARGUMENTS];
  int32_t n = 0;
  ASSERT_EQ(tx_schema_parse("Tensor groups, Tensor meta, Tensor slices, Tensor offsets, Tensor[] lrs, Tensor step", a,
                            &n, nullptr),
            TX_OK);
  for (int i = 0; i < n; i++)
    EXPECT_EQ(a[i].on_host, i < 4) << a[i].name;
}

TEST(TorchSchema, EveryOperatorParses) {
  for (int32_t i = 0; tx_operator_schema(i); i++) {
    const std::string schema = tx_operator_schema(i);
    const size_t open = schema.find('(');
    const std::string types = schema.substr(open + 1, schema.rfind(") -> ()") - open - 1);
    tx_argument a[TX_MAX_ARGUMENTS];
    int32_t n = 0;
    tx_error error = {};
    EXPECT_EQ(tx_schema_parse(types.c_str(), a, &n, &error), TX_OK) << error.message;
    EXPECT_GT(n, 0) << schema;
  }
}

class TorchSchemaRefuses : public testing::TestWithParam<const char *> {};

TEST_P(TorchSchemaRefuses, WithAMessage) {
  tx_argument a[TX_MAX_ARGUMENTS];
  int32_t n = 0;
  tx_error error = {};
  EXPECT_EQ(tx_schema_parse(GetParam(), a, &n, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(std::strlen(error.message), 0u);
}

INSTANTIATE_TEST_SUITE_P(Schemas, TorchSchemaRefuses,
                         testing::Values("str name", "Tensor? scales", "Tensor(a) params", "Tensor", "int[] offsets",
                                         "int ", "int a_name_that_does_not_fit_into_thirty_two_bytes"));

TEST(TorchSchema, TooManyArgumentsAreRefused) {
  std::string text = "int a0";
  for (int i = 1; i <= TX_MAX_ARGUMENTS; i++)
    text += ", int a" + std::to_string(i);
  tx_argument a[TX_MAX_ARGUMENTS];
  int32_t n = 0;
  EXPECT_EQ(tx_schema_parse(text.c_str(), a, &n, nullptr), TX_ERROR_INVALID_ARGUMENT);
}

}  // namespace
