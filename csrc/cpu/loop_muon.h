/* Muon's two passes, a tile in the L1 cache at a time: streams of any form are converted to fp32 and rounded from
 * there. Included by kernels_isa.c only, after loop_adamw.h, whose stages it uses. */
#ifndef TX_CPU_LOOP_MUON_H
#define TX_CPU_LOOP_MUON_H

#include "csrc/cpu/kernels.h"
#include "csrc/cpu/loop_adamw.h"
#include "csrc/cpu/muon_ahead.h"
#include "csrc/math/muon.h"

#if TX_HAS_AVX512
#include "csrc/cpu/avx512_muon.h"
#endif

TX_FN void tx_muon_prefetch(const void *from, int64_t bytes, const int64_t ahead) {
  for (int64_t byte = 0; byte < bytes; byte += TX_CACHE_LINE)
    __builtin_prefetch((const char *)from + ahead + byte);
}

/* -- momentum ----------------------------------------------------------------------------------------------------- */

/* One copy for each from_new and nesterov, so that the loop has no selections. */
TX_FN void tx_muon_tile_of(const tx_muon_constants *constants, int64_t n, const float *restrict g, float *restrict m,
                           float *restrict u, const int from_new, const int nesterov) {
  tx_muon_constants c = *constants;
  c.average.from_new = from_new;
  for (int64_t i = 0; i < n; i++) {
    const tx_muon_moments r = tx_muon_average(c, g[i], m[i], nesterov);
    m[i] = r.m;
    u[i] = r.u;
  }
}

static void tx_muon_tile(const tx_muon_constants *c, int64_t n, const float *g, float *m, float *u, int nesterov) {
  if (c->average.from_new) {
    if (nesterov) {
      tx_muon_tile_of(c, n, g, m, u, 1, 1);
    } else {
      tx_muon_tile_of(c, n, g, m, u, 1, 0);
    }
  } else if (nesterov) {
    tx_muon_tile_of(c, n, g, m, u, 0, 1);
  } else {
    tx_muon_tile_of(c, n, g, m, u, 0, 0);
  }
}

/* Reads and writes gradients and momentum in place: fp32 or bf16, momentum dithered. u's average starts from m', with a
 * weight of 0 without Nesterov momentum. threshold: of the first element. */
TX_FN void tx_muon_tile_in_place(const tx_muon_constants *constants, int64_t n, const void *grad, void *momentum,
                                 float *restrict u, int nesterov, uint32_t threshold, const tx_dtype grad_dtype,
                                 const tx_dtype momentum_dtype) {
  const float factor = constants->factor, weight = constants->average.weight, of_u = nesterov ? weight : 0.0f;
  uint32_t ramp = threshold;
  TX_NO_ALIASES
  for (int32_t i = 0; i < (int32_t)n; i++, ramp += TX_LATTICE_ELEMENT) {
    const float grad_i = tx_load(grad, i, grad_dtype), m = tx_load(momentum, i, momentum_dtype);
    const float g = tx_adamw_clamped(factor * grad_i, grad_i);
    const float next = m + weight * (g - m);
    tx_store_threshold(momentum, i, momentum_dtype, next, ramp);
    u[i] = next + of_u * (g - next);
  }
}

/* The tile from `at` on. Returns 0, and does nothing, if no loop takes these streams in place. */
static int tx_muon_momentum_in_place(const tx_muon_momentum_piece *a, int64_t at, int64_t n, float *u) {
  const int is_wide = a->momentum_dtype == TX_F32, wide_grad = a->grad_dtype == TX_F32;
  if (a->constants.average.from_new || !(is_wide || (a->momentum_dtype == TX_BF16 && a->rounding == TX_DITHERED)) ||
      !(wide_grad || a->grad_dtype == TX_BF16))
    return 0;
  const char *grad = (const char *)a->grad + at * (wide_grad ? 4 : 2);
  char *momentum = (char *)a->momentum + at * (is_wide ? 4 : 2);
  const uint32_t u0 = tx_dithered(a->noise.lattice, (uint32_t)at);
  if (is_wide && wide_grad) {
    tx_muon_tile_in_place(&a->constants, n, grad, momentum, u, a->nesterov, u0, TX_F32, TX_F32);
  } else if (is_wide) {
    tx_muon_tile_in_place(&a->constants, n, grad, momentum, u, a->nesterov, u0, TX_BF16, TX_F32);
  } else if (wide_grad) {
    tx_muon_tile_in_place(&a->constants, n, grad, momentum, u, a->nesterov, u0, TX_F32, TX_BF16);
  } else {
    tx_muon_tile_in_place(&a->constants, n, grad, momentum, u, a->nesterov, u0, TX_BF16, TX_BF16);
  }
  return 1;
}

