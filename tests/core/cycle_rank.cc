// A rank of a world: what the strategies do to gradients, and the driver that does what the machine asks for.
#include "tests/core/cycle_rank.h"

#include <algorithm>

namespace cycle_world {
namespace {

// Tags: gloo's, per reducer and cycle.
int64_t TagOf(int64_t cycle, int64_t what) {
  return cycle * 1000 + what;
}
constexpr int64_t kReport = 900, kOrder = 901;

}  // namespace

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

}  // namespace cycle_world
