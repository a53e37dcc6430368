/* tx_delta_mark: weights that are not what their masters say. */
#include <inttypes.h>
#include <stdatomic.h>

#include "csrc/core/status.h"
#include "csrc/ops/delta_segment_code.h"
#include "csrc/ops/delta_tasks.h"
#include "csrc/ops/parallel.h"
#include "csrc/ops/tensor.h"

#define PIECE (64 * TX_TILE) /* weights that a task takes at a time */

typedef struct mark_work {
  const tx_tensor *weights, *masters, *moved;
  _Atomic int64_t marked;
} mark_work;

static void mark_piece(void *ctx, int64_t task, int64_t i) {
  mark_work *w = ctx;
  const tx_kernels *kernels = tx_kernels_selected();
  const tx_dtype dtype = w->weights->dtype;
  const int64_t n = w->weights->numel, end = n - i * PIECE < PIECE ? n : (i + 1) * PIECE;
  const uint16_t unknown = 0x7f80;
  uint16_t rounded[TX_TILE];
  (void)task;
  for (int64_t at = i * PIECE; at < end; at += TX_TILE) {
    const int64_t count = end - at < TX_TILE ? end - at : TX_TILE;
    kernels->store[tx_form_plain(dtype)]((const float *)w->masters->data + at, count, rounded, NULL, (tx_noise){0}, 0,
                                         TX_NEAREST);
    uint32_t differ = kernels->delta_differ((const char *)w->weights->data + 2 * at, rounded, count, dtype);
    for (; differ; differ &= differ - 1u) {
      const int64_t block = at / TX_BLOCK + __builtin_ctz(differ);
      memcpy((char *)w->moved->data + 2 * block, &unknown, sizeof unknown);
      atomic_fetch_add(&w->marked, 1);
    }
  }
}

tx_status tx_delta_mark(tx_tensor weights, tx_tensor masters, tx_tensor moved, const tx_parallel *parallel,
                        int64_t *marked, tx_error *error) {
  const tx_span spans[] = {{"weights", &weights, 1, 0}, {"masters", &masters, 1, 0}, {"moved", &moved, 1, 1}};
  if (!marked) return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "marked must not be NULL");
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(tx_check_tensors(spans, 3, error));
  if (weights.dtype != TX_BF16 && weights.dtype != TX_F16) {
    return tx_fail(error, TX_ERROR_DTYPE, "weights are %s; bf16 and fp16 are legal beside masters",
                   tx_dtype_name(weights.dtype));
  }
  TX_FORWARD(tx_check_fixed("masters", masters, TX_F32, weights.numel, weights.numel > 0, error));
  TX_FORWARD(
      tx_check_fixed("moved", moved, TX_BF16, (weights.numel + TX_BLOCK - 1) / TX_BLOCK, weights.numel > 0, error));
  mark_work w = {.weights = &weights, .masters = &masters, .moved = &moved};
  tx_delta_each(parallel, (weights.numel + PIECE - 1) / PIECE, mark_piece, &w);
  *marked = atomic_load(&w.marked);
  return TX_OK;
}
