/* The step's extra outputs (changed, moved, distances, emas, healths of tx_adamw_args), in launches that have some
 * (TX_STEP_EXTRAS, adamw_table.h). They are computed from registers, a round at a time, after the step is computed and
 * before its results are written. In other launches these functions are empty. Included by adamw_tensor.h. */
#ifndef TX_CUDA_ADAMW_EXTRAS_H
#define TX_CUDA_ADAMW_EXTRAS_H

#include "cuda/adamw_streams.h"
#include "cuda/adamw_suspects.h"
#include "cuda/adamw_table.h"
#if TX_STEP_EXTRAS
#include "cuda/extras_vector.h"
#else
#include "cuda/extras_weights.h"
#endif

namespace {

#if TX_STEP_EXTRAS

/* Computed once per tensor and warp. */
struct extras_state {
  tx_ema_turn turn;
};

/* Bits of the launch's tensors, set where fp32 masters were resynced. It is unknown how far these tensors' weights
 * moved. That is written to `moved` by the launch's last block, when no other block adds to `moved` any more. */
__device__ uint32_t resynced_masters[TX_TICKETS + TX_CAPTURED_TICKETS][kSuspectWords];

/* Every lane of the warp has to call this function and those below. */
__device__ __forceinline__ void begin_extras() {
  tx_health_begin();
}

/* tensor: the one that the warp leaves; -1 for none. */
__device__ __forceinline__ void store_extras(const tx_step_table &t, int32_t tensor) {
  if (tensor >= 0 && t.entries[tensor].extras.health) tx_health_flush(t.entries[tensor].extras.health);
}

__device__ __forceinline__ void enter_extras(extras_state &w, const tx_step_table &t, const tx_step_entry &e,
                                             int64_t step) {
  if (e.extras.ema) w.turn = tx_ema_turn_at(t.common.seed, e.id, step, t.common.ema_every, e.start);
}

__device__ __forceinline__ void note_resynced(const tx_step_table &t, int32_t tensor) {
  if (tx_lane_id() == 0) (void)atomicOr(&resynced_masters[t.common.ticket][tensor / 32], 1u << (tensor % 32));
}

/* Called by all threads of the launch's last block. */
__device__ __forceinline__ void mark_resynced(const tx_step_table &t) {
  if (!t.common.compares_samples) return;
  uint32_t *const bits = resynced_masters[t.common.ticket];
  for (int32_t i = 0; i < t.n; i++) {
    const tx_step_entry &e = t.entries[i];
    if (!e.extras.moved || (((const volatile uint32_t *)bits)[i / 32] >> (i % 32) & 1u) == 0u) continue;
    for (int64_t block = threadIdx.x; block * TX_BLOCK < e.numel; block += blockDim.x)
      tx_write_value((char *)e.extras.moved + 2 * block, TX_MOVED_UNKNOWN);
  }
  __syncthreads();
  if (threadIdx.x < kSuspectWords) bits[threadIdx.x] = 0u;
}

/* Records a round whose weights were `before` and become `now`. written: whether the tile's weights were written
 * externally. */
__device__ __forceinline__ void note_vector(const tx_step_table &t, const tx_step_entry &e, const extras_state &w,
                                            const tx_lane_elements &here, bool written, const tx_vector_weights &before,
                                            const tx_vector_weights &now, const tx_dtype param, const tx_dtype master) {
  tx_store_extras_vector(e.extras, here, w.turn, t.common.ema_weight, written, before, now, param, master);
}

#else

struct extras_state {};

__device__ __forceinline__ void begin_extras() {}
__device__ __forceinline__ void store_extras(const tx_step_table &, int32_t) {}
__device__ __forceinline__ void enter_extras(extras_state &, const tx_step_table &, const tx_step_entry &, int64_t) {}
__device__ __forceinline__ void note_resynced(const tx_step_table &, int32_t) {}
__device__ __forceinline__ void mark_resynced(const tx_step_table &) {}
__device__ __forceinline__ void note_vector(const tx_step_table &, const tx_step_entry &, const extras_state &,
                                            const tx_lane_elements &, bool, const tx_vector_weights &,
                                            const tx_vector_weights &, const tx_dtype, const tx_dtype) {}

#endif

}  // namespace

#endif
