/* fp32 masters <-> bf16 weights and 16-bit remainders; see tx_master_encode and tx_master_decode. */
#include "csrc/math/remainder.h"
#include "cuda/launch.h"
#include "cuda/vectors.h"

extern "C" {
#include "csrc/ops/operator_checks.h"
}

namespace {

struct entry {
  int64_t numel;
  void *master, *param, *remainder;
  uint32_t master_alignment, param_alignment, remainder_alignment;
};
struct nothing {};
typedef tx_table<nothing, entry> table;

__device__ __forceinline__ void encode_vector(const entry &e, int64_t first, int32_t count) {
  float master[TX_VECTOR];
  uint16_t weights[TX_VECTOR], remainders[TX_VECTOR];
  tx_read_floats(master, e.master, TX_F32, e.master_alignment, first, count);
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++) {
    const tx_remainder_halves halves = tx_remainder_split(master[i]);
    weights[i] = (uint16_t)(halves.upper >> 16);
    remainders[i] = (uint16_t)halves.lower;
  }
  tx_write_halves(weights, e.param, e.param_alignment, first, count);
  tx_write_halves(remainders, e.remainder, e.remainder_alignment, first, count);
}

__device__ __forceinline__ void decode_vector(const entry &e, int64_t first, int32_t count) {
  uint32_t weights[TX_VECTOR_WORDS(2)], remainders[TX_VECTOR_WORDS(2)];
  float master[TX_VECTOR];
  tx_read_vector<2>(weights, (const char *)e.param + 2 * first, e.param_alignment, count);
  tx_read_vector<2>(remainders, (const char *)e.remainder + 2 * first, e.remainder_alignment, count);
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++) {
    master[i] =
        tx_remainder_decode((uint16_t)tx_half(weights[i / 2], i % 2), (int16_t)tx_half(remainders[i / 2], i % 2));
  }
  tx_write_floats(master, e.master, TX_F32, e.master_alignment, first, count);
}

template <bool ENCODE>
__global__ void __launch_bounds__(TX_BLOCK_THREADS) remainders(const __grid_constant__ table t) {
  const int64_t tiles = tx_table_tiles(t);
  for (int64_t number = tx_first_tile(); number < tiles; number += tx_tile_step()) {
    const tx_tile tile = tx_table_tile(t, number);
    const entry &e = t.entries[tile.tensor];
    for (int32_t round = 0; round < tx_rounds(tile.count); round++) {
      const tx_share share = tx_share_of_tile(tile.count, round, tx_lane_id());
      if (share.count == 0) continue;
      if (ENCODE) {
        encode_vector(e, tile.begin + share.first, share.count);
      } else {
        decode_vector(e, tile.begin + share.first, share.count);
      }
    }
  }
}

tx_status run(const tx_cuda_scope *scope, int64_t n, const tx_tensor *masters, const tx_tensor *params,
              const tx_tensor *remainder_list, bool encode, tx_error *error) {
  const char *name = encode ? "encoding masters" : "decoding masters";
  void (*const kernel)(table) = encode ? remainders<true> : remainders<false>;
  table t;
  tx_table_begin(&t, 4 * TX_ROUND);
  for (int64_t i = 0; i < n; i++) {
    const entry e = {masters[i].numel,
                     masters[i].data,
                     params[i].data,
                     remainder_list[i].data,
                     tx_alignment_of(masters[i].data),
                     tx_alignment_of(params[i].data),
                     tx_alignment_of(remainder_list[i].data)};
    if (tx_table_add(&t, e)) continue;
    TX_FORWARD(tx_cuda_launch(scope, kernel, t, name, error));
    tx_table_begin(&t, 4 * TX_ROUND);
    (void)tx_table_add(&t, e);
  }
  return tx_cuda_launch(scope, kernel, t, name, error);
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
