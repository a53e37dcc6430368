/* Distributes the segments of a delta over threads. */
#include "csrc/ops/delta_tasks.h"

#include <stdatomic.h>

#include "csrc/core/fp_mode.h"
#include "csrc/ops/parallel.h"

typedef struct shared_items {
  tx_delta_item_fn item;
  void *ctx;
  int64_t n;
  _Atomic int64_t next;
} shared_items;

static void run_task(void *arg, int64_t task) {
  shared_items *s = arg;
  const tx_fp_mode saved = tx_fp_enter();
  for (int64_t i = atomic_fetch_add(&s->next, 1); i < s->n; i = atomic_fetch_add(&s->next, 1))
    s->item(s->ctx, task, i);
  tx_fp_leave(saved);
}

void tx_delta_each(const tx_parallel *parallel, int64_t n, tx_delta_item_fn item, void *ctx) {
  shared_items s = {.item = item, .ctx = ctx, .n = n};
  const int64_t threads = tx_threads_of(parallel), tasks = threads < n ? threads : n;
  if (tasks > 1) {
    parallel->run(parallel->ctx, tasks, run_task, &s);
  } else if (n > 0) {
    run_task(&s, 0);
  }
}
