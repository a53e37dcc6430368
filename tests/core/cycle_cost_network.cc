// The simulated network (cycle_cost_network.h).
#include "tests/core/cycle_cost_network.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace cycle_cost {

void Clock::At(double time, Call call) {
  events_left_.push({time, events_++, std::move(call)});
}

void Clock::Run() {
  while (!events_left_.empty()) {
    Event event = std::move(const_cast<Event &>(events_left_.top()));
    events_left_.pop();
    now_ = event.time;
    event.call();
  }
}

Network::Network(const Cluster &cluster, int world, int simulated_nodes, Clock *clock)
    : cluster_(cluster),
      ranks_per_node_(std::min(cluster.ranks_per_node, world)),
      nodes_(world / ranks_per_node_),
      simulated_nodes_(simulated_nodes > 0 ? std::min(simulated_nodes, nodes_) : nodes_),
      clock_(clock) {
  if (world % ranks_per_node_ != 0) throw std::invalid_argument("the last node has fewer ranks than the others");
  ports_.resize(static_cast<size_t>(simulated()));
  for (auto *queues : {&node_out_, &node_in_})
    queues->resize(static_cast<size_t>(simulated_nodes_));
}

Network::Passage Network::Pass(Queue *queue, Passage before, double bytes_per_second, double message_seconds,
                               int64_t bytes) {
  const double begin = std::max(before.head, queue->free);
  queue->Serve(begin, message_seconds + static_cast<double>(bytes) / bytes_per_second);
  return {begin + message_seconds, std::max(queue->free, before.end)};
}

void Network::Send(int from, int to, int64_t bytes, std::function<void(double)> arrived) {
  const bool within = from / ranks_per_node_ == to / ranks_per_node_;
  Port &out = ports_[static_cast<size_t>(from)];
  Port *in = &ports_[static_cast<size_t>(simulated_rank(to))];
  const Link &link = within ? cluster_.within : cluster_.between;
  const double posted = out.poster.Serve(clock_->now(), cluster_.post_seconds);
  Passage sent = Pass(within ? &out.out_within : &out.out_between, {posted, posted}, link.bytes_per_second,
                      link.message_seconds, bytes);
  const auto receive = [=](Passage way) {
    Queue *queue = within ? &in->in_within : &in->in_between;
    arrived(Pass(queue, way, link.bytes_per_second, 0, bytes).end);
  };
  const auto travel = [=](Passage way) { return Passage{way.head + link.latency, way.end + link.latency}; };
  if (within) {
    sent = travel(sent);
    clock_->At(sent.head, [=] { receive(sent); });
    return;
  }
  const auto from_node = static_cast<size_t>(from / ranks_per_node_);
  const auto to_node = static_cast<size_t>(simulated_rank(to) / ranks_per_node_);
  const double limit = cluster_.node_bytes_per_second;
  if (limit <= 0) {
    sent = travel(sent);
    clock_->At(sent.head, [=] { receive(sent); });
    return;
  }
  clock_->At(sent.head, [this, from_node, to_node, sent, bytes, limit, travel, receive] {
    const Passage left = travel(Pass(&node_out_[from_node], sent, limit, 0, bytes));
    clock_->At(left.head, [this, to_node, left, bytes, limit, receive] {
      const Passage entered = Pass(&node_in_[to_node], left, limit, 0, bytes);
      clock_->At(entered.head, [=] { receive(entered); });
    });
  });
}

}  // namespace cycle_cost
