// Runs the programs of seeds FIRST ... LAST - 1 (tests/core/cycle_world.h) until one is wrong, which it prints, and
// shrunk. One seed again: cycle_hunt SEED SEED+1.
//
//     cycle_hunt FIRST LAST
#include <cstdio>
#include <cstdlib>

#include "tests/core/cycle_world.h"

int main(int argc, char **argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: cycle_hunt FIRST LAST\n");
    return 2;
  }
  cycle_world::Coverage coverage;
  const uint64_t last = std::strtoull(argv[2], nullptr, 0);
  for (uint64_t seed = std::strtoull(argv[1], nullptr, 0); seed < last; seed++) {
    const cycle_world::Spec spec = cycle_world::Generate(seed);
    if (cycle_world::Run(spec, &coverage).empty()) continue;
    const cycle_world::Spec smaller = cycle_world::Shrink(spec);
    std::printf("%s\n", cycle_world::Text(spec).c_str());
    std::printf("shrunk: %s\n%s\n", cycle_world::Run(smaller, &coverage).c_str(), cycle_world::Text(smaller).c_str());
    return 1;
  }
  return 0;
}
