// The arguments of an AdamW step, and a reference implementation of the step: element by element, using only the
// headers of csrc/math.
#ifndef TESTS_CORE_ADAMW_CALL_H
#define TESTS_CORE_ADAMW_CALL_H

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

extern "C" {
#include "csrc/core/combos.h"
#include "csrc/core/dtype.h"
#include "csrc/cpu/element.h"
#include "csrc/math/adamw.h"
#include "csrc/math/block_scale.h"
#include "csrc/math/dither.h"
#include "csrc/math/dither_lag.h"
#include "csrc/math/remainder.h"
}

#include "tests/core/adamw_element.h"
#include "tests/core/adamw_lists.h"
#include "tests/core/blocks.h"

namespace adamw_call {

struct Combo {
  tx_dtype param, master, grad, exp_avg, exp_avg_sq;
};

inline std::vector<Combo> Combos() {
  std::vector<std::pair<tx_dtype, tx_dtype>> weights;
  std::vector<tx_dtype> grads, moments;
#define WEIGHT(i, p, m, ...) weights.push_back({TX_##p, TX_##m});
#define GRAD(i, g, ...) grads.push_back(TX_##g);
#define MOMENT(i, m, ...) moments.push_back(TX_##m);
  TX_FOR_EACH_WEIGHT(WEIGHT, )
  TX_FOR_EACH_GRAD(GRAD, )
  TX_FOR_EACH_MOMENT(MOMENT, )
#undef WEIGHT
#undef GRAD
#undef MOMENT
  std::vector<Combo> combos;
  for (auto w : weights)
    for (auto g : grads)
      for (auto m : moments)
        for (auto v : moments)
          combos.push_back({w.first, w.second, g, m, v});
  return combos;
}

inline std::string Name(const Combo &c) {
  return std::string(tx_dtype_name(c.param)) + "_" + (c.master ? tx_dtype_name(c.master) : "none") + "_" +
         tx_dtype_name(c.grad) + "_" + tx_dtype_name(c.exp_avg) + "_" + tx_dtype_name(c.exp_avg_sq);
}

inline int64_t Size(tx_dtype dtype) {
  return dtype == TX_F32 ? 4 : dtype == TX_U8 ? 1 : 2;
}

// The bytes of one tensor, optionally at an odd address, so that unaligned tensors are tested.
struct Bytes {
  std::vector<uint8_t> raw;
  int64_t offset = 0;
  explicit Bytes(int64_t n = 0, int64_t misalign = 0) : raw(static_cast<size_t>(n + misalign)), offset(misalign) {}
  uint8_t *data() { return raw.data() + offset; }
  int64_t size() const { return static_cast<int64_t>(raw.size()) - offset; }
  std::vector<uint8_t> copy() const { return {raw.begin() + offset, raw.end()}; }
};

inline float Get(tx_dtype dtype, const uint8_t *p, int64_t i) {
  return tx_load(p, i, dtype);
}

// One parameter with its gradient and optimizer state.
struct Param {
  Combo combo;
  int64_t n;
  Bytes param, grad, exp_avg, exp_avg_sq, master, scales, step;

  Param(const Combo &c, int64_t n, int64_t misalign = 0)
      : combo(c),
        n(n),
        param(n * Size(c.param), misalign),
        grad(n * Size(c.grad), misalign),
        exp_avg(n * Size(c.exp_avg), misalign),
        exp_avg_sq(n * Size(c.exp_avg_sq), misalign),
        master(c.master ? n * Size(c.master) : 0, misalign),
        scales((tx_moment_is_scaled(c.exp_avg) + tx_moment_is_scaled(c.exp_avg_sq)) * ((n + 127) / 128), misalign),
        step(4, misalign) {}

