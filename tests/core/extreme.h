// Random inputs of extreme AdamW steps: finite gradients of every fp32 magnitude, together with legal states and
// hyper-parameters of every magnitude. No such step may make a state non-finite.
#ifndef TESTS_CORE_EXTREME_H
#define TESTS_CORE_EXTREME_H

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>

#include "tests/core/adamw_call.h"

namespace extreme {

using adamw_call::Bytes;
using adamw_call::Call;
using adamw_call::Combo;
using adamw_call::Get;
using adamw_call::Param;

class Random {
 public:
  explicit Random(uint32_t seed) : gen_(seed) {}
  uint32_t Below(uint32_t bound) { return static_cast<uint32_t>(gen_() % bound); }
  // A uniformly random pattern of a finite number: magnitudes are spread evenly over fp32's exponents.
  float Finite() {
    const uint32_t bits = static_cast<uint32_t>(gen_());
    return tx_f32_from_bits((bits & 0x7f800000u) == 0x7f800000u ? bits ^ 0x40000000u : bits);
  }
  float Normal() { return normal_(gen_); }
  template <typename Value, size_t N>
  Value Of(const Value (&values)[N]) {
    return values[Below(N)];
  }

 private:
  std::mt19937 gen_;
  std::normal_distribution<float> normal_;
};

inline float Largest(tx_dtype dtype) {
  return dtype == TX_BF16 ? 0x1.fep127f : dtype == TX_F16 ? 65504.0f : std::numeric_limits<float>::max();
}

// Stores x, clamped so that a finite number stays finite in `dtype`.
inline void Put(Bytes &to, int64_t i, tx_dtype dtype, float x) {
  tx_store(to.data(), i, dtype, std::clamp(x, -Largest(dtype), Largest(dtype)));
}

// The hyper-parameters, and the scalar tensors of a call.
struct Constants {
  tx_adamw_group group;
  float grad_scale, clip_coef;
};
inline Constants AnyConstants(Random &random) {
  const double betas[] = {0.9, 0.999, 0.9, 0.999, 0.0, 0.3, 0.5, 0.95, 1.0 - 0x1p-30, 1.0 - 0x1p-53};
  const double lrs[] = {1e-3, 1e-2, 1.0, 0.0}, decays[] = {0.0, 0.1, 0.1, 1.0}, epses[] = {1e-8, 1e-8, 1e-3, 1.0};
  const float scales[] = {1.0f, 1.0f, 65536.0f, 0x1p-20f, 1e-38f, 1e-45f, 3e38f};
  const float clips[] = {1.0f, 1.0f, 0.3f, 1e-30f, 1e-45f, 3e38f, 0.0f};
  Constants c;
  c.group = {random.Of(lrs), random.Of(betas), random.Of(betas), random.Of(epses), random.Of(decays), 0, 1};
  c.group.maximize = random.Below(2);
  c.group.decoupled = random.Below(3) != 0;
  c.grad_scale = random.Of(scales);
  c.clip_coef = random.Of(clips);
  return c;
}

// Fills stretches of 64 elements with different kinds of gradients, so that a loop sees large ones in some of its tiles
// and blocks only.
inline void FillGradients(Random &random, Param &p) {
  for (int64_t at = 0; at < p.n; at += 64) {
    const uint32_t kind = random.Below(8);
    const int64_t end = std::min(p.n, at + 64), odd = at + random.Below(64);
    for (int64_t i = at; i < end; i++) {
      float g = random.Normal() * 1e-2f;
      if (kind == 0 || (kind < 3 && i == odd)) g = random.Finite();
      if (kind == 3) g = random.Below(2) ? Largest(TX_F32) : -Largest(TX_F32);
      if (kind == 4) g = 0.0f;
      /* near the magnitude at which AdamW clamps gradients */
      if (kind == 5) g = std::ldexp(1.9f + 0.05f * random.Normal(), 63);
      if (kind == 6 && i == odd) g = -Largest(TX_F32);
      Put(p.grad, i, p.combo.grad, g);
    }
  }
}

// Fills a moment with legal codes (if its dtype has block scales) or finite numbers. root: it is exp_avg_sq, which is
// never negative.
inline void FillMoment(Random &random, Bytes &to, uint8_t *scales, tx_dtype dtype, bool root, int64_t n) {
  for (int64_t at = 0; at < n; at += TX_BLOCK) {
    const uint32_t kind = random.Below(4);
    if (tx_moment_is_scaled(dtype)) scales[at / TX_BLOCK] = static_cast<uint8_t>(kind == 0 ? random.Below(255) : 100);
    for (int64_t i = at; i < std::min(n, at + TX_BLOCK); i++) {
      if (dtype == TX_U8) {
        to.data()[i] = static_cast<uint8_t>(root ? random.Below(256) : random.Below(0x7f) | random.Below(2) << 7);
      } else if (dtype == TX_F16) {
        const uint16_t code = static_cast<uint16_t>(random.Below(0x7c00) | (root ? 0 : random.Below(2) << 15));
        std::memcpy(to.data() + 2 * i, &code, 2);
      } else {
        const float x = kind == 0 ? random.Finite() : random.Normal() * 1e-2f;
        Put(to, i, dtype, root ? std::fabs(x) : x);
      }
    }
  }
}

inline void FillWeights(Random &random, Param &p) {
  const Combo &c = p.combo;
  for (int64_t i = 0; i < p.n; i++) {
    const float w = random.Below(16) == 0 ? random.Finite() : random.Normal();
    Put(p.param, i, c.param, w);
    const int16_t remainder = static_cast<int16_t>(random.Below(0x10000));
    if (c.master == TX_I16) std::memcpy(p.master.data() + 2 * i, &remainder, 2);
    const float master = std::clamp(w, -Largest(c.param), Largest(c.param));
    if (c.master == TX_F32) std::memcpy(p.master.data() + 4 * i, &master, 4);
  }
}

inline uint8_t *RootScales(Param &p) {
  return p.scales.data() + (tx_moment_is_scaled(p.combo.exp_avg) ? (p.n + TX_BLOCK - 1) / TX_BLOCK : 0);
}

inline void FillState(Random &random, Param &p) {
  FillWeights(random, p);
  FillMoment(random, p.exp_avg, p.scales.data(), p.combo.exp_avg, false, p.n);
  FillMoment(random, p.exp_avg_sq, RootScales(p), p.combo.exp_avg_sq, true, p.n);
  const float steps[] = {0.0f, 0.0f, 1.0f, 10.0f, 100000.0f};
  const float step = random.Of(steps);
  std::memcpy(p.step.data(), &step, 4);
}

// Sets the hyper-parameters, grad_scale and clip_coef of a call. c has to outlive the call.
inline void Set(Call &call, Constants &c) {
  call.group = c.group;
  call.args.grad_scale = {&c.grad_scale, 1, TX_F32, 0};
  call.args.clip_coef = {&c.clip_coef, 1, TX_F32, 0};
}

// Whether the new weight may legally overflow, because the step of this element is too large for its dtype. Estimated
// in double, with the largest possible |m|.
inline bool MayOverflow(tx_adamw_constants c, tx_dtype param, double grad, double w, double m, double v) {
  const double most = 31 * 0x1p59;
  const double g = std::clamp(std::clamp(c.factor * grad, -most, most) + c.l2 * w, -most, most);
  const double kept = c.exp_avg_sq.from_new ? c.exp_avg_sq.weight : 1.0 - static_cast<double>(c.exp_avg_sq.weight);
  const double root = 0.99 * std::sqrt(kept * v + (1.0 - kept) * g * g);
  const double quotient = std::max(std::fabs(m), std::fabs(g)) / (root * c.rsqrt_bc2 + c.eps);
  const double moved = std::fabs(c.step_size * quotient) + std::fabs(c.decay * w);
  return !(quotient < 3e38) || !(moved < 3e38) || !(std::fabs(w) + moved < 0.99 * Largest(param));
}

// Returns "" if everything that a step wrote is finite, else a description of the first number that is not. before: the
// state before the step. *checked is increased by the number of weights that had to be finite.
inline std::string NotFinite(Param before, Param &after, const Constants &constants, int64_t *checked) {
  const Combo &c = after.combo;
  float taken;
  std::memcpy(&taken, before.step.data(), 4);
  const tx_adamw_constants k =
      tx_adamw_prepare(&constants.group, constants.group.lr, static_cast<int64_t>(taken) + 1,
                       static_cast<double>(constants.clip_coef), static_cast<double>(constants.grad_scale), 0.0);
  const auto moments = [](Param &p, int root) {
    return root ? adamw_call::GetMoment(p.exp_avg_sq, RootScales(p), p.combo.exp_avg_sq, 1, p.n)
                : adamw_call::GetMoment(p.exp_avg, p.scales.data(), p.combo.exp_avg, 0, p.n);
  };
  const auto m0 = moments(before, 0), v0 = moments(before, 1), m1 = moments(after, 0), v1 = moments(after, 1);
  for (size_t i = 0; i < m0.size(); i++) {
    const int64_t at = static_cast<int64_t>(i);
    const float grad = Get(c.grad, after.grad.data(), at), w = before.Master(at);
    const std::string where = "[" + std::to_string(at) + "] of gradient " + std::to_string(grad);
    if (!std::isfinite(m1[i])) return "exp_avg" + where;
    if (!std::isfinite(v1[i])) return "exp_avg_sq" + where;
    if (MayOverflow(k, c.param, grad, w, m0[i], v0[i])) continue;
    ++*checked;
    if (!std::isfinite(after.Master(at))) return "weight" + where;
    if (!std::isfinite(Get(c.param, after.param.data(), at))) return "parameter" + where;
  }
  return "";
}

}  // namespace extreme

#endif
