/* Which tile of a launch a warp steps next (launch.h), in two registers: a whole tx_tile takes four. */
#ifndef TX_CUDA_TILE_PLACE_H
#define TX_CUDA_TILE_PLACE_H

#include "cuda/launch.h"
#include "cuda/table.h"

/* A tile's number and tensor; tensor: -1 if the launch has no tile of that number. A launch has fewer than 2^31 tiles:
 * so many would have 2^39 elements. */
typedef struct tx_tile_place {
  int32_t number, tensor;
} tx_tile_place;

template <class Table>
static __device__ __forceinline__ tx_tile_place tx_place_of(const Table &t, int64_t number) {
  return {(int32_t)number, number < tx_table_tiles(t) ? tx_tensor_of_tile(t.first_tile, t.n, number) : -1};
}

template <class Table>
static __device__ __forceinline__ tx_tile_place tx_first_place(const Table &t) {
  return tx_place_of(t, tx_first_tile());
}

/* The warp's place after `before`. Most are in the same tensor, and not searched for. */
template <class Table>
static __device__ __forceinline__ tx_tile_place tx_place_after(const Table &t, const tx_tile_place &before) {
  const int64_t number = before.number + tx_tile_step();
  if (number < t.first_tile[before.tensor + 1]) return {(int32_t)number, before.tensor};
  return tx_place_of(t, number);
}

/* The tile of a place; one without elements if there is none. */
template <class Table>
static __device__ __forceinline__ tx_tile tx_tile_of(const Table &t, const tx_tile_place &place) {
  if (place.tensor < 0) return tx_tile{0, 0, 0};
  return tx_tile_in(place.tensor, t.first_tile, place.number, t.tile, &t.entries[0].numel, sizeof *t.entries);
}

#endif
