// A publisher with several ranks, whose random steps change weights and publish them as deltas (tx_delta_encode), and
// an engine that applies the deltas. Engine and publisher have to end up with the same weights.
#ifndef TESTS_CORE_DELTA_TRAINER_H
#define TESTS_CORE_DELTA_TRAINER_H

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "csrc/math/delta_value.h"
#include "csrc/torch_ext_delta.h"

using Bytes = std::vector<uint8_t>;

inline tx_tensor AsTensor(const Bytes &bytes) {
  return {const_cast<uint8_t *>(bytes.data()), static_cast<int64_t>(bytes.size()), TX_U8, 0};
}

struct Param {
  std::string name;
  int64_t numel;
  tx_dtype dtype;
};

inline const std::vector<Param> kSmall = {{"v", 700, TX_BF16}, {"w", 90, TX_F32}};

inline std::vector<tx_delta_param> Table(const std::vector<Param> &params) {
  std::vector<tx_delta_param> table;
  for (const Param &p : params)
    table.push_back({p.name.c_str(), p.numel, p.dtype, 0});
  return table;
}

inline int64_t Item(tx_dtype dtype) {
  return dtype == TX_F32 ? 4 : 2;
}

inline uint32_t Round(float x, tx_dtype dtype) {
  return dtype == TX_F32 ? tx_bits_from_f32(x) : dtype == TX_F16 ? tx_f16_from_f32(x) : tx_bf16_from_f32(x);
}

inline uint32_t GetWeight(const Bytes &weights, int64_t i, tx_dtype dtype) {
  uint32_t bits = 0;
  std::memcpy(&bits, weights.data() + i * Item(dtype), static_cast<size_t>(Item(dtype)));
  return bits;
}
inline void SetWeight(Bytes *weights, int64_t i, tx_dtype dtype, uint32_t bits) {
  std::memcpy(weights->data() + i * Item(dtype), &bits, static_cast<size_t>(Item(dtype)));
}

// One rank's shard of a parameter: its weights and masters, and what its publisher tracks about them.
struct Shard {
  int64_t param, offset;
  tx_dtype dtype;
  std::vector<float> masters;
  Bytes weights, last, changed, distances;
  std::vector<uint16_t> moved;
  std::vector<int64_t> checksums;
  bool has_changed = true;  // whether the publisher tracks which elements have changed

  Shard(int64_t of, int64_t at, int64_t n, tx_dtype type, std::mt19937_64 *gen) : param(of), offset(at), dtype(type) {
    std::normal_distribution<float> normal(0.0f, 0.02f);
    weights.resize(static_cast<size_t>(n * Item(type)));
    for (int64_t i = 0; i < n; i++) {
      masters.push_back(normal(*gen));
      SetWeight(&weights, i, type, Round(masters.back(), type));
    }
    changed.resize(static_cast<size_t>((n + 7) / 8));
    distances.resize(static_cast<size_t>((n + 1) / 2));
    moved.resize(static_cast<size_t>((n + TX_BLOCK - 1) / TX_BLOCK));
    checksums.resize(static_cast<size_t>((n + TX_CHECKSUM - 1) / TX_CHECKSUM));
    last = weights;
  }

  int64_t numel() const { return static_cast<int64_t>(masters.size()); }