/* A piece's streams. */
typedef struct tx_muon_streams {
  tx_stage grad, momentum, work;
} tx_muon_streams;

/* The whole tile from `at` on, with the AVX-512 loop. Returns 0, and changes nothing, if that loop does not take these
 * streams or these numbers. */
#if TX_HAS_AVX512
static int tx_muon_momentum_wide(const tx_muon_momentum_piece *a, int64_t at) {
  if (a->constants.average.from_new || a->grad_dtype != TX_BF16 || a->momentum_dtype != TX_BF16 ||
      a->rounding != TX_DITHERED)
    return 0;
  const char *grad = (const char *)a->grad + 2 * at;
  char *momentum = (char *)a->momentum + 2 * at, *work = (char *)a->work + (a->work_dtype == TX_F32 ? 4 : 2) * at;
  const uint32_t u = tx_dithered(a->noise.lattice, (uint32_t)at);
  const tx_muon_constants *c = &a->constants;
  tx_avx512_muon_kept kept;
  int right;
  if (a->work_dtype == TX_F32) {
    right = tx_avx512_muon_tile(c, grad, momentum, work, u, a->nesterov, TX_F32, 0, &kept);
  } else if (a->stream_store && (uintptr_t)work % TX_CACHE_LINE == 0) {
    right = tx_avx512_muon_tile(c, grad, momentum, work, u, a->nesterov, TX_BF16, 1, &kept);
  } else {
    right = tx_avx512_muon_tile(c, grad, momentum, work, u, a->nesterov, TX_BF16, 0, &kept);
  }
  if (__builtin_expect(!right, 0)) memcpy(momentum, kept.words, sizeof kept.words);
  return right;
}
#else
static int tx_muon_momentum_wide(const tx_muon_momentum_piece *a, int64_t at) {
  (void)a, (void)at;
  return 0;
}
#endif

/* The n elements from `at` on. */
static void tx_muon_momentum_tile(const tx_muon_momentum_piece *a, const tx_muon_streams *s, int64_t at, int64_t n) {
  float g[TX_TILE], m[TX_TILE], u[TX_TILE];
  tx_muon_prefetch(s->grad.memory + at * s->grad.element_size, n * s->grad.element_size, TX_MUON_AHEAD);
  tx_muon_prefetch(s->momentum.memory + at * s->momentum.element_size, n * s->momentum.element_size, TX_MUON_AHEAD);
  if (!tx_muon_momentum_in_place(a, at, n, u)) {
    (void)tx_stage_in(&s->grad, at, n, g);
    (void)tx_stage_in(&s->momentum, at, n, m);
    tx_muon_tile(&a->constants, n, g, m, u, a->nesterov);
    tx_stage_out(&s->momentum, at, n, m);
  }
  tx_stage_out(&s->work, at, n, u);
}

static void tx_muon_momentum_run(const tx_muon_momentum_piece *a) {
  const tx_noise none = {0};
  const tx_muon_streams s = {
      .grad = tx_staged(a->grad, NULL, a->grad_dtype, TX_FORMAT_SIGNED, none, TX_NEAREST),
      .momentum = tx_staged(a->momentum, a->scales, a->momentum_dtype, TX_FORMAT_MOMENTUM, a->noise, a->rounding),
      .work = tx_staged(a->work, NULL, a->work_dtype, TX_FORMAT_SIGNED, none, TX_NEAREST)};
  for (int64_t at = 0; at < a->n; at += TX_TILE) {
    const int64_t n = a->n - at < TX_TILE ? a->n - at : TX_TILE;
    if (n < TX_TILE || !tx_muon_momentum_wide(a, at)) tx_muon_momentum_tile(a, &s, at, n);
  }
  if (a->stream_store) tx_end_nontemporal();
}

