/* Whether somebody else wrote to weights beside masters: checksums of the weights as the last step left them, of all of
 * them beside remainders, of a sample beside fp32 masters. Included by kernels_isa.c only. */
#ifndef TX_CPU_LOOP_EXTERNAL_H
#define TX_CPU_LOOP_EXTERNAL_H

#include <string.h>

#include "csrc/cpu/kernels.h"
#include "csrc/math/witness.h"

/* Sums in vectors that the processor has: gcc takes longer ones apart in memory. */
#if defined(__AVX512F__)
#define TX_WITNESS_VECTOR 16
#elif defined(__AVX2__)
#define TX_WITNESS_VECTOR 8
#else
#define TX_WITNESS_VECTOR 4
#endif
#define TX_WITNESS_VECTORS (TX_WITNESS_LANES / TX_WITNESS_VECTOR)
typedef uint32_t tx_witness_vector __attribute__((vector_size(4 * TX_WITNESS_VECTOR)));
typedef struct tx_witness_sums {
  tx_witness_vector sum[TX_WITNESS_VECTORS], order[TX_WITNESS_VECTORS];
} tx_witness_sums;

#define TX_LANES_4_(i) \
  TX_WITNESS_FACTOR(i), TX_WITNESS_FACTOR(i + 1u), TX_WITNESS_FACTOR(i + 2u), TX_WITNESS_FACTOR(i + 3u)
#define TX_LANES_16_(i) TX_LANES_4_(i), TX_LANES_4_(i + 4u), TX_LANES_4_(i + 8u), TX_LANES_4_(i + 12u)
static const uint32_t tx_witness_factors[2 * TX_WITNESS_LANES] = {TX_LANES_16_(0u), TX_LANES_16_(16u)};
#undef TX_LANES_4_
#undef TX_LANES_16_

/* The next 2 * TX_WITNESS_LANES weights. */
TX_FN tx_witness_sums tx_witness_take(tx_witness_sums s, const void *weights) {
  for (int32_t i = 0; i < TX_WITNESS_VECTORS; i++) {
    tx_witness_vector words; /* each by itself: as one they would go through memory, in pieces */
    memcpy(&words, (const char *)weights + i * (int32_t)sizeof words, sizeof words);
    s.sum[i] += words;
    s.order[i] += s.sum[i];
  }
  return s;
}

/* Fewer of them. */
TX_FN tx_witness_sums tx_witness_take_part(tx_witness_sums s, const void *weights, int64_t n) {
  uint32_t padded[TX_WITNESS_LANES] = {0};
  memcpy(padded, weights, 2 * (size_t)n);
  return tx_witness_take(s, padded);
}

/* tx_witness_share of all lanes, added up. */
TX_FN uint64_t tx_witness_value(tx_witness_sums s) {
  tx_witness_vector of_sum[TX_WITNESS_VECTORS], of_order[TX_WITNESS_VECTORS], mixed[TX_WITNESS_VECTORS];
  memcpy(of_sum, tx_witness_factors, sizeof of_sum);
  memcpy(of_order, tx_witness_factors + TX_WITNESS_LANES, sizeof of_order);
  for (int32_t i = 0; i < TX_WITNESS_VECTORS; i++)
    mixed[i] = s.sum[i] * of_sum[i] + 2u * (s.order[i] * of_order[i]);
  uint64_t pairs[TX_WITNESS_LANES / 2], value = 0;
  memcpy(pairs, mixed, sizeof pairs);
  for (int32_t i = 0; i < TX_WITNESS_LANES / 2; i++)
    value += pairs[i];
  return value;
}

/* Of n 16-bit weights; any change of one word shows, any other with all but certainty. ahead: in bytes, that memory is
 * asked for; 0 where the weights are at hand. */
TX_FN uint64_t tx_witness_of(const void *weights, int64_t n, const int64_t ahead) {
  tx_witness_sums s = {{{0}}, {{0}}};
  int64_t at = 0;
  for (; at + 2 * TX_WITNESS_LANES <= n; at += 2 * TX_WITNESS_LANES) {
    const char *words = (const char *)weights + 2 * at;
    if (ahead > 0) __builtin_prefetch(words + ahead);
    s = tx_witness_take(s, words);
  }
  if (at < n) s = tx_witness_take_part(s, (const char *)weights + 2 * at, n - at);
  return tx_witness_value(s);
}

