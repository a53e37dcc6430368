/* The step of a piece, for every legal combination of dtypes. Combinations that combos.def lists as compiled have an
 * instance of their own, which reads and writes its streams in place. Any other combination uses one of these
 * instances: streams that the instance does not take are staged, which means that they are converted to fp32 a tile at
 * a time, in L1, and rounded from there. Which way a stream takes changes no bit. Included by kernels_isa.c only. */
#ifndef TX_CPU_LOOP_ADAMW_H
#define TX_CPU_LOOP_ADAMW_H

#include "csrc/cpu/kernels.h"
#include "csrc/cpu/loop_cast.h"
#include "csrc/cpu/loop_checksum.h"
#include "csrc/cpu/loop_master.h"
#include "csrc/cpu/loop_sample.h"
#include "csrc/cpu/step_8bit.h"
#include "csrc/cpu/step_fp32.h"
#include "csrc/cpu/step_plain.h"
#if TX_HAS_AVX512
#include "csrc/cpu/step_8bit_avx512.h"
#endif

typedef void (*tx_step_instance)(const tx_adamw_constants *c, const tx_step_streams *s, int32_t n);

/* 8-bit moments: with the AVX-512 loop if there is one for the other streams. n: see tx_step_8bit. */
TX_FN void tx_step_blocks(tx_adamw_constants c, tx_step_streams s, int32_t n, const tx_dtype param,
                          const tx_dtype master, const tx_dtype grad) {
#if TX_HAS_AVX512
  if (param == TX_BF16 && master == TX_I16 && grad == TX_BF16) {
    tx_avx512_step(&c, &s, n / TX_BLOCK);
    return;
  }
#endif
  tx_step_8bit(c, s, n, param, master, grad);
}

