/* Splits values into planes and merges them, and the entropy code of a plane. Included by coding_kernels_isa.c only.
 *
 * Vector versions are in avx512_planes.h and avx2_planes.h. The rows here are the reference for their bits. They also
 * process what these leave: an incomplete row, and the last words, where a vector might read too far. */
#ifndef TX_CPU_LOOP_PLANES_H
#define TX_CPU_LOOP_PLANES_H

#include <string.h>

#include "csrc/cpu/planes_loops.h"
#include "csrc/math/planes.h"

#if defined(__AVX512BW__) && defined(__AVX512VL__)
#include "csrc/cpu/avx512_planes.h"
#elif defined(__AVX2__)
#include "csrc/cpu/avx2_planes.h"
#endif

static void tx_split_1(const void *values, int64_t n, int rotate, uint8_t *const *planes) {
  (void)rotate;
  memcpy(planes[0], values, (size_t)n);
}

static void tx_split_2(const void *values, int64_t n, int rotate, uint8_t *const *planes) {
  uint8_t *restrict high = planes[0], *restrict low = planes[1];
  for (int64_t i = 0; i < n; i++) {
    uint16_t v;
    memcpy(&v, (const char *)values + 2 * i, sizeof v);
    const uint16_t turned = (uint16_t)(rotate ? v << 1 | v >> 15 : v);
    high[i] = (uint8_t)(turned >> 8);
    low[i] = (uint8_t)turned;
  }
}

static void tx_split_4(const void *values, int64_t n, int rotate, uint8_t *const *planes) {
  uint8_t *restrict a = planes[0], *restrict b = planes[1], *restrict c = planes[2], *restrict d = planes[3];
  for (int64_t i = 0; i < n; i++) {
    uint32_t v;
    memcpy(&v, (const char *)values + 4 * i, sizeof v);
    const uint32_t turned = rotate ? v << 1 | v >> 31 : v;
    a[i] = (uint8_t)(turned >> 24);
    b[i] = (uint8_t)(turned >> 16);
    c[i] = (uint8_t)(turned >> 8);
    d[i] = (uint8_t)turned;
  }
}

static void tx_merge_1(const uint8_t *const *planes, int64_t n, int rotate, void *values) {
  (void)rotate;
  memcpy(values, planes[0], (size_t)n);
}

static void tx_merge_2(const uint8_t *const *planes, int64_t n, int rotate, void *values) {
  const uint8_t *restrict high = planes[0], *restrict low = planes[1];
  for (int64_t i = 0; i < n; i++) {
    const uint16_t turned = (uint16_t)(high[i] << 8 | low[i]);
    const uint16_t v = (uint16_t)(rotate ? turned >> 1 | turned << 15 : turned);
    memcpy((char *)values + 2 * i, &v, sizeof v);
  }
}

static void tx_merge_4(const uint8_t *const *planes, int64_t n, int rotate, void *values) {
  const uint8_t *restrict a = planes[0], *restrict b = planes[1], *restrict c = planes[2], *restrict d = planes[3];
  for (int64_t i = 0; i < n; i++) {
    const uint32_t turned = (uint32_t)a[i] << 24 | (uint32_t)b[i] << 16 | (uint32_t)c[i] << 8 | d[i];
    const uint32_t v = rotate ? turned >> 1 | turned << 31 : turned;
    memcpy((char *)values + 4 * i, &v, sizeof v);
  }
}

/* Four tables, because equal symbols often follow each other. */
static uint32_t tx_count_bytes_run(const uint8_t *symbols, int64_t n, int64_t stride, uint32_t *counts) {
  uint32_t part[4][256], seen = 0;
  memset(part, 0, sizeof part);
  for (int64_t at = 0; at < n; at += stride) {
    const uint8_t *run = symbols + at;
    const int64_t in_run = n - at < TX_COUNT_RUN ? n - at : TX_COUNT_RUN;
    int64_t i = 0;
    for (; i + 8 <= in_run; i += 8) {
      uint64_t eight;
      memcpy(&eight, run + i, sizeof eight);
      for (int32_t k = 0; k < 8; k++)
        part[k & 3][eight >> (8 * k) & 0xff]++;
    }
    for (; i < in_run; i++)
      part[0][run[i]]++;
    seen += (uint32_t)in_run;
  }
  for (int32_t s = 0; s < 256; s++)
    counts[s] = part[0][s] + part[1][s] + part[2][s] + part[3][s];
  return seen;
}

