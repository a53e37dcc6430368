/* Statistics of gradients by warps: the tree of csrc/math/reduce.h over the 16 lanes that hold a block, and the exact
 * sum of csrc/math/exact_sum.h over blocks, warps and grid. Integers only are added in no fixed order, so that no bit
 * depends on the grid.
 *
 * Lane l of a block (of 16) has elements 8 l to 8 l + 7. The tree's first folds, of halves 64, 32 and 16 elements
 * apart, are exchanges with the lanes 8, 4 and 2 away, each of which keeps one half of what both have and adds it up.
 * After them a lane has one of 16 partial sums, number 8 (l % 2) + k with k = l / 2 (bits 3, 2, 1 of the lane as bits
 * 2, 1, 0 of k); the folds 8, 4, 2 and 1 apart are between lanes that differ in bits 0, 3, 2 and 1. There, of several
 * rounds, the two lanes keep some each. */
#ifndef TX_CUDA_WARP_STATS_H
#define TX_CUDA_WARP_STATS_H

#include "csrc/math/exact_sum.h"
#include "csrc/math/reduce.h"
#include "cuda/last_block.h"
#include "cuda/vector_forms.h"

/* What a warp has gathered: limb i of the sum is lane i's, not carried. A block's sum changes it by less than 2^32, so
 * it holds 2^31 of them. */
typedef struct tx_warp_stats {
  int64_t limb;
  int64_t non_finite; /* elements; each lane has counted its own */
} tx_warp_stats;

/* Exchanges with the lane that differs in `bit`: of the 2 n values of both keeps n, the lower ones where the lane's own
 * bit is 0, as sums of the lane's and the other's. */
template <int N>
static __device__ __forceinline__ void tx_fold_halves(double (&kept)[N], const double *values, uint32_t bit) {
  const bool upper = (tx_lane_id() & bit) != 0u;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const double mine = upper ? values[N + i] : values[i], theirs = upper ? values[i] : values[N + i];
    kept[i] = mine + __shfl_xor_sync(0xffffffffu, theirs, (int)bit);
  }
}

/* The partial sum of this round that the lane ends with. Every lane of the warp calls it; zeros behind the end. */
static __device__ __forceinline__ double tx_partial_squares(const float (&x)[TX_VECTOR]) {
  const bool upper = (tx_lane_id() & 8u) != 0u;
  double four[4], two[2], one[1];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float mine = upper ? x[4 + i] : x[i], theirs = upper ? x[i] : x[4 + i];
    four[i] = tx_square(mine) + tx_square(__shfl_xor_sync(0xffffffffu, theirs, 8));
  }
  tx_fold_halves(two, four, 4u);
  tx_fold_halves(one, two, 2u);
  return one[0];
}

/* Adds the sums of ROUNDS rounds' blocks to the warp's limbs. A block's sum is in four lanes, STRIDE apart, each of
 * which has one of its three parts to give, or nothing: so a lane asks for where a sum begins, and then for the part
 * that is its own limb's. Returns whether a block has an element that is not finite; its sum is left out then. */
template <int ROUNDS, int STRIDE>
static __device__ __forceinline__ bool tx_add_sums(tx_warp_stats *stats, double sum) {
  const tx_exact_parts parts = tx_exact_split(sum);
  const uint32_t copy = tx_lane_id() / STRIDE % 4u;
  const uint32_t given = copy == 0u ? parts.part[0] : copy == 1u ? parts.part[1] : copy == 2u ? parts.part[2] : 0u;
#pragma unroll
  for (int i = 0; i < 2 * ROUNDS; i++) {
    /* the first lane that has the sum of block i % 2 of round i / 2 */
    const int round = i / 2, half = STRIDE == 2 ? 8 : 2;
    const int from = 16 * (i % 2) + (ROUNDS == 4 ? half * (round % 2) + round / 2 : round);
    const uint32_t limb = tx_lane_id() - (uint32_t)__shfl_sync(0xffffffffu, parts.first, from);
    const uint32_t value = __shfl_sync(0xffffffffu, given, from + STRIDE * (int)(limb % 4u));
    stats->limb += limb < 4u ? (int64_t)value : 0;
  }
  return __any_sync(0xffffffffu, parts.first < 0) != 0;
}

/* The sums of the blocks of ROUNDS (1, 2 or 4) rounds from their partial sums, added to the warp's. Returns whether a
 * block has an element that is not finite; its sum is left out then. Every lane of the warp calls it. */
template <int ROUNDS>
static __device__ __forceinline__ bool tx_add_partials(tx_warp_stats *stats, const double (&partial)[ROUNDS]) {
  double sum;
  if constexpr (ROUNDS == 4) {
    double two[2], one[1];
    tx_fold_halves(two, partial, 1u);
    tx_fold_halves(one, two, 8u);
    sum = one[0];
  } else if constexpr (ROUNDS == 2) {
    double one[1];
    tx_fold_halves(one, partial, 1u);
    sum = one[0] + __shfl_xor_sync(0xffffffffu, one[0], 8);
  } else {
    sum = partial[0] + __shfl_xor_sync(0xffffffffu, partial[0], 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 8);
  }
  sum += __shfl_xor_sync(0xffffffffu, sum, 4);
  sum += __shfl_xor_sync(0xffffffffu, sum, 2);
  return tx_add_sums<ROUNDS, 2>(stats, sum);
}

