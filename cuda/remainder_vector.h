/* Reads and writes fp32 masters that are stored as bf16 weights and 16-bit remainders. */
#ifndef TX_CUDA_REMAINDER_VECTOR_H
#define TX_CUDA_REMAINDER_VECTOR_H

#include "csrc/math/remainder.h"
#include "cuda/vector_forms.h"

static __device__ __forceinline__ void tx_join_split(float (&x)[TX_VECTOR], const tx_raw &weights,
                                                     const tx_raw &remainders) {
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++)
    x[i] = tx_remainder_decode((uint16_t)tx_half(weights[i / 2], i % 2), (int16_t)tx_half(remainders[i / 2], i % 2));
}

static __device__ __forceinline__ void tx_split_floats(tx_raw &weights, tx_raw &remainders,
                                                       const float (&x)[TX_VECTOR]) {
  uint32_t uppers[TX_VECTOR], lowers[TX_VECTOR];
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++) {
    const tx_remainder_halves halves = tx_remainder_split(x[i]);
    uppers[i] = halves.upper >> 16;
    lowers[i] = (uint16_t)halves.lower;
  }
  tx_join_codes(weights, uppers, TX_BF16);
  tx_join_codes(remainders, lowers, TX_BF16);
}

struct tx_split_masters {
  void *weights, *remainders;
  uint32_t weights_alignment, remainders_alignment;
};

static __device__ __forceinline__ void tx_read_split(float (&x)[TX_VECTOR], const tx_split_masters &m, int64_t first,
                                                     int32_t count) {
  tx_raw weights, remainders;
  tx_read_raw(weights, m.weights, 2, m.weights_alignment, first, count);
  tx_read_raw(remainders, m.remainders, 2, m.remainders_alignment, first, count);
  tx_join_split(x, weights, remainders);
}

static __device__ __forceinline__ void tx_write_split(const float (&x)[TX_VECTOR], const tx_split_masters &m,
                                                      int64_t first, int32_t count) {
  tx_raw weights, remainders;
  tx_split_floats(weights, remainders, x);
  tx_write_raw(weights, m.weights, 2, m.weights_alignment, first, count);
  tx_write_raw(remainders, m.remainders, 2, m.remainders_alignment, first, count);
}

#endif
