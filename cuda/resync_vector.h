/* Compares TX_VECTOR fp32 masters with their 16-bit weights and resyncs them; see tx_master_resync. */
#ifndef TX_CUDA_RESYNC_VECTOR_H
#define TX_CUDA_RESYNC_VECTOR_H

#include "csrc/math/stale.h"
#include "cuda/vectors.h"

/* A parameter's weights and masters. */
struct tx_masters {
  const void *param;
  void *master;
  tx_dtype param_dtype;
  uint32_t param_alignment, master_alignment;
};

/* Resyncs elements [first, first + count). Returns how many masters change. Writes nothing if none of the lane's does,
 * or if mode is TX_RESYNC_COUNT. */
static __device__ __forceinline__ int32_t tx_resync_vector(const tx_masters &e, int64_t first, int32_t count,
                                                           int32_t mode) {
  uint32_t masters[TX_VECTOR_WORDS(4)], weights[TX_VECTOR_WORDS(2)];
  tx_read_vector<4>(masters, (const char *)e.master + 4 * first, e.master_alignment, count);
  tx_read_vector<2>(weights, (const char *)e.param + 2 * first, e.param_alignment, count);
  int32_t differ = 0;
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++) {
    const uint32_t weight = tx_half(weights[i / 2], i % 2);
    const bool bf16 = e.param_dtype == TX_BF16;
    const float is = tx_f32_from_bits(masters[i]);
    const uint32_t stale = bf16 ? tx_master_stale(is, weight, TX_BF16) : tx_master_stale(is, weight, TX_F16);
    const uint32_t becomes =
        tx_bits_from_f32(bf16 ? tx_f32_from_bf16((uint16_t)weight) : tx_f32_from_f16((uint16_t)weight));
    if ((mode != TX_RESYNC_ALL && !stale) || becomes == masters[i]) continue;
    masters[i] = becomes;
    differ++;
  }
  if (mode != TX_RESYNC_COUNT && differ)
    tx_write_vector<4>(masters, (char *)e.master + 4 * first, e.master_alignment, count);
  return differ;
}

/* The sum over the warp's lanes, in all of them. */
static __device__ __forceinline__ int32_t tx_warp_sum(int32_t x) {
#pragma unroll
  for (int by = 1; by < TX_WARP; by *= 2)
    x += __shfl_xor_sync(0xffffffffu, x, by);
  return x;
}

#endif
