/* The sums of health measurement: tx_adamw_args.healths.
 *
 * A block's sums of squares have the CPU's bits (csrc/cpu/step_health.h). The CPU first adds elements 32 apart, one
 * after the other; then neighbours; then sums 16, 8, 4 and 2 apart. A lane has eight neighbouring elements; it
 * exchanges them so that it has two from each of the lanes whose elements are 32 apart. The sums of blocks are added as
 * integers: bin i of a warp is in lane i, and is added to the tensor's row when the warp leaves the tensor. */
#ifndef TX_CUDA_EXTRAS_HEALTH_H
#define TX_CUDA_EXTRAS_HEALTH_H

#include "csrc/math/health.h"
#include "cuda/extras_weights.h"
#include "cuda/last_block.h"
#include "cuda/launch.h"
#include "cuda/resync_vector.h"

static_assert(TX_HEALTH_BINS == TX_WARP, "each lane has a bin");

/* The sums of one thread. In shared memory, since registers are scarce; no other thread accesses them. */
struct tx_health_sums {
  int64_t updates, weights; /* of the bin with the lane's number */
  int32_t moved, below, elements, not_finite;
  int32_t largest; /* the fp32 pattern of the largest weight */
};
static __device__ __forceinline__ tx_health_sums &tx_my_health() {
  __shared__ tx_health_sums sums[TX_BLOCK_THREADS];
  return sums[threadIdx.x];
}

static __device__ __forceinline__ void tx_health_begin() {
  tx_my_health() = tx_health_sums{};
}

/* Exchanges half of each of the `runs` runs of elements in x with the lane whose number differs in bit `by`. A lane
 * without that bit keeps the first half of each run and receives the other lane's first half; a lane with it, the
 * second halves. The runs of the lane without the bit come first. Every lane of the warp has to call it. */
template <int runs>
static __device__ __forceinline__ void tx_trade_halves(float (&x)[TX_VECTOR], int by) {
  constexpr int half = TX_VECTOR / runs / 2;
  const bool upper = (tx_lane_id() & (uint32_t)by) != 0u;
  float first[TX_VECTOR / 2], second[TX_VECTOR / 2];
#pragma unroll
  for (int i = 0; i < TX_VECTOR / 2; i++) {
    const float low = x[i / half * 2 * half + i % half], high = x[i / half * 2 * half + half + i % half];
    const float mine = upper ? high : low, theirs = __shfl_xor_sync(0xffffffffu, upper ? low : high, by);
    first[i] = upper ? theirs : mine;
    second[i] = upper ? mine : theirs;
  }
#pragma unroll
  for (int i = 0; i < TX_VECTOR / 2; i++) {
    x[i] = first[i];
    x[i + TX_VECTOR / 2] = second[i];
  }
}

/* A block's sum of squares, in all of its lanes. Changes x. Every lane of the warp has to call it. */
static __device__ __forceinline__ float tx_block_squares(float (&x)[TX_VECTOR]) {
  tx_trade_halves<1>(x, 4); /* now has elements 32 apart */
  tx_trade_halves<2>(x, 8); /* and 64 apart */
  float sums[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++)
    sums[i % 2] = tx_square_added(sums[i % 2], x[i]);
  float sum = sums[0] + sums[1];
  const int apart[] = {2, 1, 4, 8}; /* sums 16 and 8 apart, and then those 4 and 2 apart that lanes kept */
#pragma unroll
  for (int i = 0; i < 4; i++)
    sum += __shfl_xor_sync(0xffffffffu, sum, apart[i]);
  return sum;
}

/* Adds the sums of a round's two blocks to the lane's bin. */
static __device__ __forceinline__ void tx_health_bin(int64_t &bin, int32_t &not_finite, float sum) {
#pragma unroll
  for (int from = 0; from < TX_WARP; from += TX_BLOCK_LANES) {
    const tx_health_share share = tx_health_share_of(__shfl_sync(0xffffffffu, sum, from));
    bin += share.bin == (int32_t)tx_lane_id() ? share.amount : 0;
    not_finite += share.bin < 0 && tx_lane_id() == 0u ? 1 : 0;
  }
}

/* Adds a round. changed: bit i is set if the lane's weight i changed. Every lane of the warp has to call it. */
static __device__ __forceinline__ void tx_health_take(const tx_vector_weights &before, const tx_vector_weights &now,
                                                      int32_t count, uint32_t changed, const tx_dtype param,
                                                      const tx_dtype master) {
  tx_health_sums &mine = tx_my_health();
  float updates[TX_VECTOR], weights[TX_VECTOR];
  int32_t below = 0, largest = mine.largest, not_finite = 0;
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++) {
    const uint32_t bits = tx_master_bits(now, i, param, master);
    const bool there = i < count;
    weights[i] = there ? tx_f32_from_bits(bits) : 0.0f;
    updates[i] = there ? tx_f32_from_bits(bits) - tx_f32_from_bits(tx_master_bits(before, i, param, master)) : 0.0f;
    below += there && tx_magnitude_bits(updates[i]) < tx_half_ulp_bits(bits, param) ? 1 : 0;
    const int32_t size = tx_magnitude_bits(weights[i]);
    largest = size > largest ? size : largest;
  }
  mine.moved += __popc(changed);
  mine.below += below;
  mine.elements += count;
  mine.largest = largest;
  tx_health_bin(mine.updates, not_finite, tx_block_squares(updates));
  tx_health_bin(mine.weights, not_finite, tx_block_squares(weights));
  mine.not_finite += not_finite;
}

/* Adds the warp's sums to a tensor's row and resets them. Every lane of the warp has to call it. */
static __device__ __forceinline__ void tx_health_flush(unsigned long long *row) {
  tx_health_sums &mine = tx_my_health();
  const uint32_t lane = tx_lane_id();
  if (mine.updates != 0) tx_add_i64(&row[TX_HEALTH_UPDATES + lane], mine.updates);
  if (mine.weights != 0) tx_add_i64(&row[TX_HEALTH_WEIGHTS + lane], mine.weights);
  const int32_t counts[] = {mine.moved, mine.below, mine.elements, mine.not_finite};
#pragma unroll
  for (int k = 0; k < 4; k++) {
    const int32_t sum = tx_warp_sum(counts[k]);
    if (lane == 0 && sum != 0) tx_add_i64(&row[TX_HEALTH_MOVED + k], sum);
  }
  int32_t largest = mine.largest;
#pragma unroll
  for (int by = 1; by < TX_WARP; by *= 2) {
    const int32_t other = __shfl_xor_sync(0xffffffffu, largest, by);
    largest = other > largest ? other : largest;
  }
  if (lane == 0) (void)atomicMax(&row[TX_HEALTH_LARGEST], (unsigned long long)largest);
  tx_health_begin();
}

static_assert(TX_HEALTH_BELOW == TX_HEALTH_MOVED + 1 && TX_HEALTH_ELEMENTS == TX_HEALTH_MOVED + 2 &&
                  TX_HEALTH_NOT_FINITE == TX_HEALTH_MOVED + 3,
              "counts follow one another as above");

#endif
