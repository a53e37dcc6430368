/* The streams that an instance of the step works on, and functions that all instances share: reading and storing
 * weights of any form, prefetching, checksums of weights with remainders. Included by the instances. */
#ifndef TX_CPU_STEP_STREAMS_H
#define TX_CPU_STEP_STREAMS_H

#include "csrc/cpu/lanes.h"
#include "csrc/cpu/loop_checksum.h"
#include "csrc/cpu/round_bf16.h"
#include "csrc/cpu/step_extras.h"
#include "csrc/math/adamw.h"
#include "csrc/math/dither.h"
#include "csrc/math/remainder.h"

/* The streams of one instance, from a block's edge on. Dithered thresholds are those of the first element; block scales
 * are only set if the moments have them. */
typedef struct tx_step_streams {
  const void *grad;
  void *param, *master, *exp_avg, *exp_avg_sq;
  uint8_t *exp_avg_scale, *exp_avg_sq_scale;
  uint32_t param_u, exp_avg_u, exp_avg_sq_u;
  void *checksums;  /* of weights with remainders, for whole blocks of TX_CHECKSUM; NULL: no checksums to renew */
  int64_t *stale;   /* counts resynced weights; NULL: checksums are not compared first */
  int stream_store; /* weights with fp32 masters bypass the caches; they begin at a cache line */
  const tx_step_extras *extras;        /* for whole blocks; NULL: not requested */
  int64_t begin;                       /* the piece's element at which the streams begin, if there are extras */
  struct tx_measured_blocks *measured; /* of the piece; NULL: not requested, or no loop is for AVX-512 */
} tx_step_streams;

/* Weights and masters of the streams from element `at` on. */
TX_FN tx_weights tx_stream_weights(tx_step_streams s, int64_t at, const tx_dtype param, const tx_dtype master) {
  return tx_weights_at((tx_weights){s.param, s.master}, at, param, master);
}

/* Computes the extra outputs of n stepped elements from `at` on; before: their weights before the step. */
TX_FN void tx_note_stepped(tx_step_streams s, tx_weights before, int64_t at, int64_t n, const tx_dtype param,
                           const tx_dtype master) {
  const tx_weights now = tx_stream_weights(s, at, param, master);
  tx_note_loops[tx_combo_weight(param, master)](before, now, n, s.extras, s.begin + at);
}

TX_FN void tx_note_averages(tx_step_streams s, int64_t at, int64_t n, const tx_dtype param, const tx_dtype master) {
  const tx_weights now = tx_stream_weights(s, at, param, master);
  tx_average_loops[tx_combo_weight(param, master)](now, n, s.extras, s.begin + at);
}

/* The changes and measurements that loops found in n stepped elements from `at` on. all: whether everything was found;
 * if not, it is computed from the copies in `before`. */
#define TX_FOUND_BLOCKS 4
typedef struct tx_tile_found {
  tx_found blocks[TX_FOUND_BLOCKS];
  int all;
} tx_tile_found;
TX_FN void tx_note_tile(tx_step_streams s, const tx_tile_found *found, tx_weights before, int64_t at, int32_t n,
                        const tx_dtype param, const tx_dtype master) {
  if (__builtin_expect(!found->all, 0)) {
    tx_note_stepped(s, before, at, n, param, master);
    return;
  }
  for (int32_t i = 0; i < n / TX_BLOCK; i++)
    tx_note_found(&found->blocks[i], s.extras, s.begin + at + i * TX_BLOCK);
  if (s.extras->ema) tx_note_averages(s, at, n, param, master);
}

TX_FN float tx_weight_lane(tx_step_streams s, int32_t pair, const int k, const tx_dtype param, const tx_dtype master) {
  if (master == TX_NONE) return tx_load_lane(s.param, pair, k, param);
  if (master == TX_F32) return tx_load_lane(s.master, pair, k, TX_F32);
  return tx_remainder_join(tx_upper(tx_word(s.param, pair), k), (int32_t)tx_upper_unmasked(tx_word(s.master, pair), k));
}

