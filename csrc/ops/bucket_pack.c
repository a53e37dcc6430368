/* tx_bucket_pack and tx_bucket_unpack: copies between tensors and their ranges in a bucket. */
#include "csrc/core/status.h"
#include "csrc/cpu/kernels.h"
#include "csrc/ops/convert.h"
#include "csrc/ops/operator_checks.h"
#include "csrc/ops/parallel.h"
#include "csrc/ops/tensor.h"

/* -- pack ----------------------------------------------------------------------------------------------------- */

typedef struct pack_context {
  const tx_bucket_pack_args *args;
  const tx_kernels *kernels;
  int form;
} pack_context;

/* The first gradient that ends after `position`; n if there is none. */
static int64_t first_after(const tx_bucket_pack_args *a, int64_t position) {
  int64_t low = 0, high = a->n;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (a->offsets[middle] + a->grads[middle].numel > position) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

/* Zeroes [begin, end), which no gradient covers. A block in which a gradient ends keeps the scale of that gradient. */
static void zero_gap(const pack_context *c, int64_t begin, int64_t end) {
  const tx_tensor bucket = c->args->bucket;
  int64_t edge = begin;
  if (tx_form_is_scaled(c->form)) {
    edge = tx_blocks(begin) * TX_BLOCK;
    edge = edge < end ? edge : end;
    memset(tx_advanced(bucket, begin), 0, (size_t)(edge - begin));
  }
  if (edge < end) tx_convert_zeros(c->kernels, tx_run_at(c->form, bucket, c->args->scales, edge), end - edge);
}

/* Packs a piece of the bucket: the gradients in it and the gaps between them. */
static void pack_piece(void *ctx, void *local, int64_t tensor, int64_t begin, int64_t count) {
  (void)local, (void)tensor;
  const pack_context *c = ctx;
  const tx_bucket_pack_args *a = c->args;
  const int32_t rounding = tx_form_is_scaled(c->form) ? a->rounding : TX_NEAREST;
  const int64_t end = begin + count;
  int64_t at = begin;
  for (int64_t i = first_after(a, begin); at < end; i++) {
    const int64_t gap_end = i < a->n && a->offsets[i] < end ? a->offsets[i] : end;
    if (at < gap_end) zero_gap(c, at, gap_end);
    at = at < gap_end ? gap_end : at;
    if (at == end || a->grads[i].numel == 0) continue;
    const tx_tensor grad = a->grads[i];
    const int64_t grad_end = a->offsets[i] + grad.numel < end ? a->offsets[i] + grad.numel : end;
    tx_convert(c->kernels, tx_run_at(tx_form_plain(grad.dtype), grad, tx_none(), at - a->offsets[i]),
               tx_run_at(c->form, a->bucket, a->scales, at), grad_end - at,
               tx_noise_at(a->seed, 0, TX_LANE_WIRE, a->step, at), rounding);
    at = grad_end;
  }
}

tx_status tx_bucket_pack(const tx_bucket_pack_args *args, const tx_parallel *parallel, tx_error *error) {
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(tx_check_bucket_pack(args, error));
  pack_context context = {args, tx_kernels_selected(), tx_form_of(args->bucket, args->scales, TX_FORMAT_SIGNED)};
  const tx_parallel_work work = {.n = 1, .tensors = &args->bucket, .piece = pack_piece, .ctx = &context};
  return tx_parallel_work_run(&work, parallel, error);
}

/* -- unpack --------------------------------------------------------------------------------------------------- */

typedef struct unpack_context {
  const tx_kernels *kernels;
  tx_tensor bucket, scales;
  const int64_t *offsets;
  const tx_tensor *tensors;
  int form;
} unpack_context;

static void unpack_piece(void *ctx, void *local, int64_t i, int64_t begin, int64_t count) {
  (void)local;
  const unpack_context *c = ctx;
  const tx_noise noise = {0};
  tx_convert(c->kernels, tx_run_at(c->form, c->bucket, c->scales, c->offsets[i] + begin),
             tx_run_at(tx_form_plain(c->tensors[i].dtype), c->tensors[i], tx_none(), begin), count, noise, TX_NEAREST);
}

tx_status tx_bucket_unpack(tx_tensor bucket, tx_tensor scales, int64_t n, const int64_t *offsets,
                           const tx_tensor *tensors, const tx_parallel *parallel, tx_error *error) {
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(tx_check_bucket_unpack(bucket, scales, n, offsets, tensors, error));
  unpack_context context = {.kernels = tx_kernels_selected(),
                            .bucket = bucket,
                            .scales = scales,
                            .offsets = offsets,
                            .tensors = tensors,
                            .form = tx_form_of(bucket, scales, TX_FORMAT_SIGNED)};
  const tx_parallel_work work = {.n = n, .tensors = tensors, .piece = unpack_piece, .ctx = &context};
  return tx_parallel_work_run(&work, parallel, error);
}
