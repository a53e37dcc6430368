// Calls of tx_muon_momentum and tx_muon_update with all their tensors, for the tests of Muon's two operators.
#ifndef TESTS_CORE_MUON_CALLS_H
#define TESTS_CORE_MUON_CALLS_H

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <vector>

#include "csrc/torch_ext.h"
#include "tests/core/same_bits.h"

extern "C" {
#include "csrc/math/block_scale.h"
#include "csrc/math/remainder.h"
#include "csrc/ops/step.h"
}

constexpr int64_t kNumels[] = {1, 130, 5000, 0, 20000};

inline int64_t Size(tx_dtype dtype) {
  return dtype == TX_F32 ? 4 : dtype == TX_U8 ? 1 : dtype == TX_F64 || dtype == TX_I64 ? 8 : 2;
}

inline double Get(tx_dtype dtype, const uint8_t *data, int64_t i) {
  uint16_t half;
  float single;
  std::memcpy(&half, data + (Size(dtype) == 2 ? 2 * i : 0), 2);
  if (dtype == TX_BF16) return tx_f32_from_bf16(half);
  if (dtype == TX_F16) return tx_f32_from_f16(half);
  std::memcpy(&single, data + 4 * i, 4);
  return single;
}

// An allocator that aligns to a cache line: at such addresses the loops may use non-temporal stores.
template <typename T>
struct AtLine : std::allocator<T> {
  template <typename U>
  struct rebind {
    using other = AtLine<U>;
  };
  T *allocate(size_t n) { return static_cast<T *>(::operator new (n * sizeof(T), std::align_val_t{64})); }
  void deallocate(T *at, size_t) { ::operator delete (at, std::align_val_t{64}); }
};

// A list of tensors that owns their memory.
struct List {
  std::vector<std::vector<uint8_t, AtLine<uint8_t>>> memory;
  std::vector<tx_tensor> tensors;

  void Add(tx_dtype dtype, int64_t numel) {
    memory.emplace_back(static_cast<size_t>(Size(dtype) * numel + 8));
    tensors.push_back({nullptr, numel, dtype, 0});
  }
  const tx_tensor *Tensors() {
    for (size_t i = 0; i < tensors.size(); i++)
      tensors[i].data = memory[i].data();
    return tensors.data();
  }
  // Appends the bytes of the tensors with the sizes of kNumels, without those of AddMore.
  void AppendTo(Outputs *found) const {
    for (size_t t = 0; t < std::min(memory.size(), std::size(kNumels)); t++)
      found->emplace_back(memory[t].begin(), memory[t].end());
  }
  double At(size_t tensor, int64_t i) const { return Get(tensors[tensor].dtype, memory[tensor].data(), i); }
  void Put(size_t tensor, int64_t i, double value) {
    uint8_t *data = memory[tensor].data();
    const float single = static_cast<float>(value);
    uint16_t half = tx_bf16_from_f32(single);
    if (tensors[tensor].dtype == TX_F16) half = tx_f16_from_f32(single);
    if (tensors[tensor].dtype == TX_F32) {
      std::memcpy(data + 4 * i, &single, 4);
    } else {
      std::memcpy(data + 2 * i, &half, 2);
    }
  }
  void Fill(int seed, double scale) {
    std::mt19937 random(static_cast<uint32_t>(seed));
    std::normal_distribution<double> normal(0.0, scale);
    for (size_t t = 0; t < tensors.size(); t++)
      for (int64_t i = 0; i < tensors[t].numel; i++)
        Put(t, i, normal(random));
  }
};

// Matrices that start anywhere, also inside blocks and tiles.
inline std::vector<tx_muon_part> Parts() {
  std::vector<tx_muon_part> parts;
  int64_t tensor = 0;
  for (int64_t numel : kNumels) {
    for (int64_t begin : {int64_t{0}, numel / 7, numel / 2, numel - 1})
      if (numel && (parts.empty() || parts.back().tensor != tensor || parts.back().begin < begin))
        parts.push_back({tensor, begin});
    tensor++;
  }
  return parts;
}

inline int64_t EndOf(const std::vector<tx_muon_part> &parts, size_t part) {
  const int64_t tensor = parts[part].tensor;
  return part + 1 < parts.size() && parts[part + 1].tensor == tensor ? parts[part + 1].begin : kNumels[tensor];
}

// A call of tx_muon_momentum, and all its tensors.
struct Momentum {
  List grads, momentums, scales, updates, steps;
  tx_muon_momentum_args args = TX_MUON_MOMENTUM_ARGS_INIT;

  Momentum(tx_dtype grad, tx_dtype momentum, tx_dtype work) {
    for (int64_t numel : kNumels) {
      grads.Add(grad, numel);
      momentums.Add(momentum, numel);
      scales.Add(TX_U8, momentum == TX_U8 || momentum == TX_F16 ? (numel + TX_BLOCK - 1) / TX_BLOCK : 0);
      updates.Add(work, numel);
      steps.Add(TX_F32, 1);
    }
    grads.Fill(1, 1e-2);
  }
  // Adds another tensor, so large that the call's results do not fit into the caches.
  void AddMore() {
    for (List *list : {&grads, &momentums, &updates})
      list->Add(list->tensors[0].dtype, TX_STEP_CACHED);
    scales.Add(TX_U8, scales.tensors[1].numel ? TX_STEP_CACHED / TX_BLOCK : 0);
    steps.Add(TX_F32, 1);
  }
  const tx_muon_momentum_args *Args() {
    args.n = static_cast<int64_t>(grads.tensors.size());
    args.grads = grads.Tensors();
    args.momentums = momentums.Tensors();
    args.scales = scales.Tensors();
    args.updates = updates.Tensors();
    args.steps = steps.Tensors();
    return &args;
  }
  // Runs two steps; returns everything they wrote.
  Outputs Run(const Caller &call) {
    Outputs found;
    for (int step = 0; step < 2; step++) {
      grads.Fill(2 + step, 1e-2);
      for (size_t i = 0; i < std::size(kNumels); i++)
        steps.Put(i, 0, step);
      Args();
      call([&](const tx_parallel *parallel, tx_error *error) { return tx_muon_momentum(&args, parallel, error); });
      for (const List *list : {&momentums, &scales, &updates})
        list->AppendTo(&found);
    }
    return found;
  }
};

