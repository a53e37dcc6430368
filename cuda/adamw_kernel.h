/* The kernel of the step. A warp takes a tile, a round of TX_ROUND elements at a time, and shares nothing with other
 * warps, so that there is no barrier but the one at the end, when the last block to finish counts the steps. Included
 * by the files that instantiate it. */
#ifndef TX_CUDA_ADAMW_KERNEL_H
#define TX_CUDA_ADAMW_KERNEL_H

#include "cuda/adamw_gate.h"
#include "cuda/adamw_streams.h"
#include "cuda/ticket.h"
#include "cuda/witness.h"

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

/* What a warp knows of the tensor it is in; kept while the tensor stays the same. */
struct of_tensor {
  int32_t tensor, group;
  int64_t step;
  tx_adamw_constants constants;
  bool usual;
  tx_thresholds exp_avg, exp_avg_sq, param;
};

__device__ __forceinline__ void enter_tensor(of_tensor &w, const tx_step_table &t, int32_t tensor,
                                             const tx_step_admission &admitted) {
  if (w.tensor == tensor) return;
  const tx_step_entry &e = t.entries[tensor];
  const int64_t step = (int64_t)tx_read_value<float>(e.step) + 1;
  if (w.tensor < 0 || w.group != e.group || w.step != step) {
    const tx_step_group &g = t.common.groups[e.group];
    const double lr = g.lr ? tx_read_double(g.lr, g.lr_dtype) : g.group.lr;
    w.constants = tx_adamw_prepare(&g.group, lr, step, admitted.clip_coef, admitted.grad_scale);
    w.usual = tx_adamw_is_usual(&w.constants);
    w.group = e.group;
    w.step = step;
  }
  w.exp_avg = tx_thresholds_of(t.common.seed, e.id, step, TX_LANE_EXP_AVG, e.start);
  w.exp_avg_sq = tx_thresholds_of(t.common.seed, e.id, step, TX_LANE_EXP_AVG_SQ, e.start);
  w.param = tx_thresholds_of(t.common.seed, e.id, step, TX_LANE_PARAM, e.start);
  w.tensor = tensor;
}

/* A lane's elements of one round. */
struct in_round {
  tx_stored grad, param, master, exp_avg, exp_avg_sq;
  uint8_t exp_avg_scale, exp_avg_sq_scale;
};

