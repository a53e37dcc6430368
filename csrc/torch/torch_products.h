/* Muon's matrix products by torch, on the CPU. */
#ifndef TX_TORCH_PRODUCTS_H
#define TX_TORCH_PRODUCTS_H

#include "csrc/torch/torch_abi.h"
#include "csrc/torch_ext_advanced.h"

/* tx_torch_orthogonalise with this torch and its pool. */
tx_status tx_torch_orthogonalise_with(const tx_torch_abi *abi, const tx_parallel *pool, tx_muon_job *jobs, int64_t n,
                                      const tx_muon_workspace *workspaces, int64_t n_workspaces, tx_error *error);

#endif
