// Random training programs, generated from a seed, and the oracle: what their steps have to find.
#include <algorithm>
#include <sstream>

#include "tests/core/cycle_rank.h"

namespace cycle_world {
namespace {

// Divides n parameters into buckets at random, and the buckets into buffers.
void Partition(std::mt19937_64 &random, int n, std::vector<int64_t> *bucket_of, std::vector<int64_t> *buffer_of) {
  bucket_of->assign(static_cast<size_t>(n), 0);
  const int most = 1 + static_cast<int>(random() % static_cast<uint64_t>(n));
  int64_t bucket = 0;
  for (int k = 0; k < n; k++) {
    const int i = n - 1 - k;  // in backward's order
    if (k > 0 && bucket + 1 < most && random() % 2) bucket++;
    (*bucket_of)[static_cast<size_t>(i)] = bucket;
  }
  if (random() % 4 == 0) std::shuffle(bucket_of->begin(), bucket_of->end(), random);
  buffer_of->assign(static_cast<size_t>(bucket) + 1, 0);
  for (int64_t b = 1; b <= bucket; b++)
    (*buffer_of)[static_cast<size_t>(b)] = (*buffer_of)[static_cast<size_t>(b - 1)] + (random() % 3 == 0);
}

void AddFaults(std::mt19937_64 &random, Spec *spec) {
  const auto draw = [&](int n) { return static_cast<int>(random() % static_cast<uint64_t>(std::max(n, 1))); };
  const int n = draw(3) + (draw(3) == 0 ? 1 : 0);
  for (int k = 0; k < n; k++) {
    static const FaultKind kPlanned[] = {FaultKind::kRaise,        FaultKind::kNonfinite, FaultKind::kUnused,
                                         FaultKind::kFrozen,       FaultKind::kSkipped,   FaultKind::kInterrupt,
                                         FaultKind::kLost,         FaultKind::kStalled,   FaultKind::kDropped,
                                         FaultKind::kAssigned,     FaultKind::kHeldBack,  FaultKind::kRaiseInHook,
                                         FaultKind::kInterruptStep};
    FaultKind what = kPlanned[draw(13)];
    if (spec->kind >= TX_CYCLE_UNITS && what == FaultKind::kRaiseInHook) what = FaultKind::kRaise;
    if (spec->kind == TX_CYCLE_DDP_HOOK && (what == FaultKind::kUnused || what == FaultKind::kFrozen ||
                                            what == FaultKind::kAssigned || what == FaultKind::kDropped)) {
      what = FaultKind::kRaise;  // DDP rejects these faults itself, or hides them from its hook
    }
    Fault fault{what, draw(2) ? -1 : draw(spec->world), draw(static_cast<int>(spec->steps_of_program.size())), 0};
    fault.at = what == FaultKind::kInterrupt                             ? draw(20)
               : what == FaultKind::kLost || what == FaultKind::kStalled ? draw(120)
                                                                         : draw(spec->n_params);
    if (what == FaultKind::kLost || what == FaultKind::kStalled || what == FaultKind::kHeldBack)
      fault.rank = draw(spec->world);
    spec->faults.push_back(fault);
  }
}

void AddSteps(std::mt19937_64 &random, Spec *spec) {
  const auto draw = [&](int n) { return static_cast<int>(random() % static_cast<uint64_t>(n)); };
  const int cycles = 1 + draw(4);
  for (int c = 0; c < cycles; c++) {
    for (int micro = draw(3) == 0 ? 1 + draw(2) : 0; micro >= 0; micro--) {
      Step step{Do::kBackward, micro == 0 || draw(4) == 0, {}};
      for (int i = spec->n_params - 1; i >= 0; i--)
        step.order.push_back(i);
      if (draw(4) == 0) std::shuffle(step.order.begin(), step.order.end(), random);
      spec->steps_of_program.push_back(step);
    }
    if (draw(5) > 0) spec->steps_of_program.push_back({Do::kStep, false, {}});
    if (draw(4) > 0) spec->steps_of_program.push_back({Do::kZeroGrad, false, {}});
  }
  // At unusual times: between micro-batches, twice, or before anything else.
  static const Do kOdd[] = {Do::kZeroGrad, Do::kStep, Do::kOffload, Do::kReplan};
  for (int k = draw(4) == 0 ? 1 + draw(2) : 0; k > 0; k--) {
    const int at = draw(static_cast<int>(spec->steps_of_program.size()) + 1);
    // DistributedDataParallel has no offload and no second parallelize.
    const Do what = kOdd[draw(spec->kind == TX_CYCLE_DDP_HOOK ? 2 : 4)];
    spec->steps_of_program.insert(spec->steps_of_program.begin() + at, {what, false, {}});
  }
}

}  // namespace

bool Reduces(const Spec &spec, const Step &step) {
  return step.what == Do::kBackward && (step.sync || spec.kind == TX_CYCLE_OPTIM_GRADS || spec.kind == TX_CYCLE_UNITS ||
                                        spec.kind == TX_CYCLE_DDP_HOOK);
}

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
  spec.find_unused = draw(2);
  spec.scales_sums = draw(2);
  const bool planned = spec.kind <= TX_CYCLE_OPTIM_GRADS;
  spec.reorder = planned && spec.kind != TX_CYCLE_OPTIM_GRADS && draw(3) == 0;
  if (planned && draw(4) == 0) Partition(random, spec.n_params, &spec.rebuilt_bucket_of, &spec.rebuilt_buffer_of);
  spec.steps = (spec.kind == TX_CYCLE_OPTIM || spec.kind == TX_CYCLE_OPTIM_GRADS) && draw(4) == 0;
  spec.replicated = spec.kind == TX_CYCLE_UNITS && draw(4) == 0;
  spec.reports_late = planned && draw(3) == 0;
  spec.slots = spec.kind == TX_CYCLE_UNITS ? 2 : 4;
  for (size_t b = 0; b < spec.buffer_of.size(); b++)
    spec.ends.push_back(draw(3) > 0);
  AddSteps(random, &spec);
  if (draw(2)) AddFaults(random, &spec);
  return spec;
}

