// What a training step costs: bytes and time, predicted. Every rank runs a machine of its own (csrc/torch_ext_cycle.h)
// over the planner's own buckets, and these decide what is sent, and when; a network of first-in, first-out links says
// how long that takes.
#ifndef TESTS_CORE_CYCLE_COST_H
#define TESTS_CORE_CYCLE_COST_H

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/torch_ext_advanced.h"
#include "csrc/torch_ext_cycle.h"

namespace cycle_cost {

// One rank's way into a network: what it sends is in one queue, what it receives in another. Seconds and bytes.
struct Link {
  double latency = 0;
  double bytes_per_second = 1e9;
  double message_seconds = 0;  // that the link takes for each message, besides its bytes
};

struct Cluster {
  int ranks_per_node = 1;
  Link within, between;              // to ranks of the same node, and of others
  double node_bytes_per_second = 0;  // what all ranks of a node send to other nodes, and receive; 0: no more limit
  double post_seconds = 0;           // of a rank's processor, for each message that it sends
  double sum_bytes_per_second = 0;   // of received chunks that a rank adds up; 0: that takes no time
  int64_t in_flight = 4;             // reductions that a rank has under way; the others are queued
};

struct Param {
  int64_t numel = 0;
  int64_t rows = 1;    // its first dimension, which FSDP2 cuts
  int64_t unit = 0;    // of FSDP2: 0 is the root
  int64_t bucket = 0;  // of DistributedDataParallel
};

struct Model {
  std::vector<Param> params;  // in registration order; gradients come in reverse
  int32_t param_dtype = TX_BF16, grad_dtype = TX_BF16, wire_dtype = TX_BF16;
  int32_t gather_dtype = TX_NONE;                    // of the policy
  double forward_seconds = 0, backward_seconds = 0;  // spread over the parameters by their elements
  double step_seconds = 0;                           // of the optimizer, on what a rank steps
};

enum class How {
  kAllToAll,  // torch_ext's: each rank sends every other one its part
  kTwoLevel,  // sums within a node, in fp32 to the ranks of the same number in other nodes, and back
  kRing       // as NCCL's: a ring for each rank of a node, parts sent on from neighbour to neighbour
};

struct Case {
  Cluster cluster;
  Model model;
  int32_t kind = TX_CYCLE_NO_SHARD;
  How how = How::kAllToAll;
  int world = 1;            // a multiple of ranks_per_node, or less
  int64_t cap = TX_NO_INT;  // elements of a bucket, as the policy's bucket_size
  int check_for_nan = 1;
  int find_unused = 0;
  int steps = 3;  // the last one is measured: the first may show the order of gradients
  // Simulate every node, not one. Nodes that do the same at the same time are one node whose messages to the d-th next
  // node come back as those of the d-th before: the figures are equal.
  bool every_node = false;
};

struct Cost {
  double seconds = 0;  // of a step: the slowest rank's
  double compute_seconds = 0;
  int64_t gradient_bytes = 0, weight_bytes = 0, report_bytes = 0;  // that rank 0 sends in a step
  int64_t node_bytes = 0;                                          // that rank 0's node sends to others
  int64_t messages = 0;                                            // that rank 0 sends
  int64_t buckets = 0;
  int64_t largest_message = 0;  // bytes of a part of the largest bucket
  int64_t in_flight_bytes = 0;  // beside the gradients, of reductions under way, at most
  int64_t planned_bytes = 0;    // for that, by tx_memory_plan; 0 where it does not plan it (units, the hook)
  int64_t events = 0;

  int64_t bytes() const { return gradient_bytes + weight_bytes + report_bytes; }
};

// Throws std::invalid_argument for what is not legal, std::logic_error where a machine asks for what it must not.
Cost Predict(const Case &given);

}  // namespace cycle_cost

#endif
