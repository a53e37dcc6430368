/* Finds elements of parameters in an engine's memory. */
#include "csrc/core/delta_pieces.h"

#include <string.h>

char *tx_delta_together(const tx_delta_piece *pieces, int64_t n_pieces, int64_t begin, int64_t n, int64_t item) {
  for (int64_t i = 0; i < n_pieces; i++) {
    const tx_delta_piece *p = &pieces[i];
    int64_t at = begin - p->first, row = 0;
    if (at < 0) continue;
    if (p->rows > 1) {
      row = at / p->step;
      at -= row * p->step;
    }
    if (row >= p->rows || at + n > p->columns) continue;
    if (!p->data || (p->column_stride != 1 && n > 1)) return NULL;
    return (char *)p->data + (row * p->row_stride + at * p->column_stride) * item;
  }
  return NULL;
}

char *tx_delta_find_element(const tx_delta_piece *pieces, int64_t n_pieces, int64_t x, int64_t item) {
  for (int64_t i = 0; i < n_pieces; i++) {
    int has;
    char *address = tx_delta_address(&pieces[i], x, item, &has);
    if (has) return address;
  }
  return NULL;
}

int64_t tx_delta_gather(const tx_delta_piece *pieces, int64_t n_pieces, int64_t begin, int64_t n, int64_t item,
                        void *values, uint8_t *held) {
  int64_t found = 0;
  memset(held, 0, (size_t)n);
  memset(values, 0, (size_t)(n * item));
  for (int64_t i = 0; i < n_pieces; i++) {
    const tx_delta_piece *p = &pieces[i];
    if (!p->data || p->first >= begin + n) continue;
    const int64_t step = p->rows > 1 ? p->step : p->columns;
    int64_t row = begin > p->first ? (begin - p->first) / step : 0;
    for (; row < p->rows && p->first + row * step < begin + n; row++) {
      const int64_t start = p->first + row * step;
      int64_t c = begin > start ? begin - start : 0;
      const int64_t end = start + p->columns < begin + n ? p->columns : begin + n - start;
      const char *from = (const char *)p->data + (row * p->row_stride + c * p->column_stride) * item;
      for (; c < end; c++, found++, from += p->column_stride * item) {
        memcpy((char *)values + (start + c - begin) * item, from, (size_t)item);
        held[start + c - begin] = 1;
      }
    }
  }
  return found;
}
