/* Muon's second pass on the device; see tx_muon_update. A matrix is an entry of its own: it has its own rate, and may
 * begin anywhere. */
#include "csrc/math/muon.h"
#include "cuda/device_scalars.h"
#include "cuda/external_writes_notes.h"
#include "cuda/launch.h"
#include "cuda/remainder_vector.h"
#include "cuda/vector_forms.h"

extern "C" {
#include "csrc/ops/operator_checks.h"
#include "csrc/ops/tensor.h"
}

namespace {

struct entry {
  int64_t numel;
  void *param, *master; /* NULL: there is none */
  const void *update, *step;
  int64_t id, start;
  float lr, decay;
  uint8_t param_dtype, master_dtype, update_dtype;
  uint8_t param_alignment, master_alignment, update_alignment;
};
struct common {
  uint64_t seed;
  int32_t rounding;
};
typedef tx_table<common, entry> table;

/* Masters that remainders and weights make. */
__device__ __forceinline__ tx_split_masters split_masters(const entry &e) {
  return {e.param, e.master, e.param_alignment, e.master_alignment};
}

__device__ __forceinline__ void write_weights(const float (&p)[TX_VECTOR], const entry &e, const common &all,
                                              int64_t first, int32_t count) {
  tx_raw raw;
  uint32_t u[TX_VECTOR] = {};
  const int rounded = !e.master && e.param_dtype != TX_F32 && all.rounding != TX_NEAREST;
  if (rounded) {
    const int64_t step = (int64_t)tx_read_value<float>(e.step) + 1;
    const tx_noise noise = tx_noise_at(all.seed, e.id, TX_LANE_PARAM, step, e.start);
    tx_thresholds(u, noise, (uint32_t)first, 0, all.rounding);
  }
  if (e.param_dtype == TX_F32) {
    tx_plain_raw(raw, p, u, 0, TX_F32);
  } else if (e.param_dtype == TX_BF16) {
    tx_plain_raw(raw, p, u, rounded, TX_BF16);
  } else {
    tx_plain_raw(raw, p, u, rounded, TX_F16);
  }
  tx_write_raw(raw, e.param, e.param_dtype == TX_F32 ? 4 : 2, e.param_alignment, first, count);
}

__device__ __forceinline__ void step_vector(const entry &e, const common &all, int64_t first, int32_t count) {
  const bool joined = e.master_dtype == TX_I16, wide = e.master_dtype == TX_F32;
  float o[TX_VECTOR], p[TX_VECTOR];
  tx_read_floats(o, e.update, (tx_dtype)e.update_dtype, e.update_alignment, first, count);
  if (joined) {
    tx_read_split(p, split_masters(e), first, count);
  } else if (wide) {
    tx_read_floats(p, e.master, TX_F32, e.master_alignment, first, count);
  } else {
    tx_read_floats(p, e.param, (tx_dtype)e.param_dtype, e.param_alignment, first, count);
  }
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++)
    p[i] = tx_muon_step(e.lr, e.decay, p[i], o[i]);
  if (joined) return tx_write_split(p, split_masters(e), first, count);
  if (wide) tx_write_floats(p, e.master, TX_F32, e.master_alignment, first, count);
  write_weights(p, e, all, first, count);
}

__global__ void __launch_bounds__(TX_BLOCK_THREADS) update(const __grid_constant__ table t) {
  tx_each_vector(t, [&](const entry &e, int64_t first, int32_t count) { step_vector(e, t.common, first, count); });
}

/* -- counting steps, when everybody has read them ----------------------------------------------------------------- */

#define TX_COUNTED 512
struct counted {
  int32_t n;
  void *steps[TX_COUNTED];
};

__global__ void count(const __grid_constant__ counted c) {
  for (int32_t i = (int32_t)threadIdx.x; i < c.n; i += (int32_t)blockDim.x)
    tx_write_value(c.steps[i], tx_read_value<float>(c.steps[i]) + 1.0f);
}

tx_status count_steps(const tx_cuda_scope *scope, const tx_muon_update_args *a, tx_error *error) {
  counted c;
  for (int64_t first = 0; first < a->n; first += TX_COUNTED) {
    c.n = (int32_t)(a->n - first < TX_COUNTED ? a->n - first : TX_COUNTED);
    for (int32_t i = 0; i < c.n; i++)
      c.steps[i] = a->steps[first + i].data;
    TX_FORWARD(tx_cuda_launch_one(scope, count, c, TX_BLOCK_THREADS, "counting Muon's steps", error));
  }
  return TX_OK;
}

