// A simulated rank: the steps of its training program, and the faults that hit it.
#include "tests/core/cycle_rank.h"

#include <algorithm>
#include <cstring>

namespace cycle_world {

Rank::Rank(World *w, int r) : world(w), rank(r) {
  const Spec &spec = w->spec;
  const auto n = static_cast<size_t>(spec.n_params);
  for (size_t s = 0; s < spec.steps_of_program.size(); s++)
    program.push_back(static_cast<int>(s));
  for (const Fault &fault : spec.faults) {
    if (fault.what != FaultKind::kSkipped || (fault.rank >= 0 && fault.rank != r)) continue;
    program.erase(std::remove(program.begin(), program.end(), fault.step), program.end());
  }
  grads.resize(n);
  broken_.assign(n, 0);
  weights_.assign(n, 0);
  Build(&spec.bucket_of, &spec.buffer_of, nullptr);
  if (spec.ends.size() == spec.buffer_of.size() && spec.kind <= TX_CYCLE_OPTIM_GRADS) {
    tx_cycle_set_messages(cycle, spec.ends.data());
  }
}

// Makes a state machine for these buckets; if `replaces` is given, by tx_cycle_rebuild from that machine.
void Rank::Build(const std::vector<int64_t> *bucket_of, const std::vector<int64_t> *buffer_of,
                 const tx_cycle *replaces) {
  static const char *const kNames[] = {"p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7", "p8", "p9"};
  static const char *const kUnits[] = {"u0", "u1", "u2", "u3", "u4", "u5", "u6", "u7", "u8", "u9"};
  const Spec &spec = world->spec;
  tx_cycle_args args = {};
  args.size = sizeof args;
  args.n_params = spec.n_params;
  args.n_buckets = spec.kind == TX_CYCLE_DDP_HOOK ? args.n_params : static_cast<int64_t>(buffer_of->size());
  args.bucket_of = bucket_of->data();
  args.buffer_of = buffer_of->data();
  args.names = kNames;
  args.units = kUnits;
  args.slots = spec.slots;
  args.kind = spec.kind;
  args.rank = rank;
  args.world = spec.world;
  args.check_for_nan = spec.check_for_nan;
  args.find_unused = spec.find_unused;
  args.reorder = spec.reorder && !replaces;
  args.scales_sums = spec.scales_sums;
  std::vector<int64_t> memory(static_cast<size_t>(tx_cycle_bytes(&args) / 8 + 1));
  const auto bytes = static_cast<int64_t>(memory.size() * 8);
  tx_error error;
  const tx_status status = replaces ? tx_cycle_rebuild(memory.data(), bytes, &args, replaces, &cycle, &error)
                                    : tx_cycle_init(memory.data(), bytes, &args, &cycle, &error);
  if (status != TX_OK) throw Wrong{error.message};
  memory_ = std::move(memory);  // frees the memory of the previous machine, which is no longer used
  bucket_of_ = *bucket_of;
}

bool Rank::owns(int64_t i) const {
  return world->spec.kind == TX_CYCLE_NO_SHARD || world->spec.kind == TX_CYCLE_DDP_HOOK ||
         i % world->spec.world == rank;
}

void Rank::CountTransition() {
  const int32_t phase = tx_cycle_phase_of(cycle);
  world->coverage->transitions[static_cast<size_t>(phase_seen_)][static_cast<size_t>(phase)]++;
  phase_seen_ = phase;
}

void Rank::Count(Event event) {
  CountTransition();
  world->coverage->events[static_cast<size_t>(tx_cycle_phase_of(cycle))][event]++;
}

bool Rank::HasFault(FaultKind what, int at) const {
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
    if (fault.what == FaultKind::kFrozen && (fault.rank < 0 || fault.rank == rank) && fault.at == i &&
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

// After a permanent failure every call has to be rejected with the failure's text.
void Rank::CheckFailureReported(bool refused) const {
  if (!refused) throw Wrong{"a backward or step is legal after a failure for good"};
  if (!std::strstr(tx_cycle_refusal(cycle), tx_cycle_failure(cycle))) throw Wrong{"a refusal does not say what failed"};
}

void Rank::StartOp() {
  const Step &step = world->spec.steps_of_program[static_cast<size_t>(program[static_cast<size_t>(pc)])];
  for (const Fault &fault : world->spec.faults) {
    if ((fault.rank >= 0 && fault.rank != rank) || fault.step != program[static_cast<size_t>(pc)]) continue;
    Gradient &g = grads[static_cast<size_t>(fault.at) % grads.size()];
    const bool shards = Shards(world->spec);
    if (fault.what == FaultKind::kDropped && !shards) {
      g.there = g.in_place = g.nan = g.has_own = false;
      g.own = g.expected = 0;
    }
    if (fault.what == FaultKind::kAssigned && world->spec.kind != TX_CYCLE_UNITS) {
      g.there = true, g.in_place = false, g.nan = false;
      g.assigned = g.own = world->spec.world * 11;
      if (!shards) g.expected = 0;
      g.has_own = false;  // an assigned gradient may be stepped as it is
    }
  }
  if (step.what == Do::kZeroGrad || step.what == Do::kOffload) {
    if (tx_cycle_phase_of(cycle) != TX_PHASE_IDLE) throw Wrong{"gradients are dropped while a backward runs"};
    ZeroGrad();
    return NextOp();
  }
  if (step.what == Do::kReplan) return StartPlan();
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
  const bool failed = tx_cycle_failure(cycle) != nullptr;
  const bool refused = tx_cycle_begin(cycle, step.sync, world->spec.steps) < 0;
  if (failed) CheckFailureReported(refused);
  if (!refused) CheckWeights();
  if (refused) {
    if (!failed && !tx_cycle_partly_stepped(cycle))
      throw Wrong{std::string("a backward is refused: ") + tx_cycle_refusal(cycle)};
    in_backward_ = false;
    NextOp();
  }
}

// The order in which FSDP2 hands over units, and DDP hands over buckets.
bool Rank::NextGiven() {
  const Spec &spec = world->spec;
  const Step &step = spec.steps_of_program[static_cast<size_t>(program[static_cast<size_t>(pc)])];
  const int n = static_cast<int>(spec.buffer_of.size());
  if (HasFault(FaultKind::kRaise, next_unit_)) {
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
    const bool used = !HasFault(FaultKind::kUnused, i) && !IsFrozen(i);
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

// Reports all gradients that are ready to the machine.
void Rank::ReportReady() {
  Count(kReady);
  const auto n = static_cast<int64_t>(unreported_.size());
  if (tx_cycle_ready_several(cycle, unreported_.data(), n) < 0) throw Wrong{tx_cycle_refusal(cycle)};
  unreported_.clear();
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
  if (HasFault(FaultKind::kRaise, static_cast<int>(next_grad_))) {
    Throw();
    return true;
  }
  if (next_grad_ == step.order.size()) {
    at_ = At::kEnding;
    ReportReady();
    Count(kEnd);
    if (tx_cycle_end(cycle) < 0) throw Wrong{tx_cycle_refusal(cycle)};
    return true;
  }
  const int i = step.order[next_grad_++];
  if (HasFault(FaultKind::kUnused, i) || IsFrozen(i)) return true;
  Accumulate(i);
  if (HasFault(FaultKind::kRaiseInHook, i)) {
    Throw();
    return true;
  }
  unreported_.push_back(i);
  if (!spec.reports_late || (spec.seed >> (i * 3 + rank) % 31 & 3) == 0) ReportReady();
  return true;
}

// Whether this rank is stopped (SIGSTOP); it goes on when the other ranks have given up.
bool Rank::IsStalled() const {
  for (const Fault &fault : world->spec.faults) {
    if (fault.what == FaultKind::kStalled && fault.rank == rank && fault.at <= moves && !world->group_failed)
      return true;
  }
  return false;
}

bool Rank::Move() {
  if (finished()) return false;
  for (const Fault &fault : world->spec.faults) {
    if (fault.what == FaultKind::kLost && fault.rank == rank && fault.at <= moves) {
      lost = true;
      return true;
    }
  }
  if (IsStalled()) return false;
  moves++;
  ApplyArrived();
  if (at_ == At::kPlanning) return Plan();
  if (at_ == At::kOpStart) {
    if (dead_) {
      std::vector<uint8_t> modified;
      for (const Gradient &g : grads)
        modified.push_back(g.there);
      if (!unreported_.empty()) ReportReady();
      Count(kDied);
      tx_cycle_died(cycle, world->spec.kind <= TX_CYCLE_OPTIM ? modified.data() : nullptr);
      dead_ = false;
      at_ = At::kRecovering;
    } else {
      const int at = pc;
      if (!Drain()) return !waiting || pc != at;  // actions that an interrupted step left to be waited for
      StartOp();
      return true;
    }
  }
  if (at_ == At::kStepping) return NextWeight();
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

}  // namespace cycle_world
