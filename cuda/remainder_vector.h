/* fp32 masters between a thread's registers and memory, where they are bf16 weights and the 16 bits that these lack. */
#ifndef TX_CUDA_REMAINDER_VECTOR_H
#define TX_CUDA_REMAINDER_VECTOR_H

#include "csrc/math/remainder.h"
#include "cuda/vectors.h"

struct tx_split_masters {
  void *weights, *remainders;
  uint32_t weights_alignment, remainders_alignment;
};

static __device__ __forceinline__ void tx_read_split(float (&x)[TX_VECTOR], const tx_split_masters &m, int64_t first,
                                                     int32_t count) {
  uint32_t weights[TX_VECTOR_WORDS(2)], remainders[TX_VECTOR_WORDS(2)];
  tx_read_vector<2>(weights, (const char *)m.weights + 2 * first, m.weights_alignment, count);
  tx_read_vector<2>(remainders, (const char *)m.remainders + 2 * first, m.remainders_alignment, count);
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++)
    x[i] = tx_remainder_decode((uint16_t)tx_half(weights[i / 2], i % 2), (int16_t)tx_half(remainders[i / 2], i % 2));
}

static __device__ __forceinline__ void tx_write_split(const float (&x)[TX_VECTOR], const tx_split_masters &m,
                                                      int64_t first, int32_t count) {
  uint16_t weights[TX_VECTOR], remainders[TX_VECTOR];
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++) {
    const tx_remainder_halves halves = tx_remainder_split(x[i]);
    weights[i] = (uint16_t)(halves.upper >> 16);
    remainders[i] = (uint16_t)halves.lower;
  }
  tx_write_halves(weights, m.weights, m.weights_alignment, first, count);
  tx_write_halves(remainders, m.remainders, m.remainders_alignment, first, count);
}

#endif
