/* Reads the parts of several messages into one list. */
#ifndef TX_OPS_DELTA_PARTS_H
#define TX_OPS_DELTA_PARTS_H

#include "csrc/core/delta_part.h"

/* Reads all parts of n messages, one after the other, into memory that the caller frees. */
tx_status tx_delta_parts_read(const tx_tensor *messages, int64_t n, tx_delta_part **parts, int64_t *n_parts,
                              tx_error *error);

#endif
