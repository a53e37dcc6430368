/* tx_gather_dtype: the dtype of all-gathered sums. */
#include "csrc/torch_ext_advanced.h"

tx_dtype tx_gather_dtype(tx_dtype grad_gather_dtype, tx_dtype wire_dtype) {
  if (grad_gather_dtype != TX_NONE) return grad_gather_dtype;
  return wire_dtype == TX_U8 ? TX_BF16 : wire_dtype;
}
