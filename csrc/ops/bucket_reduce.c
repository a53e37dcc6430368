/* tx_bucket_accumulate and tx_bucket_reduce: adding gradients up, over micro-batches and over ranks. */
#include <math.h>

#include "csrc/core/dtype.h"
#include "csrc/core/status.h"
#include "csrc/cpu/kernels.h"
#include "csrc/ops/convert.h"
#include "csrc/ops/stats.h"
#include "csrc/ops/tensor.h"
#include "csrc/ops/work.h"

/* -- accumulate ----------------------------------------------------------------------------------------------- */

typedef struct accumulate_context {
  const tx_kernels *kernels;
  const tx_tensor *main_grads, *grads;
} accumulate_context;

static void accumulate_piece(void *ctx, void *local, int64_t i, int64_t begin, int64_t count) {
  (void)local;
  const accumulate_context *c = ctx;
  const tx_tensor main_grad = c->main_grads[i], *grad = &c->grads[i];
  const tx_reduce_piece piece = {.n = count,
                                 .begin = begin,
                                 .n_chunks = 1,
                                 .chunks = grad,
                                 .shard = tx_advanced(main_grad, begin),
                                 .scale = 1.0f,
                                 .accumulate = 1};
  c->kernels->reduce[tx_form_plain(grad->dtype)][tx_form_plain(main_grad.dtype)](&piece);
}

tx_status tx_bucket_accumulate(int64_t n, const tx_tensor *main_grads, const tx_tensor *grads,
                               const tx_parallel *parallel, tx_error *error) {
  const tx_span spans[] = {{"main_grads", main_grads, n, 1}, {"grads", grads, n, 0}};
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(tx_check_present("main_grads", main_grads, n, error));
  TX_FORWARD(tx_check_present("grads", grads, n, error));
  TX_FORWARD(tx_check_tensors(spans, 2, error));
  TX_FORWARD(tx_check_same_numel("main_grads", main_grads, "grads", grads, n, error));
  TX_FORWARD(tx_check_plain("main_grads", main_grads, n, error));
  TX_FORWARD(tx_check_plain("grads", grads, n, error));
  TX_FORWARD(tx_check_overlap(spans, 2, error));
  accumulate_context context = {tx_kernels_selected(), main_grads, grads};
  const tx_work work = {.n = n, .tensors = main_grads, .piece = accumulate_piece, .ctx = &context};
  return tx_work_run(&work, parallel, error);
}

/* -- reduce --------------------------------------------------------------------------------------------------- */

typedef struct reduce_context {
  const tx_bucket_reduce_args *args;
  tx_reduce_loop loop;
  tx_stats total;
} reduce_context;

static void reduce_piece(void *ctx, void *local, int64_t tensor, int64_t begin, int64_t count) {
  (void)tensor;
  const reduce_context *c = ctx;
  const tx_bucket_reduce_args *a = c->args;
  tx_stats *stats = local;
  const tx_reduce_piece piece = {.n = count,
                                 .begin = begin,
                                 .n_chunks = a->n,
                                 .chunks = a->chunks,
                                 .scales = a->scales,
                                 .shard = tx_advanced(a->shard, begin),
                                 .limbs = a->stats.numel ? stats->limbs : NULL,
                                 .scale = (float)a->scale,
                                 .accumulate = a->accumulate};
  stats->non_finite += c->loop(&piece);
}

static void reduce_merge(void *ctx, const void *local) {
  tx_stats_merge(&((reduce_context *)ctx)->total, local);
}

/* Every chunk is like the first, and as long as the shard. */
static tx_status check_chunks(const tx_bucket_reduce_args *a, tx_error *error) {
  for (int64_t i = 0; i < a->n; i++) {
    const tx_tensor chunk = a->chunks[i];
    if (chunk.numel != a->shard.numel) {
      return tx_fail(error, TX_ERROR_SHAPE, "chunks[%lld] has %lld elements and shard has %lld; they must be equal",
                     (long long)i, (long long)chunk.numel, (long long)a->shard.numel);
    }
    TX_FORWARD(tx_check_wire("chunks", "scales", i, chunk, tx_at_or_none(a->scales, i), error));
    if (chunk.numel && chunk.dtype != a->chunks[0].dtype) {
      return tx_fail(error, TX_ERROR_DTYPE, "chunks[%lld] is %s and chunks[0] is %s; chunks of one dtype are legal",
                     (long long)i, tx_dtype_name(chunk.dtype), tx_dtype_name(a->chunks[0].dtype));
    }
  }
  return TX_OK;
}

/* The chunk that is the shard itself, or NULL. Each element of it is read before it is written. */
static const tx_tensor *in_place(const tx_bucket_reduce_args *a) {
  for (int64_t i = 0; i < a->n && !a->accumulate; i++) {
    if (a->chunks[i].data == a->shard.data && a->chunks[i].dtype == a->shard.dtype) return &a->chunks[i];
  }
  return NULL;
}

static tx_status check_reduce(const tx_bucket_reduce_args *a, const tx_parallel *parallel, tx_error *error) {
  if (!a || a->size != sizeof *a) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "args.size is %llu; %llu is legal (use TX_BUCKET_REDUCE_ARGS_INIT)",
                   (unsigned long long)(a ? a->size : 0), (unsigned long long)sizeof *a);
  }
  TX_FORWARD(tx_check_parallel(parallel, error));
  if (a->n < 1) {
    return tx_fail(error, TX_ERROR_SHAPE, "chunks has %lld entries; at least 1 is legal, one for each rank",
                   (long long)a->n);
  }
  if (!isfinite((float)a->scale)) {
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "scale is %g; a finite fp32 is legal (1 / world_size for a mean)",
                   a->scale);
  }
  if (a->accumulate != 0 && a->accumulate != 1) {
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "accumulate is %d; 0 (copy) and 1 (add) are legal",
                   (int)a->accumulate);
  }
  const tx_span spans[] = {{"chunks", a->chunks, a->n, 0},
                           {"scales", a->scales, a->n, 0},
                           {"shard", &a->shard, 1, 1},
                           {"stats", &a->stats, 1, 1}};
  TX_FORWARD(tx_check_present("chunks", a->chunks, a->n, error));
  TX_FORWARD(tx_check_tensors(spans, 4, error));
  TX_FORWARD(tx_check_fixed("stats", a->stats, TX_I64, TX_STATS_LEN, 0, error));
  TX_FORWARD(tx_check_plain("shard", &a->shard, 1, error));
  TX_FORWARD(check_chunks(a, error));
  return tx_check_overlap_but(spans, 4, in_place(a), error);
}

tx_status tx_bucket_reduce(const tx_bucket_reduce_args *args, const tx_parallel *parallel, tx_error *error) {
  TX_FORWARD(check_reduce(args, parallel, error));
  if (args->shard.numel == 0) return TX_OK;
  const int wire = tx_form_of(args->chunks[0], tx_at_or_none(args->scales, 0), TX_FORMAT_SIGNED);
  reduce_context context = {args, tx_kernels_selected()->reduce[wire][tx_form_plain(args->shard.dtype)], {{0}, 0, 0}};
  const tx_work work = {.n = 1,
                        .tensors = &args->shard,
                        .piece = reduce_piece,
                        .merge = reduce_merge,
                        .local_bytes = sizeof(tx_stats),
                        .ctx = &context};
  TX_FORWARD(tx_work_run(&work, parallel, error));
  tx_stats_add_to(args->stats, &context.total);
  return TX_OK;
}
