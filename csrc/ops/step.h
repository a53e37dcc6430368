/* The step as operators run it: whether it is skipped, a piece, what is counted. */
#ifndef TX_OPS_STEP_H
#define TX_OPS_STEP_H

#include "csrc/cpu/kernels.h"
#include "csrc/math/adamw.h"
#include "csrc/ops/parallel.h"

/* Weights of a call; of more, few are still in a cache when somebody reads them: a step touches 8 to 20 bytes for each.
 * Where the caches are larger than the 48 MB of bf16 weights with fp32 masters, what a smaller limit costs there is
 * less than it saves elsewhere. */
#define TX_STEP_CACHED ((int64_t)1 << 22)

typedef struct tx_step {
  const tx_adamw_args *args;
  const tx_kernels *kernels;
  double clip_coef, grad_scale;
  int64_t resynced; /* elements whose master became the weight */
  int stream_store; /* see tx_adamw_piece; 0 as tx_step_begin leaves it */
} tx_step;

/* A task's, zeroed before it begins: the constants of the last (group, step, lag) that it met, since neighbours mostly
 * share them, and what it counts. */
typedef struct tx_step_local {
  tx_adamw_constants constants;
  int64_t group;
  int64_t step; /* 0: nothing is cached */
  double lag;
  int64_t resynced;
} tx_step_local;

/* The step of args, which are valid. Returns 0 where it is skipped, which it counts. */
int tx_step_begin(const tx_adamw_args *args, tx_step *step);

/* Steps a piece whose weights are at `param` and gradients at `grad`. */
void tx_step_piece(const tx_step *step, tx_step_local *local, tx_tensor_range piece, void *param, const void *grad);

/* Alignment of pieces, in elements. */
int64_t tx_step_alignment(const tx_adamw_args *args);

/* When all pieces are stepped: adds what a task counted, and then ends. */
void tx_step_merge(tx_step *step, const tx_step_local *local);
void tx_step_end(const tx_step *step);

#endif
