/* What a compressed message consists of; what it means: csrc/math/compress_block.h. */
#ifndef TX_CORE_COMPRESSED_H
#define TX_CORE_COMPRESSED_H

#include "csrc/torch_ext.h"

/* A message in memory: `blocks` of each but escapes, of which there is space for `most`. One after the other, behind
 * the number of escapes (int64), in this order. */
typedef struct tx_compressed {
  int64_t blocks, most;
  uint8_t *tops, *counts; /* of a block: its greatest exponent, its number of escapes */
  uint8_t *low;           /* of a block TX_BLOCK bytes: sign and significand */
  uint8_t *codes;         /* of a block TX_BLOCK / 2 bytes: element i in the lower half of byte i, the other half of the
                             block in the upper */
  uint8_t *escapes;       /* two bytes each, in the order of elements */
} tx_compressed;

/* What stands for their number where elements are sent as they are. */
#define TX_COMPRESSED_NOT ((int64_t)-1)

static inline int64_t tx_compressed_most(int64_t blocks) {
  return blocks / 4 + 16;
}

/* Where escapes begin: everything before them. */
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
