/* Bit streams of a delta, least significant bit of a byte first, and adaptive Rice codes in them. A Rice code is a
 * quotient in unary and a remainder of r bits; r follows the mean of the latest numbers on both sides, so it is never
 * sent. */
#ifndef TX_MATH_DELTA_BITS_H
#define TX_MATH_DELTA_BITS_H

#include <string.h>

#include "csrc/math/numeric.h"

typedef struct tx_bit_writer {
  uint8_t *at;
  uint64_t bits;
  int32_t n; /* valid bits in `bits`, < 8 between calls */
} tx_bit_writer;

/* n <= 56, value < 2^n. Writes 8 bytes at w->at, whatever n. */
TX_FN void tx_put_bits(tx_bit_writer *w, uint64_t value, int32_t n) {
  w->bits |= value << w->n;
  w->n += n;
  memcpy(w->at, &w->bits, sizeof w->bits);
  const int32_t whole = w->n >> 3;
  w->at += whole;
  w->bits >>= 8 * whole;
  w->n &= 7;
}
/* The end of the written bytes, the last one filled up with zeros. */
TX_FN uint8_t *tx_bits_end(const tx_bit_writer *w) {
  return w->at + (w->n > 0);
}

/* Reads bits; past the end of the data they are 0. */
typedef struct tx_bit_reader {
  const uint8_t *data;
  uint64_t bytes;
  uint64_t at; /* position, in bits */
} tx_bit_reader;

/* The next 57 bits at least. */
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

/* A reader that keeps the next bits in a register, so that consecutive reads do not wait for loads. */
typedef struct tx_bit_window {
  const uint8_t *data;
  uint64_t bytes;
  uint64_t byte; /* index of the next byte to load */
  uint64_t bits; /* the next n bits; above them, 0 or bits that follow these in the data */
  int32_t n;
} tx_bit_window;

/* Loads until at least 56 bits are valid. */
TX_FN void tx_window_fill(tx_bit_window *w) {
  uint64_t next = 0;
  if (w->byte + 8 <= w->bytes) {
    memcpy(&next, w->data + w->byte, sizeof next);
  } else if (w->byte < w->bytes) {
    memcpy(&next, w->data + w->byte, w->bytes - w->byte);
  }
  w->bits |= next << w->n;
  w->byte += (uint64_t)(63 - w->n) >> 3;
  w->n |= 56;
}
TX_FN void tx_window_drop(tx_bit_window *w, int32_t n) {
  w->bits >>= n;
  w->n -= n;
}
TX_FN tx_bit_window tx_window_of(const tx_bit_reader *r) {
  tx_bit_window w = {r->data, r->bytes, r->at >> 3, 0, 0};
  tx_window_fill(&w);
  tx_window_drop(&w, (int32_t)(r->at & 7));
  return w;
}
TX_FN tx_bit_reader tx_window_end(const tx_bit_window *w) {
  return (tx_bit_reader){w->data, w->bytes, 8 * w->byte - (uint64_t)w->n};
}

/* A unary quotient of TX_RICE_LONGEST ones is an escape: the number follows as TX_RICE_RAW plain bits. */
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
/* The number at the start of `next`; *bits: the length of its code. */
TX_FN uint32_t tx_rice_in(uint64_t next, int32_t r, int32_t *bits) {
  const uint32_t quotient = (uint32_t)__builtin_ctzll(~next | UINT64_C(1) << TX_RICE_LONGEST);
  if (__builtin_expect(quotient == TX_RICE_LONGEST, 0)) {
    *bits = TX_RICE_LONGEST + TX_RICE_RAW;
    return (uint32_t)(next >> TX_RICE_LONGEST & ((UINT64_C(1) << TX_RICE_RAW) - 1u));
  }
  *bits = (int32_t)quotient + 1 + r;
  return quotient << r | (uint32_t)(next >> 1 >> quotient & ((UINT64_C(1) << r) - 1u));
}
TX_FN uint32_t tx_take_rice(tx_bit_reader *reader, int32_t r) {
  int32_t bits;
  const uint32_t value = tx_rice_in(tx_peek_bits(reader), r, &bits);
  reader->at += (uint64_t)bits;
  return value;
}

/* The adaptive state of Rice codes. The mean is updated after every TX_RICE_GROUP numbers instead of after each, so
 * that decoding a number need not wait for the one before. */
#define TX_RICE_GROUP 8
typedef struct tx_rice {
  uint32_t mean; /* 32 times the running mean of the numbers, which are < 2^TX_RICE_RAW */
  uint32_t sum;  /* of the numbers since the last update */
  int32_t left;  /* numbers until the next update */
  int32_t r;
} tx_rice;

/* The best r for a geometric distribution: the bit length of 0.4812 * mean (Kiely 2004). mean: 32 times the mean. */
TX_FN int32_t tx_rice_of(uint32_t mean) {
  const uint32_t t = (uint32_t)((uint64_t)(mean + 16u) * 123u >> 13);
  const int32_t length = t ? 32 - __builtin_clz(t) : 0;
  return length < 18 ? length : 18;
}
TX_FN tx_rice tx_rice_begin(uint32_t mean) {
  return (tx_rice){mean, 0, TX_RICE_GROUP, tx_rice_of(mean)};
}
TX_FN tx_rice tx_rice_renewed(tx_rice s) {
  return tx_rice_begin(s.mean + s.sum - s.mean / (32 / TX_RICE_GROUP));
}
TX_FN void tx_rice_follow(tx_rice *s, uint32_t value) {
  s->sum += value;
  if (--s->left == 0) *s = tx_rice_renewed(*s);
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
TX_FN uint32_t tx_rice_take_from(tx_bit_window *window, tx_rice *s) {
  int32_t bits;
  tx_window_fill(window);
  const uint32_t value = tx_rice_in(window->bits, s->r, &bits);
  tx_window_drop(window, bits);
  tx_rice_follow(s, value);
  return value;
}

#endif
