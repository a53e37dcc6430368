/* The parts of messages, in one list. */
#ifndef TX_OPS_DELTA_PARTS_H
#define TX_OPS_DELTA_PARTS_H

#include "csrc/core/delta_part.h"

/* All parts of n messages, one after the other, in memory that the caller frees. */
tx_status tx_delta_parts_read(const tx_tensor *messages, int64_t n, tx_delta_part **parts, int64_t *n_parts,
                              tx_error *error);

#endif
