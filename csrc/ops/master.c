/* tx_master_encode, tx_master_decode and tx_master_resync. */
#include "csrc/core/status.h"
#include "csrc/cpu/kernels.h"
#include "csrc/ops/external_writes.h"
#include "csrc/ops/operator_checks.h"
#include "csrc/ops/tensor.h"

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
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(encode ? tx_check_master_encode(n, masters, params, remainders, error)
                    : tx_check_master_decode(n, params, remainders, masters, error));
  remainder_context context = {tx_kernels_selected(), masters, params, remainders};
  const tx_parallel_work work = {
      .n = n, .tensors = masters, .piece = encode ? encode_piece : decode_piece, .ctx = &context};
  return tx_parallel_work_run(&work, parallel, error);
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

typedef struct resync_context {
  const tx_kernels *kernels;
  const tx_tensor *params, *masters;
  tx_tensor changed;
  int32_t mode;
} resync_context;

static void resync_piece(void *ctx, void *local, int64_t i, int64_t begin, int64_t count) {
  const resync_context *c = ctx;
  int64_t *changed = local;
  const int row = tx_combo_weight(c->params[i].dtype, c->masters[i].dtype);
  changed[i] +=
      c->kernels->resync[row](tx_advanced(c->params[i], begin), tx_advanced(c->masters[i], begin), count, c->mode);
}

static void resync_merge(void *ctx, const void *local) {
  const resync_context *c = ctx;
  const int64_t *changed = local;
  for (int64_t i = 0; i < c->changed.numel; i++)
    tx_add_count(c->changed, i, changed[i]);
}

tx_status tx_master_resync(int64_t n, const tx_tensor *params, const tx_tensor *masters, int32_t mode,
                           tx_tensor changed, const tx_parallel *parallel, tx_error *error) {
  const tx_work_room none = {NULL, 0};
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(tx_check_master_resync(n, params, masters, mode, changed, error));
  return tx_resync_run(n, params, masters, mode, changed, &none, parallel, error);
}

tx_status tx_resync_run(int64_t n, const tx_tensor *params, const tx_tensor *masters, int32_t mode, tx_tensor changed,
                        const tx_work_room *room, const tx_parallel *parallel, tx_error *error) {
  resync_context context = {tx_kernels_selected(), params, masters, changed, mode};
  const tx_parallel_work work = {.n = n,
                                 .tensors = masters,
                                 .piece = resync_piece,
                                 .merge = resync_merge,
                                 .local_bytes = tx_external_writes_bytes(n),
                                 .ctx = &context,
                                 .room = *room};
  return tx_parallel_work_run(&work, parallel, error);
}
