// The operators with absurd numbers: they succeed or return an error, without undefined behaviour on the way (the test
// suite runs this under the sanitizers). After an error no byte is changed.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "csrc/torch_ext_advanced.h"
#include "tests/core/absurd.h"
#include "tests/core/adamw_call.h"

namespace {

using absurd::Random;
using adamw_call::Combo;

// The memory of all tensors in one block, so that it can be compared as a whole.
struct Memory {
  std::vector<uint8_t> bytes = std::vector<uint8_t>(5 << 13);
  size_t used = 0;

  explicit Memory(Random &random) {
    static const std::vector<uint8_t> pool = [] {
      std::mt19937 gen(1);
      std::vector<uint8_t> random_bytes(1 << 17);
      for (uint8_t &b : random_bytes)
        b = static_cast<uint8_t>(gen());
      return random_bytes;
    }();
    std::memcpy(bytes.data(), pool.data() + random.Below(1 << 16), bytes.size());
  }
  tx_tensor Take(int64_t numel, tx_dtype dtype) {
    const int64_t size = dtype == TX_F64 || dtype == TX_I64 ? 8 : adamw_call::Size(dtype);
    const tx_tensor t = {bytes.data() + used, numel, dtype, 0};
    used += static_cast<size_t>(size * numel);
    EXPECT_LE(used, bytes.size());
    return t;
  }
  tx_tensor I64(int64_t numel, Random &random) {
    const tx_tensor t = Take(numel, TX_I64);
    for (int64_t i = 0; i < numel; i++) {
      const int64_t x = random.OneIn(2) ? random.I64() : static_cast<int64_t>(random.Below(9));
      std::memcpy(static_cast<char *>(t.data) + 8 * i, &x, 8);
    }
    return t;
  }
  tx_tensor F32(float x) {
    const tx_tensor t = Take(1, TX_F32);
    std::memcpy(t.data, &x, 4);
    return t;
  }
};

// Changes one of these tensors in a way that has to be rejected or makes no difference.
void MakeOdd(Random &random, std::vector<tx_tensor *> tensors) {
  tx_tensor *t = tensors[random.Below(static_cast<uint32_t>(tensors.size()))];
  const uint32_t how = random.Below(4);
  if (how == 0) t->numel = random.Numel();
  if (how == 1) t->dtype = static_cast<tx_dtype>(static_cast<int8_t>(random.I32() | 64)); /* no dtype code */
  if (how == 2) t->data = nullptr;
  if (how == 3) t->numel = 0;
}

std::vector<tx_tensor *> All(std::initializer_list<std::vector<tx_tensor> *> lists) {
  std::vector<tx_tensor *> all;
  for (auto *list : lists)
    for (tx_tensor &t : *list)
      all.push_back(&t);
  return all;
}

// Calls, and checks that an error changed nothing. Returns whether the call succeeded.
template <typename Call>
bool Answered(Memory &memory, Random &random, Call call) {
  const std::vector<uint8_t> before = memory.bytes;
  tx_parallel parallel = TX_PARALLEL_INIT;
  parallel.run = [](void *, int64_t n, void (*task)(void *, int64_t), void *arg) {
    for (int64_t i = 0; i < n; i++)
      task(arg, i);
  };
  parallel.num_threads = random.I64();
  if (random.OneIn(20)) parallel.size = static_cast<uint64_t>(random.I64());
  tx_error error = {};
  const tx_status status = call(random.OneIn(3) ? nullptr : &parallel, &error);
  if (status == TX_OK) return true;
  EXPECT_NE(std::string(error.message), "");
  EXPECT_TRUE(memory.bytes == before) << error.message;
  return false;
}

struct Adamw : AdamwLists {
  std::vector<tx_tensor> lrs;
  tx_adamw_group group = {1e-2, 0.9, 0.999, 1e-8, 0.1, 0, 1};
  tx_adamw_args args = TX_ADAMW_ARGS_INIT;

