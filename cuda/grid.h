/* Which elements a thread works on: pure index arithmetic, the same for every kernel, so that a test on the host can
 * prove that each element of each tensor is visited exactly once (tests/cuda/grid_test.cc).
 *
 * Each tensor of a launch is cut into tiles, which are numbered across tensors; a tensor's last tile may be short. Warp
 * w of the W warps launched works on tiles w, w + W, w + 2 W, ... It walks a tile in rounds of TX_ROUND elements,
 * TX_VECTOR consecutive ones for each lane: 16 bytes of a 16-bit stream. So 16 neighbouring lanes hold a block of 128,
 * a round holds two blocks, and four rounds hold the weights of a checksum. */
#ifndef TX_CUDA_GRID_H
#define TX_CUDA_GRID_H

#include "csrc/math/numeric.h"

#define TX_WARP 32
#define TX_VECTOR 8
#define TX_ROUND (TX_WARP * TX_VECTOR)

/* The number of tiles of a tensor. tile: elements of a tile, a multiple of TX_ROUND. */
TX_FN int64_t tx_tiles(int64_t numel, int64_t tile) {
  return (numel + tile - 1) / tile;
}

/* The tensor that tile `number` belongs to: the last i with first_tile[i] <= number. first_tile: n + 1 ascending
 * numbers; the last one is the number of all tiles, and `number` is less than that. Tensors without elements have no
 * tiles. */
TX_FN int32_t tx_tensor_of_tile(const int64_t *first_tile, int32_t n, int64_t number) {
  int32_t low = 0, high = n;
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    if (first_tile[middle] <= number) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/* Elements [begin, begin + count) of a tensor. */
typedef struct tx_tile {
  int64_t begin;
  int32_t tensor;
  int32_t count;
} tx_tile;

/* Tile `number`, which is one of the tensor's. numels: each tensor's numel, `stride` bytes apart. */
TX_FN tx_tile tx_tile_in(int32_t tensor, const int64_t *first_tile, int64_t number, int64_t tile, const void *numels,
                         int64_t stride) {
  tx_tile t;
  t.tensor = tensor;
  t.begin = (number - first_tile[t.tensor]) * tile;
  const int64_t numel = *(const int64_t *)((const char *)numels + t.tensor * stride);
  const int64_t left = numel - t.begin;
  t.count = (int32_t)(left < tile ? left : tile);
  return t;
}
TX_FN tx_tile tx_tile_at(const int64_t *first_tile, int32_t n, int64_t number, int64_t tile, const void *numels,
                         int64_t stride) {
  return tx_tile_in(tx_tensor_of_tile(first_tile, n, number), first_tile, number, tile, numels, stride);
}

/* A lane's elements in one round of a tile: [first, first + count) of the tile. count is TX_VECTOR, or less at the
 * tensor's end, where it may be 0. */
typedef struct tx_share {
  int32_t first;
  int32_t count;
} tx_share;

/* How many of a vector's elements exist if `left` elements do; left may be negative.
 *
 * Note [clamped counts]
 *
 * Problem. Written as min first, max last (max(min(left, 8), 0)), nvcc 13.0's assembler makes one instruction for sm_90
 * of the clamp and a comparison of its result with 8: VIMNMX.RELU with a predicate. It takes the predicate for
 * left >= 8; the processor sets it where left <= 8. So a tensor's last vector was read as a whole one, beyond the
 * tensor's end. Seen on an H200.
 *
 * So we take the maximum first, for which the assembler has no such instruction. tests/package/test_machine_code.py
 * rejects code that has it. */
TX_FN int32_t tx_existing(int32_t left) {
  const int32_t there = left > 0 ? left : 0;
  return there < TX_VECTOR ? there : TX_VECTOR;
}
TX_FN tx_share tx_share_from(int32_t tile_count, int32_t first) {
  const tx_share share = {first, tx_existing(tile_count - first)};
  return share;
}
TX_FN tx_share tx_share_of_tile(int32_t tile_count, int32_t round, uint32_t lane) {
  return tx_share_from(tile_count, round * TX_ROUND + (int32_t)lane * TX_VECTOR);
}

/* The same for a tile of TX_QUARTERS rounds, in another order: four neighbouring lanes hold a block, each of them a
 * quarter. A lane's elements are TX_QUARTER (32) apart from round to round. */
#define TX_QUARTERS 4
#define TX_QUARTER (TX_QUARTERS * TX_VECTOR)
TX_FN tx_share tx_share_of_block(int32_t tile_count, int32_t round, uint32_t lane) {
  const int32_t block = (int32_t)(lane / TX_QUARTERS), at = (int32_t)(lane % TX_QUARTERS);
  return tx_share_from(tile_count, (block * TX_QUARTERS + round) * TX_QUARTER + at * TX_VECTOR);
}

/* The number of rounds of a tile. It is the same for all lanes, so that all of them reach every shuffle. */
TX_FN int32_t tx_rounds(int32_t tile_count) {
  return (tile_count + TX_ROUND - 1) / TX_ROUND;
}

#endif
