/* tx_cuda_master_resync, and its kernel for use in a step. */
#include "cuda/device_scalars.h"
#include "cuda/external_writes_notes.h"
#include "cuda/last_block.h"
#include "cuda/resync_vector.h"

extern "C" {
#include "csrc/ops/operator_checks.h"
}

namespace {

struct entry {
  int64_t numel;
  const void *param;
  void *master;
  int64_t index; /* in the call's lists */
  uint8_t param_dtype, master_dtype, param_alignment, master_alignment;
};
struct common {
  const unsigned long long *suspect;
  unsigned long long *counts;
  int32_t each, mode;
};
typedef tx_table<common, entry> table;

__device__ __forceinline__ int32_t resync_f32(const entry &e, int64_t first, int32_t count, int32_t mode) {
  const tx_masters masters = {e.param, e.master, (tx_dtype)e.param_dtype, e.param_alignment, e.master_alignment};
  return tx_resync_vector(masters, first, count, mode);
}

__device__ __forceinline__ int32_t resync_i16(const entry &e, int64_t first, int32_t count, int32_t mode) {
  uint32_t remainders[TX_VECTOR_WORDS(2)];
  if (mode != TX_RESYNC_ALL) return 0;
  tx_read_vector<2>(remainders, (const char *)e.master + 2 * first, e.master_alignment, count);
  int32_t differ = 0;
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++)
    differ += tx_half(remainders[i / 2], i % 2) != 0;
  const uint32_t zeros[TX_VECTOR_WORDS(2)] = {};
  if (differ) tx_write_vector<2>(zeros, (char *)e.master + 2 * first, e.master_alignment, count);
  return differ;
}

__global__ void __launch_bounds__(TX_BLOCK_THREADS) resync(const __grid_constant__ table t) {
  const int64_t tiles = tx_table_tiles(t);
  for (int64_t number = tx_first_tile(); number < tiles; number += tx_tile_step()) {
    const tx_tile tile = tx_table_tile(t, number);
    const entry &e = t.entries[tile.tensor];
    int32_t changed = 0;
    if (t.common.suspect && !t.common.suspect[e.index]) continue;
    for (int32_t round = 0; round < tx_rounds(tile.count); round++) {
      const tx_share share = tx_share_of_tile(tile.count, round, tx_lane_id());
      const int64_t first = tile.begin + share.first;
      if (share.count == 0) continue;
      changed += e.master_dtype == TX_F32 ? resync_f32(e, first, share.count, t.common.mode)
                                          : resync_i16(e, first, share.count, t.common.mode);
    }
    changed = tx_warp_sum(changed);
    if (tx_lane_id() == 0 && t.common.counts) tx_count(t.common.counts + (t.common.each ? e.index : 0), changed);
  }
}

}  // namespace

tx_status tx_resync_masters(const tx_cuda_scope *scope, int64_t n, const tx_tensor *params, const tx_tensor *masters,
                            int32_t mode, const unsigned long long *suspect, unsigned long long *counts, int32_t each,
                            tx_error *error) {
  table t;
  t.common = common{suspect, counts, each, mode};
  const auto launch = [&] { return tx_cuda_launch(scope, resync, t, "resyncing masters", error); };
  const auto entry_of = [&](int64_t i) {
    if (masters[i].numel == 0 || (suspect && masters[i].dtype != TX_F32)) return entry{};
    return entry{params[i].numel,
                 params[i].data,
                 masters[i].data,
                 i,
                 (uint8_t)params[i].dtype,
                 (uint8_t)masters[i].dtype,
                 (uint8_t)tx_alignment_of(params[i].data),
                 (uint8_t)tx_alignment_of(masters[i].data)};
  };
  TX_FORWARD(tx_table_fill(&t, 4 * TX_ROUND, n, entry_of, launch));
  return launch();
}

tx_status tx_cuda_master_resync(int64_t n, const tx_tensor *params, const tx_tensor *masters, int32_t mode,
                                tx_tensor changed, const tx_cuda_call *call, tx_error *error) {
  tx_cuda_scope scope;
  TX_FORWARD(tx_check_master_resync(n, params, masters, mode, changed, error));
  TX_FORWARD(tx_cuda_check_counter("changed", changed, error));
  TX_FORWARD(tx_cuda_enter(call, &scope, error));
  unsigned long long *const counts = changed.numel ? (unsigned long long *)changed.data : NULL;
  return tx_cuda_leave(&scope, tx_resync_masters(&scope, n, params, masters, mode, NULL, counts, 1, error));
}