static int tx_range_of_bytes_run(const uint8_t *restrict symbols, int64_t n, uint8_t *least, uint8_t *greatest) {
  uint8_t low = 255, high = 0, lowest = 255; /* low: the least symbol - 1 (255 for symbol 0) */
  for (int64_t i = 0; i < n; i++) {
    const uint8_t symbol = symbols[i], below = (uint8_t)(symbol - 1);
    low = below < low ? below : low;
    lowest = symbol < lowest ? symbol : lowest;
    high = symbol > high ? symbol : high;
  }
  *least = low == 255 ? 255 : (uint8_t)(low + 1);
  *greatest = high;
  return n > 0 && lowest == 0;
}

static inline void tx_planes_sum_part(uint32_t *lanes, const uint8_t *bytes) {
  uint32_t words[TX_PLANES_SUM_LANES];
  memcpy(words, bytes, sizeof words);
  for (int32_t i = 0; i < TX_PLANES_SUM_LANES; i++)
    lanes[i] = tx_planes_sum_word(lanes[i], words[i]);
}

static uint32_t tx_planes_sum_run(const uint8_t *bytes, int64_t n) {
  uint32_t lanes[TX_PLANES_SUM_LANES] = {0};
  uint8_t last[TX_PLANES_SUM_BYTES] = {0};
  const int64_t rest = n % TX_PLANES_SUM_BYTES;
  for (int64_t at = 0; at < n - rest; at += TX_PLANES_SUM_BYTES)
    tx_planes_sum_part(lanes, bytes + at);
  if (rest) {
    memcpy(last, bytes + n - rest, (size_t)rest);
    tx_planes_sum_part(lanes, last);
  }
  return tx_planes_sum_end(lanes, (uint64_t)n);
}

/* Encodes the symbols of one row. NULL if there may be no room for a row's words plus a vector. */
static uint8_t *tx_rans_encode_row(const tx_rans_encoder *encoder, uint32_t *states, const uint8_t *symbols, int64_t n,
                                   uint8_t *to, const uint8_t *limit) {
  if (limit - to < TX_RANS_ROW_BYTES) return NULL;
  for (int64_t i = 0; i < n; i++) {
    uint16_t word;
    const int leaves = tx_rans_put(encoder, symbols[i], &states[i], &word);
    memcpy(to, &word, sizeof word);
    to += leaves ? sizeof word : 0;
  }
  return to;
}

static uint8_t *tx_rans_encode_run(const tx_rans_encoder *encoder, uint32_t *states, const uint8_t *symbols, int64_t n,
                                   uint8_t *to, const uint8_t *limit) {
  int64_t rows = n / TX_RANS_LANES;
  const int64_t rest = n % TX_RANS_LANES;
  for (int32_t i = 0; i < TX_RANS_LANES; i++)
    states[i] = TX_RANS_LEAST;
  if (rest) to = tx_rans_encode_row(encoder, states, symbols + rows * TX_RANS_LANES, rest, to, limit);
#ifdef TX_RANS_VECTORS
  return to ? tx_rans_encode_rows(encoder, states, symbols, rows, to, limit) : NULL;
#else
  while (to && rows-- > 0)
    to = tx_rans_encode_row(encoder, states, symbols + rows * TX_RANS_LANES, TX_RANS_LANES, to, limit);
  return to;
#endif
}

/* Decodes a row. NULL if there are too few words. */
static const uint8_t *tx_rans_decode_row(const tx_rans_decoder *decoder, uint32_t *states, const uint8_t *begin,
                                         const uint8_t *at, int64_t n, uint8_t *symbols) {
  for (int64_t i = n; i-- > 0;) {
    symbols[i] = tx_rans_take(decoder, &states[i]);
    if (states[i] >= TX_RANS_LEAST) continue;
    uint16_t word;
    if (at - begin < (int64_t)sizeof word) return NULL;
    at -= sizeof word;
    memcpy(&word, at, sizeof word);
    states[i] = states[i] << 16 | word;
  }
  return at;
}

static int tx_rans_decode_run(const tx_rans_decoder *decoder, uint32_t *states, const uint8_t *begin,
                              const uint8_t *end, int64_t n, uint8_t *symbols) {
  int64_t done = 0;
#ifdef TX_RANS_VECTORS
  done = tx_rans_decode_rows(decoder, states, begin, &end, n / TX_RANS_LANES, symbols) * TX_RANS_LANES;
#endif
  for (; end && done < n; done += TX_RANS_LANES)
    end = tx_rans_decode_row(decoder, states, begin, end, n - done < TX_RANS_LANES ? n - done : TX_RANS_LANES,
                             symbols + done);
  int as_begun = end == begin;
  for (int32_t i = 0; i < TX_RANS_LANES; i++)
    as_begun &= states[i] == TX_RANS_LEAST;
  return as_begun;
}

#endif
