/* Statistics of gradients; see tx_grad_stats. */
#include "cuda/warp_stats.h"

extern "C" {
#include "csrc/ops/operator_checks.h"
}

namespace {

struct entry {
  int64_t numel;
  const void *grad;
  int64_t index;
  uint32_t alignment;
  int32_t dtype;
};
struct common {
  int64_t *stats;
  long long *first_bad; /* NULL: none */
  int32_t ticket;       /* -1: the launch is not the call's last one */
};
typedef tx_table<common, entry> table;

/* Returns whether the tile has an element that is not finite. */
template <tx_dtype DTYPE>
__device__ __forceinline__ bool add_tile(tx_warp_stats *stats, const entry &e, const tx_tile &tile) {
  constexpr int kBytes = DTYPE == TX_F32 ? 4 : 2;
  tx_raw raw[TX_QUARTERS]; /* all of them are read before the first is used */
  float x[TX_VECTOR];
#pragma unroll
  for (int round = 0; round < TX_QUARTERS; round++) {
    const tx_share share = tx_share_of_block(tile.count, round, tx_lane_id());
    tx_read_raw(raw[round], e.grad, kBytes, e.alignment, tile.begin + share.first, share.count);
  }
  if (!tx_add_sum(stats, tx_squares_of_quarters<DTYPE>(raw))) return false;
#pragma unroll
  for (int round = 0; round < TX_QUARTERS; round++) {
    tx_plain_floats(x, raw[round], DTYPE);
    stats->non_finite += tx_count_non_finite(x);
  }
  return true;
}

__global__ void __launch_bounds__(TX_BLOCK_THREADS) grad_stats(const __grid_constant__ table t) {
  const int64_t tiles = tx_table_tiles(t);
  tx_warp_stats stats = {};
  for (int64_t number = tx_first_tile(); number < tiles; number += tx_tile_step()) {
    const tx_tile tile = tx_table_tile(t, number);
    const entry &e = t.entries[tile.tensor];
    const bool bad = e.dtype == TX_F32    ? add_tile<TX_F32>(&stats, e, tile)
                     : e.dtype == TX_BF16 ? add_tile<TX_BF16>(&stats, e, tile)
                                          : add_tile<TX_F16>(&stats, e, tile);
    if (bad && t.common.first_bad && tx_lane_id() == 0) (void)atomicMin(t.common.first_bad, (long long)e.index);
  }
  tx_add_block_stats(stats, t.common.stats, t.common.ticket);
}

/* For a call without elements, which still propagates the carries. */
__global__ void carry(int64_t *stats) {
  if (threadIdx.x == 0) tx_carry_stats(stats);
}

tx_status run(const tx_cuda_scope *scope, int64_t n, const tx_tensor *grads, tx_tensor stats, tx_tensor first_bad,
              tx_error *error) {
  const char *name = "gathering statistics of gradients";
  table t;
  t.common = {(int64_t *)stats.data, first_bad.numel ? (long long *)first_bad.data : nullptr, -1};
  const auto launch = [&] { return tx_cuda_launch(scope, grad_stats, t, name, error); };
  const auto entry_of = [&](int64_t i) {
    return entry{grads[i].numel, grads[i].data, i, tx_alignment_of(grads[i].data), grads[i].dtype};
  };
  TX_FORWARD(tx_table_fill(&t, TX_QUARTERS * TX_ROUND, n, entry_of, launch));
  if (tx_table_tiles(t) == 0) return tx_cuda_launch_one(scope, carry, t.common.stats, TX_WARP, name, error);
  t.common.ticket = tx_take_ticket(scope);
  return launch();
}

}  // namespace

tx_status tx_cuda_grad_stats(int64_t n, const tx_tensor *grads, tx_tensor stats, tx_tensor first_bad,
                             const tx_cuda_call *call, tx_error *error) {
  tx_cuda_scope scope;
  TX_FORWARD(tx_check_grad_stats(n, grads, stats, first_bad, error));
  TX_FORWARD(tx_cuda_check_counter("stats", stats, error));
  TX_FORWARD(tx_cuda_check_counter("first_bad", first_bad, error));
  TX_FORWARD(tx_cuda_enter(call, &scope, error));
  return tx_cuda_leave(&scope, run(&scope, n, grads, stats, first_bad, error));
}
