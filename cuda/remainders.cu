/* fp32 masters <-> bf16 weights and 16-bit remainders; see tx_master_encode and tx_master_decode. */
#include "cuda/launch.h"
#include "cuda/remainder_vector.h"

extern "C" {
#include "csrc/ops/operator_checks.h"
}

namespace {

struct entry {
  int64_t numel;
  void *master;
  tx_split_masters split;
  uint32_t alignment; /* of the master */
};
struct nothing {};
typedef tx_table<nothing, entry> table;

template <bool ENCODE>
__global__ void __launch_bounds__(TX_BLOCK_THREADS) remainders(const __grid_constant__ table t) {
  tx_each_vector(t, [](const entry &e, int64_t first, int32_t count) {
    float x[TX_VECTOR];
    if (ENCODE) {
      tx_read_floats(x, e.master, TX_F32, e.alignment, first, count);
      tx_write_split(x, e.split, first, count);
    } else {
      tx_read_split(x, e.split, first, count);
      tx_write_floats(x, e.master, TX_F32, e.alignment, first, count);
    }
  });
}

tx_status run(const tx_cuda_scope *scope, int64_t n, const tx_tensor *masters, const tx_tensor *params,
              const tx_tensor *remainder_list, bool encode, tx_error *error) {
  const char *name = encode ? "encoding masters" : "decoding masters";
  void (*const kernel)(table) = encode ? remainders<true> : remainders<false>;
  table t;
  const auto launch = [&] { return tx_cuda_launch(scope, kernel, t, name, error); };
  const auto entry_of = [&](int64_t i) {
    void *const weights = params[i].data, *const lower = remainder_list[i].data;
    const tx_split_masters split = {weights, lower, tx_alignment_of(weights), tx_alignment_of(lower)};
    return entry{masters[i].numel, masters[i].data, split, tx_alignment_of(masters[i].data)};
  };
  TX_FORWARD(tx_table_fill(&t, 4 * TX_ROUND, n, entry_of, launch));
  return launch();
}

}  // namespace

tx_status tx_cuda_master_encode(int64_t n, const tx_tensor *masters, const tx_tensor *params,
                                const tx_tensor *remainder_list, const tx_cuda_call *call, tx_error *error) {
  tx_cuda_scope scope;
  TX_FORWARD(tx_check_master_encode(n, masters, params, remainder_list, error));
  TX_FORWARD(tx_cuda_enter(call, &scope, error));
  return tx_cuda_leave(&scope, run(&scope, n, masters, params, remainder_list, true, error));
}

tx_status tx_cuda_master_decode(int64_t n, const tx_tensor *params, const tx_tensor *remainder_list,
                                const tx_tensor *masters, const tx_cuda_call *call, tx_error *error) {
  tx_cuda_scope scope;
  TX_FORWARD(tx_check_master_decode(n, params, remainder_list, masters, error));
  TX_FORWARD(tx_cuda_enter(call, &scope, error));
  return tx_cuda_leave(&scope, run(&scope, n, masters, params, remainder_list, false, error));
}
