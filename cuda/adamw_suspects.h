/* Detects external writes to weights that have fp32 masters, in the step's own launch.
 *
 * A parameter is called a suspect if the checksum of one of its samples differs. All of a suspect's masters have to be
 * compared with its weights (tx_external_write). So every sample has to be compared before the first element is
 * stepped.
 *
 * Blocks claim pieces of the samples until there are none left, and then wait until all claimed pieces are done. A
 * block that claimed a piece is running and waits for no other block until the piece is done. So the wait ends even if
 * not all blocks of the launch are resident at a time. Suspects are bits, stored by the launch's ticket (last_block.h);
 * the launch's last block clears them. Included by adamw_tensor.h. */
#ifndef TX_CUDA_ADAMW_SUSPECTS_H
#define TX_CUDA_ADAMW_SUSPECTS_H

#include "cuda/adamw_table.h"
#include "cuda/last_block.h"
#include "cuda/warp_checksum.h"

namespace {

constexpr int kSuspectWords = (tx_step_table::kCapacity + 31) / 32;

struct sample_comparison {
  uint32_t claimed, done; /* numbers of pieces */
  uint32_t suspects[kSuspectWords];
};
__device__ sample_comparison sample_comparisons[TX_TICKETS + TX_CAPTURED_TICKETS];

/* The word that has the tensor's bit, `tensor` % 32. Valid after compare_samples; no block has read it before, so the
 * L1 cache has no older copy. */
__device__ __forceinline__ const uint32_t *suspects_of(const tx_step_table &t, int32_t tensor) {
  return &sample_comparisons[t.common.ticket].suspects[tensor / 32];
}

/* How many samples a warp compares at a time: eight lanes hold the two runs of a sample. */
constexpr int32_t kSampleLanes = TX_SAMPLE_RUNS * 4;
constexpr int32_t kSamplesPerWarp = TX_WARP / kSampleLanes;

/* Whether the checksum of a small tensor, which covers all its weights, differs. Computed by the whole warp. */
__device__ __forceinline__ bool full_checksum_differs(const tx_step_table &t, int64_t number, uint32_t lane) {
  const tx_tile tile = tx_table_tile(t, number);
  const tx_step_entry &e = t.entries[tile.tensor];
  const char *const weights = (const char *)e.param + 2 * tile.begin;
  const uint64_t stored = tx_stored_checksum(e.checksums);
  return stored != tx_checksum_of(weights, e.param_alignment, tile.count, lane);
}

/* Compares tiles `number` to number + kSamplesPerWarp - 1, as far as they are below `end`. */
__device__ __forceinline__ void compare(const tx_step_table &t, int64_t number, int64_t end) {
  const uint32_t lane = tx_lane_id();
  const int64_t mine = number + (int32_t)lane / kSampleLanes;
  const tx_tile tile = tx_table_tile(t, mine < end ? mine : number);
  const tx_step_entry &e = t.entries[tile.tensor];
  const bool there = mine < end && e.checksums, whole = e.numel <= TX_SAMPLED;
  const bool sampled = there && !whole;
  const uint64_t stored =
      sampled ? tx_stored_checksum((const char *)e.checksums + tile.begin / TX_SAMPLED * 8) : UINT64_C(0);
  const uint64_t checksum = tx_sample_of_lanes<kSampleLanes>((const char *)e.param + 2 * tile.begin, e.param_alignment,
                                                             sampled ? tile.count : 0, lane % kSampleLanes);
  bool differs = sampled && stored != checksum;
  const uint32_t wholes = __ballot_sync(0xffffffffu, there && whole);
  for (int32_t i = 0; wholes != 0u && i < kSamplesPerWarp; i++) {
    if ((wholes >> (i * kSampleLanes) & 1u) == 0u) continue;
    const bool other = full_checksum_differs(t, number + i, lane);
    differs = (int32_t)lane / kSampleLanes == i ? other : differs;
  }
  if (differs && lane % kSampleLanes == 0)
    (void)atomicOr(&sample_comparisons[t.common.ticket].suspects[tile.tensor / 32], 1u << (tile.tensor % 32));
}

/* Compares all samples. Every thread of every block has to call it, before anything is stepped. */
__device__ __forceinline__ void compare_samples(const tx_step_table &t) {
  __shared__ uint32_t claimed;
  sample_comparison *const progress = &sample_comparisons[t.common.ticket];
  const int64_t tiles = tx_table_tiles(t);
  /* About two pieces per block, each a multiple of what the block's warps compare at a time. */
  const int64_t round = TX_BLOCK_WARPS * kSamplesPerWarp, wanted = tiles / (2 * (int64_t)gridDim.x);
  const int64_t piece = (wanted + round - 1) / round * round > round ? (wanted + round - 1) / round * round : round;
  const uint32_t pieces = (uint32_t)((tiles + piece - 1) / piece);
  for (;;) {
    if (threadIdx.x == 0) claimed = atomicAdd(&progress->claimed, 1u);
    __syncthreads();
    const uint32_t mine = claimed;
    if (mine >= pieces) break;
    const int64_t begin = (int64_t)mine * piece, end = begin + piece < tiles ? begin + piece : tiles;
    for (int64_t i = begin + (int64_t)(threadIdx.x / TX_WARP) * kSamplesPerWarp; i < end; i += round)
      compare(t, i, end);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) (void)atomicAdd(&progress->done, 1u);
  }
  if (threadIdx.x == 0) {
    while (*(volatile uint32_t *)&progress->done < pieces) {
    }
    __threadfence();
  }
  __syncthreads();
}

/* Called by the launch's last block, when all others are done. */
__device__ __forceinline__ void clear_suspects(const tx_step_table &t) {
  if (t.common.compares_samples && threadIdx.x == 0) sample_comparisons[t.common.ticket] = sample_comparison{};
}

}  // namespace

#endif
