/* How fast a rank's link is, and what follows from it alone. */
#include <stddef.h>

#include "csrc/torch_ext_advanced.h"

/* Bytes that a rank sends in a round, and what is the least to each other one: shorter messages are all overhead. */
static const int64_t kSent = INT64_C(4) << 20, kLeast = INT64_C(64) << 10;

int64_t tx_link_part_bytes(int64_t world) {
  if (world < 2) return 0;
  const int64_t part = kSent / (world - 1) / TX_BLOCK * TX_BLOCK;
  return part > kLeast ? part : kLeast;
}

double tx_link_gbps(const int64_t *nanoseconds, int64_t world) {
  if (!nanoseconds || world < 2) return 0;
  int64_t least = INT64_MAX;
  for (int64_t round = 1; round < TX_LINK_ROUNDS; round++) {
    int64_t most = 0;
    for (int64_t rank = 0; rank < world; rank++) {
      const int64_t took = nanoseconds[rank * TX_LINK_ROUNDS + round];
      if (took > most) most = took;
    }
    if (most < least) least = most;
  }
  return least > 0 ? 8.0 * (double)tx_link_part_bytes(world) * (double)(world - 1) / (double)least : 0;
}

int32_t tx_compresses(int32_t choice, double link_gbps) {
  if (choice == TX_COMPRESSION_ON) return 1;
  return choice == TX_COMPRESSION_AUTO && link_gbps > 0 && link_gbps * 1000 < TX_COMPRESS_BELOW_MBPS;
}
