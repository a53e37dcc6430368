// The world's main loop: which rank moves next, when waits time out, and what has to hold at the end.
#include "tests/core/cycle_world.h"

#include <algorithm>

#include "tests/core/cycle_rank.h"

namespace cycle_world {

bool World::Advance() {
  bool moved = false;
  const size_t begin = random() % ranks.size();
  for (size_t k = 0; k < ranks.size(); k++) {
    Rank &rank = *ranks[(begin + k) % ranks.size()];
    for (int burst = 1 + static_cast<int>(random() % 6); burst > 0 && rank.Move(); burst--)
      moved = true;
  }
  return moved;
}

std::string World::Go() {
  int64_t quiet = 0, rounds = 0;
  for (;;) {
    bool all = true;
    for (const auto &rank : ranks)
      all &= rank->finished();
    if (all) break;
    if (++rounds > 200000) return "a run does not end";
    now++;
    if (Advance()) {
      quiet = 0;
      continue;
    }
    if (++quiet < 400) continue;  // messages may be in flight
    bool timed_out = false;
    for (const auto &rank : ranks)
      timed_out |= rank->blocked() && !rank->finished();
    if (!timed_out) {
      group_failed = true;  // no rank waits for the stalled rank and gives up, so it wakes up here
      quiet = 0;
      continue;
    }
    if (!asymmetric) return "ranks wait for ever, although no fault separated them";
    for (const auto &rank : ranks)
      if (rank->blocked()) rank->TimeOut();
    quiet = 0;
  }
  for (const auto &rank : ranks) {
    if (rank->lost) continue;
    const int32_t phase = tx_cycle_phase_of(rank->cycle);
    if (phase != TX_PHASE_IDLE && !tx_cycle_failure(rank->cycle) && !rank->dead_) {
      return "a machine is left in phase " + std::to_string(phase);
    }
    if (asymmetric) continue;
    if (tx_cycle_failure(rank->cycle) && !tx_cycle_partly_stepped(rank->cycle)) {
      return std::string("a machine failed, although no fault separated the ranks: ") + tx_cycle_failure(rank->cycle);
    }
    if (rank->verdict_of_cycle != ranks[0]->verdict_of_cycle) return "ranks came to different verdicts";
  }
  return "";
}

Coverage &Coverage::operator+=(const Coverage &other) {
  const auto add = [](auto *to, const auto &from) {
    for (size_t phase = 0; phase < from.size(); phase++)
      for (size_t k = 0; k < from[phase].size(); k++)
        (*to)[phase][k] += from[phase][k];
  };
  add(&events, other.events);
  add(&actions, other.actions);
  add(&transitions, other.transitions);
  programs += other.programs;
  steps_taken += other.steps_taken;
  cycles_compared += other.cycles_compared;
  sums_compared += other.sums_compared;
  verdicts += other.verdicts;
  failures += other.failures;
  refused_steps += other.refused_steps;
  return *this;
}

std::string Run(const Spec &spec, Coverage *coverage) {
  coverage->programs++;
  try {
    World world(spec, coverage);
    return world.Go();
  } catch (const Wrong &wrong) {
    return wrong.what;
  }
}

Spec Shrink(Spec spec) {
  Coverage ignored;
  const auto fails = [&](const Spec &smaller) { return !Run(smaller, &ignored).empty(); };
  for (bool smaller = true; smaller;) {
    smaller = false;
    for (size_t k = 0; k < spec.faults.size(); k++) {
      Spec one = spec;
      one.faults.erase(one.faults.begin() + static_cast<std::ptrdiff_t>(k));
      if (fails(one)) spec = one, smaller = true;
    }
    for (size_t k = 0; k < spec.steps_of_program.size(); k++) {
      Spec one = spec;
      one.steps_of_program.erase(one.steps_of_program.begin() + static_cast<std::ptrdiff_t>(k));
      bool legal = true;
      for (Fault &fault : one.faults) {
        if (fault.step > static_cast<int>(k)) fault.step--;
        legal &= fault.step < static_cast<int>(one.steps_of_program.size());
      }
      if (legal && fails(one)) spec = one, smaller = true;
    }
    if (spec.world > 1) {
      Spec one = spec;
      one.world--;
      for (Fault &fault : one.faults)
        fault.rank = std::min(fault.rank, one.world - 1);
      if (fails(one)) spec = one, smaller = true;
    }
  }
  return spec;
}

}  // namespace cycle_world