  void Step(float lr, std::mt19937_64 *gen) {
    std::normal_distribution<float> normal(0.0f, lr);
    for (int64_t b = 0; b * TX_BLOCK < numel(); b++) {
      float most = 0;
      for (int64_t i = b * TX_BLOCK; i < std::min(numel(), (b + 1) * TX_BLOCK); i++) {
        const float was = masters[static_cast<size_t>(i)], is = was + normal(*gen);
        masters[static_cast<size_t>(i)] = is;
        most = std::max(most, std::fabs(is - was));
        const uint32_t bits = Round(is, dtype);
        if (bits != GetWeight(weights, i, dtype))
          changed[static_cast<size_t>(i / 8)] |= static_cast<uint8_t>(1 << i % 8);
        SetWeight(&weights, i, dtype, bits);
      }
      AddBound(b, most);
    }
    KeepDistances();
  }
  // Simulates a write to the weights from outside; the masters are set to the same value.
  void Overwrite(float x) {
    for (int64_t i = 0; i < numel(); i++)
      SetWeight(&weights, i, dtype, Round(x, dtype));
    std::fill(masters.begin(), masters.end(), x);
  }
  void AddBound(int64_t b, float most) {
    uint16_t &bound = moved[static_cast<size_t>(b)];
    const float sum = tx_f32_from_bf16(bound) + most;
    const uint32_t bits = tx_bits_from_f32(std::nextafter(sum, INFINITY));
    bound = static_cast<uint16_t>((bits + 0xffff) >> 16);
  }
  void KeepDistances() {
    std::fill(distances.begin(), distances.end(), 0);
    for (int64_t i = 0; dtype != TX_F32 && i < numel(); i++) {
      const int64_t d =
          tx_delta_ordered(GetWeight(weights, i, dtype), dtype) - tx_delta_ordered(GetWeight(last, i, dtype), dtype);
      const int64_t code = d < -7 || d > 7 ? -8 : d;
      distances[static_cast<size_t>(i / 2)] |= static_cast<uint8_t>((code & 15) << (4 * (i & 1)));
    }
  }

  tx_delta_run Run(bool exact, bool checks) {
    const auto n = [](const auto &v) { return static_cast<int64_t>(v.size()); };
    tx_delta_run run = {};
    run.param = param;
    run.offset = offset;
    run.weights = {weights.data(), numel(), dtype, 0};
    if (has_changed) run.changed = {changed.data(), n(changed), TX_U8, 0};
    run.moved = {moved.data(), n(moved), TX_BF16, 0};
    if (exact && dtype != TX_F32) run.distances = {distances.data(), n(distances), TX_U8, 0};
    if (checks) run.checksums = {checksums.data(), n(checksums), TX_I64, 0};
    return run;
  }
};

class Trainer {
 public:
  Trainer(std::vector<Param> params, int32_t ranks, uint64_t seed, bool exact = false, bool checks = true,
          bool sliceable = false)
      : params_(std::move(params)), exact_(exact), checks_(checks), sliceable_(sliceable), gen_(seed) {
    const uint64_t id[2] = {gen_(), gen_()};
    const std::vector<tx_delta_param> table = Table(params_);
    shards_.resize(static_cast<size_t>(ranks));
    for (size_t p = 0; p < params_.size(); p++) {
      for (int32_t r = 0; r < ranks; r++) {  // divided anywhere; some ranks may get nothing
        const int64_t begin = params_[p].numel * r / ranks, end = params_[p].numel * (r + 1) / ranks;
        if (begin == end) continue;
        shards_[static_cast<size_t>(r)].emplace_back(static_cast<int64_t>(p), begin, end - begin, params_[p].dtype,
                                                     &gen_);
      }
    }
    for (int32_t r = 0; r < ranks; r++) {
      tx_delta_chain chain = TX_DELTA_CHAIN_INIT;
      tx_error error;
      EXPECT_EQ(tx_delta_chain_begin(static_cast<int64_t>(table.size()), table.data(), id, r, ranks, &chain, &error),
                TX_OK)
          << error.message;
      chains_.push_back(chain);
      const std::vector<tx_delta_run> runs = Runs(r);
      EXPECT_EQ(tx_delta_renew(static_cast<int64_t>(runs.size()), runs.data(), nullptr, &error), TX_OK);
    }
  }

  void Step(float lr) {
    steps_++;
    for (auto &rank : shards_)
      for (Shard &shard : rank)
        shard.Step(lr, &gen_);
  }

