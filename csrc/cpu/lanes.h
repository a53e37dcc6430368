/* Words of memory as 32-bit lanes. A 32-bit word holds two 16-bit elements or four 8-bit ones. Loops over words that
 * extract elements by shifts and masks need no widening, narrowing or shuffling: every lane is 32 bits wide from load
 * to store. Every vector instruction set does that well, and compilers vectorise it.
 *
 * An "upper" is a 32-bit pattern of which only the upper half counts: a bf16 in its place in an fp32. */
#ifndef TX_CPU_LANES_H
#define TX_CPU_LANES_H

#include "csrc/cpu/element.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "element 0 of a word is taken to be its lowest bits"
#endif

/* Bytes of an element; 0 for TX_NONE. */
TX_FN int64_t tx_lane_bytes(const tx_dtype dtype) {
  return dtype == TX_F32 ? 4 : dtype == TX_NONE ? 0 : dtype == TX_U8 ? 1 : 2;
}

TX_FN uint32_t tx_word(const void *p, int32_t w) {
  return ((const tx_mem_u32 *)p)[w];
}
TX_FN void tx_put_word(void *p, int32_t w, uint32_t word) {
  ((tx_mem_u32 *)p)[w] = word;
}

/* Element k (0 or 1) of a word of two, as an upper whose lower half is 0. */
TX_FN uint32_t tx_upper(uint32_t word, const int k) {
  return k == 0 ? word << 16 : word & 0xffff0000u;
}
/* The same with an undefined lower half. */
TX_FN uint32_t tx_upper_unmasked(uint32_t word, const int k) {
  return k == 0 ? word << 16 : word;
}
/* The word of the upper halves of two words, or of their lower halves. */
TX_FN uint32_t tx_join_upper(uint32_t first, uint32_t second) {
  return (first >> 16) | (second & 0xffff0000u);
}
TX_FN uint32_t tx_join_lower(uint32_t first, uint32_t second) {
  return (first & 0xffffu) | (second << 16);
}

/* Element 2 * pair + k of an array of fp32 or bf16, as fp32. */
TX_FN float tx_load_lane(const void *p, int32_t pair, const int k, const tx_dtype dtype) {
  if (dtype == TX_F32) return ((const tx_mem_f32 *)p)[2 * pair + k];
  return tx_f32_from_bits(tx_upper(tx_word(p, pair), k));
}

/* Stores the two elements of a pair, given as fp32 patterns or as uppers. */
TX_FN void tx_store_lanes(void *p, int32_t pair, const tx_dtype dtype, const uint32_t lanes[2]) {
  if (dtype == TX_F32) {
    tx_put_word(p, 2 * pair, lanes[0]);
    tx_put_word(p, 2 * pair + 1, lanes[1]);
  } else {
    tx_put_word(p, pair, tx_join_upper(lanes[0], lanes[1]));
  }
}

/* x rounded by threshold u, as a lane for tx_store_lanes. */
TX_FN uint32_t tx_round_lane(const tx_dtype dtype, float x, uint32_t u) {
  return dtype == TX_F32 ? tx_bits_from_f32(x) : tx_bf16_round_upper(x, u);
}

#endif
