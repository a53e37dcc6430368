// The checks that operators make before they write anything: tensors, overlaps, tensors of fixed shape, threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" {
#include "csrc/ops/check.h"
#include "csrc/ops/operator_checks.h"
}
#include "tests/core/arrays.h"

namespace {

char memory[4096];
tx_tensor At(int64_t byte, int64_t numel, tx_dtype dtype = TX_U8) {
  return {memory + byte, numel, dtype, 0};
}

TEST(CheckTensors, E10_ElementSizesAreThoseOfTheOperatorsDtypes) {
  for (auto [dtype, size] : std::vector<std::pair<tx_dtype, int64_t>>{
           {TX_F64, 8}, {TX_I64, 8}, {TX_F32, 4}, {TX_F16, 2}, {TX_BF16, 2}, {TX_I16, 2}, {TX_U8, 1}}) {
    EXPECT_EQ(tx_element_size(dtype), size) << DtypeName(dtype);
  }
  EXPECT_EQ(tx_element_size(TX_NONE), 0);
  EXPECT_EQ(tx_element_size(static_cast<tx_dtype>(99)), 0);
}

struct TensorCase {
  const char *name;
  tx_tensor tensor;
  tx_status status;
  const char *says;
};

class EachTensor : public testing::TestWithParam<TensorCase> {};
TEST_P(EachTensor, IsCheckedAndNamed) {
  const TensorCase &c = GetParam();
  const tx_tensor list[2] = {At(0, 4), c.tensor};
  const tx_span spans[] = {{"absent", nullptr, 5, 0}, {"things", list, 2, 1}};
  tx_error error = {};
  EXPECT_EQ(tx_check_tensors(spans, 2, &error), c.status);
  EXPECT_NE(std::string(error.message).find(c.says), std::string::npos) << error.message;
}
INSTANTIATE_TEST_SUITE_P(
    Cases, EachTensor,
    testing::Values(TensorCase{"fine", At(8, 3, TX_F32), TX_OK, ""},
                    TensorCase{"unaligned", At(1, 3, TX_F64), TX_OK, ""},
                    TensorCase{"empty_without_memory", {nullptr, 0, TX_NONE, 0}, TX_OK, ""},
                    TensorCase{"negative", At(0, -1), TX_ERROR_SHAPE, "things[1] has numel -1"},
                    TensorCase{"no_memory", {nullptr, 3, TX_F32, 0}, TX_ERROR_INVALID_ARGUMENT, "things[1]"},
                    TensorCase{"dtype", At(0, 2, TX_C64), TX_ERROR_DTYPE, "things[1] is"},
                    TensorCase{"none_dtype", At(0, 2, TX_NONE), TX_ERROR_DTYPE, "things[1] is"}),
    [](const auto &info) { return std::string(info.param.name); });

TEST(CheckTensors, CountsAreNotNegative) {
  const tx_span span = {"things", nullptr, -2, 0};
  tx_error error = {};
  EXPECT_EQ(tx_check_tensors(&span, 1, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(std::string(error.message).find("things has -2"), std::string::npos) << error.message;
}

// -- overlap ----------------------------------------------------------------------------------------------------

struct OverlapCase {
  const char *name;
  std::vector<tx_tensor> writes, reads;
  std::vector<const char *> says; /* expected in the message; empty: legal */
};

class Overlap : public testing::TestWithParam<OverlapCase> {};
TEST_P(Overlap, IsFoundAndBothAreNamed) {
  const OverlapCase &c = GetParam();
  const tx_span spans[] = {{"outs", c.writes.data(), static_cast<int64_t>(c.writes.size()), 1},
                           {"ins", c.reads.data(), static_cast<int64_t>(c.reads.size()), 0},
                           {"absent", nullptr, 3, 1}};
  tx_error error = {};
  EXPECT_EQ(tx_check_overlap(spans, 3, &error), c.says.empty() ? TX_OK : TX_ERROR_OVERLAP) << error.message;
  for (const char *part : c.says) {
    EXPECT_NE(std::string(error.message).find(part), std::string::npos) << error.message;
  }
}
const OverlapCase kOverlaps[] = {
    {"nothing", {}, {}, {}},
    {"apart", {At(0, 10), At(10, 10)}, {At(20, 10)}, {}},
    {"descending", {At(300, 10), At(200, 10), At(100, 10)}, {At(0, 10)}, {}},
    {"touching_in_bytes", {At(0, 4, TX_F32), At(16, 4, TX_F32)}, {At(32, 1)}, {}},
    {"read_twice", {At(0, 10)}, {At(100, 10), At(100, 10), At(105, 10)}, {}},
    {"empty_inside", {At(0, 10), At(5, 0)}, {At(5, 0)}, {}},
    {"same", {At(0, 10), At(50, 5), At(0, 10)}, {}, {"outs[0]", "outs[2]"}},
    {"by_one_byte", {At(0, 4, TX_F32), At(15, 4)}, {}, {"outs[0]", "outs[1]"}},
    {"inside", {At(0, 100), At(40, 2)}, {}, {"outs[0]", "outs[1]"}},
    {"read_what_is_written", {At(0, 10)}, {At(100, 5), At(9, 5)}, {"outs[0]", "ins[1]"}},
    {"inside_the_third_of_neighbours", {At(0, 9), At(9, 9), At(18, 9), At(20, 1)}, {}, {"outs[2]", "outs[3]"}},
    {"across_an_edge_of_neighbours", {At(8, 2)}, {At(0, 9), At(9, 9), At(18, 9)}, {"outs[0]", "ins[0]"}},
    {"in_the_last_of_read_neighbours", {At(19, 2)}, {At(0, 9), At(9, 9), At(18, 9)}, {"outs[0]", "ins[2]"}},
    {"written_inside_a_long_read", {At(50, 2)}, {At(0, 100), At(10, 2)}, {"outs[0]", "ins[0]"}},
};
INSTANTIATE_TEST_SUITE_P(Cases, Overlap, testing::ValuesIn(kOverlaps),
                         [](const auto &info) { return std::string(info.param.name); });

TEST(CheckOverlap, AgreesWithEveryPairLookedAt) {
  std::mt19937 generator(1);
  int found = 0;
  for (int round = 0; round < 3000; round++) {
    std::vector<tx_tensor> lists[2];
    const int n = 1 + static_cast<int>(generator() % 9);
    for (int i = 0; i < n; i++) {
      lists[generator() % 2].push_back(At(static_cast<int64_t>(generator() % 400), generator() % 30));
    }
    bool expected = false;
    for (int a = 0; a < 2; a++) {
      for (size_t i = 0; i < lists[a].size(); i++) {
        for (size_t j = 0; j < lists[0].size(); j++) {
          const tx_tensor &x = lists[a][i], &y = lists[0][j];
          if (a == 0 && i == j) continue;
          const char *x0 = static_cast<char *>(x.data), *y0 = static_cast<char *>(y.data);
          expected |= x.numel && y.numel && x0 < y0 + y.numel && y0 < x0 + x.numel;
        }
      }
    }
    const tx_span spans[] = {{"outs", lists[0].data(), static_cast<int64_t>(lists[0].size()), 1},
                             {"ins", lists[1].data(), static_cast<int64_t>(lists[1].size()), 0}};
    ASSERT_EQ(tx_check_overlap(spans, 2, nullptr), expected ? TX_ERROR_OVERLAP : TX_OK) << round;
    found += expected;
  }
  EXPECT_GT(found, 500);
  EXPECT_LT(found, 2500);
}

// -- small checks -----------------------------------------------------------------------------------------------------

TEST(CheckFixed, OneShapeOneDtypeAndPerhapsNone) {
  tx_error error = {};
  EXPECT_EQ(tx_check_fixed("scale", None(), TX_F32, 1, 0, &error), TX_OK);
  EXPECT_EQ(tx_check_fixed("scale", At(0, 1, TX_F32), TX_F32, 1, 1, &error), TX_OK);
  EXPECT_EQ(tx_check_fixed("scale", None(), TX_F32, 1, 1, &error), TX_ERROR_SHAPE);
  EXPECT_EQ(tx_check_fixed("scale", At(0, 2, TX_F32), TX_F32, 1, 0, &error), TX_ERROR_SHAPE);
  EXPECT_STREQ(error.message, "scale has 2 elements; 1 (or 0: none) is legal");
  EXPECT_EQ(tx_check_fixed("scale", At(0, 1, TX_F64), TX_F32, 1, 0, &error), TX_ERROR_DTYPE);
}

TEST(CheckSameNumel, NamesBothAndTheIndex) {
  const tx_tensor a[2] = {At(0, 1), At(0, 2)}, b[2] = {At(0, 1), At(0, 3)};
  tx_error error = {};
  EXPECT_EQ(tx_check_same_numel("as", a, "bs", a, 2, &error), TX_OK);
  EXPECT_EQ(tx_check_same_numel("as", a, "bs", b, 2, &error), TX_ERROR_SHAPE);
  EXPECT_STREQ(error.message, "as[1] has 2 elements and bs[1] has 3; they must be equal");
}

TEST(CheckParallel, WantsASizeAndSomethingToRun) {
  tx_error error = {};
  tx_parallel parallel = TX_PARALLEL_INIT;
  EXPECT_EQ(tx_check_parallel(nullptr, &error), TX_OK);
  EXPECT_EQ(tx_check_parallel(&parallel, &error), TX_OK);
  parallel.num_threads = 2;
  EXPECT_EQ(tx_check_parallel(&parallel, &error), TX_ERROR_INVALID_ARGUMENT);
  parallel.size = 3;
  EXPECT_EQ(tx_check_parallel(&parallel, &error), TX_ERROR_INVALID_ARGUMENT);
}

TEST(CheckRounding, KnowsThree) {
  for (int rounding : {0, 1, 2})
    EXPECT_EQ(tx_check_rounding("r", rounding, nullptr), TX_OK);
  for (int rounding : {-1, 3})
    EXPECT_EQ(tx_check_rounding("r", rounding, nullptr), TX_ERROR_ILLEGAL_VALUE);
}

// -- device memory ----------------------------------------------------------------------------------------------------

// A tensor at an address that the host cannot read.
tx_tensor Device(int page, int64_t numel, tx_dtype dtype) {
  return {reinterpret_cast<void *>(static_cast<uintptr_t>(page) * 4096), numel, dtype, 0};
}

struct DeviceStep {
  tx_tensor param = Device(1, 8, TX_F32), grad = Device(2, 8, TX_F32), exp_avg = Device(3, 8, TX_F32),
            exp_avg_sq = Device(4, 8, TX_F32), step = Device(5, 1, TX_F32), lr = Device(6, 1, TX_F32);
  tx_adamw_group group = {1e-3, 0.9, 0.999, 1e-8, 0.0, 0, 1};
  tx_adamw_args args = TX_ADAMW_ARGS_INIT;
  DeviceStep() {
    args.n = args.n_groups = 1;
    args.params = &param;
    args.grads = &grad;
    args.exp_avgs = &exp_avg;
    args.exp_avg_sqs = &exp_avg_sq;
    args.steps = &step;
    args.lrs = &lr;
    args.groups = &group;
  }
};

TEST(CheckAdamw, LooksAtNoMemoryWhereItIsADevices) {
  DeviceStep call;
  tx_error error = {};
  EXPECT_EQ(tx_check_adamw(&call.args, 0, &error), TX_OK) << error.message;
}

TEST(CheckAdamw, StillChecksWhatTheHostKnowsOfADevicesTensors) {
  tx_error error = {};
  DeviceStep wide;
  wide.step.dtype = TX_F64;
  EXPECT_EQ(tx_check_adamw(&wide.args, 0, &error), TX_ERROR_SHAPE);
  EXPECT_STREQ(error.message, "steps[0] is 1 elements of float64; one fp32 is legal");
  DeviceStep uphill;
  uphill.args.lrs = nullptr;
  uphill.group.lr = -1;
  EXPECT_EQ(tx_check_adamw(&uphill.args, 0, &error), TX_ERROR_ILLEGAL_VALUE);
  EXPECT_STREQ(error.message, "groups[0]: lr is -1.0; a finite number >= 0 is legal");
  DeviceStep shared;
  shared.grad = shared.exp_avg;
  EXPECT_EQ(tx_check_adamw(&shared.args, 0, &error), TX_ERROR_OVERLAP);
}

TEST(CheckAdamw, ReadsStepsAndLrsOfTheHost) {
  DeviceStep call;
  tx_error error = {};
  float step = 0.5f, lr = -1.0f;
  call.step.data = &step;
  call.lr.data = &lr;
  EXPECT_EQ(tx_check_adamw(&call.args, 1, &error), TX_ERROR_ILLEGAL_VALUE);
  EXPECT_STREQ(error.message, "groups[0]: lr is -1.0; a finite number >= 0 is legal");
  lr = 1.0f;
  EXPECT_EQ(tx_check_adamw(&call.args, 1, &error), TX_ERROR_ILLEGAL_VALUE);
  EXPECT_STREQ(error.message, "steps[0] is 0.5; a whole number in [0, 2^24) is legal");
}

// -- hyper-parameters

struct Hyperparameter {
  const char *name;
  double tx_adamw_group::*member;
  bool (*is_legal)(double);
  const char *rule;
};

bool IsFinite(double x) {
  return std::isfinite(x) && x >= 0;
}
bool IsBeta(double x) {
  return x >= 0 && x < 1;
}
bool IsFlag(double x) {
  return x == 0 || x == 1;
}

const Hyperparameter kHyperparameters[] = {
    {"lr", &tx_adamw_group::lr, IsFinite, "a finite number >= 0"},
    {"betas[0]", &tx_adamw_group::beta1, IsBeta, "a number in [0, 1)"},
    {"betas[1]", &tx_adamw_group::beta2, IsBeta, "a number in [0, 1)"},
    {"eps", &tx_adamw_group::eps, IsFinite, "a finite number >= 0"},
    {"weight_decay", &tx_adamw_group::weight_decay, IsFinite, "a finite number >= 0"},
    {"maximize", &tx_adamw_group::maximize, IsFlag, "0 or 1"},
    {"decoupled", &tx_adamw_group::decoupled, IsFlag, "0 or 1"},
};

struct Value {
  double value;
  const char *text;
};

const Value kValues[] = {
    {-1, "-1.0"},
    {-0.0, "-0.0"},
    {0, "0.0"},
    {-5e-324, "-4.94065645841247e-324"},
    {0.1, "0.1"},
    {-0.1, "-0.1"},
    {1 - 0x1p-53, "0.99999999999999989"},
    {1, "1.0"},
    {1.5, "1.5"},
    {10, "10.0"},
    {-1e-5, "-1e-05"},
    {1e300, "1e+300"},
    {HUGE_VAL, "inf"},
    {-HUGE_VAL, "-inf"},
    {std::nan(""), "nan"},
    {-std::nan(""), "nan"},
};

TEST(CheckAdamwGroups, EachHyperparameterByItsRangeAndName) {
  const tx_adamw_group legal = {1e-3, 0.9, 0.999, 1e-8, 0.0, 0, 1};
  tx_error error = {};
  EXPECT_EQ(tx_adamw_check_groups(&legal, 1, nullptr, &error), TX_OK) << error.message;
  for (const Hyperparameter &h : kHyperparameters) {
    for (const Value &v : kValues) {
      tx_adamw_group group = legal;
      group.*h.member = v.value;
      const tx_status status = tx_adamw_check_groups(&group, 1, "loaded state: ", &error);
      EXPECT_EQ(status, h.is_legal(v.value) ? TX_OK : TX_ERROR_ILLEGAL_VALUE) << h.name << " " << v.text;
      if (status == TX_OK) continue;
      const std::string told = std::string(h.name) + " is " + v.text + "; " + h.rule + " is legal";
      EXPECT_EQ(error.message, "loaded state: " + told);
      const tx_adamw_group groups[] = {legal, group, legal};
      EXPECT_EQ(tx_adamw_check_groups(groups, 3, nullptr, &error), status);
      EXPECT_EQ(error.message, "group 1: " + told);
    }
  }
  EXPECT_EQ(tx_adamw_check_groups(nullptr, 0, "", &error), TX_OK);
  EXPECT_EQ(tx_adamw_check_groups(nullptr, 1, "", &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_adamw_check_groups(&legal, -1, "", &error), TX_ERROR_INVALID_ARGUMENT);
}

TEST(CheckAdamwGroups, TheStepTakesWhatItTakes) {
  std::mt19937_64 random(23);
  std::uniform_int_distribution<size_t> which(0, std::size(kValues) - 1);
  for (int round = 0; round < 2000; round++) {
    DeviceStep call;
    call.args.lrs = nullptr;
    for (const Hyperparameter &h : kHyperparameters) {
      if (random() % 8 == 0) call.group.*h.member = kValues[which(random)].value;
    }
    tx_error of_the_group = {}, of_the_step = {};
    const tx_status status = tx_adamw_check_groups(&call.group, 1, nullptr, &of_the_group);
    ASSERT_EQ(tx_check_adamw(&call.args, 0, &of_the_step), status);
    const std::string step = of_the_step.message, group = of_the_group.message;
    ASSERT_EQ(status == TX_OK, step.empty());
    // The two functions name groups and betas differently; the rest of the message is equal.
    ASSERT_EQ(step.substr(std::min(step.find(" is "), step.size())),
              group.substr(std::min(group.find(" is "), group.size())));
  }
}

}  // namespace
