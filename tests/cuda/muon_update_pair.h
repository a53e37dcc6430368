// tx_cuda_muon_update and tx_muon_update on copies of the same tensors.
#ifndef TX_TESTS_CUDA_MUON_UPDATE_PAIR_H
#define TX_TESTS_CUDA_MUON_UPDATE_PAIR_H

#include <tuple>
#include <utility>

#include "tests/cuda/both.h"

struct Weight {
  tx_dtype param, master;
};
inline const std::vector<Weight> kWeights = {{TX_F32, TX_NONE}, {TX_BF16, TX_NONE}, {TX_F16, TX_NONE},
                                             {TX_BF16, TX_F32}, {TX_F16, TX_F32},   {TX_BF16, TX_I16}};

// The arguments of one side: tensors of every size, each with several matrices.
struct Update {
  std::vector<Array> params, updates, masters, checksums, steps;
  AlignedCounts resynced{std::vector<int64_t>{0}};
  std::vector<tx_tensor> lists[5];
  std::vector<tx_meta> meta;
  std::vector<tx_muon_part> parts;
  std::vector<tx_muon_rate> rates;
  std::vector<int64_t> workspace;
  tx_cuda_call call = *Call();
  tx_muon_update_args args = TX_MUON_UPDATE_ARGS_INIT;

  Update(const Weight &w, tx_dtype update, int64_t misalign) {
    for (size_t t = 0; t < kSizes.size(); t++) {
      const int64_t n = kSizes[t], unit = w.master == TX_I16 ? TX_CHECKSUM : TX_SAMPLED;
      params.emplace_back(w.param, n, misalign).Fill(static_cast<uint32_t>(n) + 2, 0.1f);
      updates.emplace_back(update, n, misalign);
      masters.emplace_back(w.master == TX_NONE ? TX_F32 : w.master, w.master == TX_NONE ? 0 : n, misalign);
      checksums.emplace_back(TX_I64, w.master == TX_NONE ? 0 : (n + unit - 1) / unit, misalign);
      steps.push_back(Array(TX_F32, {static_cast<float>(n % 7)}));
      meta.push_back({n + 17, 128 * (n % 5), 0});
      for (int64_t i = 0; w.master == TX_F32 && i < n; i++)
        masters[t].Set(i, params[t].Get(i));
      int64_t last = -1;
      for (const int64_t begin : {int64_t{0}, n / 7, n / 2, n - 1}) {  // anywhere, also inside vectors and blocks
        if (begin <= last || begin >= n) continue;
        parts.push_back({static_cast<int64_t>(t), last = begin});
        rates.push_back({0.02 + 0.001 * static_cast<double>(parts.size()), 1e-3});
      }
    }
    workspace.resize(static_cast<size_t>(tx_cuda_workspace(static_cast<int64_t>(kSizes.size())) / 8));
    call.workspace = workspace.data();
    call.workspace_bytes = static_cast<int64_t>(workspace.size()) * 8;
  }
  const tx_muon_update_args *Args() {
    std::vector<Array> *const arrays[] = {&params, &updates, &masters, &checksums, &steps};
    for (size_t i = 0; i < std::size(arrays); i++)
      lists[i] = Tensors(*arrays[i]);
    args.n = static_cast<int64_t>(kSizes.size());
    args.params = lists[0].data();
    args.updates = lists[1].data();
    args.masters = lists[2].data();
    args.checksums = lists[3].data();
    args.steps = lists[4].data();
    args.meta = meta.data();
    args.n_parts = static_cast<int64_t>(parts.size());
    args.parts = parts.data();
    args.rates = rates.data();
    args.resynced = resynced.tensor();
    args.seed = 5;
    return &args;
  }
  // External writes to all weights of every third tensor, so that every sample shows one.
  void Spoil() {
    for (size_t t = 0; t < params.size(); t += 3)
      for (int64_t i = 0; i < params[t].size(); i++)
        params[t].Set(i, params[t].Get(i) + 0.25f);
  }
};

// Compares everything that both sides have written.
inline void ExpectSameUpdates(const Update &ours, const Update &theirs) {
  ExpectSameBytes(ours.params, theirs.params);
  ExpectSameBytes(ours.masters, theirs.masters);
  ExpectSameBytes(ours.checksums, theirs.checksums);
  ExpectSameBytes(ours.steps, theirs.steps);
  EXPECT_EQ(ours.resynced[0], theirs.resynced[0]);
}

#endif
