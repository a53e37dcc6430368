/* The layout of a compressed message. The meaning of its fields is in csrc/math/compress_block.h. */
#ifndef TX_CORE_COMPRESSED_H
#define TX_CORE_COMPRESSED_H

#include "csrc/torch_ext.h"

/* A message in memory: the number of escapes (int64), then the arrays below in this order. There are `blocks` entries
 * of each array, and room for `most` escapes. */
typedef struct tx_compressed {
  int64_t blocks, most;
  uint8_t *tops, *counts; /* per block: its greatest exponent, its number of escapes */
  uint8_t *low;           /* per block TX_BLOCK bytes: sign and significand */
  uint8_t *codes;   /* per block TX_BLOCK / 2 bytes: byte i has element i in its lower half, element i + TX_BLOCK / 2 in
                       its upper half */
  uint8_t *escapes; /* two bytes each, in the order of elements */
} tx_compressed;

/* Stands in place of the number of escapes if elements are sent uncompressed. */
#define TX_COMPRESSED_NOT ((int64_t)-1)

static inline int64_t tx_compressed_most(int64_t blocks) {
  return blocks / 4 + 16;
}

/* The byte at which the escapes begin. */
static inline int64_t tx_compressed_fixed(int64_t blocks) {
  return (int64_t)sizeof(int64_t) + blocks * (2 + TX_BLOCK + TX_BLOCK / 2);
}

static inline tx_compressed tx_compressed_at(void *message, int64_t blocks) {
  uint8_t *tops = (uint8_t *)message + sizeof(int64_t);
  return (tx_compressed){.blocks = blocks,
                         .most = tx_compressed_most(blocks),
                         .tops = tops,
                         .counts = tops + blocks,
                         .low = tops + 2 * blocks,
                         .codes = tops + (2 + TX_BLOCK) * blocks,
                         .escapes = (uint8_t *)message + tx_compressed_fixed(blocks)};
}

#endif
