// csrc/core/hash, param_id: numbers that are stored in checkpoints and compared between ranks.
#include "csrc/core/hash.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "csrc/torch_ext.h"

namespace {

TEST(Hash, tells_where_one_text_ends_and_the_next_begins) {
  const auto hash = [](const char *a, const char *b) {
    return tx_hash_end(tx_hash_text(tx_hash_text(tx_hash_begin(), a), b));
  };
  EXPECT_NE(hash("ab", "c"), hash("a", "bc"));
  EXPECT_NE(hash("", "a"), hash("a", ""));
  EXPECT_NE(hash(nullptr, "a"), hash("", "a"));
  EXPECT_EQ(hash("ab", "c"), hash("ab", "c"));
}

TEST(Hash, takes_all_bytes_of_a_number) {
  std::set<uint64_t> hashes;
  for (int bit = 0; bit < 64; bit++) {
    hashes.insert(tx_hash_int(tx_hash_begin(), static_cast<int64_t>(UINT64_C(1) << bit)));
  }
  EXPECT_EQ(hashes.size(), 64u);
}

TEST(ParamId, is_63_bits_stable_and_spread) {
  std::set<int64_t> ids;
  for (int i = 0; i < 10000; i++) {
    const int64_t id = tx_param_id(("layers." + std::to_string(i) + ".weight").c_str());
    EXPECT_GE(id, 0);
    ids.insert(id);
  }
  EXPECT_EQ(ids.size(), 10000u);
  EXPECT_EQ(tx_param_id(nullptr), tx_param_id(""));
  // Stored in checkpoints: the value for a name must never change.
  EXPECT_EQ(tx_param_id("weight"), INT64_C(8806187764047091366));
}

}  // namespace
