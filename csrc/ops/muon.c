/* tx_muon_momentum and tx_muon_update: the two passes of Muon around the caller's matrix products. */
#include "csrc/core/fp_mode.h"
#include "csrc/core/status.h"
#include "csrc/cpu/kernels.h"
#include "csrc/ops/external_writes.h"
#include "csrc/ops/operator_checks.h"
#include "csrc/ops/parallel.h"
#include "csrc/ops/piece_outputs.h"
#include "csrc/ops/step.h"
#include "csrc/ops/tensor.h"

/* Whether a call writes so much that it will have left the caches before it is read. */
static int leaves_caches(const tx_tensor *written, int64_t n) {
  int64_t elements = 0;
  for (int64_t i = 0; i < n; i++)
    elements += written[i].numel;
  return elements > TX_STEP_CACHED;
}

static int64_t next_step(const tx_tensor *steps, int64_t i) {
  return (int64_t)tx_get_f32(steps[i], 0.0f) + 1;
}

/* -- momentum ----------------------------------------------------------------------------------------------------- */

typedef struct momentum_context {
  const tx_muon_momentum_args *args;
  const tx_kernels *kernels;
  tx_muon_constants constants;
  int streams;
} momentum_context;

static void momentum_piece(void *ctx, void *local, int64_t i, int64_t begin, int64_t count) {
  const momentum_context *c = ctx;
  const tx_muon_momentum_args *a = c->args;
  (void)local;
  const tx_tensor scales = tx_at_or_none(a->scales, i);
  const tx_meta meta = tx_meta_of(a->meta, i);
  const tx_muon_momentum_piece piece = {
      .n = count,
      .grad = tx_advanced(a->grads[i], begin),
      .momentum = tx_advanced(a->momentums[i], begin),
      .scales = scales.numel ? (uint8_t *)scales.data + begin / TX_BLOCK : NULL,
      .work = tx_advanced(a->updates[i], begin),
      .constants = c->constants,
      .noise = tx_noise_at(a->seed, meta.id, TX_LANE_EXP_AVG, next_step(a->steps, i), tx_element_at(meta, begin)),
      .grad_dtype = a->grads[i].dtype,
      .momentum_dtype = a->momentums[i].dtype,
      .work_dtype = a->updates[i].dtype,
      .rounding = a->moment_rounding,
      .nesterov = a->nesterov,
      .stream_store = c->streams,
  };
  c->kernels->muon_momentum(&piece);
}

tx_status tx_muon_momentum(const tx_muon_momentum_args *args, const tx_parallel *parallel, tx_error *error) {
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(tx_check_muon_momentum(args, 1, error));
  momentum_context context = {
      .args = args, .kernels = tx_kernels_selected(), .streams = leaves_caches(args->updates, args->n)};
  const tx_fp_mode saved = tx_fp_enter();
  context.constants =
      tx_muon_prepare(args->momentum, tx_get_f32(args->clip_coef, 1.0f), tx_get_f32(args->grad_scale, 1.0f));
  tx_fp_leave(saved);
  const tx_parallel_work work = {.n = args->n,
                                 .tensors = args->grads,
                                 .piece = momentum_piece,
                                 .ctx = &context,
                                 .alignment = TX_TILE}; /* the loop works on whole tiles */
  return tx_parallel_work_run(&work, parallel, error);
}

/* -- update ------------------------------------------------------------------------------------------------------- */

/* The matrix that contains element `begin` of a tensor: an index into a valid table. */
static int64_t part_at(const tx_muon_part *parts, int64_t n_parts, int64_t tensor, int64_t begin) {
  int64_t first = 0, end = n_parts; /* the last row that is not after the element */
  while (end - first > 1) {
    const int64_t middle = first + (end - first) / 2;
    const tx_muon_part p = parts[middle];
    if (p.tensor < tensor || (p.tensor == tensor && p.begin <= begin)) {
      first = middle;
    } else {
      end = middle;
    }
  }
  return first;
}

typedef struct update_context {
  const tx_muon_update_args *args;
  const tx_kernels *kernels;
  int64_t resynced;
  int streams;
} update_context;

