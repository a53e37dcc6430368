/* Steps the bf16 weights of a block with masters, with AVX-512, and does a task meanwhile (extra outputs). Included by
 * step_avx512.h. */
#ifndef TX_CPU_AVX512_BLOCK_H
#define TX_CPU_AVX512_BLOCK_H

#include "csrc/cpu/avx512_ema.h"
#include "csrc/cpu/avx512_found.h"
#include "csrc/cpu/step_streams.h"

TX_FN int32_t tx_avx512_task(const tx_step_extras *e) {
  if (!e || !e->ema || e->ema_begins || e->changed || e->health) return tx_finds(e);
  return e->ema_dtype == TX_F32 ? TX_AVERAGE_F32 : e->ema_low ? TX_AVERAGE_24 : TX_AVERAGE_BF16;
}

/* A block before the step: the words of weights and remainders, or the masters. */
typedef struct tx_avx512_kept {
  uint32_t param[TX_BLOCK / 2], remainder[TX_BLOCK / 2];
  float master[TX_BLOCK];
} __attribute__((aligned(64))) tx_avx512_kept;

static __attribute__((noinline)) void tx_avx512_weights_again(const tx_adamw_constants *c, tx_step_streams s,
                                                              tx_avx512_moment_tile tile, const tx_avx512_kept *kept,
                                                              tx_dtype master) {
  for (int32_t i = 0; master == TX_F32 && i < TX_BLOCK; i++)
    tx_store(s.param, i, TX_BF16, tx_load(s.master, i, TX_F32)); /* already stepped; redone for NaN */
  if (master == TX_F32) return;
  memcpy(s.param, kept->param, sizeof kept->param);
  memcpy(s.master, kept->remainder, sizeof kept->remainder);
  TX_NO_ALIASES
  for (int32_t i = 0; i < TX_BLOCK / 2; i++) {
    float p[2];
    for (int k = 0; k < 2; k++)
      p[k] = tx_adamw_update(*c, tx_weight_lane(s, i, k, TX_BF16, TX_I16), tile.m[k * tile.stride + i],
                             tile.root[k * tile.stride + i]);
    tx_store_weights(s, i, TX_BF16, TX_I16, p, 0);
  }
}

/* How many elements ahead fp32 masters are prefetched: a tile and a half. One tile ahead, like other streams, they came
 * late if there was a task: a twentieth of the step on Sapphire Rapids. */
#define TX_AVX512_MASTERS_AHEAD 384

/* Steps the block at s. task: tx_avx512_task of its extras. tile: from its moments on. started: on entry the quotients
 * of the block's first run; on return those of the next block's first run, whose moments begin at `ahead`. */
TX_FN void tx_avx512_block_weights(const tx_adamw_constants *c, const tx_avx512_constants *wide, tx_step_streams s,
                                   tx_avx512_moment_tile tile, tx_avx512_quotients *started,
                                   const tx_avx512_moment_tile *ahead, const tx_dtype master, const int32_t task) {
  const int32_t finds = task <= TX_FIND_BOTH ? task : TX_FIND_NOTHING;
  const int averages = task > TX_FIND_BOTH;
  tx_avx512_watch watch = tx_avx512_watch_begin();
  tx_avx512_found found = tx_avx512_found_begin(s.measured, finds);
  tx_avx512_averages averaged = tx_avx512_averages_begin();
  tx_avx512_kept kept;
  /* Without this gcc puts both pointers into one vector, which waits for the same ports as the rest. */
  __asm__("" : "+r"(s.param));
#pragma GCC unroll 4
  for (int32_t run = 0; run < TX_BLOCK / 32; run++) {
    const tx_avx512_moment_tile further = tx_avx512_moments_on(tile, 16 * (run + 1));
    if (master == TX_F32 && run % 2 == 0) tx_prefetch_at(s.master, 32 * run, TX_AVX512_MASTERS_AHEAD, 64, TX_F32);
    const tx_avx512_quotients q = tx_avx512_take(wide, started, run + 1 < TX_BLOCK / 32 ? &further : ahead);
    const tx_avx512_stepped stepped =
        master == TX_F32 ? tx_avx512_masters(wide, (char *)s.param + 64 * run, (char *)s.master + 128 * run, q,
                                             &kept.master[32 * run])
                         : tx_avx512_weights(wide, (char *)s.param + 64 * run, (char *)s.master + 64 * run, q, &watch,
                                             &kept.param[16 * run], &kept.remainder[16 * run]);
    if (!(finds & TX_FIND_MEASURED)) tx_avx512_watch_numbers(&watch, stepped.now);
    if (finds) tx_avx512_find(&found, stepped, run, TX_BF16, finds);
    if (averages) tx_avx512_average(&averaged, s.extras, s.begin, run, stepped.now, task);
  }
  if (finds & TX_FIND_MEASURED) tx_avx512_watch_numbers(&watch, found.weights); /* NaN if a square was */
  const int quiet = tx_avx512_watch_is_quiet(watch);
  if (__builtin_expect(!quiet, 0)) tx_avx512_weights_again(c, s, tile, &kept, master);
  if (quiet && finds) {
    tx_avx512_note_found(&found, s.extras, s.begin, s.measured, TX_BF16, finds);
    if (s.extras->ema) tx_note_averages(s, 0, TX_BLOCK, TX_BF16, master);
  } else if (quiet && averages && averaged.ordinary == 0xffffu) {
    tx_avx512_store_averages(&averaged, s.extras, s.begin, task);
  } else if (s.extras) {
    const tx_weights before = {kept.param, master == TX_F32 ? (const void *)kept.master : kept.remainder};
    tx_note_stepped(s, before, 0, TX_BLOCK, TX_BF16, master);
  }
}

#endif