template <int WEIGHT, int MOMENTS>
struct kernel_of {
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
    return e.scales + (scaled(moment(e.exp_avg_dtype)) ? (e.numel + TX_BLOCK - 1) / TX_BLOCK : 0);
  }

  static __device__ __forceinline__ void read(in_round &r, const tx_step_entry &e, const bool whole,
                                              const tx_here &here) {
    const tx_dtype m = moment(e.exp_avg_dtype), v = moment(e.exp_avg_sq_dtype);
    if (kMaster != TX_F32) tx_read_stored(r.param, e.param, kParam, whole, e.param_alignment, here);
    if (kMaster != TX_NONE) tx_read_stored(r.master, e.master, kMaster, whole, e.master_alignment, here);
    tx_read_stored(r.exp_avg, e.exp_avg, m, whole, e.exp_avg_alignment, here);
    tx_read_stored(r.exp_avg_sq, e.exp_avg_sq, v, whole, e.exp_avg_sq_alignment, here);
    r.exp_avg_scale = scaled(m) ? tx_read_scale(e.scales, here) : (uint8_t)0;
    r.exp_avg_sq_scale = scaled(v) ? tx_read_scale(root_scales(e), here) : (uint8_t)0;
    tx_read_stored(r.grad, e.grad, (tx_dtype)e.grad_dtype, whole, e.grad_alignment, here);
  }

  static __device__ __forceinline__ void floats_of_weight(float (&p)[TX_VECTOR], const in_round &r) {
    if (kMaster == TX_I16) {
#pragma unroll
      for (int i = 0; i < TX_VECTOR; i++) {
        const uint32_t weight = r.param.words[i / 2], remainder = r.master.words[i / 2];
        p[i] = tx_remainder_join(i % 2 ? weight & 0xffff0000u : weight << 16,
                                 (int32_t)(i % 2 ? remainder : remainder << 16));
      }
    } else {
      tx_floats_of_plain(p, kMaster == TX_F32 ? r.master : r.param, kMaster == TX_F32 ? TX_F32 : kParam);
    }
  }

  static __device__ __forceinline__ void store_weight(const float (&p)[TX_VECTOR], const tx_step_entry &e,
                                                      const tx_here &here, const tx_thresholds &thresholds,
                                                      int32_t rounding) {
    if (kMaster == TX_I16) {
      tx_stored weight, remainder;
#pragma unroll
      for (int i = 0; i < TX_VECTOR; i++) {
        const tx_remainder_halves halves = tx_remainder_split(p[i]);
        tx_put_half(weight, i, halves.upper >> 16);
        tx_put_half(remainder, i, halves.lower & 0xffffu);
      }
      tx_write_stored<2>(weight, e.param, e.param_alignment, here);
      tx_write_stored<2>(remainder, e.master, e.master_alignment, here);
    } else if (kMaster == TX_F32) {
      tx_store_f32(p, e.master, e.master_alignment, here);
      tx_store_nearest(p, kParam, e.param, e.param_alignment, here);
    } else if (kParam == TX_F32) {
      tx_store_f32(p, e.param, e.param_alignment, here);
    } else {
      tx_store_rounded(p, kParam, e.param, e.param_alignment, here, thresholds, rounding);
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
        r.master.words[i] = 0;
    }
    float g[TX_VECTOR], p[TX_VECTOR], m[TX_VECTOR], v[TX_VECTOR], root[TX_VECTOR];
    tx_floats_of_plain(g, r.grad, (tx_dtype)e.grad_dtype);
    floats_of_weight(p, r);
    tx_floats_of_moment(m, r.exp_avg, m_dtype, false, r.exp_avg_scale);
    tx_floats_of_moment(v, r.exp_avg_sq, v_dtype, true, r.exp_avg_sq_scale);
    if (w.usual) {
#pragma unroll
      for (int i = 0; i < TX_VECTOR; i++) {
        const tx_adamw_moments s = tx_adamw_average(w.constants, 1, g[i], p[i], m[i], v[i]);
        m[i] = s.m;
        v[i] = s.v;
        root[i] = s.root;
      }
    } else {
#pragma unroll
      for (int i = 0; i < TX_VECTOR; i++) {
        const tx_adamw_moments s = tx_adamw_average(w.constants, 0, g[i], p[i], m[i], v[i]);
        m[i] = s.m;
        v[i] = s.v;
        root[i] = s.root;
      }
    }
#pragma unroll
    for (int i = 0; i < TX_VECTOR; i++)
      p[i] = tx_adamw_update(w.constants, p[i], m[i], root[i]);
    store_weight(p, e, here, w.param, t.common.weight_rounding);
    const tx_moment_stream to_m = {e.exp_avg, e.scales, e.exp_avg_alignment, t.common.moment_rounding};
    const tx_moment_stream to_v = {e.exp_avg_sq, root_scales(e), e.exp_avg_sq_alignment, t.common.moment_rounding};
    store_moment(m, m, m_dtype, false, to_m, here, w.exp_avg);
    store_moment(v, root, v_dtype, true, to_v, here, w.exp_avg_sq);
  }

  static __device__ __forceinline__ void store_moment(const float (&x)[TX_VECTOR], const float (&scaled_x)[TX_VECTOR],
                                                      const tx_dtype dtype, const bool root, const tx_moment_stream &to,
                                                      const tx_here &here, const tx_thresholds &thresholds) {
    if (dtype == TX_F32) {
      tx_store_f32(x, to.data, to.alignment, here);
    } else if (dtype == TX_BF16) {
      tx_store_rounded(x, TX_BF16, to.data, to.alignment, here, thresholds, to.rounding);
    } else if (dtype == TX_U8) {
      tx_store_scaled(scaled_x, TX_U8, root, to, here, thresholds);
    } else {
      tx_store_scaled(scaled_x, TX_F16, root, to, here, thresholds);
    }
  }

  /* Returns how many weights are in a block of remainders that was dropped. */
  static __device__ __forceinline__ int64_t tile(const tx_step_table &t, const tx_tile &tile, const of_tensor &w) {
    const tx_step_entry &e = t.entries[tile.tensor];
    const uint32_t lane = tx_lane_id();
    const void *const weights = (const char *)e.param + 2 * tile.begin;
    bool drops = false;
    if (kMaster == TX_I16 && e.witnesses && t.common.resyncs) {
      const void *witness = (const char *)e.witnesses + tile.begin / TX_WITNESS * 8;
      drops = tx_witness_differs(witness, tx_witness_of(weights, e.param_alignment, tile.count, lane));
    }
    for (int32_t i = 0; i < tx_rounds(tile.count); i++) {
      const tx_share share = tx_share_of_tile(tile.count, i, lane);
      const tx_here here = {tile.begin + share.first, share.count, e.aligned && tile.count - i * TX_ROUND >= TX_ROUND};
      round(t, e, w, here, drops);
    }
    if (kMaster != TX_NONE && e.witnesses) {
      __syncwarp();
      const bool samples = kMaster == TX_F32 && e.numel > TX_SAMPLED;
      const uint64_t witness = samples ? tx_sample_of(weights, e.param_alignment, tile.count, lane)
                                       : tx_witness_of(weights, e.param_alignment, tile.count, lane);
      const int64_t unit = kMaster == TX_F32 ? TX_SAMPLED : TX_WITNESS;
      if (lane == 0) tx_write_value((char *)e.witnesses + tile.begin / unit * 8, witness);
    }
    return drops ? tile.count : 0;
  }
};

