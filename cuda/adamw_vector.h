/* One round of the step: TX_VECTOR elements of each stream per lane. Included by adamw_kernel.h. */
#ifndef TX_CUDA_ADAMW_VECTOR_H
#define TX_CUDA_ADAMW_VECTOR_H

#include "cuda/adamw_round.h"
#include "cuda/adamw_tensor.h"

namespace {

template <int WEIGHT, int MOMENTS>
struct round_ops {
  typedef round_layout<WEIGHT, MOMENTS> layout;
  static constexpr bool kQuick = layout::kQuick, kHalves = layout::kHalves;
  static constexpr tx_access kAccess = layout::kAccess;

  static __device__ __forceinline__ tx_dtype param_of(const tx_step_entry &e) {
    return tx_param_of_weight(WEIGHT == TX_WEIGHT_ANY ? e.weight : WEIGHT);
  }
  static __device__ __forceinline__ tx_dtype master_of(const tx_step_entry &e) {
    return tx_master_of_weight(WEIGHT == TX_WEIGHT_ANY ? e.weight : WEIGHT);
  }
  static __device__ __forceinline__ tx_dtype moment(uint8_t dtype) {
    return MOMENTS == TX_MOMENTS_F32    ? TX_F32
           : MOMENTS == TX_MOMENTS_BF16 ? TX_BF16
           : MOMENTS == TX_MOMENTS_U8   ? TX_U8
                                        : (tx_dtype)dtype;
  }
  static __device__ __forceinline__ bool scaled(tx_dtype moment) { return moment == TX_U8 || moment == TX_F16; }

  /* Reads weight and master, as far as the step needs them. */
  static __device__ __forceinline__ void read_weight(round_data &r, const tx_step_entry &e, const tx_access access,
                                                     const tx_lane_elements &here) {
    const tx_dtype master = master_of(e);
    if (master != TX_F32) tx_get(r.param, e.param, param_of(e), access, e.param_alignment, here);
    if (master != TX_NONE) tx_get(r.master, e.master, master, access, e.master_alignment, here);
  }
  static __device__ __forceinline__ void drop_remainders(round_data &r, const tx_step_entry &e, bool drops) {
    if (master_of(e) != TX_I16 || !drops) return;
#pragma unroll
    for (int i = 0; i < TX_VECTOR / 2; i++)
      r.master[i] = 0;
  }

  static __device__ __forceinline__ void read(round_data &r, const tx_step_entry &e, const tx_access access,
                                              const tx_lane_elements &here) {
    const tx_dtype m = moment(e.exp_avg_dtype), v = moment(e.exp_avg_sq_dtype);
    read_weight(r, e, access, here);
    tx_get(r.exp_avg, e.exp_avg, m, access, e.exp_avg_alignment, here);
    tx_get(r.exp_avg_sq, e.exp_avg_sq, v, access, e.exp_avg_sq_alignment, here);
    r.exp_avg_scale = scaled(m) && here.count > 0 ? e.scales[tx_block_at(here)] : 0u;
    r.exp_avg_sq_scale = scaled(v) && here.count > 0 ? e.root_scales[tx_block_at(here)] : 0u;
    if (e.grad_dtype == TX_F32) {
      tx_get(r.grad, e.grad, TX_F32, access, e.grad_alignment, here);
    } else {
      tx_get(r.grad, e.grad, TX_BF16, access, e.grad_alignment, here);
    }
  }

  static __device__ __forceinline__ void write_weight(const round_data &r, const tx_step_entry &e,
                                                      const tx_access access, const tx_lane_elements &here) {
    tx_put(r.param, e.param, param_of(e), access, e.param_alignment, here);
    if (master_of(e) != TX_NONE) tx_put(r.master, e.master, master_of(e), access, e.master_alignment, here);
  }

  static __device__ __forceinline__ void write_moments(const round_data &r, const tx_step_entry &e,
                                                       const tx_access access, const tx_lane_elements &here) {
    tx_put(r.exp_avg, e.exp_avg, moment(e.exp_avg_dtype), access, e.exp_avg_alignment, here);
    tx_put(r.exp_avg_sq, e.exp_avg_sq, moment(e.exp_avg_sq_dtype), access, e.exp_avg_sq_alignment, here);
  }