  Adamw(Memory &memory, Random &random) {
    static const std::vector<Combo> combos = adamw_call::Combos();
    const int64_t numels[] = {0, 1, 127, 300, 1100};
    for (uint32_t i = 1 + random.Below(2); i > 0; i--) {
      const Combo c = combos[random.Below(static_cast<uint32_t>(combos.size()))];
      const int64_t n = random.Of(numels);
      params.push_back(memory.Take(n, c.param));
      grads.push_back(memory.Take(n, c.grad));
      exp_avgs.push_back(memory.Take(n, c.exp_avg));
      exp_avg_sqs.push_back(memory.Take(n, c.exp_avg_sq));
      masters.push_back(memory.Take(c.master ? n : 0, c.master));
      const int64_t scaled = tx_moment_is_scaled(c.exp_avg) + tx_moment_is_scaled(c.exp_avg_sq);
      scales.push_back(memory.Take(scaled * ((n + 127) / 128), TX_U8));
      const int64_t block = c.master == TX_I16 ? TX_CHECKSUM : TX_SAMPLED;
      checksums.push_back(memory.Take(c.master && random.OneIn(2) ? (n + block - 1) / block : 0, TX_I64));
      steps.push_back(memory.F32(random.OneIn(20) ? 1e30f : static_cast<float>(random.Below(100))));
      meta.push_back({random.I64(), random.OneIn(2) ? 0 : random.I64() & INT64_MAX, 0});
    }
    args.skipped = memory.I64(1, random);
    args.resynced = memory.I64(1, random);
    args.found_inf = memory.F32(random.OneIn(8) ? 1.0f : 0.0f);
    args.seed = static_cast<uint64_t>(random.I64());
    args.on_external_write = static_cast<int32_t>(random.Below(3));
    lrs.push_back(memory.F32(1e-3f));
  }
  void MakeOddNumbers(Random &random) {
    double *const numbers[] = {&group.lr, &group.beta1, &group.beta2, &group.eps, &group.weight_decay, &group.maximize};
    int32_t *const codes[] = {&args.moment_rounding, &args.weight_rounding, &args.on_external_write};
    const uint32_t how = random.Below(5);
    if (how == 0) *random.Of(numbers) = random.F64();
    if (how == 1) *random.Of(codes) = random.I32();
    if (how == 2) meta[0].start = random.I64();
    if (how == 3) meta[0].group = random.I64() | 1;
    if (how == 4) MakeOdd(random, {&args.skipped, &args.resynced, &args.found_inf, &lrs[0]});
  }
  const tx_adamw_args *Args(Random &random) {
    const bool negative = random.OneIn(30);
    Lend(&args);
    if (negative) args.n = random.Negative();
    args.n_groups = random.OneIn(30) ? random.Negative() : 1;
    args.checksums = random.OneIn(4) ? nullptr : checksums.data();
    args.groups = &group;
    args.lrs = random.OneIn(2) ? lrs.data() : nullptr;
    if (random.OneIn(40)) args.size = static_cast<uint64_t>(random.I64());
    return &args;
  }
};

TEST(AbsurdNumbers, StepsAreTakenOrRefused) {
  uint32_t taken = 0;
  for (uint32_t i = 0; i < absurd::kRounds; i++) {
    Random random(i);
    Memory memory(random);
    Adamw call(memory, random);
    if (random.OneIn(2)) MakeOdd(random, call.Tensors());
    if (random.OneIn(2)) call.MakeOddNumbers(random);
    const tx_adamw_args *args = call.Args(random);
    const bool steps = random.OneIn(4);
    taken += Answered(memory, random, [&](const tx_parallel *parallel, tx_error *error) {
      return steps ? tx_adamw_check(args, error) : tx_adamw(args, parallel, error);
    });
    ASSERT_FALSE(HasFailure()) << i;
  }
  EXPECT_GT(taken, absurd::kRounds / 10);
}

// Staging memory has the size that the arguments say; no batch size may make the step use more.
TEST(AbsurdNumbers, StagedStepsAreTakenOrRefused) {
  uint32_t taken = 0;
  for (uint32_t i = 0; i < absurd::kRounds; i++) {
    Random random(i);
    Memory memory(random);
    Adamw call(memory, random);
    if (random.OneIn(4)) call.MakeOddNumbers(random);
    std::vector<uint8_t> batches(8 * 4096 * 8 + 64);
    tx_staging staging = TX_STAGING_INIT;
    staging.memory = batches.data() + (64 - reinterpret_cast<uintptr_t>(batches.data()) % 64) % 64;
    staging.bytes = random.OneIn(8) ? random.Negative() : 8 * 4096 * 8;
    const int64_t batch = random.OneIn(2) ? random.I64() : int64_t{1} << random.Below(64);
    staging.batch = random.OneIn(2) ? 4096 : random.OneIn(4) ? batch : batch & ~int64_t{4095};
    staging.slots = random.OneIn(2) ? 1 : random.I32();
    if (random.OneIn(2)) staging.slots = static_cast<int32_t>(1 + random.Below(8));
    const tx_adamw_args *args = call.Args(random);
    taken += Answered(memory, random, [&](const tx_parallel *parallel, tx_error *error) {
      return tx_adamw_offloaded(args, &staging, parallel, error);
    });
    ASSERT_FALSE(HasFailure()) << i;
  }
  EXPECT_GT(taken, absurd::kRounds / 20);
}

TEST(AbsurdNumbers, MastersAreLookedAtOrRefused) {
  uint32_t done = 0;
  for (uint32_t i = 0; i < absurd::kRounds; i++) {
    Random random(i);
    Memory memory(random);
    std::vector<tx_tensor> params = {memory.Take(300, TX_BF16), memory.Take(1100, TX_BF16)};
    std::vector<tx_tensor> masters = {memory.Take(300, TX_F32), memory.Take(1100, TX_I16)};
    std::vector<tx_tensor> decoded = {memory.Take(300, TX_F32), memory.Take(1100, TX_F32)};
    std::vector<tx_tensor> remainders = {memory.Take(300, TX_I16), masters[1]};
    std::vector<tx_tensor> checksums = {memory.Take(1, TX_I64), memory.Take(2, TX_I64)};
    std::vector<tx_tensor> counts = {memory.I64(2, random)};
    if (random.OneIn(3)) MakeOdd(random, All({&params, &masters, &decoded, &remainders, &checksums, &counts}));
    const int64_t n = random.OneIn(10) ? random.Negative() : 2;
    const int32_t mode = random.OneIn(10) ? random.I32() : static_cast<int32_t>(random.Below(3));
    const uint32_t which = random.Below(4);
    done += Answered(memory, random, [&](const tx_parallel *parallel, tx_error *error) {
      if (which == 0) return tx_master_resync(n, params.data(), masters.data(), mode, counts[0], parallel, error);
      if (which == 1)
        return tx_master_checksum(n, params.data(), masters.data(), checksums.data(), mode, counts[0], parallel, error);
      if (which == 2) return tx_master_encode(n, decoded.data(), params.data(), remainders.data(), parallel, error);
      return tx_master_decode(n, params.data(), remainders.data(), decoded.data(), parallel, error);
    });
    ASSERT_FALSE(HasFailure()) << i;
  }
  EXPECT_GT(done, absurd::kRounds / 10);
}

// Statistics may come from other ranks, so their limbs and counts may have any value.
TEST(AbsurdNumbers, StatisticsAreTakenOrRefused) {
  uint32_t done = 0;
  for (uint32_t i = 0; i < absurd::kRounds; i++) {
    Random random(i);
    Memory memory(random);
    std::vector<tx_tensor> grads = {memory.Take(300, TX_BF16), memory.Take(1100, TX_F32)};
    std::vector<tx_tensor> more = {memory.I64(TX_STATS_LEN, random),
                                   memory.I64(1, random),
                                   memory.F32(1.0f),
                                   memory.F32(0.0f),
                                   memory.F32(0.0f),
                                   memory.F32(0.0f)};
    if (random.OneIn(3)) MakeOdd(random, All({&grads, &more}));
    const int64_t n = random.OneIn(10) ? random.Negative() : 2;
    const double max_norm = random.OneIn(4) ? random.F64() : 1.0;
    const bool norm = random.OneIn(2);
    done += Answered(memory, random, [&](const tx_parallel *parallel, tx_error *error) {
      return norm ? tx_grad_norm(more[0], more[2], max_norm, more[3], more[4], more[5], error)
                  : tx_grad_stats(n, grads.data(), more[0], more[1], parallel, error);
    });
    ASSERT_FALSE(HasFailure()) << i;
  }
  EXPECT_GT(done, absurd::kRounds / 10);
}

TEST(AbsurdNumbers, BucketsAreFilledOrRefused) {
  uint32_t done = 0;
  for (uint32_t i = 0; i < absurd::kRounds; i++) {
    Random random(i);
    Memory memory(random);
    std::vector<tx_tensor> grads = {memory.Take(300, TX_BF16), memory.Take(500, TX_F32)};
    std::vector<tx_tensor> sums = {memory.Take(300, TX_F32), memory.Take(500, TX_BF16)};
    const bool scaled = random.OneIn(2);
    std::vector<tx_tensor> bucket = {memory.Take(1024, scaled ? TX_U8 : TX_F32)};
    std::vector<tx_tensor> scales = {memory.Take(scaled ? 8 : 0, TX_U8)};
    std::vector<tx_tensor> others = {memory.Take(1024, TX_F32), memory.I64(TX_STATS_LEN, random)};
    int64_t offsets[] = {0, 384};
    if (random.OneIn(4)) offsets[random.Below(2)] = random.I64();
    if (random.OneIn(3)) MakeOdd(random, All({&grads, &sums, &bucket, &scales, &others}));
    tx_bucket_pack_args pack = TX_BUCKET_PACK_ARGS_INIT;
    pack.n = random.OneIn(10) ? random.Negative() : 2;
    pack.grads = grads.data();
    pack.offsets = offsets;
    pack.bucket = bucket[0];
    pack.scales = scales[0];
    pack.step = random.I64();
    if (random.OneIn(10)) pack.rounding = random.I32();
    tx_bucket_reduce_args reduce = TX_BUCKET_REDUCE_ARGS_INIT;
    reduce.n = random.OneIn(10) ? random.Negative() : 1;
    reduce.chunks = bucket.data();
    reduce.scales = scaled ? scales.data() : nullptr;
    reduce.shard = others[0];
    reduce.stats = others[1];
    if (random.OneIn(4)) reduce.scale = random.F64();
    reduce.accumulate = random.OneIn(8) ? random.I32() : static_cast<int32_t>(random.Below(2));
    const uint32_t which = random.Below(4);
    done += Answered(memory, random, [&](const tx_parallel *parallel, tx_error *error) {
      if (which == 0) return tx_bucket_pack(&pack, parallel, error);
      if (which == 1) return tx_bucket_unpack(pack.bucket, pack.scales, pack.n, offsets, grads.data(), parallel, error);
      if (which == 2) return tx_bucket_accumulate(pack.n, sums.data(), grads.data(), parallel, error);
      return tx_bucket_reduce(&reduce, parallel, error);
    });
    ASSERT_FALSE(HasFailure()) << i;
  }
  EXPECT_GT(done, absurd::kRounds / 10);
}

TEST(AbsurdNumbers, TensorsAreCastCompressedAndCopiedOrRefused) {
  uint32_t done = 0;
  for (uint32_t i = 0; i < absurd::kRounds; i++) {
    Random random(i);
    Memory memory(random);
    std::vector<tx_tensor> values = {memory.Take(1024, TX_BF16)}, to = {memory.Take(1024, TX_U8)};
    std::vector<tx_tensor> scales = {memory.Take(8, TX_U8)};
    std::vector<tx_tensor> message = {memory.Take(tx_compressed_bytes(1024), TX_U8)};
    const int64_t escapes = random.I64();
    std::memcpy(message[0].data, &escapes, 8);
    if (random.OneIn(3)) MakeOdd(random, All({&values, &to, &scales, &message}));
    const tx_meta meta = {random.I64(), random.I64(), random.I64()};
    tx_cast_args cast = TX_CAST_ARGS_INIT;
    cast.n = random.OneIn(10) ? random.Negative() : 1;
    cast.srcs = values.data();
    cast.dsts = to.data();
    cast.dst_scales = scales.data();
    cast.meta = &meta;
    cast.step = random.I64();
    cast.format = random.OneIn(8) ? random.I32() : static_cast<int32_t>(random.Below(2));
    cast.rounding = random.OneIn(8) ? random.I32() : static_cast<int32_t>(random.Below(3));
    const uint32_t which = random.Below(5);
    const int64_t negative = -1 - (random.I64() & INT64_MAX);
    int64_t rest;
    done += Answered(memory, random, [&](const tx_parallel *parallel, tx_error *error) {
      if (which == 0) return tx_compress(values[0], message[0], &rest, error);
      if (which == 1) return tx_expand(message[0], values[0], &rest, error);
      if (which == 2) tx_copy(memory.bytes.data(), memory.bytes.data() + 64, negative);
      if (which == 3) tx_copy_nontemporal(memory.bytes.data(), memory.bytes.data() + 64, negative);
      return tx_cast(&cast, parallel, error);
    });
    ASSERT_FALSE(HasFailure()) << i;
  }
  EXPECT_GT(done, absurd::kRounds / 20);
}

}  // namespace