  void Fill(uint32_t seed) {
    std::mt19937 gen(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < n; i++) {
      const float w = normal(gen);
      tx_store(param.data(), i, combo.param, w);
      const float kept = Get(combo.param, param.data(), i);
      if (combo.master == TX_F32) {
        const float master_w = combo.param == TX_BF16 && tx_bf16_from_f32(w) == tx_bf16_from_f32(kept) ? w : kept;
        std::memcpy(master.data() + 4 * i, &master_w, 4);
      }
    }
    FillGrad(seed + 1);
  }
  void FillGrad(uint32_t seed, float size = 1e-2f) {
    std::mt19937 gen(seed);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < n; i++)
      tx_store(grad.data(), i, combo.grad, normal(gen) * size);
  }
  // The weight in full precision: the master weight, or the parameter if there is none.
  float Master(int64_t i) {
    if (combo.master == TX_F32) return Get(TX_F32, master.data(), i);
    if (combo.master == TX_NONE) return Get(combo.param, param.data(), i);
    uint16_t weight;
    int16_t remainder;
    std::memcpy(&weight, param.data() + 2 * i, 2);
    std::memcpy(&remainder, master.data() + 2 * i, 2);
    return tx_remainder_decode(weight, remainder);
  }
  std::vector<std::vector<uint8_t>> State() const {
    return {param.copy(), exp_avg.copy(), exp_avg_sq.copy(), master.copy(), scales.copy(), step.copy()};
  }
};

inline tx_tensor T(Bytes &b, tx_dtype dtype) {
  return {b.data(), b.size() / Size(dtype), dtype, 0};
}

struct Call : AdamwLists {
  tx_adamw_group group = {1e-2, 0.9, 0.999, 1e-8, 0.1, 0, 1};
  tx_adamw_args args = {};

  Call() {
    args.size = sizeof args;
    args.moment_rounding = args.weight_rounding = TX_DITHERED;
  }
  void Add(Param &p, int64_t id = 7, int64_t start = 0) {
    params.push_back(T(p.param, p.combo.param));
    grads.push_back(T(p.grad, p.combo.grad));
    exp_avgs.push_back(T(p.exp_avg, p.combo.exp_avg));
    exp_avg_sqs.push_back(T(p.exp_avg_sq, p.combo.exp_avg_sq));
    masters.push_back(p.combo.master ? T(p.master, p.combo.master) : tx_tensor{nullptr, 0, TX_NONE, 0});
    scales.push_back(T(p.scales, TX_U8));
    steps.push_back({p.step.data(), 1, TX_F32, 0});
    meta.push_back({id, start, 0});
  }
  const tx_adamw_args *Args() {
    Lend(&args);
    args.n_groups = 1;
    args.groups = &group;
    return &args;
  }
};

// -- the reference: element by element, from the headers of csrc/math alone -------------------------------------

inline uint32_t Threshold(int rounding, uint64_t seed, int64_t id, tx_lane lane, int64_t step, int64_t i) {
  if (rounding == TX_DITHERED) return tx_lattice_base(seed, id, lane, step, i);
  return tx_stochastic(tx_stochastic_key(seed, id, lane, step), static_cast<uint32_t>(i));
}

inline tx_block_format Format(tx_dtype dtype, int root) {
  if (dtype == TX_U8) return root ? tx_block_root_e4m4() : tx_block_e4m3();
  return root ? tx_block_root_f16() : tx_block_f16();
}

inline void PutPlain(uint8_t *p, int64_t i, tx_dtype dtype, float x, int rounding, uint32_t u) {
  if (rounding == TX_NEAREST) {
    tx_store(p, i, dtype, x);
  } else {
    tx_store_threshold(p, i, dtype, x, u);
  }
}

inline void PutMoment(Bytes &to, uint8_t *scales, tx_dtype dtype, int root, const std::vector<float> &x, int rounding,
                      uint64_t seed, int64_t id, tx_lane lane, int64_t step) {
  const int64_t n = static_cast<int64_t>(x.size());
  for (int64_t at = 0; at < n; at += 128) {
    const int64_t count = std::min<int64_t>(128, n - at);
    uint32_t u[128], codes[128];
    float block[128];
    for (int64_t i = 0; i < count; i++) {
      u[i] = Threshold(rounding, seed, id, lane, step, at + i);
      block[i] = root ? std::sqrt(x[at + i]) : x[at + i];
      if (!tx_moment_is_scaled(dtype)) PutPlain(to.data(), at + i, dtype, x[at + i], rounding, u[i]);
    }
    if (!tx_moment_is_scaled(dtype)) continue;
    const tx_block_format format = Format(dtype, root);
    scales[at / 128] =
        EncodeBlock(format, block, static_cast<int32_t>(count), rounding == TX_NEAREST ? nullptr : u, codes);
    for (int64_t i = 0; i < count; i++) {
      for (int64_t b = 0; b < Size(dtype); b++) {
        to.data()[(at + i) * Size(dtype) + b] = static_cast<uint8_t>(codes[i] >> (8 * b));
      }
    }
  }
}

