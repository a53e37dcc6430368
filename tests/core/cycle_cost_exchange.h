// An exchange between all ranks as phases: in each a rank sends some messages of one size, and goes on when it has as
// many.
#ifndef TESTS_CORE_CYCLE_COST_EXCHANGE_H
#define TESTS_CORE_CYCLE_COST_EXCHANGE_H

#include <functional>
#include <vector>

#include "tests/core/cycle_cost_network.h"

namespace cycle_cost {

enum class To {
  kAll,
  kNode,      // the others of its node
  kSameRank,  // those of its number in the other nodes
  kNext       // in each ring, the next one
};

struct Phase {
  To to;
  int64_t bytes;       // of a message
  int64_t sum_bytes;   // added up when all have come
  int64_t last_bytes;  // more, of the last one: where a part is not cut evenly into rings
};

// Of a message of `bytes` whose parts are summed by their ranks; gathered_bytes: and its sums go to all of them, 0:
// not.
std::vector<Phase> Reduction(const Case &given, const Network &network, int64_t numel, int64_t bytes,
                             int64_t gathered_bytes);

// Every rank has a part of `bytes`, and gets the others'.
std::vector<Phase> Gather(const Case &given, const Network &network, int64_t bytes);

// Calls with each rank that a rank sends to, in turn.
void ForEachPeer(const Network &network, int world, int rank, To to, const std::function<void(int)> &call);

int64_t NumberOfPeers(const Network &network, int world, To to);

}  // namespace cycle_cost

#endif