/* -- update ------------------------------------------------------------------------------------------------------- */

/* How many of the n elements from `at` on are in one matrix. *part: on entry, a matrix not after theirs, as an index
 * from the piece's first; becomes theirs. */
TX_FN int64_t tx_muon_in_part(const tx_muon_parts *parts, int64_t *part, int64_t at, int64_t n) {
  for (;; ++*part) {
    const tx_muon_part *next = parts->first + *part + 1;
    if (next == parts->end || next->tensor != parts->first->tensor) return n;
    const int64_t left = next->begin - parts->begin - at;
    if (left > 0) return left < n ? left : n;
  }
}

TX_FN void tx_muon_step_from(const tx_muon_rate *rate, int64_t n, const void *restrict o, void *restrict p,
                             const tx_dtype update) {
  const float lr = (float)rate->lr, decay = (float)rate->decay;
  TX_NO_ALIASES
  for (int64_t i = 0; i < n; i++)
    ((tx_mem_f32 *)p)[i] = tx_muon_step(lr, decay, ((const tx_mem_f32 *)p)[i], tx_load(o, i, update));
}

static void tx_muon_step_tile(const tx_muon_rate *rate, int64_t n, const void *o, void *p, tx_dtype update) {
  if (update == TX_F32) {
    tx_muon_step_from(rate, n, o, p, TX_F32);
  } else {
    tx_muon_step_from(rate, n, o, p, TX_BF16);
  }
}

/* Processes the checksums of the n weights from `at` on, with remainders; returns how many weights are in blocks with a
 * changed checksum. */
TX_FN int64_t tx_muon_checksums(const tx_muon_update_piece *a, int64_t at, int64_t n, tx_checksum_mode mode) {
  if (!a->checksums || a->master_dtype != TX_I16) return 0;
  return tx_checksum_blocks((const char *)a->param + 2 * at, (char *)a->master + 2 * at,
                            (char *)a->checksums + at / TX_CHECKSUM * (int64_t)sizeof(uint64_t), n, (int32_t)mode, 0);
}

/* Steps n weights with fp32 masters in place, from `at` on, all of one matrix. The weights are not read, so they may
 * bypass the caches. A few at a time, so that prefetches are spread evenly. */
#define TX_MUON_FEW 256
static void tx_muon_update_masters(const tx_muon_update_piece *a, const tx_muon_rate *rate, int64_t at, int64_t n) {
  uint16_t rounded[TX_MUON_FEW] __attribute__((aligned(TX_CACHE_LINE)));
  const int64_t update_size = a->update_dtype == TX_F32 ? 4 : 2;
  const int streams = a->stream_store && ((uintptr_t)a->param + 2 * (uintptr_t)at) % TX_CACHE_LINE == 0;
  for (int64_t few; n > 0; at += few, n -= few) {
    few = n < TX_MUON_FEW ? n : TX_MUON_FEW;
    char *master = (char *)a->master + 4 * at, *param = (char *)a->param + 2 * at;
    const char *update = (const char *)a->update + at * update_size;
    tx_muon_prefetch(update, few * update_size, TX_MUON_AHEAD_UPDATE);
    tx_muon_prefetch(master, few * 4, TX_MUON_AHEAD_UPDATE);
    tx_muon_step_tile(rate, few, update, master, a->update_dtype);
    if (streams && few == TX_MUON_FEW) {
      tx_nearest_bf16(master, few, rounded);
      tx_store_nontemporal(rounded, param, (int64_t)sizeof rounded);
    } else {
      tx_nearest_bf16(master, few, param);
    }
  }
}

