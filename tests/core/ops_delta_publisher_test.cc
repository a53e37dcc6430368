// What a publisher of weight deltas knows and refuses: arguments that cannot be, blocks that are not their masters, and
// writes by others.
#include <cstring>
#include <string>

#include "tests/core/delta_trainer.h"
#include "tests/core/threads.h"

namespace {

TEST(Delta, APublisherThatCannotIsToldWhy) {
  Trainer trainer(kSmall, 1, 53);
  std::vector<tx_delta_param> table = Table(kSmall);
  std::vector<tx_delta_run> runs = trainer.Runs(0);
  tx_delta_encode_args args = TX_DELTA_ENCODE_ARGS_INIT;
  args.n_params = 2;
  args.params = table.data();
  args.n_runs = 2;
  args.runs = runs.data();
  tx_delta_message message = {};
  tx_error error;
  const auto fails = [&](tx_status status, const char *says) {
    EXPECT_EQ(tx_delta_encode(&args, &trainer.chain(0), nullptr, &message, &error), status);
    EXPECT_NE(std::string(error.message).find(says), std::string::npos) << error.message;
    EXPECT_EQ(message.data, nullptr);
    EXPECT_EQ(trainer.chain(0).version, 0);
  };
  table[1].numel++;
  fails(TX_ERROR_MISMATCH, "not the chain's");
  table[1].numel--;
  std::swap(runs[0], runs[1]);
  fails(TX_ERROR_OVERLAP, "overlaps");
  std::swap(runs[0], runs[1]);
  runs[0].offset = 1;
  fails(TX_ERROR_SHAPE, "within its 700");
  runs[0].offset = 0;
  runs[1].changed.numel--;
  fails(TX_ERROR_SHAPE, "runs[1]: changed has");
  runs[1].changed.numel++;
  void *const moved = runs[1].moved.data;
  runs[1].moved.data = runs[1].weights.data;
  fails(TX_ERROR_OVERLAP, "runs[1]: weights[0] and moved[0] share memory");
  EXPECT_EQ(tx_delta_renew(2, runs.data(), nullptr, &error), TX_ERROR_OVERLAP);
  runs[1].moved.data = moved;
  args.kind = TX_DELTA_WHOLE;
  trainer.Step(1e-3f);
  fails(TX_ERROR_BAD_STATE, "has changed since version 0");
  args.size = 8;
  fails(TX_ERROR_INVALID_ARGUMENT, "args.size");
}

// Random weights with masters, a few of them changed, on every instruction set: the blocks that are marked equal those
// found by a loop over single weights.
TEST(Delta, BlocksThatAreNotTheirMastersAreMarked) {
  const Threads threads(3);
  std::mt19937 gen(67);
  for (int32_t isa = 0; tx_isa_name(isa); isa++) {
    ASSERT_EQ(tx_isa_select(tx_isa_name(isa), nullptr), TX_OK);
    for (int t = 0; t < 60; t++) {
      const tx_dtype dtype = t % 2 ? TX_F16 : TX_BF16;
      const int64_t n = t % 3 == 2 ? 65536 + gen() % 9000 : gen() % 3000;
      std::vector<float> masters(static_cast<size_t>(n));
      Bytes weights(static_cast<size_t>(2 * n));
      for (int64_t i = 0; i < n; i++) {
        masters[static_cast<size_t>(i)] = std::ldexp(static_cast<float>(gen()) - 2e9f, -static_cast<int>(gen() % 70));
        if (gen() % 50 == 0) masters[static_cast<size_t>(i)] = gen() % 2 ? NAN : 0.0f;
        SetWeight(&weights, i, dtype, Round(masters[static_cast<size_t>(i)], dtype));
      }
      std::vector<uint16_t> moved(static_cast<size_t>((n + TX_BLOCK - 1) / TX_BLOCK), 0x3a00), wanted = moved;
      int64_t blocks = 0;
      for (uint32_t k = gen() % 5; n > 0 && k > 0; k--) {
        const int64_t at = gen() % n;
        const uint32_t was = GetWeight(weights, at, dtype), sizes = 0x7fff,
                       infinity = dtype == TX_F16 ? 0x7c00 : 0x7f80;
        const uint32_t now = was ^ (gen() % 3 ? 1u << gen() % 16 : 0x8001u);
        SetWeight(&weights, at, dtype, now);
        const uint32_t mine = Round(masters[static_cast<size_t>(at)], dtype);
        const bool alike =
            now == mine || ((now | mine) & sizes) == 0 || ((now & sizes) > infinity && (mine & sizes) > infinity);
        uint16_t &bound = wanted[static_cast<size_t>(at / TX_BLOCK)];
        if (alike || bound == 0x7f80) continue;
        bound = 0x7f80;
        blocks++;
      }
      tx_error error;
      tx_delta_written tensors[2] = {};
      tensors[1].weights = {weights.data(), n, dtype, 0};
      tensors[1].masters = {masters.data(), n, TX_F32, 0};
      tensors[1].moved = {moved.data(), static_cast<int64_t>(moved.size()), TX_BF16, 0};
      tensors[0].weights.dtype = dtype;
      ASSERT_EQ(tx_delta_mark(2, tensors, t % 4 ? nullptr : threads.parallel(), &error), TX_OK) << error.message;
      ASSERT_EQ(moved, wanted) << t;
      ASSERT_EQ(tensors[1].marked, blocks) << t;
    }
  }
  ASSERT_EQ(tx_isa_select(nullptr, nullptr), TX_OK);
}

TEST(Delta, MarkKnowsWritesByChecksums) {
  std::mt19937_64 gen(5);
  const Threads threads(3);
  for (int32_t t = 0; t < 60; t++) {
    std::vector<std::vector<uint16_t>> weights, moved, wanted;
    std::vector<std::vector<uint64_t>> sums;
    std::vector<tx_delta_written> tensors(gen() % 5);
    for (tx_delta_written &one : tensors) {
      const int64_t n = t % 10 ? static_cast<int64_t>(gen() % 5000) : 200000;
      std::vector<uint16_t> &w = weights.emplace_back(static_cast<size_t>(n));
      for (uint16_t &value : w)
        value = static_cast<uint16_t>(gen());
      std::vector<uint64_t> &kept = sums.emplace_back(static_cast<size_t>((n + TX_CHECKSUM - 1) / TX_CHECKSUM));
      tx_delta_run run = {};
      run.weights = {w.data(), n, TX_BF16, 0};
      run.checksums = {kept.data(), static_cast<int64_t>(kept.size()), TX_I64, 0};
      ASSERT_EQ(tx_delta_renew(1, &run, nullptr, nullptr), TX_OK);
      moved.emplace_back(static_cast<size_t>((n + TX_BLOCK - 1) / TX_BLOCK), static_cast<uint16_t>(0x3f80));
      wanted.push_back(moved.back());
      for (uint64_t k = gen() % 3; n > 0 && k > 0; k--) {
        const int64_t at = static_cast<int64_t>(gen() % static_cast<uint64_t>(n)), first = at - at % TX_CHECKSUM;
        w[static_cast<size_t>(at)] ^= static_cast<uint16_t>(1u << (k % 16));
        for (int64_t i = first; i < std::min(first + TX_CHECKSUM, n); i++)
          wanted.back()[static_cast<size_t>(i / TX_BLOCK)] = 0x7f80;
      }
      one = {};
      one.weights = {w.data(), n, TX_BF16, 0};
      one.checksums = {kept.data(), static_cast<int64_t>(kept.size()), TX_I64, 0};
      one.moved = {moved.back().data(), static_cast<int64_t>(moved.back().size()), TX_BF16, 0};
    }
    tx_error error;
    ASSERT_EQ(tx_delta_mark(static_cast<int64_t>(tensors.size()), tensors.data(), t % 2 ? nullptr : threads.parallel(),
                            &error),
              TX_OK)
        << error.message;
    ASSERT_EQ(moved, wanted) << t;
    for (size_t i = 0; i < tensors.size(); i++)
      EXPECT_EQ(tensors[i].marked, std::count(wanted[i].begin(), wanted[i].end(), 0x7f80)) << t;
  }
}

TEST(Delta, MarkRefusesWhatItCannotCompare) {
  uint16_t weights[300] = {0}, moved[3] = {0};
  float masters[300] = {0};
  uint64_t sums[1] = {1};
  tx_error error;
  const tx_tensor w = {weights, 300, TX_BF16, 0}, m = {masters, 300, TX_F32, 0}, b = {moved, 3, TX_BF16, 0};
  const tx_tensor c = {sums, 1, TX_I64, 0}, none = {nullptr, 0, TX_NONE, 0};
  const auto mark = [&](tx_tensor x, tx_tensor y, tx_tensor z, tx_tensor sum) {
    tx_delta_written tensors[] = {{w, none, c, b, 0, 0}, {x, y, sum, z, 0, 0}};
    return tx_delta_mark(2, tensors, nullptr, &error);
  };
  EXPECT_EQ(mark(m, m, b, none), TX_ERROR_DTYPE);
  EXPECT_NE(std::string(error.message).find("tensors[1]: weights are fp32; bf16 and fp16"), std::string::npos)
      << error.message;
  EXPECT_EQ(mark(w, {masters, 299, TX_F32, 0}, b, none), TX_ERROR_SHAPE);
  EXPECT_EQ(mark(w, m, {moved, 2, TX_BF16, 0}, none), TX_ERROR_SHAPE);
  EXPECT_EQ(mark(w, none, b, {sums, 2, TX_I64, 0}), TX_ERROR_SHAPE);
  EXPECT_NE(std::string(error.message).find("tensors[1]: checksums has 2"), std::string::npos) << error.message;
  EXPECT_EQ(mark(w, w, b, none), TX_ERROR_DTYPE);
  EXPECT_EQ(mark(w, m, {weights + 7, 3, TX_BF16, 0}, none), TX_ERROR_OVERLAP);
  EXPECT_EQ(mark(w, m, b, c), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(mark(w, none, b, none), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(moved[0] | moved[1] | moved[2], 0) << "nothing is written where something is refused";
  EXPECT_EQ(tx_delta_mark(1, nullptr, nullptr, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(mark(w, m, b, none), TX_OK) << error.message;
}

}  // namespace
