/* The streams of a segment of a delta (TX_DELTA_SEGMENT weights of a run), as the loops write and read them. What a
 * segment looks like in bytes: csrc/core/delta_segment.h. */
#ifndef TX_CPU_DELTA_LOOPS_H
#define TX_CPU_DELTA_LOOPS_H

#include "csrc/core/delta_segment.h"
#include "csrc/cpu/element.h"
#include "csrc/math/delta_bits.h"
#include "csrc/math/delta_rungs.h"

#define TX_DELTA_WORDS (TX_DELTA_BLOCK / 64)
#define TX_DELTA_PAST 16 /* that lists are read and written past their ends */
#define TX_DELTA_LISTED (TX_DELTA_BLOCK + TX_DELTA_PAST)

/* A block on its way, in memory of its task. */
typedef struct tx_delta_block {
  uint64_t changed[TX_DELTA_WORDS], unsure[TX_DELTA_WORDS];          /* unsure: those among them that are in no class */
  uint64_t masks[TX_DELTA_CLASSES][TX_DELTA_WORDS];                  /* of each class */
  uint16_t before[TX_DELTA_CLASSES][TX_DELTA_WORDS + TX_DELTA_PAST]; /* how many of it are in the words before each */
  uint64_t packed[TX_DELTA_CLASSES][TX_DELTA_WORDS + 2];             /* which weights of each changed, or did not */
  uint16_t at[TX_DELTA_LISTED];                                      /* of those that changed */
  uint32_t now[TX_DELTA_LISTED];                                     /* what they are, of 16 bits */
  uint16_t class_of[TX_DELTA_LISTED];                                /* TX_DELTA_CLASSES: unsure */
  uint16_t listed[TX_DELTA_CLASSES + 1][TX_DELTA_LISTED];            /* of those that changed, in each class */
} tx_delta_block;

/* Memory that is read after this block. A core waits for what it reads at once, and reads one line after the other
 * while it codes. */
typedef struct tx_delta_ahead {
  const char *at, *end;
} tx_delta_ahead;

TX_FN void tx_delta_fetch(tx_delta_ahead *a) {
  if (a->at >= a->end) return;
  __builtin_prefetch(a->at, 0, 2);
  a->at += 64;
}

/* Positions are gaps between those that changed, across the edges of blocks. */
typedef struct tx_delta_stream {
  tx_bit_writer writer;
  tx_rice rice;
  uint32_t left; /* passed since the last one */
} tx_delta_stream;

typedef struct tx_delta_source {
  tx_bit_reader reader;
  tx_rice rice;
  uint32_t left; /* to be passed before the next one */
} tx_delta_source;

/* A segment to be encoded. Pointers are to its first weight. */
typedef struct tx_delta_encoder {
  const void *weights;
  const uint8_t *changed;
  const void *moved; /* NULL unless TX_DELTA_BOUNDED; finite where something changed in blocks that are not dense */
  const uint8_t *distances; /* NULL unless TX_DELTA_EXACT */
  int64_t n;
  int64_t at;       /* in the run */
  uint64_t touched; /* added to */
  tx_dtype dtype;
  uint32_t flags;                                  /* tx_delta_flags */
  uint32_t dense;                                  /* bit b: block b is passed over */
  int32_t bound;                                   /* of the block before */
  tx_delta_stream positions[TX_DELTA_CLASSES + 1]; /* the last: of the unsure ones */
  tx_bit_writer bounds, values;
  tx_rice far[TX_DELTA_CLASSES + 1]; /* of distances, in each class */
  const tx_delta_rungs *rungs;
  tx_delta_block *block;
  int64_t ahead; /* weights to those that this thread encodes next; 0: none */
} tx_delta_encoder;

typedef struct tx_delta_decoder {
  tx_dtype dtype;
  uint32_t flags;
  uint32_t dense;
  int32_t bound;
  tx_delta_source positions[TX_DELTA_CLASSES + 1];
  tx_bit_reader bounds, values;
  tx_rice far[TX_DELTA_CLASSES + 1];
  const tx_delta_rungs *rungs; /* of the dtype and TX_DELTA_RETURNS */
  tx_delta_block *block;
  int64_t at;       /* of the next block, in the run: the caller's */
  uint64_t touched; /* added to */
} tx_delta_decoder;

/* What changes in a block: space for `room` weights. */
typedef struct tx_delta_changes {
  uint16_t *at;
  uint32_t *weight;
  int64_t room;
} tx_delta_changes;

typedef void (*tx_delta_encode_loop)(tx_delta_encoder *encoder);

/* The next block, of n weights; dense ones are the caller's. held: NULL, or a byte of each weight: 0 where the receiver
 * does not have it (and the flags have TX_DELTA_SLICEABLE). Returns how many of those that are held change; -1: more
 * than there is room. Any bytes decode to something. */
typedef int32_t (*tx_delta_decode_loop)(tx_delta_decoder *decoder, const void *old, const uint8_t *held, int64_t n,
                                        tx_delta_changes changes);

/* n fp32 masters to what their weights of 16 bits are: nearest, ties to even. */
typedef void (*tx_delta_round_loop)(const void *masters, int64_t n, void *rounded, tx_dtype dtype);

/* Of two rows of n <= TX_TILE weights of 16 bits a bit for each TX_BLOCK in which a weight is another one. NaNs are
 * alike, and so are zeros. */
typedef uint32_t (*tx_delta_differ_loop)(const void *weights, const void *others, int64_t n, tx_dtype dtype);

/* How many of n bits are set. */
typedef int64_t (*tx_delta_ones_loop)(const uint8_t *bits, int64_t n);

/* n bits, the rest of the last word 0. */
TX_FN void tx_delta_load_bits(const uint8_t *from, int64_t n, uint64_t to[TX_DELTA_WORDS]) {
  to[n > 0 ? (n - 1) / 64 : 0] = 0;
  memcpy(to, from, (size_t)((n + 7) / 8));
  if (n % 64) to[n / 64] &= (UINT64_C(1) << (n % 64)) - 1u;
}

#endif
