// Compares our declarations of libtorch's stable C ABI with torch's own headers, which are C++: if a prototype differs,
// this file does not compile. The headers are told to show only what torch 2.10, the oldest supported release, has. So
// a required symbol that was added later is not declared, and this file does not compile. Nothing is linked to torch.
#define TORCH_TARGET_VERSION 0x020A000000000000
#include "csrc/torch/torch_abi.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
#include <torch/csrc/stable/c/shim.h>

#include <cstring>
#include <set>
#include <string>
#include <type_traits>

#include "gtest/gtest.h"

static_assert(TORCH_TARGET_VERSION == TX_TORCH_BUILD_VERSION,
              "the floor, and the version handed to torch_library_impl");

#define TX_SHIM(result, symbol, parameters, major, minor) \
  static_assert(std::is_same_v<decltype(&::symbol), decltype(tx_torch_abi::symbol)>, #symbol ": prototypes differ");
#define TX_SHIM_OPTIONAL(result, symbol, parameters, major, minor)  // see torch_abi_optional_test.cc
#define TX_SHIM_DTYPE(dtype, name) TX_SHIM(int32_t, aoti_torch_dtype_##name, (void), 2, 9)
#include "csrc/torch/shims.def"
#undef TX_SHIM
#undef TX_SHIM_OPTIONAL
#undef TX_SHIM_DTYPE

static_assert(std::is_same_v<StableIValue, uint64_t>, "a slot of a boxed stack");
static_assert(std::is_same_v<AOTITorchError, int32_t>, "a shim's result");
static_assert(AOTI_TORCH_SUCCESS == 0, "our code tests for zero");

namespace {

struct Row {
  const char *symbol;
  int major, minor;
  bool optional;
};

const Row kRows[] = {
#define TX_SHIM(result, symbol, parameters, major, minor) {#symbol, major, minor, false},
#define TX_SHIM_OPTIONAL(result, symbol, parameters, major, minor) {#symbol, major, minor, true},
#define TX_SHIM_DTYPE(dtype, name) {"aoti_torch_dtype_" #name, 2, 9, false},
#include "csrc/torch/shims.def"
#undef TX_SHIM
#undef TX_SHIM_OPTIONAL
#undef TX_SHIM_DTYPE
};

TEST(TorchAbi, NoRequiredSymbolIsYoungerThanTheFloor) {
  for (const Row &row : kRows) {
    const bool younger = row.major * 1000 + row.minor > TX_TORCH_FLOOR_MAJOR * 1000 + TX_TORCH_FLOOR_MINOR;
    EXPECT_EQ(younger, row.optional) << row.symbol << ": a younger symbol is optional, an older one is required";
  }
}

TEST(TorchAbi, EverySymbolIsListedOnce) {
  std::set<std::string> seen;
  for (const Row &row : kRows)
    EXPECT_TRUE(seen.insert(row.symbol).second) << row.symbol;
  EXPECT_EQ(sizeof(tx_torch_abi), seen.size() * sizeof(void (*)()));
}

TEST(TorchAbi, EveryDtypeHasATorchNumber) {
  std::set<int> seen;
#define TX_SHIM(result, symbol, parameters, major, minor)
#define TX_SHIM_OPTIONAL(result, symbol, parameters, major, minor)
#define TX_SHIM_DTYPE(dtype, name) EXPECT_TRUE(seen.insert(dtype).second) << #dtype;
#include "csrc/torch/shims.def"
#undef TX_SHIM
#undef TX_SHIM_OPTIONAL
#undef TX_SHIM_DTYPE
  for (int dtype = TX_F32; dtype <= TX_F8_E5M2; dtype++)
    EXPECT_TRUE(seen.count(dtype)) << dtype;
}

TEST(TorchAbi, WithoutTorchTheMessageSaysToImportIt) {
  ASSERT_FALSE(tx_torch_is_loaded());
  tx_torch_abi abi;
  tx_error error = {};
  EXPECT_EQ(tx_torch_abi_resolve(&abi, &error), TX_ERROR_UNAVAILABLE);
  EXPECT_NE(std::strstr(error.message, "import torch first"), nullptr) << error.message;
  EXPECT_EQ(tx_torch_register(&error), TX_ERROR_UNAVAILABLE);
  EXPECT_EQ(tx_torch_register(nullptr), TX_ERROR_UNAVAILABLE);
}

TEST(TorchAbi, TheOperatorTableEndsWithNull) {
  int n = 0;
  while (tx_operator_name(n)) {
    const std::string name = tx_operator_name(n), schema = tx_operator_schema(n);
    EXPECT_EQ(schema.rfind(name + "(", 0), 0u) << schema;
    EXPECT_EQ(schema.substr(schema.size() - 7), ") -> ()") << schema;
    n++;
  }
  EXPECT_GE(n, 11);
  EXPECT_EQ(tx_operator_schema(n), nullptr);
  EXPECT_EQ(tx_operator_name(-1), nullptr);
}

}  // namespace
