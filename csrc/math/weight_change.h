/* How far weights changed since they were last published, in few bits: what a step adds to `moved` and `distances` of
 * tx_adamw_args, and the rules that their readers rely on. */
#ifndef TX_MATH_WEIGHT_CHANGE_H
#define TX_MATH_WEIGHT_CHANGE_H

#include "csrc/math/numeric.h"
#include "csrc/torch_ext.h"

/* The fp32 pattern of the value that a weight is rounded from. weight, master: the stored patterns. With an fp32 master
 * the weight is ignored; without a master the value is the weight's own. A remainder has to be one that the step writes
 * with its weight. Other pairs come from loads, after which `moved` is Inf anyway; and a zero weight with the tie
 * 0x8000 gives NaN here. */
TX_FN uint32_t tx_master_pattern(uint32_t weight, uint32_t master, const tx_dtype param, const tx_dtype master_dtype) {
  if (master_dtype == TX_F32) return master;
  if (param == TX_F32) return weight;
  if (param == TX_F16) return tx_bits_from_f32(tx_f32_from_f16((uint16_t)weight));
  if (master_dtype == TX_NONE) return weight << 16;
  const uint32_t upper = weight << 16;
  const int32_t missing = (int16_t)master;
  return upper + (uint32_t)missing;
}

/* The pattern of the weight. With an fp32 master: what the master rounds to, whatever `weight` is. */
TX_FN uint32_t tx_weight_pattern(uint32_t weight, uint32_t master, const tx_dtype param, const tx_dtype master_dtype) {
  if (master_dtype != TX_F32) return weight;
  const float x = tx_f32_from_bits(master);
  return param == TX_BF16 ? tx_bf16_from_f32(x) : tx_f16_from_f32(x);
}

/* The patterns of bf16 and fp16 (16) and of fp32 (32) as integers in the order of the numbers: neighbours are an ulp
 * apart, and -0 is -1. Every pattern has its own integer; NaNs are beyond the infinities. */
TX_FN int32_t tx_ordered_16(uint16_t pattern) {
  const int32_t bits = (int16_t)pattern;
  return bits ^ ((bits >> 31) & 0x7fff);
}
TX_FN int32_t tx_ordered_32(uint32_t pattern) {
  const int32_t bits = (int32_t)pattern;
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

#define TX_MOVED_UNKNOWN ((uint16_t)0x7f80) /* +Inf: it is unknown how far weights of the block moved */

/* Adds `largest` to `moved`, an upper bound (a bf16 >= 0) on the distance that weights of a block moved. largest: the
 * fp32 pattern of a number >= 0, the difference of two numbers rounded to nearest. An Inf or NaN sum gives +Inf, for
 * good.
 *
 * Both that difference and the sum here are rounded to nearest. Together they lack less than 2^-23 of the result, which
 * is at most 2 of its ulps; 3 are added, and the rest is rounded up to the next bf16. largest = 0 leaves the bound
 * unchanged. */
TX_FN uint16_t tx_moved_add(uint16_t moved, int32_t largest) {
  const float sum = tx_f32_from_bf16(moved) + tx_f32_from_bits((uint32_t)largest);
  const uint32_t up = (tx_bits_from_f32(sum) + 3u + 0xffffu) >> 16;
  const int ends = tx_magnitude_bits(sum) >= TX_F32_INF;
  return largest == 0 ? moved : ends ? TX_MOVED_UNKNOWN : (uint16_t)up;
}

#define TX_DISTANCE_MOST 7
#define TX_DISTANCE_BEYOND (-8) /* further than 7 either way; it stays so */

/* The sum of two distances in [-8, 7] (4 bits each), where -8 means further than 7 either way. */
TX_FN int32_t tx_distance_added(int32_t distance, int32_t by) {
  const int32_t sum = distance + by;
  const int32_t beyond =
      distance == TX_DISTANCE_BEYOND || by == TX_DISTANCE_BEYOND || sum < -TX_DISTANCE_MOST || sum > TX_DISTANCE_MOST;
  return beyond ? TX_DISTANCE_BEYOND : sum;
}

/* The distance in ulps from one weight to another; before, now: from tx_ordered_16 or tx_ordered_32. */
TX_FN int32_t tx_ulps_between(int32_t before, int32_t now) {
  const int32_t by = (int32_t)((uint32_t)now - (uint32_t)before);
  /* the difference wrapped: before and now have different signs, and `by` does not have the sign of now */
  const int32_t wrapped = (now ^ before) & (now ^ by);
  return wrapped < 0 || by < -TX_DISTANCE_MOST || by > TX_DISTANCE_MOST ? TX_DISTANCE_BEYOND : by;
}

/* Element k (0 or 1) of a byte that holds two distances. */
TX_FN int32_t tx_distance_of(uint8_t pair, const int k) {
  return (int32_t)((uint32_t)pair << (k == 0 ? 28 : 24)) >> 28;
}
TX_FN uint8_t tx_distance_pair(int32_t first, int32_t second) {
  return (uint8_t)(((uint32_t)first & 15u) | ((uint32_t)second & 15u) << 4);
}

#endif
