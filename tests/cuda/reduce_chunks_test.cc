// tx_cuda_bucket_reduce must have the CPU's bits, on any grid.
#include <limits>

#include "tests/core/wires.h"
#include "tests/cuda/both.h"

namespace {

const float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

struct Reducing {
  std::vector<tx_tensor> chunks, scales;
  tx_bucket_reduce_args args = TX_BUCKET_REDUCE_ARGS_INIT;

  Reducing(std::vector<Wire> &wires, tx_tensor shard, double scale, int32_t accumulate) {
    for (Wire &wire : wires) {
      chunks.push_back(wire.data.tensor());
      scales.push_back(wire.scales_or_none());
    }
    args.n = static_cast<int64_t>(chunks.size());
    args.chunks = chunks.data();
    args.scales = scales.data();
    args.shard = shard;
    args.scale = scale;
    args.accumulate = accumulate;
  }
};

// The chunks of `n_ranks` ranks. Magnitudes differ, so another order of additions would give other sums. Rank 1 has a
// NaN. Rank 2 has an Inf at the very end, whose block of codes is NaN beyond the end of the tensor, too.
std::vector<Wire> Chunks(tx_dtype wire, int64_t n, int64_t misalign, uint32_t n_ranks) {
  std::vector<Wire> chunks;
  for (uint32_t rank = 0; rank < n_ranks; rank++) {
    Array grad(TX_F32, n);
    grad.Fill(rank + 1, rank % 2 ? 1e-2f : 1.0f);
    if (rank == 1 && n > 1000) grad.Set(700, kNan);
    if (rank == 2 && n > 1000) grad.Set(n - 1, kInf);
    chunks.emplace_back(wire, n, misalign);
    const tx_tensor src = grad.tensor(), dst = chunks.back().data.tensor(), scales = chunks.back().scales_or_none();
    tx_cast_args cast = TX_CAST_ARGS_INIT;
    cast.n = 1;
    cast.srcs = &src;
    cast.dsts = &dst;
    cast.dst_scales = &scales;
    EXPECT_OK([&](tx_error *e) { return tx_cast(&cast, nullptr, e); });
  }
  return chunks;
}

class EveryWire : public testing::TestWithParam<std::tuple<tx_dtype, tx_dtype, int>> {};

TEST_P(EveryWire, AddsInRankOrderRoundsOnceAndCountsWhatIsStored) {
  const auto [wire, shard_dtype, misalign] = GetParam();
  for (const int64_t n : kSizes) {
    for (const uint32_t n_ranks : {1u, 3u, 4u, 9u}) {
      if (n == kLarge && n_ranks == 9u) continue;
      std::vector<Wire> chunks = Chunks(wire, n, misalign, n_ranks);
      for (const int32_t accumulate : {0, 1}) {
        for (const bool counts : {false, true}) {
          Arrange(kGrids[static_cast<size_t>(n % 3)]);
          Array ours(shard_dtype, n, misalign), theirs(shard_dtype, n, misalign);
          ours.Fill(9, 1e-2f);
          theirs.Fill(9, 1e-2f);
          if (n > 1000) ours.Set(1, kInf), theirs.Set(1, kInf);
          AlignedCounts our_stats = ZeroStats(), their_stats = ZeroStats();
          Reducing to(chunks, ours.tensor(), 1.0 / 3, accumulate);
          Reducing reference(chunks, theirs.tensor(), 1.0 / 3, accumulate);
          if (counts) to.args.stats = our_stats.tensor(), reference.args.stats = their_stats.tensor();
          EXPECT_OK([&](tx_error *e) { return tx_cuda_bucket_reduce(&to.args, Call(), e); });
          EXPECT_OK([&](tx_error *e) { return tx_bucket_reduce(&reference.args, nullptr, e); });
          ASSERT_EQ(ours.raw(), theirs.raw()) << n << " elements, " << n_ranks << " ranks";
          ASSERT_EQ(our_stats.raw(), their_stats.raw()) << n << " elements, " << n_ranks << " ranks";
          EXPECT_EQ(emulated::world.launches, n == 0 ? 0 : 1);
        }
      }
    }
  }
}

// Every code, and NaN, Inf and subnormals.
TEST_P(EveryWire, AnyBytesAtAll) {
  const auto [wire, shard_dtype, misalign] = GetParam();
  for (const int32_t accumulate : {0, 1}) {
    Arrange();
    std::vector<Wire> chunks;
    for (uint32_t rank = 0; rank < 3; rank++) {
      chunks.emplace_back(wire, 3333, misalign).data.FillBytes(rank);
      chunks.back().scales.FillBytes(10 + rank);
    }
    Array ours(shard_dtype, 3333, misalign), theirs(shard_dtype, 3333, misalign);
    ours.FillBytes(7);
    theirs.FillBytes(7);
    AlignedCounts our_stats = ZeroStats(), their_stats = ZeroStats();
    Reducing to(chunks, ours.tensor(), 0.7, accumulate), reference(chunks, theirs.tensor(), 0.7, accumulate);
    to.args.stats = our_stats.tensor();
    reference.args.stats = their_stats.tensor();
    EXPECT_OK([&](tx_error *e) { return tx_cuda_bucket_reduce(&to.args, Call(), e); });
    EXPECT_OK([&](tx_error *e) { return tx_bucket_reduce(&reference.args, nullptr, e); });
    ASSERT_EQ(ours.raw(), theirs.raw());
    ASSERT_EQ(our_stats.raw(), their_stats.raw());
  }
}
INSTANTIATE_TEST_SUITE_P(Wires, EveryWire,
                         testing::Combine(testing::ValuesIn(kWires), testing::ValuesIn(kPlain), testing::Values(0, 1)),
                         [](const auto &info) {
                           return DtypeName(std::get<0>(info.param)) + "_" + DtypeName(std::get<1>(info.param)) +
                                  "_from_" + std::to_string(std::get<2>(info.param));
                         });

TEST(Reduce, TheFirstChunkIsNotAddedToZero) {
  std::vector<Wire> chunks;
  chunks.emplace_back(TX_F32, 2, 0).data.Set(0, -0.0f);
  Array shard(TX_F32, 2);
  Reducing to(chunks, shard.tensor(), 1.0, 0);
  EXPECT_OK([&](tx_error *e) { return tx_cuda_bucket_reduce(&to.args, Call(), e); });
  EXPECT_TRUE(std::signbit(shard.Get(0)));
}

TEST(Reduce, AChunkMayBeTheShard) {
  for (const tx_dtype dtype : kPlain) {
    for (size_t own = 0; own < 3; own++) {
      Arrange();
      std::vector<Wire> chunks = Chunks(dtype, 5000, 1, 3);
      Array apart(dtype, 5000);
      Reducing reference(chunks, apart.tensor(), 1.0 / 3, 0);
      EXPECT_OK([&](tx_error *e) { return tx_bucket_reduce(&reference.args, nullptr, e); });
      Reducing to(chunks, chunks[own].data.tensor(), 1.0 / 3, 0);
      EXPECT_OK([&](tx_error *e) { return tx_cuda_bucket_reduce(&to.args, Call(), e); });
      EXPECT_EQ(chunks[own].data.raw(), apart.raw()) << DtypeName(dtype) << " chunk " << own;
    }
  }
}

TEST(Reduce, AsManyChunksAsTravelByValueAndNotOneMore) {
  Arrange();
  std::vector<Wire> chunks;
  Array ours(TX_F32, 30), theirs(TX_F32, 30);
  for (int i = 0; i < TX_CUDA_MAX_CHUNKS; i++)
    chunks.emplace_back(TX_BF16, 30, 1).data.Fill(static_cast<uint32_t>(i));
  Reducing to(chunks, ours.tensor(), 0.5, 0), reference(chunks, theirs.tensor(), 0.5, 0);
  EXPECT_OK([&](tx_error *e) { return tx_cuda_bucket_reduce(&to.args, Call(), e); });
  EXPECT_OK([&](tx_error *e) { return tx_bucket_reduce(&reference.args, nullptr, e); });
  EXPECT_EQ(ours.raw(), theirs.raw());
  chunks.emplace_back(TX_BF16, 30, 1);
  Reducing more(chunks, ours.tensor(), 0.5, 0);
  ExpectRefused([&](tx_error *e) { return tx_cuda_bucket_reduce(&more.args, Call(), e); }, TX_ERROR_SHAPE,
                "chunks has 2001 entries; up to 2000 are legal on a GPU", {&ours});
}

TEST(Reduce, RefusesAsTheCpuDoes) {
  Arrange();
  AlignedCounts stats = ZeroStats();
  Array shard(TX_F32, 300);
  for (void (*spoil)(Reducing &) : std::vector<void (*)(Reducing &)>{
           [](Reducing &r) { r.args.size = 0; }, [](Reducing &r) { r.args.n = 0; },
           [](Reducing &r) { r.args.chunks = nullptr; }, [](Reducing &r) { r.chunks[1].numel = 299; },
           [](Reducing &r) { r.args.scales = nullptr; }, [](Reducing &r) { r.scales[1] = None(); },
           [](Reducing &r) { r.scales[1].numel = 2; }, [](Reducing &r) { r.args.shard.dtype = TX_U8; },
           [](Reducing &r) { r.args.scale = NAN; }, [](Reducing &r) { r.args.accumulate = 2; },
           [](Reducing &r) { r.args.stats.numel = 20; }, [](Reducing &r) { r.chunks[1].data = r.args.shard.data; }}) {
    std::vector<Wire> chunks = Chunks(TX_U8, 300, 1, 2);
    Reducing r(chunks, shard.tensor(), 1.0, 0);
    r.args.stats = stats.tensor();
    spoil(r);
    ExpectRefusedAlike([&](tx_error *e) { return tx_cuda_bucket_reduce(&r.args, Call(), e); },
                       [&](tx_error *e) { return tx_bucket_reduce(&r.args, nullptr, e); }, {&shard, &stats});
  }
}

}  // namespace
