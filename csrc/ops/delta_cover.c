/* Checks that pieces of parameters cover each element once, and no memory twice. */
#include "csrc/ops/delta_cover.h"

#include <inttypes.h>
#include <stdlib.h>

#include "csrc/core/delta_pieces.h"
#include "csrc/core/status.h"

/* A range of elements of a parameter, or of bytes of memory. */
typedef struct interval {
  uintptr_t begin, end;
  int64_t piece;
} interval;

static int by_begin(const void *a, const void *b) {
  const interval *x = a, *y = b;
  if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
  return x->end < y->end ? -1 : x->end > y->end;
}

static int by_param(const void *a, const void *b) {
  const tx_delta_piece *x = a, *y = b;
  if (x->param != y->param) return x->param < y->param ? -1 : 1;
  return x->first < y->first ? -1 : x->first > y->first;
}

/* Checks one piece by itself: that it is inside its parameter. */
static tx_status check_piece(const tx_delta_piece *p, int64_t n_params, const tx_delta_param *params, tx_error *error) {
  if (p->param < 0 || p->param >= n_params) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "a piece is of parameter %" PRId64 "; 0 to %" PRId64 " is legal",
                   p->param, n_params - 1);
  }
  const tx_delta_param *of = &params[p->param];
  int64_t last; /* the end of the last row */
  const int64_t step = p->rows > 1 ? p->step : p->columns;
  if (p->first < 0 || p->rows < 1 || p->columns < 1 || step < p->columns ||
      __builtin_mul_overflow(p->rows - 1, step, &last) || __builtin_add_overflow(last, p->first, &last) ||
      __builtin_add_overflow(last, p->columns, &last) || last > of->numel) {
    return tx_fail(error, TX_ERROR_SHAPE,
                   "\"%s\": a piece of %" PRId64 " rows of %" PRId64 " elements, %" PRId64
                   " apart, from element %" PRId64 " on; legal: within its %" PRId64
                   " elements, rows that do not overlap",
                   of->name, p->rows, p->columns, p->step, p->first, of->numel);
  }
  const int64_t most = INT64_C(1) << 56;
  int64_t far, wide;
  if (p->data && (__builtin_mul_overflow(p->rows - 1, p->row_stride, &far) ||
                  __builtin_mul_overflow(p->columns - 1, p->column_stride, &wide) || far > most || far < -most ||
                  wide > most || wide < -most)) {
    return tx_fail(error, TX_ERROR_SHAPE, "\"%s\": strides %" PRId64 " and %" PRId64 " reach beyond 2^56 elements",
                   of->name, p->row_stride, p->column_stride);
  }
  return TX_OK;
}

/* Checks that the pieces of one parameter cover each of its elements once. room: one interval per row, or per element
 * if these are fewer. */
static tx_status check_cover(const tx_delta_param *param, const tx_delta_piece *pieces, int64_t n, interval *room,
                             tx_error *error) {
  int64_t rows = 0;
  for (int64_t i = 0; i < n; i++) {
    rows += pieces[i].rows;
    if (rows > param->numel) {
      return tx_fail(error, TX_ERROR_OVERLAP,
                     "\"%s\": its pieces have more rows than it has elements, %" PRId64 "; legal: each in one piece",
                     param->name, param->numel);
    }
  }
  rows = 0;
  for (int64_t i = 0; i < n; i++) {
    for (int64_t r = 0; r < pieces[i].rows; r++) {
      const uintptr_t begin = (uintptr_t)(pieces[i].first + r * pieces[i].step);
      room[rows++] = (interval){begin, begin + (uintptr_t)pieces[i].columns, i};
    }
  }
  qsort(room, (size_t)rows, sizeof *room, by_begin);
  uintptr_t covered = 0;
  for (int64_t r = 0; r < rows; r++) {
    if (room[r].begin < covered) {
      return tx_fail(error, TX_ERROR_OVERLAP, "\"%s\": element %" PRIuPTR " is in two pieces; legal: each in one",
                     param->name, room[r].begin);
    }
    if (room[r].begin > covered) break;
    covered = room[r].end;
  }
  if (covered != (uintptr_t)param->numel) {
    return tx_fail(error, TX_ERROR_SHAPE,
                   "\"%s\": element %" PRIuPTR " of %" PRId64
                   " is in no piece; legal: pieces that cover all (without memory where they are not held)",
                   param->name, covered, param->numel);
  }
  return TX_OK;
}

/* Lists the memory of a piece as intervals along its smaller stride; as a single one if the piece fills all that it
 * spans, or if `whole`. Returns their number; to: NULL, to count only. */
