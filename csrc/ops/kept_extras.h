/* What a step leaves behind, piece by piece. */
#ifndef TX_OPS_KEPT_EXTRAS_H
#define TX_OPS_KEPT_EXTRAS_H

#include "csrc/cpu/kernels.h"
#include "csrc/ops/left_behind.h"

/* Of one piece: what its loop is told, and what the loop adds up for the parameter. */
typedef struct tx_kept_extras {
  tx_step_extras extras;
  tx_tensor health; /* of the parameter, to which other tasks add; none: nobody asked */
  int64_t row[TX_HEALTH_LEN];
} tx_kept_extras;

/* Of parameter i, from element `begin` on, in its `step`-th step. Returns kept->extras, or NULL where it leaves nothing
 * behind. */
const tx_step_extras *tx_extras_begin(const tx_left_behind *left, int64_t i, int64_t begin, int64_t step,
                                      tx_kept_extras *kept);
/* When the piece is stepped. */
void tx_extras_end(tx_kept_extras *kept);

#endif
