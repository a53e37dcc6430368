// Runs the programs of the seeds FIRST ... LAST - 1 (tests/core/cycle_world.h) until one fails; then prints it, and the
// smallest program that still fails. To repeat one seed: cycle_hunt SEED SEED+1.
//
//     cycle_hunt FIRST LAST
#include "tests/core/cycle_world.h"
#include "tests/core/seed_hunt.h"

int main(int argc, char **argv) {
  return HuntSeeds<cycle_world::Spec, cycle_world::Coverage>(argc, argv, cycle_world::Generate, cycle_world::Run,
                                                             cycle_world::Shrink, cycle_world::Text);
}
