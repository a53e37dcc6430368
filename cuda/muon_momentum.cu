/* Muon's first pass on the device; see tx_muon_momentum. */
#include "csrc/math/muon.h"
#include "cuda/device_scalars.h"
#include "cuda/launch.h"
#include "cuda/vector_forms.h"

extern "C" {
#include "csrc/ops/operator_checks.h"
#include "csrc/ops/tensor.h"
}

namespace {

struct entry {
  int64_t numel;
  const void *grad;
  void *momentum, *work;
  uint8_t *scales; /* NULL: the momentum has none */
  const void *step;
  int64_t id, start;
  uint8_t grad_dtype, momentum_dtype, work_dtype;
  uint8_t grad_alignment, momentum_alignment, work_alignment;
};
struct common {
  const void *grad_scale, *clip_coef;
  double momentum;
  uint64_t seed;
  int32_t nesterov, rounding;
};
typedef tx_table<common, entry> table;

__device__ __forceinline__ void read_momentum(float (&m)[TX_VECTOR], const entry &e, int64_t first, int32_t count) {
  if (!e.scales) return tx_read_floats(m, e.momentum, (tx_dtype)e.momentum_dtype, e.momentum_alignment, first, count);
  tx_raw raw = {};
  const uint8_t scale = count > 0 ? e.scales[first / TX_BLOCK] : (uint8_t)0;
  if (e.momentum_dtype == TX_U8) {
    tx_read_raw(raw, e.momentum, 1, e.momentum_alignment, first, count);
    tx_scaled_floats(m, raw, scale, TX_U8, TX_FORMAT_MOMENTUM);
  } else {
    tx_read_raw(raw, e.momentum, 2, e.momentum_alignment, first, count);
    tx_scaled_floats(m, raw, scale, TX_F16, TX_FORMAT_MOMENTUM);
  }
}

/* Every lane of the warp has to call it. */
__device__ __forceinline__ void write_momentum(const float (&m)[TX_VECTOR], const entry &e, const tx_noise &noise,
                                               int32_t rounding, int64_t first, int32_t count) {
  tx_raw raw;
  uint32_t u[TX_VECTOR] = {};
  const int rounded = rounding != TX_NEAREST;
  const int bytes = e.momentum_dtype == TX_F32 ? 4 : e.momentum_dtype == TX_U8 ? 1 : 2;
  if (rounded) tx_thresholds(u, noise, (uint32_t)first, 0, rounding);
  if (e.scales) {
    const uint8_t scale = e.momentum_dtype == TX_U8 ? tx_encode_block(raw, m, u, rounded, TX_U8, TX_FORMAT_MOMENTUM)
                                                    : tx_encode_block(raw, m, u, rounded, TX_F16, TX_FORMAT_MOMENTUM);
    tx_write_scale(e.scales, scale, first, count);
  } else if (e.momentum_dtype == TX_F32) {
    tx_plain_raw(raw, m, u, 0, TX_F32);
  } else {
    tx_plain_raw(raw, m, u, rounded, TX_BF16);
  }
  if (count > 0) tx_write_raw(raw, e.momentum, bytes, e.momentum_alignment, first, count);
}

__device__ __forceinline__ void write_work(const float (&x)[TX_VECTOR], const entry &e, int64_t first, int32_t count) {
  const uint32_t none[TX_VECTOR] = {};
  tx_raw raw;
  if (e.work_dtype == TX_F32) {
    tx_plain_raw(raw, x, none, 0, TX_F32);
  } else {
    tx_plain_raw(raw, x, none, 0, TX_BF16);
  }
  if (count > 0) tx_write_raw(raw, e.work, e.work_dtype == TX_F32 ? 4 : 2, e.work_alignment, first, count);
}

__device__ __forceinline__ void average(const tx_muon_constants &c, const entry &e, const tx_noise &noise,
                                        const common &all, int64_t first, int32_t count) {
  float g[TX_VECTOR], m[TX_VECTOR], u[TX_VECTOR];
  tx_read_floats(g, e.grad, (tx_dtype)e.grad_dtype, e.grad_alignment, first, count);
  read_momentum(m, e, first, count);
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++) {
    const tx_muon_moments r = tx_muon_average(c, g[i], m[i], all.nesterov);
    m[i] = i < count ? r.m : 0.0f; /* so that elements beyond the end do not count in a block's amax */
    u[i] = r.u;
  }
  write_momentum(m, e, noise, all.rounding, first, count);
  write_work(u, e, first, count);
}

__global__ void __launch_bounds__(TX_BLOCK_THREADS) momentum(const __grid_constant__ table t) {
  const common &all = t.common;
  const tx_muon_constants c =
      tx_muon_prepare(all.momentum, tx_read_float_or(all.clip_coef, 1.0f), tx_read_float_or(all.grad_scale, 1.0f));
  const int64_t tiles = tx_table_tiles(t);
  for (int64_t number = tx_first_tile(); number < tiles; number += tx_tile_step()) {
    const tx_tile tile = tx_table_tile(t, number);
    const entry &e = t.entries[tile.tensor];
    const int64_t step = (int64_t)tx_read_value<float>(e.step) + 1;
    const tx_noise noise = tx_noise_at(all.seed, e.id, TX_LANE_EXP_AVG, step, e.start);
    for (int32_t round = 0; round < tx_rounds(tile.count); round++) {
      const tx_share share = tx_share_of_tile(tile.count, round, tx_lane_id());
      average(c, e, noise, all, tile.begin + share.first, share.count);
    }
  }
}

void *data_of(tx_tensor tensor) {
  return tensor.numel ? tensor.data : NULL;
}

entry entry_of(const tx_muon_momentum_args *a, int64_t i) {
  const tx_meta meta = tx_meta_of(a->meta, i);
  entry e = {};
  e.numel = a->grads[i].numel;
  e.grad = a->grads[i].data;
  e.momentum = a->momentums[i].data;
  e.work = a->updates[i].data;
  e.scales = (uint8_t *)data_of(tx_at_or_none(a->scales, i));
  e.step = a->steps[i].data;
  e.id = meta.id;
  e.start = meta.start;
  e.grad_dtype = (uint8_t)a->grads[i].dtype;
  e.momentum_dtype = (uint8_t)a->momentums[i].dtype;
  e.work_dtype = (uint8_t)a->updates[i].dtype;
  e.grad_alignment = (uint8_t)tx_alignment_of(e.grad);
  e.momentum_alignment = (uint8_t)tx_alignment_of(e.momentum);
  e.work_alignment = (uint8_t)tx_alignment_of(e.work);
  return e;
}

tx_status run(const tx_cuda_scope *scope, const tx_muon_momentum_args *a, tx_error *error) {
  static const char name[] = "Muon's momentum";
  table t;
  t.common =
      common{data_of(a->grad_scale), data_of(a->clip_coef), a->momentum, a->seed, a->nesterov, a->moment_rounding};
  const auto launch = [&] { return tx_cuda_launch(scope, momentum, t, name, error); };
  TX_FORWARD(tx_table_fill(
      &t, 4 * TX_ROUND, a->n, [&](int64_t i) { return entry_of(a, i); }, launch));
  return launch();
}

}  // namespace

tx_status tx_cuda_muon_momentum(const tx_muon_momentum_args *args, const tx_cuda_call *call, tx_error *error) {
  tx_cuda_scope scope;
  TX_FORWARD(tx_check_muon_momentum(args, 0, error));
  TX_FORWARD(tx_cuda_enter(call, &scope, error));
  return tx_cuda_leave(&scope, run(&scope, args, error));
}
