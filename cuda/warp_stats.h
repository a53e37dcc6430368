/* Statistics of gradients by warps: the tree of csrc/math/reduce.h over the lanes that hold a block, and the exact sum
 * of csrc/math/exact_sum.h over blocks, warps and grid. Only integers are added in an undefined order, so no bit
 * depends on the grid. */
#ifndef TX_CUDA_WARP_STATS_H
#define TX_CUDA_WARP_STATS_H

#include <math.h>

#include "csrc/math/exact_sum.h"
#include "csrc/math/reduce.h"
#include "cuda/last_block.h"
#include "cuda/vector_forms.h"

/* The sums that a warp has collected.
 *
 * Four neighbouring lanes have a window: four consecutive limbs, one in each lane. Most block sums of a tensor have
 * similar magnitudes, so adding one to a window usually takes one addition per lane. If a sum does not fit, windows are
 * emptied into the limbs (limb i is in lane i) and moved. No carries are propagated: a block's sum changes a limb by
 * less than 2^32, so a limb holds the sums of 2^31 blocks. */
typedef struct tx_warp_stats {
  int64_t limb;
  int64_t window;     /* limb number `first` + the lane's index in its window */
  int64_t non_finite; /* non-finite elements that this lane has counted */
  int32_t first;
} tx_warp_stats;

#define TX_WINDOW 4

/* Every lane of the warp has to call it. */
static __device__ __forceinline__ void tx_empty_windows(tx_warp_stats *stats) {
#pragma unroll 1
  for (int lanes = 0; lanes < TX_WARP; lanes += TX_WINDOW) {
    const uint32_t at = tx_lane_id() - (uint32_t)__shfl_sync(0xffffffffu, stats->first, lanes);
    const long long value = __shfl_sync(0xffffffffu, (long long)stats->window, lanes + (int)(at % TX_WINDOW));
    stats->limb += at < TX_WINDOW ? (int64_t)value : 0;
  }
  stats->window = 0;
}

/* Adds a block's sum. The four lanes of a window pass the same sum, or 0 for nothing. Every lane of the warp has to
 * call it. Returns whether a sum of the warp is not finite, because its block has such an element; that sum is not
 * added. */
static __device__ __forceinline__ bool tx_add_sum(tx_warp_stats *stats, double sum) {
  const tx_exact_parts parts = tx_exact_split(sum);
  const bool fits = sum == 0.0 || (uint32_t)(parts.first - stats->first) <= TX_WINDOW - 3u;
  bool bad = false;
  if (__any_sync(0xffffffffu, !fits)) {
    tx_empty_windows(stats);
    bad = __any_sync(0xffffffffu, parts.first < 0) != 0;
    /* a large sum is put at the window's upper end, so that slightly smaller ones fit, too; and vice versa */
    if (!fits && parts.first >= 0) stats->first = parts.first < stats->first ? parts.first : parts.first - 1;
  }
  const int32_t part = stats->first + (int32_t)(tx_lane_id() % TX_WINDOW) - parts.first;
  stats->window += part == 0 ? parts.part[0] : part == 1 ? parts.part[1] : part == 2 ? parts.part[2] : 0u;
  return bad;
}

/* Exchanges values with the lane whose number differs in `bit`. Each lane keeps N of the 2 N values, as sums of its own
 * and the other lane's: the lower N if its own bit is 0, else the upper ones. */
template <int N>
static __device__ __forceinline__ void tx_fold_halves(double (&kept)[N], const double (&values)[2 * N], uint32_t bit) {
  const bool upper = (tx_lane_id() & bit) != 0u;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const double mine = upper ? values[N + i] : values[i], theirs = upper ? values[i] : values[N + i];
    kept[i] = mine + __shfl_xor_sync(0xffffffffu, theirs, (int)bit);
  }
}

/* -- a block in 16 lanes, TX_VECTOR elements in each ----------------------------------------------------------------
 *
 * The tree's first folds, of elements 64, 32 and 16 apart, are exchanges with the lanes 8, 4 and 2 away. Each lane
 * keeps half of the values of both and adds them up. After that a lane l has one of 16 partial sums, number
 * 8 (l % 2) + k with k = l / 2 (bits 3, 2, 1 of the lane are bits 2, 1, 0 of k). The folds 8, 4, 2 and 1 apart are
 * between lanes that differ in bits 0, 3, 2 and 1. */

/* The block's sum of squares, in all its lanes. x is 0 beyond the tensor's end. Every lane of the warp has to call
 * it. */
static __device__ __forceinline__ double tx_squares_of_lanes(const float (&x)[TX_VECTOR]) {
  const bool upper = (tx_lane_id() & 8u) != 0u;
  double four[4], two[2], one[1];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float mine = upper ? x[4 + i] : x[i], theirs = upper ? x[i] : x[4 + i];
    four[i] = tx_square(mine) + tx_square(__shfl_xor_sync(0xffffffffu, theirs, 8));
  }
  tx_fold_halves(two, four, 4u);
  tx_fold_halves(one, two, 2u);
  double sum = one[0] + __shfl_xor_sync(0xffffffffu, one[0], 1);
  sum += __shfl_xor_sync(0xffffffffu, sum, 8);
  sum += __shfl_xor_sync(0xffffffffu, sum, 4);
  return sum + __shfl_xor_sync(0xffffffffu, sum, 2);
}

