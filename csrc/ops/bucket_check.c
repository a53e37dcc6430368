/* Checks the arguments of the operators on buckets. */
#include <math.h>

#include "csrc/core/dtype.h"
#include "csrc/core/status.h"
#include "csrc/ops/operator_checks.h"
#include "csrc/ops/tensor.h"

/* The least double that becomes infinite as fp32: half an ulp above the largest fp32, a tie that rounds to even. */
#define ROUNDS_TO_INFINITY 0x1.ffffffp127

/* -- tensors and their ranges in a bucket ------------------------------------------------------------------------- */

/* Checks that bucket and scales fit each other, and that each range is in the bucket and, in a scaled bucket, begins at
 * a block. */
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

tx_status tx_check_bucket_pack(const tx_bucket_pack_args *a, tx_error *error) {
  if (!a || a->size != sizeof *a) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "args.size is %llu; %llu is legal (use TX_BUCKET_PACK_ARGS_INIT)",
                   (unsigned long long)(a ? a->size : 0), (unsigned long long)sizeof *a);
  }
  const tx_span spans[] = {{"grads", a->grads, a->n, 0}, {"bucket", &a->bucket, 1, 1}, {"scales", &a->scales, 1, 1}};
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

tx_status tx_check_bucket_unpack(tx_tensor bucket, tx_tensor scales, int64_t n, const int64_t *offsets,
                                 const tx_tensor *tensors, tx_error *error) {
  const tx_span spans[] = {{"bucket", &bucket, 1, 0}, {"scales", &scales, 1, 0}, {"tensors", tensors, n, 1}};
  TX_FORWARD(tx_check_present("offsets", offsets, n, error));
  TX_FORWARD(tx_check_present("tensors", tensors, n, error));
  TX_FORWARD(tx_check_tensors(spans, 3, error));
  TX_FORWARD(tx_check_plain("tensors", tensors, n, error));
  TX_FORWARD(check_ranges(bucket, scales, n, "tensors", tensors, offsets, error));
  return tx_check_overlap(spans, 3, error);
}

/* -- sums --------------------------------------------------------------------------------------------------------- */

tx_status tx_check_bucket_accumulate(int64_t n, const tx_tensor *main_grads, const tx_tensor *grads, tx_error *error) {
  const tx_span spans[] = {{"main_grads", main_grads, n, 1}, {"grads", grads, n, 0}};
  TX_FORWARD(tx_check_present("main_grads", main_grads, n, error));
  TX_FORWARD(tx_check_present("grads", grads, n, error));
  TX_FORWARD(tx_check_tensors(spans, 2, error));
  TX_FORWARD(tx_check_same_numel("main_grads", main_grads, "grads", grads, n, error));
  TX_FORWARD(tx_check_plain("main_grads", main_grads, n, error));
  TX_FORWARD(tx_check_plain("grads", grads, n, error));
  return tx_check_overlap(spans, 2, error);
}

/* Checks that every chunk has the dtype of the first and the length of the shard. */
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

/* The chunk that is the shard itself, or NULL. That is legal because each of its elements is read before it is
 * written. */
static const tx_tensor *in_place(const tx_bucket_reduce_args *a) {
  for (int64_t i = 0; i < a->n && !a->accumulate; i++) {
    if (a->chunks[i].data == a->shard.data && a->chunks[i].dtype == a->shard.dtype) return &a->chunks[i];
  }
  return NULL;
}

tx_status tx_check_bucket_reduce(const tx_bucket_reduce_args *a, tx_error *error) {
  if (!a || a->size != sizeof *a) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "args.size is %llu; %llu is legal (use TX_BUCKET_REDUCE_ARGS_INIT)",
                   (unsigned long long)(a ? a->size : 0), (unsigned long long)sizeof *a);
  }
  if (a->n < 1) {
    return tx_fail(error, TX_ERROR_SHAPE, "chunks has %lld entries; at least 1 is legal, one for each rank",
                   (long long)a->n);
  }
  if (!(fabs(a->scale) < ROUNDS_TO_INFINITY)) {
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
