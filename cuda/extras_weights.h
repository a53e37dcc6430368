/* A lane's weights and masters of a round, before the step and after it. */
#ifndef TX_CUDA_EXTRAS_WEIGHTS_H
#define TX_CUDA_EXTRAS_WEIGHTS_H

#include "csrc/math/remainder.h"
#include "csrc/math/weight_change.h"
#include "cuda/vector_forms.h"

/* As stored. With fp32 masters the weights are not read. */
struct tx_vector_weights {
  const tx_raw *weight, *master;
};

static __device__ __forceinline__ uint32_t tx_stored_weight(const tx_vector_weights &w, int i, const tx_dtype param,
                                                            const tx_dtype master) {
  if (master == TX_F32) return 0u;
  return param == TX_F32 ? (*w.weight)[i] : tx_half((*w.weight)[i / 2], i % 2);
}
static __device__ __forceinline__ uint32_t tx_stored_master(const tx_vector_weights &w, int i, const tx_dtype master) {
  if (master == TX_NONE) return 0u;
  return master == TX_F32 ? (*w.master)[i] : tx_half((*w.master)[i / 2], i % 2);
}

/* The patterns of the master and the weight of element i (csrc/math/weight_change.h). */
static __device__ __forceinline__ uint32_t tx_master_bits(const tx_vector_weights &w, int i, const tx_dtype param,
                                                          const tx_dtype master) {
  return tx_master_pattern(tx_stored_weight(w, i, param, master), tx_stored_master(w, i, master), param, master);
}
static __device__ __forceinline__ uint32_t tx_weight_bits(const tx_vector_weights &w, int i, const tx_dtype param,
                                                          const tx_dtype master) {
  return tx_weight_pattern(tx_stored_weight(w, i, param, master), tx_stored_master(w, i, master), param, master);
}

/* The value that weight i is rounded from, for any pair of weight and remainder. */
static __device__ __forceinline__ float tx_master_value(const tx_vector_weights &w, int i, const tx_dtype param,
                                                        const tx_dtype master) {
  if (master != TX_I16) return tx_f32_from_bits(tx_master_bits(w, i, param, master));
  return tx_remainder_decode((uint16_t)tx_stored_weight(w, i, param, master), (int16_t)tx_stored_master(w, i, master));
}

#endif