std::string Text(const Spec &spec) {
  static const char *const kKinds[] = {"no_shard", "optim", "optim_grads", "units", "ddp_hook"};
  static const char *const kIlls[] = {
      "raise",   "nonfinite", "unused",   "frozen",    "skipped",          "interrupt",      "lost",
      "stalled", "dropped",   "assigned", "held back", "interrupt a step", "raise in a hook"};
  std::ostringstream out;
  out << "seed " << spec.seed << ": " << kKinds[spec.kind] << ", " << spec.world << " ranks, buckets of parameters";
  for (int64_t b : spec.bucket_of)
    out << ' ' << b;
  out << "; nan " << spec.check_for_nan << " unused " << spec.find_unused << " reorder " << spec.reorder << " scales "
      << spec.scales_sums << " steps " << spec.steps << " replicated " << spec.replicated << " late "
      << spec.reports_late << "\n ";
  for (size_t s = 0; s < spec.steps_of_program.size(); s++) {
    const Step &step = spec.steps_of_program[s];
    out << ' ' << s << ':'
        << (step.what == Do::kStep       ? "step"
            : step.what == Do::kZeroGrad ? "zero_grad"
            : step.what == Do::kOffload  ? "offload"
            : step.what == Do::kReplan   ? "parallelize"
            : step.sync                  ? "backward"
                                         : "backward(no_sync)");
  }
  for (const Fault &fault : spec.faults) {
    out << "\n  " << kIlls[static_cast<int>(fault.what)] << ": rank " << fault.rank << ", step " << fault.step
        << ", at " << fault.at;
  }
  return out.str();
}

// A parameter's gradient in one backward: a multiple of the number of ranks, so that means are exact.
int64_t ValueOf(const Spec &spec, int rank, int step, int i) {
  uint64_t x = spec.seed * 31 + static_cast<uint64_t>(rank) * 1000003 + static_cast<uint64_t>(step) * 10007 +
               static_cast<uint64_t>(i) * 101;
  x ^= x >> 29;
  x *= 0xBF58476D1CE4E5B9u;
  x ^= x >> 32;
  return static_cast<int64_t>(x % 100000) * spec.world;
}

