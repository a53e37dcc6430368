// Links in time. A message passes some queues in turn, as a stream of bytes: a queue starts to pass it on as soon as
// its first byte is there, takes as long as its own speed asks for, and ends not before the last byte has come.
#ifndef TESTS_CORE_CYCLE_COST_NETWORK_H
#define TESTS_CORE_CYCLE_COST_NETWORK_H

#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

#include "tests/core/cycle_cost.h"

namespace cycle_cost {

// A queue that serves one after the other.
struct Queue {
  double free = 0;

  // What comes at `begin` and takes `seconds`: until when.
  double Serve(double begin, double seconds) {
    free = (begin > free ? begin : free) + seconds;
    return free;
  }
};

// What happens when. Events of one time happen in the order in which they were planned.
class Clock {
 public:
  using Call = std::function<void()>;
  void At(double time, Call call);
  // Until nothing is left.
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

// Ranks are numbered as in the world; those of nodes that are not simulated stand for the same rank of one that is.
class Network {
 public:
  Network(const Cluster &cluster, int world, int simulated_nodes, Clock *clock);

  int nodes() const { return nodes_; }
  int ranks_per_node() const { return ranks_per_node_; }
  int simulated() const { return simulated_nodes_ * ranks_per_node_; }
  int simulated_rank(int rank) const {
    return rank / ranks_per_node_ % simulated_nodes_ * ranks_per_node_ + rank % ranks_per_node_;
  }

  // From a simulated rank, now. arrived(time) is called when the message's last queue is known, at that time or before.
  void Send(int from, int to, int64_t bytes, std::function<void(double)> arrived);

 private:
  struct Port {
    Queue poster, out_within, in_within, out_between, in_between;
  };
  struct Passage {
    double head, end;  // of its first and last byte, behind a queue
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
