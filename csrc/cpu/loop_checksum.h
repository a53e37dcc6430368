/* Detects external writes to weights with remainders: checksums of all of them, as the last step left them. Included by
 * kernels_isa.c and coding_kernels_isa.c only. */
#ifndef TX_CPU_LOOP_CHECKSUM_H
#define TX_CPU_LOOP_CHECKSUM_H

#include <string.h>

#include "csrc/cpu/kernels.h"
#include "csrc/math/checksum.h"

/* Sums in vectors of the processor's own length: gcc splits longer ones in memory. */
#if defined(__AVX512F__)
#define TX_CHECKSUM_VECTOR 16
#elif defined(__AVX2__)
#define TX_CHECKSUM_VECTOR 8
#else
#define TX_CHECKSUM_VECTOR 4
#endif
#define TX_CHECKSUM_VECTORS (TX_CHECKSUM_LANES / TX_CHECKSUM_VECTOR)
typedef uint32_t tx_checksum_vector __attribute__((vector_size(4 * TX_CHECKSUM_VECTOR)));
typedef struct tx_checksum_sums {
  tx_checksum_vector sum[TX_CHECKSUM_VECTORS], order[TX_CHECKSUM_VECTORS];
} tx_checksum_sums;

#define TX_LANES_4_(i) \
  TX_CHECKSUM_FACTOR(i), TX_CHECKSUM_FACTOR(i + 1u), TX_CHECKSUM_FACTOR(i + 2u), TX_CHECKSUM_FACTOR(i + 3u)
#define TX_LANES_16_(i) TX_LANES_4_(i), TX_LANES_4_(i + 4u), TX_LANES_4_(i + 8u), TX_LANES_4_(i + 12u)
static const uint32_t tx_checksum_factors[2 * TX_CHECKSUM_LANES] = {TX_LANES_16_(0u), TX_LANES_16_(16u)};
#undef TX_LANES_4_
#undef TX_LANES_16_

/* Adds the next 2 * TX_CHECKSUM_LANES weights. */
TX_FN tx_checksum_sums tx_checksum_take(tx_checksum_sums s, const void *weights) {
  for (int32_t i = 0; i < TX_CHECKSUM_VECTORS; i++) {
    tx_checksum_vector words; /* loaded separately: as one array they would be copied through memory in pieces */
    memcpy(&words, (const char *)weights + i * (int32_t)sizeof words, sizeof words);
    s.sum[i] += words;
    s.order[i] += s.sum[i];
  }
  return s;
}

/* Adds n < 2 * TX_CHECKSUM_LANES weights. */
TX_FN tx_checksum_sums tx_checksum_take_part(tx_checksum_sums s, const void *weights, int64_t n) {
  uint32_t padded[TX_CHECKSUM_LANES] = {0};
  memcpy(padded, weights, 2 * (size_t)n);
  return tx_checksum_take(s, padded);
}

/* The sum of what all lanes make of their sums. */
TX_FN uint64_t tx_checksum_value(tx_checksum_sums s) {
  tx_checksum_vector of_sum[TX_CHECKSUM_VECTORS], of_order[TX_CHECKSUM_VECTORS], mixed[TX_CHECKSUM_VECTORS];
  memcpy(of_sum, tx_checksum_factors, sizeof of_sum);
  memcpy(of_order, tx_checksum_factors + TX_CHECKSUM_LANES, sizeof of_order);
  for (int32_t i = 0; i < TX_CHECKSUM_VECTORS; i++)
    mixed[i] = s.sum[i] * of_sum[i] + 2u * (s.order[i] * of_order[i]);
  uint64_t pairs[TX_CHECKSUM_LANES / 2], value = 0;
  memcpy(pairs, mixed, sizeof pairs);
  for (int32_t i = 0; i < TX_CHECKSUM_LANES / 2; i++)
    value += pairs[i];
  return value;
}

/* The checksum of n 16-bit weights. A change of a single word always changes it, any other change almost certainly.
 * ahead: bytes to prefetch ahead; 0 if the weights are in the cache. */
TX_FN uint64_t tx_checksum_of(const void *weights, int64_t n, const int64_t ahead) {
  tx_checksum_sums s = {{{0}}, {{0}}};
  int64_t at = 0;
  for (; at + 2 * TX_CHECKSUM_LANES <= n; at += 2 * TX_CHECKSUM_LANES) {
    const char *words = (const char *)weights + 2 * at;
    if (ahead > 0) __builtin_prefetch(words + ahead);
    s = tx_checksum_take(s, words);
  }
  if (at < n) s = tx_checksum_take_part(s, (const char *)weights + 2 * at, n - at);
  return tx_checksum_value(s);
}

TX_FN uint64_t tx_checksum_at(const void *checksums, int64_t i) {
  uint64_t checksum;
  memcpy(&checksum, (const char *)checksums + i * (int64_t)sizeof checksum, sizeof checksum);
  return checksum;
}

TX_FN void tx_checksum_put(void *checksums, int64_t i, uint64_t checksum) {
  memcpy((char *)checksums + i * (int64_t)sizeof checksum, &checksum, sizeof checksum);
}

/* In bytes. The processor's own prefetching starts over at each page. */
#define TX_CHECKSUM_AHEAD 8192

/* See tx_checksum_loop; ahead: see tx_checksum_of. */
TX_FN int64_t tx_checksum_blocks(const void *weights, void *remainders, void *checksums, int64_t n, int32_t mode,
                                 const int64_t ahead) {
  int64_t stale = 0;
  for (int64_t at = 0; at < n; at += TX_CHECKSUM) {
    const int64_t count = n - at < TX_CHECKSUM ? n - at : TX_CHECKSUM;
    const uint64_t checksum = tx_checksum_of((const char *)weights + 2 * at, count, ahead);
    if (mode != TX_CHECKSUM_RENEW && checksum != tx_checksum_at(checksums, at / TX_CHECKSUM)) {
      stale += count;
      if (mode == TX_CHECKSUM_RESYNC) memset((char *)remainders + 2 * at, 0, 2 * (size_t)count);
    }
    if (mode != TX_CHECKSUM_CHECK) tx_checksum_put(checksums, at / TX_CHECKSUM, checksum);
  }
  return stale;
}

/* Weights with remainders. */
static int64_t tx_checksum_run(const void *weights, void *remainders, void *checksums, int64_t n, int32_t mode) {
  return tx_checksum_blocks(weights, remainders, checksums, n, mode, TX_CHECKSUM_AHEAD);
}

#endif