/* -- the call ------------------------------------------------------------------------------------------------------ */

/* The matrix of row k of parts. */
entry entry_of(const tx_muon_update_args *a, int64_t k) {
  const int64_t i = a->parts[k].tensor, begin = a->parts[k].begin;
  const bool last = k + 1 == a->n_parts || a->parts[k + 1].tensor != i;
  const tx_tensor master = tx_at_or_none(a->masters, i);
  const tx_meta meta = tx_meta_of(a->meta, i);
  entry e = {};
  e.numel = (last ? a->params[i].numel : a->parts[k + 1].begin) - begin;
  e.param = tx_advanced(a->params[i], begin);
  e.master = master.numel ? tx_advanced(master, begin) : NULL;
  e.update = tx_advanced(a->updates[i], begin);
  e.step = a->steps[i].data;
  e.id = meta.id;
  e.start = tx_element_at(meta, begin);
  e.lr = (float)a->rates[k].lr;
  e.decay = (float)a->rates[k].decay;
  e.param_dtype = (uint8_t)a->params[i].dtype;
  e.master_dtype = (uint8_t)(master.numel ? master.dtype : TX_NONE);
  e.update_dtype = (uint8_t)a->updates[i].dtype;
  e.param_alignment = (uint8_t)tx_alignment_of(e.param);
  e.master_alignment = (uint8_t)tx_alignment_of(e.master);
  e.update_alignment = (uint8_t)tx_alignment_of(e.update);
  return e;
}

tx_status step_all(const tx_cuda_scope *scope, const tx_muon_update_args *a, tx_error *error) {
  static const char name[] = "Muon's update";
  table t;
  t.common = common{a->seed, a->weight_rounding};
  const auto launch = [&] { return tx_cuda_launch(scope, update, t, name, error); };
  TX_FORWARD(tx_table_fill(
      &t, 4 * TX_ROUND, a->n_parts, [&](int64_t k) { return entry_of(a, k); }, launch));
  TX_FORWARD(launch());
  return count_steps(scope, a, error);
}

/* No kernel of Muon's has these. */
tx_status refuse_left_behind(const tx_muon_update_args *a, tx_error *error) {
  for (int64_t i = 0; i < a->n; i++) {
    if (!tx_at_or_none(a->changed, i).numel && !tx_at_or_none(a->emas, i).numel && !tx_at_or_none(a->healths, i).numel)
      continue;
    return tx_fail(error, TX_ERROR_UNAVAILABLE,
                   "params[%lld] is to leave changes, an average or its health behind (changed, emas, healths), for "
                   "which Muon's update has no kernel for GPUs yet; none is legal there",
                   (long long)i);
  }
  return TX_OK;
}

tx_status run(const tx_cuda_scope *scope, const tx_muon_update_args *a, const tx_cuda_call *call, tx_error *error) {
  const tx_external_lists lists = {a->n, a->params, a->masters, a->checksums};
  unsigned long long *const resynced = (unsigned long long *)(a->resynced.numel ? a->resynced.data : NULL);
  if (scope->capturing)
    return tx_fail(error, TX_ERROR_BAD_STATE,
                   "the stream is being captured, and rates would stay what they are now in every replay; Muon's "
                   "update is not captured yet");
  if (a->on_external_write == TX_EXTERNAL_CHECK) return tx_external_refuse_written(scope, lists, call, error);
  if (a->on_external_write == TX_EXTERNAL_RESYNC)
    TX_FORWARD(tx_external_checksum(scope, lists, TX_CHECKSUM_RESYNC, resynced, 0, call, error));
  TX_FORWARD(step_all(scope, a, error));
  return tx_external_checksum(scope, lists, TX_CHECKSUM_RENEW, NULL, 0, call, error);
}

}  // namespace

tx_status tx_cuda_muon_update(const tx_muon_update_args *args, const tx_cuda_call *call, tx_error *error) {
  tx_cuda_scope scope;
  TX_FORWARD(tx_check_muon_update(args, 0, error));
  TX_FORWARD(refuse_left_behind(args, error));
  TX_FORWARD(tx_cuda_check_counter("resynced", args->resynced, error));
  TX_FORWARD(tx_cuda_enter(call, &scope, error));
  return tx_cuda_leave(&scope, run(&scope, args, call, error));
}
