// csrc/core/cycle: what a machine answers, event by event. Whole programs are in cycle_simulation_test.cc.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "csrc/torch_ext_cycle.h"

namespace {

const char *const kNames[] = {"embed", "head"};
const char *const kUnits[] = {"unit 'a'", "unit 'b'"};
const int64_t kBucketOf[] = {1, 0};
const int64_t kBufferOf[] = {0, 0};

tx_cycle_args Args(int32_t kind) {
  tx_cycle_args args = {};
  args.size = sizeof args;
  args.n_params = args.n_buckets = 2;
  args.bucket_of = kBucketOf;
  args.buffer_of = kBufferOf;
  args.names = kNames;
  args.units = kUnits;
  args.slots = 2;
  args.kind = kind;
  args.world = 1;
  args.check_for_nan = 1;
  return args;
}

struct Machine {
  explicit Machine(int32_t kind) : Machine(Args(kind)) {}
  explicit Machine(const tx_cycle_args &args) : memory(static_cast<size_t>(tx_cycle_bytes(&args)) / 8) {
    tx_error error;
    EXPECT_EQ(tx_cycle_init(memory.data(), static_cast<int64_t>(memory.size() * 8), &args, &c, &error), TX_OK)
        << error.message;
  }

  // What is left to do, with what the driver answers; ends before a kind in `until`.
  std::string Drain(int32_t until = -1) {
    std::string done;
    for (tx_cycle_action action; tx_cycle_next(c, &action) && action.kind != until;) {
      done += " " + std::to_string(action.kind);
      if (action.kind == TX_DO_REPORT) {
        report.assign(static_cast<size_t>(tx_cycle_report_bytes(c, 0)), 0);
        const uint8_t requires_grad[] = {1, 1};
        tx_cycle_report(c, nonfinite, requires_grad, nullptr, 0, report.data());
      }
      if (action.kind == TX_DO_READ) {
        const uint8_t *rows[] = {report.data()}, *scratch[1];
        tx_cycle_read(c, rows, scratch, 0, 0);
      }
      if (action.kind == TX_DO_INSPECT) (void)tx_cycle_missing(c, action.first, TX_GRAD_NONE, 1);
      if (action.kind == TX_DO_RAISE) verdict = action.text;
      tx_cycle_done(c, 0);
    }
    return done;
  }