#define TX_STEP_DEFINE_M_(m, M, g, G, w, P, W)                                                                  \
  static void tx_step_##P##_##W##_##G##_##M(const tx_adamw_constants *c, const tx_step_streams *s, int32_t n) { \
    if (TX_##M == TX_U8) {                                                                                      \
      tx_step_blocks(*c, *s, n, TX_##P, TX_##W, TX_##G);                                                        \
    } else if (TX_##P == TX_F32 && TX_##G == TX_F32 && TX_##M == TX_F32) {                                      \
      tx_step_fp32(*c, *s, n, 1, 0);                                                                            \
    } else {                                                                                                    \
      tx_step_pairs(*c, *s, n, TX_##P, TX_##W, TX_##G, TX_##M);                                                 \
    }                                                                                                           \
  }
#define TX_STEP_DEFINE_G_(g, G, ...) TX_FOR_EACH_LOOP_MOMENT(TX_STEP_DEFINE_M_, g, G, __VA_ARGS__)
#define TX_STEP_DEFINE_W_(w, P, W, ...) TX_FOR_EACH_LOOP_GRAD(TX_STEP_DEFINE_G_, w, P, W)
TX_FOR_EACH_LOOP_WEIGHT(TX_STEP_DEFINE_W_, )

#define TX_STEP_ENTRY_M_(m, M, g, G, w, P, W) [w][g][m] = tx_step_##P##_##W##_##G##_##M,
#define TX_STEP_ENTRY_G_(g, G, ...) TX_FOR_EACH_LOOP_MOMENT(TX_STEP_ENTRY_M_, g, G, __VA_ARGS__)
#define TX_STEP_ENTRY_W_(w, P, W, ...) TX_FOR_EACH_LOOP_GRAD(TX_STEP_ENTRY_G_, w, P, W)
static const tx_step_instance tx_step_instances[TX_LOOP_WEIGHTS][TX_LOOP_GRADS][TX_LOOP_MOMENTS] = {
    TX_FOR_EACH_LOOP_WEIGHT(TX_STEP_ENTRY_W_, )};

/* For combinations without an instance: everything in fp32, with any constants. */
static void tx_step_staged(const tx_adamw_constants *c, const tx_step_streams *s, int32_t n) {
  tx_step_fp32(*c, *s, n, 0, 0);
}
static void tx_step_staged_root(const tx_adamw_constants *c, const tx_step_streams *s, int32_t n) {
  tx_step_fp32(*c, *s, n, 0, 1);
}

/* Indices into the lists of compiled rows; -1: no row has the stream in place. */
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

/* A stream that may have to be staged. */
typedef struct tx_stage {
  char *memory;
  uint8_t *scales;
  char *remainders; /* of a weight that is the stream together with them */
  int64_t element_size;
  tx_load_loop load; /* NULL, and store too: the stream is read and written in place */
  tx_store_loop store;
  tx_noise noise;
  int32_t rounding;
} tx_stage;

/* The n elements from `at` on as the instance reads them: in place, or converted into `tile`. */
static void *tx_stage_in(const tx_stage *s, int64_t at, int64_t n, float *tile) {
  char *memory = s->memory + at * s->element_size;
  if (s->remainders) {
    tx_decode_loop(memory, s->remainders + 2 * at, tile, n);
  } else if (s->load) {
    s->load(memory, s->scales ? s->scales + at / TX_BLOCK : NULL, n, tile);
  } else {
    return memory;
  }
  return tile;
}

static void tx_stage_out(const tx_stage *s, int64_t at, int64_t n, const float *tile) {
  char *memory = s->memory + at * s->element_size;
  if (s->remainders) {
    tx_encode_loop(tile, memory, s->remainders + 2 * at, n);
  } else if (s->store) {
    s->store(tile, n, memory, s->scales ? s->scales + at / TX_BLOCK : NULL, s->noise, at, s->rounding);
  }
}

static void tx_in_place(tx_stage *stage, const void *memory, tx_dtype dtype) {
  stage->memory = (char *)(uintptr_t)memory;
  stage->element_size = tx_lane_bytes(dtype);
}

static tx_stage tx_staged(const void *memory, uint8_t *scales, tx_dtype dtype, tx_format format, tx_noise noise,
                          int32_t rounding) {
  const int form = scales ? tx_form_scaled(dtype, format) : tx_form_plain(dtype);
  return (tx_stage){.memory = (char *)(uintptr_t)memory,
                    .scales = scales,
                    .element_size = tx_lane_bytes(dtype),
                    .load = tx_load_loops[form],
                    .store = tx_store_loops[form],
                    .noise = noise,
                    .rounding = rounding};
}

/* Which instance a piece uses, and which of its streams are staged. */
typedef struct tx_adamw_route {
  tx_stage grad, param, exp_avg, exp_avg_sq;
  tx_step_instance instance;
  int32_t width;    /* the instance takes a multiple of that many elements */
  int steps_master; /* whether it steps the fp32 masters themselves; weights are rounded from them afterwards */
  int staged;
} tx_adamw_route;

/* Stages the moments. */
static void tx_stage_moments(const tx_adamw_piece *a, tx_adamw_route *route) {
  const tx_dtype m = a->exp_avg_dtype, v = a->exp_avg_sq_dtype;
  if (m != TX_F32) {
    route->exp_avg = tx_staged(a->exp_avg, a->exp_avg_scale, m, TX_FORMAT_SIGNED, a->exp_avg_noise, a->moment_rounding);
  }
  if (v != TX_F32) {
    route->exp_avg_sq =
        tx_staged(a->exp_avg_sq, a->exp_avg_sq_scale, v, TX_FORMAT_SQRT, a->exp_avg_sq_noise, a->moment_rounding);
  }
  if (a->exp_avg_sq_scale) route->exp_avg_sq.store = v == TX_U8 ? tx_store_roots_U8 : tx_store_roots_F16;
}

static void tx_stage_grad(const tx_adamw_piece *a, tx_adamw_route *route) {
  if (a->grad_dtype == TX_F32) return;
  route->grad = tx_staged(a->grad, NULL, a->grad_dtype, TX_FORMAT_SIGNED, (tx_noise){0}, TX_NEAREST);
}

static void tx_stage_weight(const tx_adamw_piece *a, tx_adamw_route *route) {
  if (a->param_dtype == TX_F32) return;
  const int rounds = a->master_dtype == TX_NONE;
  route->param = tx_staged(a->param, NULL, a->param_dtype, TX_FORMAT_SIGNED, a->param_noise,
                           rounds ? a->weight_rounding : TX_NEAREST);
  if (a->master_dtype == TX_I16) route->param.remainders = a->master;
  route->steps_master = a->master_dtype == TX_F32;
}

/* *route: zeros on entry. It is filled in place: returning it by value would copy, in vectors, what was just stored in
 * words, and such loads have to wait for the stores. */
static void tx_route(const tx_adamw_piece *a, tx_adamw_route *route) {
  route->width = 2 * TX_GROUP;
  tx_in_place(&route->grad, a->grad, a->grad_dtype);
  tx_in_place(&route->param, a->param, a->param_dtype);
  tx_in_place(&route->exp_avg, a->exp_avg, a->exp_avg_dtype);
  tx_in_place(&route->exp_avg_sq, a->exp_avg_sq, a->exp_avg_sq_dtype);

  const int dithered = a->moment_rounding == TX_DITHERED || a->exp_avg_dtype == TX_F32;
  int moment = a->exp_avg_dtype == a->exp_avg_sq_dtype && dithered ? tx_loop_moment(a->exp_avg_dtype) : -1;
  const int root = moment < 0 && a->exp_avg_sq_scale;
  const int fp32_only = root || !tx_adamw_is_usual(a->constants);
  int grad = fp32_only ? -1 : tx_loop_grad(a->grad_dtype);
  const int rounds = a->master_dtype == TX_NONE && a->param_dtype != TX_F32;
  int weight =
      fp32_only || (rounds && a->weight_rounding != TX_DITHERED) ? -1 : tx_loop_weight(a->param_dtype, a->master_dtype);
  if (fp32_only || moment < 0) tx_stage_moments(a, route);
  if (grad < 0) tx_stage_grad(a, route);
  if (weight < 0) tx_stage_weight(a, route);
  route->staged = route->grad.store || route->param.store || route->exp_avg.store || route->exp_avg_sq.store;
  if (fp32_only) {
    route->instance = a->exp_avg_sq_scale ? tx_step_staged_root : tx_step_staged;
    return;
  }
  /* staged streams are fp32 */
  if (moment < 0) moment = tx_loop_moment(TX_F32);
  if (grad < 0) grad = tx_loop_grad(TX_F32);
  if (weight < 0) weight = tx_loop_weight(TX_F32, TX_NONE);
  route->instance = tx_step_instances[weight][grad][moment];
  if (moment == tx_loop_moment(TX_U8)) route->width = TX_BLOCK;
}

/* Moves the streams n elements on; n: a multiple of TX_BLOCK if there are scales. */
static void tx_advance(tx_step_streams *s, const int64_t sizes[5], int64_t n) {
  s->grad = (const char *)s->grad + n * sizes[0];
  s->param = (char *)s->param + n * sizes[1];
  if (s->master) s->master = (char *)s->master + n * sizes[2];
  s->exp_avg = (char *)s->exp_avg + n * sizes[3];
  s->exp_avg_sq = (char *)s->exp_avg_sq + n * sizes[4];
  if (s->exp_avg_scale) s->exp_avg_scale += n / TX_BLOCK;
  if (s->exp_avg_sq_scale) s->exp_avg_sq_scale += n / TX_BLOCK;
  s->param_u = tx_dithered(s->param_u, (uint32_t)n);
  s->exp_avg_u = tx_dithered(s->exp_avg_u, (uint32_t)n);
  s->exp_avg_sq_u = tx_dithered(s->exp_avg_sq_u, (uint32_t)n);
  s->begin += n;
}

/* Steps the last n elements in padded copies, since the instance takes `width` > n. */
static void tx_step_padded(const tx_adamw_route *route, const tx_adamw_constants *c, tx_step_streams *s,
                           const int64_t sizes[5], int32_t n) {
  char padded[5][TX_BLOCK * sizeof(float)];
  void *const streams[5] = {(void *)(uintptr_t)s->grad, s->param, s->master, s->exp_avg, s->exp_avg_sq};
  s->grad = padded[0];
  s->param = padded[1];
  s->master = s->master ? padded[2] : NULL;
  s->exp_avg = padded[3];
  s->exp_avg_sq = padded[4];
  for (int i = 0; i < 5; i++) {
    if (!streams[i]) continue;
    memset(padded[i], 0, (size_t)(route->width * sizes[i])); /* clearing all of it would take as long as the step */
    memcpy(padded[i], streams[i], (size_t)(n * sizes[i]));
  }
  route->instance(c, s, route->width);
  for (int i = 1; i < 5; i++)
    if (streams[i]) memcpy(streams[i], padded[i], (size_t)(n * sizes[i]));
}

/* Processes (mode) the checksums of n weights that no instance processes. */
_Static_assert(TX_TILE % TX_CHECKSUM == 0, "a tile has whole checksums");
TX_FN void *tx_checksums_at(const tx_adamw_piece *a, int64_t at) {
  return (char *)a->checksums + at / TX_CHECKSUM * (int64_t)sizeof(uint64_t);
}
static int64_t tx_checksum_tile(const tx_adamw_piece *a, int64_t at, int64_t n, tx_checksum_mode mode) {
  if (!a->checksums || a->master_dtype != TX_I16) return 0;
  return tx_checksum_blocks((const char *)a->param + 2 * at, (char *)a->master + 2 * at, tx_checksums_at(a, at), n,
                            (int32_t)mode, 0);
}

/* The same before the weights are stepped: compares, and resyncs if a->resyncs. Returns how many weights are in blocks
 * that were resynced. */
static int64_t tx_compare_tile(const tx_adamw_piece *a, int64_t at, int64_t n) {
  if (!a->resyncs && !a->extras) return 0;
  const int64_t written = tx_checksum_tile(a, at, n, a->resyncs ? TX_CHECKSUM_RESYNC : TX_CHECKSUM_CHECK);
  if (a->extras && written) tx_note_written(a->extras, at, n);
  return a->resyncs ? written : 0;
}

/* The n elements of a piece from `at` on for which instances do not compute the extra outputs: all of a staged tile,
 * and the elements after the last whole block. */
typedef struct tx_rest {
  int64_t at, n;
  tx_weights before;
  tx_weights_copy copy;
} tx_rest;

static void tx_keep_rest(const tx_adamw_piece *a, tx_rest *rest) {
  const tx_weights all = {a->param, a->master};
  const tx_weights from = tx_weights_at(all, rest->at, a->param_dtype, a->master_dtype);
  rest->before = tx_copy_weights(from, rest->n, a->param_dtype, a->master_dtype, &rest->copy);
}

static void tx_note_rest(const tx_adamw_piece *a, const tx_rest *rest) {
  const tx_weights all = {a->param, a->master};
  const tx_weights now = tx_weights_at(all, rest->at, a->param_dtype, a->master_dtype);
  tx_note_loops[tx_combo_weight(a->param_dtype, a->master_dtype)](rest->before, now, rest->n, a->extras, rest->at);
}

/* Steps the n elements of the streams: first those in whole checksum blocks, then, with extra outputs, the other whole
 * blocks, then the rest. */
static void tx_step_run(const tx_adamw_route *route, const tx_adamw_constants *c, tx_step_streams *s,
                        const int64_t sizes[5], int32_t n, int32_t checksummed) {
  const int32_t noted = s->extras ? n / TX_BLOCK * TX_BLOCK : checksummed;
  const int32_t ends[] = {checksummed, noted};
  int32_t done = 0;
  for (int i = 0; i < 2; i++) {
    if (ends[i] <= done) continue;
    if (i == 1) s->checksums = NULL;
    route->instance(c, s, ends[i] - done);
    tx_advance(s, sizes, ends[i] - done);
    done = ends[i];
  }
  s->checksums = NULL;
  s->extras = NULL;
  const int32_t rest = n - done, whole = rest / route->width * route->width;
  if (whole > 0) {
    route->instance(c, s, whole);
    tx_advance(s, sizes, whole);
  }
  if (whole == rest) return;
  s->stream_store = 0; /* the copies do not begin at a cache line */
  tx_step_padded(route, c, s, sizes, rest - whole);
}

/* Steps one piece of any legal combination. */
static int64_t tx_adamw_run(const tx_adamw_piece *a) {
  tx_adamw_route route = {0};
  tx_route(a, &route);
  const int64_t master_size = tx_lane_bytes(a->master_dtype);
  const int64_t tile = route.staged ? TX_TILE : a->n;
  const int instance_checks = !route.staged && a->checksums && a->master_dtype == TX_I16;
  const int stream_store = TX_HAS_NONTEMPORAL && a->stream_store && (uintptr_t)a->param % TX_CACHE_LINE == 0;
  const int measures = TX_HAS_AVX512 && !route.staged && a->extras && a->extras->health;
  int64_t stale = 0;
  tx_measured_blocks measured;
  if (measures) tx_measured_begin(&measured);
  float g_tile[TX_TILE], m_tile[TX_TILE], v_tile[TX_TILE], p_tile[TX_TILE];
  const int64_t sizes[5] = {
      route.grad.load ? 4 : route.grad.element_size, route.param.load ? 4 : route.param.element_size, master_size,
      route.exp_avg.load ? 4 : route.exp_avg.element_size, route.exp_avg_sq.load ? 4 : route.exp_avg_sq.element_size};
  for (int64_t at = 0; at < a->n; at += tile) {
    const int64_t n = a->n - at < tile ? a->n - at : tile;
    void *master = a->master ? (char *)a->master + at * master_size : NULL;
    const int32_t blocks = instance_checks ? (int32_t)(n / TX_CHECKSUM * TX_CHECKSUM) : 0;
    tx_rest rest; /* not initialised, since its copy has 8 KB */
    rest.at = at + (route.staged ? 0 : n / TX_BLOCK * TX_BLOCK);
    rest.n = a->extras ? at + n - rest.at : 0;
    stale += tx_compare_tile(a, at + blocks, n - blocks);
    if (rest.n > 0) tx_keep_rest(a, &rest); /* after the resync, as the step reads them */
    tx_step_streams s = {.grad = tx_stage_in(&route.grad, at, n, g_tile),
                         .param = route.steps_master ? master : tx_stage_in(&route.param, at, n, p_tile),
                         .master = route.steps_master || route.param.remainders ? NULL : master,
                         .exp_avg = tx_stage_in(&route.exp_avg, at, n, m_tile),
                         .exp_avg_sq = tx_stage_in(&route.exp_avg_sq, at, n, v_tile),
                         .exp_avg_scale = a->exp_avg_scale ? a->exp_avg_scale + at / TX_BLOCK : NULL,
                         .exp_avg_sq_scale = a->exp_avg_sq_scale ? a->exp_avg_sq_scale + at / TX_BLOCK : NULL,
                         .param_u = tx_dithered(a->param_noise.lattice, (uint32_t)at),
                         .exp_avg_u = tx_dithered(a->exp_avg_noise.lattice, (uint32_t)at),
                         .exp_avg_sq_u = tx_dithered(a->exp_avg_sq_noise.lattice, (uint32_t)at),
                         .checksums = blocks > 0 ? tx_checksums_at(a, at) : NULL,
                         .stale = a->resyncs ? &stale : NULL,
                         .stream_store = stream_store,
                         .extras = route.staged ? NULL : a->extras,
                         .begin = at,
                         .measured = measures ? &measured : NULL};
    const void *stepped = s.param;
    tx_step_run(&route, a->constants, &s, sizes, (int32_t)n, blocks);
    if (stream_store) tx_end_nontemporal();
    tx_stage_out(&route.exp_avg, at, n, m_tile);
    tx_stage_out(&route.exp_avg_sq, at, n, v_tile);
    tx_stage_out(&route.param, at, n, stepped);
    (void)tx_checksum_tile(a, at + blocks, n - blocks, TX_CHECKSUM_RENEW);
    if (rest.n > 0) tx_note_rest(a, &rest);
  }
  if (measures) tx_measured_end(&measured, a->extras->health);
  if (a->checksums && a->master_dtype == TX_F32) {
    (void)tx_sample_blocks(a->param, a->checksums, a->n, a->whole, TX_CHECKSUM_RENEW, 0);
  }
  return stale;
}

#endif