/* Steps n weights of any dtypes from `at` on. */
static void tx_muon_update_tile(const tx_muon_update_piece *a, const tx_stage *param, int64_t *part, int64_t at,
                                int64_t n) {
  const int64_t update_size = a->update_dtype == TX_F32 ? 4 : 2;
  const int has_wide = a->master_dtype == TX_F32; /* the weight is only written then */
  const char *update = (const char *)a->update + at * update_size;
  float p[TX_TILE];
  void *stepped = has_wide ? (char *)a->master + 4 * at : (char *)p;
  if (!has_wide) (void)tx_stage_in(param, at, n, p);
  for (int64_t i = 0; i < n;) {
    const int64_t count = tx_muon_in_part(&a->parts, part, at + i, n - i);
    tx_muon_step_tile(&a->rates[*part], count, update + i * update_size, (char *)stepped + 4 * i, a->update_dtype);
    i += count;
  }
  tx_stage_out(param, at, n, stepped);
}

/* The n weights from `at` on before the step, if the extra outputs need them. */
static tx_weights tx_muon_before(const tx_muon_update_piece *a, int64_t at, int64_t n, tx_weights_copy *copy) {
  const tx_weights all = {a->param, a->master};
  const tx_weights from = tx_weights_at(all, at, a->param_dtype, a->master_dtype);
  if (!a->extras->changed && !a->extras->health) return from; /* the EMA needs only the new weights */
  return tx_copy_weights(from, n, a->param_dtype, a->master_dtype, copy);
}

static void tx_muon_note(const tx_muon_update_piece *a, tx_weights before, int64_t at, int64_t n) {
  const tx_weights all = {a->param, a->master};
  const tx_weights now = tx_weights_at(all, at, a->param_dtype, a->master_dtype);
  tx_note_loops[tx_combo_weight(a->param_dtype, a->master_dtype)](before, now, n, a->extras, at);
}

/* Compares checksums of weights with remainders before the step; returns how many remainders were dropped. */
static int64_t tx_muon_compare(const tx_muon_update_piece *a, int64_t at, int64_t n) {
  if (!a->resyncs && !a->extras) return 0;
  const int64_t written = tx_muon_checksums(a, at, n, a->resyncs ? TX_CHECKSUM_RESYNC : TX_CHECKSUM_CHECK);
  if (a->extras && written) tx_note_written(a->extras, at, n);
  return a->resyncs ? written : 0;
}

static int64_t tx_muon_update_run(const tx_muon_update_piece *a) {
  const int64_t update_size = a->update_dtype == TX_F32 ? 4 : 2;
  const int in_place = a->master_dtype == TX_F32 && a->param_dtype == TX_BF16;
  tx_stage param = tx_staged(a->param, NULL, a->param_dtype, TX_FORMAT_SIGNED, a->noise,
                             a->master_dtype == TX_NONE ? a->rounding : TX_NEAREST);
  if (a->master_dtype == TX_I16) param.remainders = a->master;
  int64_t part = 0, stale = 0;
  tx_weights_copy copy;
  tx_weights before = {NULL, NULL};
  for (int64_t at = 0; at < a->n; at += TX_TILE) {
    const int64_t n = a->n - at < TX_TILE ? a->n - at : TX_TILE;
    if (in_place && tx_muon_in_part(&a->parts, &part, at, n) == n) {
      if (a->extras) before = tx_muon_before(a, at, n, &copy);
      tx_muon_update_masters(a, &a->rates[part], at, n);
      if (a->extras) tx_muon_note(a, before, at, n);
      continue;
    }
    tx_muon_prefetch((const char *)a->update + at * update_size, n * update_size, TX_MUON_AHEAD_UPDATE);
    tx_muon_prefetch(param.memory + at * param.element_size, n * param.element_size, TX_MUON_AHEAD_UPDATE);
    if (a->master_dtype == TX_I16) tx_muon_prefetch((char *)a->master + at * 2, n * 2, TX_MUON_AHEAD_UPDATE);
    stale += tx_muon_compare(a, at, n);
    if (a->extras) before = tx_muon_before(a, at, n, &copy);
    tx_muon_update_tile(a, &param, &part, at, n);
    (void)tx_muon_checksums(a, at, n, TX_CHECKSUM_RENEW);
    if (a->extras) tx_muon_note(a, before, at, n);
  }
  if (a->stream_store) tx_end_nontemporal();
  if (a->checksums && a->master_dtype == TX_F32)
    (void)tx_sample_blocks(a->param, a->checksums, a->n, a->whole, TX_CHECKSUM_RENEW, 0);
  return stale;
}

#endif
