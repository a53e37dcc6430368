/* Sums the chunks of all ranks; see tx_bucket_reduce. */
#include "cuda/warp_stats.h"

extern "C" {
#include "csrc/core/forms.h"
#include "csrc/ops/operator_checks.h"
}

namespace {

/* How many chunks' loads are in flight at a time; the chunks are added one after the other. */
constexpr int32_t kAtOnce = 4;

/* CHUNKS: the capacity of the arrays. */
template <int32_t CHUNKS>
struct reduction {
  int64_t numel;
  void *shard;
  int64_t *stats; /* NULL: none */
  int32_t ticket;
  float scale;
  int32_t accumulate, n;
  int32_t wire, shard_dtype;           /* wire: a row of TX_FOR_EACH_WIRE */
  uint32_t alignment, shard_alignment; /* alignment: the least of all chunks */
  const void *chunks[CHUNKS];
  const uint8_t *scales[CHUNKS];
};
static_assert(sizeof(reduction<TX_CUDA_MAX_CHUNKS>) <= TX_PARAMETER_BYTES, "a reduction is one kernel parameter");

/* Enough for most world sizes; such a launch passes 1 KiB of parameters instead of 32. */
constexpr int32_t kFewChunks = 64;

template <int32_t CHUNKS>
TX_FN int64_t tx_table_tiles(const reduction<CHUNKS> &r) {
  return tx_tiles(r.numel, TX_ROUND);
}

/* sum: of elements [first, first + count) of all chunks, in the order of the ranks. The first chunk is copied, since
 * 0 + -0 would be +0. */
template <tx_dtype DTYPE, bool SCALED, int32_t CHUNKS>
__device__ __forceinline__ void add_chunks(float (&sum)[TX_VECTOR], const reduction<CHUNKS> &r, int64_t first,
                                           int32_t count) {
  constexpr int kBytes = DTYPE == TX_F32 ? 4 : DTYPE == TX_U8 ? 1 : 2;
  for (int32_t chunk = 0; chunk < r.n; chunk += kAtOnce) {
    tx_raw raw[kAtOnce];
    uint8_t scale[kAtOnce] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      if (chunk + i >= r.n) break;
      tx_read_raw(raw[i], r.chunks[chunk + i], kBytes, r.alignment, first, count);
      if (SCALED && count > 0) scale[i] = r.scales[chunk + i][first / TX_BLOCK];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      float x[TX_VECTOR];
      if (chunk + i >= r.n) break;
      if (SCALED) {
        tx_scaled_floats(x, raw[i], scale[i], DTYPE, TX_FORMAT_SIGNED);
      } else {
        tx_plain_floats(x, raw[i], DTYPE);
      }
#pragma unroll
      for (int j = 0; j < TX_VECTOR; j++)
        sum[j] = chunk + i == 0 ? x[j] : sum[j] + x[j];
    }
  }
}

/* Scales x and stores it in the shard or adds it to that. On return x has the shard's new values. */
template <int32_t CHUNKS>
__device__ __forceinline__ void store(float (&x)[TX_VECTOR], const reduction<CHUNKS> &r, int64_t first, int32_t count) {
  const tx_dtype dtype = (tx_dtype)r.shard_dtype;
  const int bytes = dtype == TX_F32 ? 4 : 2;
  const uint32_t unused[TX_VECTOR] = {};
  float before[TX_VECTOR] = {};
  tx_raw raw;
  if (r.accumulate) tx_read_floats(before, r.shard, dtype, r.shard_alignment, first, count);
#pragma unroll
  for (int i = 0; i < TX_VECTOR; i++)
    x[i] = tx_one_nan(r.accumulate ? before[i] + x[i] * r.scale : x[i] * r.scale);
  tx_plain_raw(raw, x, unused, 0, dtype);
  if (count > 0) tx_write_raw(raw, r.shard, bytes, r.shard_alignment, first, count);
  tx_plain_floats(x, raw, dtype);
}

