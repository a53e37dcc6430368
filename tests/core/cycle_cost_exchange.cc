// The phases of each collective (cycle_cost_exchange.h).
#include "tests/core/cycle_cost_exchange.h"

#include <algorithm>

namespace cycle_cost {
namespace {

// NCCL uses one ring per rank of a node. In each ring, another rank receives from the previous node.
int64_t Rings(const Network &network) {
  return network.nodes() > 1 ? network.ranks_per_node() : 1;
}

void AddRounds(const Network &network, int world, int64_t bytes, bool sums, std::vector<Phase> *phases) {
  const int64_t rings = Rings(network), part = bytes / world;
  for (int k = 1; k < world; k++)
    phases->push_back({To::kNext, part / rings, sums ? 2 * part : 0, part % rings});
}

bool IsFlat(const Case &given, const Network &network) {
  return given.how == How::kAllToAll || network.nodes() == 1 || network.ranks_per_node() == 1;
}

}  // namespace

std::vector<Phase> Reduction(const Case &given, const Network &network, int64_t numel, int64_t bytes,
                             int64_t gathered_bytes) {
  const int64_t world = given.world, here = network.ranks_per_node();
  std::vector<Phase> phases;
  if (world == 1) return phases;
  if (given.how == How::kRing) {
    AddRounds(network, given.world, bytes, true, &phases);
  } else if (IsFlat(given, network)) {
    if (gathered_bytes > 0 && tx_trades(world, bytes, gathered_bytes)) return {{To::kAll, bytes, 2 * bytes, 0}};
    phases.push_back({To::kAll, bytes / world, bytes, 0});
  } else {
    const int64_t partial = 4 * numel;
    phases.push_back({To::kNode, bytes / here, bytes, 0});
    phases.push_back({To::kSameRank, partial / world, partial / here, 0});
  }
  if (gathered_bytes > 0) {
    const std::vector<Phase> more = Gather(given, network, gathered_bytes);
    phases.insert(phases.end(), more.begin(), more.end());
  }
  return phases;
}

std::vector<Phase> Gather(const Case &given, const Network &network, int64_t bytes) {
  std::vector<Phase> phases;
  if (given.world == 1) return phases;
  if (given.how == How::kRing) {
    AddRounds(network, given.world, bytes, false, &phases);
  } else if (IsFlat(given, network)) {
    phases.push_back({To::kAll, bytes / given.world, 0, 0});
  } else {
    phases.push_back({To::kSameRank, bytes / given.world, 0, 0});
    phases.push_back({To::kNode, bytes / network.ranks_per_node(), 0, 0});
  }
  return phases;
}

int64_t NumberOfPeers(const Network &network, int world, To to) {
  switch (to) {
    case To::kAll:
      return world - 1;
    case To::kNode:
      return network.ranks_per_node() - 1;
    case To::kSameRank:
      return network.nodes() - 1;
    default:
      return Rings(network);
  }
}

// Each rank starts with its successor, so that not all ranks send to rank 0 first.
void ForEachPeer(const Network &network, int world, int rank, To to, const std::function<void(int)> &call) {
  const int here = network.ranks_per_node(), node = rank / here, local = rank % here;
  switch (to) {
    case To::kAll:
      for (int k = 1; k < world; k++)
        call((rank + k) % world);
      break;
    case To::kNode:
      for (int k = 1; k < here; k++)
        call(node * here + (local + k) % here);
      break;
    case To::kSameRank:
      for (int k = 1; k < network.nodes(); k++)
        call((node + k) % network.nodes() * here + local);
      break;
    default:
      for (int64_t ring = 0; ring < Rings(network); ring++) {
        const int next = (local + 1) % here;
        const int next_node = next == ring ? (node + 1) % network.nodes() : node;
        call(next_node * here + next);
      }
  }
}

}  // namespace cycle_cost
