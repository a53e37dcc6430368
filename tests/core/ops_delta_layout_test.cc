// Weight deltas into an engine's tensors: fused, sliced and transposed.
#include <cstring>
#include <string>

#include "tests/core/delta_trainer.h"

namespace {

TEST(Delta, WeightsGoIntoFusedSlicedAndTransposedTensors) {
  constexpr int64_t kRows = 96, kColumns = 130;
  const std::vector<Param> model = {
      {"k", kRows * kColumns, TX_BF16}, {"q", kRows * kColumns, TX_BF16}, {"t", kRows * kColumns, TX_BF16}};
  for (const bool exact : {false, true}) {
    Trainer trainer(model, 2, 43, exact, false, true);
    const std::vector<tx_delta_param> table = Table(model);
    const std::vector<Bytes> was = {trainer.Weights(0), trainer.Weights(1), trainer.Weights(2)};
    std::vector<uint16_t> fused(2 * kRows * kColumns / 2), turned(kRows * kColumns);
    const int64_t half = kColumns / 2;
    // q and k: the second half of their columns, one above the other; t: transposed.
    std::vector<tx_delta_piece> pieces;
    for (int64_t p = 0; p < 2; p++) {
      pieces.push_back({p, 0, kRows, half, kColumns, nullptr, 0, 0});
      pieces.push_back({p, half, kRows, half, kColumns, fused.data() + p * kRows * half, half, 1});
    }
    pieces.push_back({2, 0, kRows, kColumns, kColumns, turned.data(), 1, kRows});
    const auto expect = [&](const std::vector<Bytes> &now, bool set) {
      for (int64_t r = 0; r < kRows; r++) {
        for (int64_t c = 0; c < kColumns; c++) {
          for (size_t p = 0; p < 3; p++) {
            if (p < 2 && c < half) continue;
            uint16_t &at = p < 2 ? fused[static_cast<size_t>((static_cast<int64_t>(p) * kRows + r) * half + c - half)]
                                 : turned[static_cast<size_t>(c * kRows + r)];
            const auto value = static_cast<uint16_t>(GetWeight(now[p], r * kColumns + c, TX_BF16));
            if (set) at = value;
            ASSERT_EQ(at, value) << p << " " << r << " " << c;
          }
        }
      }
    };
    expect(was, true);
    tx_delta_receiver *receiver = nullptr;
    tx_error error;
    ASSERT_EQ(tx_delta_open(3, table.data(), static_cast<int64_t>(pieces.size()), pieces.data(), &receiver, &error),
              TX_OK)
        << error.message;
    for (const float lr : {1e-5f, 1e-3f, 1e-1f}) {
      trainer.Step(lr);
      const std::vector<Bytes> parts = trainer.Encode();
      const tx_tensor tensors[] = {AsTensor(parts[0]), AsTensor(parts[1])};
      ASSERT_EQ(tx_delta_apply(receiver, 2, tensors, TX_DELTA_TOUCHED, nullptr, &error), TX_OK) << error.message;
      expect({trainer.Weights(0), trainer.Weights(1), trainer.Weights(2)}, false);
    }
    tx_delta_close(receiver);
  }
}

TEST(Delta, PiecesThatCoverTwiceOrNotAtAllAreNamed) {
  const tx_delta_param table[] = {{"a", 100, TX_BF16, 0}, {"b", 100, TX_BF16, 0}};
  std::vector<uint16_t> memory(400);
  uint16_t *m = memory.data();
  struct Case {
    std::vector<tx_delta_piece> pieces;
    tx_status status;
    const char *says;
  };
  const tx_delta_piece b = {1, 0, 1, 100, 0, m + 200, 0, 1};
  const Case cases[] = {
      {{{0, 0, 1, 100, 0, m, 0, 1}, b}, TX_OK, ""},
      {{{0, 0, 1, 99, 0, m, 0, 1}, b}, TX_ERROR_SHAPE, "\"a\": element 99 of 100 is in no piece"},
      {{{0, 0, 1, 100, 0, m, 0, 1}}, TX_ERROR_SHAPE, "\"b\""},
      {{{0, 0, 1, 101, 0, m, 0, 1}, b}, TX_ERROR_SHAPE, "within its 100"},
      {{{0, 0, 1, 60, 0, m, 0, 1}, {0, 59, 1, 41, 0, m + 60, 0, 1}, b}, TX_ERROR_OVERLAP, "element 59 is in two"},
      {{{0, 0, 1, 100, 0, m + 101, 0, 1}, b}, TX_ERROR_OVERLAP, "same memory"},
      {{{0, 0, 10, 10, 10, m, 20, 1}, b}, TX_OK, ""},
      {{{0, 0, 10, 10, 10, m, 20, 2}, b}, TX_OK, ""},
      {{{0, 0, 10, 10, 10, m, 9, 1}, b}, TX_ERROR_OVERLAP, "same memory"},
      {{{0, 0, 10, 10, 10, m, 1, 10}, b}, TX_OK, ""},
      {{{0, 0, 10, 10, 10, m, 20, 1}, {1, 0, 10, 10, 10, m + 10, 20, 1}}, TX_OK, ""},
      {{{0, 0, 10, 10, 10, m, 20, 1}, {1, 0, 10, 10, 10, m + 9, 20, 1}}, TX_ERROR_OVERLAP, "same memory"},
      {{{0, 0, 2, 50, 40, m, 50, 1}, b}, TX_ERROR_SHAPE, "do not overlap"},
      {{{2, 0, 1, 100, 0, m, 0, 1}, b}, TX_ERROR_INVALID_ARGUMENT, "parameter 2"},
  };
  for (const Case &c : cases) {
    tx_delta_receiver *receiver = nullptr;
    tx_error error = {};
    EXPECT_EQ(tx_delta_open(2, table, static_cast<int64_t>(c.pieces.size()), c.pieces.data(), &receiver, &error),
              c.status)
        << c.says << error.message;
    EXPECT_NE(std::string(error.message).find(c.says), std::string::npos) << error.message;
    tx_delta_close(receiver);
  }
}

TEST(Delta, SlicesNeedAPublisherThatMakesThem) {
  const std::vector<Param> model = {{"w", 10000, TX_BF16}};
  Trainer trainer(model, 1, 47);
  const std::vector<tx_delta_param> table = Table(model);
  Bytes weights = trainer.Weights(0);
  const tx_delta_piece pieces[] = {{0, 0, 1, 5000, 0, weights.data(), 0, 1}, {0, 5000, 1, 5000, 0, nullptr, 0, 0}};
  tx_delta_receiver *receiver = nullptr;
  tx_error error;
  ASSERT_EQ(tx_delta_open(1, table.data(), 2, pieces, &receiver, &error), TX_OK);
  trainer.Step(1e-5f);
  const std::vector<Bytes> parts = trainer.Encode();
  const tx_tensor tensor = AsTensor(parts[0]);
  EXPECT_EQ(tx_delta_apply(receiver, 1, &tensor, TX_DELTA_TOUCHED, nullptr, &error), TX_ERROR_MISMATCH);
  EXPECT_NE(std::string(error.message).find("sliceable"), std::string::npos) << error.message;
  EXPECT_EQ(tx_delta_apply(receiver, 1, &tensor, TX_DELTA_FULL, nullptr, &error), TX_ERROR_BAD_STATE);
  tx_delta_close(receiver);
}

}  // namespace
