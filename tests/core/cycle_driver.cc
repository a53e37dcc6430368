// A rank's driver: performs the actions of its state machine over the simulated network.
#include <algorithm>

#include "tests/core/cycle_rank.h"

namespace cycle_world {

namespace {

// The tag of a message, as gloo has them: per reducer and cycle.
int64_t TagOf(int64_t cycle, int64_t what) {
  return cycle * 1000 + what;
}
constexpr int64_t kReport = 900, kOrder = 901, kPlan = 902;

}  // namespace

void Rank::Post(int64_t tag, Exchange **exchange) {
  Exchange &e = world->exchanges[tag];
  int64_t delay = 1 + static_cast<int64_t>(world->random() % 8);
  for (const Fault &fault : world->spec.faults)
    if (fault.what == FaultKind::kHeldBack && fault.rank == rank) delay += 40;
  e.posts++;
  e.ready_at = std::max(e.ready_at, world->now + delay);
  *exchange = &e;
}

bool IsComplete(const World &world, int64_t tag) {
  const auto found = world.exchanges.find(tag);
  return found != world.exchanges.end() && found->second.posts == world.spec.world &&
         found->second.ready_at <= world.now;
}

bool Rank::WasSent(size_t i) const {
  for (const Message &message : messages_)
    if (bucket_of_[i] >= message.first && bucket_of_[i] < message.end) return true;
  return false;
}

void Rank::Send(const tx_cycle_action &action) {
  const Spec &spec = world->spec;
  int64_t held = 0;
  for (size_t i = 0; i < grads.size(); i++)
    held += spec.kind == TX_CYCLE_UNITS && bucket_of_[i] == action.first && grads[i].held;
  // A unit's tag also depends on its size: if only some ranks used a parameter, their messages do not match.
  Message message{action.first, action.end, TagOf(Number(), action.first + 20 * held), false, false, {}};
  if (action.message != static_cast<int64_t>(messages_.size())) throw Wrong{"messages are not numbered in order"};
  int64_t under_way = 0;
  for (const Message &m : messages_)
    under_way += !m.applied;
  if (Shards(spec) && under_way >= spec.slots) {
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
    if (!Shards(spec)) {
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

// Whether the data that the action waits for have arrived. Throws into the program if they never will.
bool Rank::Wait(const tx_cycle_action &action) {
  if (!waiting) {
    waiting = true;
    for (const Fault &fault : world->spec.faults) {
      if (fault.what == FaultKind::kInterrupt && (fault.rank < 0 || fault.rank == rank) && fault.at == waits_) {
        waits_++;
        Throw();
        return false;
      }
    }
    waits_++;
  }
  int64_t tag = action.kind == TX_DO_READ ? report_tag_ : order_tag_;
  if (action.kind == TX_DO_WEIGHTS) tag = gather_tags_[static_cast<size_t>(action.message)];
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

// Handlers of the machine's actions, by tx_cycle_do.
const Rank::Doing Rank::kDoing[] = {nullptr,          &Rank::DoCheck,  &Rank::DoSend,      &Rank::DoInspect,
                                    &Rank::DoOrder,   &Rank::DoReport, &Rank::DoWait,      &Rank::DoRead,
                                    &Rank::DoInstall, &Rank::DoRaise,  &Rank::DoRecovered, &Rank::DoWeights};

void Rank::Act(const tx_cycle_action &action) {
  if (action.kind <= TX_DO_NOTHING || action.kind > TX_DO_WEIGHTS) throw Wrong{"an unknown action"};
  const auto phase = static_cast<size_t>(tx_cycle_phase_of(cycle));
  world->coverage->actions[phase][static_cast<size_t>(action.kind)]++;
  CountTransition();
  (void)(this->*kDoing[action.kind])(action);
}

bool Rank::DoCheck(const tx_cycle_action &action) {
  const Spec &spec = world->spec;
  for (size_t i = 0; i < grads.size() && spec.check_for_nan; i++) {
    const Gradient &g = grads[i];
    const bool nan = spec.kind == TX_CYCLE_OPTIM_GRADS ? g.held && g.held_nan : g.nan;
    if (bucket_of_[i] == action.first && nan && first_bad_ < 0) first_bad_ = static_cast<int>(i);
  }
  tx_cycle_done(cycle, 0);
  return true;
}

// FSDP2's units are checked for non-finite gradients when they are sent.
void Rank::CheckUnit(int64_t unit) {
  for (size_t i = 0; i < grads.size() && world->spec.check_for_nan; i++)
    if (bucket_of_[i] == unit && grads[i].held && grads[i].held_nan && first_bad_ < 0) first_bad_ = static_cast<int>(i);
}

bool Rank::DoSend(const tx_cycle_action &action) {
  const Spec &spec = world->spec;
  if (tx_cycle_failure(cycle)) throw Wrong{"a message is sent after a failure"};
  if (!sending_waits_) {
    if (world->group_failed) return Fail("a rank was lost"), false;
    if (spec.kind == TX_CYCLE_UNITS) CheckUnit(action.first);
    Send(action);
  }
  if (!spec.replicated) {
    tx_cycle_done(cycle, 0);
    return true;
  }
  sending_waits_ = true;
  if (!Wait(action)) return false;
  sending_waits_ = false;
  Apply(&messages_.back(), false);
  messages_.back().answered = true;
  tx_cycle_done(cycle, 1);
  return true;
}

bool Rank::DoInspect(const tx_cycle_action &action) {
  const int64_t i = action.first;
  if (grads[static_cast<size_t>(i)].travels) throw Wrong{"a bucket was sent before all of its parameters were known"};
  Count(kMissing);
  Prepare(i, tx_cycle_missing(cycle, i, KindOfGrad(i), !IsFrozen(static_cast<int>(i))));
  tx_cycle_done(cycle, 0);
  return true;
}

bool Rank::DoOrder(const tx_cycle_action &action) {
  const Spec &spec = world->spec;
  if (!order_posted_) {
    if (world->group_failed) return Fail("a rank was lost"), false;
    if (!messages_.empty()) throw Wrong{"a bucket is sent before the ranks agree on their order"};
    order_tag_ = TagOf(Number(), kOrder);
    Exchange *e = nullptr;
    Post(order_tag_, &e);
    order_posted_ = true;
  }
  if (!Wait(action)) return false;
  order_posted_ = false;
  if (spec.rebuilt_bucket_of.empty()) {
    tx_cycle_done(cycle, 0);
  } else {
    Build(&spec.rebuilt_bucket_of, &spec.rebuilt_buffer_of, cycle);
  }
  return true;
}

bool Rank::DoReport(const tx_cycle_action &) {
  if (world->group_failed) return Fail("a rank was lost"), false;
  std::vector<uint8_t> report(static_cast<size_t>(tx_cycle_report_bytes(cycle)));
  tx_cycle_report(cycle, first_bad_, RequiresGrad().data(), report.data());
  report_tag_ = TagOf(Number(), kReport);
  Exchange *e = nullptr;
  Post(report_tag_, &e);
  e->payloads.resize(static_cast<size_t>(world->spec.world));
  e->payloads[static_cast<size_t>(rank)] = report;
  report_posted_ = true;
  tx_cycle_done(cycle, 0);
  return true;
}

bool Rank::DoWait(const tx_cycle_action &action) {
  if (!Wait(action)) return false;
  Message &message = messages_[static_cast<size_t>(action.message)];
  if (message.answered) throw Wrong{"a message is waited for again, when its memory was given back"};
  if (!message.applied) Apply(&message, action.flags & TX_WAIT_DISCARD);
  message.answered = true;
  tx_cycle_done(cycle, 0);
  return true;
}

bool Rank::DoRead(const tx_cycle_action &action) {
  if (!Wait(action)) return false;
  const Exchange &e = world->exchanges[report_tag_];
  std::vector<const uint8_t *> rows, scratch(static_cast<size_t>(world->spec.world));
  for (const auto &payload : e.payloads) {
    if (payload.size() != e.payloads[0].size()) throw Wrong{"reports of different sizes"};
    rows.push_back(payload.data());
  }
  Count(kRead);
  report_posted_ = false;
  tx_cycle_read(cycle, rows.data(), scratch.data(), 0);
  tx_cycle_done(cycle, 0);
  return true;
}

bool Rank::DoInstall(const tx_cycle_action &) {
  for (const Message &message : messages_)
    if (!message.answered) throw Wrong{"sums are installed that were not waited for"};
  if (world->spec.kind != TX_CYCLE_DDP_HOOK && !IsComplete(*world, report_tag_)) {
    throw Wrong{"sums are installed, although a rank has not said that its cycle ended"};
  }
  Install();
  CompareSums();
  tx_cycle_done(cycle, 0);
  return true;
}

bool Rank::DoRaise(const tx_cycle_action &action) {
  world->coverage->verdicts++;
  if (world->spec.kind == TX_CYCLE_DDP_HOOK && messages_.size() == world->spec.buffer_of.size()) {
    throw Wrong{"the last bucket is sent, although its gradients are not finite"};
  }
  verdict_of_cycle[Number() - 1] = action.text;
  in_backward_ = false;  // the backward has ended, and nothing of it is left
  std::fill(broken_.begin(), broken_.end(), 0);
  NextOp();
  return true;
}

bool Rank::DoRecovered(const tx_cycle_action &) {
  Count(kDied);
  tx_cycle_broken(cycle, broken_.data());
  partly_summed_ |= world->spec.kind == TX_CYCLE_OPTIM_GRADS && !messages_.empty();
  for (const uint8_t broken : broken_)
    partly_summed_ |= broken != 0;
  if (report_posted_ && !tx_cycle_failure(cycle)) throw Wrong{"a report is never read"};
  for (Gradient &g : grads) {
    if (g.travels && !tx_cycle_failure(cycle)) throw Wrong{"recovered while a gradient travels"};
    g.held = false;
    if (Shards(world->spec) && !g.there)
      g.own = 0, g.has_own = false;  // otherwise a hook raised, and `.grad` stays as torch leaves it
  }
  std::fill(broken_.begin(), broken_.end(), 0);
  tx_cycle_done(cycle, 0);
  return true;
}

bool Rank::DoWeights(const tx_cycle_action &action) {
  if (action.message != static_cast<int64_t>(n_come_) || n_come_ >= gather_tags_.size()) {
    throw Wrong{"gathered weights are not waited for in their order"};
  }
  if (!Wait(action)) return false;
  n_come_++;
  tx_cycle_done(cycle, 0);
  return true;
}

// Starts a legal optimizer step. It writes bucket by bucket; where ranks own parts of a bucket, each bucket's
// all-gather is then started.
void Rank::StartStep() {
  Count(kStepping);
  tx_cycle_stepping(cycle);
  next_weight_ = 0;
  at_ = At::kStepping;
}

bool Rank::NextWeight() {
  const int kind = world->spec.kind;
  int64_t buckets = 0;
  for (const int64_t bucket : bucket_of_)
    buckets = std::max(buckets, bucket + 1);
  if (HasFault(FaultKind::kInterruptStep, next_weight_)) {
    Throw();
    return true;
  }
  if (next_weight_ == buckets) {
    Count(kStepped);
    tx_cycle_stepped(cycle);
    at_ = At::kEnding;  // where it waits for the all-gathers
    return true;
  }
  for (size_t i = 0; i < bucket_of_.size(); i++)
    if (bucket_of_[i] == next_weight_) weights_[i] = n_steps_;
  if (kind == TX_CYCLE_OPTIM || kind == TX_CYCLE_OPTIM_GRADS) {
    if (world->group_failed) return Fail("a rank was lost"), true;
    if (n_come_ == gather_tags_.size()) gather_tags_.clear(), n_come_ = 0;
    gather_tags_.push_back(-1 - (plan_ * 100 + n_steps_) * 100 - next_weight_);
    Exchange *e = nullptr;
    Post(gather_tags_.back(), &e);
    if (tx_cycle_gathering(cycle) + 1 != static_cast<int64_t>(gather_tags_.size()))
      throw Wrong{"gathers are numbered otherwise"};
  }
  next_weight_++;
  return true;
}

// Checked before a forward: every weight is that of the last step, and its all-gather has completed.
void Rank::CheckWeights() const {
  if (tx_cycle_failure(cycle) || world->spec.world == 1) return;
  for (const int64_t step : weights_)
    if (step != n_steps_) throw Wrong{"a forward uses weights of two steps"};
  if (n_come_ < gather_tags_.size()) throw Wrong{"a forward uses weights that have not come"};
}

// Parallelizes again: the ranks agree, then each gets a new state machine, whose cycles are numbered from 0.
void Rank::StartPlan() {
  if (world->group_failed) return NextOp();  // the call raises
  ZeroGrad();
  Exchange *e = nullptr;
  Post(TagOf(plan_ * 10000, kPlan), &e);
  at_ = At::kPlanning;
  waiting = true;
}

bool Rank::Plan() {
  const Spec &spec = world->spec;
  if (!IsComplete(*world, TagOf(plan_ * 10000, kPlan))) {
    if (!timed_out && !world->group_failed) return false;
    world->group_failed = true;
    timed_out = waiting = false;
    NextOp();
    return true;
  }
  waiting = false;
  plan_++;
  phase_seen_ = TX_PHASE_IDLE;
  n_steps_ = 0;
  std::fill(weights_.begin(), weights_.end(), 0);  // all ranks get the weights of rank 0
  gather_tags_.clear();
  n_come_ = 0;
  const bool other = plan_ % 2 && !spec.rebuilt_bucket_of.empty();
  Build(other ? &spec.rebuilt_bucket_of : &spec.bucket_of, other ? &spec.rebuilt_buffer_of : &spec.buffer_of, nullptr);
  NextOp();
  return true;
}

bool Rank::Drain() {
  for (;;) {
    tx_cycle_action action;
    if (!tx_cycle_next(cycle, &action)) return CountTransition(), true;
    const int was = pc;
    Act(action);
    if (waiting || pc != was) return false;
  }
}

}  // namespace cycle_world
