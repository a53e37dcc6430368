/* How weights changed since they were last published, in few bits: what a step adds to `moved` and `distance` of
 * tx_adamw_args, and what whoever reads these relies on. */
#ifndef TX_MATH_WEIGHT_CHANGE_H
#define TX_MATH_WEIGHT_CHANGE_H

#include "csrc/math/numeric.h"
#include "csrc/torch_ext.h"

/* The pattern of the number that a weight is rounded from, by what is stored: the patterns of the weight, which does
 * not matter beside an fp32 master, and of the master, where there is one. Of pairs with a remainder as the step writes
 * them: what is different of others is a matter of loads, after which `moved` is Inf, and of the two zeros' ties, which
 * are NaN here. */
TX_FN uint32_t tx_master_pattern(uint32_t weight, uint32_t master, const tx_dtype param, const tx_dtype master_dtype) {
  if (master_dtype == TX_F32) return master;
  if (param == TX_F32) return weight;
  if (param == TX_F16) return tx_bits_from_f32(tx_f32_from_f16((uint16_t)weight));
  if (master_dtype == TX_NONE) return weight << 16;
  const uint32_t upper = weight << 16;
  const int32_t missing = (int16_t)master;
  return upper + (uint32_t)missing;
}

/* The pattern of the weight itself. One beside an fp32 master is what that rounds to, whatever is stored. */
TX_FN uint32_t tx_weight_pattern(uint32_t weight, uint32_t master, const tx_dtype param, const tx_dtype master_dtype) {
  if (master_dtype != TX_F32) return weight;
  const float x = tx_f32_from_bits(master);
  return param == TX_BF16 ? tx_bf16_from_f32(x) : tx_f16_from_f32(x);
}

/* The patterns of bf16 and fp16, and of fp32, as integers in the order of the numbers: -1 is -0, neighbours are an ulp
 * apart. Every pattern has one of its own, NaNs beyond the infinities. */
TX_FN int32_t tx_ordered_16(uint16_t pattern) {
  const int32_t bits = (int16_t)pattern;
  return bits ^ ((bits >> 31) & 0x7fff);
}
TX_FN int32_t tx_ordered_32(uint32_t pattern) {
  const int32_t bits = (int32_t)pattern;
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

#define TX_MOVED_ANYHOW ((uint16_t)0x7f80) /* +Inf: nobody knows how far weights of the block moved */

/* An upper bound, a bf16 >= 0, on the way that the weights of a block went, when it goes on by `largest`: the pattern
 * of an fp32 >= 0, the difference of two numbers to nearest. Inf is the end, and so is NaN.
 *
 * Both sums are to nearest: what they may lack is less than 2^-23 of the result, 2 of its ulps at most; 3 are added,
 * and the rest goes up to the next bf16. Nothing moved leaves the bound as it is. */
TX_FN uint16_t tx_moved_on(uint16_t moved, int32_t largest) {
  const float sum = tx_f32_from_bf16(moved) + tx_f32_from_bits((uint32_t)largest);
  const uint32_t up = (tx_bits_from_f32(sum) + 3u + 0xffffu) >> 16;
  const int ends = tx_magnitude_bits(sum) >= TX_F32_INF;
  return largest == 0 ? moved : ends ? TX_MOVED_ANYHOW : (uint16_t)up;
}

#define TX_DISTANCE_MOST 7
#define TX_DISTANCE_BEYOND (-8) /* further than that either way: it stays so */

/* Both in [-8, 7], of 4 bits' range, where -8 stands for everything beyond. */
TX_FN int32_t tx_distance_added(int32_t distance, int32_t by) {
  const int32_t sum = distance + by;
  const int32_t beyond =
      distance == TX_DISTANCE_BEYOND || by == TX_DISTANCE_BEYOND || sum < -TX_DISTANCE_MOST || sum > TX_DISTANCE_MOST;
  return beyond ? TX_DISTANCE_BEYOND : sum;
}

/* The way from one weight to another, of tx_ordered_16 or tx_ordered_32. */
TX_FN int32_t tx_distance_between(int32_t before, int32_t now) {
  const int32_t by = (int32_t)((uint32_t)now - (uint32_t)before);
  /* wrapped: the signs differ, and by has not that of now */
  const int32_t wrapped = (now ^ before) & (now ^ by);
  return wrapped < 0 || by < -TX_DISTANCE_MOST || by > TX_DISTANCE_MOST ? TX_DISTANCE_BEYOND : by;
}

/* Element k (0 or 1) of a byte of two. */
TX_FN int32_t tx_distance_of(uint8_t pair, const int k) {
  return (int32_t)((uint32_t)pair << (k == 0 ? 28 : 24)) >> 28;
}
TX_FN uint8_t tx_distance_pair(int32_t first, int32_t second) {
  return (uint8_t)(((uint32_t)first & 15u) | ((uint32_t)second & 15u) << 4);
}

#endif
