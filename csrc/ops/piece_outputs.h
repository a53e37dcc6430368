/* The optional outputs of a step (changed, moved, distances, emas, healths), piece by piece. */
#ifndef TX_OPS_PIECE_OUTPUTS_H
#define TX_OPS_PIECE_OUTPUTS_H

#include "csrc/cpu/kernels.h"
#include "csrc/ops/step_outputs.h"

/* The outputs of one piece: what its loop receives, and the sums that the loop computes for the parameter. */
typedef struct tx_piece_outputs {
  tx_step_extras extras;
  tx_tensor health; /* row of the parameter, to which other tasks add too; none: not requested */
  int64_t row[TX_HEALTH_LEN];
} tx_piece_outputs;

/* Prepares the outputs of parameter i, from element `begin` on, in its `step`-th step. Returns the extras of
 * `piece_outputs`, or NULL if the piece has no optional outputs. */
const tx_step_extras *tx_extras_begin(const tx_step_outputs *outputs, int64_t i, int64_t begin, int64_t step,
                                      tx_piece_outputs *piece_outputs);
/* To be called when the piece has been stepped: adds its sums to the row of the parameter. */
void tx_extras_end(tx_piece_outputs *piece_outputs);

#endif