template <int32_t CHUNKS>
__global__ void __launch_bounds__(TX_BLOCK_THREADS) reduce(const __grid_constant__ reduction<CHUNKS> r) {
  const int64_t tiles = tx_table_tiles(r);
  tx_warp_stats stats = {};
  for (int64_t number = tx_first_tile(); number < tiles; number += tx_tile_step()) {
    const int64_t begin = number * TX_ROUND, left = r.numel - begin;
    const tx_share share = tx_share_of_tile((int32_t)(left < TX_ROUND ? left : TX_ROUND), 0, tx_lane_id());
    const int64_t first = begin + share.first;
    float x[TX_VECTOR];
    switch (r.wire) {
#define TX_ADD_(index, name, scaled, ...)                         \
  case index:                                                     \
    add_chunks<TX_##name, scaled != 0>(x, r, first, share.count); \
    break;
      TX_FOR_EACH_WIRE(TX_ADD_)
#undef TX_ADD_
    }
    store(x, r, first, share.count);
    if (!r.stats) continue;
#pragma unroll
    for (int i = 0; i < TX_VECTOR; i++)
      x[i] = i < share.count ? x[i] : 0.0f;
    const double sum = tx_squares_of_lanes(x);
    const bool brings = tx_lane_id() % TX_BLOCK_LANES < TX_WINDOW; /* a window among the 16 lanes that have the sum */
    if (tx_add_sum(&stats, brings ? sum : 0.0)) stats.non_finite += tx_count_non_finite(x);
  }
  if (r.stats) tx_add_block_stats(stats, r.stats, r.ticket);
}

template <int32_t CHUNKS>
tx_status run(const tx_cuda_scope *scope, const tx_bucket_reduce_args *a, tx_error *error) {
  reduction<CHUNKS> r;
  r.numel = a->shard.numel;
  r.shard = a->shard.data;
  r.stats = a->stats.numel ? (int64_t *)a->stats.data : nullptr;
  r.ticket = r.stats ? tx_take_ticket(scope) : -1;
  r.scale = (float)a->scale;
  r.accumulate = a->accumulate;
  r.n = (int32_t)a->n;
  r.shard_dtype = a->shard.dtype;
  r.shard_alignment = tx_alignment_of(r.shard);
  r.wire = a->scales && a->scales[0].numel ? tx_form_scaled(a->chunks[0].dtype, TX_FORMAT_SIGNED)
                                           : tx_form_plain(a->chunks[0].dtype);
  r.alignment = 16;
  for (int64_t i = 0; i < a->n; i++) {
    const uint32_t alignment = tx_alignment_of(a->chunks[i].data);
    r.chunks[i] = a->chunks[i].data;
    r.scales[i] = a->scales ? (const uint8_t *)a->scales[i].data : nullptr;
    r.alignment = alignment < r.alignment ? alignment : r.alignment;
  }
  return tx_cuda_launch(scope, reduce<CHUNKS>, r, "reducing a bucket", error);
}

}  // namespace

tx_status tx_cuda_bucket_reduce(const tx_bucket_reduce_args *args, const tx_cuda_call *call, tx_error *error) {
  tx_cuda_scope scope;
  TX_FORWARD(tx_check_bucket_reduce(args, error));
  TX_FORWARD(tx_cuda_check_counter("stats", args->stats, error));
  if (args->n > TX_CUDA_MAX_CHUNKS) {
    return tx_fail(error, TX_ERROR_SHAPE, "chunks has %lld entries; up to %d are legal on a GPU", (long long)args->n,
                   TX_CUDA_MAX_CHUNKS);
  }
  TX_FORWARD(tx_cuda_enter(call, &scope, error));
  if (args->shard.numel == 0) return tx_cuda_leave(&scope, TX_OK);
  return tx_cuda_leave(&scope, args->n <= kFewChunks ? run<kFewChunks>(&scope, args, error)
                                                     : run<TX_CUDA_MAX_CHUNKS>(&scope, args, error));
}