inline std::vector<float> GetMoment(Bytes &from, const uint8_t *scales, tx_dtype dtype, int root, int64_t n) {
  std::vector<float> x(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; i++) {
    if (!tx_moment_is_scaled(dtype)) {
      x[i] = Get(dtype, from.data(), i);
      continue;
    }
    uint32_t code = from.data()[i * Size(dtype)];
    if (dtype == TX_F16) code |= static_cast<uint32_t>(from.data()[2 * i + 1]) << 8;
    const float value =
        tx_block_value(Format(dtype, root), code, tx_scale_decode(Format(dtype, root), scales[i / 128]));
    x[i] = root ? value * value : value;
  }
  return x;
}

inline void ReferenceStep(Param &p, const Call &call, int64_t id) {
  const tx_adamw_args &a = call.args;
  float t;
  std::memcpy(&t, p.step.data(), 4);
  const int64_t step = static_cast<int64_t>(t) + 1;
  const double lag = tx_dither_lag(p.combo.exp_avg_sq, a.moment_rounding, call.group.beta2, step);
  const auto number = [](tx_tensor t) { return t.numel ? static_cast<double>(*static_cast<float *>(t.data)) : 1.0; };
  const tx_adamw_constants c =
      tx_adamw_prepare(&call.group, call.group.lr, step, number(a.clip_coef), number(a.grad_scale), lag);
  uint8_t *v_scales = p.scales.data() + (tx_moment_is_scaled(p.combo.exp_avg) ? (p.n + 127) / 128 : 0);
  std::vector<float> m = GetMoment(p.exp_avg, p.scales.data(), p.combo.exp_avg, 0, p.n);
  std::vector<float> v = GetMoment(p.exp_avg_sq, v_scales, p.combo.exp_avg_sq, 1, p.n);
  for (int64_t i = 0; i < p.n; i++) {
    float w = Get(p.combo.param == TX_F32 ? TX_F32 : p.combo.param, p.param.data(), i);
    uint16_t weight = 0;
    int16_t remainder = 0;
    if (p.combo.master == TX_F32) std::memcpy(&w, p.master.data() + 4 * i, 4);
    if (p.combo.master == TX_I16) {
      std::memcpy(&weight, p.param.data() + 2 * i, 2);
      std::memcpy(&remainder, p.master.data() + 2 * i, 2);
      w = tx_remainder_decode(weight, remainder);
    }
    const Stepped r = Element(c, Get(p.combo.grad, p.grad.data(), i), w, m[i], v[i]);
    m[i] = r.m;
    v[i] = r.v;
    if (p.combo.master == TX_F32) std::memcpy(p.master.data() + 4 * i, &r.p, 4);
    if (p.combo.master == TX_I16) {
      remainder = tx_remainder_encode(r.p);
      std::memcpy(p.master.data() + 2 * i, &remainder, 2);
    }
    PutPlain(p.param.data(), i, p.combo.param, r.p, p.combo.master ? TX_NEAREST : a.weight_rounding,
             Threshold(a.weight_rounding, a.seed, id, TX_LANE_PARAM, step, i));
  }
  PutMoment(p.exp_avg, p.scales.data(), p.combo.exp_avg, 0, m, a.moment_rounding, a.seed, id, TX_LANE_EXP_AVG, step);
  PutMoment(p.exp_avg_sq, v_scales, p.combo.exp_avg_sq, 1, v, a.moment_rounding, a.seed, id, TX_LANE_EXP_AVG_SQ, step);
  t += 1;
  std::memcpy(p.step.data(), &t, 4);
}

inline const Combo kBf16 = {TX_BF16, TX_F32, TX_BF16, TX_BF16, TX_BF16};
inline const Combo kRemainder = {TX_BF16, TX_I16, TX_BF16, TX_BF16, TX_BF16};
inline const Combo kF32 = {TX_F32, TX_NONE, TX_F32, TX_F32, TX_F32};
inline const Combo kBlocks = {TX_BF16, TX_I16, TX_BF16, TX_U8, TX_U8};

}  // namespace adamw_call

#endif
