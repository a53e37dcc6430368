// tx_adamw: every legal dtype combination against a plain reference, bit for bit and against a float64 oracle; bits
// independent of threads, pieces, splits and alignment; nothing written by a call that fails or is skipped.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

extern "C" {
#include "csrc/core/dtype.h"
#include "csrc/cpu/combos.h"
#include "csrc/cpu/element.h"
#include "csrc/math/adamw.h"
#include "csrc/math/block_scale.h"
#include "csrc/math/dither.h"
#include "csrc/math/remainder.h"
}
#include "tests/core/adamw_element.h"
#include "tests/core/blocks.h"
#include "tests/core/threads.h"

namespace {

struct Combo {
  tx_dtype param, master, grad, exp_avg, exp_avg_sq;
};

std::vector<Combo> Combos() {
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

std::string Name(const Combo &c) {
  return std::string(tx_dtype_name(c.param)) + "_" + (c.master ? tx_dtype_name(c.master) : "none") + "_" +
         tx_dtype_name(c.grad) + "_" + tx_dtype_name(c.exp_avg) + "_" + tx_dtype_name(c.exp_avg_sq);
}

int64_t Size(tx_dtype dtype) {
  return dtype == TX_F32 ? 4 : dtype == TX_U8 ? 1 : 2;
}

// Bytes of one stream, kept at an odd address when asked, so that alignment is exercised.
struct Bytes {
  std::vector<uint8_t> raw;
  int64_t offset = 0;
  explicit Bytes(int64_t n = 0, int64_t misalign = 0) : raw(static_cast<size_t>(n + misalign)), offset(misalign) {}
  uint8_t *data() { return raw.data() + offset; }
  int64_t size() const { return static_cast<int64_t>(raw.size()) - offset; }
  std::vector<uint8_t> copy() const { return {raw.begin() + offset, raw.end()}; }
};

float Get(tx_dtype dtype, const uint8_t *p, int64_t i) {
  return tx_load(p, i, dtype);
}

// One parameter with all its state.
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
  std::vector<std::vector<uint8_t>> State() const {
    return {param.copy(), exp_avg.copy(), exp_avg_sq.copy(), master.copy(), scales.copy(), step.copy()};
  }
};

tx_tensor T(Bytes &b, tx_dtype dtype) {
  return {b.data(), b.size() / Size(dtype), dtype, 0};
}

struct Call {
  std::vector<tx_tensor> params, grads, exp_avgs, exp_avg_sqs, masters, scales, steps;
  std::vector<tx_meta> meta;
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
    args.n = static_cast<int64_t>(params.size());
    args.params = params.data();
    args.grads = grads.data();
    args.exp_avgs = exp_avgs.data();
    args.exp_avg_sqs = exp_avg_sqs.data();
    args.masters = masters.data();
    args.scales = scales.data();
    args.steps = steps.data();
    args.n_groups = 1;
    args.groups = &group;
    args.meta = meta.data();
    return &args;
  }
};

// -- the reference: element by element, from the headers of csrc/math alone -------------------------------------

uint32_t Threshold(int rounding, uint64_t seed, int64_t id, tx_lane lane, int64_t step, int64_t i) {
  if (rounding == TX_DITHERED) return tx_lattice_base(seed, id, lane, step, i);
  return tx_stochastic(tx_stochastic_key(seed, id, lane, step), static_cast<uint32_t>(i));
}

tx_block_format Format(tx_dtype dtype, int root) {
  if (dtype == TX_U8) return root ? tx_block_root_e4m4() : tx_block_e4m3();
  return root ? tx_block_root_f16() : tx_block_f16();
}

void PutPlain(uint8_t *p, int64_t i, tx_dtype dtype, float x, int rounding, uint32_t u) {
  if (rounding == TX_NEAREST) {
    tx_store(p, i, dtype, x);
  } else {
    tx_store_threshold(p, i, dtype, x, u);
  }
}

