/* What an iteration of Muon's does with a square matrix beside products. */
#ifndef TX_OPS_MUON_SQUARE_H
#define TX_OPS_MUON_SQUARE_H

#include "csrc/torch_ext.h"

/* Adds to the diagonal of square [n, n]. square: F32 or BF16, which is rounded once. */
void tx_muon_shift(tx_tensor square, int64_t n, double by);

/* Whether all elements are finite: one of a product that is not has others in each later product. F32 or BF16. */
int tx_muon_is_finite(tx_tensor square);

#endif
