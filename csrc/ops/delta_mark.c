/* tx_delta_mark: finds weights that do not match their masters, or the checksums of the last step. */
#include <inttypes.h>

#include "csrc/core/status.h"
#include "csrc/ops/delta_segment_code.h"
#include "csrc/ops/delta_tasks.h"
#include "csrc/ops/parallel.h"
#include "csrc/ops/tensor.h"

#define PIECE (64 * TX_TILE) /* weights per work item */

typedef struct mark_work {
  tx_delta_written *tensors;
  int64_t n;
} mark_work;

/* Compares `count` weights with their masters or checksum; bit b of the result says that block b differs. at: position
 * in the tensor, a multiple of TX_CHECKSUM. count <= TX_TILE. */
static uint32_t differing(const tx_coding_kernels *kernels, const tx_delta_written *of, int64_t at, int64_t count) {
  const tx_dtype dtype = of->weights.dtype;
  const char *weights = (const char *)of->weights.data + 2 * at;
  uint16_t rounded[TX_TILE];
  if (of->checksums.numel) {
    void *kept = (char *)of->checksums.data + at / TX_CHECKSUM * 8;
    const uint32_t all = (1u << ((count + TX_BLOCK - 1) / TX_BLOCK)) - 1u;
    return kernels->checksum(weights, NULL, kept, count, TX_CHECKSUM_CHECK) ? all : 0;
  }
  kernels->delta_round((const float *)of->masters.data + at, count, rounded, dtype);
  return kernels->delta_differ(weights, rounded, count, dtype);
}
_Static_assert(TX_TILE == TX_CHECKSUM, "a tile has one checksum");

/* The tensor that contains piece i. */
static tx_delta_written *with_piece(const mark_work *w, int64_t i) {
  int64_t low = 0, high = w->n - 1;
  while (low < high) {
    const int64_t middle = high - (high - low) / 2;
    if (w->tensors[middle].first <= i) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return &w->tensors[low];
}

static void mark_piece(void *ctx, int64_t task, int64_t i) {
  const mark_work *w = ctx;
  const tx_coding_kernels *kernels = tx_coding_kernels_selected();
  tx_delta_written *of = with_piece(w, i);
  const int64_t begin = (i - of->first) * PIECE, n = of->weights.numel, end = n - begin < PIECE ? n : begin + PIECE;
  const uint16_t unknown = 0x7f80;
  int64_t marked = 0;
  (void)task;
  for (int64_t at = begin; at < end; at += TX_TILE) {
    uint32_t differ = differing(kernels, of, at, end - at < TX_TILE ? end - at : TX_TILE);
    for (; differ; differ &= differ - 1u, marked++) {
      const int64_t block = at / TX_BLOCK + __builtin_ctz(differ);
      memcpy((char *)of->moved.data + 2 * block, &unknown, sizeof unknown);
    }
  }
  if (marked) __atomic_fetch_add(&of->marked, marked, __ATOMIC_RELAXED);
}

static tx_status check_written(const tx_delta_written *of, tx_error *error) {
  const tx_span spans[] = {{"weights", &of->weights, 1, 0},
                           {"masters", &of->masters, 1, 0},
                           {"checksums", &of->checksums, 1, 0},
                           {"moved", &of->moved, 1, 1}};
  const int64_t n = of->weights.numel;
  TX_FORWARD(tx_check_tensors(spans, 4, error));
  if (of->weights.dtype != TX_BF16 && of->weights.dtype != TX_F16) {
    return tx_fail(error, TX_ERROR_DTYPE, "weights are %s; bf16 and fp16 are legal with masters",
                   tx_dtype_name(of->weights.dtype));
  }
  if (n > 0 && (of->masters.numel > 0) == (of->checksums.numel > 0)) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "%s masters and checksums; one of them is legal",
                   of->masters.numel ? "both" : "neither");
  }
  TX_FORWARD(tx_check_fixed("masters", of->masters, TX_F32, n, 0, error));
  TX_FORWARD(tx_check_fixed("checksums", of->checksums, TX_I64, (n + TX_CHECKSUM - 1) / TX_CHECKSUM, 0, error));
  TX_FORWARD(tx_check_fixed("moved", of->moved, TX_BF16, (n + TX_BLOCK - 1) / TX_BLOCK, n > 0, error));
  return tx_check_overlap(spans, 4, error);
}

tx_status tx_delta_mark(int64_t n, tx_delta_written *tensors, const tx_parallel *parallel, tx_error *error) {
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(tx_check_present("tx_delta_mark: tensors", tensors, n, error));
  for (int64_t i = 0; i < n; i++)
    TX_FORWARD(tx_fail_of("tx_delta_mark: tensors", i, check_written(&tensors[i], error), error));
  int64_t pieces = 0;
  for (int64_t i = 0; i < n; i++) {
    tensors[i].marked = 0;
    tensors[i].first = pieces;
    pieces += (tensors[i].weights.numel + PIECE - 1) / PIECE;
  }
  mark_work w = {tensors, n};
  tx_delta_each(parallel, pieces, mark_piece, &w);
  return TX_OK;
}
