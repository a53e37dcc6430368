// tx_gather_dtype: the dtype in which no_shard all-gathers its sums.
#include <gtest/gtest.h>

#include "csrc/torch_ext_advanced.h"

namespace {

constexpr tx_dtype kWires[] = {TX_F32, TX_F16, TX_BF16, TX_U8};

TEST(GatherDtype, IsThePolicysWhereItHasOne) {
  for (const tx_dtype chosen : kWires)
    for (const tx_dtype wire : kWires)
      EXPECT_EQ(tx_gather_dtype(chosen, wire), chosen);
}

TEST(GatherDtype, IsBf16BesideAnEightBitWireAndElseTheWires) {
  for (const tx_dtype wire : kWires)
    EXPECT_EQ(tx_gather_dtype(TX_NONE, wire), wire == TX_U8 ? TX_BF16 : wire);
}

}  // namespace
