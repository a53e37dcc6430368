// If the process has already loaded an NCCL, tx_nccl_open uses that one. The only test of its process, since a loaded
// library may stay loaded.
#include "csrc/torch_ext_advanced.h"
#include "fake_nccl.h"

TEST(NcclLoaded, TheOneThatTheProcessHasIsTaken) {
  tx_nccl *library = nullptr;
  tx_nccl_about about = TX_NCCL_ABOUT_INIT;
  ASSERT_EQ(tx_nccl_open(fake_nccl_path("fake_nccl_plain.so").c_str(), &library, nullptr), TX_OK);
  ASSERT_EQ(tx_nccl_about_this(library, &about, nullptr), TX_OK);
  EXPECT_EQ(about.version, 22105) << about.path;
  tx_nccl_close(library);
  const FakeNccl loaded("libnccl.so.2");
  ASSERT_EQ(tx_nccl_open(fake_nccl_path("fake_nccl_plain.so").c_str(), &library, nullptr), TX_OK);
  ASSERT_EQ(tx_nccl_about_this(library, &about, nullptr), TX_OK);
  EXPECT_EQ(about.version, 22809) << about.path;
  EXPECT_STREQ(about.path, loaded.path.c_str());
  tx_nccl_close(library);
  tx_nccl_close(nullptr);
}
