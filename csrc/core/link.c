/* The measured speed of a rank's link, and decisions that depend on it alone. */
#include <stddef.h>

#include "csrc/core/fp_mode.h"
#include "csrc/torch_ext_advanced.h"

/* Bytes that a rank sends per round in all, and at least to each other rank: shorter messages are dominated by
 * overhead. */
static const int64_t kSent = INT64_C(4) << 20, kLeast = INT64_C(64) << 10;

/* At most 15/16 of a round count as time that was spent waiting for processors. */
enum { kLeastPart = 16 };

int64_t tx_link_part_bytes(int64_t world) {
  if (world < 2) return 0;
  const int64_t part = kSent / (world - 1) / TX_BLOCK * TX_BLOCK;
  return part > kLeast ? part : kLeast;
}

/* Nanoseconds of a round on its slowest rank. less_waited: without the time that ranks waited for processors. */
static int64_t slowest(const int64_t *took, const int64_t *waited, int64_t world, int64_t round, int less_waited) {
  int64_t most = 0;
  for (int64_t rank = 0; rank < world; rank++) {
    const int64_t all = took[rank * TX_LINK_ROUNDS + round];
    const int64_t idle = less_waited && waited ? waited[rank * TX_LINK_ROUNDS + round] : 0;
    /* Threads wait at the same time as each other and as the transfer, so not all of the waiting lengthened the
     * round. */
    const int64_t least = all / kLeastPart, net = idle <= 0 ? all : idle < all - least ? all - idle : least;
    if (net > most) most = net;
  }
  return most;
}

/* Gbit/s of `messages` messages of `bytes` each, in nanoseconds > 0. */
static double gbps_of(int64_t bytes, int64_t messages, int64_t nanoseconds) {
  TX_RETURN_UNDER_FP_MODE(double, 8.0 * (double)bytes * (double)messages / (double)nanoseconds);
}

double tx_link_gbps(const int64_t *took, const int64_t *waited, int64_t world) {
  if (!took || world < 2) return 0;
  enum { ROUNDS = TX_LINK_ROUNDS - 1 };
  int64_t quickest = INT64_MAX, nets[ROUNDS];
  for (int round = 0; round < ROUNDS; round++) {
    const int64_t all = slowest(took, waited, world, 1 + round, 0), net = slowest(took, waited, world, 1 + round, 1);
    if (all < quickest) quickest = all;
    int at = round; /* insertion sort */
    for (; at > 0 && nets[at - 1] > net; at--)
      nets[at] = nets[at - 1];
    nets[at] = net;
  }
  const int64_t median = nets[ROUNDS / 2], found = median > 0 && median < quickest ? median : quickest;
  return found > 0 ? gbps_of(tx_link_part_bytes(world), world - 1, found) : 0;
}

int32_t tx_compresses(int32_t choice, double link_gbps) {
  if (choice == TX_COMPRESSION_ON) return 1;
  const tx_fp_mode saved = tx_fp_enter();
  const volatile double gbps = link_gbps;
  const volatile int32_t slow = gbps > 0 && gbps * 1000 < TX_COMPRESS_BELOW_MBPS;
  tx_fp_leave(saved);
  return choice == TX_COMPRESSION_AUTO && slow;
}
