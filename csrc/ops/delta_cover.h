/* Checks that the pieces of an engine cover a model. */
#ifndef TX_OPS_DELTA_COVER_H
#define TX_OPS_DELTA_COVER_H

#include "csrc/torch_ext_delta.h"

/* Checks that every element of every parameter is in exactly one piece, and no memory in two. pieces: sorted by this
 * function, by parameter and first element. */
tx_status tx_delta_pieces_check(int64_t n_params, const tx_delta_param *params, int64_t n_pieces,
                                tx_delta_piece *pieces, tx_error *error);

#endif
