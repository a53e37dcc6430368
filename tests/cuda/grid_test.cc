// cuda/grid.h: each element must be visited exactly once, for any tensors, tiles and grids.
#include "cuda/grid.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "cuda/table.h"

namespace {

struct Entry {
  int64_t before = -1;  // so that numel is not adjacent to the first field by accident
  int64_t numel;
  Entry(int64_t n = 0) : numel(n) {}
};
struct Common {};
using Table = tx_table<Common, Entry>;

// How often each element of each tensor is visited by all (block, thread, iteration) of a launch of `warps` warps.
using Share = tx_share (*)(int32_t tile_count, int32_t round, uint32_t lane);

std::vector<std::vector<int>> Visits(const Table &table, int64_t warps, Share share_of, int32_t rounds) {
  std::vector<std::vector<int>> visits;
  for (int32_t i = 0; i < table.n; i++)
    visits.emplace_back(static_cast<size_t>(table.entries[i].numel), 0);
  for (int64_t warp = 0; warp < warps; warp++) {
    for (int64_t number = warp; number < tx_table_tiles(table); number += warps) {
      const tx_tile tile = tx_table_tile(table, number);
      for (int32_t round = 0; round < (rounds ? rounds : tx_rounds(tile.count)); round++) {
        for (uint32_t lane = 0; lane < TX_WARP; lane++) {
          const tx_share share = share_of(tile.count, round, lane);
          for (int32_t i = 0; i < share.count; i++)
            visits[static_cast<size_t>(tile.tensor)].at(static_cast<size_t>(tile.begin + share.first + i))++;
        }
      }
    }
  }
  return visits;
}

void ExpectOnce(const std::vector<int64_t> &numels, int64_t tile, int64_t warps) {
  Table table;
  tx_table_begin(&table, tile);
  for (const int64_t numel : numels)
    ASSERT_TRUE(tx_table_add(&table, Entry(numel)));
  std::vector<std::vector<std::vector<int>>> orders = {Visits(table, warps, tx_share_of_tile, 0)};
  if (tile == TX_QUARTERS * TX_ROUND) orders.push_back(Visits(table, warps, tx_share_of_block, TX_QUARTERS));
  for (const auto &visits : orders)
    for (const auto &tensor : visits)
      for (size_t i = 0; i < tensor.size(); i++)
        ASSERT_EQ(tensor[i], 1) << "element " << i << " of " << tensor.size() << ", tile " << tile << ", warps "
                                << warps;
}

class EveryTile : public testing::TestWithParam<int64_t> {};

TEST_P(EveryTile, EachElementOfOneTensorIsVisitedOnce) {
  for (const int64_t warps : {1, 3, 8, 48})
    for (const int64_t numel : {1, 7, 8, 9, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025, 4095, 4096, 4097, 70001})
      ExpectOnce({numel}, GetParam(), warps);
}

TEST_P(EveryTile, EachElementOfManyTensorsIsVisitedOnce) {
  std::mt19937 random(static_cast<uint32_t>(GetParam()));
  for (int trial = 0; trial < 200; trial++) {
    std::vector<int64_t> numels(1 + random() % 40);
    for (int64_t &numel : numels)
      numel = static_cast<int64_t>(random() % 3 == 0 ? random() % 10 : random() % 9000);
    ExpectOnce(numels, GetParam(), 1 + random() % 60);
  }
}

INSTANTIATE_TEST_SUITE_P(Grid, EveryTile, testing::Values(TX_ROUND, 1024, 4096), testing::PrintToStringParamName());

TEST(Grid, ATensorLargerThan32BitsIsCutByInt64) {
  const int64_t numel = (int64_t{1} << 40) + 5;
  Table table;
  tx_table_begin(&table, 4096);
  ASSERT_TRUE(tx_table_add(&table, Entry(3)));
  ASSERT_TRUE(tx_table_add(&table, Entry(numel)));
  const tx_tile last = tx_table_tile(table, tx_table_tiles(table) - 1);
  EXPECT_EQ(last.tensor, 1);
  EXPECT_EQ(last.begin + last.count, numel);
  EXPECT_EQ(last.count, 5);
}

TEST(Grid, BlocksOf128AreHeldBy16NeighbouringLanes) {
  for (uint32_t lane = 0; lane < TX_WARP; lane++) {
    const tx_share share = tx_share_of_tile(4096, 3, lane);
    EXPECT_EQ(share.first / 128, 3 * 2 + static_cast<int32_t>(lane / 16));
  }
}

TEST(Table, AFullTableSaysSoAndEmptyTensorsTakeNoRoom) {
  Table table;
  tx_table_begin(&table, TX_ROUND);
  EXPECT_LE(sizeof table, static_cast<size_t>(TX_PARAMETER_BYTES));
  EXPECT_GT(sizeof table + sizeof(Entry) + 2 * sizeof(int64_t), static_cast<size_t>(TX_PARAMETER_BYTES) - 64);
  for (int32_t i = 0; i < Table::kCapacity; i++) {
    ASSERT_TRUE(tx_table_add(&table, Entry(0)));
    ASSERT_TRUE(tx_table_add(&table, Entry(i + 1)));
  }
  EXPECT_TRUE(tx_table_add(&table, Entry(0)));
  EXPECT_FALSE(tx_table_add(&table, Entry(1)));
  EXPECT_EQ(table.n, Table::kCapacity);
}

}  // namespace
