// A simulated rank: computes, reports events to its state machine, and performs the actions that the machine returns.
#ifndef TESTS_CORE_CYCLE_COST_RANK_H
#define TESTS_CORE_CYCLE_COST_RANK_H

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/core/cycle_cost_exchange.h"

namespace cycle_cost {

// A bucket of the planner's (or torch's) layout.
struct Bucket {
  int64_t numel = 0;           // padded
  int64_t wire_bytes = 0;      // of the whole bucket: the parts of all ranks
  int64_t gathered_bytes = 0;  // bytes of the sums that are all-gathered; 0 if they are not
  int64_t weight_bytes = 0;    // of the weights that are all-gathered; 0 if every rank steps all of them
  int64_t memory = 0;          // extra bytes allocated while the bucket is being reduced
};

// The layout; the same on every rank.
struct Plan {
  std::vector<Bucket> buckets;  // or units of FSDP2
  std::vector<int64_t> bucket_of, buffer_of;
  std::vector<std::string> names, units;
  std::vector<const char *> name_pointers, unit_pointers;
  int64_t planned_bytes = 0;
};

Plan MakePlan(const Case &given);

struct Op {
  enum What {
    kCompute,     // for `seconds`
    kBegin,       // a backward begins
    kReady,       // gradient `which` is ready
    kGive,        // hands unit or bucket `which` to the machine
    kEnd,         // the backward ends
    kStep,        // the optimizer's step
    kGather,      // starts the all-gather of the weights of unit or bucket `which`
    kWaitGather,  // waits for the `which`-th all-gather of this step
    kEndOfStep
  };
  What what;
  double seconds = 0;
  int64_t which = 0;
};

std::vector<Op> MakeProgram(const Case &given, const Plan &plan);

class World;

class Rank {
 public:
  Rank(World *world, int number);

  void Run();  // runs until it has to wait
  // One more message of a phase of an exchange has arrived; its last byte at `time`.
  void Arrived(size_t exchange, size_t phase, double time);

  // Totals of what this rank has sent so far.
  struct Sent {
    double time = 0;
    int64_t gradient_bytes = 0, weight_bytes = 0, report_bytes = 0;
    int64_t to_other_nodes = 0;  // part of the bytes above that went to other nodes
    int64_t messages = 0;
  };
  std::vector<Sent> ends;  // the totals at the end of each step
  int64_t most_in_flight = 0;

 private:
  struct Exchange {
    bool posted = false, sums = false, done = false;
    size_t phase = 0;
    std::vector<Phase> phases;
    std::vector<int64_t> arrived;  // number of messages, by phase
    std::vector<double> last;
    int64_t Sent::*counter = nullptr;
    int64_t slots = 0, memory = 0;
  };

  bool Do(const Op &op);  // returns false if it has to wait
  bool Drain();           // performs the machine's actions; returns false if it has to wait for one
  bool Act(const tx_cycle_action &action);
  void Send(const tx_cycle_action &action);
  void Report();
  void Read();
  void Post(std::vector<Phase> phases, int64_t Sent::*counter, int64_t slots, int64_t memory);
  void StartQueued();
  void Start(size_t exchange);
  void SendPhase(size_t exchange);
  void Finish(size_t exchange);
  bool WaitFor(size_t exchange);
  Exchange &At(size_t exchange);

  World *world_;
  int number_;
  Sent sent_so_far_;
  std::vector<int64_t> memory_;
  tx_cycle *cycle_ = nullptr;
  size_t pc_ = 0;
  bool draining_ = false, asleep_ = false;
  std::vector<Exchange> exchanges_;
  size_t posted_ = 0;
  std::deque<size_t> queue_;  // reductions waiting for a free slot
  int64_t slots_taken_ = 0, in_flight_bytes_ = 0;
  size_t waits_for_ = SIZE_MAX;
  std::vector<size_t> sent_;     // the exchange of each message of this backward
  std::vector<size_t> gathers_;  // all-gathers of this step
  size_t report_ = 0, order_ = 0;
  bool order_posted_ = false;
  Queue summer_;
};

class World {
 public:
  explicit World(const Case &given);
  Cost Run();

  const Case &given;
  Plan plan;
  std::vector<Op> program;
  Clock clock;
  Network network;
  std::map<size_t, std::vector<std::vector<uint8_t>>> reports;  // by exchange and simulated rank
  std::vector<std::unique_ptr<Rank>> ranks;
};

}  // namespace cycle_cost

#endif
