/* tx_master_encode, tx_master_decode, tx_master_resync. */
#include <stdio.h>

#include "csrc/core/dtype.h"
#include "csrc/core/status.h"
#include "csrc/cpu/kernels.h"
#include "csrc/ops/convert.h"
#include "csrc/ops/tensor.h"
#include "csrc/ops/work.h"

/* Each tensor that has elements is `dtype`. */
static tx_status check_dtype(const char *name, const tx_tensor *tensors, int64_t n, tx_dtype dtype, tx_error *error) {
  for (int64_t i = 0; i < n; i++) {
    if (tensors[i].numel == 0 || tensors[i].dtype == dtype) continue;
    return tx_fail(error, TX_ERROR_DTYPE, "%s[%lld] is %s; %s is legal", name, (long long)i,
                   tx_dtype_name(tensors[i].dtype), tx_dtype_name(dtype));
  }
  return TX_OK;
}

/* -- fp32 <-> weight and remainder ---------------------------------------------------------------------------- */

typedef struct remainder_context {
  const tx_kernels *kernels;
  const tx_tensor *masters, *params, *remainders;
} remainder_context;

static void encode_piece(void *ctx, void *local, int64_t i, int64_t begin, int64_t count) {
  (void)local;
  const remainder_context *c = ctx;
  c->kernels->encode_master(tx_advanced(c->masters[i], begin), tx_advanced(c->params[i], begin),
                            tx_advanced(c->remainders[i], begin), count);
}

static void decode_piece(void *ctx, void *local, int64_t i, int64_t begin, int64_t count) {
  (void)local;
  const remainder_context *c = ctx;
  c->kernels->decode_master(tx_advanced(c->params[i], begin), tx_advanced(c->remainders[i], begin),
                            tx_advanced(c->masters[i], begin), count);
}

static tx_status run_remainders(int64_t n, const tx_tensor *masters, const tx_tensor *params,
                                const tx_tensor *remainders, int encode, const tx_parallel *parallel, tx_error *error) {
  const tx_span spans[] = {
      {"masters", masters, n, !encode}, {"params", params, n, encode}, {"remainders", remainders, n, encode}};
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(tx_check_present("masters", masters, n, error));
  TX_FORWARD(tx_check_present("params", params, n, error));
  TX_FORWARD(tx_check_present("remainders", remainders, n, error));
  TX_FORWARD(tx_check_tensors(spans, 3, error));
  TX_FORWARD(tx_check_same_numel("params", params, "masters", masters, n, error));
  TX_FORWARD(tx_check_same_numel("remainders", remainders, "masters", masters, n, error));
  TX_FORWARD(check_dtype("masters", masters, n, TX_F32, error));
  TX_FORWARD(check_dtype("params", params, n, TX_BF16, error));
  TX_FORWARD(check_dtype("remainders", remainders, n, TX_I16, error));
  TX_FORWARD(tx_check_overlap(spans, 3, error));
  remainder_context context = {tx_kernels_selected(), masters, params, remainders};
  const tx_work work = {.n = n, .tensors = masters, .piece = encode ? encode_piece : decode_piece, .ctx = &context};
  return tx_work_run(&work, parallel, error);
}

tx_status tx_master_encode(int64_t n, const tx_tensor *masters, const tx_tensor *params, const tx_tensor *remainders,
                           const tx_parallel *parallel, tx_error *error) {
  return run_remainders(n, masters, params, remainders, 1, parallel, error);
}

tx_status tx_master_decode(int64_t n, const tx_tensor *params, const tx_tensor *remainders, const tx_tensor *masters,
                           const tx_parallel *parallel, tx_error *error) {
  return run_remainders(n, masters, params, remainders, 0, parallel, error);
}

/* -- resync --------------------------------------------------------------------------------------------------- */