static tx_dtype master_dtype(const tx_muon_update_args *a, int64_t i) {
  const tx_tensor master = tx_at_or_none(a->masters, i);
  return master.numel ? master.dtype : TX_NONE;
}

static void update_piece(void *ctx, void *local, int64_t i, int64_t begin, int64_t count) {
  const update_context *c = ctx;
  const tx_muon_update_args *a = c->args;
  const tx_meta meta = tx_meta_of(a->meta, i);
  const tx_dtype master = master_dtype(a, i);
  const int64_t part = part_at(a->parts, a->n_parts, i, begin), step = next_step(a->steps, i);
  const tx_step_outputs outputs = TX_STEP_OUTPUTS_OF(a);
  tx_piece_outputs piece_outputs;
  const tx_muon_update_piece piece = {
      .n = count,
      .update = tx_advanced(a->updates[i], begin),
      .param = tx_advanced(a->params[i], begin),
      .master = tx_advanced(tx_at_or_none(a->masters, i), begin),
      .checksums = tx_advanced(tx_at_or_none(a->checksums, i), begin / (master == TX_I16 ? TX_CHECKSUM : TX_SAMPLED)),
      .parts = {a->parts + part, a->parts + a->n_parts, begin},
      .rates = a->rates + part,
      .noise = tx_noise_at(a->seed, meta.id, TX_LANE_PARAM, step, tx_element_at(meta, begin)),
      .update_dtype = a->updates[i].dtype,
      .param_dtype = a->params[i].dtype,
      .master_dtype = master,
      .rounding = a->weight_rounding,
      .resyncs = a->on_external_write == TX_EXTERNAL_RESYNC,
      .whole = a->params[i].numel <= TX_SAMPLED,
      .stream_store = c->streams,
      .extras = tx_extras_begin(&outputs, i, begin, step, &piece_outputs),
  };
  *(int64_t *)local += c->kernels->muon_update(&piece);
  tx_extras_end(&piece_outputs);
}

static void update_merge(void *ctx, const void *local) {
  ((update_context *)ctx)->resynced += *(const int64_t *)local;
}

static void count_steps(const tx_muon_update_args *args) {
  for (int64_t i = 0; i < args->n; i++) {
    const float completed = tx_get_f32(args->steps[i], 0.0f) + 1.0f;
    memcpy(args->steps[i].data, &completed, sizeof completed);
  }
}

/* Updates all parameters. room: large enough for everything. */
static tx_status update_all(update_context *c, const tx_work_room *room, const tx_parallel *parallel, tx_error *error) {
  const tx_muon_update_args *a = c->args;
  const tx_weights_and_masters weights = {a->n, a->params, a->masters, a->checksums, a->on_external_write, a->moved};
  if (a->on_external_write != TX_EXTERNAL_IGNORE)
    TX_FORWARD(tx_handle_external_writes(&weights, &c->resynced, room, parallel, error));
  if (a->on_external_write == TX_EXTERNAL_CHECK) return TX_OK;
  const tx_parallel_work work = {.n = a->n,
                                 .tensors = a->params,
                                 .piece = update_piece,
                                 .merge = update_merge,
                                 .local_bytes = sizeof(int64_t),
                                 .ctx = c,
                                 .alignment = TX_SAMPLED,
                                 .room = *room};
  TX_FORWARD(tx_parallel_work_run(&work, parallel, error));
  count_steps(a);
  if (a->resynced.numel) tx_add_count(a->resynced, 0, c->resynced);
  return TX_OK;
}

tx_status tx_muon_update(const tx_muon_update_args *args, const tx_parallel *parallel, tx_error *error) {
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(tx_check_muon_update(args, 1, error));
  const size_t writes_bytes = tx_external_writes_bytes(args->n);
  tx_work_room room; /* allocated now, so that nothing fails for lack of memory once something is written */
  TX_FORWARD(tx_work_room_make(&room, args->n, args->params, TX_SAMPLED, tx_threads_of(parallel),
                               writes_bytes > sizeof(int64_t) ? writes_bytes : sizeof(int64_t), error));
  update_context context = {args, tx_kernels_selected(), 0, leaves_caches(args->params, args->n)};
  const tx_status status = update_all(&context, &room, parallel, error);
  tx_work_room_free(&room);
  return status;
}
