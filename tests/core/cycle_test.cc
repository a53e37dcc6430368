// csrc/core/cycle: the state machine's answers, event by event. cycle_simulation_test.cc runs whole programs.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <iostream>
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

  // Performs the pending actions as a driver would; stops before the first action of kind `until`. Returns the kinds of
  // those that it performed.
  std::string Drain(int32_t until = -1) {
    std::string done;
    for (tx_cycle_action action; tx_cycle_next(c, &action) && action.kind != until;) {
      done += " " + std::to_string(action.kind);
      if (action.kind == TX_DO_REPORT) {
        report.assign(static_cast<size_t>(tx_cycle_report_bytes(c)), 0);
        const uint8_t requires_grad[] = {1, 1};
        tx_cycle_report(c, nonfinite, requires_grad, report.data());
      }
      if (action.kind == TX_DO_READ) {
        const uint8_t *rows[] = {report.data()}, *scratch[1];
        tx_cycle_read(c, rows, scratch, 0);
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

TEST(Cycle, ASendThatWasNotAcknowledgedIsWaitedForIfItWasSent) {
  for (const bool acknowledged : {false, true}) {
    Machine machine(TX_CYCLE_NO_SHARD);
    ASSERT_EQ(tx_cycle_begin(machine.c, 1, 0), 0);
    ASSERT_EQ(tx_cycle_ready(machine.c, 1), 1);
    ASSERT_EQ(tx_cycle_ready(machine.c, 0), 1);
    EXPECT_EQ(machine.Drain(TX_DO_SEND), " 1");
    tx_cycle_action action;
    ASSERT_EQ(tx_cycle_next(machine.c, &action), TX_DO_SEND);
    tx_cycle_done(machine.c, 0);
    EXPECT_EQ(machine.Drain(TX_DO_SEND), " 1");
    ASSERT_EQ(tx_cycle_next(machine.c, &action), TX_DO_SEND);
    if (acknowledged) tx_cycle_done(machine.c, 0);
    tx_cycle_died(machine.c, nullptr);
    ASSERT_EQ(tx_cycle_next(machine.c, &action), TX_DO_WAIT);
    EXPECT_EQ(action.message, 0);
    EXPECT_EQ(action.flags, TX_WAIT_DISCARD) << "the first one was acknowledged";
    tx_cycle_done(machine.c, 0);
    ASSERT_EQ(tx_cycle_next(machine.c, &action), TX_DO_WAIT);
    EXPECT_EQ(action.message, 1);
    EXPECT_EQ(action.flags, acknowledged ? TX_WAIT_DISCARD : TX_WAIT_DISCARD | TX_WAIT_IF_SENT);
    tx_cycle_done(machine.c, 0);
    EXPECT_EQ(machine.Drain(), " 10");
    ASSERT_EQ(tx_cycle_begin(machine.c, 1, 0), 0);
    ASSERT_EQ(tx_cycle_ready(machine.c, 1), 1);
    EXPECT_EQ(machine.Drain(), " 1 2");
    tx_cycle_died(machine.c, nullptr);
    ASSERT_EQ(tx_cycle_next(machine.c, &action), TX_DO_WAIT);
    EXPECT_EQ(action.flags, TX_WAIT_DISCARD) << "nothing is left of the backward before";
  }
}

TEST(Cycle, ElementsThatAreHandedOverAreCountedWithinBounds) {
  tx_cycle_args args = Args(TX_CYCLE_UNITS);
  args.find_unused = 1;
  Machine machine(args);
  ASSERT_EQ(tx_cycle_begin(machine.c, 1, 0), 0);
  for (const int64_t numel : {int64_t{-1}, INT64_MIN, INT64_MAX, int64_t{1} << 48}) {
    EXPECT_EQ(tx_cycle_given(machine.c, 0, numel, 1, 0), -1);
    EXPECT_NE(std::strstr(tx_cycle_refusal(machine.c), "elements are handed over; legal: 0 ... "), nullptr);
  }
  for (int64_t k = 0; k < 1 << 17; k++) /* 2^48 - 1 elements each: their sum needs more than 63 bits */
    ASSERT_EQ(tx_cycle_given(machine.c, 0, (int64_t{1} << 48) - 1, 0, 0), 1);
  EXPECT_EQ(tx_cycle_end(machine.c), 1);
  EXPECT_NE(machine.Drain(), "");
  EXPECT_EQ(machine.verdict, "");
}

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
  EXPECT_EQ(tx_cycle_check_step(machine.c, nullptr, nullptr), 0);
}

TEST(Cycle, SeveralGradientsAtOnce) {
  Machine machine(TX_CYCLE_NO_SHARD);
  EXPECT_EQ(tx_cycle_completed_by(machine.c)[0], -1) << "not known yet";
  const int64_t both[] = {0, 1}, again[] = {1, 0}, beyond[] = {0, 2};
  EXPECT_EQ(tx_cycle_ready_several(machine.c, both, 2), -1) << "no backward has begun";
  EXPECT_EQ(tx_cycle_begin(machine.c, 1, 0), 0);
  EXPECT_EQ(tx_cycle_ready_several(machine.c, both, 0), 0);
  EXPECT_EQ(tx_cycle_ready_several(machine.c, both, 2), 1);
  EXPECT_EQ(machine.Drain(), " 1 2 1 2");
  EXPECT_EQ(tx_cycle_completed_by(machine.c)[0], 1);
  EXPECT_EQ(tx_cycle_completed_by(machine.c)[1], 0);
  EXPECT_EQ(tx_cycle_ready_several(machine.c, again, 2), -1);
  EXPECT_STREQ(tx_cycle_refusal(machine.c), "the gradient of parameter 'head' was ready twice in one backward");
  tx_cycle_end(machine.c);
  machine.Drain();
  EXPECT_EQ(tx_cycle_begin(machine.c, 1, 0), 0);
  EXPECT_EQ(tx_cycle_ready_several(machine.c, beyond, 2), -1);
  EXPECT_STREQ(tx_cycle_refusal(machine.c), "parameter 2 is ready; legal: 0 ... 1");
  EXPECT_EQ(tx_cycle_ready_several(machine.c, again, 1), 1) << "the one before it is ready";
  EXPECT_EQ(machine.Drain(), " 1 2 1 2");
  Machine given(TX_CYCLE_DDP_HOOK);
  EXPECT_EQ(tx_cycle_completed_by(given.c), nullptr);
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
  EXPECT_EQ(tx_cycle_check_step(machine.c, nullptr, nullptr), -1);
  EXPECT_STREQ(tx_cycle_refusal(machine.c),
               "step() with gradients that have NaN or Inf ('head' and perhaps others), as backward said "
               "(check_for_nan_in_grad): call zero_grad() first");
  const int64_t both[] = {0, 1};
  tx_cycle_zero(machine.c, both, 2);
  EXPECT_EQ(tx_cycle_check_step(machine.c, nullptr, nullptr), 0);
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
  EXPECT_EQ(tx_cycle_check_step(machine.c, nullptr, nullptr), -1);
  EXPECT_STREQ(tx_cycle_refusal(machine.c), "step() after an exchange that failed: rank 3 was lost");
  EXPECT_EQ(tx_cycle_check_step(machine.c, nullptr, "clip_grad_norm_()"), -1);
  EXPECT_STREQ(tx_cycle_refusal(machine.c), "clip_grad_norm_() after an exchange that failed: rank 3 was lost");
}

TEST(Cycle, AfterAFailureNothingMoreOfTheBackwardIsSent) {
  Machine machine(TX_CYCLE_OPTIM_GRADS);
  tx_cycle_begin(machine.c, 1, 0);
  tx_cycle_ready(machine.c, 1);
  EXPECT_EQ(machine.Drain(TX_DO_SEND), " 1");  // the message is handed out, and sending it fails
  tx_cycle_fail(machine.c, "connection reset");
  EXPECT_EQ(machine.Drain(), "");
  tx_cycle_ready(machine.c, 0);
  EXPECT_EQ(machine.Drain(), "");
  tx_cycle_died(machine.c, nullptr);
  EXPECT_EQ(machine.Drain(), " 10");
  EXPECT_EQ(tx_cycle_phase_of(machine.c), TX_PHASE_IDLE);
}

// What one of `world` ranks says at the end of a cycle, given the reports of all ranks. write: changes a rank's report.
std::string VerdictOn(tx_cycle_args args, const std::function<void(Machine &, int32_t rank, uint8_t *report)> &write) {
  Machine machine(args);
  EXPECT_EQ(tx_cycle_begin(machine.c, 1, 0), 0);
  const size_t bytes = static_cast<size_t>(tx_cycle_report_bytes(machine.c));
  std::vector<uint8_t> own(bytes), all(bytes * static_cast<size_t>(args.world));
  const std::vector<uint8_t> trained(static_cast<size_t>(args.n_params), 1);
  tx_cycle_report(machine.c, -1, trained.data(), own.data());
  std::vector<const uint8_t *> reports, states(static_cast<size_t>(args.world));
  for (int32_t r = 0; r < args.world; r++) {
    uint8_t *report = all.data() + static_cast<size_t>(r) * bytes;
    std::memcpy(report, own.data(), bytes);
    write(machine, r, report);
    reports.push_back(report);
  }
  tx_cycle_read(machine.c, reports.data(), states.data(), 0);
  tx_cycle_end(machine.c);
  for (tx_cycle_action action; tx_cycle_next(machine.c, &action);) {
    if (action.kind == TX_DO_RAISE) return action.text;
    tx_cycle_done(machine.c, 0);
  }
  const char *failure = tx_cycle_failure(machine.c);
  return failure ? failure : "";
}

std::vector<std::string> LongNames(int64_t n) {
  std::vector<std::string> names;
  for (int64_t i = 0; i < n; i++)
    names.push_back("model.layers." + std::to_string(i) + ".mlp.down_proj.weight");
  return names;
}

struct Wide {
  std::vector<std::string> names;
  std::vector<const char *> pointers;
  std::vector<int64_t> zeros;
  tx_cycle_args args;

  Wide(int32_t kind, int32_t world, int64_t n) : names(LongNames(n)), zeros(names.size()), args(Args(kind)) {
    for (const std::string &name : names)
      pointers.push_back(name.c_str());
    args.n_params = n;
    args.n_buckets = 1;
    args.world = world;
    args.names = pointers.data();
    args.bucket_of = args.buffer_of = zeros.data();
  }
};

bool EndsWith(const std::string &text, const std::string &end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

TEST(Cycle, WhatToDoIsSaidHoweverManyRanksAndNamesThereAre) {
  for (const int32_t world : {1, 2, 64, 1024}) {
    for (const int64_t n : {1, 8, 12}) {
      Wide wide(TX_CYCLE_NO_SHARD, world, n);
      const std::string at = std::to_string(world) + " ranks, " + std::to_string(n) + " parameters: ";
      std::string said = VerdictOn(wide.args, [](Machine &, int32_t, uint8_t *) {});
      EXPECT_EQ(said.find("no gradient is ready for 'model.layers.0.mlp.down_proj.weight'"), 0u) << at << said;
      EXPECT_TRUE(EndsWith(said, "they then count as zero. Call zero_grad() before going on.")) << at << said;

      said = VerdictOn(wide.args, [&](Machine &, int32_t rank, uint8_t *report) {
        const int64_t first = rank % n;
        std::memcpy(report + 8, &first, sizeof first);
      });
      EXPECT_EQ(said.find("gradients with NaN or Inf before communication"), 0u) << at << said;
      EXPECT_TRUE(EndsWith(said, ". Nothing was stepped; call zero_grad() before going on.")) << at << said;

      if (world == 1) continue;
      said = VerdictOn(wide.args, [&](Machine &machine, int32_t rank, uint8_t *report) {
        const std::vector<uint8_t> trained(static_cast<size_t>(n), rank != 1);
        tx_cycle_report(machine.c, -1, trained.data(), report);
      });
      EXPECT_EQ(said.find("the ranks train different parameters: 'model.layers.0.mlp.down_proj.weight'"), 0u) << said;
      EXPECT_TRUE(EndsWith(said, ". Call requires_grad_() on every rank alike, and zero_grad() before going on."))
          << at << said;
      EXPECT_EQ(said.find("; and 4 more parameters. ") != std::string::npos, world <= 64 && n == 12) << said;
    }
    if (world == 1) continue;
    const std::string said =
        VerdictOn(Wide(TX_CYCLE_UNITS, world, 2).args, [](Machine &, int32_t rank, uint8_t *report) {
          const int64_t word = rank;
          std::memcpy(report + 16, &word, sizeof word);
        });
    EXPECT_EQ(said.find("the ranks reduced different gradients of unit 'a' (rank 0 0 elements in 0 reductions, "), 0u);
    EXPECT_TRUE(EndsWith(said, "this process group cannot be used any more")) << said;
  }
}

TEST(Cycle, AReportOfAnotherCycleIsAnEndOfAllOfThem) {
  const std::string said = VerdictOn(Wide(TX_CYCLE_OPTIM, 3, 2).args, [](Machine &, int32_t rank, uint8_t *report) {
    const int64_t place = 7;
    if (rank == 2) std::memcpy(report, &place, sizeof place);
  });
  EXPECT_EQ(said, "rank 2 is in gradient cycle 7 and rank 0 in 0");
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
  EXPECT_EQ(status([](tx_cycle_args *a) { a->bucket_of = nullptr; }), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(status([](tx_cycle_args *a) { a->buffer_of = nullptr; }), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(status([](tx_cycle_args *a) { a->kind = TX_CYCLE_UNITS, a->units = nullptr; }), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(status([](tx_cycle_args *a) { a->n_params = INT64_MAX; }), TX_ERROR_INVALID_ARGUMENT);
  const tx_cycle_args args = Args(TX_CYCLE_OPTIM);
  const int64_t bytes = static_cast<int64_t>(memory.size() * 8);
  EXPECT_EQ(tx_cycle_init(nullptr, bytes, &args, &c, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_cycle_init(memory.data(), bytes, nullptr, &c, &error), TX_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(tx_cycle_init(memory.data(), bytes, &args, nullptr, &error), TX_ERROR_INVALID_ARGUMENT);
  ASSERT_EQ(tx_cycle_init(memory.data(), bytes, &args, &c, &error), TX_OK);
  std::vector<int64_t> other(10000);
  tx_cycle *rebuilt = nullptr;
  EXPECT_EQ(tx_cycle_rebuild(other.data(), bytes, &args, nullptr, &rebuilt, &error), TX_ERROR_BAD_STATE);
  EXPECT_EQ(tx_cycle_rebuild(other.data(), bytes, &args, c, &rebuilt, &error), TX_ERROR_BAD_STATE);
  EXPECT_EQ(rebuilt, nullptr);
}

// -- every event, in every state that a small machine can reach -------------------------------------------------------

using Event = std::function<int32_t(Machine &)>;

int32_t Next(Machine &machine, bool acknowledge) {
  tx_cycle_action action;
  const int32_t kind = tx_cycle_next(machine.c, &action);
  EXPECT_GE(kind, TX_DO_NOTHING);
  EXPECT_LE(kind, TX_DO_WEIGHTS);
  if (kind == TX_DO_REPORT) {
    machine.report.assign(static_cast<size_t>(tx_cycle_report_bytes(machine.c)), 0);
    const uint8_t requires_grad[] = {1, 1};
    tx_cycle_report(machine.c, -1, requires_grad, machine.report.data());
  }
  if (kind == TX_DO_READ && acknowledge) {
    const uint8_t *rows[] = {machine.report.data()}, *scratch[1];
    tx_cycle_read(machine.c, rows, scratch, 0);
  }
  if (acknowledge && kind) tx_cycle_done(machine.c, 0);
  return kind;
}

struct Named {
  const char *name;
  Event event;
};

const Named kAll[] = {
    {"begin", [](Machine &m) { return tx_cycle_begin(m.c, 1, 0); }},
    {"begin(no_sync)", [](Machine &m) { return tx_cycle_begin(m.c, 0, 0); }},
    {"accumulate", [](Machine &m) { return tx_cycle_accumulate(m.c, 0, TX_GRAD_IN_PLACE), 0; }},
    {"ready(0)", [](Machine &m) { return tx_cycle_ready(m.c, 0); }},
    {"ready(1)", [](Machine &m) { return tx_cycle_ready(m.c, 1); }},
    {"given(0)", [](Machine &m) { return tx_cycle_given(m.c, 0, 5, 1, 0); }},
    {"given(1, last)", [](Machine &m) { return tx_cycle_given(m.c, 1, 5, 1, 1); }},
    {"end", [](Machine &m) { return tx_cycle_end(m.c); }},
    {"died", [](Machine &m) { return tx_cycle_died(m.c, nullptr), 0; }},
    {"zero_grad",
     [](Machine &m) {
       const int64_t first = 0;
       return tx_cycle_zero(m.c, &first, 1), 0;
     }},
    {"step", [](Machine &m) { return tx_cycle_check_step(m.c, nullptr, nullptr); }},
    {"step with .grad",
     [](Machine &m) {
       const uint8_t both[] = {1, 1};
       return tx_cycle_check_step(m.c, both, nullptr);
     }},
    {"stepping", [](Machine &m) { return tx_cycle_stepping(m.c), 0; }},
    {"gathering", [](Machine &m) { return tx_cycle_gathering(m.c), 0; }},
    {"stepped", [](Machine &m) { return tx_cycle_stepped(m.c), 0; }},
    {"fail", [](Machine &m) { return tx_cycle_fail(m.c, "a rank was lost"), 0; }},
    {"an action is done", [](Machine &m) { return Next(m, true), 0; }},
    {"an action is not done", [](Machine &m) { return Next(m, false), 0; }},
    {"all actions are done",
     [](Machine &m) {
       while (Next(m, true)) {
       }
       return 0;
     }},
};
constexpr size_t kEvents = sizeof kAll / sizeof *kAll;

const char *const kPhases[] = {"idle", "accumulating", "reducing", "closing", "recovering"};

// The result of each event in each phase before any failure. +: it is legal. -: it is rejected. ?: it depends on the
// history (a step that did not end, weights that have not arrived, a gradient that is ready twice, a bucket that is
// given before the previous one was sent, gradients that must not be stepped). Events are numbered as in kAll; events
// that are never rejected are left out.
struct Refusals {
  size_t event;
  const char *by_phase;
};
const Refusals kPlanned[] = {{0, "?----"}, {1, "?----"}, {3, "-+?--"},  {4, "-+?--"}, {5, "-----"},
                             {6, "-----"}, {7, "-++--"}, {10, "?----"}, {11, "?----"}};
const Refusals kGiven[] = {{0, "?----"}, {1, "?----"}, {3, "-++--"},  {4, "-++--"}, {5, "--?--"},
                           {6, "--?--"}, {7, "-++--"}, {10, "?----"}, {11, "-----"}};

class EveryEvent : public testing::TestWithParam<int32_t> {
 protected:
  struct Tried {
    int64_t legal = 0, refused = 0;
  };

  // Performs a sequence of events. A rejected event may change nothing but the refusal text, which has to say why.
  // After any sequence the machine can be brought back to IDLE, and after a failure it says so.
  void Follow(const std::vector<size_t> &path) {
    Machine machine(GetParam());
    for (size_t step : path) {
      const std::vector<int64_t> before = machine.memory;
      const bool failed = tx_cycle_failure(machine.c) != nullptr;
      Tried &tried = tried_[failed][tx_cycle_phase_of(machine.c)][step];
      if (kAll[step].event(machine) >= 0) {
        tried.legal++;
        continue;
      }
      tried.refused++;
      ASSERT_STRNE(tx_cycle_refusal(machine.c), "");
      if (!failed && tx_cycle_failure(machine.c)) {  // a step that did not end was noticed
        ASSERT_TRUE(tx_cycle_partly_stepped(machine.c));
        continue;
      }
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
    const int32_t goes_on = tx_cycle_begin(machine.c, 1, 0);
    const char *failure = tx_cycle_failure(machine.c);
    ASSERT_EQ(goes_on, failure ? -1 : 0) << tx_cycle_refusal(machine.c);
    ASSERT_TRUE(!failure || std::strstr(tx_cycle_refusal(machine.c), failure));
  }

  // Checks that every event was tried in every phase, with the results of the tables.
  void CompareWithTable() {
    const bool given = GetParam() >= TX_CYCLE_UNITS;
    const bool accumulates = GetParam() <= TX_CYCLE_OPTIM;  // the other kinds reduce under no_sync, too
    for (int32_t phase = 0; phase < 5; phase++) {
      if (phase == TX_PHASE_ACCUMULATING && !accumulates) continue;
      std::string line;
      for (size_t event = 0; event < kEvents; event++) {
        const Tried &tried = tried_[0][phase][event];
        char expected = '+';
        for (size_t k = 0; k < sizeof kPlanned / sizeof *kPlanned; k++) {
          const Refusals &row = given ? kGiven[k] : kPlanned[k];
          if (row.event == event) expected = row.by_phase[phase];
          // Sharded gradients leave no `.grad`: if there is one, it was assigned.
          if (event == 11 && GetParam() == TX_CYCLE_OPTIM_GRADS) expected = '-';
        }
        const std::string pair = std::string(kAll[event].name) + " in " + kPhases[phase];
        EXPECT_EQ(tried.legal > 0, expected != '-') << pair;
        EXPECT_EQ(tried.refused > 0, expected != '+') << pair;
        line += std::string(" ") + kAll[event].name + " " + std::to_string(tried.legal) + "/" +
                std::to_string(tried.refused);
        const bool goes_on = event <= 1 || event == 10 || event == 11;  // begin, step
        EXPECT_FALSE(goes_on && tried_[1][phase][event].legal) << pair << " after a failure";
      }
      std::cout << kPhases[phase] << ", legal/refused:" << line << '\n';
    }
  }

 private:
  Tried tried_[2][5][kEvents];  // [has failed][phase][event]
};

TEST_P(EveryEvent, InEveryStateThatAFewLeadToAndAtTheEndOfRandomOnes) {
#ifdef TX_SLOW
  const size_t depth = 3, paths = kEvents * kEvents * kEvents;
#else
  const size_t depth = 4, paths = kEvents * kEvents * kEvents * kEvents;
#endif
  for (size_t code = 0; code < paths && !HasFatalFailure(); code++) {
    std::vector<size_t> path(depth);
    size_t rest = code;
    for (size_t &step : path) {
      step = rest % kEvents;
      rest /= kEvents;
    }
    Follow(path);
  }
  std::mt19937 random(11);
  for (int walk = 0; walk < 3000 && !HasFatalFailure(); walk++) {
    std::vector<size_t> path(3 + random() % 12);
    for (size_t &step : path)
      step = random() % kEvents;
    Follow(path);
  }
  CompareWithTable();
}

INSTANTIATE_TEST_SUITE_P(Kinds, EveryEvent, testing::Range(0, 5));

}  // namespace
