/* Operations of Muon's iteration on a square matrix, other than products. */
#ifndef TX_OPS_MUON_SQUARE_H
#define TX_OPS_MUON_SQUARE_H

#include "csrc/torch_ext.h"

/* Adds `by` to the diagonal of square [n, n]. square: F32, or BF16, which is rounded once. */
void tx_muon_shift(tx_tensor square, int64_t n, double by);

/* Whether all elements are finite. A non-finite element of a product makes elements of all later products non-finite,
 * so it is enough to check the last one. F32 or BF16. */
int tx_muon_is_finite(tx_tensor square);

#endif
