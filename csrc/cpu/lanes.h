/* Words of memory as lanes of 32 bits. A 32-bit word holds two elements of 16 bits or four of 8. Loops that walk over
 * words and take the elements of one apart with shifts and masks need no widening, narrowing or shuffling: every lane
 * is 32 bits wide from load to store, which every vector instruction set does well and compilers vectorise.
 *
 * "Upper" is a 32-bit pattern of which only the upper half counts, a bf16 in its fp32 place. */
#ifndef TX_CPU_LANES_H
#define TX_CPU_LANES_H

#include "csrc/cpu/element.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "element 0 of a word is taken to be its lowest bits"
#endif

/* Bytes of an element of a stream; 0 where there is none. */
TX_FN int64_t tx_lane_bytes(const tx_dtype dtype) {
  return dtype == TX_F32 ? 4 : dtype == TX_NONE ? 0 : dtype == TX_U8 ? 1 : 2;
}

TX_FN uint32_t tx_word(const void *p, int32_t w) {
  return ((const tx_mem_u32 *)p)[w];
}
TX_FN void tx_put_word(void *p, int32_t w, uint32_t word) {
  ((tx_mem_u32 *)p)[w] = word;
}

/* Element k (0 or 1) of a word of two, as the upper half of a pattern whose lower half is 0. */
TX_FN uint32_t tx_upper(uint32_t word, const int k) {
  return k == 0 ? word << 16 : word & 0xffff0000u;
}
/* Likewise, with something in the lower half. */
TX_FN uint32_t tx_upper_unmasked(uint32_t word, const int k) {
  return k == 0 ? word << 16 : word;
}
/* The word of two uppers, or of two lower halves. */
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

/* The two elements of a pair, given as fp32 patterns or uppers. */
TX_FN void tx_store_lanes(void *p, int32_t pair, const tx_dtype dtype, const uint32_t lanes[2]) {
  if (dtype == TX_F32) {
    tx_put_word(p, 2 * pair, lanes[0]);
    tx_put_word(p, 2 * pair + 1, lanes[1]);
  } else {
    tx_put_word(p, pair, tx_join_upper(lanes[0], lanes[1]));
  }
}

/* x as one of tx_store_lanes' lanes, rounded by threshold. */
TX_FN uint32_t tx_round_lane(const tx_dtype dtype, float x, uint32_t u) {
  return dtype == TX_F32 ? tx_bits_from_f32(x) : tx_bf16_round_upper(x, u);
}

#endif
