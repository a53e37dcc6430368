// Two callers at the same time, each with its own memory and four threads: calls share nothing but the table of
// kernels, and each gets the same bits as alone. tests/run.sh also runs this under the thread sanitizer.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "csrc/torch_ext_advanced.h"
#include "tests/core/adamw_call.h"
#include "tests/core/threads.h"

namespace {

using adamw_call::Bytes;
using adamw_call::Call;
using adamw_call::Param;

using Outputs = std::vector<std::vector<uint8_t>>;

// Large enough to give every thread some work.
constexpr int64_t kNumel = 5 * 16384 + 77;

struct Work {
  const char *name;
  Outputs (*run)(const tx_parallel *parallel);
};

void Ok(tx_status status) {
  EXPECT_EQ(status, TX_OK);
}

tx_tensor Filled(Bytes *bytes, int64_t numel, tx_dtype dtype) {
  *bytes = Bytes(numel * (dtype == TX_I64 ? 8 : adamw_call::Size(dtype)));
  for (int64_t i = 0; i < bytes->size(); i++)
    bytes->data()[i] = static_cast<uint8_t>((i * 37 + i / 251) & 0x3F); /* finite in any dtype */
  return {bytes->data(), numel, dtype, 0};
}

Outputs Step(const tx_parallel *parallel, bool staged) {
  Param first(adamw_call::kBlocks, kNumel), second(adamw_call::kBf16, kNumel / 2);
  first.Fill(3);
  second.Fill(4);
  Call call;
  call.Add(first, 1);
  call.Add(second, 2);
  const int64_t batch = 4096, threads = 4;
  std::vector<uint8_t> room(static_cast<size_t>(threads * 2 * batch * 4 + 64));
  tx_staging staging = TX_STAGING_INIT;
  staging.memory = room.data() + (64 - reinterpret_cast<uintptr_t>(room.data()) % 64) % 64;
  staging.bytes = threads * 2 * batch * 4;
  staging.batch = batch;
  staging.slots = 2;
  Ok(staged ? tx_adamw_offloaded(call.Args(), &staging, parallel, nullptr) : tx_adamw(call.Args(), parallel, nullptr));
  Outputs all = first.State();
  for (const auto &bytes : second.State())
    all.push_back(bytes);
  return all;
}

Outputs Bucket(const tx_parallel *parallel) {
  Bytes grad_bytes, bucket_bytes, scale_bytes, shard_bytes, stats_bytes;
  const int64_t blocks = (kNumel + TX_BLOCK - 1) / TX_BLOCK, offset = 0;
  const tx_tensor grad = Filled(&grad_bytes, kNumel, TX_F32);
  tx_bucket_pack_args pack = TX_BUCKET_PACK_ARGS_INIT;
  pack.n = 1;
  pack.grads = &grad;
  pack.offsets = &offset;
  pack.bucket = Filled(&bucket_bytes, blocks * TX_BLOCK, TX_U8);
  pack.scales = Filled(&scale_bytes, blocks, TX_U8);
  Ok(tx_bucket_pack(&pack, parallel, nullptr));
  const tx_tensor chunks[] = {pack.bucket, pack.bucket}, scales[] = {pack.scales, pack.scales};
  tx_bucket_reduce_args reduce = TX_BUCKET_REDUCE_ARGS_INIT;
  reduce.n = 2;
  reduce.chunks = chunks;
  reduce.scales = scales;
  reduce.shard = Filled(&shard_bytes, blocks * TX_BLOCK, TX_BF16);
  reduce.stats = Filled(&stats_bytes, TX_STATS_LEN, TX_I64);
  Ok(tx_bucket_reduce(&reduce, parallel, nullptr));
  Ok(tx_bucket_unpack(reduce.shard, {}, 1, &offset, &grad, parallel, nullptr));
  EXPECT_EQ(tx_bucket_accumulate(1, &grad, &grad, parallel, nullptr), TX_ERROR_OVERLAP);
  return {grad_bytes.copy(), bucket_bytes.copy(), scale_bytes.copy(), shard_bytes.copy(), stats_bytes.copy()};
}

Outputs Stats(const tx_parallel *parallel) {
  Bytes grad_bytes, stats_bytes, norm_bytes;
  const tx_tensor grad = Filled(&grad_bytes, kNumel, TX_BF16), stats = Filled(&stats_bytes, TX_STATS_LEN, TX_I64);
  std::memset(stats.data, 0, 8 * TX_STATS_LEN);
  const tx_tensor norm = Filled(&norm_bytes, 1, TX_F32);
  Ok(tx_grad_stats(1, &grad, stats, {}, parallel, nullptr));
  Ok(tx_grad_norm(stats, {}, 1.0, norm, {}, {}, nullptr));
  return {stats_bytes.copy(), norm_bytes.copy()};
}

Outputs Masters(const tx_parallel *parallel) {
  Bytes params, masters, remainders, checksums, casted;
  const tx_tensor p = Filled(&params, kNumel, TX_BF16), m = Filled(&masters, kNumel, TX_F32);
  const tx_tensor r = Filled(&remainders, kNumel, TX_I16);
  const tx_tensor c = Filled(&checksums, (kNumel + TX_CHECKSUM - 1) / TX_CHECKSUM, TX_I64);
  Ok(tx_master_encode(1, &m, &p, &r, parallel, nullptr));
  Ok(tx_master_checksum(1, &p, &r, &c, TX_CHECKSUM_RESYNC, {}, parallel, nullptr));
  Ok(tx_master_decode(1, &p, &r, &m, parallel, nullptr));
  Ok(tx_master_resync(1, &p, &m, TX_RESYNC_STALE, {}, parallel, nullptr));
  const tx_tensor to = Filled(&casted, kNumel, TX_F16);
  tx_cast_args cast = TX_CAST_ARGS_INIT;
  cast.n = 1;
  cast.srcs = &m;
  cast.dsts = &to;
  cast.rounding = TX_STOCHASTIC;
  Ok(tx_cast(&cast, parallel, nullptr));
  return {params.copy(), masters.copy(), remainders.copy(), checksums.copy(), casted.copy()};
}

// Decisions and compression, which run on the calling thread.
Outputs Decisions(const tx_parallel *) {
  tx_policy_args args = TX_POLICY_ARGS_INIT;
  args.model_dtype = TX_BF16;
  tx_policy policy = TX_POLICY_INIT;
  Ok(tx_policy_resolve(&args, &policy, nullptr, 0, nullptr));
  std::vector<uint8_t> table(16384);
  (void)tx_policy_describe(&policy, nullptr, reinterpret_cast<char *>(table.data()), 16384);
  tx_error error = {};
  tx_dtype dtype;
  EXPECT_EQ(tx_dtype_parse("bfloat17", &dtype, &error), TX_ERROR_UNKNOWN_DTYPE);
  table.insert(table.end(), error.message, error.message + std::strlen(error.message));
  Bytes value_bytes, message_bytes;
  const tx_tensor values = Filled(&value_bytes, 100 * TX_BLOCK, TX_BF16);
  const tx_tensor message = Filled(&message_bytes, tx_compressed_bytes(values.numel), TX_U8);
  int64_t rest = 0;
  Ok(tx_compress(values, message, &rest, nullptr));
  Ok(tx_expand(message, values, &rest, nullptr));
  return {table, value_bytes.copy(), message_bytes.copy()};
}

const Work kWork[] = {
    {"step", [](const tx_parallel *p) { return Step(p, false); }},
    {"staged_step", [](const tx_parallel *p) { return Step(p, true); }},
    {"bucket", Bucket},
    {"stats", Stats},
    {"masters", Masters},
    {"decisions", Decisions},
};

class TwoCallers : public testing::TestWithParam<Work> {};

TEST_P(TwoCallers, GetTheBitsOfOneThatIsAlone) {
  const Outputs expected = GetParam().run(nullptr);
  Outputs found[2];
  std::vector<std::thread> callers;
  for (Outputs &mine : found) {
    callers.emplace_back([&mine] {
      Threads four(4);
      mine = GetParam().run(four.parallel());
    });
  }
  // Meanwhile a third thread switches the instruction set.
  for (int32_t i = 0; tx_isa_name(i); i++)
    EXPECT_EQ(tx_isa_select(tx_isa_name(i), nullptr), TX_OK);
  EXPECT_EQ(tx_isa_select(nullptr, nullptr), TX_OK);
  for (std::thread &caller : callers)
    caller.join();
  for (const Outputs &mine : found)
    EXPECT_TRUE(mine == expected);
}
INSTANTIATE_TEST_SUITE_P(Threads, TwoCallers, testing::ValuesIn(kWork),
                         [](const auto &info) { return std::string(info.param.name); });

}  // namespace
