/* tx_adamw: the step in place; tx_adamw_check. */
#include "csrc/core/status.h"
#include "csrc/ops/checks.h"
#include "csrc/ops/external.h"
#include "csrc/ops/step.h"
#include "csrc/ops/tensor.h"

static int64_t weights_of(const tx_adamw_args *args) {
  int64_t n = 0;
  for (int64_t i = 0; i < args->n; i++)
    n += args->params[i].numel;
  return n;
}

static void step_piece(void *ctx, void *local, int64_t i, int64_t begin, int64_t count) {
  const tx_step *step = ctx;
  tx_step_piece(step, local, (tx_piece){i, begin, count}, tx_advanced(step->args->params[i], begin),
                tx_advanced(step->args->grads[i], begin));
}

static void merge(void *ctx, const void *local) {
  tx_step_merge(ctx, local);
}

tx_status tx_adamw_check(const tx_adamw_args *args, tx_error *error) {
  return tx_check_adamw(args, 1, error);
}

tx_status tx_adamw(const tx_adamw_args *args, const tx_parallel *parallel, tx_error *error) {
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(tx_check_adamw(args, 1, error));
  if (args->on_external_write == TX_EXTERNAL_CHECK) {
    int64_t none = 0;
    return tx_notice_external(args, &none, parallel, error);
  }
  tx_step step;
  if (!tx_step_begin(args, &step)) return TX_OK;
  step.past_caches = weights_of(args) > TX_STEP_CACHED;
  if (args->on_external_write == TX_EXTERNAL_RESYNC) {
    TX_FORWARD(tx_notice_external(args, &step.resynced, parallel, error));
  }
  const tx_work work = {.n = args->n,
                        .tensors = args->params,
                        .piece = step_piece,
                        .merge = merge,
                        .local_bytes = sizeof(tx_step_local),
                        .alignment = tx_step_alignment(args),
                        .ctx = &step};
  TX_FORWARD(tx_work_run(&work, parallel, error));
  tx_step_end(&step);
  return TX_OK;
}
