/* Lossless compression of bf16 elements to three quarters of their bytes.
 *
 * Neighbouring gradients or weights have similar magnitudes. So a block of TX_BLOCK elements stores the largest of its
 * 8-bit exponents (`top`), and for each element 12 bits: sign and mantissa (8 bits, `low`), and how far its exponent is
 * below the top (4 bits, a code). Codes 0 ... 14 are that distance; 15 is an exponent of 0 (zeros and subnormals). Any
 * other element is an escape of two more bytes: its place in the block and its exponent. Of normally distributed
 * numbers of one scale, one in 10^4 is an escape. */
#ifndef TX_MATH_COMPRESS_BLOCK_H
#define TX_MATH_COMPRESS_BLOCK_H

#include "csrc/math/numeric.h"
#include "csrc/torch_ext.h"

#define TX_FAR 15 /* the code of an exponent of 0; also of an escape, until its own exponent is filled in */

TX_FN int tx_compressed_escapes(uint8_t top, uint8_t exponent) {
  return exponent != 0 && top - exponent >= TX_FAR;
}

/* Compresses a block. Returns its top; *count: how many escapes it has. */
TX_FN uint8_t tx_compress_block(const uint16_t *restrict from, uint8_t *restrict low, uint8_t *restrict codes,
                                uint8_t *count) {
  uint8_t exponents[TX_BLOCK], far[TX_BLOCK];
  uint8_t top = 0, escapes = 0;
  for (int32_t i = 0; i < TX_BLOCK; i++) {
    exponents[i] = (uint8_t)(from[i] >> 7);
    low[i] = (uint8_t)((from[i] >> 8 & 0x80) | (from[i] & 0x7f));
  }
  for (int32_t i = 0; i < TX_BLOCK; i++)
    top = exponents[i] > top ? exponents[i] : top;
  for (int32_t i = 0; i < TX_BLOCK; i++) {
    const uint8_t below = (uint8_t)(top - exponents[i]);
    far[i] = below < TX_FAR ? below : TX_FAR;
    escapes = (uint8_t)(escapes + ((below >= TX_FAR) & (exponents[i] != 0)));
  }
  for (int32_t i = 0; i < TX_BLOCK / 2; i++)
    codes[i] = (uint8_t)(far[i] | far[i + TX_BLOCK / 2] << 4);
  *count = escapes;
  return top;
}

TX_FN uint8_t tx_expanded_exponent(uint8_t top, int32_t code) {
  return code == TX_FAR ? 0 : (uint8_t)(top - code);
}

TX_FN uint16_t tx_expanded(uint8_t low, uint8_t exponent) {
  return (uint16_t)((low & 0x80) << 8 | exponent << 7 | (low & 0x7f));
}

/* Expands a block. The exponents of escapes are 0 afterwards and have to be filled in. */
TX_FN void tx_expand_block(uint8_t top, const uint8_t *restrict low, const uint8_t *restrict codes,
                           uint16_t *restrict to) {
  uint8_t exponents[TX_BLOCK];
  for (int32_t i = 0; i < TX_BLOCK / 2; i++) {
    exponents[i] = tx_expanded_exponent(top, codes[i] & 0xf);
    exponents[i + TX_BLOCK / 2] = tx_expanded_exponent(top, codes[i] >> 4);
  }
  for (int32_t i = 0; i < TX_BLOCK; i++)
    to[i] = tx_expanded(low[i], exponents[i]);
}

#endif
