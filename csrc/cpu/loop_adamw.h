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
                         const tx_dtype master, const tx_dtype grad, const tx_dtype moment, const int root) {
  uint32_t ramp = 0; /* tx_dithered(0, i), as in noise.h */
#pragma GCC ivdep
  for (int32_t i = 0; i < n; i++, ramp += TX_LATTICE_ELEMENT) {
    const float p = tx_load_weight(&s, i, param, master);
    const tx_adamw_result r = tx_adamw_element(c, tx_load(s.grad, i, grad), p, tx_load(s.exp_avg, i, moment),
                                               tx_load(s.exp_avg_sq, i, moment));
    tx_store_threshold(s.exp_avg, i, moment, r.m, s.exp_avg_u + ramp);
    tx_store_threshold(s.exp_avg_sq, i, moment, root ? r.root : r.v, s.exp_avg_sq_u + ramp);
    tx_store_weight(&s, i, param, master, r.p, s.param_u + ramp);
  }
}

typedef void (*tx_adamw_instance)(tx_adamw_constants c, tx_adamw_streams s, int32_t n);

#define TX_ADAMW_DEFINE_M_(m, M, dtype, root, g, G, w, P, W)                                        \
  static void tx_adamw_##P##_##W##_##G##_##M(tx_adamw_constants c, tx_adamw_streams s, int32_t n) { \
    tx_adamw_body(c, s, n, TX_##P, TX_##W, TX_##G, TX_##dtype, root);                               \
  }
#define TX_ADAMW_DEFINE_G_(g, G, ...) TX_FOR_EACH_LOOP_MOMENT(TX_ADAMW_DEFINE_M_, g, G, __VA_ARGS__)
#define TX_ADAMW_DEFINE_W_(w, P, W, ...) TX_FOR_EACH_LOOP_GRAD(TX_ADAMW_DEFINE_G_, w, P, W)
TX_FOR_EACH_LOOP_WEIGHT(TX_ADAMW_DEFINE_W_, )

