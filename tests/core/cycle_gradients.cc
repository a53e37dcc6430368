// The gradients of a rank: how the strategies change them, and what they have to be.
#include <algorithm>

#include "tests/core/cycle_rank.h"

namespace cycle_world {

int32_t Rank::KindOfGrad(int64_t i) const {
  const Gradient &grad = grads[static_cast<size_t>(i)];
  return !grad.there ? TX_GRAD_NONE : grad.in_place ? TX_GRAD_IN_PLACE : TX_GRAD_OTHER;
}

void Rank::Prepare(int64_t i, int32_t flags) {
  Gradient &g = grads[static_cast<size_t>(i)];
  if (flags && g.travels) throw Wrong{"a gradient is prepared while its bucket travels"};
  const auto take = [&] {
    if (Shards(world->spec)) {
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

// Autograd accumulates a gradient, between the pre-hook and the post-hook.
void Rank::Accumulate(int i) {
  const Spec &spec = world->spec;
  Gradient &g = grads[static_cast<size_t>(i)];
  const int step = program[static_cast<size_t>(pc)];
  const int64_t value = ValueOf(spec, rank, step, i);
  const bool nan = HasFault(FaultKind::kNonfinite, i);
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
  if (!HasFault(FaultKind::kRaiseInHook, i)) Prepare(i, TX_PREPARE_TAKE);
}

// Writes the sums of a message. In torch_ext another thread does this, as soon as all parts have arrived.
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
    // The hook is not told about the steps of a DistributedDataParallel's optimizer.
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
    const bool shards = Shards(spec);
    // If only one rank assigned, dropped, did not zero, or lost a gradient, its value is not defined.
    const bool defined = !world->OneRankAssigns() && !(world->asymmetric && world->has_raised);
    if (added && owns(p) && defined && (shards ? g.shard : g.value) != g.expected) {
      throw Wrong{"a sum is not that of all gradients, each counted once"};
    }
  }
}

void Rank::ApplyArrived() {
  if (world->spec.kind == TX_CYCLE_UNITS) return;  // the sums of units are added when they are waited for
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

// All ranks have to hold the same sums after a cycle, except after a fault on only some ranks.
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
  mixes_steps_ = partly_summed_ = false;
  Count(kZero);
  tx_cycle_zero(cycle, all.data(), static_cast<int64_t>(all.size()));
}

void Rank::CheckStep() {
  const Spec &spec = world->spec;
  std::vector<uint8_t> own;
  for (const Gradient &g : grads)
    own.push_back(g.there && spec.kind != TX_CYCLE_UNITS && spec.kind != TX_CYCLE_DDP_HOOK);
  Count(kCheckStep);
  const bool refused = tx_cycle_check_step(cycle, own.data(), nullptr) < 0;
  if (tx_cycle_failure(cycle)) CheckFailureReported(refused);
  world->coverage->refused_steps += refused;
  if (!refused) {
    world->coverage->steps_taken++;
    n_steps_++;
    if (partly_summed_) throw Wrong{"sums of a backward that raised are stepped"};
    if (mixes_steps_) throw Wrong{"gradients after different numbers of steps are summed, and stepped"};
    for (const Gradient &g : grads) {
      if (g.has_own && spec.kind <= TX_CYCLE_OPTIM) throw Wrong{"a gradient of this rank alone is stepped"};
    }
    for (size_t i = 0; i < grads.size(); i++) {
      const Gradient &g = grads[i];
      const bool shards = Shards(spec);
      // With DistributedDataParallel, the gradients after a backward that raised are the user's responsibility.
      const bool checked = spec.check_for_nan && !(spec.kind == TX_CYCLE_DDP_HOOK && has_raised_);
      if (checked && owns(static_cast<int64_t>(i)) && (shards ? g.present && g.shard_nan : g.there && g.nan)) {
        throw Wrong{"a gradient that is not finite is stepped"};
      }
    }
  }
  const int step = program[static_cast<size_t>(pc)];
  verdict_of_cycle[-1000 - step] = refused ? "refused" : "stepped";
  CompareWithOracle(world->expected[static_cast<size_t>(step)], refused);
  if (refused) return NextOp();
  StartStep();
}

void Rank::CompareWithOracle(const Expected &expected, bool refused) {
  const Spec &spec = world->spec;
  if (!expected.known || tx_cycle_failure(cycle) || world->asymmetric) return;
  bool nonfinite = false;
  for (int64_t i = 0; i < spec.n_params; i++)
    nonfinite |= tx_cycle_nonfinite(cycle)[i] != 0;
  const bool shards = Shards(spec);
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

}  // namespace cycle_world
