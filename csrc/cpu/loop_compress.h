/* Compresses bf16 elements into a message, and expands it. Included by kernels_isa.c only. */
#ifndef TX_CPU_LOOP_COMPRESS_H
#define TX_CPU_LOOP_COMPRESS_H

#include <string.h>

#include "csrc/cpu/kernels.h"
#include "csrc/math/compress_block.h"

static int64_t tx_compress_run(const void *values, const tx_compressed *to) {
  int64_t found = 0;
  for (int64_t b = 0; b < to->blocks; b++) {
    uint16_t block[TX_BLOCK];
    memcpy(block, (const char *)values + b * (int64_t)sizeof block, sizeof block);
    uint8_t count;
    const uint8_t top = tx_compress_block(block, to->low + b * TX_BLOCK, to->codes + b * (TX_BLOCK / 2), &count);
    to->tops[b] = top;
    to->counts[b] = count;
    if (count == 0) continue;
    if (count > to->most - found) return TX_COMPRESSED_NOT;
    for (int32_t i = 0; i < TX_BLOCK; i++) {
      const uint8_t exponent = (uint8_t)(block[i] >> 7);
      if (!tx_compressed_escapes(top, exponent)) continue;
      to->escapes[2 * found] = (uint8_t)i;
      to->escapes[2 * found + 1] = exponent;
      found++;
    }
  }
  return found;
}

static void tx_expand_run(const tx_compressed *from, void *values) {
  const uint8_t *escape = from->escapes;
  for (int64_t b = 0; b < from->blocks; b++) {
    uint16_t block[TX_BLOCK];
    const uint8_t *low = from->low + b * TX_BLOCK;
    tx_expand_block(from->tops[b], low, from->codes + b * (TX_BLOCK / 2), block);
    for (int32_t i = 0; i < from->counts[b]; i++, escape += 2)
      block[escape[0]] = tx_expanded(low[escape[0]], escape[1]);
    memcpy((char *)values + b * (int64_t)sizeof block, block, sizeof block);
  }
}

#endif