  std::vector<int64_t> memory;
  std::vector<uint8_t> report;
  std::string verdict;
  int64_t nonfinite = -1;
  tx_cycle *c = nullptr;
};

TEST(Cycle, ABackwardThatReduces) {
  Machine machine(TX_CYCLE_NO_SHARD);
  EXPECT_EQ(tx_cycle_begin(machine.c, 1, 0), 0);
  EXPECT_EQ(tx_cycle_ready(machine.c, 0), 1) << "its bucket is complete";
  EXPECT_EQ(machine.Drain(), "") << "but not the one before it";
  EXPECT_EQ(tx_cycle_ready(machine.c, 1), 1);
  EXPECT_EQ(machine.Drain(), " 1 2 1 2");
  EXPECT_EQ(tx_cycle_end(machine.c), 1);
  EXPECT_EQ(machine.Drain(), " 5 6 6 7 8");
  EXPECT_EQ(tx_cycle_phase_of(machine.c), TX_PHASE_IDLE);
  EXPECT_EQ(tx_cycle_number(machine.c), 1);
  EXPECT_EQ(tx_cycle_check_step(machine.c, nullptr), 0);
}

TEST(Cycle, AMissingGradientIsTheVerdict) {
  Machine machine(TX_CYCLE_NO_SHARD);
  tx_cycle_begin(machine.c, 1, 0);
  tx_cycle_ready(machine.c, 1);
  tx_cycle_end(machine.c);
  machine.Drain();
  EXPECT_EQ(machine.verdict.find("no gradient is ready for 'embed' on rank 0. The loss does not depend"), 0u)
      << machine.verdict;
}

TEST(Cycle, AGradientThatIsNotFiniteIsTheVerdictAndStepsAreRefusedUntilZeroGrad) {
  Machine machine(TX_CYCLE_OPTIM);
  machine.nonfinite = 1;
  tx_cycle_begin(machine.c, 1, 0);
  tx_cycle_ready(machine.c, 0);
  tx_cycle_ready(machine.c, 1);
  tx_cycle_end(machine.c);
  machine.Drain();
  EXPECT_EQ(machine.verdict,
            "gradients with NaN or Inf before communication (check_for_nan_in_grad): 'head' on rank 0. Nothing was "
            "stepped; call zero_grad() before going on.");
  EXPECT_EQ(tx_cycle_check_step(machine.c, nullptr), -1);
  EXPECT_STREQ(tx_cycle_refusal(machine.c),
               "step() with gradients that have NaN or Inf ('head' and perhaps others), as backward said "
               "(check_for_nan_in_grad): call zero_grad() first");
  const int64_t both[] = {0, 1};
  tx_cycle_zero(machine.c, both, 2);
  EXPECT_EQ(tx_cycle_check_step(machine.c, nullptr), 0);
}

TEST(Cycle, AnActionThatWasNotDoneIsHandedOutAgain) {
  Machine machine(TX_CYCLE_OPTIM_GRADS);
  tx_cycle_begin(machine.c, 1, 0);
  tx_cycle_ready(machine.c, 1);
  tx_cycle_action first, again;
  ASSERT_EQ(tx_cycle_next(machine.c, &first), TX_DO_CHECK);
  ASSERT_EQ(tx_cycle_next(machine.c, &again), TX_DO_CHECK);
  EXPECT_EQ(std::memcmp(&first, &again, sizeof first), 0);
}

TEST(Cycle, AfterAFailureEveryBackwardAndStepIsRefusedWithItsText) {
  Machine machine(TX_CYCLE_NO_SHARD);
  tx_cycle_fail(machine.c, "rank 3 was lost");
  tx_cycle_fail(machine.c, "another text");
  EXPECT_EQ(tx_cycle_begin(machine.c, 1, 0), -1);
  EXPECT_STREQ(tx_cycle_refusal(machine.c), "gradients cannot be reduced any more: rank 3 was lost");
  EXPECT_EQ(tx_cycle_check_step(machine.c, nullptr), -1);
  EXPECT_STREQ(tx_cycle_refusal(machine.c), "step() after an exchange that failed: rank 3 was lost");
}

TEST(Cycle, AfterAFailureNothingMoreOfTheBackwardIsSent) {
  Machine machine(TX_CYCLE_OPTIM_GRADS);
  tx_cycle_begin(machine.c, 1, 0);
  tx_cycle_ready(machine.c, 1);
  EXPECT_EQ(machine.Drain(TX_DO_SEND), " 1");  // the message is handed out, and fails
  tx_cycle_fail(machine.c, "connection reset");
  EXPECT_EQ(machine.Drain(), "");
  tx_cycle_ready(machine.c, 0);
  EXPECT_EQ(machine.Drain(), "");
  tx_cycle_died(machine.c, nullptr);
  EXPECT_EQ(machine.Drain(), " 10");
  EXPECT_EQ(tx_cycle_phase_of(machine.c), TX_PHASE_IDLE);
}

TEST(Cycle, BadArgumentsAreTold) {
  std::vector<int64_t> memory(10000);
  tx_cycle *c = nullptr;
  tx_error error;
  const auto status = [&](const std::function<void(tx_cycle_args *)> &change) {
    tx_cycle_args args = Args(TX_CYCLE_OPTIM);
    change(&args);
    return tx_cycle_init(memory.data(), static_cast<int64_t>(memory.size() * 8), &args, &c, &error);
  };
  const int64_t descending[] = {1, 0}, outside[] = {0, 2};
  EXPECT_EQ(status([](tx_cycle_args *) {}), TX_OK);
  EXPECT_EQ(status([](tx_cycle_args *a) { a->size = 8; }), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(status([](tx_cycle_args *a) { a->kind = 5; }), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(status([](tx_cycle_args *a) { a->rank = 1; }), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(status([](tx_cycle_args *a) { a->slots = 0; }), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(status([](tx_cycle_args *a) { a->names = nullptr; }), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(status([&](tx_cycle_args *a) { a->buffer_of = descending; }), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(status([&](tx_cycle_args *a) { a->bucket_of = outside; }), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(status([](tx_cycle_args *a) { a->n_params = -1; }), TX_ERROR_INVALID_ARGUMENT);
}

// -- every event in every state that a small machine reaches
// -----------------------------------------------------------

using Event = std::function<int32_t(Machine &)>;

int32_t Next(Machine &machine, bool acknowledge) {
  tx_cycle_action action;
  const int32_t kind = tx_cycle_next(machine.c, &action);
  EXPECT_GE(kind, TX_DO_NOTHING);
  EXPECT_LE(kind, TX_DO_RECOVERED);
  if (kind == TX_DO_REPORT) {
    machine.report.assign(static_cast<size_t>(tx_cycle_report_bytes(machine.c, 0)), 0);
    const uint8_t requires_grad[] = {1, 1};
    tx_cycle_report(machine.c, -1, requires_grad, nullptr, 0, machine.report.data());
  }
  if (kind == TX_DO_READ && acknowledge) {
    const uint8_t *rows[] = {machine.report.data()}, *scratch[1];
    tx_cycle_read(machine.c, rows, scratch, 0, 0);
  }
  if (acknowledge && kind) tx_cycle_done(machine.c, 0);
  return kind;
}

const Event kAll[] = {
    [](Machine &m) { return tx_cycle_begin(m.c, 1, 0); },
    [](Machine &m) { return tx_cycle_begin(m.c, 0, 0); },
    [](Machine &m) { return tx_cycle_ready(m.c, 0); },
    [](Machine &m) { return tx_cycle_ready(m.c, 1); },
    [](Machine &m) { return tx_cycle_given(m.c, 0, 5, 1, 0); },
    [](Machine &m) { return tx_cycle_given(m.c, 1, 5, 1, 1); },
    [](Machine &m) { return tx_cycle_end(m.c); },
    [](Machine &m) { return tx_cycle_died(m.c, nullptr), 0; },
    [](Machine &m) { return tx_cycle_check_step(m.c, nullptr); },
    [](Machine &m) { return Next(m, true), 0; },
    [](Machine &m) { return Next(m, false), 0; },
    [](Machine &m) {
      while (Next(m, true)) {
      }
      return 0;
    },
};
constexpr size_t kEvents = sizeof kAll / sizeof *kAll;

class EveryEvent : public testing::TestWithParam<int32_t> {
 protected:
  // A refused event changes nothing but the refusal, and says why; a machine can always be brought back to IDLE.
  void Follow(const std::vector<size_t> &path) {
    Machine machine(GetParam());
    for (size_t step : path) {
      const std::vector<int64_t> before = machine.memory;
      if (kAll[step](machine) >= 0) continue;
      ASSERT_STRNE(tx_cycle_refusal(machine.c), "");
      const auto *refusal = reinterpret_cast<const int64_t *>(tx_cycle_refusal(machine.c));
      for (size_t k = 0; k < before.size(); k++) {
        const bool in_refusal = &machine.memory[k] + 1 > refusal && &machine.memory[k] < refusal + 8192 / 8 + 1;
        ASSERT_TRUE(in_refusal || machine.memory[k] == before[k]) << "word " << k;
      }
    }
    tx_cycle_died(machine.c, nullptr);
    for (int k = 0; Next(machine, true); k++)
      ASSERT_LT(k, 20);
    ASSERT_EQ(tx_cycle_phase_of(machine.c), TX_PHASE_IDLE);
    ASSERT_EQ(tx_cycle_begin(machine.c, 1, 0), 0) << "and goes on: " << tx_cycle_refusal(machine.c);
  }
};

TEST_P(EveryEvent, InEveryStateThatAFewLeadTo) {
  const size_t depth = 3;
  for (size_t code = 0; code < kEvents * kEvents * kEvents && !HasFatalFailure(); code++) {
    std::vector<size_t> path(depth);
    size_t rest = code;
    for (size_t &step : path) {
      step = rest % kEvents;
      rest /= kEvents;
    }
    Follow(path);
  }
}

TEST_P(EveryEvent, AtTheEndOfRandomOnes) {
  std::mt19937 random(11);
  for (int walk = 0; walk < 3000 && !HasFatalFailure(); walk++) {
    std::vector<size_t> path(3 + random() % 12);
    for (size_t &step : path)
      step = random() % kEvents;
    Follow(path);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, EveryEvent, testing::Range(0, 5));

}  // namespace
