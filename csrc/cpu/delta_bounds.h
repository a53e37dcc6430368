/* Writes the bounds on how far weights moved. Included by coding_kernels_isa.c only. */
#ifndef TX_CPU_DELTA_BOUNDS_H
#define TX_CPU_DELTA_BOUNDS_H

#include "csrc/cpu/delta_loops.h"

/* The bound of each TX_BLOCK of the segment: at least 1 if a weight changed, else 0. moved: has room for a whole
 * segment. */
TX_FN void tx_delta_moved_of(const tx_delta_encoder *e, uint16_t *moved) {
  const int64_t whole = e->n / TX_BLOCK;
  for (int64_t i = 0; i < whole; i++) {
    uint64_t bits[TX_BLOCK / 64];
    memcpy(bits, e->changed + i * (TX_BLOCK / 8), sizeof bits);
    const uint16_t size = ((const tx_mem_u16 *)e->moved)[i] & 0x7fff, least = size ? size : 1;
    moved[i] = (bits[0] | bits[1]) ? least : 0;
  }
  if (whole * TX_BLOCK == e->n) return;
  const uint16_t size = ((const tx_mem_u16 *)e->moved)[whole] & 0x7fff;
  for (int64_t k = 0; 8 * k < e->n - whole * TX_BLOCK; k++) {
    if (e->changed[whole * (TX_BLOCK / 8) + k]) moved[whole] = size ? size : 1;
  }
}

/* The code of the largest bound of n weights; 0: nothing changed. */
TX_FN int32_t tx_delta_bound_of(const uint16_t *moved, int64_t n) {
  uint16_t most = 0;
  for (int64_t i = 0; i < n / TX_BLOCK; i++)
    most = moved[i] > most ? moved[i] : most;
  return most ? tx_delta_bound_code(most) : 0;
}

/* Writes a block's bound and returns it; found: tx_delta_bound_of the block. */
TX_FN int32_t tx_delta_put_bound(tx_delta_encoder *e, int32_t found) {
  if (!(e->flags & TX_DELTA_BOUNDED)) return 0;
  const int32_t bound = found ? found : e->bound;
  const int32_t up = bound - e->bound;
  tx_put_rice(&e->bounds, (uint32_t)(up < 0 ? -2 * up - 1 : 2 * up), 2);
  e->bound = bound;
  return bound;
}

/* The bound of each TX_BLOCK of a block, by the grain. Those of groups in which something changed are written as
 * differences to the block's. */
TX_FN void tx_delta_put_bounds(tx_delta_encoder *e, const uint16_t *moved, int64_t n, int32_t bound, int32_t *bounds) {
  const int64_t grain = tx_delta_grain(e->flags), each = grain / TX_BLOCK;
  if (grain == TX_DELTA_BLOCK || !bound) {
    for (int64_t i = 0; i < TX_DELTA_BLOCK / TX_BLOCK; i++)
      bounds[i] = bound;
    return;
  }
  tx_bit_writer writer = e->bounds;
  for (int64_t at = 0; at * TX_BLOCK < n; at += each) {
    const uint64_t *changed = e->block->changed + at * (TX_BLOCK / 64);
    uint64_t any = 0;
    for (int64_t w = 0; w < grain / 64 && at * TX_BLOCK + 64 * w < n; w++)
      any |= changed[w];
    if (!any) continue;
    const int32_t sub = tx_delta_bound_of(moved + at, grain);
    tx_put_rice(&writer, (uint32_t)(bound - sub), 2);
    for (int64_t i = at; i < at + each; i++)
      bounds[i] = sub;
  }
  e->bounds = writer;
}

#endif
