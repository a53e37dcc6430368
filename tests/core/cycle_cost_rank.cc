// The simulated rank (cycle_cost_rank.h).
#include "tests/core/cycle_cost_rank.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace cycle_cost {

Rank::Rank(World *world, int number) : world_(world), number_(number) {
  const Case &given = world->given;
  const Plan &plan = world->plan;
  const bool planned = given.kind <= TX_CYCLE_OPTIM_GRADS;
  tx_cycle_args args = {};
  args.size = sizeof args;
  args.n_params = static_cast<int64_t>(plan.names.size());
  args.n_buckets = static_cast<int64_t>(plan.buckets.size());
  args.bucket_of = plan.bucket_of.data();
  args.buffer_of = plan.buffer_of.data();
  args.names = plan.name_pointers.data();
  args.units = plan.unit_pointers.data();
  args.slots = given.kind == TX_CYCLE_UNITS ? 2 : given.cluster.in_flight;
  args.kind = given.kind;
  args.rank = number;
  args.world = given.world;
  args.check_for_nan = given.check_for_nan;
  args.find_unused = given.find_unused;
  args.reorder = planned && given.kind != TX_CYCLE_OPTIM_GRADS && given.world > 1 && args.n_buckets > 1;
  memory_.resize(static_cast<size_t>(tx_cycle_bytes(&args) / 8 + 1));
  tx_error error;
  if (tx_cycle_init(memory_.data(), static_cast<int64_t>(memory_.size() * 8), &args, &cycle_, &error) != TX_OK) {
    throw std::invalid_argument(error.message);
  }
}

void Rank::Run() {
  for (;;) {
    if (draining_ && !Drain()) return;
    draining_ = false;
    if (pc_ == world_->program.size()) return;
    if (!Do(world_->program[pc_])) return;
    pc_++;
  }
}

bool Rank::Do(const Op &op) {
  const auto check = [&](int32_t answer) {
    if (answer < 0) throw std::logic_error(tx_cycle_refusal(cycle_));
    draining_ = true;
  };
  switch (op.what) {
    case Op::kCompute:
      asleep_ = !asleep_;
      if (asleep_) world_->clock.At(world_->clock.now() + op.seconds, [this] { Run(); });
      return !asleep_;
    case Op::kBegin:
      sent_.clear();
      check(tx_cycle_begin(cycle_, 1, 0));
      break;
    case Op::kReady:
      check(tx_cycle_ready(cycle_, op.which));
      break;
    case Op::kGive: {
      const auto n = static_cast<int64_t>(world_->plan.buckets.size());
      const int32_t last = world_->given.kind == TX_CYCLE_DDP_HOOK && op.which + 1 == n;
      const int32_t message = world_->given.kind == TX_CYCLE_DDP_HOOK || world_->given.world > 1;
      check(tx_cycle_given(cycle_, op.which, world_->plan.buckets[static_cast<size_t>(op.which)].numel, message, last));
      break;
    }
    case Op::kEnd:
      check(tx_cycle_end(cycle_));
      break;
    case Op::kStep:
      check(tx_cycle_check_step(cycle_, nullptr, nullptr));
      break;
    case Op::kGather: {
      gathers_.push_back(posted_);
      const Bucket &bucket = world_->plan.buckets[static_cast<size_t>(op.which)];
      Post(Gather(world_->given, world_->network, bucket.weight_bytes), &Sent::weight_bytes, 0, 0);
      break;
    }
    case Op::kWaitGather:
      return WaitFor(gathers_[static_cast<size_t>(op.which)]);
    case Op::kEndOfStep:
      sent_so_far_.time = world_->clock.now();
      ends.push_back(sent_so_far_);
      gathers_.clear();
      break;
  }
  return true;
}

bool Rank::Drain() {
  tx_cycle_action action;
  while (tx_cycle_next(cycle_, &action)) {
    if (!Act(action)) return false;
    tx_cycle_done(cycle_, 0);
  }
  return true;
}

bool Rank::Act(const tx_cycle_action &action) {
  switch (action.kind) {
    case TX_DO_SEND:
      Send(action);
      return true;
    case TX_DO_INSPECT:
      (void)tx_cycle_missing(cycle_, action.first, TX_GRAD_NONE, 1);
      return true;
    case TX_DO_ORDER:
      if (!order_posted_) {
        order_ = posted_;
        order_posted_ = true;
        const auto words = static_cast<int64_t>(world_->plan.names.size()) + 1;
        Post(Gather(world_->given, world_->network, 8 * words * world_->given.world), &Sent::report_bytes, 0, 0);
      }
      return WaitFor(order_);
    case TX_DO_REPORT:
      Report();
      return true;
    case TX_DO_WAIT:
      return WaitFor(sent_.at(static_cast<size_t>(action.message)));
    case TX_DO_READ:
      if (!WaitFor(report_)) return false;
      Read();
      return true;
    case TX_DO_CHECK:
    case TX_DO_INSTALL:
      return true;
    default:
      throw std::logic_error(action.kind == TX_DO_RAISE ? action.text : "the machine recovers");
  }
}

void Rank::Send(const tx_cycle_action &action) {
  Bucket sum;
  for (int64_t b = action.first; b < action.end; b++) {
    const Bucket &one = world_->plan.buckets[static_cast<size_t>(b)];
    sum.numel += one.numel;
    sum.wire_bytes += one.wire_bytes;
    sum.gathered_bytes += one.gathered_bytes;
    sum.memory += one.memory;
  }
  sent_.push_back(posted_);
  Post(Reduction(world_->given, world_->network, sum.numel, sum.wire_bytes, sum.gathered_bytes), &Sent::gradient_bytes,
       1, sum.memory);
}

