/* Cutting a call over many tensors into units, and running them in one parallel region.
 *
 * The tensors of a call are laid end to end, each padded to whole blocks, and cut into units: a large tensor becomes
 * many units and a thousand tiny ones share a unit. Threads claim units from an atomic counter, so a thread that loses
 * its core delays nobody; results never depend on who takes which. */
#ifndef TX_OPS_WORK_H
#define TX_OPS_WORK_H

#include "csrc/torch_ext.h"

/* Elements in a unit are a multiple of TX_UNIT, which is large enough to hide the claim, and of TX_BLOCK. Long units
 * are better: what a thread asks for ahead, and what the processor fetches by itself, is lost where the next unit is
 * another thread's; with short ones it was a tenth of the step's time. But where there are several threads none beyond
 * TX_UNIT is longer than a TX_UNIT_SHARE-th of a thread's part of what is left, so that threads end together. */
#define TX_UNIT ((int64_t)16384)
#define TX_UNIT_MOST (32 * TX_UNIT)
#define TX_UNIT_SHARE 4

/* Elements [begin, begin + count) of tensor `tensor`; begin is a multiple of the work's alignment and so is count
 * unless the piece ends the tensor. `local` is memory of the running task, zeroed before its first piece; at most one
 * piece uses it at a time. The floating-point mode is tx_fp_enter's. */
typedef void (*tx_piece_fn)(void *ctx, void *local, int64_t tensor, int64_t begin, int64_t count);
/* Called once per task on the calling thread after all pieces are done, in an unspecified order. */
typedef void (*tx_merge_fn)(void *ctx, const void *local);

typedef struct tx_work {
  int64_t n;
  const tx_tensor *tensors; /* only numel is read; a numel of 0 yields no piece */
  tx_piece_fn piece;
  tx_merge_fn merge;  /* NULL: nothing to merge */
  size_t local_bytes; /* of one task; 0: local is NULL */
  void *ctx;
  int64_t alignment; /* of pieces in a tensor, in elements: divides TX_UNIT; 0: TX_BLOCK */
} tx_work;

/* Runs all pieces. Fails only with TX_ERROR_OUT_OF_MEMORY, before any piece ran. */
tx_status tx_work_run(const tx_work *work, const tx_parallel *parallel, tx_error *error);

#endif