void PutMoment(Bytes &to, uint8_t *scales, tx_dtype dtype, int root, const std::vector<float> &x, int rounding,
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

std::vector<float> GetMoment(Bytes &from, const uint8_t *scales, tx_dtype dtype, int root, int64_t n) {
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

void ReferenceStep(Param &p, const Call &call, int64_t id) {
  const tx_adamw_args &a = call.args;
  float t;
  std::memcpy(&t, p.step.data(), 4);
  const int64_t step = static_cast<int64_t>(t) + 1;
  const tx_adamw_constants c = tx_adamw_prepare(&call.group, call.group.lr, step, 1.0, 1.0);
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

class EveryCombo : public testing::TestWithParam<Combo> {};

// On every instruction set this processor has; the summary names those it lacks (tests/core/cpu_isa_test.cc).
TEST_P(EveryCombo, EqualsTheReferenceBitForBit) {
  for (int32_t isa = 0; tx_isa_name(isa); isa++) {
    ASSERT_EQ(tx_isa_select(tx_isa_name(isa), nullptr), TX_OK);
    for (int rounding : {TX_DITHERED, TX_NEAREST, TX_STOCHASTIC}) {
      for (int64_t n : {1, 127, 129, 2500}) {
        Param ours(GetParam(), n, n % 2), theirs(GetParam(), n);
        ours.Fill(11);
        theirs.Fill(11);
        for (int step = 0; step < 3; step++) {
          ours.FillGrad(100 + step);
          theirs.FillGrad(100 + step);
          Call call, reference;
          call.args.seed = reference.args.seed = 5;
          call.args.moment_rounding = reference.args.moment_rounding = rounding;
          call.args.weight_rounding = reference.args.weight_rounding = rounding;
          call.Add(ours);
          tx_error error;
          ASSERT_EQ(tx_adamw(call.Args(), nullptr, &error), TX_OK) << error.message;
          ReferenceStep(theirs, reference, 7);
        }
        ASSERT_EQ(ours.State(), theirs.State()) << tx_isa_name(isa) << " n " << n << " rounding " << rounding;
      }
    }
  }
  ASSERT_EQ(tx_isa_select(nullptr, nullptr), TX_OK);
}

// The weight at its full precision: the master, or the parameter where there is none.
double Weight(Param &p, int64_t i) {
  if (p.combo.master == TX_F32) return Get(TX_F32, p.master.data(), i);
  if (p.combo.master == TX_NONE) return Get(p.combo.param, p.param.data(), i);
  uint16_t weight;
  int16_t remainder;
  std::memcpy(&weight, p.param.data() + 2 * i, 2);
  std::memcpy(&remainder, p.master.data() + 2 * i, 2);
  return tx_remainder_decode(weight, remainder);
}

// G1 against arithmetic in double that shares nothing with csrc/math. Bounds: two ulp of fp32 at the weight (the last
// subtraction, and a remainder's inexact tie), 4e-7 of the update (its dozen fp32 operations), and where the weight is
// stored in 16 bits without a master less than one ulp of that.
TEST_P(EveryCombo, G1_FirstStepFollowsTheFloat64Oracle) {
  const Combo c = GetParam();
  Param p(c, 1000);
  p.Fill(3);
  Call call;
  call.Add(p);
  std::vector<double> before(1000);
  for (int64_t i = 0; i < p.n; i++)
    before[i] = Weight(p, i);
  ASSERT_EQ(tx_adamw(call.Args(), nullptr, nullptr), TX_OK);
  const int bits = c.master || c.param == TX_F32 ? 23 : c.param == TX_BF16 ? 7 : 10;
  for (int64_t i = 0; i < p.n; i++) {
    const double g = Get(c.grad, p.grad.data(), i);
    const double m = (1 - 0.9) * g, v = (1 - 0.999) * g * g;
    const double update = 1e-2 * ((m / (1 - 0.9)) / (std::sqrt(v / (1 - 0.999)) + 1e-8) + 0.1 * before[i]);
    const double want = before[i] - update;
    const int exponent = std::max(-14, std::ilogb(std::max(std::fabs(before[i]), std::fabs(want))));
    const double storage = bits == 23 ? 0 : std::ldexp(1.0, exponent - bits);
    const double bound = storage + std::ldexp(2.0, exponent - 23) + 4e-7 * std::fabs(update);
    ASSERT_NEAR(Weight(p, i), want, bound) << i;
  }
}

// Threads, neighbours in the call, splits at block edges and addresses change nothing.
TEST_P(EveryCombo, BitsDoNotDependOnThreadsSplitsOrAddresses) {
  const int64_t n = 3 * 16384 + 777, cut = 16384 + 128 * 5;
  Param whole(GetParam(), n);
  whole.Fill(21);
  Param left(GetParam(), cut, 1), right(GetParam(), n - cut, 3);
  auto slice = [&](Bytes &from, Bytes &to, int64_t begin) {
    std::memcpy(to.data(), from.data() + begin, static_cast<size_t>(to.size()));
  };
  for (auto [part, begin] : {std::pair<Param *, int64_t>{&left, 0}, {&right, cut}}) {
    slice(whole.param, part->param, begin * Size(GetParam().param));
    slice(whole.grad, part->grad, begin * Size(GetParam().grad));
    if (GetParam().master) slice(whole.master, part->master, begin * Size(GetParam().master));
  }
  Threads threads(3);
  for (int step = 0; step < 2; step++) {
    Call one, two;
    one.Add(whole);
    two.Add(right, 7, cut);
    two.Add(left, 7, 0);
    ASSERT_EQ(tx_adamw(one.Args(), nullptr, nullptr), TX_OK);
    ASSERT_EQ(tx_adamw(two.Args(), threads.parallel(), nullptr), TX_OK);
  }
  auto equal = [&](Bytes &all, Bytes &part, int64_t begin) {
    return part.size() == 0 || std::memcmp(all.data() + begin, part.data(), static_cast<size_t>(part.size())) == 0;
  };
  const Combo c = GetParam();
  for (auto [part, begin] : {std::pair<Param *, int64_t>{&left, 0}, {&right, cut}}) {
    EXPECT_TRUE(equal(whole.param, part->param, begin * Size(c.param)));
    EXPECT_TRUE(equal(whole.exp_avg, part->exp_avg, begin * Size(c.exp_avg)));
    EXPECT_TRUE(equal(whole.exp_avg_sq, part->exp_avg_sq, begin * Size(c.exp_avg_sq)));
    EXPECT_TRUE(equal(whole.master, part->master, c.master ? begin * Size(c.master) : 0));
  }
}

#ifdef TX_SANITIZED
std::vector<Combo> Grid() {
  std::vector<Combo> all = Combos(), some;
  for (size_t i = 0; i < all.size(); i += 7)
    some.push_back(all[i]);
  return some;
}
#else
std::vector<Combo> Grid() {
  return Combos();
}
#endif
INSTANTIATE_TEST_SUITE_P(Combos, EveryCombo, testing::ValuesIn(Grid()),
                         [](const auto &info) { return Name(info.param); });

const Combo kBf16 = {TX_BF16, TX_F32, TX_BF16, TX_BF16, TX_BF16};
const Combo kRemainder = {TX_BF16, TX_I16, TX_BF16, TX_BF16, TX_BF16};
const Combo kF32 = {TX_F32, TX_NONE, TX_F32, TX_F32, TX_F32};

const Combo kBlocks = {TX_BF16, TX_I16, TX_BF16, TX_U8, TX_U8};

// Several tensors and groups of constants, so that every instance, its tails and the way through tiles are met.
struct Training {
  std::vector<Param> params;
  explicit Training(const Combo &c) {
    int64_t n = 1;
    for (const int64_t length : {0, 1, 31, 32, 33, 127, 128, 129, 255, 257, 1000, 40001}) {
      params.emplace_back(c, length, n % 3);
      params.back().Fill(static_cast<uint32_t>(n++));
    }
  }
  void Step(int64_t step, const tx_adamw_group &group, const tx_parallel *parallel) {
    Call call;
    call.group = group;
    int64_t id = 0;
    for (Param &p : params) {
      p.FillGrad(static_cast<uint32_t>(1000 * step + id), step < 20 ? 1e-2f : 1e-4f);
      call.Add(p, id++);
    }
    tx_error error;
    ASSERT_EQ(tx_adamw(call.Args(), parallel, &error), TX_OK) << error.message;
  }
  std::vector<std::vector<std::vector<uint8_t>>> State() const {
    std::vector<std::vector<std::vector<uint8_t>>> all;
    for (const Param &p : params)
      all.push_back(p.State());
    return all;
  }
};

class ManySteps : public testing::TestWithParam<std::tuple<Combo, const char *>> {};

// Whole states, forced instruction sets, 1, 2, 3 and 8 threads. What runs here is compared; cpu_isa_test names the
// rest.
TEST_P(ManySteps, EveryInstructionSetAndNumberOfThreadsLeavesTheSameState) {
  const auto [combo, constants] = GetParam();
  tx_adamw_group group = {1e-2, 0.9, 0.999, 1e-8, 0.1, 0, 1};
  if (std::string(constants) == "l2") group.decoupled = 0;
  if (std::string(constants) == "small_beta") group.beta1 = 0.3;
  const int64_t steps = 40;
  ASSERT_EQ(tx_isa_select("base", nullptr), TX_OK);
  Training expected(combo);
  for (int64_t step = 0; step < steps; step++)
    expected.Step(step, group, nullptr);
  for (int32_t isa = 0; tx_isa_name(isa); isa++) {
    ASSERT_EQ(tx_isa_select(tx_isa_name(isa), nullptr), TX_OK);
    for (const int64_t count : {1, 2, 3, 8}) {
      Threads threads(count);
      Training ours(combo);
      for (int64_t step = 0; step < steps; step++)
        ours.Step(step, group, threads.parallel());
      ASSERT_TRUE(ours.State() == expected.State()) << tx_isa_name(isa) << ", threads " << count;
    }
  }
  ASSERT_EQ(tx_isa_select(nullptr, nullptr), TX_OK);
}
INSTANTIATE_TEST_SUITE_P(
    Configurations, ManySteps,
    testing::Combine(testing::Values(kF32, kBf16, kRemainder, kBlocks, Combo{TX_F16, TX_F32, TX_F16, TX_F16, TX_F16}),
                     testing::Values("usual", "l2", "small_beta")),
    [](const auto &info) { return Name(std::get<0>(info.param)) + "_" + std::get<1>(info.param); });

// Gradients that make moments NaN, infinite or too large for bf16, in some tiles and blocks and not in others, are
// rounded as the reference does it. Combinations in which every stream but the gradient is narrow: an fp32 NaN keeps
// whatever sign and payload the processor gave it.
TEST(Adamw, NonFiniteAndHugeMomentsAreRoundedAsTheReferenceDoes) {
  const float odd[] = {NAN, -NAN, INFINITY, -INFINITY, 3.4e38f, -3.4e38f, 1e20f, 1e-40f, 0.0f};
  for (const Combo &c : Combos()) {
    if (c.grad == TX_F16 || c.param == TX_F32 || c.master == TX_F32 || c.exp_avg == TX_F32 || c.exp_avg_sq == TX_F32) {
      continue;
    }
    for (int32_t isa = 0; tx_isa_name(isa); isa++) {
      ASSERT_EQ(tx_isa_select(tx_isa_name(isa), nullptr), TX_OK);
      Param ours(c, 1500), theirs(c, 1500);
      ours.Fill(11);
      theirs.Fill(11);
      for (int step = 0; step < 3; step++) {
        for (Param *p : {&ours, &theirs}) {
          p->FillGrad(100 + static_cast<uint32_t>(step));
          for (int64_t i = 0; i < 9; i++)
            tx_store(p->grad.data(), 300 + 131 * i, c.grad, odd[(i + step) % 9]);
        }
        Call call, reference;
        call.Add(ours);
        ASSERT_EQ(tx_adamw(call.Args(), nullptr, nullptr), TX_OK);
        ReferenceStep(theirs, reference, 7);
        ASSERT_EQ(ours.State(), theirs.State()) << Name(c) << " " << tx_isa_name(isa) << " step " << step;
      }
    }
  }
  ASSERT_EQ(tx_isa_select(nullptr, nullptr), TX_OK);
}

// Weights and remainders that no step writes, or hardly ever: ties, a negative remainder beside zero, Inf, NaN; among
// ordinary ones, and so that each is met in its own tile. A step of nearly nothing writes ties, too.
TEST(Adamw, RarePairsOfWeightAndRemainderAreSteppedAsTheReferenceDoes) {
  const uint16_t weights[] = {0x0000, 0x8000, 0x0001, 0x3f80, 0x3f81, 0xbf81, 0x7f7f, 0x7f80, 0xff80, 0x7fc0, 0xffff};
  const int16_t remainders[] = {-32768, -32767, -1, 0, 1, 32767};
  for (const Combo &c : {kRemainder, kBlocks}) {
    for (const double lr : {1e-2, 1e-9, 0.0}) {
      for (int32_t isa = 0; tx_isa_name(isa); isa++) {
        ASSERT_EQ(tx_isa_select(tx_isa_name(isa), nullptr), TX_OK);
        const int64_t n = 66 * 256 + 77;
        Param ours(c, n), theirs(c, n);
        for (Param *p : {&ours, &theirs}) {
          p->Fill(11);
          for (int64_t i = 0; i < 66; i++) {
            std::memcpy(p->param.data() + 2 * (256 * i + i), &weights[i % 11], 2);
            std::memcpy(p->master.data() + 2 * (256 * i + i), &remainders[i / 11], 2);
          }
        }
        for (int step = 0; step < 2; step++) {
          Call call, reference;
          call.group.lr = reference.group.lr = lr;
          call.Add(ours);
          ASSERT_EQ(tx_adamw(call.Args(), nullptr, nullptr), TX_OK);
          ReferenceStep(theirs, reference, 7);
          ASSERT_EQ(ours.State(), theirs.State()) << Name(c) << " " << tx_isa_name(isa) << " lr " << lr;
        }
      }
    }
  }
  ASSERT_EQ(tx_isa_select(nullptr, nullptr), TX_OK);
}

// G4: beside the remainder the weights are those of the fp32 master, until a master meets the one pattern that the
// remainder stores an ulp lower.
TEST(Adamw, G4_RemainderFollowsTheFp32Master) {
  Param a(kBf16, 5000), b(kRemainder, 5000);
  a.Fill(1);
  b.Fill(1);
  for (int64_t i = 0; i < a.n; i++) {  // both begin from the rounded weight
    const float w = Get(TX_BF16, a.param.data(), i);
    std::memcpy(a.master.data() + 4 * i, &w, 4);
  }
  for (int step = 0; step < 50; step++) {
    a.FillGrad(step);
    b.FillGrad(step);
    Call ca, cb;
    ca.Add(a);
    cb.Add(b);
    ASSERT_EQ(tx_adamw(ca.Args(), nullptr, nullptr), TX_OK);
    ASSERT_EQ(tx_adamw(cb.Args(), nullptr, nullptr), TX_OK);
    for (int64_t i = 0; i < a.n; i++) {
      uint16_t w;
      int16_t r;
      float master;
      std::memcpy(&w, b.param.data() + 2 * i, 2);
      std::memcpy(&r, b.master.data() + 2 * i, 2);
      std::memcpy(&master, a.master.data() + 4 * i, 4);
      if (tx_bits_from_f32(master) - (static_cast<uint32_t>(tx_bf16_from_f32(master)) << 16) == 0x8000u) {
        const float lower = tx_remainder_decode(w, r);  // keep both in step after the inexact pattern
        std::memcpy(a.master.data() + 4 * i, &lower, 4);
        continue;
      }
      ASSERT_EQ(tx_bits_from_f32(tx_remainder_decode(w, r)), tx_bits_from_f32(master)) << step << " " << i;
    }
    ASSERT_EQ(a.param.copy(), b.param.copy()) << step;
  }
}

TEST(Adamw, CountsItsStepAndUsesIt) {
  Param p(kF32, 4);
  p.Fill(1);
  Call call;
  call.Add(p);
  for (int t = 1; t <= 3; t++) {
    ASSERT_EQ(tx_adamw(call.Args(), nullptr, nullptr), TX_OK);
    float step;
    std::memcpy(&step, p.step.data(), 4);
    EXPECT_EQ(step, static_cast<float>(t));
  }
}

// G2, G3: a step that must not be taken changes nothing but the count of skipped steps.
TEST(Adamw, G2_G3_SkipsWithoutAByteChanged) {
  struct Case {
    const char *name;
    float grad_scale, clip_coef, found_inf;
  };
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (const Case &c : {Case{"found_inf", 1, 1, 1},
                        {"clip_nan", 1, nan, 0},
                        {"clip_inf", 1, inf, 0},
                        {"scale_zero", 0, 1, 0},
                        {"scale_nan", nan, 1, 0}}) {
    SCOPED_TRACE(c.name);
    Param p(kBf16, 300);
    p.Fill(1);
    const auto before = p.State();
    Call call;
    call.Add(p);
    float values[3] = {c.grad_scale, c.clip_coef, c.found_inf};
    int64_t skipped = 4;
    call.args.grad_scale = {&values[0], 1, TX_F32, 0};
    call.args.clip_coef = {&values[1], 1, TX_F32, 0};
    call.args.found_inf = {&values[2], 1, TX_F32, 0};
    call.args.skipped = {&skipped, 1, TX_I64, 0};
    ASSERT_EQ(tx_adamw(call.Args(), nullptr, nullptr), TX_OK);
    EXPECT_EQ(p.State(), before);
    EXPECT_EQ(skipped, 5);
  }
}

TEST(Adamw, UnscalesAndClipsAsIfTheGradientHadBeen) {
  Param a(kF32, 1000), b(kF32, 1000);
  a.Fill(2);
  b.Fill(2);
  for (int64_t i = 0; i < a.n; i++) {
    const float g = Get(TX_F32, a.grad.data(), i) * 1024.0f;
    std::memcpy(a.grad.data() + 4 * i, &g, 4);
    const float clipped = Get(TX_F32, b.grad.data(), i) * 0.25f;
    std::memcpy(b.grad.data() + 4 * i, &clipped, 4);
  }
  float scale = 1024.0f, clip = 0.25f;
  Call ca, cb;
  ca.Add(a);
  cb.Add(b);
  ca.args.grad_scale = {&scale, 1, TX_F32, 0};
  ca.args.clip_coef = {&clip, 1, TX_F32, 0};
  ASSERT_EQ(tx_adamw(ca.Args(), nullptr, nullptr), TX_OK);
  ASSERT_EQ(tx_adamw(cb.Args(), nullptr, nullptr), TX_OK);
  EXPECT_EQ(a.State(), b.State());
}

TEST(Adamw, MaximizeIsMinimizeOfTheNegative) {
  Param a(kF32, 1000), b(kF32, 1000);
  a.Fill(2);
  b.Fill(2);
  for (int64_t i = 0; i < a.n; i++)
    b.grad.data()[4 * i + 3] ^= 0x80;
  Call ca, cb;
  ca.Add(a);
  cb.Add(b);
  ca.group.maximize = 1;
  ASSERT_EQ(tx_adamw(ca.Args(), nullptr, nullptr), TX_OK);
  ASSERT_EQ(tx_adamw(cb.Args(), nullptr, nullptr), TX_OK);
  EXPECT_EQ(a.State(), b.State());
}

TEST(Adamw, TensorsAndElementsMayBeNone) {
  Call empty;
  EXPECT_EQ(tx_adamw(empty.Args(), nullptr, nullptr), TX_OK);
  Param zero(kBf16, 0), one(kBf16, 1);
  one.Fill(1);
  Call call;
  call.Add(zero);
  call.Add(one);
  EXPECT_EQ(tx_adamw(call.Args(), nullptr, nullptr), TX_OK);
}

// Every refusal: what the message says, and that no byte changed.
struct Refusal {
  const char *name;
  void (*spoil)(Call &);
  tx_status status;
  const char *says;
};

const Refusal kRefusals[] = {
    {"size", [](Call &c) { c.args.size = 1; }, TX_ERROR_INVALID_ARGUMENT, "args.size"},
    {"shape", [](Call &c) { c.grads[1].numel--; }, TX_ERROR_SHAPE, "grads[1]"},
    {"exp_avg_shape", [](Call &c) { c.exp_avgs[0].numel--; }, TX_ERROR_SHAPE, "exp_avgs[0]"},
    {"master_shape", [](Call &c) { c.masters[0].numel--; }, TX_ERROR_SHAPE, "masters[0]"},
    {"negative", [](Call &c) { c.params[0].numel = -1; }, TX_ERROR_SHAPE, "params[0]"},
    {"absurd", [](Call &c) { c.params[0].numel = INT64_MAX; }, TX_ERROR_SHAPE, "2^56"},
    {"null", [](Call &c) { c.params[0].data = nullptr; }, TX_ERROR_INVALID_ARGUMENT, "params[0]"},
    {"grad_dtype", [](Call &c) { c.grads[0].dtype = TX_I16; }, TX_ERROR_DTYPE, "grads[0] may be"},
    {"param_dtype", [](Call &c) { c.params[0].dtype = TX_I16; }, TX_ERROR_DTYPE, "params[0] may be"},
    {"moment_dtype", [](Call &c) { c.exp_avg_sqs[1].dtype = TX_I16; }, TX_ERROR_DTYPE, "exp_avg_sqs[1] may be"},
    {"master_dtype", [](Call &c) { c.masters[0].dtype = TX_BF16; }, TX_ERROR_DTYPE, "masters[0] beside"},
    {"scales_missing", [](Call &c) { c.exp_avgs[0].dtype = TX_F16; }, TX_ERROR_SHAPE, "scales[0]"},
    {"step_dtype", [](Call &c) { c.steps[1].dtype = TX_I64; }, TX_ERROR_SHAPE, "steps[1]"},
    {"step_negative", [](Call &c) { *static_cast<float *>(c.steps[0].data) = -1; }, TX_ERROR_ILLEGAL_VALUE, "steps[0]"},
    {"step_fraction", [](Call &c) { *static_cast<float *>(c.steps[0].data) = 0.5f; }, TX_ERROR_ILLEGAL_VALUE, "whole"},
    {"group", [](Call &c) { c.meta[1].group = 1; }, TX_ERROR_ILLEGAL_VALUE, "meta[1]"},
    {"start", [](Call &c) { c.meta[1].start = -128; }, TX_ERROR_ILLEGAL_VALUE, "meta[1]"},
    {"lr_nan", [](Call &c) { c.group.lr = NAN; }, TX_ERROR_ILLEGAL_VALUE, "lr"},
    {"lr_negative", [](Call &c) { c.group.lr = -1; }, TX_ERROR_ILLEGAL_VALUE, "lr"},
    {"beta1", [](Call &c) { c.group.beta1 = 1; }, TX_ERROR_ILLEGAL_VALUE, "beta1"},
    {"beta2", [](Call &c) { c.group.beta2 = NAN; }, TX_ERROR_ILLEGAL_VALUE, "beta2"},
    {"eps", [](Call &c) { c.group.eps = -1e-8; }, TX_ERROR_ILLEGAL_VALUE, "eps"},
    {"decay", [](Call &c) { c.group.weight_decay = INFINITY; }, TX_ERROR_ILLEGAL_VALUE, "weight_decay"},
    {"rounding", [](Call &c) { c.args.moment_rounding = 3; }, TX_ERROR_ILLEGAL_VALUE, "moment_rounding"},
    {"twice", [](Call &c) { c.params[1] = c.params[0]; }, TX_ERROR_OVERLAP, "params[0]"},
    {"overlap", [](Call &c) { c.exp_avgs[1].data = static_cast<char *>(c.exp_avgs[0].data) + 2; }, TX_ERROR_OVERLAP,
     "exp_avgs[0]"},
    {"grad_is_written", [](Call &c) { c.grads[1].data = c.exp_avgs[0].data; }, TX_ERROR_OVERLAP, "share memory"},
};

class Refused : public testing::TestWithParam<Refusal> {};

TEST_P(Refused, ChangesNothing) {
  Param a(kBf16, 300), b(kBf16, 300);
  a.Fill(1);
  b.Fill(2);
  Call call;
  call.Add(a);
  call.Add(b);
  call.Args();
  GetParam().spoil(call);
  const auto before_a = a.State(), before_b = b.State();
  tx_error error = {};
  EXPECT_EQ(tx_adamw(&call.args, nullptr, &error), GetParam().status) << error.message;
  EXPECT_NE(std::string(error.message).find(GetParam().says), std::string::npos) << error.message;
  EXPECT_EQ(a.State(), before_a);
  EXPECT_EQ(b.State(), before_b);
}
INSTANTIATE_TEST_SUITE_P(Cases, Refused, testing::ValuesIn(kRefusals),
                         [](const auto &info) { return std::string(info.param.name); });

// One table of hyper-parameters serves several groups; lr tensors stand for its first column.
TEST(Adamw, GroupsShareACall) {
  Param a(kF32, 200), b(kF32, 200), c(kF32, 200), d(kF32, 200);
  for (Param *p : {&a, &b, &c, &d})
    p->Fill(9);
  const tx_adamw_group groups[2] = {{1e-2, 0.9, 0.999, 1e-8, 0.1, 0, 1}, {3e-3, 0.8, 0.95, 1e-6, 0.2, 0, 0}};
  Call both, first, second;
  both.Add(a);
  both.Add(b);
  both.meta[1].group = 1;
  both.Args();
  both.args.n_groups = 2;
  both.args.groups = groups;
  first.Add(c);
  first.group = groups[0];
  second.Add(d);
  second.group = groups[1];
  second.group.lr = 1;
  double lr = 3e-3;
  const tx_tensor lrs = {&lr, 1, TX_F64, 0};
  second.args.lrs = &lrs;
  ASSERT_EQ(tx_adamw(&both.args, nullptr, nullptr), TX_OK);
  ASSERT_EQ(tx_adamw(first.Args(), nullptr, nullptr), TX_OK);
  ASSERT_EQ(tx_adamw(second.Args(), nullptr, nullptr), TX_OK);
  EXPECT_EQ(a.State(), c.State());
  EXPECT_EQ(b.State(), d.State());
}

}  // namespace