static int64_t memory_of(const tx_delta_piece *p, int64_t item, int64_t index, int whole, interval *to) {
  const int64_t rs = p->rows > 1 ? llabs(p->row_stride) : 0, cs = p->columns > 1 ? llabs(p->column_stride) : 0;
  const int by_rows = p->rows > 1 && (p->columns == 1 || rs < cs); /* the smaller stride is that between rows */
  const int64_t inner = by_rows ? p->rows : p->columns, outer = by_rows ? p->columns : p->rows;
  const int64_t step = by_rows ? p->row_stride : p->column_stride, stride = by_rows ? p->column_stride : p->row_stride;
  const int64_t short_step = inner > 1 ? llabs(step) : 1;
  int64_t many = outer;
  if (short_step != 1) many = outer * inner;
  if (whole || (short_step == 1 && outer > 1 && llabs(stride) == inner)) many = 1;
  if (!to) return many;
  const int64_t low = (step < 0 ? step * (inner - 1) : 0);
  const uintptr_t base = (uintptr_t)p->data;
  for (int64_t k = 0; k < many; k++) {
    int64_t at, n = 1;
    if (many == 1) {
      at = low + (stride < 0 ? stride * (outer - 1) : 0);
      n = (inner - 1) * llabs(step) + (outer - 1) * llabs(stride) + 1;
      if (inner == 1) n = (outer - 1) * llabs(stride) + 1;
    } else if (short_step == 1) {
      at = k * stride + low;
      n = inner;
    } else {
      at = k / inner * stride + k % inner * step;
    }
    to[k] = (interval){base + (uintptr_t)(at * item), base + (uintptr_t)((at + n) * item), index};
  }
  return many;
}

/* Whether two elements of a piece have the same address: whether some number of row strides and some number of column
 * strides, both inside the piece, are the same distance. */
static int folds(const tx_delta_piece *p) {
  const int64_t rs = p->rows > 1 ? llabs(p->row_stride) : 1, cs = p->columns > 1 ? llabs(p->column_stride) : 1;
  if (!rs || !cs) return 1;
  int64_t common = rs;
  for (int64_t rest = cs; rest;) {
    const int64_t next = common % rest;
    common = rest;
    rest = next;
  }
  return cs / common < p->rows && rs / common < p->columns;
}

/* Checks that no memory is twice in a piece, or in two pieces. First compares what pieces span; only if these overlap,
 * all of their intervals. */
static tx_status check_memory(const tx_delta_param *params, const tx_delta_piece *pieces, int64_t n, tx_error *error) {
  for (int64_t i = 0; i < n; i++) {
    if (pieces[i].data && folds(&pieces[i]))
      return tx_fail(error, TX_ERROR_OVERLAP,
                     "\"%s\": strides %" PRId64 " and %" PRId64 " of %" PRId64 " rows of %" PRId64
                     " write several elements to the same memory; legal: each to its own",
                     params[pieces[i].param].name, pieces[i].row_stride, pieces[i].column_stride, pieces[i].rows,
                     pieces[i].columns);
  }
  const int64_t most = INT64_MAX / (int64_t)sizeof(interval);
  for (int whole = 1; whole >= 0; whole--) {
    int64_t many = 0;
    for (int64_t i = 0; i < n; i++) {
      if (!pieces[i].data) continue;
      many += memory_of(&pieces[i], 1, i, whole, NULL);
      if (many > most) break;
    }
    interval *list = many > most ? NULL : malloc((size_t)(many ? many : 1) * sizeof *list);
    if (!list) return tx_fail(error, TX_ERROR_OUT_OF_MEMORY, "no memory to compare %" PRId64 " pieces", n);
    int64_t found = 0, at = -1;
    for (int64_t i = 0; i < n; i++) {
      if (pieces[i].data)
        found += memory_of(&pieces[i], tx_delta_item((tx_dtype)params[pieces[i].param].dtype), i, whole, list + found);
    }
    qsort(list, (size_t)found, sizeof *list, by_begin);
    for (int64_t k = 1; k < found && at < 0; k++)
      at = list[k].begin < list[k - 1].end ? k : -1;
    const interval a = at > 0 ? list[at - 1] : (interval){0, 0, 0}, b = at > 0 ? list[at] : a;
    free(list);
    if (at < 0) return TX_OK;
    if (at > 0 && !whole) {
      return tx_fail(error, TX_ERROR_OVERLAP,
                     "\"%s\" and \"%s\" are written to the same memory; legal: each to its own",
                     params[pieces[a.piece].param].name, params[pieces[b.piece].param].name);
    }
  }
  return TX_OK;
}

tx_status tx_delta_pieces_check(int64_t n_params, const tx_delta_param *params, int64_t n_pieces,
                                tx_delta_piece *pieces, tx_error *error) {
  for (int64_t i = 0; i < n_pieces; i++)
    TX_FORWARD(check_piece(&pieces[i], n_params, params, error));
  qsort(pieces, (size_t)n_pieces, sizeof *pieces, by_param);
  int64_t most = 1;
  for (int64_t i = 0, rows = 0; i < n_pieces; i++) {
    rows = (i > 0 && pieces[i].param == pieces[i - 1].param ? rows : 0) + pieces[i].rows;
    if (rows > params[pieces[i].param].numel) rows = params[pieces[i].param].numel; /* check_cover rejects more */
    most = rows > most ? rows : most;
  }
  interval *room = malloc((size_t)most * sizeof *room);
  if (!room) return tx_fail(error, TX_ERROR_OUT_OF_MEMORY, "no memory to check %" PRId64 " rows", most);
  tx_status status = TX_OK;
  for (int64_t p = 0, i = 0; p < n_params && status == TX_OK; p++) {
    const int64_t begin = i;
    while (i < n_pieces && pieces[i].param == p)
      i++;
    status = check_cover(&params[p], pieces + begin, i - begin, room, error);
  }
  free(room);
  if (status != TX_OK) return status;
  return check_memory(params, pieces, n_pieces, error);
}
