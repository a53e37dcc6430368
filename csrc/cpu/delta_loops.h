/* The data structures of the loops that encode and decode a segment of a delta (TX_DELTA_SEGMENT weights of a run). The
 * bytes of a segment are described in csrc/core/delta_segment.h. */
#ifndef TX_CPU_DELTA_LOOPS_H
#define TX_CPU_DELTA_LOOPS_H

#include "csrc/core/delta_segment.h"
#include "csrc/cpu/element.h"
#include "csrc/math/delta_bits.h"
#include "csrc/math/delta_rungs.h"

#define TX_DELTA_WORDS (TX_DELTA_BLOCK / 64)
#define TX_DELTA_PAST 16 /* how far lists may be read and written past their ends */
#define TX_DELTA_LISTED (TX_DELTA_BLOCK + TX_DELTA_PAST)

/* The working memory for a block, owned by its task. A weight is "unsure" if it is in no class (Note [Classes]). */
typedef struct tx_delta_block {
  uint64_t changed[TX_DELTA_WORDS], unsure[TX_DELTA_WORDS];          /* of changed weights; of unsure ones among them */
  uint64_t masks[TX_DELTA_CLASSES][TX_DELTA_WORDS];                  /* bits of the weights of each class */
  uint16_t before[TX_DELTA_CLASSES][TX_DELTA_WORDS + TX_DELTA_PAST]; /* bits of the mask before each word */
  uint64_t packed[TX_DELTA_CLASSES][TX_DELTA_WORDS + 2];             /* changed (or not) by place (Note [Places]) */
  uint16_t at[TX_DELTA_LISTED];                                      /* positions of the changed weights */
  uint32_t now[TX_DELTA_LISTED];                                     /* their new values, if 16-bit */
  uint16_t class_of[TX_DELTA_LISTED];                                /* their classes; TX_DELTA_CLASSES: unsure */
  uint16_t listed[TX_DELTA_CLASSES + 1][TX_DELTA_LISTED];            /* of changed weights by class; last: unsure */
} tx_delta_block;

/* Memory that is read after this block, prefetched line by line while the block is coded: requested all at once, a core
 * would wait for it. */
typedef struct tx_delta_ahead {
  const char *at, *end;
} tx_delta_ahead;

TX_FN void tx_delta_fetch(tx_delta_ahead *a) {
  if (a->at >= a->end) return;
  __builtin_prefetch(a->at, 0, 2);
  a->at += 64;
}

/* A stream of positions to be written. Positions are gaps between those of the same class, across the edges of
 * blocks. */
typedef struct tx_delta_stream {
  tx_bit_writer writer;
  tx_rice rice;
  uint32_t left; /* places passed since the last position */
} tx_delta_stream;

typedef struct tx_delta_source {
  tx_bit_reader reader;
  tx_rice rice;
  uint32_t left; /* places left before the next position */
} tx_delta_source;

/* A segment to be encoded. Pointers are to its first weight's data. */
typedef struct tx_delta_encoder {
  const void *weights;
  const uint8_t *changed;
  const void *moved;        /* NULL unless TX_DELTA_BOUNDED; finite for changed weights in blocks that are not dense */
  const uint8_t *distances; /* NULL unless TX_DELTA_EXACT */
  int64_t n;
  int64_t at;       /* in the run */
  uint64_t touched; /* the sum of tx_delta_touch, added to */
  tx_dtype dtype;
  uint32_t flags;                                  /* tx_delta_flags */
  uint32_t dense;                                  /* bit b: block b is dense and left out here */
  int32_t bound;                                   /* of the block before */
  tx_delta_stream positions[TX_DELTA_CLASSES + 1]; /* the last one is of unsure weights */
  tx_bit_writer bounds, values;
  tx_rice far[TX_DELTA_CLASSES + 1]; /* Rice state of distances, by class */
  const tx_delta_rungs *rungs;
  tx_delta_block *block;
  int64_t ahead; /* offset, in weights, of what this thread encodes next; 0: nothing */
} tx_delta_encoder;

typedef struct tx_delta_decoder {
  tx_dtype dtype;
  uint32_t flags;
  uint32_t dense;
  int32_t bound;
  tx_delta_source positions[TX_DELTA_CLASSES + 1];
  tx_bit_reader bounds, values;
  tx_rice far[TX_DELTA_CLASSES + 1];
  const tx_delta_rungs *rungs; /* for the dtype and TX_DELTA_RETURNS */
  tx_delta_block *block;
  int64_t at;       /* of the next block, in the run; set by the caller */
  uint64_t touched; /* the sum of tx_delta_touch, added to */
} tx_delta_decoder;

/* The changed weights of a block: positions and new values, with space for `room`. */
typedef struct tx_delta_changes {
  uint16_t *at;
  uint32_t *weight;
  int64_t room;
} tx_delta_changes;

typedef void (*tx_delta_encode_loop)(tx_delta_encoder *encoder);

/* Decodes the next block, of n weights; dense blocks are left to the caller. held: NULL, or a byte for each weight, 0
 * if the receiver does not have it (the flags have TX_DELTA_SLICEABLE then). Returns how many held weights change; -1
 * if there is no room for them. Any bytes decode to something. */
typedef int32_t (*tx_delta_decode_loop)(tx_delta_decoder *decoder, const void *old, const uint8_t *held, int64_t n,
                                        tx_delta_changes changes);

/* Rounds n fp32 masters to their 16-bit weights: nearest, ties to even. */
typedef void (*tx_delta_round_loop)(const void *masters, int64_t n, void *rounded, tx_dtype dtype);

/* Compares two rows of n <= TX_TILE 16-bit weights. Bit b of the result is set if a weight of the b-th TX_BLOCK
 * differs. All NaNs are equal, and so are +0 and -0. */
typedef uint32_t (*tx_delta_differ_loop)(const void *weights, const void *others, int64_t n, tx_dtype dtype);

/* The number of set bits of n. */
typedef int64_t (*tx_delta_ones_loop)(const uint8_t *bits, int64_t n);

/* Loads n bits; the rest of the last word becomes 0. */
TX_FN void tx_delta_load_bits(const uint8_t *from, int64_t n, uint64_t to[TX_DELTA_WORDS]) {
  to[n > 0 ? (n - 1) / 64 : 0] = 0;
  memcpy(to, from, (size_t)((n + 7) / 8));
  if (n % 64) to[n / 64] &= (UINT64_C(1) << (n % 64)) - 1u;
}

#endif
