/* main_grads[i] += grads[i]; see tx_bucket_accumulate. */
#include "cuda/launch.h"
#include "cuda/vectors.h"

extern "C" {
#include "csrc/ops/operator_checks.h"
}

namespace {

struct entry {
  int64_t numel;
  void *main_grad;
  const void *grad;
  uint32_t main_grad_alignment, grad_alignment;
  int32_t main_grad_dtype, grad_dtype;
};
struct nothing {};
typedef tx_table<nothing, entry> table;

template <class Table>
__global__ void __launch_bounds__(TX_BLOCK_THREADS) accumulate(const __grid_constant__ Table t) {
  const int64_t tiles = tx_table_tiles(t);
  for (int64_t number = tx_first_tile(); number < tiles; number += tx_tile_step()) {
    const tx_tile tile = tx_table_tile(t, number);
    const entry &e = t.entries[tile.tensor];
    for (int32_t round = 0; round < tx_rounds(tile.count); round++) {
      const tx_share share = tx_share_of_tile(tile.count, round, tx_lane_id());
      const int64_t first = tile.begin + share.first;
      float sum[TX_VECTOR], grad[TX_VECTOR];
      if (share.count == 0) continue;
      tx_read_floats(sum, e.main_grad, (tx_dtype)e.main_grad_dtype, e.main_grad_alignment, first, share.count);
      tx_read_floats(grad, e.grad, (tx_dtype)e.grad_dtype, e.grad_alignment, first, share.count);
#pragma unroll
      for (int i = 0; i < TX_VECTOR; i++)
        sum[i] = tx_one_nan(sum[i] + grad[i]);
      tx_write_floats(sum, e.main_grad, (tx_dtype)e.main_grad_dtype, e.main_grad_alignment, first, share.count);
    }
  }
}

tx_status launch(const tx_cuda_scope *scope, const table &t, tx_error *error) {
  return tx_cuda_launch_sized(scope, accumulate<table>, accumulate<tx_small_table<nothing, entry>>, t,
                              "accumulating gradients", error);
}

tx_status run(const tx_cuda_scope *scope, int64_t n, const tx_tensor *main_grads, const tx_tensor *grads,
              tx_error *error) {
  table t;
  tx_table_begin(&t, 4 * TX_ROUND);
  for (int64_t i = 0; i < n; i++) {
    const entry e = {main_grads[i].numel,
                     main_grads[i].data,
                     grads[i].data,
                     tx_alignment_of(main_grads[i].data),
                     tx_alignment_of(grads[i].data),
                     main_grads[i].dtype,
                     grads[i].dtype};
    if (tx_table_add(&t, e)) continue;
    TX_FORWARD(launch(scope, t, error));
    tx_table_begin(&t, 4 * TX_ROUND);
    (void)tx_table_add(&t, e);
  }
  return launch(scope, t, error);
}

}  // namespace

tx_status tx_cuda_bucket_accumulate(int64_t n, const tx_tensor *main_grads, const tx_tensor *grads,
                                    const tx_cuda_call *call, tx_error *error) {
  tx_cuda_scope scope;
  TX_FORWARD(tx_check_bucket_accumulate(n, main_grads, grads, error));
  TX_FORWARD(tx_cuda_enter(call, &scope, error));
  return tx_cuda_leave(&scope, run(&scope, n, main_grads, grads, error));
}
