/* The segments of a delta's run. A segment has TX_DELTA_SEGMENT weights, in blocks of TX_DELTA_BLOCK, and is coded by
 * itself. Its bytes (numbers are varints unless a size is given):
 *
 *   flags              2 bytes, tx_delta_flags
 *   changed            number of changed weights in the blocks that are not dense, from which the means of gaps start;
 *                      the real number is not larger
 *   dense              if TX_DELTA_DENSE: 2 bytes, bit b is set if block b is dense; then the number of bytes of
 *                      `weights`, below
 *   bound              if TX_DELTA_BOUNDED: 2 bytes, the code of the first block's bound
 *   sizes              number of bytes of each stream below
 *   streams            positions of each class; positions of the unsure ones (if there are several classes); bounds
 *                      (if TX_DELTA_BOUNDED); values
 *   weights            of the dense blocks, as tx_planes_encode encodes them
 *
 * A segment in which nothing changed has no bytes. */
#ifndef TX_CORE_DELTA_SEGMENT_H
#define TX_CORE_DELTA_SEGMENT_H

#include <stdint.h>

#include "csrc/torch_ext.h"

#define TX_DELTA_BLOCK 8192
#define TX_DELTA_BLOCKS 16 /* blocks per segment */
#define TX_DELTA_SEGMENT (TX_DELTA_BLOCK * TX_DELTA_BLOCKS)
#define TX_DELTA_CLASSES 4

typedef enum tx_delta_flags {
  TX_DELTA_CLASSES_LOG = 3,  /* logarithm of the number of classes: 0, 1, 2 */
  TX_DELTA_GRAIN = 3 << 2,   /* weights per bound: 0: TX_DELTA_BLOCK, 1: 1024, 2: 128 */
  TX_DELTA_EXACT = 1 << 4,   /* values are distances */
  TX_DELTA_BOUNDED = 1 << 5, /* there are bounds */
  TX_DELTA_SLICEABLE = 1 << 6,
  TX_DELTA_DENSE = 1 << 7,
  TX_DELTA_RETURNS = 1 << 8, /* several steps: a changed weight may have its old value again */
  TX_DELTA_FLIPPED = 1 << 9, /* this and the next bits, one per class: positions are of unchanged weights */
  TX_DELTA_ALL_FLAGS = (TX_DELTA_FLIPPED << TX_DELTA_CLASSES) - 1
} tx_delta_flags;

static inline int32_t tx_delta_classes(uint32_t flags) {
  return 1 << (flags & TX_DELTA_CLASSES_LOG);
}
static inline int64_t tx_delta_grain(uint32_t flags) {
  const uint32_t grain = (flags & TX_DELTA_GRAIN) >> 2;
  return grain == 0 ? TX_DELTA_BLOCK : grain == 1 ? 1024 : 128;
}
/* Whether there is stream c of positions; c == TX_DELTA_CLASSES: the positions of the unsure ones. */
static inline int tx_delta_has_stream(uint32_t flags, int32_t c) {
  return c == TX_DELTA_CLASSES ? tx_delta_classes(flags) > 1 : c < tx_delta_classes(flags);
}

/* The streams in order: positions 0 ... TX_DELTA_CLASSES, then these. */
#define TX_DELTA_BOUNDS (TX_DELTA_CLASSES + 1)
#define TX_DELTA_VALUES (TX_DELTA_CLASSES + 2)
#define TX_DELTA_STREAMS (TX_DELTA_CLASSES + 3)

/* A segment that was read. Pointers are into the message. */
typedef struct tx_delta_segment {
  uint32_t flags;
  uint32_t dense; /* bit b: block b is dense */
  int32_t bound;
  int64_t changed; /* in the blocks that are not dense */
  struct {
    const uint8_t *data;
    int64_t bytes;
  } streams[TX_DELTA_STREAMS], weights;
} tx_delta_segment;

/* Reads a segment of `numel` weights of this dtype. Returns 0 if the bytes are not one. The content of streams is not
 * checked. */
int tx_delta_segment_read(const uint8_t *bytes, int64_t n, int64_t numel, tx_dtype dtype, tx_delta_segment *segment);

/* Number of weights in the dense blocks of a segment of `numel` weights. */
int64_t tx_delta_dense_numel(uint32_t dense, int64_t numel);

static inline int tx_delta_is_flipped(uint32_t flags, int32_t c) {
  return (flags & (uint32_t)TX_DELTA_FLIPPED << c) != 0;
}

/* The initial mean of the gaps of stream s, times 32, for a segment of `numel` weights. About one of 16 positions is
 * unsure. */
static inline uint32_t tx_delta_first_mean(int32_t s, int64_t numel, int64_t changed) {
  const int64_t gap = numel / (changed > 0 ? changed : 1), most = 1 << 20;
  return (uint32_t)(32 * (s != TX_DELTA_CLASSES ? gap : 16 * gap < most ? 16 * gap : most));
}

/* The summand of one weight in the sum over touched weights: weight `at` of the run, whose new bits are `bits`. */
static inline uint64_t tx_delta_touch(int64_t at, uint32_t bits) {
  uint64_t x = (uint64_t)at * UINT64_C(0x9e3779b97f4a7c15) ^ (uint64_t)bits * UINT64_C(0xc2b2ae3d27d4eb4f);
  x = (x ^ x >> 32) * UINT64_C(0xd6e8feb86659fd93);
  return x ^ x >> 32;
}

#endif
