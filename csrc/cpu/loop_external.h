/* Whether somebody else wrote to weights beside masters: checksums of the weights as the last step left them, of all of
 * them beside remainders, of a sample beside fp32 masters. Included by kernels_isa.c only. */
#ifndef TX_CPU_LOOP_EXTERNAL_H
#define TX_CPU_LOOP_EXTERNAL_H

#include <string.h>

#include "csrc/cpu/kernels.h"
#include "csrc/math/numeric.h"

#define TX_SAMPLE_RUNS 2
/* Lanes of a sum, and of the sum of its partial sums, in which the order of the words counts (Fletcher 1982); lanes are
 * told apart at the end. */
#define TX_WITNESS_LANES 16
typedef uint32_t tx_witness_lanes __attribute__((vector_size(4 * TX_WITNESS_LANES)));

/* Odd numbers below 2^32: multiples of the golden ratio's. */
TX_FN uint64_t tx_witness_factor(uint32_t i) {
  return (uint32_t)((2u * i + 1u) * 0x9e3779b1u);
}

typedef struct tx_checksum {
  tx_witness_lanes sum, order;
} tx_checksum;

/* Takes up to a vector of 16-bit weights; n <= 2 * TX_WITNESS_LANES of them. */
TX_FN void tx_checksum_add(tx_checksum *c, const void *weights, int64_t n) {
  tx_witness_lanes words = {0};
  memcpy(&words, weights, 2 * (size_t)n);
  c->sum += words;
  c->order += c->sum;
}

TX_FN uint64_t tx_checksum_value(const tx_checksum *c) {
  uint32_t sums[TX_WITNESS_LANES], orders[TX_WITNESS_LANES];
  memcpy(sums, &c->sum, sizeof sums);
  memcpy(orders, &c->order, sizeof orders);
  uint64_t value = 0;
  for (uint32_t i = 0; i < TX_WITNESS_LANES; i++)
    value += sums[i] * tx_witness_factor(i) + orders[i] * tx_witness_factor(TX_WITNESS_LANES + i);
  return value;
}

/* Of n 16-bit weights; any change of one word shows, any other with all but certainty. */
TX_FN uint64_t tx_witness_of(const void *weights, int64_t n) {
  tx_checksum c = {{0}, {0}};
  int64_t at = 0;
  for (; at + 2 * TX_WITNESS_LANES <= n; at += 2 * TX_WITNESS_LANES)
    tx_checksum_add(&c, (const char *)weights + 2 * at, 2 * TX_WITNESS_LANES);
  if (at < n) tx_checksum_add(&c, (const char *)weights + 2 * at, n - at);
  return tx_checksum_value(&c);
}

TX_FN uint64_t tx_witness_at(const void *witnesses, int64_t i) {
  uint64_t witness;
  memcpy(&witness, (const char *)witnesses + i * (int64_t)sizeof witness, sizeof witness);
  return witness;
}

TX_FN void tx_witness_put(void *witnesses, int64_t i, uint64_t witness) {
  memcpy((char *)witnesses + i * (int64_t)sizeof witness, &witness, sizeof witness);
}

/* Beside remainders: see tx_witness_loop. */
static int64_t tx_witness_run(const void *weights, void *remainders, void *witnesses, int64_t n, int32_t mode) {
  int64_t strays = 0;
  for (int64_t at = 0; at < n; at += TX_WITNESS) {
    const int64_t count = n - at < TX_WITNESS ? n - at : TX_WITNESS;
    const uint64_t witness = tx_witness_of((const char *)weights + 2 * at, count);
    if (mode != TX_WITNESS_RENEW && witness != tx_witness_at(witnesses, at / TX_WITNESS)) {
      strays += count;
      if (mode == TX_WITNESS_RESYNC) memset((char *)remainders + 2 * at, 0, 2 * (size_t)count);
    }
    if (mode != TX_WITNESS_CHECK) tx_witness_put(witnesses, at / TX_WITNESS, witness);
  }
  return strays;
}

/* -- beside fp32 masters: a sample ------------------------------------------------------------------------------ */

/* In each TX_SAMPLED weights runs of as many as a vector (and a cache line) has. */
#define TX_SAMPLE_RUN (2 * TX_WITNESS_LANES)
#define TX_SAMPLE_STRIDE (TX_SAMPLED / TX_SAMPLE_RUNS)

/* Blocks ahead that memory is asked for: each run lies in a page of its own. */
#define TX_SAMPLE_AHEAD 4

/* Of the sample of n <= TX_SAMPLED weights. */
TX_FN uint64_t tx_sample_of(const void *weights, int64_t n) {
  tx_checksum c = {{0}, {0}};
  for (int64_t at = 0; at < n; at += TX_SAMPLE_STRIDE) {
    const char *run = (const char *)weights + 2 * at;
    __builtin_prefetch(run + 2 * TX_SAMPLE_AHEAD * TX_SAMPLED);
    if (n - at >= TX_SAMPLE_RUN) {
      tx_checksum_add(&c, run, TX_SAMPLE_RUN);
    } else {
      tx_checksum_add(&c, run, n - at);
    }
  }
  return tx_checksum_value(&c);
}

/* See tx_sample_loop. */
static int64_t tx_sample_run(const void *weights, void *witnesses, int64_t n, int whole, int32_t mode) {
  int64_t strays = 0;
  for (int64_t at = 0; at < n; at += TX_SAMPLED) {
    const int64_t count = n - at < TX_SAMPLED ? n - at : TX_SAMPLED;
    const void *block = (const char *)weights + 2 * at;
    const uint64_t witness = whole ? tx_witness_of(block, count) : tx_sample_of(block, count);
    if (mode == TX_WITNESS_RENEW) {
      tx_witness_put(witnesses, at / TX_SAMPLED, witness);
    } else {
      strays += witness != tx_witness_at(witnesses, at / TX_SAMPLED);
    }
  }
  return strays;
}

#endif
