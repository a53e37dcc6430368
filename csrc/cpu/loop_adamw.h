/* The step's loops. One body, instantiated for the streams that combos.def lists as read and written in place; every
 * other legal combination runs through the same instances: its odd streams are brought to fp32 a tile at a time, in L1,
 * and rounded from there. Which way a stream goes changes no bit. Included by kernels_isa.c only. */
#ifndef TX_CPU_LOOP_ADAMW_H
#define TX_CPU_LOOP_ADAMW_H

#include "csrc/cpu/kernels.h"
#include "csrc/cpu/loop_cast.h"
#include "csrc/math/remainder.h"

/* What one instance works on. Dithered thresholds are those of the first element. */
typedef struct tx_adamw_streams {
  const void *grad;
  void *param, *master, *exp_avg, *exp_avg_sq;
  uint32_t param_u, exp_avg_u, exp_avg_sq_u;
} tx_adamw_streams;

TX_FN float tx_load_weight(const tx_adamw_streams *s, int64_t i, const tx_dtype param, const tx_dtype master) {
  if (master == TX_F32) return tx_load(s->master, i, TX_F32);
  if (master == TX_NONE) return tx_load(s->param, i, param);
  return tx_remainder_decode(((const tx_mem_u16 *)s->param)[i], (int16_t)((const tx_mem_u16 *)s->master)[i]);
}

TX_FN void tx_store_weight(const tx_adamw_streams *s, int64_t i, const tx_dtype param, const tx_dtype master, float p,
                           uint32_t u) {
  if (master == TX_NONE) {
    tx_store_threshold(s->param, i, param, p, u);
    return;
  }
  const uint16_t weight = tx_bf16_from_f32(p);
  ((tx_mem_u16 *)s->param)[i] = weight;
  if (master == TX_F32) {
    ((tx_mem_f32 *)s->master)[i] = p;
  } else {
    ((tx_mem_u16 *)s->master)[i] = (uint16_t)tx_remainder_encode(p, weight);
  }
}

TX_FN void tx_adamw_body(tx_adamw_constants c, tx_adamw_streams s, int32_t n, const tx_dtype param,
                         const tx_dtype master, const tx_dtype grad, const tx_dtype moment) {
  /* tx_dithered(0, i), carried along: an addition per vector where the product would be a slow multiplication */
  uint32_t ramp = 0;
#pragma GCC ivdep
  for (int32_t i = 0; i < n; i++, ramp += TX_LATTICE_ELEMENT) {
    const float p = tx_load_weight(&s, i, param, master);
    const tx_adamw_result r = tx_adamw_element(c, tx_load(s.grad, i, grad), p, tx_load(s.exp_avg, i, moment),
                                               tx_load(s.exp_avg_sq, i, moment));
    tx_store_threshold(s.exp_avg, i, moment, r.m, s.exp_avg_u + ramp);
    tx_store_threshold(s.exp_avg_sq, i, moment, r.v, s.exp_avg_sq_u + ramp);
    tx_store_weight(&s, i, param, master, r.p, s.param_u + ramp);
  }
}

typedef void (*tx_adamw_instance)(tx_adamw_constants c, tx_adamw_streams s, int32_t n);

#define TX_ADAMW_DEFINE_M_(m, M, g, G, w, P, W)                                                     \
  static void tx_adamw_##P##_##W##_##G##_##M(tx_adamw_constants c, tx_adamw_streams s, int32_t n) { \
    tx_adamw_body(c, s, n, TX_##P, TX_##W, TX_##G, TX_##M);                                         \
  }
#define TX_ADAMW_DEFINE_G_(g, G, ...) TX_FOR_EACH_LOOP_MOMENT(TX_ADAMW_DEFINE_M_, g, G, __VA_ARGS__)
#define TX_ADAMW_DEFINE_W_(w, P, W, ...) TX_FOR_EACH_LOOP_GRAD(TX_ADAMW_DEFINE_G_, w, P, W)
TX_FOR_EACH_LOOP_WEIGHT(TX_ADAMW_DEFINE_W_, )

#define TX_ADAMW_ENTRY_M_(m, M, g, G, w, P, W) [w][g][m] = tx_adamw_##P##_##W##_##G##_##M,
#define TX_ADAMW_ENTRY_G_(g, G, ...) TX_FOR_EACH_LOOP_MOMENT(TX_ADAMW_ENTRY_M_, g, G, __VA_ARGS__)
#define TX_ADAMW_ENTRY_W_(w, P, W, ...) TX_FOR_EACH_LOOP_GRAD(TX_ADAMW_ENTRY_G_, w, P, W)
static const tx_adamw_instance tx_adamw_instances[TX_LOOP_WEIGHTS][TX_LOOP_GRADS][TX_LOOP_MOMENTS] = {
    TX_FOR_EACH_LOOP_WEIGHT(TX_ADAMW_ENTRY_W_, )};

