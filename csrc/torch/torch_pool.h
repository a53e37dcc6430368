/* torch's thread pool as a tx_parallel: a second OpenMP runtime in the process would compete with it. */
#ifndef TX_TORCH_POOL_H
#define TX_TORCH_POOL_H

#include "csrc/torch/torch_abi.h"

/* A tx_parallel with as many threads as torch is set to use now. abi must outlive it. */
tx_parallel tx_torch_pool(const tx_torch_abi *abi);

#endif
