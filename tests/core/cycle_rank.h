// The inside of a world (cycle_world.h): its network, and a rank with its gradients, its machine and its driver.
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

// -- network: what was posted under one tag --------------------------------------------------------------------------

struct Exchange {
  int posts = 0;
  int64_t ready_at = 0;  // when the last post arrives
  int64_t first = -1, end = -1;
  std::vector<int64_t> own;                         // of the sums, what no earlier one has: each gradient once
  std::vector<uint8_t> contributed;                 // by parameter: a rank had a gradient
  int64_t least_steps = INT64_MAX, most_steps = 0;  // of the ranks that posted
  std::vector<int64_t> sums;                        // by parameter
  std::vector<uint8_t> nonfinite;                   // by parameter
  std::vector<std::vector<uint8_t>> payloads;       // of reports, by rank
};

// A value that is in a rank's gradient memory.
struct Gradient {
  bool there = false;     // `.grad` is not None
  bool in_place = false;  // it is the buffer's view
  bool nan = false;
  int64_t value = 0;  // what the buffer holds
  int64_t assigned = 0;
  std::optional<int64_t> earlier;  // set aside
  std::optional<int64_t> copy;
  bool travels = false;
  bool held = false;  // optim_grads, units: a gradient that is not sent yet
  int64_t held_value = 0;
  bool held_nan = false;
  int64_t own = 0;       // of this rank, in no sum yet
  int64_t expected = 0;  // all that was in sums since zero_grad()
  bool has_own = false;
  bool contributed = false;  // in the last message, by some rank
  bool was_there = false;    // before that
  bool present = false;      // optim_grads, units: the shard has a gradient
  int64_t shard = 0;
  bool shard_nan = false;
};

struct Message {
  int64_t first, end;
  int64_t tag;
  bool applied = false;
  bool answered = false;  // it was waited for: its memory is another message's
  std::vector<int64_t> params;
};

class World;
struct Expected;

// Whether gradients lie in shards, not in `.grad`.
inline bool Shards(const Spec &spec) {
  return spec.kind == TX_CYCLE_OPTIM_GRADS || spec.kind == TX_CYCLE_UNITS;
}

class Rank {
 public:
  Rank(World *world, int rank);
  // Does the next thing; false where nothing can be done now.
  bool Move();
  bool finished() const { return lost || pc >= static_cast<int>(program.size()); }
  bool blocked() const { return waiting && !IsStalled(); }
  bool IsStalled() const;
  // Collectives of this rank fail from now on.
  void TimeOut() { timed_out = true; }
  void ApplyArrived();

  World *world;
  int rank;
  bool lost = false, stalled = false, timed_out = false;
  int64_t moves = 0;
  std::vector<int> program;  // steps
  int pc = 0;
  std::vector<std::string> verdicts;  // by cycle, "" where it ended well
  std::map<int64_t, std::string> verdict_of_cycle;
  std::vector<Gradient> grads;
  tx_cycle *cycle = nullptr;

 private:
  enum class At { kOpStart, kRecovering, kBegin, kGrads, kEnding, kStepping, kChecking, kPlanning, kOpEnd };
  bool Drain();  // true: no action is left
  // Each does one action. False: it has to wait, or raised.
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
  void Tell();
  void Accumulate(int i);
  void Prepare(int64_t i, int32_t flags);
  int32_t KindOfGrad(int64_t i) const;
  void Send(const tx_cycle_action &action);
  bool WasSent(size_t i) const;
  void Apply(Message *message, bool discard);
  void Install();
  void CheckStep();
  void CheckToldOfFailure(bool refused) const;
  void CompareWithOracle(const Expected &expected, bool refused);
  void ZeroGrad();
  void CompareSums();
  bool Suffers(Ill what, int at) const;
  bool IsFrozen(int i) const;
  void NextOp();
  void Post(int64_t tag, Exchange **exchange);
  void Fail(const std::string &text);
  std::vector<uint8_t> RequiresGrad() const;
  bool owns(int64_t i) const;
  // Of a cycle, in all plans.
  int64_t Number() const { return plan_ * 10000 + tx_cycle_number(cycle); }
  void StartPlan();
  bool Plan();
  void Count(Event event);
  // Counts the phases from which and into which the machine came since the last call.
  void CountTransition();

