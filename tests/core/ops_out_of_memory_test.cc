// Lets each memory request of each operator fail once: the call has to return TX_ERROR_OUT_OF_MEMORY and change no
// byte. tests/package/test_out_of_memory_tables.py checks that every public function that may allocate is in this table
// or in that of another *_out_of_memory_test.cc.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "csrc/torch_ext_advanced.h"
#include "tests/core/adamw_call.h"

#ifndef TX_SANITIZED
#include "tests/core/refuse_memory.h"

namespace {

using adamw_call::Bytes;
using adamw_call::Call;
using adamw_call::Combo;
using adamw_call::Param;
using refuse_memory::Attempt;

constexpr int64_t kNumel = 40000;
constexpr int64_t kBlocks = (kNumel + 127) / 128;

// Everything that a call may change: a parameter with an fp32 master and one with a remainder, both with checksums and
// with weights that were written from outside; and memory for other tensors.
struct Model {
  Param bf16{adamw_call::kBf16, kNumel}, remainder{adamw_call::kRemainder, kNumel};
  Bytes checksums[2] = {Bytes(10 * 8), Bytes(40 * 8)};
  Bytes room{12 * kNumel};
  int64_t used = 0;
  int64_t resynced = 0, skipped = 0, stale[2] = {0, 0};
  float steps[2] = {3.0f, 3.0f};

