/* torch's thread pool as a tx_parallel: a second OpenMP runtime in the process would fight with it. */
#ifndef TX_TORCH_POOL_H
#define TX_TORCH_POOL_H

#include "csrc/torch/torch_abi.h"

/* As many threads as torch has now. abi must stay. */
tx_parallel tx_torch_pool(const tx_torch_abi *abi);

#endif
