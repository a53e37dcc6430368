/* Codes of 8-bit blocks of 128 elements, four per 32-bit lane, for every step on 8-bit moments. Included by
 * block_moments.h. */
#ifndef TX_CPU_BLOCK_CODES_H
#define TX_CPU_BLOCK_CODES_H

#include "csrc/cpu/lanes.h"
#include "csrc/math/block_scale.h"
#include "csrc/math/dither.h"

#define TX_QUADS (TX_BLOCK / 4)

/* A block's unrounded moment; element 4 * w + k is at [k][w]. */
typedef struct tx_quads {
  float x[4][TX_QUADS];
} tx_quads;

/* tx_dithered(0, 4 * w). */
#define TX_RAMP_(w) (w) * (4 * TX_LATTICE_ELEMENT)
#define TX_RAMP_4_(w) TX_RAMP_(w), TX_RAMP_(w + 1), TX_RAMP_(w + 2), TX_RAMP_(w + 3)
#define TX_RAMP_16_(w) TX_RAMP_4_(w), TX_RAMP_4_(w + 4), TX_RAMP_4_(w + 8), TX_RAMP_4_(w + 12)
static const uint32_t tx_quad_ramp[TX_QUADS] = {TX_RAMP_16_(0u), TX_RAMP_16_(16u)};
#undef TX_RAMP_
#undef TX_RAMP_4_
#undef TX_RAMP_16_

/* Adds element k's code, in its byte, to a word that has the codes of the elements before it. */
TX_FN uint32_t tx_quad_code(tx_block_format f, tx_block_plan plan, float x, uint32_t u, uint32_t word, const int k) {
  const int s = 23 - f.element.mantissa_bits;
  const uint32_t sizes = (f.sign_bit != 0u ? 0x7fu : 0xffu) << (8 * k);
  const uint32_t code = tx_shifted(tx_block_round(f, plan, x, u), 8 * k - s) & sizes;
  const uint32_t sign = tx_shifted(tx_bits_from_f32(x), 8 * k - 24) & (f.sign_bit << (8 * k));
  return f.sign_bit != 0u ? word | code | sign : word | code;
}

/* The codes of a block, rounded by thresholds; u: of the first element. */
TX_FN void tx_encode_quads(tx_block_format f, tx_block_plan plan, const tx_quads *from, uint32_t u, void *to) {
  for (int32_t w = 0; w < TX_QUADS; w++) {
    uint32_t word = 0;
    for (int k = 0; k < 4; k++)
      word = tx_quad_code(f, plan, from->x[k][w], u + tx_quad_ramp[w] + (uint32_t)k * TX_LATTICE_ELEMENT, word, k);
    tx_put_word(to, w, word);
  }
}

/* Doubles the codes of a block in place; rare. */
TX_FN void tx_double_quads(tx_block_format f, void *to) {
  const uint32_t one = 1u << f.element.mantissa_bits;
  uint8_t *codes = to;
  for (int32_t i = 0; i < TX_BLOCK; i++) {
    const uint32_t size = codes[i] & ~f.sign_bit;
    codes[i] = (uint8_t)(codes[i] + (size < one ? size : one));
  }
}

TX_FN uint32_t tx_largest_code(tx_block_format f, const void *codes) {
  uint32_t largest = 0;
  for (int32_t i = 0; i < TX_BLOCK; i++) {
    const uint32_t size = ((const uint8_t *)codes)[i] & ~f.sign_bit;
    largest = size > largest ? size : largest;
  }
  return largest;
}

/* Encodes one moment of a block; returns its scale byte. */
TX_FN uint8_t tx_store_quads(tx_block_format f, int32_t amax_bits, const tx_quads *from, uint32_t u, void *to) {
  const tx_block_plan plan = tx_block_plan_from(f, amax_bits);
  if (__builtin_expect(plan.keep == 0u, 0)) {
    memset(to, 0, TX_BLOCK);
    return tx_block_scale_byte(plan, 0);
  }
  tx_encode_quads(f, plan, from, u, to);
  if (__builtin_expect(!tx_block_may_double(f, plan, amax_bits), 1)) return tx_block_scale_byte(plan, 0);
  const uint32_t doubling = tx_block_doubling(f, plan, tx_largest_code(f, to));
  if (doubling != 0u) tx_double_quads(f, to);
  return tx_block_scale_byte(plan, doubling);
}

/* tx_magnitude_bits of the largest magnitude. Roots are never negative zero, so for them unsigned patterns suffice. */
TX_FN int32_t tx_quads_amax(const tx_quads *q, const int roots) {
  uint32_t amax = 0;
  if (!roots) return tx_block_amax_bits(&q->x[0][0], TX_BLOCK);
  for (int32_t i = 0; i < TX_BLOCK; i++) {
    const uint32_t bits = tx_bits_from_f32((&q->x[0][0])[i]);
    amax = bits > amax ? bits : amax;
  }
  return (int32_t)(amax & 0x7fffffffu);
}

#endif
