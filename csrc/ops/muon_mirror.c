/* tx_muon_mirror: fills in the part of a symmetric matrix that was not computed, from the part that was. */
#include <string.h>

#include "csrc/core/dtype.h"
#include "csrc/core/status.h"
#include "csrc/cpu/element.h"
#include "csrc/ops/check.h"
#include "csrc/ops/operator_checks.h"
#include "csrc/ops/parallel.h"

/* Elements of 16 and 32 bits are transposed in squares that fit into vectors of 16 bytes, which every processor has,
 * within blocks of one cache line per row. */
#define LINE_BYTES 64
/* Rows per task; and the number of elements up to which a single thread is used. */
#define TASK_ROWS 64
#define ALONE ((int64_t)1 << 16)

typedef uint16_t v8 __attribute__((vector_size(16)));
typedef uint32_t v4 __attribute__((vector_size(16)));

/* Interleaves rows i and i + half of `from` into rows 2 i and 2 i + 1 of `to`. Indices are constants, so that rows stay
 * in registers. */
#define INTERLEAVE_8(to, from, i)                                                          \
  to[2 * (i)] = __builtin_shufflevector(from[i], from[(i) + 4], 0, 8, 1, 9, 2, 10, 3, 11); \
  to[2 * (i) + 1] = __builtin_shufflevector(from[i], from[(i) + 4], 4, 12, 5, 13, 6, 14, 7, 15)
#define INTERLEAVE_ALL_8(to, from) \
  INTERLEAVE_8(to, from, 0);       \
  INTERLEAVE_8(to, from, 1);       \
  INTERLEAVE_8(to, from, 2);       \
  INTERLEAVE_8(to, from, 3)
#define INTERLEAVE_4(to, from, i)                                            \
  to[2 * (i)] = __builtin_shufflevector(from[i], from[(i) + 2], 0, 4, 1, 5); \
  to[2 * (i) + 1] = __builtin_shufflevector(from[i], from[(i) + 2], 2, 6, 3, 7)

#define ROW_IN(i) memcpy(&rows[i], from + (i)*stride, sizeof rows[i])
#define ROW_OUT(i) memcpy(to + (i)*LINE_BYTES / (int64_t)sizeof *to, &next[i], sizeof next[i])

/* Transposes 8 x 8 elements of 16 bits into rows of a cache line: interleaves three times. */
static inline void transpose_16(const tx_mem_u16 *from, uint16_t *to, int64_t stride) {
  v8 rows[8], next[8];
  ROW_IN(0), ROW_IN(1), ROW_IN(2), ROW_IN(3), ROW_IN(4), ROW_IN(5), ROW_IN(6), ROW_IN(7);
  INTERLEAVE_ALL_8(next, rows);
  INTERLEAVE_ALL_8(rows, next);
  INTERLEAVE_ALL_8(next, rows);
  ROW_OUT(0), ROW_OUT(1), ROW_OUT(2), ROW_OUT(3), ROW_OUT(4), ROW_OUT(5), ROW_OUT(6), ROW_OUT(7);
}

/* Transposes 4 x 4 elements of 32 bits: interleaves twice. */
static inline void transpose_32(const tx_mem_u32 *from, uint32_t *to, int64_t stride) {
  v4 rows[4], next[4];
  ROW_IN(0), ROW_IN(1), ROW_IN(2), ROW_IN(3);
  INTERLEAVE_4(next, rows, 0);
  INTERLEAVE_4(next, rows, 1);
  INTERLEAVE_4(rows, next, 0);
  INTERLEAVE_4(rows, next, 1);
  memcpy(next, rows, sizeof next);
  ROW_OUT(0), ROW_OUT(1), ROW_OUT(2), ROW_OUT(3);
}

/* A buffer between rows and columns, so that each cache line of the matrix is written once and whole. Where rows are a
 * power of two apart, the lines of a block compete for the same cache sets, and a line that is written in parts is
 * fetched as many times (4 to 10 times as slow for 1024 and 2048 columns, 0.09 of a product in bf16). */
