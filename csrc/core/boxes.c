/* tx_layout_boxes: a flat slice of a tensor as boxes of its elements. */
#include <inttypes.h>

#include "csrc/core/status.h"
#include "csrc/torch_ext_advanced.h"

/* Checks a shape and an order of its dimensions (NULL, or a permutation). *numel: number of elements. */
static tx_status check_shape(const int64_t *shape, const int64_t *order, int64_t ndim, int64_t *numel,
                             tx_error *error) {
  *numel = 1;
  for (int64_t d = 0; d < ndim; d++) {
    if (shape[d] < 0 || __builtin_mul_overflow(*numel, shape[d], numel)) {
      return tx_fail(error, TX_ERROR_SHAPE,
                     "tx_layout_boxes: shape[%" PRId64 "] is %" PRId64
                     "; legal: >= 0, as many elements as an int64 "
                     "counts",
                     d, shape[d]);
    }
    for (int64_t e = 0; order && e <= d; e++) {
      if (order[d] < 0 || order[d] >= ndim || (e < d && order[e] == order[d])) {
        return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                       "tx_layout_boxes: order[%" PRId64 "] is %" PRId64 "; legal: 0 ... %" PRId64 ", each once", d,
                       order[d], ndim - 1);
      }
    }
  }
  return TX_OK;
}

/* Finds the largest box of at most `limit` elements that begins with element `at` and is inside [at, stop), which is
 * not empty. The box is a number of rows of one dimension: the outermost one of which a row begins at `at`, ends by
 * `stop` and is small enough. Dimensions outside of it have extent 1, those inside are whole. Writes the box if `box`
 * is not NULL: ndim offsets, then ndim sizes. Returns its number of elements. */
static int64_t box_at(const int64_t *shape, const int64_t *order, int64_t ndim, int64_t numel, int64_t at, int64_t stop,
                      int64_t limit, int64_t *box) {
  /* outer: elements per index of the enclosing dimension (for the first dimension: all) */
  int64_t outer = numel, taken = 0;
  for (int64_t i = 0; i < ndim; i++) {
    const int64_t dim = order ? order[i] : i;
    const int64_t row = outer / shape[dim], end = at - at % outer + outer;
    const int64_t left = (stop < end ? stop : end) - at;
    int64_t offset = at / row % shape[dim], size = 1;
    if (taken) {
      offset = 0;
      size = shape[dim];
    } else if (at % row == 0 && left >= row && (row <= limit || i == ndim - 1)) {
      size = limit / row > 1 ? limit / row : 1;
      if (size > left / row) size = left / row;
      taken = size * row;
    }
    if (box) {
      box[dim] = offset;
      box[ndim + dim] = size;
    }
    outer = row;
  }
  return ndim ? taken : 1;
}

tx_status tx_layout_boxes(const int64_t *shape, const int64_t *order, int64_t ndim, int64_t start, int64_t stop,
                          int64_t limit, int64_t *boxes, int64_t capacity, int64_t *n_boxes, tx_error *error) {
  if (ndim < 0 || (ndim > 0 && !shape) || limit < 1 || !n_boxes) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "tx_layout_boxes: %" PRId64 " dimensions, boxes of %" PRId64
                   " elements; legal: >= 0, >= 1, shape and n_boxes not NULL",
                   ndim, limit);
  }
  int64_t numel;
  TX_FORWARD(check_shape(shape, order, ndim, &numel, error));
  if (start < 0 || start > stop || stop > numel) {
    return tx_fail(error, TX_ERROR_SHAPE,
                   "tx_layout_boxes: elements [%" PRId64 ", %" PRId64 ") of %" PRId64 "; legal: 0 <= start <= stop",
                   start, stop, numel);
  }
  int64_t found = 0;
  for (int64_t at = start; at < stop; found++) {
    if (boxes && found == capacity) {
      return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_layout_boxes: there are more than %" PRId64 " boxes",
                     capacity);
    }
    at += box_at(shape, order, ndim, numel, at, stop, limit, NULL);
  }
  int64_t *box = boxes;
  for (int64_t at = start; boxes && at < stop; box += 2 * ndim)
    at += box_at(shape, order, ndim, numel, at, stop, limit, box);
  *n_boxes = found;
  return TX_OK;
}
