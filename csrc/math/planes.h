/* Byte planes of values, and the entropy code for them.
 *
 * Values of one tensor have similar magnitudes, so the exponent of each value is put into a byte of its own: a float is
 * rotated left by one bit, which moves its sign to the end, and cut into bytes. Plane 0 has the most significant byte
 * of every value. Integers are cut without the rotation.
 *
 * A plane is coded by rANS (Duda 2013) with TX_RANS_LANES states, symbol i by state i % TX_RANS_LANES, so that a vector
 * holds many states. A symbol s has freq[s] of the TX_RANS_SCALE slots, from slot cum[s] on. A state x is in
 * [TX_RANS_LEAST, TX_RANS_LEAST << 16):
 *   encode s:  if x >= freq << TX_RANS_ROOM: output the word x & 0xffff, x >>= 16
 *              x = x / freq * TX_RANS_SCALE + x % freq + cum
 *   decode:    s is the symbol that has slot x % TX_RANS_SCALE
 *              x = freq * (x / TX_RANS_SCALE) + x % TX_RANS_SCALE - cum
 *              if x < TX_RANS_LEAST: x = x << 16 | the next word
 * Rows of TX_RANS_LANES symbols are encoded from the last to the first. Within a row, words are output in ascending
 * order of lanes; decoding reads all words backwards. */
#ifndef TX_MATH_PLANES_H
#define TX_MATH_PLANES_H

#include "csrc/math/numeric.h"

#define TX_RANS_LANES 64
#define TX_RANS_BITS 12
#define TX_RANS_SCALE (1u << TX_RANS_BITS)
#define TX_RANS_LEAST (1u << 15)
#define TX_RANS_ROOM 19 /* x / freq < 2^19 when s is encoded */

/* Tables of at most this many entries are looked up in registers. */
#define TX_RANS_NEAR 64

/* The encoding table, by symbol. factor divides by freq: x / freq == (x << shift) * factor >> 43. It holds because
 * x << shift < 2^31 and freq << shift is in (2^11, 2^12], so rounding the factor up adds at most 2^12 * x < 2^43 to the
 * product. */
typedef struct tx_rans_encoder {
  uint32_t factor[256];
  uint32_t parts[256]; /* freq | cum << 12 | shift << 24 */
  uint32_t before;     /* all symbols are 0 or in [before + 1, before + TX_RANS_NEAR - 1]; 256 if they are not */
} tx_rans_encoder;

/* By slot: symbol | freq << 8 | (slot - cum) << 20. */
typedef struct tx_rans_decoder {
  uint32_t slots[TX_RANS_SCALE];
} tx_rans_decoder;

/* log2(x) with 16 fractional bits, to within a hundredth; x >= 1. The same on every machine. */
TX_FN uint32_t tx_log2_q16(uint32_t x) {
  const uint32_t whole = 31u - (uint32_t)__builtin_clz(x);
  const uint64_t fraction = ((uint64_t)x << (31u - whole) & 0x7fffffffu) >> 15;
  return (whole << 16) + (uint32_t)(fraction + (fraction * (65536u - fraction) >> 16) * 22544u / 65536u);
}

/* About how many bytes the code of symbols with these counts takes. n: the sum of the counts, >= 1. */
TX_FN int64_t tx_entropy_bytes(const uint32_t *counts, uint32_t n) {
  int64_t bits_q16 = (int64_t)n * tx_log2_q16(n);
  for (int32_t s = 0; s < 256; s++)
    bits_q16 -= (int64_t)counts[s] * tx_log2_q16(counts[s] | 1u);
  return bits_q16 / (8 << 16);
}

/* Frequencies that sum to TX_RANS_SCALE, 0 where a count is 0. n: the sum of the counts, at least two of which are not
 * 0. */
