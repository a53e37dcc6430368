#include "tests/core/cycle_world.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <optional>
#include <sstream>

namespace cycle_world {
namespace {

// A split of n parameters into buckets, and of these into buffers.
void Partition(std::mt19937_64 &random, int n, std::vector<int64_t> *bucket_of, std::vector<int64_t> *buffer_of) {
  bucket_of->assign(static_cast<size_t>(n), 0);
  const int most = 1 + static_cast<int>(random() % static_cast<uint64_t>(n));
  int64_t bucket = 0;
  for (int k = 0; k < n; k++) {
    const int i = n - 1 - k;  // backward's order
    if (k > 0 && bucket + 1 < most && random() % 2) bucket++;
    (*bucket_of)[static_cast<size_t>(i)] = bucket;
  }
  if (random() % 4 == 0) std::shuffle(bucket_of->begin(), bucket_of->end(), random);
  buffer_of->assign(static_cast<size_t>(bucket) + 1, 0);
  for (int64_t b = 1; b <= bucket; b++)
    (*buffer_of)[static_cast<size_t>(b)] = (*buffer_of)[static_cast<size_t>(b - 1)] + (random() % 3 == 0);
}

bool Reduces(const Spec &spec, const Step &step) {
  return step.what == Do::kBackward && (step.sync || spec.kind == TX_CYCLE_OPTIM_GRADS || spec.kind == TX_CYCLE_UNITS ||
                                        spec.kind == TX_CYCLE_DDP_HOOK);
}

void AddFaults(std::mt19937_64 &random, Spec *spec) {
  const auto draw = [&](int n) { return static_cast<int>(random() % static_cast<uint64_t>(std::max(n, 1))); };
  const int n = draw(3) + (draw(3) == 0 ? 1 : 0);
  for (int k = 0; k < n; k++) {
    static const Ill kPlanned[] = {Ill::kRaise,   Ill::kNonfinite, Ill::kUnused,   Ill::kFrozen,
                                   Ill::kSkipped, Ill::kInterrupt, Ill::kLost,     Ill::kStalled,
                                   Ill::kDropped, Ill::kAssigned,  Ill::kHeldBack, Ill::kRaiseInHook};
    Ill what = kPlanned[draw(12)];
    if (spec->kind >= TX_CYCLE_UNITS && what == Ill::kRaiseInHook) what = Ill::kRaise;
    if (spec->kind == TX_CYCLE_DDP_HOOK &&
        (what == Ill::kUnused || what == Ill::kFrozen || what == Ill::kAssigned || what == Ill::kDropped)) {
      what = Ill::kRaise;  // DDP itself forbids the others, or hides them from its hook
    }
    Fault fault{what, draw(2) ? -1 : draw(spec->world), draw(static_cast<int>(spec->steps_of_program.size())), 0};
    fault.at = what == Ill::kInterrupt                       ? draw(20)
               : what == Ill::kLost || what == Ill::kStalled ? draw(120)
                                                             : draw(spec->n_params);
    if (what == Ill::kLost || what == Ill::kStalled || what == Ill::kHeldBack) fault.rank = draw(spec->world);
    spec->faults.push_back(fault);
  }
}

}  // namespace

Spec Generate(uint64_t seed) {
  std::mt19937_64 random(seed * 0x9E3779B97F4A7C15u + 1);
  const auto draw = [&](int n) { return static_cast<int>(random() % static_cast<uint64_t>(n)); };
  Spec spec;
  spec.seed = seed;
  spec.kind = draw(5);
  spec.world = draw(16) == 0 ? 1 + draw(8) : 1 + draw(4);
  spec.n_params = 1 + draw(7);
  Partition(random, spec.n_params, &spec.bucket_of, &spec.buffer_of);
  spec.check_for_nan = draw(3) > 0;
  spec.times = draw(2);
  spec.find_unused = draw(2);
  spec.scales_sums = draw(2);
  const bool planned = spec.kind <= TX_CYCLE_OPTIM_GRADS;
  spec.reorder = planned && spec.kind != TX_CYCLE_OPTIM_GRADS && draw(3) == 0;
  if (spec.reorder && draw(2)) Partition(random, spec.n_params, &spec.rebuilt_bucket_of, &spec.rebuilt_buffer_of);
  spec.steps = (spec.kind == TX_CYCLE_OPTIM || spec.kind == TX_CYCLE_OPTIM_GRADS) && draw(4) == 0;
  spec.replicated = spec.kind == TX_CYCLE_UNITS && draw(4) == 0;
  spec.slots = spec.kind == TX_CYCLE_UNITS ? 2 : 4;
  for (size_t b = 0; b < spec.buffer_of.size(); b++)
    spec.ends.push_back(draw(3) > 0);
  const int cycles = 1 + draw(4);
  for (int c = 0; c < cycles; c++) {
    for (int micro = draw(3) == 0 ? 1 + draw(2) : 0; micro >= 0; micro--) {
      Step step{Do::kBackward, micro == 0 || draw(4) == 0, {}};
      for (int i = spec.n_params - 1; i >= 0; i--)
        step.order.push_back(i);
      if (draw(4) == 0) std::shuffle(step.order.begin(), step.order.end(), random);
      spec.steps_of_program.push_back(step);
    }
    if (draw(5) > 0) spec.steps_of_program.push_back({Do::kStep, false, {}});
    if (draw(4) > 0) spec.steps_of_program.push_back({Do::kZeroGrad, false, {}});
  }
  if (draw(2)) AddFaults(random, &spec);
  return spec;
}

std::string Text(const Spec &spec) {
  static const char *const kKinds[] = {"no_shard", "optim", "optim_grads", "units", "ddp_hook"};
  static const char *const kIlls[] = {"raise", "nonfinite", "unused",  "frozen",   "skipped",   "interrupt",
                                      "lost",  "stalled",   "dropped", "assigned", "held back", "raise in a hook"};
  std::ostringstream out;
  out << "seed " << spec.seed << ": " << kKinds[spec.kind] << ", " << spec.world << " ranks, buckets of parameters";
  for (int64_t b : spec.bucket_of)
    out << ' ' << b;
  out << "; nan " << spec.check_for_nan << " times " << spec.times << " unused " << spec.find_unused << " reorder "
      << spec.reorder << " scales " << spec.scales_sums << " steps " << spec.steps << " replicated " << spec.replicated
      << "\n ";
  for (size_t s = 0; s < spec.steps_of_program.size(); s++) {
    const Step &step = spec.steps_of_program[s];
    out << ' ' << s << ':'
        << (step.what == Do::kStep       ? "step"
            : step.what == Do::kZeroGrad ? "zero_grad"
            : step.sync                  ? "backward"
                                         : "backward(no_sync)");
  }
  for (const Fault &fault : spec.faults) {
    out << "\n  " << kIlls[static_cast<int>(fault.what)] << ": rank " << fault.rank << ", step " << fault.step
        << ", at " << fault.at;
  }
  return out.str();
}

namespace {

struct Wrong {
  std::string what;
};

// -- network: what was posted under one tag
// ----------------------------------------------------------------------------

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
  std::vector<int64_t> params;
};

class World;
struct Expected;

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
  enum class At { kOpStart, kRecovering, kBegin, kGrads, kEnding, kChecking, kOpEnd };
  bool Drain();  // true: no action is left
  void Act(const tx_cycle_action &action);
  bool Wait(const tx_cycle_action &action);
  void Throw();
  void StartOp();
  bool NextGradient();
  bool NextGiven();
  void Accumulate(int i);
  void Prepare(int64_t i, int32_t flags);
  int32_t KindOfGrad(int64_t i) const;
  void Send(const tx_cycle_action &action);
  bool WasSent(size_t i) const;
  void Apply(Message *message, bool discard);
  void Install();
  void CheckStep();
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
  int64_t Number() const { return tx_cycle_number(cycle); }
  void Count(Event event);