/* Positions in the loops' lists; -1: no loop has the stream in place. */
static int tx_loop_weight(tx_dtype param, tx_dtype master) {
#define TX_MATCH_(w, P, W, ...) \
  if (param == TX_##P && master == TX_##W) return w;
  TX_FOR_EACH_LOOP_WEIGHT(TX_MATCH_, )
#undef TX_MATCH_
  return -1;
}
static int tx_loop_grad(tx_dtype grad) {
#define TX_MATCH_(g, G, ...) \
  if (grad == TX_##G) return g;
  TX_FOR_EACH_LOOP_GRAD(TX_MATCH_, )
#undef TX_MATCH_
  return -1;
}
static int tx_loop_moment(tx_dtype moment) {
#define TX_MATCH_(m, M, ...) \
  if (moment == TX_##M) return m;
  TX_FOR_EACH_LOOP_MOMENT(TX_MATCH_, )
#undef TX_MATCH_
  return -1;
}

static const tx_load_loop tx_load_loops[TX_FORMS] = {TX_LOAD_LOOPS};
static const tx_store_loop tx_store_loops[TX_FORMS] = {TX_STORE_LOOPS};

/* A stream that may need a tile: where it lies, in which form, and whether it is staged through fp32. */
typedef struct tx_stage {
  char *memory;
  uint8_t *scales;
  int64_t element_size;
  int form;
  int staged;
  tx_noise noise;
  int32_t rounding;
} tx_stage;

/* The `n` elements from `at` on, in the form that the loop reads. */
static void *tx_stage_in(const tx_stage *s, int64_t at, int64_t n, float *tile) {
  char *memory = s->memory + at * s->element_size;
  if (!s->staged) return memory;
  tx_load_loops[s->form](memory, s->scales ? s->scales + at / TX_BLOCK : NULL, n, tile);
  return tile;
}

static void tx_stage_out(const tx_stage *s, int64_t at, int64_t n, const float *tile) {
  if (!s->staged) return;
  tx_store_loops[s->form](tile, n, s->memory + at * s->element_size, s->scales ? s->scales + at / TX_BLOCK : NULL,
                          s->noise, at, s->rounding);
}

static tx_stage tx_stage_of(void *memory, uint8_t *scales, tx_dtype dtype, tx_format format, tx_noise noise,
                            int32_t rounding) {
  const tx_stage s = {.memory = memory,
                      .scales = scales,
                      .element_size = dtype == TX_F32  ? 4
                                      : dtype == TX_U8 ? 1
                                                       : 2,
                      .form = scales ? tx_form_scaled(dtype, format) : tx_form_plain(dtype),
                      .staged = 0,
                      .noise = noise,
                      .rounding = rounding};
  return s;
}

/* One piece, of any legal combination. */
static void tx_adamw_run(const tx_adamw_piece *a) {
  const tx_noise none = {0};
  tx_stage grad = tx_stage_of((void *)(uintptr_t)a->grad, NULL, a->grad_dtype, TX_FORMAT_SIGNED, none, TX_NEAREST);
  tx_stage m = tx_stage_of(a->exp_avg, a->exp_avg_scale, a->exp_avg_dtype, TX_FORMAT_SIGNED, a->exp_avg_noise,
                           a->moment_rounding);
  tx_stage v = tx_stage_of(a->exp_avg_sq, a->exp_avg_sq_scale, a->exp_avg_sq_dtype, TX_FORMAT_SQRT, a->exp_avg_sq_noise,
                           a->moment_rounding);
  tx_stage param = tx_stage_of(a->param, NULL, a->param_dtype, TX_FORMAT_SIGNED, a->param_noise,
                               a->master_dtype == TX_NONE ? a->weight_rounding : TX_NEAREST);
  const int dithered = a->moment_rounding == TX_DITHERED;
  /* the moments in place when they agree and the loop rounds as asked; else each goes through fp32 unless it is fp32 */
  int loop_moment =
      m.form == v.form && (dithered || a->exp_avg_dtype == TX_F32) ? tx_loop_moment(a->exp_avg_dtype) : -1;
  if (loop_moment < 0) {
    loop_moment = tx_loop_moment(TX_F32);
    m.staged = a->exp_avg_dtype != TX_F32;
    v.staged = a->exp_avg_sq_dtype != TX_F32;
  }
  int loop_grad = tx_loop_grad(a->grad_dtype);
  if (loop_grad < 0) {
    loop_grad = tx_loop_grad(TX_F32);
    grad.staged = 1;
  }
  const int rounds_weight = a->master_dtype == TX_NONE && a->param_dtype != TX_F32;
  int loop_weight =
      rounds_weight && a->weight_rounding != TX_DITHERED ? -1 : tx_loop_weight(a->param_dtype, a->master_dtype);
  if (loop_weight < 0) {
    loop_weight = tx_loop_weight(TX_F32, TX_NONE); /* steps the tile, or the fp32 master itself */
    param.staged = 1;
  }
  const int64_t master_size = a->master_dtype == TX_F32 ? 4 : 2;
  const int64_t tile = grad.staged || m.staged || v.staged || param.staged ? TX_TILE : a->n;
  const tx_adamw_instance instance = tx_adamw_instances[loop_weight][loop_grad][loop_moment];
  float g_tile[TX_TILE], m_tile[TX_TILE], v_tile[TX_TILE], p_tile[TX_TILE];
  for (int64_t at = 0; at < a->n; at += tile) {
    const int64_t n = a->n - at < tile ? a->n - at : tile;
    char *master = a->master ? (char *)a->master + at * master_size : NULL;
    float *stepped = param.staged && master ? (float *)(void *)master : p_tile;
    tx_adamw_streams s = {.grad = tx_stage_in(&grad, at, n, g_tile),
                          .master = master,
                          .exp_avg = tx_stage_in(&m, at, n, m_tile),
                          .exp_avg_sq = tx_stage_in(&v, at, n, v_tile),
                          .param_u = tx_dithered(a->param_noise.lattice, (uint32_t)at),
                          .exp_avg_u = tx_dithered(a->exp_avg_noise.lattice, (uint32_t)at),
                          .exp_avg_sq_u = tx_dithered(a->exp_avg_sq_noise.lattice, (uint32_t)at)};
    s.param = param.staged && master ? stepped : tx_stage_in(&param, at, n, p_tile);
    instance(*a->constants, s, (int32_t)n);
    tx_stage_out(&m, at, n, m_tile);
    tx_stage_out(&v, at, n, v_tile);
    tx_stage_out(&param, at, n, stepped);
  }
}

#endif
