// Selecting an instruction set: each one that the library was built for is tested here, or skipped by name if the
// processor does not have it.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "csrc/torch_ext.h"

namespace {

bool Present(const std::string &name) {
  for (int32_t i = 0; tx_isa_name(i); i++) {
    if (name == tx_isa_name(i)) return true;
  }
  return false;
}

const char *const kBuilt[] = {
#define X(name, present) #name,
#include "csrc/cpu/isa.def"
#undef X
};

class Isa : public testing::TestWithParam<const char *> {
 protected:
  void TearDown() override {
    unsetenv("TORCH_EXT_ISA");
    ASSERT_EQ(tx_isa_select(nullptr, nullptr), TX_OK);
  }
};

TEST_P(Isa, IsSelectedByNameAndByEnvironment) {
  if (!Present(GetParam())) GTEST_SKIP() << "this processor has no " << GetParam() << "; its loops were not run";
  ASSERT_EQ(tx_isa_select(GetParam(), nullptr), TX_OK);
  EXPECT_STREQ(tx_isa_selected(), GetParam());
  ASSERT_EQ(tx_isa_select("base", nullptr), TX_OK);
  setenv("TORCH_EXT_ISA", GetParam(), 1);
  ASSERT_EQ(tx_isa_select(nullptr, nullptr), TX_OK);
  EXPECT_STREQ(tx_isa_selected(), GetParam());
}
INSTANTIATE_TEST_SUITE_P(Built, Isa, testing::ValuesIn(kBuilt),
                         [](const auto &info) { return std::string(info.param); });

TEST_F(Isa, AnUnknownNameIsRefusedAndChangesNothing) {
  const std::string before = tx_isa_selected();
  tx_error error = {};
  EXPECT_EQ(tx_isa_select("sse9", &error), TX_ERROR_UNAVAILABLE);
  EXPECT_NE(std::string(error.message).find("\"sse9\" is not available"), std::string::npos) << error.message;
  EXPECT_NE(std::string(error.message).find("base"), std::string::npos) << error.message;
  EXPECT_EQ(before, tx_isa_selected());
}

TEST_F(Isa, TheFastestIsTheDefault) {
  int32_t last = 0;
  while (tx_isa_name(last + 1))
    last++;
  EXPECT_STREQ(tx_isa_selected(), tx_isa_name(last));
  EXPECT_EQ(tx_isa_name(-1), nullptr);
}

}  // namespace
