// Finding NCCL, and the error messages if it cannot be used.
#include <cstring>
#include <string>
#include <vector>

#include "csrc/torch_ext_advanced.h"
#include "fake_nccl.h"

namespace {

struct Refused {
  const char *id, *file;
  std::vector<const char *> says;
};

class Refusals : public testing::TestWithParam<Refused> {};
INSTANTIATE_TEST_SUITE_P(
    NcclFind, Refusals,
    testing::Values(Refused{"absent", "no_such_file.so", {"no NCCL was found (", "no_such_file.so", "2.19 is needed"}},
                    Refused{"old", "fake_nccl_old.so", {"NCCL 2.18.3, found as ", "_old.so, is too old; 2.19"}},
                    Refused{
                        "lacking", "fake_nccl_lacking.so", {"has no symbol ncclCommFinalize (NCCL 2.14 brought it)"}}),
    [](const auto &info) { return std::string(info.param.id); });

TEST_P(Refusals, SayWhatWasFoundWhatIsNeededAndWhatToDo) {
  tx_nccl *library = reinterpret_cast<tx_nccl *>(&library);
  tx_error error = {};
  EXPECT_EQ(tx_nccl_open(fake_nccl_path(GetParam().file).c_str(), &library, &error), TX_ERROR_UNAVAILABLE);
  EXPECT_EQ(library, nullptr);
  for (const char *says : GetParam().says)
    EXPECT_NE(std::strstr(error.message, says), nullptr) << says << ": " << error.message;
  EXPECT_NE(std::strstr(error.message, "pip install nvidia-nccl-cu13"), nullptr) << error.message;
  EXPECT_NE(std::strstr(error.message, "transport=\"torch\""), nullptr) << error.message;
}

}  // namespace