  /* The values of a moment. quick: by the fast path. Returns whether they are right; always true if not quick. */
  static __device__ __forceinline__ bool floats_of_moment(float (&x)[TX_VECTOR], const tx_raw &raw,
                                                          const tx_dtype dtype, const tx_format format, uint32_t scale,
                                                          const bool quick) {
    bool right = true;
    if (!scaled(dtype)) {
      tx_floats_of(x, raw, dtype);
    } else {
      if (dtype == TX_F16) {
        tx_block_values(x, raw, (uint8_t)scale, TX_F16, format);
      } else if (quick) {
        right = tx_quick_values(x, raw, scale, format);
      } else {
        tx_block_values(x, raw, (uint8_t)scale, TX_U8, format);
      }
#pragma unroll
      for (int i = 0; i < TX_VECTOR; i++)
        x[i] = format == TX_FORMAT_SQRT ? x[i] * x[i] : x[i];
    }
    return right;
  }

  /* Rounds a moment to what is stored; nothing for moments with block scales, which are encoded later. */
  static __device__ __forceinline__ void raw_of_moment(tx_raw &raw, const float (&x)[TX_VECTOR], const tx_dtype dtype,
                                                       int32_t rounding, const bool quick, const tx_lane_elements &here,
                                                       const tx_noise &noise) {
    if (!scaled(dtype)) tx_round_plain(raw, x, dtype, rounding, quick, here, noise);
  }

  /* Computes the step of r into x and `to` (but not yet moments with block scales in `to`). rounding: of the moments.
   * Returns whether the result is right; always true if not quick. */
  static __device__ __forceinline__ bool update(const round_data &r, round_data &to, tx_stepped &x,
                                                const tx_step_table &t, const tx_step_entry &e, const tensor_state &w,
                                                const tx_lane_elements &here, const float (&g)[TX_VECTOR],
                                                const int32_t rounding, const bool quick) {
    const tx_dtype m_dtype = moment(e.exp_avg_dtype), v_dtype = moment(e.exp_avg_sq_dtype);
    const tx_dtype param = param_of(e), master = master_of(e);
    if (master == TX_F32) {
      tx_plain_floats(x.p, r.master, TX_F32);
    } else if (master == TX_NONE) {
      tx_floats_of(x.p, r.param, param);
    } else if (quick) {
      tx_quick_join(x.p, r.param, r.master);
    } else {
      tx_join(x.p, r.param, r.master);
    }
    bool right = floats_of_moment(x.m, r.exp_avg, m_dtype, TX_FORMAT_SIGNED, r.exp_avg_scale, quick);
    right = floats_of_moment(x.v, r.exp_avg_sq, v_dtype, TX_FORMAT_SQRT, r.exp_avg_sq_scale, quick) & right;
    if (quick) {
      right = tx_quick_update(x, g, w.constants) & right;
    } else {
      tx_update(x, g, w.constants);
    }
    if (master != TX_I16) {
      /* In the rare kernels it is recomputed, to save registers. */
      const tx_noise noise = kQuick ? w.param : noise_of(t, e, w, TX_LANE_PARAM);
      tx_round_plain(to.param, x.p, param, master == TX_NONE ? t.common.weight_rounding : (int32_t)TX_NEAREST, quick,
                     here, noise);
      if (master == TX_F32) tx_round_plain(to.master, x.p, TX_F32, TX_NEAREST, quick, here, noise);
    } else if (quick) {
      tx_quick_split(to.param, to.master, x.p);
      if (tx_has_tie(tx_ties_of(tx_ties_of(TX_NO_TIES, r.master), to.master))) { /* in one of 128 rounds */
        tx_split(to.param, to.master, x.p);
        right = right & !tx_has_odd_tie(r.param, r.master);
      }
    } else {
      tx_split(to.param, to.master, x.p);
    }
    raw_of_moment(to.exp_avg, x.m, m_dtype, rounding, quick, here, w.exp_avg);
    raw_of_moment(to.exp_avg_sq, x.v, v_dtype, rounding, quick, here, w.exp_avg_sq);
    return right;
  }

  /* Reads a round and computes its step; arguments and result as update's. drops: whether remainders are read as
   * zeros. */
  static __device__ __forceinline__ bool take(round_data &to, tx_stepped &x, const tx_step_table &t,
                                              const tx_step_entry &e, const tensor_state &w,
                                              const tx_lane_elements &here, bool drops, const bool quick) {
    round_data r;
    if (here.whole && (quick || kHalves)) {
      read(r, e, kAccess, here);
    } else {
      read(r, e, TX_ACCESS_ANY, here);
    }
    drop_remainders(r, e, drops);
    float g[TX_VECTOR];
    tx_floats_of(g, r.grad, (tx_dtype)e.grad_dtype);
    return update(r, to, x, t, e, w, here, g, t.common.moment_rounding, quick);
  }

