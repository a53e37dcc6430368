/* torch's thread pool as a tx_parallel: a second OpenMP runtime in the process would fight with it. */
#ifndef TX_TORCH_POOL_H
#define TX_TORCH_POOL_H

#include "csrc/torch/torch_abi.h"

typedef struct tx_torch_pool {
  const tx_torch_abi *abi;
  bool failed; /* torch refused to run a region: some tasks may not have run */
  tx_parallel parallel;
} tx_torch_pool;

/* `pool` must stay where it is while pool->parallel is in use. */
void tx_torch_pool_init(tx_torch_pool *pool, const tx_torch_abi *abi);

#endif