#define TX_ADAMW_ENTRY_M_(m, M, dtype, root, g, G, w, P, W) [w][g][m] = tx_adamw_##P##_##W##_##G##_##M,
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
static int tx_loop_moment(tx_dtype moment, int wants_root) {
#define TX_MATCH_(m, M, dtype, root, ...) \
  if (moment == TX_##dtype && wants_root == root) return m;
  TX_FOR_EACH_LOOP_MOMENT(TX_MATCH_, )
#undef TX_MATCH_
  return -1;
}

static const tx_load_loop tx_load_loops[TX_FORMS] = {TX_LOAD_LOOPS};
static const tx_store_loop tx_store_loops[TX_FORMS] = {TX_STORE_LOOPS};

/* A stream that may need a tile: where it lies and, if it is staged through fp32, by which loops. */
typedef struct tx_stage {
  char *memory;
  uint8_t *scales;
  int64_t element_size;
  tx_load_loop load; /* NULL: read and written in place */
  tx_store_loop store;
  tx_noise noise;
  int32_t rounding;
} tx_stage;

/* The `n` elements from `at` on, in the form that the loop reads. */
static void *tx_stage_in(const tx_stage *s, int64_t at, int64_t n, float *tile) {
  char *memory = s->memory + at * s->element_size;
  if (!s->load) return memory;
  s->load(memory, s->scales ? s->scales + at / TX_BLOCK : NULL, n, tile);
  return tile;
}

static void tx_stage_out(const tx_stage *s, int64_t at, int64_t n, const float *tile) {
  if (!s->load) return;
  s->store(tile, n, s->memory + at * s->element_size, s->scales ? s->scales + at / TX_BLOCK : NULL, s->noise, at,
           s->rounding);
}

static int64_t tx_size_in_loop(tx_dtype dtype) {
  return dtype == TX_F32 ? 4 : dtype == TX_U8 ? 1 : 2;
}

static tx_stage tx_in_place(const void *memory, tx_dtype dtype) {
  return (tx_stage){.memory = (char *)(uintptr_t)memory, .element_size = tx_size_in_loop(dtype)};
}

static tx_stage tx_staged(const void *memory, uint8_t *scales, tx_dtype dtype, tx_format format, tx_noise noise,
                          int32_t rounding) {
  const int form = scales ? tx_form_scaled(dtype, format) : tx_form_plain(dtype);
  return (tx_stage){.memory = (char *)(uintptr_t)memory,
                    .scales = scales,
                    .element_size = tx_size_in_loop(dtype),
                    .load = tx_load_loops[form],
                    .store = tx_store_loops[form],
                    .noise = noise,
                    .rounding = rounding};
}

/* How one piece's streams reach which loop. */
typedef struct tx_adamw_route {
  tx_stage grad, param, exp_avg, exp_avg_sq;
  tx_adamw_instance instance;
  int steps_master; /* the loop steps the fp32 master itself; the parameter is rounded from it afterwards */
  int staged;
} tx_adamw_route;

static int tx_route_moments(const tx_adamw_piece *a, tx_adamw_route *route) {
  const tx_dtype m = a->exp_avg_dtype, v = a->exp_avg_sq_dtype;
  route->exp_avg = tx_in_place(a->exp_avg, m);
  route->exp_avg_sq = tx_in_place(a->exp_avg_sq, v);
  const int in_place = tx_loop_moment(m, 0);
  if (m == v && in_place >= 0 && (m == TX_F32 || a->moment_rounding == TX_DITHERED)) return in_place;
  if (m != TX_F32) {
    route->exp_avg = tx_staged(a->exp_avg, a->exp_avg_scale, m, TX_FORMAT_SIGNED, a->exp_avg_noise, a->moment_rounding);
  }
  if (v != TX_F32) {
    route->exp_avg_sq =
        tx_staged(a->exp_avg_sq, a->exp_avg_sq_scale, v, TX_FORMAT_SQRT, a->exp_avg_sq_noise, a->moment_rounding);
  }
  if (!a->exp_avg_sq_scale) return tx_loop_moment(TX_F32, 0);
  route->exp_avg_sq.store = v == TX_U8 ? tx_store_roots_U8 : tx_store_roots_F16;
  return tx_loop_moment(TX_F32, 1);
}

static int tx_route_grad(const tx_adamw_piece *a, tx_adamw_route *route) {
  route->grad = tx_in_place(a->grad, a->grad_dtype);
  const int in_place = tx_loop_grad(a->grad_dtype);
  if (in_place >= 0) return in_place;
  route->grad = tx_staged(a->grad, NULL, a->grad_dtype, TX_FORMAT_SIGNED, (tx_noise){0}, TX_NEAREST);
  return tx_loop_grad(TX_F32);
}

static int tx_route_weight(const tx_adamw_piece *a, tx_adamw_route *route) {
  route->param = tx_in_place(a->param, a->param_dtype);
  const int rounds = a->master_dtype == TX_NONE && a->param_dtype != TX_F32;
  const int in_place = tx_loop_weight(a->param_dtype, a->master_dtype);
  if (in_place >= 0 && (!rounds || a->weight_rounding == TX_DITHERED)) return in_place;
  route->param = tx_staged(a->param, NULL, a->param_dtype, TX_FORMAT_SIGNED, a->param_noise,
                           rounds ? a->weight_rounding : TX_NEAREST);
  route->steps_master = !rounds;
  return tx_loop_weight(TX_F32, TX_NONE);
}

static tx_adamw_route tx_route(const tx_adamw_piece *a) {
  tx_adamw_route route = {0};
  const int moment = tx_route_moments(a, &route), grad = tx_route_grad(a, &route), weight = tx_route_weight(a, &route);
  route.instance = tx_adamw_instances[weight][grad][moment];
  route.staged = route.grad.load || route.param.load || route.exp_avg.load || route.exp_avg_sq.load;
  return route;
}

/* One piece, of any legal combination. */
static void tx_adamw_run(const tx_adamw_piece *a) {
  const tx_adamw_route route = tx_route(a);
  const int64_t master_size = tx_size_in_loop(a->master_dtype);
  const int64_t tile = route.staged ? TX_TILE : a->n;
  float g_tile[TX_TILE], m_tile[TX_TILE], v_tile[TX_TILE], p_tile[TX_TILE];
  for (int64_t at = 0; at < a->n; at += tile) {
    const int64_t n = a->n - at < tile ? a->n - at : tile;
    void *master = a->master ? (char *)a->master + at * master_size : NULL;
    const tx_adamw_streams s = {.grad = tx_stage_in(&route.grad, at, n, g_tile),
                                .param = route.steps_master ? master : tx_stage_in(&route.param, at, n, p_tile),
                                .master = master,
                                .exp_avg = tx_stage_in(&route.exp_avg, at, n, m_tile),
                                .exp_avg_sq = tx_stage_in(&route.exp_avg_sq, at, n, v_tile),
                                .param_u = tx_dithered(a->param_noise.lattice, (uint32_t)at),
                                .exp_avg_u = tx_dithered(a->exp_avg_noise.lattice, (uint32_t)at),
                                .exp_avg_sq_u = tx_dithered(a->exp_avg_sq_noise.lattice, (uint32_t)at)};
    route.instance(*a->constants, s, (int32_t)n);
    tx_stage_out(&route.exp_avg, at, n, m_tile);
    tx_stage_out(&route.exp_avg_sq, at, n, v_tile);
    tx_stage_out(&route.param, at, n, s.param);
  }
}

#endif
