/* The step on fp32 and bf16 streams that are read and written in place, two elements of each per 32-bit lane. Included
 * by loop_adamw.h. */
#ifndef TX_CPU_STEP_PLAIN_H
#define TX_CPU_STEP_PLAIN_H

#include "csrc/cpu/step_remainders.h"
#include "csrc/cpu/stream_store.h"

/* Steps the fp32 masters and weights of a tile that begins at s, and computes the extra outputs. */
TX_FN void tx_step_masters(tx_adamw_constants c, tx_step_streams s, int32_t pairs, const tx_step_tile *tile,
                           const tx_dtype param) {
#if TX_HAS_AVX512
  const int32_t task = tx_avx512_task(s.extras);
  if (task != TX_FIND_NOTHING) {
    tx_avx512_tile_loops[1][task](&c, &s, 0, pairs, tile);
    return;
  }
#endif
  tx_step_copy copy;
  const tx_weights before = tx_keep_weights(s, 0, 2 * pairs, &copy, param, TX_F32);
  tx_step_pair_weights(c, s, 0, pairs, tile, param, TX_F32);
  tx_round_weights(s, 0, 2 * pairs, TX_F32);
  if (s.extras) tx_note_stepped(s, before, 0, 2 * pairs, param, TX_F32);
}

/* The same for the tile at pair `at`. The weights are not read, so they may bypass the caches; they are collected in L1
 * first. */
TX_FN void tx_step_master_tile(tx_adamw_constants c, tx_step_streams s, int32_t at, int32_t pairs,
                               const tx_step_tile *tile, const tx_dtype param) {
  uint32_t rounded[TX_STEP_TILE / 2] __attribute__((aligned(TX_CACHE_LINE)));
  void *const weights = (char *)s.param + 4 * (int64_t)at;
  s.param = s.stream_store ? rounded : weights;
  s.master = (char *)s.master + 8 * (int64_t)at;
  s.begin += 2 * (int64_t)at;
  tx_step_masters(c, s, pairs, tile, param);
  if (s.stream_store) tx_store_nontemporal(rounded, weights, 4 * (int64_t)pairs);
}

/* n: a multiple of 2 * TX_GROUP, and of TX_CHECKSUM if there are checksums. */
TX_FN void tx_step_pairs(tx_adamw_constants c, tx_step_streams s, int32_t n, const tx_dtype param,
                         const tx_dtype master, const tx_dtype grad, const tx_dtype moment) {
  const float most = tx_adamw_within_of(&c).grad;
  tx_step_tile tile;
  for (int32_t at = 0; at < n / 2; at += TX_STEP_TILE / 2) {
    const int32_t pairs = n / 2 - at < TX_STEP_TILE / 2 ? n / 2 - at : TX_STEP_TILE / 2;
    const int checksumed = master == TX_I16 && s.checksums;
    if (checksumed && 2 * at % TX_CHECKSUM == 0) tx_compare_checksum(s, 2 * at);
    const int within = tx_are_within(s.grad, 2 * at, 2 * pairs, most, grad);
    const int ordinary = __builtin_expect(within, 1) ? tx_step_pair_moments(c, s, at, pairs, &tile, grad, moment, 1)
                                                     : tx_step_pair_moments_any(&c, &s, at, pairs, &tile, grad, moment);
    if (moment == TX_BF16 && __builtin_expect(!ordinary, 0)) tx_round_moments(s, at, pairs, &tile);
    if (master == TX_I16) {
      tx_step_pair_remainders(c, s, at, pairs, &tile);
    } else if (master == TX_F32) {
      tx_step_master_tile(c, s, at, pairs, &tile, param);
    } else {
      tx_step_copy copy;
      const tx_weights before = tx_keep_weights(s, 2 * at, 2 * pairs, &copy, param, master);
      tx_step_pair_weights(c, s, at, pairs, &tile, param, master);
      if (s.extras) tx_note_stepped(s, before, 2 * (int64_t)at, 2 * pairs, param, master);
    }
    if (checksumed && 2 * (at + pairs) % TX_CHECKSUM == 0) tx_renew_checksum(s, 2 * (at + pairs) - TX_CHECKSUM);
  }
}

#endif
