/* tx_bucket_accumulate and tx_bucket_reduce: sums of gradients over micro-batches and over ranks. */
#include "csrc/core/status.h"
#include "csrc/cpu/kernels.h"
#include "csrc/ops/operator_checks.h"
#include "csrc/ops/parallel.h"
#include "csrc/ops/stats.h"
#include "csrc/ops/tensor.h"

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
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(tx_check_bucket_accumulate(n, main_grads, grads, error));
  accumulate_context context = {tx_kernels_selected(), main_grads, grads};
  const tx_parallel_work work = {.n = n, .tensors = main_grads, .piece = accumulate_piece, .ctx = &context};
  return tx_parallel_work_run(&work, parallel, error);
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

tx_status tx_bucket_reduce(const tx_bucket_reduce_args *args, const tx_parallel *parallel, tx_error *error) {
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(tx_check_bucket_reduce(args, error));
  if (args->shard.numel == 0) return TX_OK;
  const int wire = tx_form_of(args->chunks[0], tx_at_or_none(args->scales, 0), TX_FORMAT_SIGNED);
  reduce_context context = {args, tx_kernels_selected()->reduce[wire][tx_form_plain(args->shard.dtype)], {{0}, 0, 0}};
  const tx_parallel_work work = {.n = 1,
                                 .tensors = &args->shard,
                                 .piece = reduce_piece,
                                 .merge = reduce_merge,
                                 .local_bytes = sizeof(tx_stats),
                                 .ctx = &context};
  TX_FORWARD(tx_parallel_work_run(&work, parallel, error));
  tx_stats_add_to(args->stats, &context.total);
  return TX_OK;
}
