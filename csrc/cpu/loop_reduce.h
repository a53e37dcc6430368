/* Sums gradients: the chunks received from all ranks, or one micro-batch onto the ones before. */
#ifndef TX_CPU_LOOP_REDUCE_H
#define TX_CPU_LOOP_REDUCE_H

#include "csrc/cpu/kernels.h"
#include "csrc/cpu/loop_cast.h"
#include "csrc/cpu/loop_stats.h"

/* Adds elements [at, at + n) of one chunk to the tile; the first chunk is copied (0 + -0 would be +0). */
TX_FN void tx_reduce_chunk(const tx_reduce_piece *p, int64_t chunk, int64_t at, int64_t n, float *restrict tile,
                           const tx_dtype dtype, const int scaled) {
  const void *from = (const char *)p->chunks[chunk].data + at * (dtype == TX_F32 ? 4 : dtype == TX_U8 ? 1 : 2);
  if (scaled) {
    const uint8_t *scales = (const uint8_t *)p->scales[chunk].data + at / TX_BLOCK;
    float value[TX_TILE];
    tx_load_scaled(from, scales, n, value, dtype, TX_FORMAT_SIGNED);
    for (int64_t i = 0; i < n; i++)
      tile[i] = chunk == 0 ? value[i] : tile[i] + value[i];
  } else if (chunk == 0) {
    tx_load_plain(from, n, tile, dtype);
  } else {
    for (int64_t i = 0; i < n; i++)
      tile[i] += tx_load(from, i, dtype);
  }
}

/* scaled: whether the wire dtype has block scales. */
TX_FN int64_t tx_reduce_run(const tx_reduce_piece *p, const tx_dtype wire_dtype, const int scaled,
                            const tx_dtype shard_dtype) {
  int64_t non_finite = 0;
  float tile[TX_TILE];
  for (int64_t at = 0; at < p->n; at += TX_TILE) {
    const int64_t n = p->n - at < TX_TILE ? p->n - at : TX_TILE;
    char *shard = (char *)p->shard + at * (shard_dtype == TX_F32 ? 4 : 2);
    for (int64_t c = 0; c < p->n_chunks; c++)
      tx_reduce_chunk(p, c, p->begin + at, n, tile, wire_dtype, scaled);
    if (p->accumulate) {
      for (int64_t i = 0; i < n; i++)
        tile[i] = tx_load(shard, i, shard_dtype) + tile[i] * p->scale;
    } else {
      for (int64_t i = 0; i < n; i++)
        tile[i] *= p->scale;
    }
    for (int64_t i = 0; i < n; i++) {
      tx_store(shard, i, shard_dtype, tx_one_nan(tile[i]));
    }
    if (p->limbs) non_finite += tx_stats_run(shard, n, p->limbs, shard_dtype);
  }
  return non_finite;
}

/* A loop for each wire and shard. */
#define TX_REDUCE_LOOP_(s, shard, w, wire, scaled, ...)                     \
  static int64_t tx_reduce_##wire##_##shard(const tx_reduce_piece *piece) { \
    return tx_reduce_run(piece, TX_##wire, scaled, TX_##shard);             \
  }
#define TX_REDUCE_ROW_(...) TX_FOR_EACH_PLAIN(TX_REDUCE_LOOP_, __VA_ARGS__)
TX_FOR_EACH_WIRE(TX_REDUCE_ROW_)
#undef TX_REDUCE_LOOP_
#undef TX_REDUCE_ROW_

/* Initialiser of tx_kernels.reduce. */
#define TX_REDUCE_ENTRY_(s, shard, w, wire, ...) [w][s] = tx_reduce_##wire##_##shard,
#define TX_REDUCE_ENTRIES_(...) TX_FOR_EACH_PLAIN(TX_REDUCE_ENTRY_, __VA_ARGS__)
#define TX_REDUCE_LOOPS TX_FOR_EACH_WIRE(TX_REDUCE_ENTRIES_)

#endif
