// Simulates ranks that run the gradient cycle (csrc/torch_ext_cycle.h) in one process. Each rank runs the same training
// program with its own state machine and a driver like torch_ext's; the network delays messages at random. A run is
// determined by its Spec, and a generated Spec by its seed.
#ifndef TESTS_CORE_CYCLE_WORLD_H
#define TESTS_CORE_CYCLE_WORLD_H

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "csrc/torch_ext_cycle.h"

namespace cycle_world {

// -- what is run ------------------------------------------------------------------------------------------------------

enum class Do {
  kBackward,
  kZeroGrad,
  kStep,
  kOffload,  // drops the gradients, as offload(grads=True) does
  kReplan    // parallelizes again: other buckets, a new state machine
};

struct Step {
  Do what;
  bool sync;               // for kBackward: whether its gradients are reduced
  std::vector<int> order;  // order in which the gradients become ready: a permutation of the parameters
};

enum class FaultKind {
  kRaise,          // backward `step` raises after `at` of its gradients are ready
  kNonfinite,      // the gradient of parameter `at` is not finite in backward `step`
  kUnused,         // parameter `at` gets no gradient in backward `step`
  kFrozen,         // parameter `at` is frozen from step `step` on
  kSkipped,        // step `step` is left out
  kInterrupt,      // Ctrl-C during the `at`-th wait
  kLost,           // this rank is lost (kill -9) at its `at`-th move
  kStalled,        // this rank stops (SIGSTOP) there, until the other ranks have given up
  kDropped,        // `.grad` of parameter `at` is set to None before step `step`
  kAssigned,       // `.grad` of parameter `at` is replaced by another tensor before step `step`
  kHeldBack,       // this rank's network is slow
  kInterruptStep,  // Ctrl-C in step `step`, after `at` buckets have been written
  kRaiseInHook     // a user's hook raises between the accumulation of `.grad` of parameter `at` and torch_ext's hook
};

struct Fault {
  FaultKind what;
  int rank;  // -1: every rank
  int step;
  int at;
};

struct Spec {
  uint64_t seed = 0;  // seeds the delays, and the choice of the rank that moves next
  int kind = 0;
  int world = 1;
  int n_params = 0;
  std::vector<int64_t> bucket_of, buffer_of;
  std::vector<int64_t> rebuilt_bucket_of, rebuilt_buffer_of;  // empty: TX_DO_ORDER keeps the buckets
  std::vector<uint8_t> ends;                                  // by bucket: 1 for the last bucket of each message
  bool check_for_nan = true, find_unused = false, reorder = false, scales_sums = false, steps = false;
  bool reports_late = false;  // each rank reports most gradients late, together with a later one
  bool replicated = false;    // the driver waits for a unit's reduction before it goes on
  int slots = 4;
  std::vector<Step> steps_of_program;
  std::vector<Fault> faults;
};

Spec Generate(uint64_t seed);
std::string Text(const Spec &spec);

// -- what was observed ------------------------------------------------------------------------------------------------

enum Event {
  kBegin,
  kAccumulate,
  kReady,
  kGiven,
  kEnd,
  kMissing,
  kDied,
  kZero,
  kFail,
  kCheckStep,
  kRead,
  kStepping,
  kStepped,
  kEvents
};

struct Coverage {
  std::array<std::array<int64_t, kEvents>, 5> events{};  // [phase][event]
  std::array<std::array<int64_t, 12>, 5> actions{};      // [phase][tx_cycle_do]
  std::array<std::array<int64_t, 5>, 5> transitions{};   // [phase][phase]
  int64_t programs = 0, steps_taken = 0, cycles_compared = 0, sums_compared = 0, verdicts = 0, failures = 0;
  int64_t refused_steps = 0;

  Coverage &operator+=(const Coverage &other);
};

// Runs the simulation. Returns a description of the first violation, or "".
std::string Run(const Spec &spec, Coverage *coverage);

// Returns the smallest Spec found that still fails, after leaving out steps, faults and ranks.
Spec Shrink(Spec spec);

}  // namespace cycle_world

#endif