void Rank::Report() {
  const std::vector<uint8_t> trained(world_->plan.names.size(), 1);
  std::vector<uint8_t> report(static_cast<size_t>(tx_cycle_report_bytes(cycle_)));
  tx_cycle_report(cycle_, -1, trained.data(), report.data());
  report_ = posted_;
  auto &all = world_->reports[report_];
  all.resize(world_->ranks.size());
  const auto bytes = static_cast<int64_t>(report.size());
  all[static_cast<size_t>(number_)] = std::move(report);
  Post(Gather(world_->given, world_->network, bytes * world_->given.world), &Sent::report_bytes, 0, 0);
}

void Rank::Read() {
  const auto &all = world_->reports.at(report_);
  std::vector<const uint8_t *> rows, scratch(static_cast<size_t>(world_->given.world));
  for (int r = 0; r < world_->given.world; r++)
    rows.push_back(all[static_cast<size_t>(world_->network.simulated_rank(r))].data());
  tx_cycle_read(cycle_, rows.data(), scratch.data(), 0);
}

// -- exchanges: numbered in the order in which they are posted, which is the same on all ranks ------------------------

Rank::Exchange &Rank::At(size_t exchange) {
  if (exchange >= exchanges_.size()) exchanges_.resize(exchange + 1);
  return exchanges_[exchange];
}

void Rank::Post(std::vector<Phase> phases, int64_t Sent::*counter, int64_t slots, int64_t memory) {
  const size_t exchange = posted_++;
  Exchange &e = At(exchange);
  e.phases = std::move(phases);
  e.counter = counter;
  e.slots = slots;
  e.memory = memory;
  if (slots == 0) return Start(exchange);
  queue_.push_back(exchange);
  StartQueued();
}

void Rank::StartQueued() {
  while (!queue_.empty() && slots_taken_ + At(queue_.front()).slots <= world_->given.cluster.in_flight) {
    const size_t exchange = queue_.front();
    queue_.pop_front();
    slots_taken_ += At(exchange).slots;
    in_flight_bytes_ += At(exchange).memory;
    most_in_flight = std::max(most_in_flight, in_flight_bytes_);
    Start(exchange);
  }
}

void Rank::Start(size_t exchange) {
  At(exchange).posted = true;
  SendPhase(exchange);
}

// Sends the messages of the exchange's current phase.
void Rank::SendPhase(size_t exchange) {
  const Exchange &e = At(exchange);
  if (e.phase == e.phases.size()) return Finish(exchange);
  const Network &network = world_->network;
  const Phase phase = e.phases[e.phase];
  const size_t k = e.phase;
  const int64_t peers = NumberOfPeers(network, world_->given.world, phase.to);
  int64_t sent = 0;
  ForEachPeer(network, world_->given.world, number_, phase.to, [&](int peer) {
    Rank *receiver = world_->ranks[static_cast<size_t>(network.simulated_rank(peer))].get();
    const int64_t bytes = phase.bytes + (++sent == peers ? phase.last_bytes : 0);
    sent_so_far_.*At(exchange).counter += bytes;
    sent_so_far_.messages++;
    if (peer / network.ranks_per_node() != number_ / network.ranks_per_node()) sent_so_far_.to_other_nodes += bytes;
    world_->network.Send(number_, peer, bytes, [=](double time) { receiver->Arrived(exchange, k, time); });
  });
  if (peers == 0) throw std::logic_error("a phase without messages");
  Arrived(exchange, k, -1);  // all messages of this phase may have arrived before
}

void Rank::Arrived(size_t exchange, size_t phase, double time) {
  Exchange &e = At(exchange);
  if (e.arrived.size() <= phase) e.arrived.resize(phase + 1), e.last.resize(phase + 1);
  e.arrived[phase] += time >= 0;
  e.last[phase] = std::max(e.last[phase], time);
  if (!e.posted || e.phase != phase || e.sums || e.done) return;
  const Phase &now = e.phases[phase];
  if (e.arrived[phase] < NumberOfPeers(world_->network, world_->given.world, now.to)) return;
  const double rate = world_->given.cluster.sum_bytes_per_second;
  const double come = std::max(e.last[phase], world_->clock.now());
  const bool sums = now.sum_bytes > 0 && rate > 0;
  const double summed = sums ? summer_.Serve(come, static_cast<double>(now.sum_bytes) / rate) : come;
  e.sums = true;
  world_->clock.At(summed, [this, exchange] {
    At(exchange).sums = false;
    At(exchange).phase++;
    SendPhase(exchange);
  });
}

void Rank::Finish(size_t exchange) {
  Exchange &e = At(exchange);
  e.done = true;
  slots_taken_ -= e.slots;
  in_flight_bytes_ -= e.memory;
  e.arrived = {}, e.last = {}, e.phases = {};
  if (e.slots > 0) StartQueued();
  if (waits_for_ == exchange) {
    waits_for_ = SIZE_MAX;
    Run();
  }
}

bool Rank::WaitFor(size_t exchange) {
  if (At(exchange).done) return true;
  waits_for_ = exchange;
  return false;
}

}  // namespace cycle_cost
