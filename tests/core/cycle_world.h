// A world of machines (csrc/torch_ext_cycle.h) in one process: ranks that run a training program, each with a machine
// and a driver such as torch_ext's, and a network that delays. A run is a function of its Spec, and a Spec one of its
// seed.
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

// -- what is run -----------------------------------------------------------------------------------------------------

enum class Do {
  kBackward,
  kZeroGrad,
  kStep,
  kOffload,  // gradients are dropped, as by offload(grads=True)
  kReplan    // parallelize again: other buckets, a machine of their own
};

struct Step {
  Do what;
  bool sync;               // of a backward
  std::vector<int> order;  // in which gradients are ready: a permutation of the parameters
};

enum class Ill {
  kRaise,          // backward `step` raises when `at` of its gradients are ready
  kNonfinite,      // of parameter `at` in backward `step`
  kUnused,         // parameter `at` gets no gradient in backward `step`
  kFrozen,         // parameter `at` from step `step` on
  kSkipped,        // step `step` is left out
  kInterrupt,      // Ctrl-C in the `at`-th wait
  kLost,           // kill -9 at the `at`-th move of this rank
  kStalled,        // SIGSTOP there, until the others have given up
  kDropped,        // `.grad` of parameter `at` becomes None before step `step`
  kAssigned,       // `.grad` of parameter `at` becomes a tensor of the user's before step `step`
  kHeldBack,       // this rank's network is slow
  kInterruptStep,  // Ctrl-C in step `step`, when `at` buckets were written
  kRaiseInHook     // a hook of the user's raises, when `.grad` of parameter `at` was accumulated and ours not called
};

struct Fault {
  Ill what;
  int rank;  // -1: every rank
  int step;
  int at;
};

struct Spec {
  uint64_t seed = 0;  // of delays and of who moves next
  int kind = 0;
  int world = 1;
  int n_params = 0;
  std::vector<int64_t> bucket_of, buffer_of;
  std::vector<int64_t> rebuilt_bucket_of, rebuilt_buffer_of;  // empty: TX_DO_ORDER changes nothing
  std::vector<uint8_t> ends;                                  // which buckets are sent as one
  bool check_for_nan = true, find_unused = false, reorder = false, scales_sums = false, steps = false;
  bool tells_late = false;  // each rank tells of most gradients together with a later one
  bool replicated = false;  // the driver waits for a unit before it goes on
  int slots = 4;
  std::vector<Step> steps_of_program;
  std::vector<Fault> faults;
};

Spec Generate(uint64_t seed);
std::string Text(const Spec &spec);

// -- what was seen ---------------------------------------------------------------------------------------------------

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

// Runs it. Returns what was wrong, or "".
std::string Run(const Spec &spec, Coverage *coverage);

// The smallest Spec that is found to fail as well, by leaving out steps, faults and ranks.
Spec Shrink(Spec spec);

}  // namespace cycle_world

#endif
