// Runs the programs of the seeds FIRST ... LAST - 1 (tests/core/muon_world.h) until one fails; then prints it, and the
// smallest program that still fails. To repeat one seed: muon_hunt SEED SEED+1.
//
//     muon_hunt FIRST LAST
#include "tests/core/muon_world.h"
#include "tests/core/seed_hunt.h"

int main(int argc, char **argv) {
  return HuntSeeds<muon_world::Spec, muon_world::Coverage>(argc, argv, muon_world::Generate, muon_world::Run,
                                                           muon_world::Shrink, muon_world::Text);
}
