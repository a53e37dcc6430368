/* Checksums (csrc/math/checksum.h) of weights in device memory, computed by a warp: all lanes have to call the
 * functions, and all get the result.
 *
 * A lane holds four of the 16 words of a vector as csrc/math/checksum.h defines it, the same quarter of each, and the
 * vectors that it holds are `apart` vectors apart. A lane's share of the checksum is linear modulo 2^32 in its sums, so
 * partial sums are mixed first and added afterwards. */
#ifndef TX_CUDA_WARP_CHECKSUM_H
#define TX_CUDA_WARP_CHECKSUM_H

#include "csrc/math/checksum.h"
#include "cuda/device_scalars.h"
#include "cuda/vectors.h"

/* Sums of what a lane has added: of all its words, and of the sums before each of them. */
struct tx_checksum_sums {
  uint32_t sum[4], before[4];
};

/* Adds a quarter of a vector, the next one of the lane. */
static __device__ __forceinline__ void tx_checksum_take(tx_checksum_sums &s, const uint32_t (&words)[4]) {
#pragma unroll
  for (int k = 0; k < 4; k++) {
    s.before[k] += s.sum[k];
    s.sum[k] += words[k];
  }
}

/* The checksum of everything that LANES neighbouring lanes, four per vector, have added; in all of these lanes. left:
 * the number of vectors from the last one that the lane has added to the last of all. apart: between a lane's
 * vectors. */
template <int LANES = TX_WARP>
static __device__ __forceinline__ uint64_t tx_checksum_value(const tx_checksum_sums &s, uint32_t lane, uint32_t left,
                                                             const uint32_t apart) {
  /* The words of csrc/math/checksum.h, of sum and order = left * sum + apart * before. The factors of sum and before
   * grow by the same from word to word. */
  const uint32_t first = lane % 4 * 4, step = TX_CHECKSUM_FACTOR(1) - TX_CHECKSUM_FACTOR(0);
  uint32_t of_order = 2u * TX_CHECKSUM_FACTOR(first + TX_CHECKSUM_LANES);
  uint32_t of_sum = TX_CHECKSUM_FACTOR(first) + left * of_order, of_before = apart * of_order;
  uint32_t mixed[4];
#pragma unroll
  for (int k = 0; k < 4; k++) {
    mixed[k] = s.sum[k] * of_sum + s.before[k] * of_before;
    of_sum += step + left * (2u * step);
    of_before += apart * (2u * step);
  }
  /* Lanes of the lower half take words 0 and 1, the others 2 and 3: so half as many are left to add up. */
  constexpr int kHalf = LANES / 2;
  const bool upper = (lane & kHalf) != 0;
  uint32_t words[2];
#pragma unroll
  for (int k = 0; k < 2; k++) {
    words[k] = (upper ? mixed[k + 2] : mixed[k]) + __shfl_xor_sync(0xffffffffu, upper ? mixed[k] : mixed[k + 2], kHalf);
#pragma unroll
    for (int by = 4; by < kHalf; by *= 2)
      words[k] += __shfl_xor_sync(0xffffffffu, words[k], by);
  }
  uint64_t value = (uint64_t)words[1] << 32 | words[0];
  value += __shfl_xor_sync(0xffffffffu, value, 1);
  value += __shfl_xor_sync(0xffffffffu, value, 2);
  value += __shfl_xor_sync(0xffffffffu, value, kHalf);
  return value;
}

/* The vectors that a round has. */
#define TX_ROUND_VECTORS (TX_ROUND / (2 * TX_CHECKSUM_LANES))

/* tx_checksum_value of a tile of which the lane has added a vector of each round. Vectors beyond the end are zeros. */
static __device__ __forceinline__ uint64_t tx_checksum_of_tile(const tx_checksum_sums &s, int32_t count,
                                                               uint32_t lane) {
  const uint32_t vectors = ((uint32_t)count + 2 * TX_CHECKSUM_LANES - 1) / (2 * TX_CHECKSUM_LANES);
  const uint32_t rounds = ((uint32_t)count + TX_ROUND - 1) / TX_ROUND;
  return tx_checksum_value(s, lane, vectors - (rounds - 1) * TX_ROUND_VECTORS - lane / 4, TX_ROUND_VECTORS);
}

