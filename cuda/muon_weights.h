/* A lane's vector of weights in Muon's second pass: reading, stepping, rounding, writing. */
#ifndef TX_CUDA_MUON_WEIGHTS_H
#define TX_CUDA_MUON_WEIGHTS_H

#include "csrc/math/muon.h"
#include "cuda/device_scalars.h"
#include "cuda/remainder_vector.h"

/* Consecutive weights and what their step needs. */
struct tx_muon_entry {
  int64_t numel;
  void *param, *master; /* master: NULL for none */
  const void *update, *step;
  int64_t id, start;
  uint8_t param_dtype, master_dtype, update_dtype;
  uint8_t param_alignment, master_alignment, update_alignment;
};

struct tx_muon_rounding {
  uint64_t seed;
  int32_t weights; /* tx_rounding of 16-bit weights without a master */
};

struct tx_muon_rate_f32 {
  float lr, decay;
};

/* One rate for a whole vector. */
struct tx_muon_one_rate {
  tx_muon_rate_f32 rate;
  __device__ __forceinline__ tx_muon_rate_f32 of(int) const { return rate; }
};

/* As stored. With an fp32 master the weight is not read. */
struct tx_muon_stored {
  tx_raw weight, master;
};

static __device__ __forceinline__ void tx_muon_read(tx_muon_stored &s, const tx_muon_entry &e, int64_t first,
                                                    int32_t count) {
  if (e.master_dtype != TX_F32)
    tx_read_raw(s.weight, e.param, e.param_dtype == TX_F32 ? 4 : 2, e.param_alignment, first, count);
  if (e.master) tx_read_raw(s.master, e.master, e.master_dtype == TX_F32 ? 4 : 2, e.master_alignment, first, count);
}

static __device__ __forceinline__ void tx_muon_write(const tx_muon_stored &s, const tx_muon_entry &e, int64_t first,
                                                     int32_t count) {
  tx_write_raw(s.weight, e.param, e.param_dtype == TX_F32 ? 4 : 2, e.param_alignment, first, count);
  if (e.master) tx_write_raw(s.master, e.master, e.master_dtype == TX_F32 ? 4 : 2, e.master_alignment, first, count);
}

/* The values that weights are rounded from. */
static __device__ __forceinline__ void tx_muon_values(float (&p)[TX_VECTOR], const tx_muon_stored &s,
                                                      const tx_muon_entry &e) {
  if (e.master_dtype == TX_I16) {
    tx_join_split(p, s.weight, s.master);
  } else if (e.master_dtype == TX_F32) {
    tx_plain_floats(p, s.master, TX_F32);
  } else if (e.param_dtype == TX_F32) {
    tx_plain_floats(p, s.weight, TX_F32);
  } else if (e.param_dtype == TX_BF16) {
    tx_plain_floats(p, s.weight, TX_BF16);
  } else {
    tx_plain_floats(p, s.weight, TX_F16);
  }
}

static __device__ __forceinline__ void tx_muon_store(tx_muon_stored &to, const float (&p)[TX_VECTOR],
                                                     const tx_muon_entry &e, const tx_muon_rounding &rounding,
                                                     int64_t first) {
  uint32_t u[TX_VECTOR] = {};
  const int rounded = !e.master && e.param_dtype != TX_F32 && rounding.weights != TX_NEAREST;
  if (e.master_dtype == TX_I16) return tx_split_floats(to.weight, to.master, p);
  if (e.master_dtype == TX_F32) tx_plain_raw(to.master, p, u, 0, TX_F32);
  if (rounded) {
    const int64_t step = (int64_t)tx_read_value<float>(e.step) + 1;
    const tx_noise noise = tx_noise_at(rounding.seed, e.id, TX_LANE_PARAM, step, e.start);
    tx_thresholds(u, noise, (uint32_t)first, 0, rounding.weights);
  }
  if (e.param_dtype == TX_F32) {
    tx_plain_raw(to.weight, p, u, 0, TX_F32);
  } else if (e.param_dtype == TX_BF16) {
    tx_plain_raw(to.weight, p, u, rounded, TX_BF16);
  } else {
    tx_plain_raw(to.weight, p, u, rounded, TX_F16);
  }
}

/* Steps elements [first, first + count) of the entry. rates.of(i): the rate of the vector's i-th element, called in
 * ascending order of i. */
template <class Rates>
static __device__ __forceinline__ void tx_muon_step_vector(tx_muon_stored &to, const tx_muon_stored &from,
                                                           const tx_muon_entry &e, const tx_muon_rounding &rounding,
                                                           Rates &rates, int64_t first, int32_t count) {
  float o[TX_VECTOR], p[TX_VECTOR];
  tx_read_floats(o, e.update, (tx_dtype)e.update_dtype, e.update_alignment, first, count);
  tx_muon_values(p, from, e);
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++) {
    const tx_muon_rate_f32 rate = rates.of(i);
    p[i] = tx_muon_step(rate.lr, rate.decay, p[i], o[i]);
  }
  tx_muon_store(to, p, e, rounding, first);
}

#endif