// A call of tx_muon_update, and all its tensors.
struct Update {
  List params, updates, masters, checksums, steps;
  List changed, moved, distances, emas, ema_lows, healths;
  std::vector<tx_muon_part> parts = Parts();
  std::vector<tx_muon_rate> rates;
  int64_t resynced = 0;
  tx_muon_update_args args = TX_MUON_UPDATE_ARGS_INIT;

  Update(tx_dtype param, tx_dtype master, tx_dtype update, bool checked = true) {
    for (int64_t numel : kNumels) {
      params.Add(param, numel);
      updates.Add(update, numel);
      masters.Add(master == TX_NONE ? TX_F32 : master, master == TX_NONE ? 0 : numel);
      const int64_t weights = master == TX_I16 ? TX_CHECKSUM : TX_SAMPLED;
      checksums.Add(TX_I64, master == TX_NONE || !checked ? 0 : (numel + weights - 1) / weights);
      steps.Add(TX_F32, 1);
    }
    params.Fill(3, 1.0);
    updates.Fill(4, 0.1);
    for (size_t t = 0; master == TX_F32 && t < std::size(kNumels); t++)
      for (int64_t i = 0; i < kNumels[t]; i++)
        masters.Put(t, i, params.At(t, i));
    for (size_t p = 0; p < parts.size(); p++)
      rates.push_back({0.02 * (1.0 + 0.1 * static_cast<double>(p)), 1e-3 / (1.0 + static_cast<double>(p))});
    Args();
    args.on_external_write = TX_EXTERNAL_RESYNC;
    if (master == TX_NONE) return;
    EXPECT_EQ(tx_master_checksum(args.n, args.params, masters.Tensors(), checksums.Tensors(), TX_CHECKSUM_RENEW,
                                 {nullptr, 0, TX_NONE, 0}, nullptr, nullptr),
              TX_OK);
  }
  // See Momentum::AddMore.
  void AddMore() {
    parts.push_back({static_cast<int64_t>(params.tensors.size()), 0});
    rates.push_back(rates[0]);
    const tx_tensor master = masters.tensors[0], checksum = checksums.tensors[0];
    params.Add(params.tensors[0].dtype, TX_STEP_CACHED);
    updates.Add(updates.tensors[0].dtype, TX_STEP_CACHED);
    masters.Add(master.dtype, master.numel ? TX_STEP_CACHED : 0);
    const int64_t weights = master.dtype == TX_I16 ? TX_CHECKSUM : TX_SAMPLED;
    checksums.Add(TX_I64, checksum.numel ? TX_STEP_CACHED / weights : 0);
    steps.Add(TX_F32, 1);
  }
  const tx_muon_update_args *Args() {
    args.n = static_cast<int64_t>(params.tensors.size());
    args.params = params.Tensors();
    args.updates = updates.Tensors();
    args.masters = masters.Tensors();
    args.checksums = checksums.Tensors();
    args.steps = steps.Tensors();
    args.n_parts = static_cast<int64_t>(parts.size());
    args.parts = parts.data();
    args.rates = rates.data();
    args.resynced = {&resynced, 1, TX_I64, 0};
    return &args;
  }
  double Weight(size_t t, int64_t i) const {
    if (masters.tensors[t].numel == 0) return params.At(t, i);
    if (masters.tensors[t].dtype == TX_F32) return masters.At(t, i);
    uint16_t weight;
    int16_t remainder;
    std::memcpy(&weight, params.memory[t].data() + 2 * i, 2);
    std::memcpy(&remainder, masters.memory[t].data() + 2 * i, 2);
    return tx_remainder_decode(weight, remainder);
  }
  // Requests all optional outputs of a step. ema: the averages' dtype; bf16 averages get 8 additional bits.
  void Ask(tx_dtype ema) {
    for (int64_t numel : kNumels) {
      changed.Add(TX_U8, (numel + 7) / 8);
      moved.Add(TX_BF16, (numel + TX_BLOCK - 1) / TX_BLOCK);
      distances.Add(TX_U8, (numel + 1) / 2);
      emas.Add(ema, numel);
      ema_lows.Add(TX_U8, ema == TX_BF16 ? numel : 0);
      healths.Add(TX_I64, TX_HEALTH_LEN);
    }
    args.ema_decay = 0.75;
  }
  const tx_muon_update_args *ArgsWithOutputs() {
    Args();
    args.changed = changed.Tensors();
    args.moved = moved.Tensors();
    args.distances = distances.Tensors();
    args.emas = emas.Tensors();
    args.ema_lows = ema_lows.Tensors();
    args.healths = healths.Tensors();
    return &args;
  }
  Outputs Written() const {
    Outputs found;
    for (const List *list :
         {&params, &masters, &checksums, &steps, &changed, &moved, &distances, &emas, &ema_lows, &healths})
      list->AppendTo(&found);
    return found;
  }
};

#endif
