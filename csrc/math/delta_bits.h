/* Bits of a delta: the least significant of a byte first. Numbers go in Rice codes (a quotient in unary, a remainder of
 * r bits) whose r follows the mean of the last ones, so that nothing needs to be said about it. */
#ifndef TX_MATH_DELTA_BITS_H
#define TX_MATH_DELTA_BITS_H

#include <string.h>

#include "csrc/math/numeric.h"

typedef struct tx_bit_writer {
  uint8_t *at;
  uint64_t bits;
  int32_t n; /* in bits, < 8 between calls */
} tx_bit_writer;

/* n <= 56, value < 2^n. There is space for 8 bytes. */
TX_FN void tx_put_bits(tx_bit_writer *w, uint64_t value, int32_t n) {
  w->bits |= value << w->n;
  w->n += n;
  memcpy(w->at, &w->bits, sizeof w->bits);
  const int32_t whole = w->n >> 3;
  w->at += whole;
  w->bits = whole == 8 ? 0 : w->bits >> (8 * whole);
  w->n &= 7;
}
/* The end of what was written, the last byte filled with zeros. */
TX_FN uint8_t *tx_bits_end(const tx_bit_writer *w) {
  return w->at + (w->n > 0);
}

/* What is read past the end is 0. */
typedef struct tx_bit_reader {
  const uint8_t *data;
  uint64_t bytes;
  uint64_t at; /* in bits */
} tx_bit_reader;

/* 57 bits and more of what comes next. */
TX_FN uint64_t tx_peek_bits(const tx_bit_reader *r) {
  const uint64_t byte = r->at >> 3;
  uint64_t bits = 0;
  if (byte + 8 <= r->bytes) {
    memcpy(&bits, r->data + byte, sizeof bits);
  } else if (byte < r->bytes) {
    memcpy(&bits, r->data + byte, r->bytes - byte);
  }
  return bits >> (r->at & 7);
}
TX_FN uint64_t tx_take_bits(tx_bit_reader *r, int32_t n) {
  const uint64_t bits = tx_peek_bits(r) & ((UINT64_C(1) << n) - 1u);
  r->at += (uint64_t)n;
  return bits;
}

/* A quotient that would be longer stands for a number of TX_RICE_RAW bits as it is. */
#define TX_RICE_LONGEST 24
#define TX_RICE_RAW 20

TX_FN void tx_put_rice(tx_bit_writer *w, uint32_t value, int32_t r) {
  const uint32_t quotient = value >> r;
  if (quotient < TX_RICE_LONGEST) {
    const uint64_t rest = value & ((1u << r) - 1u);
    tx_put_bits(w, ((UINT64_C(1) << quotient) - 1u) | rest << (quotient + 1), (int32_t)quotient + 1 + r);
  } else {
    tx_put_bits(w, (UINT64_C(1) << TX_RICE_LONGEST) - 1u, TX_RICE_LONGEST);
    tx_put_bits(w, value, TX_RICE_RAW);
  }
}
TX_FN uint32_t tx_take_rice(tx_bit_reader *reader, int32_t r) {
  const uint64_t next = tx_peek_bits(reader);
  const uint32_t quotient = (uint32_t)__builtin_ctzll(~next | UINT64_C(1) << TX_RICE_LONGEST);
  const int32_t skipped = (int32_t)quotient + (quotient < TX_RICE_LONGEST);
  const int32_t n = quotient < TX_RICE_LONGEST ? r : TX_RICE_RAW;
  const uint32_t rest = (uint32_t)(next >> skipped & ((UINT64_C(1) << n) - 1u));
  reader->at += (uint64_t)(skipped + n);
  return quotient < TX_RICE_LONGEST ? quotient << r | rest : rest;
}

/* What Rice codes follow. The mean is renewed after every TX_RICE_GROUP numbers, not after each: the next number could
 * not be looked at before. */
#define TX_RICE_GROUP 8
typedef struct tx_rice {
  uint32_t mean; /* 32 times that of the last numbers, which are < 2^TX_RICE_RAW */
  uint32_t sum;  /* of the numbers since */
  int32_t left;  /* until it is renewed */
  int32_t r;
} tx_rice;

/* The best r for a geometric distribution: the length of 0.4812 * mean in bits (Kiely 2004). */
TX_FN int32_t tx_rice_of(uint32_t mean) {
  const uint32_t t = (uint32_t)((uint64_t)(mean + 16u) * 123u >> 13);
  const int32_t length = t ? 32 - __builtin_clz(t) : 0;
  return length < 18 ? length : 18;
}
TX_FN tx_rice tx_rice_begin(uint32_t mean) {
  return (tx_rice){mean, 0, TX_RICE_GROUP, tx_rice_of(mean)};
}
TX_FN void tx_rice_follow(tx_rice *s, uint32_t value) {
  s->sum += value;
  if (--s->left) return;
  s->mean += s->sum - s->mean / (32 / TX_RICE_GROUP);
  *s = tx_rice_begin(s->mean);
}

TX_FN void tx_rice_put(tx_bit_writer *w, tx_rice *s, uint32_t value) {
  tx_put_rice(w, value, s->r);
  tx_rice_follow(s, value);
}
TX_FN uint32_t tx_rice_take(tx_bit_reader *reader, tx_rice *s) {
  const uint32_t value = tx_take_rice(reader, s->r);
  tx_rice_follow(s, value);
  return value;
}

#endif
