/* Blocks of 128 elements with one power-of-two scale (csrc/math/block_scale.h), TX_VECTOR elements to a lane and so 16
 * neighbouring lanes to a block: largest values travel by shuffles among them. All lanes of the warp call; elements
 * that do not exist are zeros, which change neither scale nor codes. */
#ifndef TX_CUDA_BLOCK_SCALE_H
#define TX_CUDA_BLOCK_SCALE_H

#include "csrc/math/block_scale.h"
#include "cuda/lanes.h"

#define TX_BLOCK_LANES (TX_BLOCK / TX_VECTOR)

/* The largest of a block's lanes. */
static __device__ __forceinline__ int32_t tx_block_max(int32_t x) {
#pragma unroll
  for (int by = 1; by < TX_BLOCK_LANES; by *= 2) {
    const int32_t other = __shfl_xor_sync(0xffffffffu, x, by);
    x = x > other ? x : other;
  }
  return x;
}

/* A lane's codes of its block, as stored; returns the block's scale byte. rounded: by thresholds u, else nearest. */
static __device__ __forceinline__ uint8_t tx_block_encode(uint32_t (&codes)[TX_VECTOR], tx_block_format f,
                                                          const float (&x)[TX_VECTOR], bool rounded,
                                                          const uint32_t (&u)[TX_VECTOR]) {
  const int32_t amax = tx_block_max(tx_block_amax_bits(x, TX_VECTOR));
  const tx_block_plan plan = tx_block_plan_from(f, amax);
  uint32_t doubling = 0;
  if (rounded) {
#pragma unroll
    for (int i = 0; i < TX_VECTOR; i++)
      codes[i] = tx_block_code(f, plan, x[i], 1, u[i]);
  } else {
#pragma unroll
    for (int i = 0; i < TX_VECTOR; i++)
      codes[i] = tx_block_code(f, plan, x[i], 0, 0);
  }
  if (__any_sync(0xffffffffu, tx_block_may_double(f, plan, amax))) {
    int32_t largest = 0;
#pragma unroll
    for (int i = 0; i < TX_VECTOR; i++)
      largest = (int32_t)codes[i] > largest ? (int32_t)codes[i] : largest;
    doubling = tx_block_doubling(f, plan, (uint32_t)tx_block_max(largest));
#pragma unroll
    for (int i = 0; i < TX_VECTOR; i++)
      codes[i] += codes[i] < doubling ? codes[i] : doubling;
  }
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++)
    codes[i] = tx_block_finish(f, plan, x[i], codes[i], 0);
  return tx_block_scale_byte(plan, doubling);
}

#endif