  /* Computes the extra outputs of a round: its new values are in `to` and not written yet, so memory still has the old
   * ones. */
  static __device__ __forceinline__ void note_extras(const tx_step_table &t, const tx_step_entry &e,
                                                     const tensor_state &w, const tx_lane_elements &here,
                                                     const tile_writes &writes, const round_data &to) {
    round_data was;
    tx_read_again(); /* not kept in registers, as in round() */
    if (here.whole) {
      read_weight(was, e, kAccess, here);
    } else {
      read_weight(was, e, TX_ACCESS_ANY, here);
    }
    drop_remainders(was, e, writes.drops);
    const tx_vector_weights before = {&was.param, &was.master}, now = {&to.param, &to.master};
    note_vector(t, e, w.extras, here, writes.written, before, now, param_of(e), master_of(e));
  }

  /* The block's amax of both moments; 0 for those that do not have 8 bits. Every lane of the warp has to call it. */
  static __device__ __forceinline__ void find_amaxes(int32_t &m_amax, int32_t &root_amax, const tx_step_entry &e,
                                                     const tx_stepped &x) {
    /* Both at a time: each is a chain of four shuffles, which wait for each other. */
    m_amax = moment(e.exp_avg_dtype) == TX_U8 ? tx_block_largest((int32_t)x.m_amax) : 0;
    root_amax = moment(e.exp_avg_sq_dtype) == TX_U8 ? tx_block_largest((int32_t)x.root_amax) : 0;
  }

  /* tx_round_scaled for a dtype that may be known at run time only. */
  static __device__ __forceinline__ uint32_t encode(tx_raw &raw, const float (&x)[TX_VECTOR], const tx_dtype dtype,
                                                    const tx_format format, int32_t rounding, bool quick, int32_t amax,
                                                    const tx_lane_elements &here, const tx_noise &noise) {
    if (dtype == TX_U8) return tx_round_scaled(raw, x, TX_U8, format, rounding, quick, amax, here, noise);
    return tx_round_scaled(raw, x, TX_F16, format, rounding, false, 0, here, noise);
  }

  /* Steps a round. now: receives what the tile needs of it. may_be_quick: whether the fast path is worth trying. */
  static __device__ __forceinline__ void round(const tx_step_table &t, const tx_step_entry &e, const tensor_state &w,
                                               const tx_lane_elements &here, const tile_writes &writes,
                                               stepped_round &now, bool may_be_quick) {
    const tx_dtype m_dtype = moment(e.exp_avg_dtype), v_dtype = moment(e.exp_avg_sq_dtype);
    round_data to;
    tx_stepped x;
    const bool quick = kQuick && may_be_quick && take(to, x, t, e, w, here, writes.drops, true);
    if (!quick) {
      /* The fast path failed. Nothing is written yet, so the round is read again: keeping it would cost all rounds
       * registers. */
      tx_read_again();
      (void)take(to, x, t, e, w, here, writes.drops, false);
    }
    if constexpr (kHasExtras) note_extras(t, e, w, here, writes, to);
    if (here.whole) {
      write_weight(to, e, kAccess, here);
    } else {
      write_weight(to, e, TX_ACCESS_ANY, here);
#pragma unroll
      for (int i = 0; i < TX_VECTOR / 2; i++)
        to.param[i] &= (here.count > 2 * i ? 0xffffu : 0u) | (here.count > 2 * i + 1 ? 0xffff0000u : 0u);
    }
#pragma unroll
    for (int i = 0; i < TX_VECTOR / 2; i++)
      now.weights[i] = to.param[i];
    now.exp_avg_scale = now.exp_avg_sq_scale = 0;
    const int32_t rounding = t.common.moment_rounding;
    int32_t m_amax = 0, root_amax = 0;
    bool encodes = false; /* by the fast path */
    if constexpr (MOMENTS == TX_MOMENTS_U8) {
      find_amaxes(m_amax, root_amax, e, x);
      encodes = __any_sync(0xffffffffu, !(quick & (m_amax != 0))) == 0;
    }
    if (scaled(m_dtype))
      now.exp_avg_scale =
          encode(to.exp_avg, x.m, m_dtype, TX_FORMAT_SIGNED, rounding, encodes, m_amax, here, w.exp_avg);
    if (scaled(v_dtype))
      now.exp_avg_sq_scale =
          encode(to.exp_avg_sq, x.root, v_dtype, TX_FORMAT_SQRT, rounding, encodes, root_amax, here, w.exp_avg_sq);
    if (here.whole) {
      write_moments(to, e, kAccess, here);
    } else {
      write_moments(to, e, TX_ACCESS_ANY, here);
    }
    if (scaled(m_dtype)) tx_write_scale(e.scales, (uint8_t)now.exp_avg_scale, here.first, here.count);
    if (scaled(v_dtype)) tx_write_scale(e.root_scales, (uint8_t)now.exp_avg_sq_scale, here.first, here.count);
  }
};

}  // namespace

#endif
