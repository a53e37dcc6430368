/* One block of a message of planes. For each plane, the most significant first, it has a byte that says how it is
 * stored, and then one of: all of its bytes; the one byte that all of them are; or the frequencies of its symbols, the
 * length of the words, the words, and the states. Frequencies are one bit per possible symbol, which says whether it
 * occurs, then one byte for each that does, or two if the frequency has more than 7 bits. */
#ifndef TX_OPS_PLANES_BLOCK_H
#define TX_OPS_PLANES_BLOCK_H

#include "csrc/cpu/coding_kernels.h"
#include "csrc/ops/planes_layout.h"

/* Workspace for coding a block; allocated with malloc. */
typedef struct tx_planes_work {
  uint8_t planes[TX_PLANES_MOST][TX_PLANES_BLOCK];
  uint8_t values[TX_PLANES_MOST * TX_PLANES_BLOCK]; /* of a block of which only some values are wanted */
  tx_rans_encoder encoder;
  tx_rans_decoder decoder;
} tx_planes_work;

/* Encodes n values; returns the end of the block. */
uint8_t *tx_planes_put(tx_planes_work *work, const void *values, int64_t n, int64_t width, int rotate, uint8_t *to);

/* Decodes a block; returns 0 if these bytes are not a block of n values. Reads nothing outside of them. */
int tx_planes_get(tx_planes_work *work, const uint8_t *from, int64_t bytes, int64_t n, int64_t width, int rotate,
                  void *values);

#endif