/* -- of 16-bit elements: words of two travel before anything is computed of them ------------------------------------
 */

/* Exchanges with the lane that differs in `bit`: of its own 2 N words a lane keeps N, the lower ones where its own bit
 * is 0; behind them come the other lane's of the same places. */
template <int N>
static __device__ __forceinline__ void tx_trade_words(uint32_t (&kept)[2 * N], const uint32_t (&words)[2 * N],
                                                      uint32_t bit) {
  const bool upper = (tx_lane_id() & bit) != 0u;
#pragma unroll
  for (int i = 0; i < N; i++) {
    kept[i] = upper ? words[N + i] : words[i];
    kept[N + i] = __shfl_xor_sync(0xffffffffu, upper ? words[i] : words[N + i], (int)bit);
  }
}

/* The value of a stored number, for its square: which NaN it is does not matter. */
template <tx_dtype DTYPE>
static __device__ __forceinline__ float tx_float_to_square(uint32_t word, int half) {
  const uint16_t bits = (uint16_t)tx_half(word, half);
  if constexpr (DTYPE == TX_BF16) {
    return tx_f32_from_bf16(bits);
  } else {
#if defined(__CUDA_ARCH__)
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits)); /* exact, of subnormals, too */
    return x;
#else
    return tx_f32_from_f16(bits);
#endif
  }
}

/* The first three folds of two rounds, in one lane: from lanes 8, 4 and 2 away come the words that are 64, 32 and 16
 * elements apart. partial: of a word's two elements, of the round that the lane's bit 1 says. Lane bits 3 and 2 are
 * the word's number in its lane, bit 0 the lane's. */
template <tx_dtype DTYPE>
static __device__ __forceinline__ void tx_partials_of_halves(double (&partial)[2], const tx_raw &first,
                                                             const tx_raw &second) {
  uint32_t both[8], mine[8];
#pragma unroll
  for (int round = 0; round < 2; round++) {
    const tx_raw &raw = round ? second : first;
    uint32_t four[4], kept[4];
    tx_trade_words<2>(four, {raw[0], raw[1], raw[2], raw[3]}, 8u);
    tx_trade_words<2>(kept, {four[0], four[2], four[1], four[3]}, 4u);
#pragma unroll
    for (int i = 0; i < 4; i++)
      both[4 * round + i] = kept[i];
  }
  tx_trade_words<4>(mine, both, 2u);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    double x[8];
#pragma unroll
    for (int i = 0; i < 8; i++)
      x[i] = tx_square(tx_float_to_square<DTYPE>(mine[i], half));
    partial[half] = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
  }
}

/* tx_add_partials of four rounds, of rounds 0 and 1, then of rounds 2 and 3. */
static __device__ __forceinline__ bool tx_add_partials_of_halves(tx_warp_stats *stats, const double (&partial)[4]) {
  double two[2], one[1];
  tx_fold_halves(two, partial, 1u);
  tx_fold_halves(one, two, 8u);
  double sum = one[0] + __shfl_xor_sync(0xffffffffu, one[0], 4);
  sum += __shfl_xor_sync(0xffffffffu, sum, 8);
  return tx_add_sums<4, 4>(stats, sum);
}

static __device__ __forceinline__ int32_t tx_count_non_finite(const float (&x)[TX_VECTOR]) {
  int32_t count = 0;
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++)
    count += tx_magnitude_bits(x[i]) >= TX_F32_INF ? 1 : 0;
  return count;
}

/* Brings the tensor's limbs into the form that they have on a CPU. One thread, when nobody adds to them any more. */
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

/* What the block's warps have gathered into the tensor, whose limbs the launch's last block carries; ticket < 0: a
 * later launch of the call does. Every thread of the block calls it, once, at its end. */
static __device__ __forceinline__ void tx_add_block_stats(const tx_warp_stats &mine, int64_t *stats, int32_t ticket) {
  __shared__ unsigned long long sums[TX_STATS_LEN];
  if (threadIdx.x < TX_STATS_LEN) sums[threadIdx.x] = 0;
  __syncthreads();
  if (tx_lane_id() < TX_NORM_LIMBS) tx_add_i64(&sums[tx_lane_id()], mine.limb);
  if (mine.non_finite != 0) tx_add_i64(&sums[TX_NORM_LIMBS], mine.non_finite);
  __syncthreads();
  /* so that a tensor's limb holds what 2^31 blocks add */
  if (threadIdx.x == 0) tx_exact_carry((int64_t *)sums);
  __syncthreads();
  if (threadIdx.x < TX_STATS_LEN && sums[threadIdx.x] != 0) {
    tx_add_i64(&stats[threadIdx.x], (int64_t)sums[threadIdx.x]);
  }
  if (ticket >= 0 && tx_is_last_block(ticket) && threadIdx.x == 0) tx_carry_stats(stats);
}

#endif
