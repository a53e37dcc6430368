#include "csrc/ops/parallel.h"

#include <stdlib.h>
#include <string.h>

#include "csrc/core/fp_mode.h"
#include "csrc/core/status.h"

static int64_t padded(const tx_work_units *u, int64_t i) {
  return (u->tensors[i].numel + u->alignment - 1) / u->alignment * u->alignment;
}

/* Elements of the next unit, if `left` > 0 elements remain. With one thread, units need not be small. */
static int64_t unit_of(int64_t left, int64_t threads) {
  if (threads == 1) return TX_UNIT_MOST;
  const int64_t share = left / threads / TX_UNIT_SHARE / TX_UNIT * TX_UNIT;
  if (share > TX_UNIT_MOST) return TX_UNIT_MOST;
  return share > TX_UNIT ? share : TX_UNIT;
}

/* Writes where units start; returns their number. `starts` has room for the case that each has TX_UNIT elements, and
 * for the end. */
static int64_t cut(const tx_work_units *u, int64_t total, int64_t threads, tx_unit_start *starts) {
  /* next: start of the next unit; position: start of tensor i, with tensors end to end */
  int64_t n = 0, next = 0, position = 0;
  for (int64_t i = 0; i < u->n; i++) {
    const int64_t end = position + padded(u, i);
    for (; next < end; next += unit_of(total - next, threads))
      starts[n++] = (tx_unit_start){i, next - position};
    position = end;
  }
  starts[n] = (tx_unit_start){u->n, 0};
  return n;
}

/* Upper bounds of the sizes of tables. */
typedef struct extent {
  int64_t units, tasks;
  size_t starts_bytes, local_stride, bytes;
} extent;

static extent measure(int64_t total, int64_t threads, size_t local_bytes) {
  extent e;
  e.units = (total + TX_UNIT - 1) / TX_UNIT;
  e.tasks = threads < e.units ? threads : e.units;
  e.starts_bytes = (size_t)(e.units + 1) * sizeof(tx_unit_start);
  e.local_stride = (local_bytes + 63) / 64 * 64;                    /* tasks do not share cache lines */
  e.bytes = e.starts_bytes + 64 + (size_t)e.tasks * e.local_stride; /* 64 spare bytes align them */
  return e;
}

static int64_t total_of(const tx_work_units *u) {
  int64_t total = 0;
  for (int64_t i = 0; i < u->n; i++)
    total += padded(u, i);
  return total;
}

static tx_status fail_memory(const extent *e, tx_error *error) {
  return tx_fail(error, TX_ERROR_OUT_OF_MEMORY, "no memory for a table of %lld work units", (long long)e->units);
}

/* Lays out the tables in memory, whose part for locals is zeroed. */
static void lay_out(tx_work_units *units, const extent *e, int64_t total, int64_t threads, char *memory) {
  units->starts = (const tx_unit_start *)(const void *)memory;
  units->local_stride = e->local_stride;
  units->locals = memory + e->starts_bytes;
  units->locals += (64 - (uintptr_t)units->locals % 64) % 64;
  units->n_units = cut(units, total, threads, (tx_unit_start *)(void *)memory);
  units->n_tasks = e->tasks < units->n_units ? e->tasks : units->n_units;
}

static tx_status cut_in(tx_work_units *units, const tx_work_room *room, int64_t threads, size_t local_bytes,
                        tx_error *error) {
  const int64_t total = total_of(units);
  if (total == 0) return TX_OK;
  const extent e = measure(total, threads, local_bytes);
  char *memory = room->memory;
  if (memory) {
    memset(memory + e.starts_bytes, 0, e.bytes - e.starts_bytes);
  } else {
    memory = units->memory = calloc(1, e.bytes);
    if (!memory) return fail_memory(&e, error);
  }
  lay_out(units, &e, total, threads, memory);
  return TX_OK;
}

tx_status tx_work_units_cut(tx_work_units *units, int64_t n, const tx_tensor *tensors, int64_t alignment,
                            int64_t threads, size_t local_bytes, tx_error *error) {
  const tx_work_room none = {NULL, 0};
  *units = (tx_work_units){.n = n, .tensors = tensors, .alignment = alignment};
  return cut_in(units, &none, threads, local_bytes, error);
}

void tx_work_units_free(tx_work_units *units) {
  free(units->memory);
  units->memory = NULL;
  units->starts = NULL;
}

tx_status tx_work_room_make(tx_work_room *room, int64_t n, const tx_tensor *tensors, int64_t alignment, int64_t threads,
                            size_t local_bytes, tx_error *error) {
  const tx_work_units widest = {.n = n, .tensors = tensors, .alignment = alignment};
  const extent e = measure(total_of(&widest), threads, local_bytes);
  *room = (tx_work_room){malloc(e.bytes), e.bytes};
  return room->memory ? TX_OK : fail_memory(&e, error);
}

void tx_work_room_free(tx_work_room *room) {
  free(room->memory);
  *room = (tx_work_room){NULL, 0};
}

int tx_work_units_claim(tx_work_units *units, tx_unit *unit) {
  const int64_t i = __atomic_fetch_add(&units->next, 1, __ATOMIC_RELAXED);
  if (i >= units->n_units) return 0;
  *unit = (tx_unit){units->starts[i], units->starts[i + 1]};
  return 1;
}

int tx_unit_take(const tx_work_units *units, tx_unit *unit, int64_t most, tx_tensor_range *piece) {
  tx_unit_start *at = &unit->at;
  const tx_unit_start end = unit->end;
  while (at->tensor < end.tensor || (at->tensor == end.tensor && at->element < end.element)) {
    const int64_t numel = units->tensors[at->tensor].numel;
    const int64_t stop = at->tensor < end.tensor || end.element > numel ? numel : end.element;
    const int64_t left = stop - at->element;
    if (left > 0) {
      *piece = (tx_tensor_range){at->tensor, at->element, left < most ? left : most};
      at->element += piece->count;
      return 1;
    }
    *at = (tx_unit_start){at->tensor + 1, 0};
  }
  return 0;
}

typedef struct run {
  const tx_parallel_work *work;
  tx_work_units *units;
} run;

static void run_task(void *arg, int64_t task) {
  const run *r = arg;
  void *local = tx_work_units_local(r->units, task);
  const tx_fp_mode saved = tx_fp_enter();
  tx_unit unit;
  tx_tensor_range piece;
  while (tx_work_units_claim(r->units, &unit)) {
    while (tx_unit_take(r->units, &unit, INT64_MAX, &piece))
      r->work->piece(r->work->ctx, local, piece.tensor, piece.begin, piece.count);
  }
  tx_fp_leave(saved);
}

tx_status tx_parallel_work_run(const tx_parallel_work *work, const tx_parallel *parallel, tx_error *error) {
  tx_work_units units = {
      .n = work->n, .tensors = work->tensors, .alignment = work->alignment ? work->alignment : TX_BLOCK};
  TX_FORWARD(cut_in(&units, &work->room, tx_threads_of(parallel), work->local_bytes, error));
  run r = {.work = work, .units = &units};
  if (units.n_tasks > 1) {
    parallel->run(parallel->ctx, units.n_tasks, run_task, &r);
  } else if (units.n_tasks == 1) {
    run_task(&r, 0);
  }
  for (int64_t i = 0; work->merge && i < units.n_tasks; i++)
    work->merge(work->ctx, tx_work_units_local(&units, i));
  tx_work_units_free(&units);
  return TX_OK;
}