  std::vector<int64_t> memory_;
  At at_ = At::kOpStart;
  size_t next_grad_ = 0;
  int next_unit_ = 0;
  std::vector<int64_t> untold_;   // ready, and the machine was not told
  std::vector<int> given_ready_;  // parameters of the unit that was handed over
  bool dead_ = false;             // the last backward raised
  bool in_backward_ = false;
  bool waiting = false;
  bool report_posted_ = false, order_posted_ = false;
  int64_t waits_ = 0;
  int first_bad_ = -1;
  std::vector<Message> messages_;
  std::vector<uint8_t> broken_;
  int64_t report_tag_ = 0, order_tag_ = 0;
  std::vector<int64_t> weights_;      // by parameter: the step that wrote it last, on the rank that steps it
  std::vector<int64_t> gather_tags_;  // that are under way, or were since all had come
  size_t n_come_ = 0;                 // of them
  int next_weight_ = 0;               // bucket of the step
  std::vector<int64_t> bucket_of_;
  bool has_raised_ = false;
  int64_t n_steps_ = 0;
  int64_t plan_ = 0;
  int32_t phase_seen_ = TX_PHASE_IDLE;
  bool mixes_steps_ = false;
  bool partly_summed_ = false;  // a backward that raised has added sums to shards
  bool sending_waits_ = false;
  friend class World;
};

// The oracle, from the program alone: what a step finds.
struct Expected {
  bool known = false;    // nothing has happened of which the outcome is not defined
  bool refused = false;  // gradients are there that no rank has reduced
  std::vector<int64_t> sums;
};

std::vector<Expected> Oracle(const Spec &spec);

// Whether a step of the program reduces gradients.
bool Reduces(const Spec &spec, const Step &step);

// The gradient of a parameter in a backward: a multiple of the number of ranks, so that means are exact.
int64_t ValueOf(const Spec &spec, int rank, int step, int i);

// Sums are divided by the number of ranks, or by 1.
int64_t Scaled(const Spec &spec, int64_t sum);

bool IsComplete(const World &world, int64_t tag);

class World {
 public:
  World(const Spec &spec, Coverage *coverage) : spec(spec), coverage(coverage), random(spec.seed + 77) {
    for (int r = 0; r < spec.world; r++)
      ranks.push_back(std::make_unique<Rank>(this, r));
    expected = Oracle(spec);
    bool refuses = false;  // a step
    for (const Expected &e : expected)
      refuses |= e.refused;
    for (const Fault &fault : spec.faults) {
      const bool one = fault.rank >= 0 && spec.world > 1;
      const bool units = spec.kind == TX_CYCLE_UNITS;
      switch (fault.what) {
        case Ill::kLost:
        case Ill::kStalled:
          asymmetric = true;
          break;
        case Ill::kInterruptStep:
        case Ill::kInterrupt:  // who is interrupted in which wait differs from rank to rank
          asymmetric |= spec.world > 1;
          break;
        case Ill::kRaise:
        case Ill::kRaiseInHook:
          asymmetric |= one || OneRankDiffers();
          break;
        case Ill::kSkipped:
          asymmetric |= one;
          break;
        case Ill::kUnused:
        case Ill::kFrozen:
          asymmetric |= one && (units || refuses);
          break;
        case Ill::kDropped:  // of what no rank reduced: a step() of the others alone is refused
          asymmetric |= one && refuses;
          break;
        case Ill::kAssigned:  // a step() of that rank alone is refused
          asymmetric |= one && spec.kind == TX_CYCLE_OPTIM_GRADS;
          break;
        default:
          break;
      }
    }
  }

  std::string Go();

  // Whether one rank alone has no gradient of a parameter: where all raise, they have not sent the same then.
  bool OneRankDiffers() const {
    for (const Fault &fault : spec.faults) {
      const bool differs = fault.what == Ill::kUnused || fault.what == Ill::kFrozen || fault.what == Ill::kAssigned ||
                           fault.what == Ill::kDropped;
      if (differs && fault.rank >= 0 && spec.world > 1) return true;
    }
    return false;
  }

  bool OneRankAssigns() const {
    for (const Fault &fault : spec.faults) {
      const bool assigns = fault.what == Ill::kAssigned || fault.what == Ill::kDropped || fault.what == Ill::kSkipped;
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
  bool asymmetric = false;                                // ranks may part: some may fail, or time out
  bool has_raised = false;                                // a backward, on some rank
  bool group_failed = false;                              // connections are closed
  std::map<int64_t, std::vector<int64_t>> sums_of_cycle;  // what each rank holds after it: the same
  std::map<int64_t, std::vector<uint8_t>> has_sum;
  std::vector<Expected> expected;  // by step, if any rank steps it

 private:
  bool Advance();
};

}  // namespace cycle_world

#endif
