/* tx_cuda_master_checksum, and the comparison of checksums for a step. */
#include <stdlib.h>

#include "cuda/external_writes_notes.h"
#include "cuda/last_block.h"
#include "cuda/warp_checksum.h"

extern "C" {
#include "csrc/ops/operator_checks.h"
}

namespace {

struct entry {
  int64_t numel;
  const void *param;
  void *master; /* remainders; fp32 masters are not accessed */
  void *checksums;
  int64_t index; /* in the call's lists */
  uint8_t param_alignment, master_alignment;
};
struct common {
  unsigned long long *notes; /* marks of suspects, or counts; NULL: not wanted */
  int32_t mode, reserved;
};
typedef tx_table<common, entry> table;

/* Compares or renews the checksums of samples, in tiles of TX_SAMPLED weights: one checksum per tile. */
__global__ void __launch_bounds__(TX_BLOCK_THREADS) compare_samples(const __grid_constant__ table t) {
  const uint32_t lane = tx_lane_id();
  const int64_t tiles = tx_table_tiles(t);
  for (int64_t number = tx_first_tile(); number < tiles; number += tx_tile_step()) {
    const tx_tile tile = tx_table_tile(t, number);
    const entry &e = t.entries[tile.tensor];
    const void *const weights = (const char *)e.param + 2 * tile.begin;
    void *const at = (char *)e.checksums + tile.begin / TX_SAMPLED * 8;
    const uint64_t checksum = e.numel <= TX_SAMPLED ? tx_checksum_of(weights, e.param_alignment, tile.count, lane)
                                                    : tx_sample_of(weights, e.param_alignment, tile.count, lane);
    if (lane != 0) continue;
    if (t.common.mode == TX_CHECKSUM_RENEW) {
      tx_write_value(at, checksum);
    } else if (tx_stored_checksum(at) != checksum) {
      t.common.notes[e.index] = 1; /* several warps may write it at a time, all of them 1 */
    }
  }
}

/* Compares, resyncs or renews blocks with remainders, in tiles of TX_CHECKSUM weights: one checksum per tile. */
__global__ void __launch_bounds__(TX_BLOCK_THREADS) compare_remainders(const __grid_constant__ table t) {
  const uint32_t lane = tx_lane_id();
  const int64_t tiles = tx_table_tiles(t);
  for (int64_t number = tx_first_tile(); number < tiles; number += tx_tile_step()) {
    const tx_tile tile = tx_table_tile(t, number);
    const entry &e = t.entries[tile.tensor];
    void *const at = (char *)e.checksums + tile.begin / TX_CHECKSUM * 8;
    const uint64_t checksum =
        tx_checksum_of((const char *)e.param + 2 * tile.begin, e.param_alignment, tile.count, lane);
    const bool differs = t.common.mode != TX_CHECKSUM_RENEW && tx_stored_checksum(at) != checksum;
    for (int32_t round = 0; differs && t.common.mode == TX_CHECKSUM_RESYNC && round < tx_rounds(tile.count); round++) {
      const uint32_t zeros[TX_VECTOR_WORDS(2)] = {};
      const tx_share share = tx_share_of_tile(tile.count, round, lane);
      tx_write_vector<2>(zeros, (char *)e.master + 2 * (tile.begin + share.first), e.master_alignment, share.count);
    }
    __syncwarp(); /* every lane has read the checksum before one of them writes it */
    if (lane != 0) continue;
    if (differs && t.common.notes) tx_count(t.common.notes + e.index, tile.count);
    if (t.common.mode != TX_CHECKSUM_CHECK) tx_write_value(at, checksum);
  }
}

tx_status compare_checksums(const tx_cuda_scope *scope, void (*kernel)(table), const tx_external_lists &lists,
                            unsigned long long *notes, int32_t each, tx_dtype master, int32_t mode, tx_error *error) {
  table t;
  const int64_t tile = master == TX_F32 ? TX_SAMPLED : TX_CHECKSUM;
  t.common = common{notes, mode, 0};
  const auto launch = [&] { return tx_cuda_launch(scope, kernel, t, "comparing checksums of weights", error); };
  const auto entry_of = [&](int64_t i) {
    if (!tx_external_has(lists, i, master)) return entry{};
    const tx_tensor param = lists.params[i];
    return entry{param.numel,
                 param.data,
                 lists.masters[i].data,
                 lists.checksums[i].data,
                 each ? i : 0,
                 (uint8_t)tx_alignment_of(param.data),
                 (uint8_t)tx_alignment_of(lists.masters[i].data)};
  };
  TX_FORWARD(tx_table_fill(&t, tile, lists.n, entry_of, launch));
  return launch();
}

}  // namespace

bool tx_external_has_any(const tx_external_lists &lists, tx_dtype master) {
  for (int64_t i = 0; i < lists.n; i++)
    if (tx_external_has(lists, i, master)) return true;
  return false;
}

int64_t tx_cuda_workspace(int64_t n) {
  return 2 * n * (int64_t)sizeof(int64_t);
}

tx_status tx_external_check_workspace(const tx_cuda_call *call, int64_t n, const char *what, tx_error *error) {
  const int64_t wanted = tx_cuda_workspace(n), is = call->workspace ? call->workspace_bytes : 0;
  if (is < wanted)
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "call.workspace has %lld bytes; %s needs %lld for %lld tensors (tx_cuda_workspace)", (long long)is,
                   what, (long long)wanted, (long long)n);
  if ((uintptr_t)call->workspace % sizeof(int64_t) == 0) return TX_OK;
  return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "call.workspace is at address %p; a multiple of %d is legal",
                 call->workspace, (int)sizeof(int64_t));
}

