/* Launching on the caller's stream: device, errors, grid size. */
#ifndef TX_CUDA_LAUNCH_H
#define TX_CUDA_LAUNCH_H

#include <cuda_runtime.h>

extern "C" {
#include "csrc/core/status.h"
}
#include "csrc/torch_ext_cuda.h"
#include "cuda/table.h"

#define TX_BLOCK_THREADS 256
#define TX_BLOCK_WARPS (TX_BLOCK_THREADS / TX_WARP)

/* What a call has changed or found out about its device and stream, from tx_cuda_enter to tx_cuda_leave. */
typedef struct tx_cuda_scope {
  cudaStream_t stream;
  int32_t device;
  int32_t before;             /* the device that was current before */
  int32_t processors;         /* the device's multiprocessors (SMs) */
  int32_t capturing;          /* whether the stream is being captured */
  cudaStreamCaptureMode mode; /* the thread's capture mode before */
} tx_cuda_scope;

/* tx_cuda_enter checks the call, its device, and that no earlier work left an error; then it makes the device current
 * and relaxes the thread's capture mode. If it succeeds, the caller has to call tx_cuda_leave, which restores both and
 * returns `status`. */
tx_status tx_cuda_enter(const tx_cuda_call *call, tx_cuda_scope *scope, tx_error *error);
tx_status tx_cuda_leave(const tx_cuda_scope *scope, tx_status status);

/* Converts the result of a CUDA call into a status. what: the operation, for the message. */
tx_status tx_cuda_answered(cudaError_t answer, const char *what, tx_error *error);

/* The number of blocks to launch for `tiles` tiles: as many as can be resident (per_processor on each SM), or fewer if
 * there is not a tile for each warp. At least 1. */
uint32_t tx_cuda_blocks(const tx_cuda_scope *scope, int64_t tiles, int32_t per_processor);

/* How many blocks of `kernel` can be resident on an SM of the device; cached. name: of the operation, for the
 * message. */
tx_status tx_cuda_blocks_per_processor(const tx_cuda_scope *scope, const void *kernel, int32_t *blocks,
                                       const char *name, tx_error *error);

/* Launches a single block of `threads` threads, for work of one thread or warp. */
template <class Arguments>
static tx_status tx_cuda_launch_one(const tx_cuda_scope *scope, void (*kernel)(Arguments), const Arguments &arguments,
                                    uint32_t threads, const char *name, tx_error *error) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(threads);
  config.stream = scope->stream;
  return tx_cuda_answered(cudaLaunchKernelEx(&config, kernel, arguments), name, error);
}

/* Launches kernel(table) for all tiles of the table, with at least one block. */
template <class Table>
static tx_status tx_cuda_launch_always(const tx_cuda_scope *scope, void (*kernel)(Table), const Table &table,
                                       const char *name, tx_error *error) {
  const int64_t tiles = tx_table_tiles(table);
  int32_t per_processor = 0;
  TX_FORWARD(tx_cuda_blocks_per_processor(scope, (const void *)kernel, &per_processor, name, error));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(tx_cuda_blocks(scope, tiles > 0 ? tiles : 1, per_processor));
  config.blockDim = dim3(TX_BLOCK_THREADS);
  config.stream = scope->stream;
  return tx_cuda_answered(cudaLaunchKernelEx(&config, kernel, table), name, error);
}

/* tx_cuda_launch_always, but launches nothing if there are no tiles. */
template <class Table>
static tx_status tx_cuda_launch(const tx_cuda_scope *scope, void (*kernel)(Table), const Table &table, const char *name,
                                tx_error *error) {
  return tx_table_tiles(table) == 0 ? TX_OK : tx_cuda_launch_always(scope, kernel, table, name, error);
}

/* tx_cuda_launch, with the kernel for small tables if there are few tensors. */
template <class Common, class Entry>
static tx_status tx_cuda_launch_sized(const tx_cuda_scope *scope, void (*kernel)(tx_table<Common, Entry>),
                                      void (*kernel_for_few)(tx_small_table<Common, Entry>),
                                      const tx_table<Common, Entry> &table, const char *name, tx_error *error) {
  if (table.n > TX_FEW) return tx_cuda_launch(scope, kernel, table, name, error);
  tx_small_table<Common, Entry> small;
  tx_table_shrink(&small, table);
  return tx_cuda_launch(scope, kernel_for_few, small, name, error);
}

/* Fills tables with entry_of(0), ... entry_of(n - 1), leaving out those without elements, and launches each full table
 * by launch(), which has to launch *table. The last table is not launched; that is left to the caller. */
template <class Common, class Entry, class EntryOf, class Launch>
static tx_status tx_table_fill(tx_table<Common, Entry> *table, int64_t tile, int64_t n, const EntryOf &entry_of,
                               const Launch &launch) {
  tx_table_begin(table, tile);
  for (int64_t i = 0; i < n; i++) {
    const Entry entry = entry_of(i);
    if (tx_table_add(table, entry)) continue;
    TX_FORWARD(launch());
    tx_table_begin(table, tile);
    (void)tx_table_add(table, entry);
  }
  return TX_OK;
}

/* The tiles of the calling warp: for (int64_t tile = tx_first_tile(); tile < tiles; tile += tx_tile_step()). */
static __device__ __forceinline__ int64_t tx_first_tile() {
  return (int64_t)blockIdx.x * (blockDim.x / TX_WARP) + threadIdx.x / TX_WARP;
}
static __device__ __forceinline__ int64_t tx_tile_step() {
  return (int64_t)gridDim.x * (blockDim.x / TX_WARP);
}
static __device__ __forceinline__ uint32_t tx_lane_id() {
  return threadIdx.x % TX_WARP;
}

/* Calls body(entry, first, count) for every vector of the calling lane that has elements. */
template <class Table, class Body>
static __device__ __forceinline__ void tx_each_vector(const Table &t, const Body &body) {
  const int64_t tiles = tx_table_tiles(t);
  for (int64_t number = tx_first_tile(); number < tiles; number += tx_tile_step()) {
    const tx_tile tile = tx_table_tile(t, number);
    for (int32_t round = 0; round < tx_rounds(tile.count); round++) {
      const tx_share share = tx_share_of_tile(tile.count, round, tx_lane_id());
      if (share.count > 0) body(t.entries[tile.tensor], tile.begin + share.first, share.count);
    }
  }
}

#endif
