// The messages of a collective, as a sequence of phases. In each phase a rank sends some messages of one size; it goes
// on to the next phase when it has received as many.
#ifndef TESTS_CORE_CYCLE_COST_EXCHANGE_H
#define TESTS_CORE_CYCLE_COST_EXCHANGE_H

#include <functional>
#include <vector>

#include "tests/core/cycle_cost_network.h"

namespace cycle_cost {

enum class To {
  kAll,
  kNode,      // the other ranks of the same node
  kSameRank,  // the ranks with the same number within the other nodes
  kNext       // the next rank, in each ring
};

struct Phase {
  To to;
  int64_t bytes;       // of one message
  int64_t sum_bytes;   // of the sum that is computed when all messages have arrived
  int64_t last_bytes;  // extra bytes of the last message, if a part cannot be divided evenly into the rings
};

// The phases that reduce a bucket of `bytes`, each part being summed by the rank that owns it. gathered_bytes: size of
// the sums that are then all-gathered; 0: they are not.
std::vector<Phase> Reduction(const Case &given, const Network &network, int64_t numel, int64_t bytes,
                             int64_t gathered_bytes);

// The phases of an all-gather of `bytes` in total, of which every rank has one part.
std::vector<Phase> Gather(const Case &given, const Network &network, int64_t bytes);

// Calls `call` with each rank that `rank` sends to, in order.
void ForEachPeer(const Network &network, int world, int rank, To to, const std::function<void(int)> &call);

int64_t NumberOfPeers(const Network &network, int world, To to);

}  // namespace cycle_cost

#endif