TX_FN void tx_rans_frequencies(const uint32_t *counts, uint32_t n, uint16_t *freq) {
  int32_t left = (int32_t)TX_RANS_SCALE;
  for (int32_t s = 0; s < 256; s++) {
    const uint64_t share = (uint64_t)counts[s] * TX_RANS_SCALE / n;
    freq[s] = (uint16_t)(counts[s] && !share ? 1u : share);
    left -= freq[s];
  }
  while (left != 0) { /* adjust the largest frequency, where it costs least */
    int32_t largest = 0;
    for (int32_t s = 1; s < 256; s++)
      largest = freq[s] > freq[largest] ? s : largest;
    const int32_t most = freq[largest] / 8 > 1 ? freq[largest] / 8 : 1;
    const int32_t by = left > 0 ? left : -left < most ? left : -most;
    freq[largest] = (uint16_t)(freq[largest] + by);
    left -= by;
  }
}

TX_FN uint32_t tx_rans_before(const uint16_t *freq) {
  uint32_t least = 1, greatest = 255;
  while (least < 255 && !freq[least])
    least++;
  while (greatest > least && !freq[greatest])
    greatest--;
  return greatest - least < TX_RANS_NEAR - 1 ? least - 1 : 256;
}

/* freq: each < TX_RANS_SCALE. */
TX_FN void tx_rans_encoder_of(const uint16_t *freq, tx_rans_encoder *encoder) {
  uint32_t cum = 0;
  encoder->before = tx_rans_before(freq);
  for (int32_t s = 0; s < 256; s++) {
    const uint32_t f = freq[s] ? freq[s] : 1u;
    uint32_t shift = TX_RANS_BITS;
    while (shift && f << shift > TX_RANS_SCALE)
      shift--;
    encoder->factor[s] = (uint32_t)((UINT64_C(1) << 43) / (f << shift)) + 1u;
    encoder->parts[s] = f | cum << 12 | shift << 24;
    cum = (cum + freq[s]) % TX_RANS_SCALE; /* unused after the last symbol that occurs */
  }
}

/* freq: from tx_rans_frequencies. */
TX_FN void tx_rans_decoder_of(const uint16_t *freq, tx_rans_decoder *decoder) {
  uint32_t *slot = decoder->slots;
  for (uint32_t s = 0; s < 256; s++) {
    for (uint32_t k = 0; k < freq[s]; k++)
      *slot++ = s | (uint32_t)freq[s] << 8 | k << 20;
  }
}

/* Encodes symbol s into *state. Returns 1 if a word is to be output, which is *word then. */
TX_FN int tx_rans_put(const tx_rans_encoder *encoder, uint8_t s, uint32_t *state, uint16_t *word) {
  const uint32_t freq = encoder->parts[s] & 0xfffu, cum = encoder->parts[s] >> 12 & 0xfffu;
  const int leaves = *state >= freq << TX_RANS_ROOM;
  *word = (uint16_t)*state;
  const uint32_t x = leaves ? *state >> 16 : *state;
  *state = (x / freq << TX_RANS_BITS) + x % freq + cum;
  return leaves;
}

/* Decodes a symbol; *state may need another word afterwards. */
TX_FN uint8_t tx_rans_take(const tx_rans_decoder *decoder, uint32_t *state) {
  const uint32_t slot = decoder->slots[*state & (TX_RANS_SCALE - 1)];
  *state = (slot >> 8 & 0xfffu) * (*state >> TX_RANS_BITS) + (slot >> 20);
  return (uint8_t)slot;
}

/* -- checksums of coded bytes, in sixteen 32-bit lanes, so that they cost little compared with the code ----------- */

#define TX_PLANES_SUM_LANES 16
#define TX_PLANES_SUM_BYTES (4 * TX_PLANES_SUM_LANES)

TX_FN uint32_t tx_planes_sum_word(uint32_t lane, uint32_t word) {
  const uint32_t mixed = (lane ^ word) * 0x9e3779b1u;
  return mixed << 15 | mixed >> 17;
}

/* The checksum from the sums of all lanes and the number of bytes. */
TX_FN uint32_t tx_planes_sum_end(const uint32_t *lanes, uint64_t bytes) {
  uint64_t sum = bytes * UINT64_C(0x9e3779b97f4a7c15);
  for (int32_t i = 0; i < TX_PLANES_SUM_LANES; i++) {
    sum = (sum ^ lanes[i]) * UINT64_C(0x9e3779b97f4a7c15);
    sum ^= sum >> 29;
  }
  return (uint32_t)(sum >> 32);
}

#endif