/* The row of TX_FOR_EACH_WEIGHT; -1: there is none, or it has no master. */
static int weight_row(tx_dtype param, tx_dtype master) {
#define TX_MATCH_(index, param_name, master_name, ...) \
  if (TX_##param_name == param && TX_##master_name == master && master != TX_NONE) return index;
  TX_FOR_EACH_WEIGHT(TX_MATCH_)
#undef TX_MATCH_
  return -1;
}

typedef struct resync_context {
  const tx_kernels *kernels;
  const tx_tensor *params, *masters;
  tx_tensor changed;
  int32_t mode;
} resync_context;

static void resync_piece(void *ctx, void *local, int64_t i, int64_t begin, int64_t count) {
  const resync_context *c = ctx;
  int64_t *changed = local;
  const int row = weight_row(c->params[i].dtype, c->masters[i].dtype);
  changed[i] +=
      c->kernels->resync[row](tx_advanced(c->params[i], begin), tx_advanced(c->masters[i], begin), count, c->mode);
}

static void resync_merge(void *ctx, const void *local) {
  const resync_context *c = ctx;
  const int64_t *changed = local;
  for (int64_t i = 0; i < c->changed.numel; i++)
    tx_set_i64(c->changed, i, tx_get_i64(c->changed, i) + changed[i]);
}

/* The dtypes of masters that may stand beside a weight, in words. */
static void list_masters(tx_dtype param, char *list, size_t size) {
  size_t at = 0;
#define TX_APPEND_(index, param_name, master_name, ...)                                                      \
  if (TX_##param_name == param && TX_##master_name != TX_NONE && at < size) {                                \
    at += (size_t)snprintf(list + at, size - at, "%s%s", at ? " or " : "", tx_dtype_name(TX_##master_name)); \
  }
  TX_FOR_EACH_WEIGHT(TX_APPEND_)
#undef TX_APPEND_
  if (at == 0) (void)snprintf(list, size, "none");
}

static tx_status check_masters(int64_t n, const tx_tensor *params, const tx_tensor *masters, tx_error *error) {
  for (int64_t i = 0; i < n; i++) {
    if (masters[i].numel == 0) continue;
    if (masters[i].numel != params[i].numel) {
      return tx_fail(error, TX_ERROR_SHAPE,
                     "masters[%lld] has %lld elements and params[%lld] has %lld; equal, or 0 (none), is legal",
                     (long long)i, (long long)masters[i].numel, (long long)i, (long long)params[i].numel);
    }
    if (weight_row(params[i].dtype, masters[i].dtype) >= 0) continue;
    char legal[64];
    list_masters(params[i].dtype, legal, sizeof legal);
    return tx_fail(error, TX_ERROR_DTYPE, "masters[%lld] is %s beside params[%lld] of %s; %s may stand there",
                   (long long)i, tx_dtype_name(masters[i].dtype), (long long)i, tx_dtype_name(params[i].dtype), legal);
  }
  return TX_OK;
}

tx_status tx_master_resync(int64_t n, const tx_tensor *params, const tx_tensor *masters, int32_t mode,
                           tx_tensor changed, const tx_parallel *parallel, tx_error *error) {
  const tx_span spans[] = {
      {"params", params, n, 0}, {"masters", masters, n, mode != TX_RESYNC_COUNT}, {"changed", &changed, 1, 1}};
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(tx_check_present("params", params, n, error));
  TX_FORWARD(tx_check_present("masters", masters, n, error));
  if (mode < TX_RESYNC_STRAYS || mode > TX_RESYNC_COUNT) {
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "mode is %d; 0 (strays), 1 (all) and 2 (count) are legal", (int)mode);
  }
  TX_FORWARD(tx_check_tensors(spans, 3, error));
  TX_FORWARD(tx_check_fixed("changed", changed, TX_I64, n, 0, error));
  TX_FORWARD(check_masters(n, params, masters, error));
  TX_FORWARD(tx_check_overlap(spans, 3, error));
  resync_context context = {tx_kernels_selected(), params, masters, changed, mode};
  const tx_work work = {.n = n,
                        .tensors = masters,
                        .piece = resync_piece,
                        .merge = resync_merge,
                        .local_bytes = (size_t)n * sizeof(int64_t),
                        .ctx = &context};
  return tx_work_run(&work, parallel, error);
}