/* Once every block has read the steps, the last one adds to them. */
__device__ __forceinline__ void count_steps(const tx_step_table &t) {
  if (!tx_is_last_block(t.common.ticket)) return;
  for (int32_t i = (int32_t)threadIdx.x; i < t.n; i += (int32_t)blockDim.x)
    tx_write_value(t.entries[i].step, tx_read_value<float>(t.entries[i].step) + 1.0f);
}

template <int WEIGHT, int MOMENTS>
__global__ void __launch_bounds__(TX_BLOCK_THREADS) step(const __grid_constant__ tx_step_table t) {
  const tx_step_admission admitted = tx_step_admitted(t.common.gate);
  if (admitted.skips) {
    if (blockIdx.x == 0 && threadIdx.x == 0) tx_count(t.common.skipped, 1);
    return;
  }
  of_tensor w = {};
  w.tensor = -1;
  int64_t resynced = 0;
  const int64_t tiles = tx_table_tiles(t);
  for (int64_t number = tx_first_tile(); number < tiles; number += tx_tile_step()) {
    const tx_tile tile = tx_table_tile(t, number);
    enter_tensor(w, t, tile.tensor, admitted);
    resynced += kernel_of<WEIGHT, MOMENTS>::tile(t, tile, w);
  }
  if (tx_lane_id() == 0) tx_count(t.common.resynced, resynced);
  count_steps(t);
}

/* tx_step_launch for one kind of moments. */
template <int MOMENTS>
tx_status launch_step(const tx_cuda_scope *scope, int weight, tx_step_table &table, tx_error *error) {
  static void (*const kernels[TX_WEIGHTS])(tx_step_table) = {
#define TX_ENTRY_(index, ...) step<index, MOMENTS>,
      TX_FOR_EACH_WEIGHT(TX_ENTRY_)
#undef TX_ENTRY_
  };
  table.common.ticket = tx_take_ticket(scope);
  return tx_cuda_launch_always(scope, kernels[weight], table, "the step", error);
}

}  // namespace

#endif
