/* One round of the step: TX_VECTOR elements of each stream to a lane. Included by adamw_kernel.h. */
#ifndef TX_CUDA_ADAMW_ROUND_H
#define TX_CUDA_ADAMW_ROUND_H

#include "cuda/adamw_streams.h"
#include "cuda/adamw_tensor.h"

namespace {

constexpr tx_dtype kParams[TX_WEIGHTS] = {
#define TX_ENTRY_(index, param, master, ...) TX_##param,
    TX_FOR_EACH_WEIGHT(TX_ENTRY_)
#undef TX_ENTRY_
};
constexpr tx_dtype kMasters[TX_WEIGHTS] = {
#define TX_ENTRY_(index, param, master, ...) TX_##master,
    TX_FOR_EACH_WEIGHT(TX_ENTRY_)
#undef TX_ENTRY_
};

/* A lane's elements of one round. */
struct in_round {
  tx_raw grad, param, master, exp_avg, exp_avg_sq;
  uint8_t exp_avg_scale, exp_avg_sq_scale; /* 0 where the lane has no elements */
};

template <int WEIGHT, int MOMENTS>
struct round_of {
  static constexpr tx_dtype kParam = kParams[WEIGHT], kMaster = kMasters[WEIGHT];

  static __device__ __forceinline__ tx_dtype moment(uint8_t dtype) {
    return MOMENTS == TX_MOMENTS_F32    ? TX_F32
           : MOMENTS == TX_MOMENTS_BF16 ? TX_BF16
           : MOMENTS == TX_MOMENTS_U8   ? TX_U8
                                        : (tx_dtype)dtype;
  }
  static __device__ __forceinline__ bool scaled(tx_dtype moment) { return moment == TX_U8 || moment == TX_F16; }
  /* exp_avg_sq's scales lie behind exp_avg's, where that has some. */
  static __device__ __forceinline__ uint8_t *root_scales(const tx_step_entry &e) {
    return e.scales + (scaled(moment(e.exp_avg_dtype)) ? (uint64_t)(e.numel + TX_BLOCK - 1) / TX_BLOCK : 0);
  }

  static __device__ __forceinline__ void read(in_round &r, const tx_step_entry &e, const bool whole,
                                              const tx_here &here) {
    const tx_dtype m = moment(e.exp_avg_dtype), v = moment(e.exp_avg_sq_dtype);
    if (kMaster != TX_F32) tx_get(r.param, e.param, kParam, whole, e.param_alignment, here);
    if (kMaster != TX_NONE) tx_get(r.master, e.master, kMaster, whole, e.master_alignment, here);
    tx_get(r.exp_avg, e.exp_avg, m, whole, e.exp_avg_alignment, here);
    tx_get(r.exp_avg_sq, e.exp_avg_sq, v, whole, e.exp_avg_sq_alignment, here);
    r.exp_avg_scale = scaled(m) && here.count > 0 ? e.scales[tx_block_at(here)] : (uint8_t)0;
    r.exp_avg_sq_scale = scaled(v) && here.count > 0 ? root_scales(e)[tx_block_at(here)] : (uint8_t)0;
    if (e.grad_dtype == TX_F32) {
      tx_get(r.grad, e.grad, TX_F32, whole, e.grad_alignment, here);
    } else {
      tx_get(r.grad, e.grad, TX_BF16, whole, e.grad_alignment, here);
    }
  }

  static __device__ __forceinline__ void floats_of_moment(float (&x)[TX_VECTOR], const tx_raw &raw,
                                                          const tx_dtype dtype, const tx_format format, uint8_t scale) {
    if (dtype == TX_F32) {
      tx_plain_floats(x, raw, TX_F32);
    } else if (dtype == TX_BF16) {
      tx_plain_floats(x, raw, TX_BF16);
    } else {
      if (dtype == TX_U8) {
        tx_quick_values(x, raw, scale, format);
      } else {
        tx_block_values(x, raw, scale, TX_F16, format);
      }
#pragma unroll
      for (int i = 0; i < TX_VECTOR; i++)
        x[i] = format == TX_FORMAT_SQRT ? x[i] * x[i] : x[i];
    }
  }

