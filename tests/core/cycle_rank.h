// The parts of a simulated world (cycle_world.h): its network; and a rank with its gradients, its state machine and its
// driver.
#ifndef TESTS_CORE_CYCLE_RANK_H
#define TESTS_CORE_CYCLE_RANK_H

#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tests/core/cycle_world.h"

namespace cycle_world {

struct Wrong {
  std::string what;
};

// -- network: what all ranks have posted under one tag ----------------------------------------------------------------

struct Exchange {
  int posts = 0;
  int64_t ready_at = 0;  // when the last post has arrived
  int64_t first = -1, end = -1;
  // By parameter: the part of the sums that no earlier sum contains, so that each gradient counts once.
  std::vector<int64_t> own;
  std::vector<uint8_t> contributed;                 // by parameter: whether a rank had a gradient
  int64_t least_steps = INT64_MAX, most_steps = 0;  // step counts of the ranks that posted
  std::vector<int64_t> sums;                        // by parameter
  std::vector<uint8_t> nonfinite;                   // by parameter
  std::vector<std::vector<uint8_t>> payloads;       // the reports, by rank
};

// The gradient of one parameter on one rank, and what it should be.
struct Gradient {
  bool there = false;     // `.grad` is not None
  bool in_place = false;  // `.grad` is the view of the flat buffer
  bool nan = false;
  int64_t value = 0;  // in the flat buffer
  int64_t assigned = 0;
  std::optional<int64_t> earlier;  // an earlier sum that was set aside
  std::optional<int64_t> copy;
  bool travels = false;
  bool held = false;  // optim_grads, units: a gradient that has not been sent yet
  int64_t held_value = 0;
  bool held_nan = false;
  int64_t own = 0;       // this rank's contribution that is in no sum yet
  int64_t expected = 0;  // everything that was in sums since zero_grad()
  bool has_own = false;
  bool contributed = false;  // whether some rank had a gradient for the last message
  bool was_there = false;    // whether there was one before that message
  bool present = false;      // optim_grads, units: the shard contains a gradient
  int64_t shard = 0;
  bool shard_nan = false;
};

struct Message {
  int64_t first, end;
  int64_t tag;
  bool applied = false;
  bool answered = false;  // it was waited for, and its memory may be reused by another message
  std::vector<int64_t> params;
};

class World;
struct Expected;

// Whether the strategy keeps gradients in shards instead of `.grad`.
inline bool Shards(const Spec &spec) {
  return spec.kind == TX_CYCLE_OPTIM_GRADS || spec.kind == TX_CYCLE_UNITS;
}

class Rank {
 public:
  Rank(World *world, int rank);
  // Performs the next operation; returns false if nothing can be done now.
  bool Move();
  bool finished() const { return lost || pc >= static_cast<int>(program.size()); }
  bool blocked() const { return waiting && !IsStalled(); }
  bool IsStalled() const;
  // From now on, waiting for a collective on this rank fails.
  void TimeOut() { timed_out = true; }
  void ApplyArrived();

  World *world;
  int rank;
  bool lost = false, stalled = false, timed_out = false;
  int64_t moves = 0;
  std::vector<int> program;  // indices of the steps that it runs
  int pc = 0;
  std::vector<std::string> verdicts;  // by cycle; "" if it succeeded
  std::map<int64_t, std::string> verdict_of_cycle;
  std::vector<Gradient> grads;
  tx_cycle *cycle = nullptr;

 private:
  enum class At { kOpStart, kRecovering, kBegin, kGrads, kEnding, kStepping, kChecking, kPlanning, kOpEnd };
  bool Drain();  // performs the machine's actions; true if none is left
  // Each performs one kind of action. Returns false if it has to wait, or raised.
  using Doing = bool (Rank::*)(const tx_cycle_action &action);
  static const Doing kDoing[];
  void Act(const tx_cycle_action &action);
  bool DoCheck(const tx_cycle_action &action);
  bool DoSend(const tx_cycle_action &action);
  bool DoInspect(const tx_cycle_action &action);
  bool DoOrder(const tx_cycle_action &action);
  bool DoReport(const tx_cycle_action &action);
  bool DoWait(const tx_cycle_action &action);
  bool DoRead(const tx_cycle_action &action);
  bool DoInstall(const tx_cycle_action &action);
  bool DoRaise(const tx_cycle_action &action);
  bool DoRecovered(const tx_cycle_action &action);
  bool DoWeights(const tx_cycle_action &action);
  void StartStep();
  bool NextWeight();
  void CheckWeights() const;
  void Build(const std::vector<int64_t> *bucket_of, const std::vector<int64_t> *buffer_of, const tx_cycle *replaces);
  void CheckUnit(int64_t unit);
  bool Wait(const tx_cycle_action &action);
  void Throw();
  void StartOp();
  bool NextGradient();
  bool NextGiven();
  void ReportReady();
  void Accumulate(int i);
  void Prepare(int64_t i, int32_t flags);
  int32_t KindOfGrad(int64_t i) const;
  void Send(const tx_cycle_action &action);
  bool WasSent(size_t i) const;
  void Apply(Message *message, bool discard);
  void Install();
  void CheckStep();
  void CheckFailureReported(bool refused) const;
  void CompareWithOracle(const Expected &expected, bool refused);
  void ZeroGrad();
  void CompareSums();
  bool HasFault(FaultKind what, int at) const;
  bool IsFrozen(int i) const;
  void NextOp();
  void Post(int64_t tag, Exchange **exchange);
  void Fail(const std::string &text);
  std::vector<uint8_t> RequiresGrad() const;
  bool owns(int64_t i) const;
  // The number of the current cycle, unique over all plans.
  int64_t Number() const { return plan_ * 10000 + tx_cycle_number(cycle); }
  void StartPlan();
  bool Plan();
  void Count(Event event);
  // Counts the machine's change of phase since the last call.
  void CountTransition();