/* u: threshold of the pair's first element. */
TX_FN void tx_store_weights(tx_step_streams s, int32_t pair, const tx_dtype param, const tx_dtype master,
                            const float p[2], uint32_t u) {
  if (master == TX_I16) {
    const tx_remainder_halves a = tx_remainder_split(p[0]), b = tx_remainder_split(p[1]);
    tx_put_word(s.param, pair, tx_join_upper(a.upper, b.upper));
    tx_put_word(s.master, pair, tx_join_lower(a.lower, b.lower));
  } else if (master == TX_F32) {
    tx_put_word(s.master, 2 * pair, tx_bits_from_f32(p[0]));
    tx_put_word(s.master, 2 * pair + 1, tx_bits_from_f32(p[1]));
#if !defined(TX_CONVERT_GROUP) /* otherwise tx_round_weights computes the weights from the masters */
    tx_put_word(s.param, pair, tx_join_upper(tx_bf16_nearest_upper(p[0]), tx_bf16_nearest_upper(p[1])));
#endif
  } else {
    const uint32_t lanes[2] = {tx_round_lane(param, p[0], u), tx_round_lane(param, p[1], u + TX_LATTICE_ELEMENT)};
    tx_store_lanes(s.param, pair, param, lanes);
  }
}

/* Rounds n fp32 masters that tx_store_weights has stored, from element `at` on, to their weights. */
TX_FN void tx_round_weights(tx_step_streams s, int64_t at, int64_t n, const tx_dtype master) {
#if defined(TX_CONVERT_GROUP)
  if (master == TX_F32) tx_nearest_bf16((const char *)s.master + 4 * at, n, (char *)s.param + 2 * at);
#else
  (void)s, (void)at, (void)n, (void)master;
#endif
}

/* A tile is walked over in groups of TX_GROUP pairs, a few vectors each. Each group prefetches from every stream a
 * kilobyte ahead. The hardware's own prefetching, which starts over at each page of five streams, left a quarter of the
 * bandwidth unused; prefetching a tile at once fills the buffers for outstanding lines. */
#define TX_GROUP 16
#define TX_PREFETCH_BYTES 1024

/* Prefetches the lines of `count` elements, `ahead` elements after element `at`. Past the end of a stream it has no
 * effect. */
TX_FN void tx_prefetch_at(const void *stream, int64_t at, int64_t ahead, const int64_t count, const tx_dtype dtype) {
  const char *from = (const char *)stream + (at + ahead) * tx_lane_bytes(dtype);
  for (int64_t byte = 0; byte < count * tx_lane_bytes(dtype); byte += 64)
    __builtin_prefetch(from + byte);
}

TX_FN void tx_prefetch(const void *stream, int64_t at, const int64_t count, const tx_dtype dtype) {
  tx_prefetch_at(stream, at, TX_PREFETCH_BYTES / tx_lane_bytes(dtype), count, dtype);
}

/* Compares the checksum of a block with remainders, from element `at` on, before it is stepped. This is the first
 * access to the weights, so they are prefetched a block further ahead; they stay in L1 until the step. */
TX_FN void tx_compare_checksum(tx_step_streams s, int64_t at) {
  if (!s.stale && !s.extras) return;
  const int64_t written = tx_checksum_blocks((const char *)s.param + 2 * at, (char *)s.master + 2 * at,
                                             (char *)s.checksums + at / TX_CHECKSUM * 8, TX_CHECKSUM,
                                             s.stale ? TX_CHECKSUM_RESYNC : TX_CHECKSUM_CHECK, 0);
  if (s.stale) *s.stale += written;
  if (s.extras && written) tx_note_written(s.extras, s.begin + at, TX_CHECKSUM);
}

/* Renews the checksum of a stepped block. */
TX_FN void tx_renew_checksum(tx_step_streams s, int64_t at) {
  tx_checksum_put(s.checksums, at / TX_CHECKSUM, tx_checksum_of((const char *)s.param + 2 * at, TX_CHECKSUM, 0));
}

#endif
