// A simulated network. A message passes through several queues (links) as a stream of bytes: a queue can start to
// forward it when the first byte has arrived, needs the time that its own bandwidth takes, and cannot finish before the
// last byte has arrived.
#ifndef TESTS_CORE_CYCLE_COST_NETWORK_H
#define TESTS_CORE_CYCLE_COST_NETWORK_H

#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

#include "tests/core/cycle_cost.h"

namespace cycle_cost {

// A queue that serves one request at a time, first in, first out.
struct Queue {
  double free = 0;

  // Serves a request that arrives at `begin` and takes `seconds`; returns when it is finished.
  double Serve(double begin, double seconds) {
    free = (begin > free ? begin : free) + seconds;
    return free;
  }
};

// The event queue of the simulation. Events of the same time run in the order in which they were scheduled.
class Clock {
 public:
  using Call = std::function<void()>;
  void At(double time, Call call);
  // Runs events until none is left.
  void Run();
  double now() const { return now_; }
  int64_t events() const { return events_; }

 private:
  struct Event {
    double time;
    int64_t number;
    Call call;
  };
  struct Later {
    bool operator()(const Event &a, const Event &b) const {
      return a.time != b.time ? a.time > b.time : a.number > b.number;
    }
  };
  std::priority_queue<Event, std::vector<Event>, Later> events_left_;
  double now_ = 0;
  int64_t events_ = 0;
};

// Ranks have their numbers of the whole world. If only some nodes are simulated, a rank of another node is represented
// by the corresponding rank of a simulated node.
class Network {
 public:
  Network(const Cluster &cluster, int world, int simulated_nodes, Clock *clock);

  int nodes() const { return nodes_; }
  int ranks_per_node() const { return ranks_per_node_; }
  int simulated() const { return simulated_nodes_ * ranks_per_node_; }
  int simulated_rank(int rank) const {
    return rank / ranks_per_node_ % simulated_nodes_ * ranks_per_node_ + rank % ranks_per_node_;
  }

  // Sends a message from a simulated rank at the current time. `arrived` gets the arrival time of the last byte; it is
  // called at that time or earlier, as soon as that time is known.
  void Send(int from, int to, int64_t bytes, std::function<void(double)> arrived);

 private:
  struct Port {
    Queue poster, out_within, in_within, out_between, in_between;
  };
  struct Passage {
    double head, end;  // when the first and the last byte leave a queue
  };
  static Passage Pass(Queue *queue, Passage before, double bytes_per_second, double message_seconds, int64_t bytes);

  const Cluster cluster_;
  int ranks_per_node_, nodes_, simulated_nodes_;
  Clock *clock_;
  std::vector<Port> ports_;
  std::vector<Queue> node_out_, node_in_;
};

}  // namespace cycle_cost

#endif
