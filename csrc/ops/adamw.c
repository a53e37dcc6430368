/* tx_adamw: the step of parameters in host memory; and tx_adamw_check. */
#include "csrc/core/status.h"
#include "csrc/ops/external_writes.h"
#include "csrc/ops/operator_checks.h"
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
  tx_step_piece(step, local, (tx_tensor_range){i, begin, count}, tx_advanced(step->args->params[i], begin),
                tx_advanced(step->args->grads[i], begin));
}

static void merge(void *ctx, const void *local) {
  tx_step_merge(ctx, local);
}

tx_status tx_adamw_check(const tx_adamw_args *args, tx_error *error) {
  return tx_check_adamw(args, 1, error);
}

static tx_weights_and_masters weights_and_masters_of(const tx_adamw_args *args) {
  return (tx_weights_and_masters){args->n,    args->params, args->masters, args->checksums, args->on_external_write,
                                  args->moved};
}

/* Makes a step that is not skipped. room: large enough for everything. */
static tx_status step_all(tx_step *step, const tx_work_room *room, const tx_parallel *parallel, tx_error *error) {
  const tx_adamw_args *args = step->args;
  const tx_weights_and_masters weights = weights_and_masters_of(args);
  if (args->on_external_write == TX_EXTERNAL_RESYNC)
    TX_FORWARD(tx_handle_external_writes(&weights, &step->resynced, room, parallel, error));
  const tx_parallel_work work = {.n = args->n,
                                 .tensors = args->params,
                                 .piece = step_piece,
                                 .merge = merge,
                                 .local_bytes = sizeof(tx_step_local),
                                 .alignment = tx_step_alignment(args),
                                 .ctx = step,
                                 .room = *room};
  TX_FORWARD(tx_parallel_work_run(&work, parallel, error));
  tx_step_end(step);
  return TX_OK;
}

tx_status tx_adamw(const tx_adamw_args *args, const tx_parallel *parallel, tx_error *error) {
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(tx_check_adamw(args, 1, error));
  const size_t writes_bytes = tx_external_writes_bytes(args->n), step_bytes = sizeof(tx_step_local);
  const size_t local_bytes = args->checksums && writes_bytes > step_bytes ? writes_bytes : step_bytes;
  tx_work_room room; /* allocated now, so that nothing fails for lack of memory once something is written */
  TX_FORWARD(tx_work_room_make(&room, args->n, args->params, tx_step_alignment(args), tx_threads_of(parallel),
                               local_bytes, error));
  tx_status status = TX_OK;
  tx_step step;
  if (args->on_external_write == TX_EXTERNAL_CHECK) {
    int64_t none = 0;
    const tx_weights_and_masters weights = weights_and_masters_of(args);
    status = tx_handle_external_writes(&weights, &none, &room, parallel, error);
  } else if (tx_step_begin(args, &step)) {
    step.stream_store = weights_of(args) > TX_STEP_CACHED;
    status = step_all(&step, &room, parallel, error);
  }
  tx_work_room_free(&room);
  return status;
}
