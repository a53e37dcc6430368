// Runs the step on the (emulated) device and on the CPU with copies of the same parameters, and compares them byte for
// byte.
#ifndef TESTS_CUDA_ADAMW_PAIR_H
#define TESTS_CUDA_ADAMW_PAIR_H

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <vector>

#include "csrc/torch_ext_cuda.h"
#include "tests/core/adamw_call.h"

namespace adamw_pair {

using adamw_call::Bytes;
using adamw_call::Call;
using adamw_call::Combo;
using adamw_call::kBf16;
using adamw_call::kBlocks;
using adamw_call::kF32;
using adamw_call::kRemainder;
using adamw_call::Param;

inline int64_t Block(const Combo &c) {
  return c.master == TX_I16 ? TX_CHECKSUM : TX_SAMPLED;
}

/* A parameter with its checksums. */
struct Watched {
  Param param;
  Bytes checksums;

  Watched(const Combo &c, int64_t n, int64_t misalign, bool watched)
      : param(c, n, misalign), checksums(watched && c.master ? (n + Block(c) - 1) / Block(c) * 8 : 0, misalign) {}
  tx_tensor Checksums() { return {checksums.data(), checksums.size() / 8, TX_I64, 0}; }
  // An external write: changes a weight a little and keeps its sign.
  void Write(int64_t i) { param.param.data()[2 * i] ^= 1; }
};

/* A list of parameters, with everything else that a step over them reads and counts. */
struct Side {
  std::deque<Watched> params;
  alignas(8) int64_t skipped = 0, resynced = 0;

  void Add(const Combo &c, int64_t n, int64_t misalign = 0, bool watched = false) {
    params.emplace_back(c, n, misalign, watched);
    params.back().param.Fill(static_cast<uint32_t>(params.size() * 7 + static_cast<size_t>(n)));
  }
  // Recomputes the checksums of the weights as they are, on the CPU.
  void Renew() {
    for (Watched &w : params) {
      if (w.checksums.size() == 0) continue;
      const tx_tensor weights = T(w.param.param, w.param.combo.param), master = T(w.param.master, w.param.combo.master),
                      seen = w.Checksums();
      ASSERT_EQ(tx_master_checksum(1, &weights, &master, &seen, TX_CHECKSUM_RENEW, {}, nullptr, nullptr), TX_OK);
    }
  }
  // Everything that a step may change.
  std::vector<std::vector<uint8_t>> State() const {
    std::vector<std::vector<uint8_t>> all;
    for (const Watched &w : params) {
      for (auto &bytes : w.param.State())
        all.push_back(bytes);
      all.push_back(w.checksums.copy());
    }
    return all;
  }
};

/* The arguments of one step. */
struct Step {
  adamw_call::Call call;
  std::vector<tx_tensor> checksums;

  explicit Step(Side &side, const tx_adamw_args &like = {}, const tx_adamw_group *group = nullptr) {
    int64_t id = 100;
    if (group) call.group = *group;
    if (like.size) call.args = like;
    for (Watched &w : side.params) {
      call.Add(w.param, id++);
      checksums.push_back(w.Checksums());
    }
    call.args.skipped = {&side.skipped, 1, TX_I64, 0};
    call.args.resynced = {&side.resynced, 1, TX_I64, 0};
  }
  const tx_adamw_args *Args() {
    call.Args();
    call.args.checksums = checksums.data();
    return &call.args;
  }
};

struct Pair {
  Side ours, theirs;
  std::vector<int64_t> workspace;
  tx_cuda_call call = TX_CUDA_CALL_INIT;

  void Add(const Combo &c, int64_t n, int64_t misalign = 0, bool watched = false) {
    ours.Add(c, n, misalign, watched);
    theirs.Add(c, n, misalign, watched);
  }
  void Renew() {
    ours.Renew();
    theirs.Renew();
  }
  void GiveWorkspace() {
    workspace.assign(static_cast<size_t>(tx_cuda_workspace(static_cast<int64_t>(ours.params.size()))) / 8, -1);
    call.workspace = workspace.data();
    call.workspace_bytes = static_cast<int64_t>(workspace.size()) * 8;
  }
  // Takes a step on both sides; statuses and messages must be equal.
  tx_status Take(const tx_adamw_args &like = {}, const tx_adamw_group *group = nullptr) {
    tx_error a = {}, b = {};
    Step to_ours(ours, like, group), to_theirs(theirs, like, group);
    call.device = emulated::world.current;
    const tx_status status = tx_cuda_adamw(to_ours.Args(), &call, &a);
    EXPECT_EQ(status, tx_adamw(to_theirs.Args(), nullptr, &b));
    EXPECT_STREQ(a.message, b.message);
    return status;
  }
  void NewGradients(uint32_t seed, float size) {
    for (Side *side : {&ours, &theirs})
      for (size_t i = 0; i < side->params.size(); i++)
        side->params[i].param.FillGrad(seed + static_cast<uint32_t>(i), size);
  }
  void ExpectEqual() {
    EXPECT_EQ(ours.skipped, theirs.skipped);
    EXPECT_EQ(ours.resynced, theirs.resynced);
    const auto a = ours.State(), b = theirs.State();
    static const char *const kNames[] = {"param", "exp_avg", "exp_avg_sq", "master", "scales", "step", "checksums"};
    for (size_t i = 0; i < a.size(); i++) {
      if (a[i] == b[i]) continue;
      size_t at = 0;
      while (a[i][at] == b[i][at])
        at++;
      ADD_FAILURE() << kNames[i % 7] << " of parameter " << i / 7 << " differs from byte " << at << " on";
    }
  }
};

inline tx_adamw_args Arguments() {
  tx_adamw_args args = {};
  args.size = sizeof args;
  args.moment_rounding = args.weight_rounding = TX_DITHERED;
  args.seed = 12345;
  return args;
}

inline const adamw_call::Combo kBlocksAndMasters = {TX_BF16, TX_F32, TX_BF16, TX_U8, TX_U8};
inline const adamw_call::Combo kHalf = {TX_F16, TX_F32, TX_F16, TX_F32, TX_F32};

}  // namespace adamw_pair

#endif
