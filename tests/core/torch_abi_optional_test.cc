// Compares our declarations of optional symbols with torch's headers, if the installed headers have them;
// torch_abi_test.cc does the same for required symbols. The headers only declare functions of libtorch_cuda.so if
// USE_CUDA is defined.
#define USE_CUDA
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <type_traits>

#include "csrc/torch/torch_abi.h"
#include "gtest/gtest.h"

static_assert(std::is_same_v<decltype(&::aoti_torch_get_current_cuda_stream), tx_torch_current_stream>);

// An optional symbol that was added in release x.y is compared if the headers are of that release or later.
#define TX_SAME(symbol) \
  static_assert(std::is_same_v<decltype(&::symbol), decltype(tx_torch_abi::symbol)>, #symbol ": prototypes differ")

#if TORCH_ABI_VERSION >= (12ULL << 48 | 2ULL << 56)
TX_SAME(torch_library_def_with_tags);
TX_SAME(torch_tag_pt2_compliant_tag);
constexpr int kCompared = 2;
#else
constexpr int kCompared = 0;
#endif

TEST(TorchAbiOptional, EveryOptionalSymbolIsCompared) {
  int optional = 0;
#define TX_SHIM(result, symbol, parameters, major, minor)
#define TX_SHIM_OPTIONAL(result, symbol, parameters, major, minor) optional++;
#define TX_SHIM_DTYPE(dtype, name)
#include "csrc/torch/shims.def"
#undef TX_SHIM
#undef TX_SHIM_OPTIONAL
#undef TX_SHIM_DTYPE
  if (kCompared == 0) GTEST_SKIP() << "the installed torch's headers are older than every optional symbol";
  EXPECT_EQ(kCompared, optional);
}
