// Each allocation of a call fails once: the call fails, and no byte is changed.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "csrc/torch_ext_advanced.h"
#include "tests/core/adamw_call.h"

#ifndef TX_SANITIZED /* which have allocators of their own */

namespace {
int64_t allocations_left = -1; /* before one fails; -1: none does */
bool Fails() {
  return allocations_left >= 0 && allocations_left-- == 0;
}
}  // namespace

extern "C" {
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t n, size_t bytes);
void *malloc(size_t bytes) {
  return Fails() ? nullptr : __libc_malloc(bytes);
}
void *calloc(size_t n, size_t bytes) {
  return Fails() ? nullptr : __libc_calloc(n, bytes);
}
}

namespace {

using adamw_call::Bytes;
using adamw_call::Call;
using adamw_call::Combo;
using adamw_call::Param;

// How the library is called: its allocation number `failing` fails, if it makes so many.
struct Attempt {
  int64_t failing = -1;
  bool failed = false;
  tx_parallel parallel = TX_PARALLEL_INIT;

  explicit Attempt(int64_t failing, int64_t threads = 1) : failing(failing) {
    parallel.num_threads = threads;
    parallel.run = [](void *, int64_t n, void (*task)(void *, int64_t), void *arg) {
      for (int64_t i = 0; i < n; i++)
        task(arg, i);
    };
  }
  template <typename Function>
  tx_status operator()(Function function) {
    allocations_left = failing;
    const tx_status status = function(&parallel);
    failed = failing >= 0 && allocations_left < 0;
    allocations_left = -1;
    return status;
  }
};

// Parameters beside fp32 masters and beside remainders, each with its checksums, and somebody has written to all.
struct Model {
  Param bf16{adamw_call::kBf16, 40000}, remainder{adamw_call::kRemainder, 40000};
  Bytes checksums[2] = {Bytes(10 * 8), Bytes(40 * 8)};
  int64_t resynced = 0, skipped = 0, stale[2] = {0, 0};

  Model() {
    for (Param *p : {&bf16, &remainder})
      p->Fill(3);
    Attempt attempt(-1);
    EXPECT_EQ(Checksum(TX_CHECKSUM_RENEW, attempt), TX_OK);
    for (Param *p : {&bf16, &remainder})
      for (int64_t i = 0; i < p->n; i += 100)
        p->param.data()[2 * i] ^= 0x40;
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
    for (const int64_t count : {resynced, skipped, stale[0], stale[1]})
      all.push_back(std::vector<uint8_t>(reinterpret_cast<const uint8_t *>(&count),
                                         reinterpret_cast<const uint8_t *>(&count) + 8));
    return all;
  }
};

struct Operation {
  const char *name;
  tx_status (*run)(Model &model, Attempt &attempt);
};

tx_status Step(Model &model, int32_t on_external_write, Attempt &attempt, bool staged) {
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
    return staged ? tx_adamw_offloaded(&call.args, &staging, parallel, nullptr)
                  : tx_adamw(&call.args, parallel, nullptr);
  });
}

const Operation kOperations[] = {
    {"step", [](Model &m, Attempt &a) { return Step(m, TX_EXTERNAL_IGNORE, a, false); }},
    {"resyncing_step", [](Model &m, Attempt &a) { return Step(m, TX_EXTERNAL_RESYNC, a, false); }},
    {"check", [](Model &m, Attempt &a) { return Step(m, TX_EXTERNAL_CHECK, a, false); }},
    {"staged_step", [](Model &m, Attempt &a) { return Step(m, TX_EXTERNAL_RESYNC, a, true); }},
    {"checksum_resync", [](Model &m, Attempt &a) { return m.Checksum(TX_CHECKSUM_RESYNC, a); }},
    {"checksum_renew", [](Model &m, Attempt &a) { return m.Checksum(TX_CHECKSUM_RENEW, a); }},
    {"checksum_check", [](Model &m, Attempt &a) { return m.Checksum(TX_CHECKSUM_CHECK, a); }},
    {"resync",
     [](Model &m, Attempt &a) {
       const tx_tensor params[] = {T(m.bf16.param, TX_BF16)}, masters[] = {T(m.bf16.master, TX_F32)};
       return a([&](const tx_parallel *p) {
         return tx_master_resync(1, params, masters, TX_RESYNC_ALL, {m.stale, 1, TX_I64, 0}, p, nullptr);
       });
     }},
    {"statistics",
     [](Model &m, Attempt &a) {
       static int64_t stats[TX_STATS_LEN];
       const tx_tensor grads[] = {T(m.bf16.grad, TX_BF16)};
       return a([&](const tx_parallel *p) {
         return tx_grad_stats(1, grads, {stats, TX_STATS_LEN, TX_I64, 0}, {}, p, nullptr);
       });
     }},
};

class Operations : public testing::TestWithParam<Operation> {};

TEST_P(Operations, ChangeNothingWhereMemoryIsRefused) {
  for (const int64_t threads : {1, 3}) {
    for (int64_t failing = 0;; failing++) {
      ASSERT_LT(failing, 20) << "it never ends, or allocates in its loop";
      Model model;
      const auto state = model.State();
      Attempt attempt(failing, threads);
      const tx_status status = GetParam().run(model, attempt);
      if (!attempt.failed) {
        EXPECT_NE(status, TX_ERROR_OUT_OF_MEMORY);
        EXPECT_GT(failing, 0);
        break;
      }
      EXPECT_EQ(status, TX_ERROR_OUT_OF_MEMORY);
      EXPECT_TRUE(model.State() == state) << "allocation " << failing << ", threads " << threads;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(OutOfMemory, Operations, testing::ValuesIn(kOperations),
                         [](const auto &info) { return info.param.name; });

}  // namespace

#endif
