// A planner that finds an error late has written nothing by then.
#include <gtest/gtest.h>

#include <vector>

#include "csrc/torch_ext_advanced.h"

namespace {

using Numbers = std::vector<int64_t>;

TEST(RefusedPlans, OfTheLastParametersBytesChooseNothing) {
  const Numbers bytes = {4, 8, -1};
  Numbers heap = {7, 7, 7};
  std::vector<int32_t> chosen = {7, 7, 7};
  EXPECT_EQ(tx_offload_choose(bytes.data(), 3, 0.5, heap.data(), chosen.data(), nullptr), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(heap, Numbers({7, 7, 7}));
  EXPECT_EQ(chosen, std::vector<int32_t>({7, 7, 7}));
}

TEST(RefusedPlans, OfTooLittleRoomCutNoSlices) {
  const tx_layout_slice placed[] = {{0, 0, 10, 0}, {1, 0, 10, 10}};
  const tx_layout_range range = {0, 20};
  tx_layout_slice slices[2] = {{7, 7, 7, 7}, {7, 7, 7, 7}};
  int64_t n = 7;
  EXPECT_EQ(tx_layout_slices(placed, 2, &range, 1, slices, 1, &n, nullptr), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(slices[0].param, 7);
  EXPECT_EQ(slices[0].numel, 7);
  EXPECT_EQ(n, 7);
}

TEST(RefusedPlans, OfTooLittleRoomMakeNoBoxes) {
  const Numbers shape = {4, 5};
  Numbers boxes(4, 7);
  int64_t n = 7;
  EXPECT_EQ(tx_layout_boxes(shape.data(), nullptr, 2, 3, 12, INT64_MAX, boxes.data(), 1, &n, nullptr),
            TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(boxes, Numbers(4, 7));
  EXPECT_EQ(n, 7);
}

}  // namespace
