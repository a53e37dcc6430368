/* tx_bucket_pack and tx_bucket_unpack: between tensors and their ranges of a bucket. */
#include "csrc/core/dtype.h"
#include "csrc/core/status.h"
#include "csrc/cpu/kernels.h"
#include "csrc/ops/convert.h"
#include "csrc/ops/tensor.h"
#include "csrc/ops/work.h"

/* Bucket and scales belong together, and each range lies in the bucket, on a block edge where there are blocks. */
static tx_status check_ranges(tx_tensor bucket, tx_tensor scales, int64_t n, const char *name, const tx_tensor *tensors,
                              const int64_t *offsets, tx_error *error) {
  TX_FORWARD(tx_check_wire("bucket", "scales", -1, bucket, scales, error));
  for (int64_t i = 0; i < n; i++) {
    if (offsets[i] < 0 || offsets[i] > bucket.numel || tensors[i].numel > bucket.numel - offsets[i]) {
      return tx_fail(error, TX_ERROR_SHAPE,
                     "offsets[%lld] is %lld, and with the %lld elements of %s[%lld] that leaves the bucket; ranges in "
                     "[0, %lld) are legal",
                     (long long)i, (long long)offsets[i], (long long)tensors[i].numel, name, (long long)i,
                     (long long)bucket.numel);
    }
    if (scales.numel && tensors[i].numel && offsets[i] % TX_BLOCK != 0) {
      return tx_fail(error, TX_ERROR_ILLEGAL_VALUE,
                     "offsets[%lld] is %lld; in a uint8 bucket multiples of %d are legal, since its blocks are scaled",
                     (long long)i, (long long)offsets[i], TX_BLOCK);
    }
  }
  return TX_OK;
}

/* -- pack ----------------------------------------------------------------------------------------------------- */

typedef struct pack_context {
  const tx_bucket_pack_args *args;
  const tx_kernels *kernels;
  int form;
} pack_context;

/* The first gradient that ends behind `position`; n where there is none. */
static int64_t first_behind(const tx_bucket_pack_args *a, int64_t position) {
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

/* Zeroes [begin, end), which no gradient covers. A block that a gradient ends in keeps the gradient's scale. */
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

/* A piece of the bucket: the gradients that lie in it and the gaps between them. */
static void pack_piece(void *ctx, void *local, int64_t tensor, int64_t begin, int64_t count) {
  (void)local, (void)tensor;
  const pack_context *c = ctx;
  const tx_bucket_pack_args *a = c->args;
  const int32_t rounding = tx_form_is_scaled(c->form) ? a->rounding : TX_NEAREST;
  const int64_t end = begin + count;
  int64_t at = begin;
  for (int64_t i = first_behind(a, begin); at < end; i++) {
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

static tx_status check_pack(const tx_bucket_pack_args *a, const tx_parallel *parallel, tx_error *error) {
  if (!a || a->size != sizeof *a) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "args.size is %llu; %llu is legal (use TX_BUCKET_PACK_ARGS_INIT)",
                   (unsigned long long)(a ? a->size : 0), (unsigned long long)sizeof *a);
  }
  const tx_span spans[] = {{"grads", a->grads, a->n, 0}, {"bucket", &a->bucket, 1, 1}, {"scales", &a->scales, 1, 1}};
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(tx_check_rounding("rounding", a->rounding, error));
  TX_FORWARD(tx_check_present("grads", a->grads, a->n, error));
  TX_FORWARD(tx_check_present("offsets", a->offsets, a->n, error));
  TX_FORWARD(tx_check_tensors(spans, 3, error));
  TX_FORWARD(tx_check_plain("grads", a->grads, a->n, error));
  TX_FORWARD(check_ranges(a->bucket, a->scales, a->n, "grads", a->grads, a->offsets, error));
  for (int64_t i = 1; i < a->n; i++) {
    const int64_t free_from = a->offsets[i - 1] + a->grads[i - 1].numel;
    if (a->offsets[i] >= free_from) continue;
    return tx_fail(error, TX_ERROR_OVERLAP,
                   "offsets[%lld] is %lld and grads[%lld] ends at %lld; ascending ranges that do not overlap are legal",
                   (long long)i, (long long)a->offsets[i], (long long)(i - 1), (long long)free_from);
  }
  return tx_check_overlap(spans, 3, error);
}

tx_status tx_bucket_pack(const tx_bucket_pack_args *args, const tx_parallel *parallel, tx_error *error) {
  TX_FORWARD(check_pack(args, parallel, error));
  pack_context context = {args, tx_kernels_selected(), tx_form_of(args->bucket, args->scales, TX_FORMAT_SIGNED)};
  const tx_work work = {.n = 1, .tensors = &args->bucket, .piece = pack_piece, .ctx = &context};
  return tx_work_run(&work, parallel, error);
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
  const tx_span spans[] = {{"bucket", &bucket, 1, 0}, {"scales", &scales, 1, 0}, {"tensors", tensors, n, 1}};
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(tx_check_present("offsets", offsets, n, error));
  TX_FORWARD(tx_check_present("tensors", tensors, n, error));
  TX_FORWARD(tx_check_tensors(spans, 3, error));
  TX_FORWARD(tx_check_plain("tensors", tensors, n, error));
  TX_FORWARD(check_ranges(bucket, scales, n, "tensors", tensors, offsets, error));
  TX_FORWARD(tx_check_overlap(spans, 3, error));
  unpack_context context = {.kernels = tx_kernels_selected(),
                            .bucket = bucket,
                            .scales = scales,
                            .offsets = offsets,
                            .tensors = tensors,
                            .form = tx_form_of(bucket, scales, TX_FORMAT_SIGNED)};
  const tx_work work = {.n = n, .tensors = tensors, .piece = unpack_piece, .ctx = &context};
  return tx_work_run(&work, parallel, error);
}