  static __device__ __forceinline__ void store_weight(const float (&p)[TX_VECTOR], const tx_step_entry &e,
                                                      const tx_here &here, const tx_noise &noise, int32_t rounding) {
    const tx_rounded to_master = {e.master, NULL, e.master_alignment, TX_NEAREST};
    const tx_rounded to_param = {e.param, NULL, e.param_alignment, kMaster == TX_NONE ? rounding : (int32_t)TX_NEAREST};
    if (kMaster == TX_I16) {
      tx_raw weights, remainders;
      tx_quick_split(weights, remainders, p);
      tx_put(weights, e.param, kParam, e.param_alignment, here);
      tx_put(remainders, e.master, TX_I16, e.master_alignment, here);
      return;
    }
    if (kMaster == TX_F32) tx_put_plain(p, TX_F32, to_master, here, noise);
    tx_put_plain(p, kParam, to_param, here, noise);
  }

  /* x: the moment, or its square root where that is what is stored. */
  static __device__ __forceinline__ void store_moment(const float (&plain)[TX_VECTOR], const float (&x)[TX_VECTOR],
                                                      const tx_dtype dtype, const tx_format format,
                                                      const tx_rounded &to, const tx_here &here,
                                                      const tx_noise &noise) {
    if (dtype == TX_F32) {
      tx_put_plain(plain, TX_F32, to, here, noise);
    } else if (dtype == TX_BF16) {
      tx_put_plain(plain, TX_BF16, to, here, noise);
    } else if (dtype == TX_U8) {
      tx_put_scaled(x, TX_U8, format, to, here, noise);
    } else {
      tx_put_scaled(x, TX_F16, format, to, here, noise);
    }
  }

  /* drops: remainders are read as zeros. */
  static __device__ __forceinline__ void round(const tx_step_table &t, const tx_step_entry &e, const of_tensor &w,
                                               const tx_here &here, bool drops) {
    const tx_dtype m_dtype = moment(e.exp_avg_dtype), v_dtype = moment(e.exp_avg_sq_dtype);
    in_round r;
    if (here.whole) {
      read(r, e, true, here);
    } else {
      read(r, e, false, here);
    }
    if (kMaster == TX_I16 && drops) {
#pragma unroll
      for (int i = 0; i < TX_VECTOR / 2; i++)
        r.master[i] = 0;
    }
    float g[TX_VECTOR], p[TX_VECTOR], m[TX_VECTOR], v[TX_VECTOR], root[TX_VECTOR];
    if (e.grad_dtype == TX_F32) {
      tx_plain_floats(g, r.grad, TX_F32);
    } else if (e.grad_dtype == TX_BF16) {
      tx_plain_floats(g, r.grad, TX_BF16);
    } else {
      tx_plain_floats(g, r.grad, TX_F16);
    }
    if (kMaster == TX_I16) {
      tx_quick_join(p, r.param, r.master);
    } else {
      tx_plain_floats(p, kMaster == TX_F32 ? r.master : r.param, kMaster == TX_F32 ? TX_F32 : kParam);
    }
    floats_of_moment(m, r.exp_avg, m_dtype, TX_FORMAT_SIGNED, r.exp_avg_scale);
    floats_of_moment(v, r.exp_avg_sq, v_dtype, TX_FORMAT_SQRT, r.exp_avg_sq_scale);
    if (w.usual) {
      average(g, p, m, v, root, w.constants, 1);
    } else {
      average(g, p, m, v, root, w.constants, 0);
    }
#pragma unroll
    for (int i = 0; i < TX_VECTOR; i++)
      p[i] = tx_adamw_update(w.constants, p[i], m[i], root[i]);
    store_weight(p, e, here, w.param, t.common.weight_rounding);
    const int32_t rounding = t.common.moment_rounding;
    const tx_rounded to_m = {e.exp_avg, e.scales, e.exp_avg_alignment, rounding};
    const tx_rounded to_v = {e.exp_avg_sq, root_scales(e), e.exp_avg_sq_alignment, rounding};
    store_moment(m, m, m_dtype, TX_FORMAT_SIGNED, to_m, here, w.exp_avg);
    store_moment(v, root, v_dtype, TX_FORMAT_SQRT, to_v, here, w.exp_avg_sq);
  }

  static __device__ __forceinline__ void average(const float (&g)[TX_VECTOR], const float (&p)[TX_VECTOR],
                                                 float (&m)[TX_VECTOR], float (&v)[TX_VECTOR], float (&root)[TX_VECTOR],
                                                 const tx_adamw_constants &c, const int usual) {
#pragma unroll
    for (int i = 0; i < TX_VECTOR; i++) {
      const tx_adamw_moments s = tx_adamw_average(c, usual, g[i], p[i], m[i], v[i]);
      m[i] = s.m;
      v[i] = s.v;
      root[i] = s.root;
    }
  }
};

}  // namespace

#endif