  Model() {
    for (Param *p : {&bf16, &remainder})
      p->Fill(3);
    for (int64_t i = 0; i < room.size(); i++)
      room.data()[i] = static_cast<uint8_t>(i * 7 & 0x3F); /* finite numbers in any dtype */
    Attempt attempt(-1);
    EXPECT_EQ(Checksum(TX_CHECKSUM_RENEW, attempt), TX_OK);
    for (Param *p : {&bf16, &remainder})
      for (int64_t i = 0; i < p->n; i += 100)
        p->param.data()[2 * i] ^= 0x40;
  }
  tx_tensor Take(int64_t numel, tx_dtype dtype) {
    int64_t size = 0;
    EXPECT_EQ(tx_dtype_size(dtype, &size, nullptr), TX_OK);
    const tx_tensor t = {room.data() + used, numel, dtype, 0};
    used += numel * size;
    EXPECT_LE(used, room.size());
    return t;
  }
  tx_status Checksum(int32_t mode, Attempt &attempt) {
    const tx_tensor params[] = {T(bf16.param, TX_BF16), T(remainder.param, TX_BF16)};
    const tx_tensor masters[] = {T(bf16.master, TX_F32), T(remainder.master, TX_I16)};
    const tx_tensor seen[] = {{checksums[0].data(), 10, TX_I64, 0}, {checksums[1].data(), 40, TX_I64, 0}};
    return attempt([&](const tx_parallel *parallel) {
      return tx_master_checksum(2, params, masters, seen, mode, {stale, 2, TX_I64, 0}, parallel, nullptr);
    });
  }
  std::vector<std::vector<uint8_t>> State() const {
    std::vector<std::vector<uint8_t>> all = bf16.State();
    for (const auto &bytes : remainder.State())
      all.push_back(bytes);
    for (const Bytes &w : checksums)
      all.push_back(w.copy());
    all.push_back(room.copy());
    for (const int64_t count :
         {resynced, skipped, stale[0], stale[1], static_cast<int64_t>(steps[0]), static_cast<int64_t>(steps[1])})
      all.push_back(std::vector<uint8_t>(reinterpret_cast<const uint8_t *>(&count),
                                         reinterpret_cast<const uint8_t *>(&count) + 8));
    return all;
  }
};

struct Operation {
  const char *name;
  const char *function;
  bool allocates;
  tx_status (*run)(Model &model, Attempt &attempt);
};

enum class How { kStep, kCheck, kStaged };

tx_status Step(Model &model, int32_t on_external_write, Attempt &attempt, How how) {
  Call call;
  call.Add(model.bf16);
  call.Add(model.remainder);
  const tx_tensor seen[] = {{model.checksums[0].data(), 10, TX_I64, 0}, {model.checksums[1].data(), 40, TX_I64, 0}};
  call.Args();
  call.args.checksums = seen;
  call.args.resynced = {&model.resynced, 1, TX_I64, 0};
  call.args.skipped = {&model.skipped, 1, TX_I64, 0};
  call.args.on_external_write = on_external_write;
  alignas(64) static uint8_t memory[3 * 4096 * 4];
  tx_staging staging = TX_STAGING_INIT;
  staging.memory = memory;
  staging.bytes = sizeof memory;
  staging.batch = 4096;
  return attempt([&](const tx_parallel *parallel) {
    if (how == How::kStaged) return tx_adamw_offloaded(&call.args, &staging, parallel, nullptr);
    if (how == How::kCheck) return tx_adamw_check(&call.args, nullptr);
    return tx_adamw(&call.args, parallel, nullptr);
  });
}

tx_status Bucket(Model &model, Attempt &attempt, bool pack) {
  const int64_t offsets[] = {0, kBlocks * TX_BLOCK};
  const tx_tensor grads[] = {T(model.bf16.grad, TX_BF16), T(model.remainder.grad, TX_BF16)};
  tx_bucket_pack_args args = TX_BUCKET_PACK_ARGS_INIT;
  args.n = 2;
  args.grads = grads;
  args.offsets = offsets;
  args.bucket = model.Take(2 * kBlocks * TX_BLOCK, TX_U8);
  args.scales = model.Take(2 * kBlocks, TX_U8);
  return attempt([&](const tx_parallel *parallel) {
    return pack ? tx_bucket_pack(&args, parallel, nullptr)
                : tx_bucket_unpack(args.bucket, args.scales, 2, offsets, grads, parallel, nullptr);
  });
}

tx_status Reduce(Model &model, Attempt &attempt) {
  const tx_tensor chunks[] = {model.Take(kNumel, TX_BF16), model.Take(kNumel, TX_BF16)};
  tx_bucket_reduce_args args = TX_BUCKET_REDUCE_ARGS_INIT;
  args.n = 2;
  args.chunks = chunks;
  args.shard = model.Take(kNumel, TX_F32);
  args.stats = model.Take(TX_STATS_LEN, TX_I64);
  return attempt([&](const tx_parallel *parallel) { return tx_bucket_reduce(&args, parallel, nullptr); });
}

tx_status Cast(Model &model, Attempt &attempt) {
  const tx_tensor srcs[] = {T(model.bf16.param, TX_BF16)}, dsts[] = {model.Take(kNumel, TX_U8)};
  const tx_tensor scales[] = {model.Take(kBlocks, TX_U8)};
  tx_cast_args args = TX_CAST_ARGS_INIT;
  args.n = 1;
  args.srcs = srcs;
  args.dsts = dsts;
  args.dst_scales = scales;
  return attempt([&](const tx_parallel *parallel) { return tx_cast(&args, parallel, nullptr); });
}

tx_status Master(Model &model, Attempt &attempt, bool encode) {
  const tx_tensor params[] = {model.Take(kNumel, TX_BF16)}, masters[] = {model.Take(kNumel, TX_F32)};
  const tx_tensor remainders[] = {model.Take(kNumel, TX_I16)};
  return attempt([&](const tx_parallel *parallel) {
    return encode ? tx_master_encode(1, masters, params, remainders, parallel, nullptr)
                  : tx_master_decode(1, params, remainders, masters, parallel, nullptr);
  });
}

tx_status Compress(Model &model, Attempt &attempt, bool expand) {
  const tx_tensor values = model.Take(kBlocks * TX_BLOCK, TX_BF16);
  const tx_tensor message = model.Take(tx_compressed_bytes(values.numel), TX_U8);
  int64_t rest = 0;
  return attempt([&](const tx_parallel *) {
    return expand ? tx_expand(message, values, &rest, nullptr) : tx_compress(values, message, &rest, nullptr);
  });
}

tx_status MuonMomentum(Model &model, Attempt &attempt) {
  const tx_tensor grads[] = {T(model.bf16.grad, TX_BF16)}, momentums[] = {model.Take(kNumel, TX_U8)};
  const tx_tensor scales[] = {model.Take(kBlocks, TX_U8)}, works[] = {model.Take(kNumel, TX_F32)};
  const tx_tensor steps[] = {{&model.steps[0], 1, TX_F32, 0}};
  tx_muon_momentum_args args = TX_MUON_MOMENTUM_ARGS_INIT;
  args.n = 1;
  args.grads = grads;
  args.momentums = momentums;
  args.scales = scales;
  args.updates = works;
  args.steps = steps;
  return attempt([&](const tx_parallel *parallel) { return tx_muon_momentum(&args, parallel, nullptr); });
}

// The update of both parameters of the model.
tx_status MuonUpdate(Model &model, int32_t on_external_write, Attempt &attempt) {
  const tx_tensor params[] = {T(model.bf16.param, TX_BF16), T(model.remainder.param, TX_BF16)};
  const tx_tensor masters[] = {T(model.bf16.master, TX_F32), T(model.remainder.master, TX_I16)};
  const tx_tensor checksums[] = {{model.checksums[0].data(), 10, TX_I64, 0},
                                 {model.checksums[1].data(), 40, TX_I64, 0}};
  const tx_tensor updates[] = {model.Take(kNumel, TX_BF16), model.Take(kNumel, TX_BF16)};
  const tx_tensor steps[] = {{&model.steps[0], 1, TX_F32, 0}, {&model.steps[1], 1, TX_F32, 0}};
  const tx_muon_part parts[] = {{0, 0}, {1, 0}};
  const tx_muon_rate rates[] = {{1e-2, 1e-3}, {1e-2, 1e-3}};
  tx_muon_update_args args = TX_MUON_UPDATE_ARGS_INIT;
  args.n = 2;
  args.params = params;
  args.updates = updates;
  args.masters = masters;
  args.checksums = checksums;
  args.steps = steps;
  args.n_parts = 2;
  args.parts = parts;
  args.rates = rates;
  args.resynced = {&model.resynced, 1, TX_I64, 0};
  args.on_external_write = on_external_write;
  return attempt([&](const tx_parallel *parallel) { return tx_muon_update(&args, parallel, nullptr); });
}

const Operation kOperations[] = {
    {"step", "tx_adamw", true, [](Model &m, Attempt &a) { return Step(m, TX_EXTERNAL_IGNORE, a, How::kStep); }},
    {"resyncing_step", "tx_adamw", true,
     [](Model &m, Attempt &a) { return Step(m, TX_EXTERNAL_RESYNC, a, How::kStep); }},
    {"looking_step", "tx_adamw", true, [](Model &m, Attempt &a) { return Step(m, TX_EXTERNAL_CHECK, a, How::kStep); }},
    {"checked_step", "tx_adamw_check", true,
     [](Model &m, Attempt &a) { return Step(m, TX_EXTERNAL_RESYNC, a, How::kCheck); }},
    {"staged_step", "tx_adamw_offloaded", true,
     [](Model &m, Attempt &a) { return Step(m, TX_EXTERNAL_RESYNC, a, How::kStaged); }},
    {"groups", "tx_adamw_check_groups", false,
     [](Model &, Attempt &a) {
       const tx_adamw_group group = {-1, 0.9, 0.999, 1e-8, 0.1, 0, 1};
       return a([&](const tx_parallel *) { return tx_adamw_check_groups(&group, 1, nullptr, nullptr); });
     }},
    {"checksum_resync", "tx_master_checksum", true,
     [](Model &m, Attempt &a) { return m.Checksum(TX_CHECKSUM_RESYNC, a); }},
    {"checksum_renew", "tx_master_checksum", true,
     [](Model &m, Attempt &a) { return m.Checksum(TX_CHECKSUM_RENEW, a); }},
    {"checksum_check", "tx_master_checksum", true,
     [](Model &m, Attempt &a) { return m.Checksum(TX_CHECKSUM_CHECK, a); }},
    {"resync", "tx_master_resync", true,
     [](Model &m, Attempt &a) {
       const tx_tensor params[] = {T(m.bf16.param, TX_BF16)}, masters[] = {T(m.bf16.master, TX_F32)};
       return a([&](const tx_parallel *p) {
         return tx_master_resync(1, params, masters, TX_RESYNC_ALL, {m.stale, 1, TX_I64, 0}, p, nullptr);
       });
     }},
    {"encode", "tx_master_encode", true, [](Model &m, Attempt &a) { return Master(m, a, true); }},
    {"decode", "tx_master_decode", true, [](Model &m, Attempt &a) { return Master(m, a, false); }},
    {"statistics", "tx_grad_stats", true,
     [](Model &m, Attempt &a) {
       const tx_tensor stats = m.Take(TX_STATS_LEN, TX_I64), grads[] = {T(m.bf16.grad, TX_BF16)};
       return a([&](const tx_parallel *p) { return tx_grad_stats(1, grads, stats, {}, p, nullptr); });
     }},
    {"norm", "tx_grad_norm", false,
     [](Model &m, Attempt &a) {
       const tx_tensor stats = m.Take(TX_STATS_LEN, TX_I64), norm = m.Take(1, TX_F32), coef = m.Take(1, TX_F32);
       return a([&](const tx_parallel *) { return tx_grad_norm(stats, {}, 1.0, norm, coef, {}, nullptr); });
     }},
    {"pack", "tx_bucket_pack", true, [](Model &m, Attempt &a) { return Bucket(m, a, true); }},
    {"unpack", "tx_bucket_unpack", true, [](Model &m, Attempt &a) { return Bucket(m, a, false); }},
    {"accumulate", "tx_bucket_accumulate", true,
     [](Model &m, Attempt &a) {
       const tx_tensor sums[] = {m.Take(kNumel, TX_F32)}, grads[] = {T(m.bf16.grad, TX_BF16)};
       return a([&](const tx_parallel *p) { return tx_bucket_accumulate(1, sums, grads, p, nullptr); });
     }},
    {"reduce", "tx_bucket_reduce", true, Reduce},
    {"cast", "tx_cast", true, Cast},
    {"compress", "tx_compress", false, [](Model &m, Attempt &a) { return Compress(m, a, false); }},
    {"expand", "tx_expand", false, [](Model &m, Attempt &a) { return Compress(m, a, true); }},
    {"copy", "tx_copy", false,
     [](Model &m, Attempt &a) {
       return a([&](const tx_parallel *) {
         tx_copy(m.room.data(), m.room.data() + 6 * kNumel, 6 * kNumel);
         return TX_OK;
       });
     }},
    {"copy_nontemporal", "tx_copy_nontemporal", false,
     [](Model &m, Attempt &a) {
       return a([&](const tx_parallel *) {
         tx_copy_nontemporal(m.room.data(), m.room.data() + 6 * kNumel, 6 * kNumel);
         return TX_OK;
       });
     }},
    {"muon_momentum", "tx_muon_momentum", true, MuonMomentum},
    {"muon_update", "tx_muon_update", true, [](Model &m, Attempt &a) { return MuonUpdate(m, TX_EXTERNAL_IGNORE, a); }},
    {"resyncing_muon_update", "tx_muon_update", true,
     [](Model &m, Attempt &a) { return MuonUpdate(m, TX_EXTERNAL_RESYNC, a); }},
    {"looking_muon_update", "tx_muon_update", true,
     [](Model &m, Attempt &a) { return MuonUpdate(m, TX_EXTERNAL_CHECK, a); }},
    {"isa_select", "tx_isa_select", false,
     [](Model &, Attempt &a) { return a([](const tx_parallel *) { return tx_isa_select(nullptr, nullptr); }); }},
};

class Operations : public testing::TestWithParam<Operation> {};

TEST_P(Operations, ChangeNothingWhereMemoryIsRefused) {
  int64_t refused = 0;
  for (const int64_t threads : {1, 3}) {
    for (int64_t failing = 0;; failing++) {
      ASSERT_LT(failing, 20) << "it never ends, or allocates in its loop";
      Model model;
      const auto state = model.State();
      Attempt attempt(failing, threads);
      const tx_status status = GetParam().run(model, attempt);
      if (!attempt.failed) {
        EXPECT_NE(status, TX_ERROR_OUT_OF_MEMORY);
        break;
      }
      refused++;
      EXPECT_EQ(status, TX_ERROR_OUT_OF_MEMORY);
      EXPECT_TRUE(model.State() == state) << "allocation " << failing << ", threads " << threads;
    }
  }
  EXPECT_EQ(refused > 0, GetParam().allocates) << refused;
}
INSTANTIATE_TEST_SUITE_P(OutOfMemory, Operations, testing::ValuesIn(kOperations),
                         [](const auto &info) { return info.param.name; });

}  // namespace

#endif