TX_FN uint64_t tx_witness_at(const void *witnesses, int64_t i) {
  uint64_t witness;
  memcpy(&witness, (const char *)witnesses + i * (int64_t)sizeof witness, sizeof witness);
  return witness;
}

TX_FN void tx_witness_put(void *witnesses, int64_t i, uint64_t witness) {
  memcpy((char *)witnesses + i * (int64_t)sizeof witness, &witness, sizeof witness);
}

/* Bytes: a processor fetches what is read by itself, but begins anew at each page. */
#define TX_WITNESS_AHEAD 8192

/* See tx_witness_loop; ahead: see tx_witness_of. */
TX_FN int64_t tx_witness_blocks(const void *weights, void *remainders, void *witnesses, int64_t n, int32_t mode,
                                const int64_t ahead) {
  int64_t strays = 0;
  for (int64_t at = 0; at < n; at += TX_WITNESS) {
    const int64_t count = n - at < TX_WITNESS ? n - at : TX_WITNESS;
    const uint64_t witness = tx_witness_of((const char *)weights + 2 * at, count, ahead);
    if (mode != TX_WITNESS_RENEW && witness != tx_witness_at(witnesses, at / TX_WITNESS)) {
      strays += count;
      if (mode == TX_WITNESS_RESYNC) memset((char *)remainders + 2 * at, 0, 2 * (size_t)count);
    }
    if (mode != TX_WITNESS_CHECK) tx_witness_put(witnesses, at / TX_WITNESS, witness);
  }
  return strays;
}

/* Beside remainders. */
static int64_t tx_witness_run(const void *weights, void *remainders, void *witnesses, int64_t n, int32_t mode) {
  return tx_witness_blocks(weights, remainders, witnesses, n, mode, TX_WITNESS_AHEAD);
}

/* -- beside fp32 masters: a sample ------------------------------------------------------------------------------ */

/* Blocks ahead that memory is asked for: each run lies in a page of its own, and more than 20 gain nothing. */
#define TX_SAMPLE_AHEAD 20

/* Of the sample of n <= TX_SAMPLED weights. ahead: in blocks, that memory is asked for; 0 where the weights were just
 * written. */
TX_FN uint64_t tx_sample_of(const void *weights, int64_t n, const int64_t ahead) {
  tx_witness_sums s = {{{0}}, {{0}}};
  for (int64_t at = 0; at < n; at += TX_SAMPLE_STRIDE) {
    const char *run = (const char *)weights + 2 * at;
    if (ahead > 0) __builtin_prefetch(run + 2 * ahead * TX_SAMPLED);
    if (n - at >= TX_SAMPLE_RUN) {
      s = tx_witness_take(s, run);
    } else {
      s = tx_witness_take_part(s, run, n - at);
    }
  }
  return tx_witness_value(s);
}

/* See tx_sample_loop; ahead: see tx_sample_of. */
TX_FN int64_t tx_sample_blocks(const void *weights, void *witnesses, int64_t n, int whole, int32_t mode,
                               const int64_t ahead) {
  int64_t strays = 0;
  for (int64_t at = 0; at < n; at += TX_SAMPLED) {
    const int64_t count = n - at < TX_SAMPLED ? n - at : TX_SAMPLED;
    const void *block = (const char *)weights + 2 * at;
    const uint64_t witness = whole ? tx_witness_of(block, count, 0) : tx_sample_of(block, count, ahead);
    if (mode == TX_WITNESS_RENEW) {
      tx_witness_put(witnesses, at / TX_SAMPLED, witness);
    } else {
      strays += witness != tx_witness_at(witnesses, at / TX_SAMPLED);
    }
  }
  return strays;
}

static int64_t tx_sample_run(const void *weights, void *witnesses, int64_t n, int whole, int32_t mode) {
  return tx_sample_blocks(weights, witnesses, n, whole, mode, TX_SAMPLE_AHEAD);
}

#endif
