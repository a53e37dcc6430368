#include "csrc/ops/work.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "csrc/core/status.h"
#include "csrc/cpu/fp_mode.h"

/* Where a unit begins: a tensor and an element of it. */
typedef struct unit_start {
  int64_t tensor;
  int64_t element;
} unit_start;

typedef struct run {
  const tx_work *work;
  const unit_start *units; /* n_units + 1 entries; the last one is the end of everything */
  int64_t n_units;
  char *locals;
  size_t local_stride;
  _Atomic int64_t next;
} run;

static int64_t padded(const tx_work *w, int64_t i) {
  const int64_t alignment = w->alignment ? w->alignment : TX_BLOCK;
  return (w->tensors[i].numel + alignment - 1) / alignment * alignment;
}

static void run_unit(const run *r, void *local, int64_t unit) {
  const tx_work *w = r->work;
  const unit_start end = r->units[unit + 1];
  unit_start at = r->units[unit];
  while (at.tensor < end.tensor || (at.tensor == end.tensor && at.element < end.element)) {
    const int64_t numel = w->tensors[at.tensor].numel;
    const int64_t stop = at.tensor < end.tensor || end.element > numel ? numel : end.element;
    if (stop > at.element) w->piece(w->ctx, local, at.tensor, at.element, stop - at.element);
    at.tensor++;
    at.element = 0;
  }
}

static void run_task(void *arg, int64_t task) {
  run *r = arg;
  void *local = r->local_stride ? r->locals + (size_t)task * r->local_stride : NULL;
  const tx_fp_mode saved = tx_fp_enter();
  for (;;) {
    const int64_t unit = atomic_fetch_add_explicit(&r->next, 1, memory_order_relaxed);
    if (unit >= r->n_units) break;
    run_unit(r, local, unit);
  }
  tx_fp_leave(saved);
}

/* Elements of the unit that begins where `left` > 0 are left. One thread leaves nothing to others. */
static int64_t unit_of(int64_t left, int64_t threads) {
  if (threads == 1) return TX_UNIT_MOST;
  const int64_t share = left / threads / TX_UNIT_SHARE / TX_UNIT * TX_UNIT;
  if (share > TX_UNIT_MOST) return TX_UNIT_MOST;
  return share > TX_UNIT ? share : TX_UNIT;
}

/* Returns how many units there are; `units` has room for one of TX_UNIT elements each, and the end. */
static int64_t cut(const tx_work *w, int64_t total, int64_t threads, unit_start *units) {
  int64_t n = 0, next = 0, position = 0; /* next: where the next unit begins, position: tensor i, end to end */
  for (int64_t i = 0; i < w->n; i++) {
    const int64_t end = position + padded(w, i);
    for (; next < end; next += unit_of(total - next, threads))
      units[n++] = (unit_start){i, next - position};
    position = end;
  }
  units[n] = (unit_start){w->n, 0};
  return n;
}

tx_status tx_work_run(const tx_work *work, const tx_parallel *parallel, tx_error *error) {
  int64_t total = 0;
  for (int64_t i = 0; i < work->n; i++)
    total += padded(work, i);
  if (total == 0) return TX_OK;
  const int64_t threads = parallel && parallel->run && parallel->num_threads > 1 ? parallel->num_threads : 1;
  const int64_t most_units = (total + TX_UNIT - 1) / TX_UNIT;
  int64_t tasks = threads < most_units ? threads : most_units;

  const size_t units_bytes = (size_t)(most_units + 1) * sizeof(unit_start);
  const size_t stride = (work->local_bytes + 63) / 64 * 64; /* tasks do not share cache lines */
  /* calloc zeroes the locals; 64 spare bytes align them */
  char *memory = calloc(1, units_bytes + 64 + (size_t)tasks * stride);
  if (!memory) {
    return tx_fail(error, TX_ERROR_OUT_OF_MEMORY, "no memory for a table of %lld work units", (long long)most_units);
  }
  char *locals = memory + units_bytes;
  locals += (64 - (uintptr_t)locals % 64) % 64;
  const int64_t n_units = cut(work, total, threads, (unit_start *)(void *)memory);
  if (tasks > n_units) tasks = n_units;

  run r = {.work = work,
           .units = (const unit_start *)(const void *)memory,
           .n_units = n_units,
           .locals = locals,
           .local_stride = stride};
  atomic_init(&r.next, 0);
  if (tasks > 1) {
    parallel->run(parallel->ctx, tasks, run_task, &r);
  } else {
    run_task(&r, 0);
  }
  if (work->merge) {
    for (int64_t i = 0; i < tasks; i++)
      work->merge(work->ctx, locals + (size_t)i * stride);
  }
  free(memory);
  return TX_OK;
}
