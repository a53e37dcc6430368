// tx_adamw: counting, skipping and scaling steps, and rejecting illegal arguments; tx_adamw_check rejects the same
// ones.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/core/adamw_call.h"
#include "tests/core/threads.h"

namespace {

using namespace adamw_call;

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

// G2, G3: a step that must be skipped changes nothing but the count of skipped steps.
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

// Illegal arguments, one at a time: the message, and that no byte changed. The same after an accepted call with notes.
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
    {"master_dtype", [](Call &c) { c.masters[0].dtype = TX_BF16; }, TX_ERROR_DTYPE, "masters[0] of a bf16 parameter"},
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

static void ExpectRefusal(const Refusal &refusal, bool noted) {
  Param a(kBf16, 300), b(kBf16, 300);
  std::vector<int64_t> notes(1024);
  a.Fill(1);
  b.Fill(2);
  Call call;
  call.Add(a);
  call.Add(b);
  call.Args();
  if (noted) {
    call.args.notes = notes.data();
    call.args.notes_bytes = static_cast<int64_t>(notes.size() * sizeof notes[0]);
    for (int again = 0; again < 2; again++)
      ASSERT_EQ(tx_adamw_check(&call.args, nullptr), TX_OK);
    ASSERT_EQ(notes[0], 1);
  }
  refusal.spoil(call);
  const auto before_a = a.State(), before_b = b.State();
  tx_error error = {};
  EXPECT_EQ(tx_adamw(&call.args, nullptr, &error), refusal.status) << error.message;
  EXPECT_NE(std::string(error.message).find(refusal.says), std::string::npos) << error.message;
  tx_error checked = {};
  EXPECT_EQ(tx_adamw_check(&call.args, &checked), refusal.status);
  EXPECT_STREQ(checked.message, error.message);
  EXPECT_EQ(a.State(), before_a);
  EXPECT_EQ(b.State(), before_b);
}

TEST_P(Refused, ChangesNothing) {
  ExpectRefusal(GetParam(), false);
  ExpectRefusal(GetParam(), true);
}
INSTANTIATE_TEST_SUITE_P(Cases, Refused, testing::ValuesIn(kRefusals),
                         [](const auto &info) { return std::string(info.param.name); });

TEST(AdamwCheck, TakesWhatTheStepTakesAndChangesNothing) {
  Param p(kBf16, 300);
  p.Fill(1);
  Call call;
  call.Add(p);
  call.Args();
  const auto before = p.State();
  tx_error error = {};
  EXPECT_EQ(tx_adamw_check(&call.args, &error), TX_OK) << error.message;
  EXPECT_EQ(p.State(), before);
  EXPECT_EQ(tx_adamw_check(nullptr, &error), TX_ERROR_INVALID_ARGUMENT);
}

// Parameters of one call may belong to different groups. lr tensors replace the groups' lr.
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
