/* Detects external writes to weights with fp32 masters: checksums of a sample of them, as the last step left it.
 * Included by kernels_isa.c only. */
#ifndef TX_CPU_LOOP_SAMPLE_H
#define TX_CPU_LOOP_SAMPLE_H

#include "csrc/cpu/loop_checksum.h"

/* Blocks to prefetch ahead: each run is in a page of its own, and more than 20 gain nothing. */
#define TX_SAMPLE_AHEAD 20

/* The checksum of the sample of n <= TX_SAMPLED weights. ahead: blocks to prefetch ahead; 0 if the weights were just
 * written. */
TX_FN uint64_t tx_sample_of(const void *weights, int64_t n, const int64_t ahead) {
  tx_checksum_sums s = {{{0}}, {{0}}};
  for (int64_t at = 0; at < n; at += TX_SAMPLE_STRIDE) {
    const char *run = (const char *)weights + 2 * at;
    if (ahead > 0) __builtin_prefetch(run + 2 * ahead * TX_SAMPLED);
    if (n - at >= TX_SAMPLE_RUN) {
      s = tx_checksum_take(s, run);
    } else {
      s = tx_checksum_take_part(s, run, n - at);
    }
  }
  return tx_checksum_value(s);
}

/* See tx_sample_loop; ahead: see tx_sample_of. */
TX_FN int64_t tx_sample_blocks(const void *weights, void *checksums, int64_t n, int whole, int32_t mode,
                               const int64_t ahead) {
  int64_t stale = 0;
  for (int64_t at = 0; at < n; at += TX_SAMPLED) {
    const int64_t count = n - at < TX_SAMPLED ? n - at : TX_SAMPLED;
    const void *block = (const char *)weights + 2 * at;
    const uint64_t checksum = whole ? tx_checksum_of(block, count, 0) : tx_sample_of(block, count, ahead);
    if (mode == TX_CHECKSUM_RENEW) {
      tx_checksum_put(checksums, at / TX_SAMPLED, checksum);
    } else {
      stale += checksum != tx_checksum_at(checksums, at / TX_SAMPLED);
    }
  }
  return stale;
}

static int64_t tx_sample_run(const void *weights, void *checksums, int64_t n, int whole, int32_t mode) {
  return tx_sample_blocks(weights, checksums, n, whole, mode, TX_SAMPLE_AHEAD);
}

#endif
