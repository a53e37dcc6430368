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
  tx_each_vector(t, [](const entry &e, int64_t first, int32_t count) {
    float sum[TX_VECTOR], grad[TX_VECTOR];
    tx_read_floats(sum, e.main_grad, (tx_dtype)e.main_grad_dtype, e.main_grad_alignment, first, count);
    tx_read_floats(grad, e.grad, (tx_dtype)e.grad_dtype, e.grad_alignment, first, count);
#pragma unroll
    for (int i = 0; i < TX_VECTOR; i++)
      sum[i] = tx_one_nan(sum[i] + grad[i]);
    tx_write_floats(sum, e.main_grad, (tx_dtype)e.main_grad_dtype, e.main_grad_alignment, first, count);
  });
}

tx_status run(const tx_cuda_scope *scope, int64_t n, const tx_tensor *main_grads, const tx_tensor *grads,
              tx_error *error) {
  table t;
  const auto launch = [&] {
    return tx_cuda_launch_sized(scope, accumulate<table>, accumulate<tx_small_table<nothing, entry>>, t,
                                "accumulating gradients", error);
  };
  const auto entry_of = [&](int64_t i) {
    const tx_tensor sum = main_grads[i], grad = grads[i];
    return entry{sum.numel, sum.data,  grad.data, tx_alignment_of(sum.data), tx_alignment_of(grad.data),
                 sum.dtype, grad.dtype};
  };
  TX_FORWARD(tx_table_fill(&t, 4 * TX_ROUND, n, entry_of, launch));
  return launch();
}

}  // namespace

tx_status tx_cuda_bucket_accumulate(int64_t n, const tx_tensor *main_grads, const tx_tensor *grads,
                                    const tx_cuda_call *call, tx_error *error) {
  tx_cuda_scope scope;
  TX_FORWARD(tx_check_bucket_accumulate(n, main_grads, grads, error));
  TX_FORWARD(tx_cuda_enter(call, &scope, error));
  return tx_cuda_leave(&scope, run(&scope, n, main_grads, grads, error));
}