typedef union block {
  uint16_t bits_16[LINE_BYTES * LINE_BYTES / 4];
  uint32_t bits_32[LINE_BYTES * LINE_BYTES / 16];
} block;

/* Copies a line. With a constant number of bytes the compiler emits a few moves, not a call. */
static inline void copy_line(void *to, const void *from, size_t bytes) {
  if (bytes == LINE_BYTES) {
    memcpy(to, from, LINE_BYTES);
  } else {
    memcpy(to, from, bytes);
  }
}

/* Copies rows [row, row + rows) of columns [column, column + columns), a cache line of each at most, to their
 * transposed place. part: buffer in which an incomplete block is padded. */
#define MIRROR_BLOCK(bits, side)                                                                             \
  static void mirror_block_##bits(block *part, tx_mem_u##bits *square, int64_t n, int64_t row, int64_t rows, \
                                  int64_t column, int64_t columns) {                                         \
    enum { LINE = LINE_BYTES / sizeof *square };                                                             \
    block to;                                                                                                \
    const tx_mem_u##bits *from = square + row * n + column;                                                  \
    const int whole = rows == LINE && columns == LINE;                                                       \
    for (int64_t i = 0; i < rows && !whole; i++)                                                             \
      memcpy(part->bits_##bits + i * LINE, from + i * n, (size_t)columns * sizeof *square);                  \
    const int64_t stride = whole ? n : LINE;                                                                 \
    if (!whole) from = part->bits_##bits;                                                                    \
    for (int i = 0; i < LINE; i += (side))                                                                   \
      for (int j = 0; j < LINE; j += (side))                                                                 \
        transpose_##bits(from + i * stride + j, to.bits_##bits + j * LINE + i, stride);                      \
    for (int64_t j = 0; j < columns; j++)                                                                    \
      copy_line(square + (column + j) * n + row, to.bits_##bits + j * LINE, (size_t)rows * sizeof *square);  \
  }
MIRROR_BLOCK(16, 8)
MIRROR_BLOCK(32, 4)

typedef struct mirror {
  void *square;
  int64_t n, panel, bytes;
} mirror;

static int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}

/* Mirrors rows [row, end) of one panel, up to the columns of its diagonal block. */
static void mirror_rows(const mirror *m, int64_t row, int64_t end) {
  const int64_t columns = row / m->panel * m->panel, line = LINE_BYTES / m->bytes;
  block part = {{0}};
  for (; row < end; row += line) {
    const int64_t rows = least(line, end - row);
    for (int64_t column = 0; column < columns; column += line) {
      const int64_t wide = least(line, columns - column);
      if (m->bytes == 2) {
        mirror_block_16(&part, m->square, m->n, row, rows, column, wide);
      } else {
        mirror_block_32(&part, m->square, m->n, row, rows, column, wide);
      }
    }
  }
}

/* Mirrors the rows of one task. The longest rows come first, so that threads finish at about the same time. */
static void mirror_task(void *arg, int64_t i) {
  const mirror *m = arg;
  const int64_t tasks = (m->n + TASK_ROWS - 1) / TASK_ROWS, begin = (tasks - 1 - i) * TASK_ROWS;
  const int64_t end = least(begin + TASK_ROWS, m->n);
  for (int64_t row = begin; row < end;) {
    const int64_t panel_end = least((row / m->panel + 1) * m->panel, end);
    mirror_rows(m, row, panel_end);
    row = panel_end;
  }
}

tx_status tx_muon_mirror(tx_tensor square, int64_t n, int64_t panel, const tx_parallel *parallel, tx_error *error) {
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(tx_check_muon_mirror(square, n, panel, error));
  mirror m = {square.data, n, panel, tx_element_size(square.dtype)};
  const int64_t tasks = (n + TASK_ROWS - 1) / TASK_ROWS;
  if (panel >= n) return TX_OK;
  if (tx_threads_of(parallel) > 1 && square.numel > ALONE) {
    parallel->run(parallel->ctx, tasks, mirror_task, &m);
  } else {
    for (int64_t i = 0; i < tasks; i++)
      mirror_task(&m, i);
  }
  return TX_OK;
}
