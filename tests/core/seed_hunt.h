// The command line of a simulator (cycle_world.h, muon_world.h): runs its random programs, one per seed.
#ifndef TESTS_CORE_SEED_HUNT_H
#define TESTS_CORE_SEED_HUNT_H

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

// Usage: PROGRAM FIRST LAST. Runs the programs of the seeds FIRST ... LAST - 1 until one fails; then prints that
// program and the smallest one that still fails.
template <typename Spec, typename Coverage>
int HuntSeeds(int argc, char **argv, Spec (*generate)(uint64_t), std::string (*run)(const Spec &, Coverage *),
              Spec (*shrink)(Spec), std::string (*text)(const Spec &)) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s FIRST LAST\n", argv[0]);
    return 2;
  }
  Coverage coverage;
  const uint64_t last = std::strtoull(argv[2], nullptr, 0);
  for (uint64_t seed = std::strtoull(argv[1], nullptr, 0); seed < last; seed++) {
    const Spec spec = generate(seed);
    if (run(spec, &coverage).empty()) continue;
    const Spec smaller = shrink(spec);
    std::printf("%s\n", text(spec).c_str());
    std::printf("shrunk: %s\n%s\n", run(smaller, &coverage).c_str(), text(smaller).c_str());
    return 1;
  }
  return 0;
}

#endif
