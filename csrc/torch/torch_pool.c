#include "csrc/torch/torch_pool.h"

typedef struct {
  void (*task)(void *arg, int64_t i);
  void *arg;
} region;

static void run_range(int64_t begin, int64_t end, void *ctx) {
  const region *r = ctx;
  for (int64_t i = begin; i < end; i++)
    r->task(r->arg, i);
}

/* Grain 1: csrc/ops makes as many tasks as there are threads, each worth a thread. */
static void run(void *ctx, int64_t n, void (*task)(void *arg, int64_t i), void *arg) {
  tx_torch_pool *pool = ctx;
  region r = {task, arg};
  if (pool->abi->torch_parallel_for(0, n, 1, run_range, &r)) pool->failed = true;
}

void tx_torch_pool_init(tx_torch_pool *pool, const tx_torch_abi *abi) {
  uint32_t num_threads = 1;
  (void)abi->torch_get_num_threads(&num_threads);
  *pool = (tx_torch_pool){.abi = abi, .parallel = TX_PARALLEL_INIT};
  pool->parallel.num_threads = num_threads;
  pool->parallel.ctx = pool;
  pool->parallel.run = run;
}