  std::vector<int64_t> memory_, rebuilt_memory_;
  std::vector<const char *> names_, units_;
  At at_ = At::kOpStart;
  size_t next_grad_ = 0;
  int next_unit_ = 0;
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
  std::vector<int64_t> bucket_of_;
  bool has_raised_ = false;
  int64_t n_steps_ = 0;
  bool mixes_steps_ = false;
  bool sending_waits_ = false;
  friend class World;
};

// Tags: gloo's, per reducer and cycle.
int64_t TagOf(int64_t cycle, int64_t what) {
  return cycle * 1000 + what;
}
constexpr int64_t kReport = 900, kOrder = 901;

// The oracle, from the program alone: what a step finds.
struct Expected {
  bool known = false;    // nothing has happened of which the outcome is not defined
  bool refused = false;  // gradients are there that no rank has reduced
  std::vector<int64_t> sums;
};

std::vector<Expected> Oracle(const Spec &spec);

class World {
 public:
  World(const Spec &spec, Coverage *coverage) : spec(spec), coverage(coverage), random(spec.seed + 77) {
    for (int r = 0; r < spec.world; r++)
      ranks.push_back(std::make_unique<Rank>(this, r));
    expected = Oracle(spec);
    for (const Fault &fault : spec.faults) {
      const bool one = fault.rank >= 0 && spec.world > 1;
      const bool units = spec.kind == TX_CYCLE_UNITS;
      switch (fault.what) {
        case Ill::kLost:
        case Ill::kStalled:
          asymmetric = true;
          break;
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
          asymmetric |= one && units;
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

// The gradient of a parameter in a backward: a multiple of the number of ranks, so that means are exact.
int64_t ValueOf(const Spec &spec, int rank, int step, int i) {
  uint64_t x = spec.seed * 31 + static_cast<uint64_t>(rank) * 1000003 + static_cast<uint64_t>(step) * 10007 +
               static_cast<uint64_t>(i) * 101;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9u;
  x ^= x >> 32;
  return static_cast<int64_t>(x % 100000) * spec.world;
}

// Sums are divided by the number of ranks, or by 1.
int64_t Scaled(const Spec &spec, int64_t sum) {
  return spec.scales_sums && spec.kind != TX_CYCLE_DDP_HOOK ? sum : sum / spec.world;
}

std::vector<Expected> Oracle(const Spec &spec) {
  enum : uint8_t { kIsReady = 1, kIsAssigned = 2 };
  const auto n = static_cast<size_t>(spec.n_params);
  const bool units = spec.kind == TX_CYCLE_UNITS, shards = units || spec.kind == TX_CYCLE_OPTIM_GRADS;
  std::vector<int64_t> total(n), local(n);
  std::vector<uint8_t> has_local(n);
  bool known = true;
  std::vector<Expected> found(spec.steps_of_program.size());
  const auto suffers = [&](Ill what, int rank, int step, int at) {
    for (const Fault &fault : spec.faults) {
      const bool then = what == Ill::kFrozen ? fault.step <= step : fault.step == step;
      if (fault.what == what && (fault.rank < 0 || fault.rank == rank) && then && fault.at == at) return true;
    }
    return false;
  };
  for (int s = 0; s < static_cast<int>(spec.steps_of_program.size()); s++) {
    const Step &step = spec.steps_of_program[static_cast<size_t>(s)];
    bool skipped = false;
    for (const Fault &fault : spec.faults) {
      const bool all = fault.rank < 0 || spec.world == 1;
      if (fault.what == Ill::kInterrupt || fault.what == Ill::kLost || fault.what == Ill::kStalled) return found;
      if (fault.step != s) continue;
      if (fault.what == Ill::kSkipped && !all) return found;
      skipped |= fault.what == Ill::kSkipped;
    }
    if (skipped) continue;
    for (const Fault &fault : spec.faults) {
      const bool all = fault.rank < 0 || spec.world == 1;
      const auto i = static_cast<size_t>(fault.at) % n;
      if (fault.step != s) continue;
      if (fault.what == Ill::kDropped && !shards) {
        if (!all) known = false;
        total[i] = local[i] = has_local[i] = 0;
      } else if (fault.what == Ill::kAssigned && !units) {
        if (!all) known = false;
        if (!shards) total[i] = 0;
        local[i] = spec.world * 11 * spec.world, has_local[i] = kIsAssigned;
      } else if ((fault.what == Ill::kRaise || fault.what == Ill::kRaiseInHook) && step.what == Do::kBackward) {
        known = false;
      }
    }
    if (step.what == Do::kZeroGrad) {
      std::fill(total.begin(), total.end(), 0);
      std::fill(local.begin(), local.end(), 0);
      std::fill(has_local.begin(), has_local.end(), 0);
      known = true;
    } else if (step.what == Do::kStep) {
      Expected &e = found[static_cast<size_t>(s)];
      e.known = known;
      e.sums = total;
      for (size_t i = 0; i < n; i++) {
        // What the user assigned is what is stepped, unless gradients are sharded.
        e.refused |= has_local[i] == kIsReady || (has_local[i] == kIsAssigned && shards);
        if (has_local[i] == kIsAssigned) e.sums[i] = spec.world * 11;
      }
    } else {
      for (size_t i = 0; i < n; i++) {
        for (int r = 0; r < spec.world; r++) {
          if (suffers(Ill::kUnused, r, s, static_cast<int>(i)) || suffers(Ill::kFrozen, r, s, static_cast<int>(i))) {
            continue;
          }
          local[i] += ValueOf(spec, r, s, static_cast<int>(i));
          has_local[i] = kIsReady;
        }
        if (!Reduces(spec, step)) continue;
        total[i] += Scaled(spec, local[i]);
        local[i] = has_local[i] = 0;
      }
    }
  }
  return found;
}

Rank::Rank(World *w, int r) : world(w), rank(r) {
  const Spec &spec = w->spec;
  const auto n = static_cast<size_t>(spec.n_params);
  for (size_t s = 0; s < spec.steps_of_program.size(); s++)
    program.push_back(static_cast<int>(s));
  for (const Fault &fault : spec.faults) {
    if (fault.what != Ill::kSkipped || (fault.rank >= 0 && fault.rank != r)) continue;
    program.erase(std::remove(program.begin(), program.end(), fault.step), program.end());
  }
  grads.resize(n);
  static const char *const kNames[] = {"p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7", "p8", "p9"};
  static const char *const kUnits[] = {"u0", "u1", "u2", "u3", "u4", "u5", "u6", "u7", "u8", "u9"};
  names_.assign(kNames, kNames + n);
  units_.assign(kUnits, kUnits + n);
  bucket_of_ = spec.bucket_of;
  broken_.assign(n, 0);
  tx_cycle_args args = {};
  args.size = sizeof args;
  args.n_params = spec.n_params;
  args.n_buckets = static_cast<int64_t>(spec.kind == TX_CYCLE_DDP_HOOK ? n : spec.buffer_of.size());
  args.bucket_of = spec.bucket_of.data();
  args.buffer_of = spec.buffer_of.data();
  args.names = names_.data();
  args.units = units_.data();
  args.slots = spec.slots;
  args.kind = spec.kind;
  args.rank = r;
  args.world = spec.world;
  args.check_for_nan = spec.check_for_nan;
  args.times = spec.times;
  args.find_unused = spec.find_unused;
  args.reorder = spec.reorder;
  args.scales_sums = spec.scales_sums;
  memory_.resize(static_cast<size_t>(tx_cycle_bytes(&args) / 8 + 1));
  tx_error error;
  if (tx_cycle_init(memory_.data(), static_cast<int64_t>(memory_.size() * 8), &args, &cycle, &error) != TX_OK) {
    throw Wrong{error.message};
  }
  if (spec.ends.size() == spec.buffer_of.size() && spec.kind <= TX_CYCLE_OPTIM_GRADS) {
    tx_cycle_set_messages(cycle, spec.ends.data());
  }
}

bool Rank::owns(int64_t i) const {
  return world->spec.kind == TX_CYCLE_NO_SHARD || world->spec.kind == TX_CYCLE_DDP_HOOK ||
         i % world->spec.world == rank;
}

void Rank::Count(Event event) {
  world->coverage->events[static_cast<size_t>(tx_cycle_phase_of(cycle))][event]++;
}

bool Rank::Suffers(Ill what, int at) const {
  for (const Fault &fault : world->spec.faults) {
    if (fault.what == what && (fault.rank < 0 || fault.rank == rank) && fault.at == at &&
        fault.step == program[static_cast<size_t>(pc)]) {
      return true;
    }
  }
  return false;
}

bool Rank::IsFrozen(int i) const {
  for (const Fault &fault : world->spec.faults) {
    if (fault.what == Ill::kFrozen && (fault.rank < 0 || fault.rank == rank) && fault.at == i &&
        (finished() || program[static_cast<size_t>(pc)] >= fault.step)) {
      return true;
    }
  }
  return false;
}

std::vector<uint8_t> Rank::RequiresGrad() const {
  std::vector<uint8_t> requires_grad;
  for (int i = 0; i < world->spec.n_params; i++)
    requires_grad.push_back(!IsFrozen(i));
  return requires_grad;
}

int32_t Rank::KindOfGrad(int64_t i) const {
  const Gradient &grad = grads[static_cast<size_t>(i)];
  return !grad.there ? TX_GRAD_NONE : grad.in_place ? TX_GRAD_IN_PLACE : TX_GRAD_OTHER;
}

void Rank::Prepare(int64_t i, int32_t flags) {
  Gradient &g = grads[static_cast<size_t>(i)];
  if (flags && g.travels) throw Wrong{"a gradient is prepared while its bucket travels"};
  const auto take = [&] {
    if (world->spec.kind == TX_CYCLE_OPTIM_GRADS || world->spec.kind == TX_CYCLE_UNITS) {
      g.held = true;
      g.held_value = g.assigned;
      g.held_nan = g.nan;
      g.nan = false;
      g.there = false;
      return;
    }
    if (!g.in_place) g.value = g.assigned;
    g.in_place = true;
  };
  if (flags & TX_PREPARE_COPY) take(), g.copy = g.value;
  if (flags & TX_PREPARE_MULTIPLY) take(), g.value *= rank == 0 ? 1 : 0;
  if (flags & TX_PREPARE_ZERO) g.value = 0, g.nan = false;
  if (flags & TX_PREPARE_SET_ASIDE) {
    take();
    if (owns(i)) g.earlier = g.value;
    g.value = 0;
  }
  if (flags & TX_PREPARE_FORGET) g.earlier.reset();
  if (flags & TX_PREPARE_TAKE) take();
}

// Autograd accumulates a gradient, between the two hooks.
void Rank::Accumulate(int i) {
  const Spec &spec = world->spec;
  Gradient &g = grads[static_cast<size_t>(i)];
  const int step = program[static_cast<size_t>(pc)];
  const int64_t value = ValueOf(spec, rank, step, i);
  const bool nan = Suffers(Ill::kNonfinite, i);
  if (spec.kind == TX_CYCLE_UNITS) {
    g.held = true, g.held_value = value, g.held_nan = nan;
    g.own += value, g.has_own = true;
    return;
  }
  Count(kAccumulate);
  Prepare(i, tx_cycle_accumulate(cycle, i, KindOfGrad(i)));
  if (g.travels) throw Wrong{"a gradient is written while its bucket travels"};
  g.own += value, g.has_own = true;
  if (!g.there) {
    g.there = true, g.in_place = false, g.assigned = value, g.nan = nan;
  } else if (g.in_place) {
    g.value += value, g.nan |= nan;
  } else {
    g.assigned += value, g.nan |= nan;
  }
  if (!Suffers(Ill::kRaiseInHook, i)) Prepare(i, TX_PREPARE_TAKE);
}

void Rank::Throw() {
  dead_ = in_backward_ || at_ == At::kRecovering;
  has_raised_ |= dead_;
  world->has_raised |= dead_;
  in_backward_ = false;
  waiting = false;
  NextOp();
}

void Rank::NextOp() {
  pc++;
  at_ = At::kOpStart;
}

void Rank::Fail(const std::string &text) {
  Count(kFail);
  tx_cycle_fail(cycle, text.c_str());
  world->group_failed = true;
  world->coverage->failures++;
  Throw();
}

void Rank::Post(int64_t tag, Exchange **exchange) {
  Exchange &e = world->exchanges[tag];
  int64_t delay = 1 + static_cast<int64_t>(world->random() % 8);
  for (const Fault &fault : world->spec.faults)
    if (fault.what == Ill::kHeldBack && fault.rank == rank) delay += 40;
  e.posts++;
  e.ready_at = std::max(e.ready_at, world->now + delay);
  *exchange = &e;
}

bool IsComplete(const World &world, int64_t tag) {
  const auto found = world.exchanges.find(tag);
  return found != world.exchanges.end() && found->second.posts == world.spec.world &&
         found->second.ready_at <= world.now;
}

void Rank::Send(const tx_cycle_action &action) {
  const Spec &spec = world->spec;
  int64_t held = 0;
  for (size_t i = 0; i < grads.size(); i++)
    held += spec.kind == TX_CYCLE_UNITS && bucket_of_[i] == action.first && grads[i].held;
  // The tag of a unit depends on its size, too: one that was used on some ranks only meets nothing.
  Message message{action.first, action.end, TagOf(Number(), action.first + 20 * held), false, {}};
  if (action.message != static_cast<int64_t>(messages_.size())) throw Wrong{"messages are not numbered in order"};
  int64_t under_way = 0;
  for (const Message &m : messages_)
    under_way += !m.applied;
  if ((spec.kind == TX_CYCLE_OPTIM_GRADS || spec.kind == TX_CYCLE_UNITS) && under_way >= spec.slots) {
    throw Wrong{"more messages are under way than there are slots"};
  }
  Exchange *e = nullptr;
  Post(message.tag, &e);
  e->least_steps = std::min(e->least_steps, n_steps_);
  e->most_steps = std::max(e->most_steps, n_steps_);
  if (e->first < 0) {
    e->first = action.first, e->end = action.end;
    e->sums.assign(grads.size(), 0);
    e->own.assign(grads.size(), 0);
    e->contributed.assign(grads.size(), 0);
    e->nonfinite.assign(grads.size(), 0);
  } else if (e->first != action.first || e->end != action.end) {
    throw Wrong{"ranks send messages of different sizes under one tag"};
  }
  for (size_t i = 0; i < grads.size(); i++) {
    if (bucket_of_[i] < action.first || bucket_of_[i] >= action.end) continue;
    Gradient &g = grads[i];
    if (g.travels) throw Wrong{"a gradient is sent twice"};
    message.params.push_back(static_cast<int64_t>(i));
    e->own[i] += g.own;
    e->contributed[i] |= g.there || g.held;
    g.own = 0;
    g.has_own = false;
    g.was_there = g.there || g.present;
    if (spec.kind != TX_CYCLE_OPTIM_GRADS && spec.kind != TX_CYCLE_UNITS) {
      e->sums[i] += g.value;
      e->nonfinite[i] |= g.nan;
      g.travels = true;
    } else if (g.held) {
      e->sums[i] += g.held_value;
      e->nonfinite[i] |= g.held_nan;
      g.held = g.held_nan = false;
    }
  }
  messages_.push_back(message);
}

// The sums are written: by another thread, as soon as all posts have arrived.
void Rank::Apply(Message *message, bool discard) {
  const Spec &spec = world->spec;
  const Exchange &e = world->exchanges[message->tag];
  message->applied = true;
  for (int64_t p : message->params) {
    Gradient &g = grads[static_cast<size_t>(p)];
    const int64_t sum = Scaled(spec, e.sums[static_cast<size_t>(p)]);
    const bool nan = e.nonfinite[static_cast<size_t>(p)];
    const bool added = spec.kind != TX_CYCLE_UNITS || !discard;
    if (added) g.expected += Scaled(spec, e.own[static_cast<size_t>(p)]);
    g.contributed = e.contributed[static_cast<size_t>(p)];
    // A DistributedDataParallel's optimizer does not tell the hook of its steps.
    mixes_steps_ |= added && e.least_steps != e.most_steps && spec.kind != TX_CYCLE_DDP_HOOK;
    switch (spec.kind) {
      case TX_CYCLE_NO_SHARD:
      case TX_CYCLE_DDP_HOOK:
        g.value = sum, g.nan = nan;
        break;
      case TX_CYCLE_OPTIM:
        if (owns(p)) g.value = g.earlier.value_or(0) + sum, g.nan = nan;
        break;
      case TX_CYCLE_OPTIM_GRADS:
        if (owns(p)) g.shard += sum, g.shard_nan |= nan;
        break;
      default:
        if (discard) break;
        if (owns(p)) g.shard += sum, g.shard_nan |= nan;
        broken_[static_cast<size_t>(p)] = 1;
    }
    g.travels = false;
    const bool shards = spec.kind == TX_CYCLE_OPTIM_GRADS || spec.kind == TX_CYCLE_UNITS;
    // What a gradient is worth that one rank alone assigned, dropped, did not zero, or lost, is not defined.
    const bool defined = !world->OneRankAssigns() && !(world->asymmetric && world->has_raised);
    if (added && owns(p) && defined && (shards ? g.shard : g.value) != g.expected) {
      throw Wrong{"a sum is not that of all gradients, each counted once"};
    }
  }
}

void Rank::ApplyArrived() {
  if (world->spec.kind == TX_CYCLE_UNITS) return;  // its sums are added by whoever waits
  for (Message &message : messages_)
    if (!message.applied && IsComplete(*world, message.tag)) Apply(&message, false);
}

void Rank::Install() {
  const Spec &spec = world->spec;
  const uint8_t *anywhere = tx_cycle_anywhere(cycle), *left = tx_cycle_left(cycle);
  for (size_t i = 0; i < grads.size(); i++) {
    Gradient &g = grads[i];
    if (g.travels) throw Wrong{"sums are installed before they are there"};
    switch (spec.kind) {
      case TX_CYCLE_NO_SHARD:
        if (g.copy && left[i]) g.value = *g.copy;
        [[fallthrough]];
      case TX_CYCLE_OPTIM:
        if (anywhere[i]) g.there = g.in_place = true;
        if (g.there != g.contributed) throw Wrong{"ranks do not have the gradients that there are"};
        g.copy.reset();
        g.earlier.reset();
        break;
      case TX_CYCLE_DDP_HOOK:
        break;
      default:
        if (anywhere[i]) g.present = true;
        if (WasSent(i) && g.present != (g.contributed || g.was_there)) {
          throw Wrong{"a shard that has no gradient is one"};
        }
        if (!anywhere[i] && !g.present) g.shard = g.expected = 0, g.shard_nan = false;
    }
  }
}

// -- the driver
// ----------------------------------------------------------------------------------------------------------

// Whether what the action waits for is there. Throws in the name of the program where it never will be.
bool Rank::Wait(const tx_cycle_action &action) {
  if (!waiting) {
    waiting = true;
    for (const Fault &fault : world->spec.faults) {
      if (fault.what == Ill::kInterrupt && (fault.rank < 0 || fault.rank == rank) && fault.at == waits_) {
        waits_++;
        Throw();
        return false;
      }
    }
    waits_++;
  }
  int64_t tag = action.kind == TX_DO_READ ? report_tag_ : order_tag_;
  if (action.kind == TX_DO_WAIT || action.kind == TX_DO_SEND) {
    if (action.message >= static_cast<int64_t>(messages_.size()))
      throw Wrong{"a message is waited for before it is sent"};
    Message &message = messages_[static_cast<size_t>(action.message)];
    if (message.applied && world->spec.kind != TX_CYCLE_UNITS) {
      waiting = false;
      return true;
    }
    tag = message.tag;
  }
  if (IsComplete(*world, tag)) {
    waiting = false;
    return true;
  }
  if (timed_out || (world->group_failed && !IsComplete(*world, tag))) {
    timed_out = false;
    Fail("a rank was lost");
  }
  return false;
}

void Rank::Act(const tx_cycle_action &action) {
  world->coverage->actions[static_cast<size_t>(tx_cycle_phase_of(cycle))][static_cast<size_t>(action.kind)]++;
  const int32_t phase = tx_cycle_phase_of(cycle);
  const Spec &spec = world->spec;
  switch (action.kind) {
    case TX_DO_CHECK:
      for (size_t i = 0; i < grads.size() && spec.check_for_nan; i++) {
        const Gradient &g = grads[i];
        const bool nan = spec.kind == TX_CYCLE_OPTIM_GRADS ? g.held && g.held_nan : g.nan;
        if (bucket_of_[i] == action.first && nan && first_bad_ < 0) first_bad_ = static_cast<int>(i);
      }
      tx_cycle_done(cycle, 0);
      break;
    case TX_DO_SEND:
      if (tx_cycle_failure(cycle)) throw Wrong{"a message is sent after a failure"};
      if (!sending_waits_) {
        if (world->group_failed) return Fail("a rank was lost");
        if (spec.kind == TX_CYCLE_UNITS) {
          for (size_t i = 0; i < grads.size(); i++) {
            if (bucket_of_[i] == action.first && grads[i].held && grads[i].held_nan && spec.check_for_nan &&
                first_bad_ < 0) {
              first_bad_ = static_cast<int>(i);
            }
          }
        }
        Send(action);
      }
      if (spec.replicated) {
        sending_waits_ = true;
        if (!Wait(action)) return;
        sending_waits_ = false;
        Apply(&messages_.back(), false);
        tx_cycle_done(cycle, 1);
      } else {
        tx_cycle_done(cycle, 0);
      }
      break;
    case TX_DO_INSPECT: {
      const int64_t i = action.first;
      Gradient &g = grads[static_cast<size_t>(i)];
      if (g.travels) throw Wrong{"a bucket was sent before all of its parameters were known"};
      Count(kMissing);
      Prepare(i, tx_cycle_missing(cycle, i, KindOfGrad(i), !IsFrozen(static_cast<int>(i))));
      tx_cycle_done(cycle, 0);
      break;
    }
    case TX_DO_ORDER:
      if (!order_posted_) {
        if (world->group_failed) return Fail("a rank was lost");
        order_tag_ = TagOf(Number(), kOrder);
        Exchange *e = nullptr;
        Post(order_tag_, &e);
        order_posted_ = true;
      }
      if (!Wait(action)) return;
      order_posted_ = false;
      if (spec.rebuilt_bucket_of.empty()) {
        tx_cycle_done(cycle, 0);
      } else {
        tx_cycle_args args = {};
        args.size = sizeof args;
        args.n_params = spec.n_params;
        args.n_buckets = static_cast<int64_t>(spec.rebuilt_buffer_of.size());
        args.bucket_of = spec.rebuilt_bucket_of.data();
        args.buffer_of = spec.rebuilt_buffer_of.data();
        args.names = names_.data();
        args.slots = spec.slots;
        args.kind = spec.kind;
        args.rank = rank;
        args.world = spec.world;
        args.check_for_nan = spec.check_for_nan;
        args.find_unused = spec.find_unused;
        args.scales_sums = spec.scales_sums;
        rebuilt_memory_.resize(static_cast<size_t>(tx_cycle_bytes(&args) / 8 + 1));
        tx_error error;
        tx_cycle *rebuilt = nullptr;
        if (tx_cycle_rebuild(rebuilt_memory_.data(), static_cast<int64_t>(rebuilt_memory_.size() * 8), &args, cycle,
                             &rebuilt, &error) != TX_OK) {
          throw Wrong{error.message};
        }
        cycle = rebuilt;
        bucket_of_ = spec.rebuilt_bucket_of;
      }
      break;
    case TX_DO_REPORT: {
      if (world->group_failed) return Fail("a rank was lost");
      std::vector<uint8_t> report(static_cast<size_t>(tx_cycle_report_bytes(cycle, 1)));
      const int64_t word = 7;
      tx_cycle_report(cycle, first_bad_, RequiresGrad().data(), &word, 1, report.data());
      report_tag_ = TagOf(Number(), kReport);
      Exchange *e = nullptr;
      Post(report_tag_, &e);
      e->payloads.resize(static_cast<size_t>(spec.world));
      e->payloads[static_cast<size_t>(rank)] = report;
      report_posted_ = true;
      tx_cycle_done(cycle, 0);
      break;
    }
    case TX_DO_WAIT: {
      if (!Wait(action)) return;
      Message &message = messages_[static_cast<size_t>(action.message)];
      if (!message.applied) Apply(&message, action.flags & TX_WAIT_DISCARD);
      tx_cycle_done(cycle, 0);
      break;
    }
    case TX_DO_READ: {
      if (!Wait(action)) return;
      const Exchange &e = world->exchanges[report_tag_];
      std::vector<const uint8_t *> rows, scratch(static_cast<size_t>(spec.world));
      for (const auto &payload : e.payloads) {
        if (payload.size() != e.payloads[0].size()) throw Wrong{"reports of different sizes"};
        rows.push_back(payload.data());
      }
      Count(kRead);
      report_posted_ = false;
      tx_cycle_read(cycle, rows.data(), scratch.data(), 1, 0);
      tx_cycle_done(cycle, 0);
      break;
    }
    case TX_DO_INSTALL:
      Install();
      CompareSums();
      tx_cycle_done(cycle, 0);
      break;
    case TX_DO_RAISE:
      world->coverage->verdicts++;
      if (spec.kind == TX_CYCLE_DDP_HOOK && messages_.size() == spec.buffer_of.size()) {
        throw Wrong{"the last bucket is sent, although its gradients are not finite"};
      }
      verdict_of_cycle[Number() - 1] = action.text;
      in_backward_ = false;  // it has ended: nothing is left of it
      std::fill(broken_.begin(), broken_.end(), 0);
      NextOp();
      break;
    case TX_DO_RECOVERED:
      Count(kDied);
      tx_cycle_broken(cycle, broken_.data());
      if (report_posted_ && !tx_cycle_failure(cycle)) throw Wrong{"a report is never read"};
      for (Gradient &g : grads) {
        if (g.travels && !tx_cycle_failure(cycle)) throw Wrong{"recovered while a gradient travels"};
        g.held = false;
        const bool shards = spec.kind == TX_CYCLE_OPTIM_GRADS || spec.kind == TX_CYCLE_UNITS;
        if (shards && !g.there) g.own = 0, g.has_own = false;  // else a hook raised: `.grad` is what torch leaves
      }
      std::fill(broken_.begin(), broken_.end(), 0);
      tx_cycle_done(cycle, 0);
      break;
    default:
      throw Wrong{"an unknown action"};
  }
  world->coverage->transitions[static_cast<size_t>(phase)][static_cast<size_t>(tx_cycle_phase_of(cycle))]++;
}

bool Rank::WasSent(size_t i) const {
  for (const Message &message : messages_)
    if (bucket_of_[i] >= message.first && bucket_of_[i] < message.end) return true;
  return false;
}

// All ranks hold the same sums after a cycle, unless they parted.
void Rank::CompareSums() {
  const Spec &spec = world->spec;
  const int64_t ended = Number() - 1;
  auto &sums = world->sums_of_cycle[ended];
  auto &has = world->has_sum[ended];
  sums.resize(grads.size());
  has.resize(grads.size());
  const uint8_t *anywhere = tx_cycle_anywhere(cycle);
  for (size_t i = 0; i < grads.size(); i++) {
    const Gradient &g = grads[i];
    if (spec.kind != TX_CYCLE_NO_SHARD && spec.kind != TX_CYCLE_DDP_HOOK) continue;
    if (spec.kind == TX_CYCLE_NO_SHARD && !anywhere[i]) continue;
    if (!WasSent(i)) continue;
    if (has[i] && sums[i] != g.value) throw Wrong{"ranks hold different sums of one cycle"};
    has[i] = 1;
    sums[i] = g.value;
  }
  world->coverage->cycles_compared++;
}

bool Rank::Drain() {
  for (;;) {
    tx_cycle_action action;
    if (!tx_cycle_next(cycle, &action)) return true;
    const int was = pc;
    Act(action);
    if (waiting || pc != was) return false;
  }
}

void Rank::ZeroGrad() {
  std::vector<int64_t> all;
  for (size_t i = 0; i < grads.size(); i++) {
    Gradient &g = grads[i];
    if (g.travels && !tx_cycle_failure(cycle)) throw Wrong{"zero_grad() while a gradient travels"};
    all.push_back(static_cast<int64_t>(i));
    g.there = g.in_place = g.nan = g.held = g.present = g.shard_nan = g.has_own = false;
    g.shard = g.own = g.expected = 0;
    g.earlier.reset();
    g.copy.reset();
  }
  mixes_steps_ = false;
  Count(kZero);
  tx_cycle_zero(cycle, all.data(), static_cast<int64_t>(all.size()));
}

void Rank::StartOp() {
  const Step &step = world->spec.steps_of_program[static_cast<size_t>(program[static_cast<size_t>(pc)])];
  for (const Fault &fault : world->spec.faults) {
    if ((fault.rank >= 0 && fault.rank != rank) || fault.step != program[static_cast<size_t>(pc)]) continue;
    Gradient &g = grads[static_cast<size_t>(fault.at) % grads.size()];
    const bool shards = world->spec.kind == TX_CYCLE_OPTIM_GRADS || world->spec.kind == TX_CYCLE_UNITS;
    if (fault.what == Ill::kDropped && !shards) {
      g.there = g.in_place = g.nan = g.has_own = false;
      g.own = g.expected = 0;
    }
    if (fault.what == Ill::kAssigned && world->spec.kind != TX_CYCLE_UNITS) {
      g.there = true, g.in_place = false, g.nan = false;
      g.assigned = g.own = world->spec.world * 11;
      if (!shards) g.expected = 0;
      g.has_own = false;  // it may be stepped as it is
    }
  }
  if (step.what == Do::kZeroGrad) {
    ZeroGrad();
    return NextOp();
  }
  if (step.what == Do::kStep) return CheckStep();
  next_grad_ = 0;
  next_unit_ = 0;
  given_ready_.clear();
  first_bad_ = -1;
  messages_.clear();
  report_posted_ = order_posted_ = sending_waits_ = false;
  std::fill(broken_.begin(), broken_.end(), 0);
  at_ = At::kGrads;
  in_backward_ = true;
  Count(kBegin);
  if (tx_cycle_begin(cycle, step.sync, world->spec.steps) < 0) {
    if (!tx_cycle_failure(cycle)) throw Wrong{std::string("a backward is refused: ") + tx_cycle_refusal(cycle)};
    in_backward_ = false;
    NextOp();
  }
}

void Rank::CheckStep() {
  const Spec &spec = world->spec;
  std::vector<uint8_t> own;
  for (const Gradient &g : grads)
    own.push_back(g.there && spec.kind != TX_CYCLE_UNITS && spec.kind != TX_CYCLE_DDP_HOOK);
  Count(kCheckStep);
  const bool refused = tx_cycle_check_step(cycle, own.data()) < 0;
  world->coverage->refused_steps += refused;
  if (!refused) {
    world->coverage->steps_taken++;
    n_steps_++;
    if (mixes_steps_) throw Wrong{"gradients after different numbers of steps are summed, and stepped"};
    for (const Gradient &g : grads) {
      if (g.has_own && spec.kind <= TX_CYCLE_OPTIM) throw Wrong{"a gradient of this rank alone is stepped"};
    }
    for (size_t i = 0; i < grads.size(); i++) {
      const Gradient &g = grads[i];
      const bool shards = spec.kind == TX_CYCLE_OPTIM_GRADS || spec.kind == TX_CYCLE_UNITS;
      // A DistributedDataParallel's gradients after a backward that raised are the user's own.
      const bool checked = spec.check_for_nan && !(spec.kind == TX_CYCLE_DDP_HOOK && has_raised_);
      if (checked && owns(static_cast<int64_t>(i)) && (shards ? g.present && g.shard_nan : g.there && g.nan)) {
        throw Wrong{"a gradient that is not finite is stepped"};
      }
    }
  }
  const int step = program[static_cast<size_t>(pc)];
  verdict_of_cycle[-1000 - step] = refused ? "refused" : "stepped";
  CompareWithOracle(world->expected[static_cast<size_t>(step)], refused);
  NextOp();
}

void Rank::CompareWithOracle(const Expected &expected, bool refused) {
  const Spec &spec = world->spec;
  if (!expected.known || tx_cycle_failure(cycle) || world->asymmetric) return;
  bool nonfinite = false;
  for (int64_t i = 0; i < spec.n_params; i++)
    nonfinite |= tx_cycle_nonfinite(cycle)[i] != 0;
  const bool shards = spec.kind == TX_CYCLE_OPTIM_GRADS || spec.kind == TX_CYCLE_UNITS;
  if (nonfinite || (refused && shards && expected.refused)) return;
  if (refused != (expected.refused && spec.kind != TX_CYCLE_DDP_HOOK)) {
    throw Wrong{refused ? std::string("a step is refused: ") + tx_cycle_refusal(cycle)
                        : "gradients that no rank has reduced are stepped"};
  }
  if (refused) return;
  for (int64_t i = 0; i < spec.n_params; i++) {
    const Gradient &g = grads[static_cast<size_t>(i)];
    if (!owns(i) || (shards ? !g.present : !g.there)) continue;
    const int64_t found = shards ? g.shard : g.in_place ? g.value : g.assigned;
    if (found != expected.sums[static_cast<size_t>(i)]) throw Wrong{"a step finds another sum than the oracle's"};
    world->coverage->sums_compared++;
  }
}

// FSDP2's and DDP's order: units, or buckets.
bool Rank::NextGiven() {
  const Spec &spec = world->spec;
  const Step &step = spec.steps_of_program[static_cast<size_t>(program[static_cast<size_t>(pc)])];
  const int n = static_cast<int>(spec.buffer_of.size());
  if (Suffers(Ill::kRaise, next_unit_)) {
    Throw();
    return true;
  }
  if (next_unit_ >= n) {
    at_ = At::kEnding;
    if (spec.kind == TX_CYCLE_UNITS) {
      Count(kEnd);
      if (tx_cycle_end(cycle) < 0) throw Wrong{tx_cycle_refusal(cycle)};
    }
    return true;
  }
  const int unit = next_unit_++;
  int numel = 0;
  for (int i : step.order) {
    if (bucket_of_[static_cast<size_t>(i)] != unit) continue;
    const bool used = !Suffers(Ill::kUnused, i) && !IsFrozen(i);
    if (used) {
      Accumulate(i);
      given_ready_.push_back(i);
    }
    numel += used || spec.find_unused;
  }
  if (numel == 0 && spec.kind == TX_CYCLE_UNITS) return true;
  Count(kGiven);
  if (tx_cycle_given(cycle, unit, numel, 1, spec.kind == TX_CYCLE_DDP_HOOK && unit + 1 == n) < 0) {
    throw Wrong{tx_cycle_refusal(cycle)};
  }
  return true;
}

bool Rank::NextGradient() {
  const Spec &spec = world->spec;
  const Step &step = spec.steps_of_program[static_cast<size_t>(program[static_cast<size_t>(pc)])];
  if (spec.kind == TX_CYCLE_UNITS || spec.kind == TX_CYCLE_DDP_HOOK) {
    for (int i : given_ready_) {
      if (spec.kind != TX_CYCLE_UNITS) break;
      Count(kReady);
      if (tx_cycle_ready(cycle, i) < 0) throw Wrong{tx_cycle_refusal(cycle)};
    }
    given_ready_.clear();
    return NextGiven();
  }
  if (Suffers(Ill::kRaise, static_cast<int>(next_grad_))) {
    Throw();
    return true;
  }
  if (next_grad_ == step.order.size()) {
    at_ = At::kEnding;
    Count(kEnd);
    if (tx_cycle_end(cycle) < 0) throw Wrong{tx_cycle_refusal(cycle)};
    return true;
  }
  const int i = step.order[next_grad_++];
  if (Suffers(Ill::kUnused, i) || IsFrozen(i)) return true;
  Accumulate(i);
  if (Suffers(Ill::kRaiseInHook, i)) {
    Throw();
    return true;
  }
  Count(kReady);
  if (tx_cycle_ready(cycle, i) < 0) throw Wrong{tx_cycle_refusal(cycle)};
  return true;
}

// Until the others have given up.
bool Rank::IsStalled() const {
  for (const Fault &fault : world->spec.faults) {
    if (fault.what == Ill::kStalled && fault.rank == rank && fault.at <= moves && !world->group_failed) return true;
  }
  return false;
}

bool Rank::Move() {
  if (finished()) return false;
  for (const Fault &fault : world->spec.faults) {
    if (fault.what == Ill::kLost && fault.rank == rank && fault.at <= moves) {
      lost = true;
      return true;
    }
  }
  if (IsStalled()) return false;
  moves++;
  ApplyArrived();
  if (at_ == At::kOpStart) {
    if (dead_) {
      std::vector<uint8_t> modified;
      for (const Gradient &g : grads)
        modified.push_back(g.there);
      Count(kDied);
      tx_cycle_died(cycle, world->spec.kind <= TX_CYCLE_OPTIM ? modified.data() : nullptr);
      dead_ = false;
      at_ = At::kRecovering;
    } else {
      StartOp();
      return true;
    }
  }
  const int was = pc;
  if (!Drain()) return !waiting || pc != was;
  switch (at_) {
    case At::kRecovering:
      StartOp();
      break;
    case At::kGrads:
      return NextGradient();
    default:
      in_backward_ = false;
      NextOp();
  }
  return true;
}

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
    if (++quiet < 400) continue;  // messages may be under way
    bool timed_out = false;
    for (const auto &rank : ranks)
      timed_out |= rank->blocked() && !rank->finished();
    if (!timed_out) {
      group_failed = true;  // whoever is stalled is given up by nobody: it wakes
      quiet = 0;
      continue;
    }
    if (!asymmetric) return "ranks wait for ever, although nothing parted them";
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
      return std::string("a machine failed, although nothing parted the ranks: ") + tx_cycle_failure(rank->cycle);
    }
    if (rank->verdict_of_cycle != ranks[0]->verdict_of_cycle) return "ranks came to different verdicts";
  }
  return "";
}

}  // namespace

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
