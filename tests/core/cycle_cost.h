// Predicts what a training step costs, in bytes and time. Every rank runs its own gradient cycle
// (csrc/torch_ext_cycle.h) over the planner's buckets; the cycles decide what is sent and when, and a simulated network
// of first-in, first-out links how long that takes.
#ifndef TESTS_CORE_CYCLE_COST_H
#define TESTS_CORE_CYCLE_COST_H

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/torch_ext_advanced.h"
#include "csrc/torch_ext_cycle.h"

namespace cycle_cost {

// One rank's connection to a network: one queue for everything it sends, another for everything it receives.
struct Link {
  double latency = 0;
  double bytes_per_second = 1e9;
  double message_seconds = 0;  // fixed time that the link needs per message, in addition to its bytes
};

struct Cluster {
  int ranks_per_node = 1;
  Link within, between;  // to ranks of the same node, and to other nodes
  // Traffic with other nodes, per direction, of all ranks of a node; 0: no such limit.
  double node_bytes_per_second = 0;
  double post_seconds = 0;          // processor time of a rank for each message that it sends
  double sum_bytes_per_second = 0;  // rate at which a rank sums received chunks; 0: summing takes no time
  int64_t in_flight = 4;            // reductions that a rank has in flight at most; further ones are queued
};

struct Param {
  int64_t numel = 0;
  int64_t rows = 1;    // size of the first dimension, along which FSDP2 shards
  int64_t unit = 0;    // unit of FSDP2; 0 is the root
  int64_t bucket = 0;  // bucket of DistributedDataParallel
};

struct Model {
  std::vector<Param> params;  // in registration order; their gradients become ready in reverse
  int32_t param_dtype = TX_BF16, grad_dtype = TX_BF16, wire_dtype = TX_BF16;
  int32_t gather_dtype = TX_NONE;                    // the policy's dtype for all-gathers of weights
  double forward_seconds = 0, backward_seconds = 0;  // divided among the parameters in proportion to their elements
  double step_seconds = 0;                           // of the optimizer, for the part that one rank steps
};

enum class How {
  kAllToAll,  // torch_ext's exchange: each rank sends every other rank its part
  kTwoLevel,  // sums within a node, then in fp32 between ranks of the same number in other nodes, and back
  kRing       // like NCCL: one ring per rank of a node; parts are passed from neighbour to neighbour
};

struct Case {
  Cluster cluster;
  Model model;
  int32_t kind = TX_CYCLE_NO_SHARD;
  How how = How::kAllToAll;
  int world = 1;            // a multiple of ranks_per_node, or smaller than it
  int64_t cap = TX_NO_INT;  // bucket capacity in elements, the policy's bucket_size
  int check_for_nan = 1;
  int find_unused = 0;
  // The last one is measured: after the first step the buckets may be rebuilt in the order of the gradients.
  int steps = 3;
  // Simulate every node instead of one. Nodes that behave identically are simulated by one node: a message to the d-th
  // next node counts as one received from the d-th previous node. The results are equal.
  bool every_node = false;
};

struct Cost {
  double seconds = 0;  // of one step, on the slowest rank
  double compute_seconds = 0;
  int64_t gradient_bytes = 0, weight_bytes = 0, report_bytes = 0;  // sent by rank 0 in one step
  int64_t node_bytes = 0;                                          // sent by the node of rank 0 to other nodes
  int64_t messages = 0;                                            // sent by rank 0
  int64_t buckets = 0;
  int64_t largest_message = 0;  // bytes of one rank's part of the largest bucket
  int64_t in_flight_bytes = 0;  // peak memory for reductions in flight, in addition to the gradients
  int64_t planned_bytes = 0;    // tx_memory_plan's prediction of in_flight_bytes; 0 if it makes none (units, the hook)
  int64_t events = 0;

  int64_t bytes() const { return gradient_bytes + weight_bytes + report_bytes; }
};

// Throws std::invalid_argument for an illegal case, and std::logic_error if a cycle asks for an illegal action.
Cost Predict(const Case &given);

}  // namespace cycle_cost

#endif
