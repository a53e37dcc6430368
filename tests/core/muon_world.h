// A world of machines (tx_muon_exchange) in one process: ranks that step matrices which are cut over them, each with a
// machine and a driver such as torch_ext's, and a network that delays. A run is a function of its Spec, and a Spec one
// of its seed.
#ifndef TESTS_CORE_MUON_WORLD_H
#define TESTS_CORE_MUON_WORLD_H

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "csrc/torch_ext_advanced.h"

namespace muon_world {

struct Param {
  int32_t travels;
  std::vector<std::pair<int64_t, int64_t>> matrices;  // rows, columns
  std::vector<int64_t> ends;                          // of each rank's elements, ascending
};

enum class Ill {
  kLost,       // kill -9 before the `at`-th action of this rank
  kRaise,      // the owner of matrix `at` has no memory for its products
  kNonfinite,  // products of matrix `at` are not finite
  kOtherPlan   // this rank leaves parameter `at` to AdamW
};

struct Fault {
  Ill what;
  int64_t rank;  // kLost, kOtherPlan
  int64_t at;
};

struct Spec {
  uint64_t seed = 0;  // of delays
  int64_t world = 1;
  std::vector<Param> params;
  std::vector<Fault> faults;
};

Spec Generate(uint64_t seed);
std::string Text(const Spec &spec);

struct Coverage {
  std::array<int64_t, 9> actions{};  // [tx_muon_do]
  int64_t programs = 0, whole = 0, refused = 0, with_lost = 0, with_failed = 0, multiplied = 0, stepped = 0;
  int64_t sent = 0;  // bytes to other ranks
};

// Runs it. Returns what was wrong, or "".
std::string Run(const Spec &spec, Coverage *coverage);

// The smallest Spec that is found to fail as well, by leaving out parameters and faults.
Spec Shrink(Spec spec);

}  // namespace muon_world

#endif