/* -- a block in four lanes, a quarter in each (tx_share_of_block) -----------------------------------------------------
 *
 * The folds of elements 64 and 32 apart are within a lane. Those 16 and 8 apart are between lanes that differ in bits 1
 * and 0, each of which keeps half of the values, so that the fold 4 apart is within a lane again. After that a lane has
 * one of the last four sums: number 2 (bit 1) + (bit 0). */

/* The value of a stored element, for squaring; which NaN a NaN becomes does not matter. */
template <tx_dtype DTYPE>
static __device__ __forceinline__ float tx_float_to_square(const tx_raw &raw, int i) {
  if constexpr (DTYPE == TX_F32) return tx_f32_from_bits(raw[i]);
  const uint16_t bits = (uint16_t)tx_half(raw[i / 2], i % 2);
  if constexpr (DTYPE == TX_BF16) return tx_f32_from_bf16(bits);
#if defined(__CUDA_ARCH__)
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits)); /* exact, also for subnormals */
  return x;
#else
  return tx_f32_from_f16(bits);
#endif
}

/* tx_square(a) + tx_square(b). Squares are exact, so only the sum is rounded, as in an fma. */
static __device__ __forceinline__ double tx_two_squares(float a, float b) {
  return fma((double)a, (double)a, tx_square(b));
}

/* The block's sum of squares, in all its lanes. raw: one vector per round. Every lane of the warp has to call it. */
template <tx_dtype DTYPE>
static __device__ __forceinline__ double tx_squares_of_quarters(const tx_raw (&raw)[TX_QUARTERS]) {
  double eight[TX_VECTOR], four[4], two[2];
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++) {
    constexpr int kOrder[TX_VECTOR] = {0, 4, 1, 5, 2, 6, 3, 7}; /* elements 4 apart stay in one lane */
    float x[TX_QUARTERS];
#pragma unroll
    for (int round = 0; round < TX_QUARTERS; round++)
      x[round] = tx_float_to_square<DTYPE>(raw[round], kOrder[i]);
    eight[i] = tx_two_squares(x[0], x[2]) + tx_two_squares(x[1], x[3]);
  }
  tx_fold_halves(four, eight, 2u);
  tx_fold_halves(two, four, 1u);
  double sum = two[0] + two[1];
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  return sum + __shfl_xor_sync(0xffffffffu, sum, 1);
}

static __device__ __forceinline__ int32_t tx_count_non_finite(const float (&x)[TX_VECTOR]) {
  int32_t count = 0;
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++)
    count += tx_magnitude_bits(x[i]) >= TX_F32_INF ? 1 : 0;
  return count;
}

/* Propagates carries in the tensor's limbs, which gives the CPU's representation. Called by one thread, when no other
 * adds to them any more. */
static __device__ __forceinline__ void tx_carry_stats(int64_t *stats) {
  int64_t limbs[TX_NORM_LIMBS];
  volatile int64_t *memory = stats;
#pragma unroll
  for (int i = 0; i < TX_NORM_LIMBS; i++)
    limbs[i] = memory[i];
  tx_exact_carry(limbs);
#pragma unroll
  for (int i = 0; i < TX_NORM_LIMBS; i++)
    memory[i] = limbs[i];
}

/* Adds what the block's warps have collected to the tensor `stats`. The launch's last block propagates the carries;
 * ticket < 0: a later launch of the call does. Every thread of the block has to call it, once, at its end. */
static __device__ __forceinline__ void tx_add_block_stats(tx_warp_stats mine, int64_t *stats, int32_t ticket) {
  __shared__ unsigned long long sums[TX_STATS_LEN];
  tx_empty_windows(&mine);
  if (threadIdx.x < TX_STATS_LEN) sums[threadIdx.x] = 0;
  __syncthreads();
  if (tx_lane_id() < TX_NORM_LIMBS) tx_add_i64(&sums[tx_lane_id()], mine.limb);
  if (mine.non_finite != 0) tx_add_i64(&sums[TX_NORM_LIMBS], mine.non_finite);
  __syncthreads();
  /* so that a limb of the tensor holds the sums of 2^31 blocks */
  if (threadIdx.x == 0) tx_exact_carry((int64_t *)sums);
  __syncthreads();
  if (threadIdx.x < TX_STATS_LEN && sums[threadIdx.x] != 0) {
    tx_add_i64(&stats[threadIdx.x], (int64_t)sums[threadIdx.x]);
  }
  if (ticket >= 0 && tx_is_last_block(ticket) && threadIdx.x == 0) tx_carry_stats(stats);
}

#endif
