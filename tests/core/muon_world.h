// Simulates ranks that run Muon's exchange (tx_muon_exchange) in one process. The ranks step matrices that are sharded
// over them. Each rank has its own exchange and a driver like torch_ext's; the network delays messages at random. A run
// is determined by its Spec, and a generated Spec by its seed.
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
  std::vector<int64_t> ends;                          // for each rank, where its shard of the elements ends; ascending
};

enum class FaultKind {
  kLost,       // this rank is lost (kill -9) before its `at`-th action
  kRaise,      // the owner of matrix `at` runs out of memory for its matrix products
  kNonfinite,  // the products of matrix `at` are not finite
  kOtherPlan   // this rank's plan has parameter `at` stepped by AdamW
};

struct Fault {
  FaultKind what;
  int64_t rank;  // for kLost and kOtherPlan
  int64_t at;
};

struct Spec {
  uint64_t seed = 0;  // seeds the delays
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

// Runs the simulation. Returns a description of the first violation, or "".
std::string Run(const Spec &spec, Coverage *coverage);

// Returns the smallest Spec found that still fails, after leaving out parameters and faults.
Spec Shrink(Spec spec);

}  // namespace muon_world

#endif
