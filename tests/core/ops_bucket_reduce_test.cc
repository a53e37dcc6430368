// tx_bucket_reduce: sums the chunks of all ranks, in the order of the ranks.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "tests/core/arrays.h"
#include "tests/core/wires.h"

namespace {

const float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

// shard = reduce(chunks), or shard += reduce(chunks).
void Reduce(std::vector<Wire> &chunks, Array &shard, double scale, bool accumulate = false, Counts *stats = nullptr) {
  std::vector<tx_tensor> data, scales;
  for (Wire &chunk : chunks) {
    data.push_back(chunk.data.tensor());
    scales.push_back(chunk.scales_or_none());
  }
  tx_bucket_reduce_args args = TX_BUCKET_REDUCE_ARGS_INIT;
  args.n = static_cast<int64_t>(chunks.size());
  args.chunks = data.data();
  args.scales = scales.data();
  args.shard = shard.tensor();
  args.stats = stats ? stats->tensor() : None();
  args.scale = scale;
  args.accumulate = accumulate;
  tx_error error = {};
  EXPECT_EQ(tx_bucket_reduce(&args, nullptr, &error), TX_OK) << error.message;
  EXPECT_TRUE(shard.GuardsIntact());
}

std::vector<Wire> Chunks(tx_dtype wire, const std::vector<std::vector<float>> &values) {
  std::vector<Wire> chunks;
  for (const auto &chunk : values) {
    Array grad(TX_F32, chunk);
    chunks.push_back(Pack(grad, wire));
  }
  return chunks;
}

std::vector<float> Values(const Array &array) {
  std::vector<float> values;
  for (int64_t i = 0; i < array.size(); i++)
    values.push_back(array.Get(i));
  return values;
}

class EveryWire : public testing::TestWithParam<tx_dtype> {};

// Two ranks, mean, every wire dtype. The shard is overwritten: adding to the local slice would count it twice.
TEST_P(EveryWire, E4_TheShardIsTheMean) {
  const std::vector<std::vector<float>> g = {{1, 2, 3, 4}, {5, 6, 7, 8}};
  for (tx_dtype shard_dtype : kPlain) {
    Array r0(shard_dtype, {1, 2}), r1(shard_dtype, {7, 8}); /* the local slices, which are overwritten */
    auto c0 = Chunks(GetParam(), {{1, 2}, {5, 6}}), c1 = Chunks(GetParam(), {{3, 4}, {7, 8}});
    Reduce(c0, r0, 0.5);
    Reduce(c1, r1, 0.5);
    EXPECT_EQ(Values(r0), (std::vector<float>{3, 4}));
    EXPECT_EQ(Values(r1), (std::vector<float>{5, 6}));
  }
}

// Two micro-batches are accumulated in place and reduced once.
TEST_P(EveryWire, E5_MicroBatchesAreReducedOnce) {
  Array main[2] = {Array(TX_F32, {1, 2, 3, 4}), Array(TX_F32, {5, 6, 7, 8})};
  Array second[2] = {Array(TX_BF16, {1, 1, 1, 1}), Array(TX_BF16, {3, 3, 3, 3})};
  for (int rank = 0; rank < 2; rank++) {
    const tx_tensor to = main[rank].tensor(), from = second[rank].tensor();
    ASSERT_EQ(tx_bucket_accumulate(1, &to, &from, nullptr, nullptr), TX_OK);
  }
  const auto m0 = Values(main[0]), m1 = Values(main[1]);
  auto c0 = Chunks(GetParam(), {{m0[0], m0[1]}, {m1[0], m1[1]}}),
       c1 = Chunks(GetParam(), {{m0[2], m0[3]}, {m1[2], m1[3]}});
  Array r0(TX_F32, 2), r1(TX_F32, 2);
  Reduce(c0, r0, 0.5);
  Reduce(c1, r1, 0.5);
  EXPECT_EQ(Values(r0), (std::vector<float>{5, 6}));
  EXPECT_EQ(Values(r1), (std::vector<float>{7, 8}));
}

// Sharded gradients: shard += reduced after each backward gives the same numbers.
TEST_P(EveryWire, E3_ShardedGradientsAddEachReduction) {
  Array r0(TX_F32, 2);
  auto a = Chunks(GetParam(), {{1, 2}, {5, 6}}), b = Chunks(GetParam(), {{1, 1}, {3, 3}});
  Reduce(a, r0, 0.5, true);
  Reduce(b, r0, 0.5, true);
  EXPECT_EQ(Values(r0), (std::vector<float>{5, 6}));
}

// The sum compared with double: N - 1 additions, one product and the rounding of the scale, all in fp32. Scaling in
// bf16 would be off by 2e-3 for N = 3.
TEST_P(EveryWire, E6_ScalesInFp32) {
  for (int64_t n_ranks : {1, 3, 7, 12}) {
    std::vector<Wire> chunks;
    std::vector<Array> grads;
    for (int64_t r = 0; r < n_ranks; r++) {
      grads.emplace_back(Array(TX_F32, 5000).Fill(static_cast<uint32_t>(r)));
      chunks.push_back(Pack(grads.back(), GetParam()));
    }
    const double scale = n_ranks == 1 ? 0.3 : 1.0 / static_cast<double>(n_ranks); /* a single rank also scales */
    Array shard(TX_F32, 5000);
    Reduce(chunks, shard, scale);
    for (int64_t i = 0; i < 5000; i++) {
      double sum = 0, magnitude = 0;
      for (const Wire &chunk : chunks) {
        sum += chunk.Get(i);
        magnitude += std::fabs(static_cast<double>(chunk.Get(i)));
      }
      ASSERT_NEAR(shard.Get(i), sum * scale, (static_cast<double>(n_ranks) + 1) * 0x1p-24 * magnitude * scale) << i;
    }
  }
}

// Exactly equal to scalar fp32 arithmetic in the promised order, element by element.
TEST_P(EveryWire, AddsInRankOrderAndRoundsOnce) {
  for (tx_dtype shard_dtype : kPlain) {
    for (bool accumulate : {false, true}) {
      for (int64_t n : kSizes) {
        std::vector<Wire> chunks;
        for (uint32_t r = 0; r < 5; r++) {
          Array grad(TX_F32, n);
          chunks.push_back(Pack(grad.Fill(r), GetParam()));
        }
        Array shard(shard_dtype, n), expected(shard_dtype, n);
        shard.Fill(9);
        const float scale = 0.2f;
        for (int64_t i = 0; i < n; i++) {
          float sum = chunks[0].Get(i);
          for (size_t r = 1; r < chunks.size(); r++)
            sum += chunks[r].Get(i);
          expected.Set(i, accumulate ? shard.Get(i) + sum * scale : sum * scale);
        }
        Reduce(chunks, shard, 0.2, accumulate);
        ASSERT_EQ(shard.raw(), expected.raw()) << DtypeName(shard_dtype) << " " << n << " " << accumulate;
      }
    }
  }
}

// The statistics of the new shard, equal to those of a separate pass of tx_grad_stats.
TEST_P(EveryWire, StatisticsAreThoseOfWhatIsStored) {
  for (tx_dtype shard_dtype : kPlain) {
    for (bool accumulate : {false, true}) {
      for (int64_t n : kSizes) {
        std::vector<Wire> chunks;
        for (uint32_t r = 0; r < 3; r++) {
          Array grad(TX_F32, n);
          grad.Fill(r, 1e-2f);
          if (r == 1 && n > 1000) grad.Set(700, kNan);
          chunks.push_back(Pack(grad, GetParam()));
        }
        Array shard(shard_dtype, n);
        shard.Fill(9, 1e-2f);
        if (n > 1000) shard.Set(1, kInf);
        Counts stats = NoStats(), expected = NoStats();
        Reduce(chunks, shard, 1.0 / 3, accumulate, &stats);
        const tx_tensor tensor = shard.tensor();
        ASSERT_EQ(tx_grad_stats(1, &tensor, expected.tensor(), None(), nullptr, nullptr), TX_OK);
        EXPECT_EQ(stats.raw(), expected.raw()) << n;
        if (n > 1000) {
          EXPECT_EQ(stats[TX_NORM_LIMBS], (GetParam() == TX_U8 ? 128 : 1) + (accumulate ? 1 : 0)) << n;
        }
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Wires, EveryWire, testing::ValuesIn(kWires),
                         [](const auto &info) { return DtypeName(info.param); });

TEST(Reduce, TheOrderIsTheRanks) {
  Array shard(TX_F32, 1);
  auto kept = Chunks(TX_F32, {{0x1p25f}, {-0x1p25f}, {1.0f}}), lost = Chunks(TX_F32, {{0x1p25f}, {1.0f}, {-0x1p25f}});
  Reduce(kept, shard, 1.0);
  EXPECT_EQ(shard.Get(0), 1.0f);
  Reduce(lost, shard, 1.0);
  EXPECT_EQ(shard.Get(0), 0.0f);
}

TEST(Reduce, TheFirstChunkIsNotAddedToZero) {
  for (tx_dtype wire : kWires) {
    auto chunks = Chunks(wire, {{-0.0f, 1.0f}});
    Array shard(TX_F32, 2);
    Reduce(chunks, shard, 1.0);
    EXPECT_TRUE(std::signbit(shard.Get(0))) << DtypeName(wire);
  }
}

TEST(Reduce, AChunkMayBeTheShard) {
  const int64_t numel = 5000;
  for (tx_dtype dtype : kPlain) {
    for (int own = 0; own < 3; own++) {
      std::vector<Array> chunks;
      for (int i = 0; i < 3; i++) {
        chunks.emplace_back(dtype, numel);
        chunks.back().Fill(20 + i, 1.0f);
      }
      Array apart(dtype, numel);
      std::vector<tx_tensor> given;
      for (Array &chunk : chunks)
        given.push_back(chunk.tensor());
      tx_bucket_reduce_args args = TX_BUCKET_REDUCE_ARGS_INIT;
      args.n = 3;
      args.chunks = given.data();
      args.scale = 1.0 / 3;
      args.shard = apart.tensor();
      ASSERT_EQ(tx_bucket_reduce(&args, nullptr, nullptr), TX_OK);
      args.shard = given[own];
      tx_error error = {};
      ASSERT_EQ(tx_bucket_reduce(&args, nullptr, &error), TX_OK) << error.message;
      EXPECT_EQ(chunks[own].bytes(), apart.bytes()) << tx_dtype_name(dtype) << " chunk " << own;
    }
  }
}

struct Reducing {
  std::vector<tx_tensor> chunks, scales;
  tx_bucket_reduce_args args = TX_BUCKET_REDUCE_ARGS_INIT;
};

TEST(Reduce, RefusesWithAMessageAndWritesNothing) {
  Array c0(TX_U8, 300), c1(TX_U8, 300), s0(TX_U8, 3), s1(TX_U8, 3), shard(TX_F32, 300);
  Counts stats = NoStats();
  struct Case {
    const char *says;
    tx_status status;
    void (*spoil)(Reducing &);
  };
  for (const Case &c : std::vector<Case>{
           {"args.size is 0", TX_ERROR_INVALID_ARGUMENT, [](Reducing &r) { r.args.size = 0; }},
           {"chunks has 0 entries", TX_ERROR_SHAPE, [](Reducing &r) { r.args.n = 0; }},
           {"chunks is NULL", TX_ERROR_INVALID_ARGUMENT, [](Reducing &r) { r.args.chunks = nullptr; }},
           {"chunks[1] has 299 elements and shard has 300", TX_ERROR_SHAPE,
            [](Reducing &r) { r.chunks[1].numel = 299; }},
           {"chunks[0] is uint8 without scales", TX_ERROR_DTYPE, [](Reducing &r) { r.args.scales = nullptr; }},
           {"chunks[1] is uint8 without scales", TX_ERROR_DTYPE, [](Reducing &r) { r.scales[1] = None(); }},
           {"chunks[1] is", TX_ERROR_DTYPE,
            [](Reducing &r) {
              r.chunks[1].dtype = TX_F32;
              r.scales[1] = None();
            }},
           {"chunks[0] is", TX_ERROR_DTYPE, [](Reducing &r) { r.chunks[0].dtype = TX_F16; }},
           {"scales[1] is 2 elements", TX_ERROR_SHAPE, [](Reducing &r) { r.scales[1].numel = 2; }},
           {"shard[0] is", TX_ERROR_DTYPE, [](Reducing &r) { r.args.shard.dtype = TX_U8; }},
           {"scale is nan", TX_ERROR_ILLEGAL_VALUE, [](Reducing &r) { r.args.scale = NAN; }},
           {"scale is 1e+300", TX_ERROR_ILLEGAL_VALUE, [](Reducing &r) { r.args.scale = 1e300; }},
           {"accumulate is 2", TX_ERROR_ILLEGAL_VALUE, [](Reducing &r) { r.args.accumulate = 2; }},
           {"stats has 20", TX_ERROR_SHAPE, [](Reducing &r) { r.args.stats.numel = 20; }},
           {"shard[0] and chunks[1] share memory", TX_ERROR_OVERLAP,
            [](Reducing &r) { r.chunks[1].data = static_cast<char *>(r.args.shard.data) + 50; }},
           {"chunks[1] and shard[0] share memory", TX_ERROR_OVERLAP, /* 8-bit codes cannot hold the sums */
            [](Reducing &r) { r.chunks[1].data = r.args.shard.data; }},
           {"chunks[0] and shard[0] share memory", TX_ERROR_OVERLAP, /* the chunk would be counted twice */
            [](Reducing &r) {
              r.args.scales = nullptr;
              r.args.accumulate = 1;
              r.chunks = {r.args.shard, r.args.shard};
            }},
           {"chunks[1] and shard[0] share memory", TX_ERROR_OVERLAP, /* the shard may be one of the chunks, not two */
            [](Reducing &r) {
              r.args.scales = nullptr;
              r.chunks = {r.args.shard, r.args.shard};
            }},
       }) {
    SCOPED_TRACE(c.says);
    Reducing r;
    r.chunks = {c0.tensor(), c1.tensor()};
    r.scales = {s0.tensor(), s1.tensor()};
    r.args.n = 2;
    r.args.chunks = r.chunks.data();
    r.args.scales = r.scales.data();
    r.args.shard = shard.tensor();
    r.args.stats = stats.tensor();
    c.spoil(r);
    ExpectRefused([&](tx_error *e) { return tx_bucket_reduce(&r.args, nullptr, e); }, c.status, c.says,
                  {&shard, &stats});
  }
}

}  // namespace