// A sum divided by the number of ranks, or undivided, as the spec asks.
int64_t Scaled(const Spec &spec, int64_t sum) {
  return spec.scales_sums && spec.kind != TX_CYCLE_DDP_HOOK ? sum : sum / spec.world;
}

std::vector<Expected> Oracle(const Spec &spec) {
  enum : uint8_t { kIsReady = 1, kIsAssigned = 2 };
  const auto n = static_cast<size_t>(spec.n_params);
  const bool units = spec.kind == TX_CYCLE_UNITS, shards = Shards(spec);
  std::vector<int64_t> total(n), local(n);
  // unreduced: a gradient was ready and not reduced, whatever happened to `.grad` since.
  std::vector<uint8_t> has_local(n), unreduced(n);
  bool known = true;
  std::vector<Expected> found(spec.steps_of_program.size());
  const auto has_fault = [&](FaultKind what, int rank, int step, int at) {
    for (const Fault &fault : spec.faults) {
      const bool then = what == FaultKind::kFrozen ? fault.step <= step : fault.step == step;
      if (fault.what == what && (fault.rank < 0 || fault.rank == rank) && then && fault.at == at) return true;
    }
    return false;
  };
  for (int s = 0; s < static_cast<int>(spec.steps_of_program.size()); s++) {
    const Step &step = spec.steps_of_program[static_cast<size_t>(s)];
    bool skipped = false;
    for (const Fault &fault : spec.faults) {
      const bool all = fault.rank < 0 || spec.world == 1;
      if (fault.what == FaultKind::kInterrupt || fault.what == FaultKind::kInterruptStep ||
          fault.what == FaultKind::kLost || fault.what == FaultKind::kStalled)
        return found;
      if (fault.step != s) continue;
      if (fault.what == FaultKind::kSkipped && !all) return found;
      skipped |= fault.what == FaultKind::kSkipped;
    }
    if (skipped) continue;
    for (const Fault &fault : spec.faults) {
      const bool all = fault.rank < 0 || spec.world == 1;
      const auto i = static_cast<size_t>(fault.at) % n;
      if (fault.step != s) continue;
      if (fault.what == FaultKind::kDropped && !shards) {
        if (all) {
          total[i] = local[i] = has_local[i] = 0;
        } else {
          known = false;
        }
      } else if (fault.what == FaultKind::kAssigned && !units) {
        if (!all) known = false;
        if (!shards) total[i] = 0;
        local[i] = spec.world * 11 * spec.world, has_local[i] = kIsAssigned;
      } else if ((fault.what == FaultKind::kRaise || fault.what == FaultKind::kRaiseInHook) &&
                 step.what == Do::kBackward) {
        known = false;
      }
    }
    if (step.what == Do::kZeroGrad || step.what == Do::kOffload || step.what == Do::kReplan) {
      std::fill(total.begin(), total.end(), 0);
      std::fill(local.begin(), local.end(), 0);
      std::fill(has_local.begin(), has_local.end(), 0);
      std::fill(unreduced.begin(), unreduced.end(), 0);
      known = true;
    } else if (step.what == Do::kStep) {
      Expected &e = found[static_cast<size_t>(s)];
      e.known = known;
      e.sums = total;
      for (size_t i = 0; i < n; i++) {
        // A gradient that the user assigned is stepped, unless gradients are sharded or it replaced an unreduced one.
        e.refused |= has_local[i] == kIsReady || (has_local[i] == kIsAssigned && (shards || unreduced[i]));
        if (has_local[i] == kIsAssigned) e.sums[i] = spec.world * 11;
      }
    } else {
      for (size_t i = 0; i < n; i++) {
        for (int r = 0; r < spec.world; r++) {
          if (has_fault(FaultKind::kUnused, r, s, static_cast<int>(i)) ||
              has_fault(FaultKind::kFrozen, r, s, static_cast<int>(i))) {
            continue;
          }
          local[i] += ValueOf(spec, r, s, static_cast<int>(i));
          has_local[i] = kIsReady, unreduced[i] = 1;
        }
        if (!Reduces(spec, step)) continue;
        total[i] += Scaled(spec, local[i]);
        local[i] = has_local[i] = unreduced[i] = 0;
      }
    }
  }
  return found;
}

}  // namespace cycle_world
