/* Where an engine's weights are: rectangles of parameters and their memory. */
#ifndef TX_CORE_DELTA_PIECES_H
#define TX_CORE_DELTA_PIECES_H

#include "csrc/torch_ext_delta.h"

static inline int64_t tx_delta_item(tx_dtype dtype) {
  return dtype == TX_F32 ? 4 : 2;
}

/* The address of element x of a parameter in a piece; NULL if the piece does not contain it, or has no memory. has: set
 * to whether the piece contains it. */
static inline char *tx_delta_address(const tx_delta_piece *p, int64_t x, int64_t item, int *has) {
  const int64_t at = x - p->first;
  const int64_t row = p->rows > 1 ? at / p->step : 0;
  const int64_t column = at - row * p->step;
  *has = at >= 0 && row < p->rows && column < p->columns;
  if (!*has || !p->data) return NULL;
  return (char *)p->data + (row * p->row_stride + column * p->column_stride) * item;
}

/* The address of elements [begin, begin + n) of a parameter if they are contiguous in memory; else NULL. pieces: those
 * of the parameter. item: bytes per element. */
char *tx_delta_together(const tx_delta_piece *pieces, int64_t n_pieces, int64_t begin, int64_t n, int64_t item);

/* Copies the values of elements [begin, begin + n), and writes for each a byte that says whether it is held; returns
 * how many are. */
int64_t tx_delta_gather(const tx_delta_piece *pieces, int64_t n_pieces, int64_t begin, int64_t n, int64_t item,
                        void *values, uint8_t *held);

/* The address of element x; NULL if it is not held. */
char *tx_delta_find_element(const tx_delta_piece *pieces, int64_t n_pieces, int64_t x, int64_t item);

#endif
