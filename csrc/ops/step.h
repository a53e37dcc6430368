/* The parts of a step that its operators share: whether it is skipped, the step of a piece, and the counters. */
#ifndef TX_OPS_STEP_H
#define TX_OPS_STEP_H

#include "csrc/cpu/kernels.h"
#include "csrc/math/adamw.h"
#include "csrc/ops/parallel.h"

/* The number of weights of a call above which few of them are still in a cache when they are read next: a step touches
 * 8 to 20 bytes per weight. Where caches are larger than the 48 MB of this many bf16 weights with fp32 masters, the
 * small limit costs less than it saves elsewhere. */
#define TX_STEP_CACHED ((int64_t)1 << 22)

typedef struct tx_step {
  const tx_adamw_args *args;
  const tx_kernels *kernels;
  double clip_coef, grad_scale;
  int64_t resynced; /* elements whose master became the weight */
  int stream_store; /* see tx_adamw_piece; tx_step_begin sets it to 0 */
} tx_step;

/* State of a task, zeroed before it begins: the constants of the last (group, step, lag), which neighbouring tensors
 * mostly share, and its counter. */
typedef struct tx_step_local {
  tx_adamw_constants constants;
  int64_t group;
  int64_t step; /* 0: no constants are cached */
  double lag;
  int64_t resynced;
} tx_step_local;

/* Begins the step of valid args. Returns 0 if the step is skipped, which it counts. */
int tx_step_begin(const tx_adamw_args *args, tx_step *step);

/* Steps a piece whose weights are at `param` and gradients at `grad`. */
void tx_step_piece(const tx_step *step, tx_step_local *local, tx_tensor_range piece, void *param, const void *grad);

/* The alignment of pieces, in elements. */
int64_t tx_step_alignment(const tx_adamw_args *args);

/* To be called when all pieces have been stepped: tx_step_merge adds a task's counter, for each task; tx_step_end then
 * ends the step. */
void tx_step_merge(tx_step *step, const tx_step_local *local);
void tx_step_end(const tx_step *step);

#endif