tx_status tx_external_notes_begin(const tx_cuda_scope *scope, const tx_cuda_call *call, int64_t n,
                                  tx_external_notes *notes, tx_error *error) {
  notes->counts = (unsigned long long *)call->workspace;
  notes->suspect = notes->counts + n;
  return tx_cuda_answered(cudaMemsetAsync(call->workspace, 0, (size_t)tx_cuda_workspace(n), scope->stream),
                          "clearing the workspace", error);
}

tx_status tx_external_compare_samples(const tx_cuda_scope *scope, const tx_external_lists &lists,
                                      const tx_external_notes *notes, int32_t mode, tx_error *error) {
  return compare_checksums(scope, compare_samples, lists, notes ? notes->suspect : NULL, 1, TX_F32, mode, error);
}

tx_status tx_external_compare_remainders(const tx_cuda_scope *scope, const tx_external_lists &lists,
                                         unsigned long long *counts, int32_t each, int32_t mode, tx_error *error) {
  return compare_checksums(scope, compare_remainders, lists, counts, each, TX_I16, mode, error);
}

tx_status tx_external_checksum(const tx_cuda_scope *scope, const tx_external_lists &lists, int32_t mode,
                               unsigned long long *stale, int32_t each, const tx_cuda_call *call, tx_error *error) {
  if (mode == TX_CHECKSUM_RENEW) {
    TX_FORWARD(tx_external_compare_samples(scope, lists, NULL, mode, error));
  } else if (tx_external_has_any(lists, TX_F32)) {
    tx_external_notes notes;
    TX_FORWARD(tx_external_check_workspace(call, lists.n, "comparing weights with fp32 masters", error));
    TX_FORWARD(tx_external_notes_begin(scope, call, lists.n, &notes, error));
    TX_FORWARD(tx_external_compare_samples(scope, lists, &notes, mode, error));
    TX_FORWARD(tx_resync_masters(scope, lists.n, lists.params, lists.masters,
                                 mode == TX_CHECKSUM_CHECK ? TX_RESYNC_COUNT : TX_RESYNC_STALE, notes.suspect, stale,
                                 each, error));
    /* Renews all checksums; those that agree keep their values. */
    if (mode == TX_CHECKSUM_RESYNC)
      TX_FORWARD(tx_external_compare_samples(scope, lists, NULL, TX_CHECKSUM_RENEW, error));
  }
  return tx_external_compare_remainders(scope, lists, stale, each, mode, error);
}

tx_status tx_external_refuse_written(const tx_cuda_scope *scope, const tx_external_lists &lists,
                                     const tx_cuda_call *call, tx_error *error) {
  tx_external_notes notes;
  const size_t bytes = (size_t)lists.n * sizeof(int64_t);
  if (!tx_external_has_any(lists, TX_F32) && !tx_external_has_any(lists, TX_I16)) return TX_OK;
  TX_FORWARD(tx_external_check_workspace(call, lists.n, "on_external_write = 2 (check)", error));
  TX_FORWARD(tx_external_notes_begin(scope, call, lists.n, &notes, error));
  TX_FORWARD(tx_external_compare_samples(scope, lists, &notes, TX_CHECKSUM_CHECK, error));
  TX_FORWARD(tx_resync_masters(scope, lists.n, lists.params, lists.masters, TX_RESYNC_COUNT, notes.suspect,
                               notes.counts, 1, error));
  TX_FORWARD(tx_external_compare_remainders(scope, lists, notes.counts, 1, TX_CHECKSUM_CHECK, error));
  int64_t *const counts = (int64_t *)malloc(bytes);
  if (!counts)
    return tx_fail(error, TX_ERROR_OUT_OF_MEMORY, "no memory to compare %lld params with their masters",
                   (long long)lists.n);
  tx_status status = tx_cuda_answered(
      cudaMemcpyAsync(counts, notes.counts, bytes, cudaMemcpyDeviceToHost, scope->stream), "copying counts", error);
  if (status == TX_OK) status = tx_cuda_answered(cudaStreamSynchronize(scope->stream), "waiting for counts", error);
  for (int64_t i = 0; status == TX_OK && i < lists.n; i++)
    if (counts[i]) status = tx_fail_written(i, counts[i], error);
  free(counts);
  return status;
}

tx_status tx_cuda_master_checksum(int64_t n, const tx_tensor *params, const tx_tensor *masters,
                                  const tx_tensor *checksums, int32_t mode, tx_tensor stale, const tx_cuda_call *call,
                                  tx_error *error) {
  tx_cuda_scope scope;
  const tx_external_lists lists = {n, params, masters, checksums};
  TX_FORWARD(tx_check_master_checksum(n, params, masters, checksums, mode, stale, error));
  TX_FORWARD(tx_cuda_check_counter("stale", stale, error));
  TX_FORWARD(tx_cuda_enter(call, &scope, error));
  unsigned long long *const counts = stale.numel ? (unsigned long long *)stale.data : NULL;
  return tx_cuda_leave(&scope, tx_external_checksum(&scope, lists, mode, counts, 1, call, error));
}