  std::vector<int64_t> memory_;
  At at_ = At::kOpStart;
  size_t next_grad_ = 0;
  int next_unit_ = 0;
  std::vector<int64_t> unreported_;  // gradients that are ready and not yet reported to the machine
  std::vector<int> given_ready_;     // parameters of the unit that was handed to the machine
  bool dead_ = false;                // the last backward raised
  bool in_backward_ = false;
  bool waiting = false;
  bool report_posted_ = false, order_posted_ = false;
  int64_t waits_ = 0;
  int first_bad_ = -1;
  std::vector<Message> messages_;
  std::vector<uint8_t> broken_;
  int64_t report_tag_ = 0, order_tag_ = 0;
  std::vector<int64_t> weights_;  // by parameter: the step that last wrote it, on the rank that steps it
  // All-gathers that are in flight, or were since the last time that all had completed.
  std::vector<int64_t> gather_tags_;
  size_t n_come_ = 0;    // how many of gather_tags_ have completed
  int next_weight_ = 0;  // the next bucket that the step writes
  std::vector<int64_t> bucket_of_;
  bool has_raised_ = false;
  int64_t n_steps_ = 0;
  int64_t plan_ = 0;
  int32_t phase_seen_ = TX_PHASE_IDLE;
  bool mixes_steps_ = false;
  bool partly_summed_ = false;  // a backward that raised has already added sums to shards
  bool sending_waits_ = false;
  friend class World;
};

// What a step has to find according to the oracle, which is computed from the program alone.
struct Expected {
  bool known = false;    // the outcome is defined: no fault with an undefined outcome has happened
  bool refused = false;  // the step must be rejected: there are gradients that were not reduced
  std::vector<int64_t> sums;
};

std::vector<Expected> Oracle(const Spec &spec);

// Whether this step of the program reduces gradients.
bool Reduces(const Spec &spec, const Step &step);

// A parameter's gradient in one backward: a multiple of the number of ranks, so that means are exact.
int64_t ValueOf(const Spec &spec, int rank, int step, int i);

// A sum divided by the number of ranks, or undivided, as the spec asks.
int64_t Scaled(const Spec &spec, int64_t sum);

bool IsComplete(const World &world, int64_t tag);

class World {
 public:
  World(const Spec &spec, Coverage *coverage) : spec(spec), coverage(coverage), random(spec.seed + 77) {
    for (int r = 0; r < spec.world; r++)
      ranks.push_back(std::make_unique<Rank>(this, r));
    expected = Oracle(spec);
    bool refuses = false;  // whether some step is rejected
    for (const Expected &e : expected)
      refuses |= e.refused;
    for (const Fault &fault : spec.faults) {
      const bool one = fault.rank >= 0 && spec.world > 1;
      const bool units = spec.kind == TX_CYCLE_UNITS;
      switch (fault.what) {
        case FaultKind::kLost:
        case FaultKind::kStalled:
          asymmetric = true;
          break;
        case FaultKind::kInterruptStep:
        case FaultKind::kInterrupt:  // ranks may be interrupted in different waits
          asymmetric |= spec.world > 1;
          break;
        case FaultKind::kRaise:
        case FaultKind::kRaiseInHook:
          asymmetric |= one || OneRankDiffers();
          break;
        case FaultKind::kSkipped:
          asymmetric |= one;
          break;
        case FaultKind::kUnused:
        case FaultKind::kFrozen:
          asymmetric |= one && (units || refuses);
          break;
        case FaultKind::kDropped:  // the rank has no unreduced gradient then: only the other ranks' step() is rejected
          asymmetric |= one && refuses;
          break;
        case FaultKind::kAssigned:  // only this rank's step() is rejected
          asymmetric |= one && spec.kind == TX_CYCLE_OPTIM_GRADS;
          break;
        default:
          break;
      }
    }
  }

  std::string Go();

  // Whether a parameter has no gradient on one rank only. If all ranks raise then, they have not sent the same
  // messages.
  bool OneRankDiffers() const {
    for (const Fault &fault : spec.faults) {
      const bool differs = fault.what == FaultKind::kUnused || fault.what == FaultKind::kFrozen ||
                           fault.what == FaultKind::kAssigned || fault.what == FaultKind::kDropped;
      if (differs && fault.rank >= 0 && spec.world > 1) return true;
    }
    return false;
  }

  bool OneRankAssigns() const {
    for (const Fault &fault : spec.faults) {
      const bool assigns =
          fault.what == FaultKind::kAssigned || fault.what == FaultKind::kDropped || fault.what == FaultKind::kSkipped;
      if (assigns && fault.rank >= 0 && spec.world > 1) return true;
    }
    return false;
  }

  const Spec &spec;
  Coverage *coverage;
  std::mt19937_64 random;
  int64_t now = 0;
  std::map<int64_t, Exchange> exchanges;
  std::vector<std::unique_ptr<Rank>> ranks;
  bool asymmetric = false;    // ranks may differ from here on: some may fail or time out
  bool has_raised = false;    // some rank's backward raised
  bool group_failed = false;  // connections are closed
  // The sums after each cycle, which have to be the same on every rank.
  std::map<int64_t, std::vector<int64_t>> sums_of_cycle;
  std::map<int64_t, std::vector<uint8_t>> has_sum;
  std::vector<Expected> expected;  // by step; what a rank finds if it performs the step

 private:
  bool Advance();
};

}  // namespace cycle_world

#endif
