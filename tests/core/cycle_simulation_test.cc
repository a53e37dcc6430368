// Runs random training programs with faults on simulated ranks (tests/core/cycle_world.h). A failure prints the program
// and the smallest one that still fails; `bazel run //tests/core:cycle_hunt SEED SEED+1` repeats a seed.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "tests/core/cycle_world.h"

using namespace cycle_world;

namespace {

const char *const kPhases[] = {"idle", "accumulating", "reducing", "closing", "recovering"};
const char *const kEventNames[] = {"begin", "accumulate", "ready", "given", "end",      "missing", "recover",
                                   "zero",  "fail",       "step",  "read",  "stepping", "stepped"};
const char *const kActions[] = {"nothing", "check", "send",    "inspect", "order",     "report",
                                "wait",    "read",  "install", "raise",   "recovered", "weights"};

// [phase][event]: which events have to occur in a phase, and which never may.
const bool kLegalEvents[5][kEvents] = {
    // begin accumulate ready given end missing recover zero fail step read stepping stepped
    {1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 1},  // idle; fail: an all-gather of weights failed
    {0, 1, 1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0},  // accumulating
    {0, 1, 1, 1, 1, 0, 1, 0, 1, 0, 1, 0, 0},  // reducing; read: DDP's hook
    {0, 0, 0, 0, 0, 1, 1, 0, 1, 0, 1, 0, 0},  // closing
    {0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 1, 0, 0},  // recovering
};
const bool kLegalActions[5][12] = {
    // nothing check send inspect order report wait read install raise recovered weights
    {0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1},  // idle: a verdict or a recovery ends here
    {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},  // accumulating
    {0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 0, 0},  // reducing
    {0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0},  // closing
    {0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0},  // recovering: buckets that were complete when the backward raised
};

const bool kLegalTransitions[5][5] = {
    // idle accumulating reducing closing recovering
    {1, 1, 1, 0, 0},  // idle
    {1, 1, 0, 0, 0},  // accumulating
    {1, 0, 1, 1, 1},  // reducing; to idle: the verdict of DDP's hook
    {1, 0, 0, 1, 1},  // closing
    {1, 0, 0, 0, 1},  // recovering
};

template <size_t N>
void Compare(const char *what, const std::array<std::array<int64_t, N>, 5> &seen, const bool (*legal)[N],
             const char *const *names) {
  for (size_t phase = 0; phase < 5; phase++) {
    for (size_t k = 0; k < N; k++) {
      std::cout << (k ? "" : std::string(what) + " in " + kPhases[phase] + ":");
      if (seen[phase][k]) std::cout << ' ' << names[k] << ' ' << seen[phase][k];
      EXPECT_EQ(seen[phase][k] > 0, legal[phase][k]) << what << ' ' << names[k] << " in " << kPhases[phase];
    }
    std::cout << '\n';
  }
}

void RunOne(uint64_t seed, Coverage *coverage) {
  const Spec spec = Generate(seed);
  const std::string wrong = Run(spec, coverage);
  if (wrong.empty()) return;
  const Spec smaller = Shrink(spec);
  Coverage ignored;
  ADD_FAILURE() << wrong << "\n" << Text(spec) << "\nshrunk: " << Run(smaller, &ignored) << "\n" << Text(smaller);
}

#ifdef TX_SLOW
constexpr uint64_t kPrograms = 6000;
#else
constexpr uint64_t kPrograms = 300000;
#endif
constexpr uint64_t kThreads = 2;

TEST(CycleSimulation, ProgramsOfFixedSeedsAndOfFreshOnes) {
  const auto fresh = static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count()) >> 10;
  std::array<Coverage, kThreads> seen;
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < kThreads; t++) {
    threads.emplace_back([&seen, fresh, t] {
      for (uint64_t k = t; k < kPrograms && !HasFailure(); k += kThreads) {
        RunOne(k, &seen[t]);
        if (k % 8 < kThreads) RunOne(fresh + k, &seen[t]);
      }
    });
  }
  Coverage coverage;
  for (uint64_t t = 0; t < kThreads; t++) {
    threads[t].join();
    coverage += seen[t];
  }
  std::cout << coverage.programs << " programs: " << coverage.steps_taken << " steps, " << coverage.refused_steps
            << " refused; " << coverage.verdicts << " verdicts, " << coverage.failures << " failures; "
            << coverage.cycles_compared << " cycles compared between ranks, " << coverage.sums_compared
            << " sums with the oracle\n";
  Compare("events", coverage.events, kLegalEvents, kEventNames);
  Compare("actions", coverage.actions, kLegalActions, kActions);
  Compare("transitions", coverage.transitions, kLegalTransitions, kPhases);
  EXPECT_GT(coverage.verdicts, 0);
  EXPECT_GT(coverage.refused_steps, 0);
  EXPECT_GT(coverage.sums_compared, static_cast<int64_t>(kPrograms));
}

// Every kind in one large world, where messages and reports go between all ranks.
TEST(CycleSimulation, LargeWorlds) {
#ifdef TX_SLOW
  const int world = 64;
#else
  const int world = 1500;
#endif
  for (int kind = 0; kind < 5; kind++) {
    Spec spec;
    spec.seed = static_cast<uint64_t>(kind) + 5;
    spec.kind = kind;
    spec.world = world;
    spec.n_params = 4;
    spec.bucket_of = {1, 1, 0, 0};
    spec.buffer_of = {0, 0};
    spec.ends = {1, 1};
    spec.slots = kind == TX_CYCLE_UNITS ? 2 : 4;
    spec.reorder = kind < TX_CYCLE_OPTIM_GRADS;
    for (int cycle = 0; cycle < 2; cycle++) {
      spec.steps_of_program.push_back({Do::kBackward, true, {3, 2, 1, 0}});
      spec.steps_of_program.push_back({Do::kStep, false, {}});
    }
    if (kind != TX_CYCLE_DDP_HOOK) spec.faults = {{FaultKind::kUnused, -1, 0, 1}, {FaultKind::kFrozen, -1, 2, 2}};
    Coverage coverage;
    EXPECT_EQ(cycle_world::Run(spec, &coverage), "") << Text(spec);
    EXPECT_EQ(coverage.steps_taken, 2 * world);
  }
}

}  // namespace