  // Returns one message part from each rank.
  std::vector<Bytes> Encode(tx_delta_kind kind = TX_DELTA_CHANGES, const tx_parallel *parallel = nullptr) {
    std::vector<Bytes> parts;
    const std::vector<tx_delta_param> table = Table(params_);
    for (int32_t r = 0; r < static_cast<int32_t>(shards_.size()); r++) {
      const std::vector<tx_delta_run> runs = Runs(r);
      tx_delta_encode_args args = TX_DELTA_ENCODE_ARGS_INIT;
      args.n_params = static_cast<int64_t>(table.size());
      args.params = table.data();
      args.n_runs = static_cast<int64_t>(runs.size());
      args.runs = runs.data();
      args.kind = kind;
      args.steps = steps_;
      args.sliceable = sliceable_;
      tx_delta_message message = {};
      tx_error error;
      EXPECT_EQ(tx_delta_encode(&args, &chains_[static_cast<size_t>(r)], parallel, &message, &error), TX_OK)
          << error.message;
      const auto *data = static_cast<const uint8_t *>(message.data);
      parts.emplace_back(data, data + message.bytes);
      tx_delta_free(&message);
      for (Shard &shard : shards_[static_cast<size_t>(r)])
        shard.last = kind == TX_DELTA_CHANGES ? shard.weights : shard.last;
    }
    if (kind == TX_DELTA_CHANGES) steps_ = 0;
    return parts;
  }

  // Returns the whole weights of parameter p.
  Bytes Weights(size_t p) const {
    Bytes all(static_cast<size_t>(params_[p].numel * Item(params_[p].dtype)));
    for (const auto &rank : shards_)
      for (const Shard &s : rank)
        if (s.param == static_cast<int64_t>(p))
          std::copy(s.weights.begin(), s.weights.end(), all.begin() + s.offset * Item(s.dtype));
    return all;
  }

  const std::vector<Param> &params() const { return params_; }
  std::vector<std::vector<Shard>> &shards() { return shards_; }
  std::mt19937_64 &gen() { return gen_; }
  std::vector<tx_delta_run> Runs(int32_t r) {
    std::vector<tx_delta_run> runs;
    for (Shard &s : shards_[static_cast<size_t>(r)])
      runs.push_back(s.Run(exact_, checks_));
    return runs;
  }
  tx_delta_chain &chain(size_t r) { return chains_[r]; }

 private:
  std::vector<Param> params_;
  bool exact_, checks_, sliceable_;
  std::mt19937_64 gen_;
  std::vector<std::vector<Shard>> shards_;
  std::vector<tx_delta_chain> chains_;
  int64_t steps_ = 0;
};

// An engine that keeps each parameter in a tensor of its own. same: it starts with the trainer's weights.
class Engine {
 public:
  explicit Engine(const Trainer &trainer, bool same = true) {
    const std::vector<tx_delta_param> table = Table(trainer.params());
    std::vector<tx_delta_piece> pieces;
    for (size_t p = 0; p < table.size(); p++) {
      weights.push_back(trainer.Weights(p));
      if (!same) std::fill(weights.back().begin(), weights.back().end(), 0x11);
      if (table[p].numel > 0)
        pieces.push_back({static_cast<int64_t>(p), 0, 1, table[p].numel, 0, weights.back().data(), 0, 1});
    }
    tx_error error;
    EXPECT_EQ(tx_delta_open(static_cast<int64_t>(table.size()), table.data(), static_cast<int64_t>(pieces.size()),
                            pieces.data(), &receiver, &error),
              TX_OK)
        << error.message;
  }
  Engine(const Engine &) = delete;
  Engine &operator=(const Engine &) = delete;
  ~Engine() { tx_delta_close(receiver); }

  tx_status Apply(const std::vector<Bytes> &messages, tx_delta_verify verify = TX_DELTA_TOUCHED,
                  const tx_parallel *parallel = nullptr) {
    std::vector<tx_tensor> tensors;
    for (const Bytes &m : messages)
      tensors.push_back(AsTensor(m));
    error.message[0] = 0;
    return tx_delta_apply(receiver, static_cast<int64_t>(tensors.size()), tensors.data(), verify, parallel, &error);
  }
  bool Equals(const Trainer &trainer) const {
    for (size_t p = 0; p < weights.size(); p++)
      if (weights[p] != trainer.Weights(p)) return false;
    return true;
  }

  std::vector<Bytes> weights;
  tx_delta_receiver *receiver = nullptr;
  tx_error error = {};
};

#endif
