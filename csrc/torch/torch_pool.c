#include "csrc/torch/torch_pool.h"

typedef struct {
  void (*task)(void *arg, int64_t i);
  void *arg;
  int64_t n;
  int64_t next; /* atomic */
} region;

/* Runs up to `count` tasks, whichever are next. */
static void run_some(region *r, int64_t count) {
  for (int64_t i; count > 0 && (i = __atomic_fetch_add(&r->next, 1, __ATOMIC_RELAXED)) < r->n; count--)
    r->task(r->arg, i);
}

static void run_range(int64_t begin, int64_t end, void *ctx) {
  run_some(ctx, end - begin);
}

/* Grain 1: csrc/ops creates as many tasks as there are threads, each worth a thread. Tasks that torch fails to run are
 * run here. */
static void run(void *ctx, int64_t n, void (*task)(void *arg, int64_t i), void *arg) {
  const tx_torch_abi *abi = ctx;
  region r = {task, arg, n, 0};
  if (abi->torch_parallel_for(0, n, 1, run_range, &r)) run_some(&r, n);
}

tx_parallel tx_torch_pool(const tx_torch_abi *abi) {
  uint32_t num_threads = 1;
  (void)abi->torch_get_num_threads(&num_threads);
  tx_parallel parallel = TX_PARALLEL_INIT;
  parallel.num_threads = num_threads;
  parallel.ctx = (void *)(uintptr_t)abi;
  parallel.run = run;
  return parallel;
}