/* The checksum of TX_CHECKSUM weights, of which the lane has a vector of each round. */
#define TX_CHECKSUM_ROUNDS (TX_CHECKSUM / TX_ROUND)
static __device__ __forceinline__ uint64_t tx_checksum_of_rounds(const uint32_t (&words)[TX_CHECKSUM_ROUNDS][4],
                                                                 uint32_t lane) {
  tx_checksum_sums s = {};
#pragma unroll
  for (int i = 0; i < TX_CHECKSUM_ROUNDS; i++)
    tx_checksum_take(s, words[i]);
  return tx_checksum_of_tile(s, TX_CHECKSUM, lane);
}

/* The checksum of `count` 16-bit weights. */
static __device__ __forceinline__ uint64_t tx_checksum_of(const void *weights, uint32_t alignment, int32_t count,
                                                          uint32_t lane) {
  tx_checksum_sums s = {};
  if (count == TX_CHECKSUM && alignment >= 16) {
    uint32_t words[TX_CHECKSUM_ROUNDS][4];
#pragma unroll
    for (int i = 0; i < TX_CHECKSUM_ROUNDS; i++)
      tx_read_vector<2>(words[i], (const char *)weights + 2 * (i * TX_ROUND + (int32_t)lane * TX_VECTOR), 16,
                        TX_VECTOR);
    return tx_checksum_of_rounds(words, lane);
  }
  for (int32_t round = 0; round < tx_rounds(count); round++) {
    const tx_share share = tx_share_of_tile(count, round, lane);
    uint32_t words[4];
    tx_read_vector<2>(words, (const char *)weights + 2 * share.first, alignment, share.count);
    tx_checksum_take(s, words);
  }
  return tx_checksum_of_tile(s, count, lane);
}

/* The checksum of the sample of `count` <= TX_SAMPLED weights; four lanes hold a run. LANES: the number of neighbouring
 * lanes that work on one sample; `lane` is counted from the first of these. */
template <int LANES>
static __device__ __forceinline__ uint64_t tx_sample_of_lanes(const void *weights, uint32_t alignment, int32_t count,
                                                              uint32_t lane) {
  static_assert(LANES >= 4 * TX_SAMPLE_RUNS, "every run has its lanes");
  static_assert(TX_SAMPLE_RUN == 4 * TX_VECTOR, "four lanes hold a run");
  tx_checksum_sums s = {};
  uint32_t words[4];
  const int32_t run = (int32_t)lane / 4;
  const int32_t runs = (count + (int32_t)TX_SAMPLE_STRIDE - 1) / (int32_t)TX_SAMPLE_STRIDE;
  const int32_t first = run * (int32_t)TX_SAMPLE_STRIDE + (int32_t)lane % 4 * TX_VECTOR;
  const int32_t left = run < runs ? count - first : 0;
  tx_read_vector<2>(words, (const char *)weights + 2 * first, alignment, tx_existing(left));
  tx_checksum_take(s, words);
  return tx_checksum_value<LANES>(s, lane, (uint32_t)(runs - run), 0);
}
static __device__ __forceinline__ uint64_t tx_sample_of(const void *weights, uint32_t alignment, int32_t count,
                                                        uint32_t lane) {
  return tx_sample_of_lanes<TX_WARP>(weights, alignment, count, lane);
}

/* The checksum stored at `at`. Where time counts it is read before the weights that it is compared with, so that both
 * reads are under way at a time. */
static __device__ __forceinline__ uint64_t tx_stored_checksum(const void *at) {
  return tx_read_value<uint64_t>(at);
}

#endif
