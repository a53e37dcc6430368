/* Checks that parameters are those for which Python made its tables. */
#ifndef TX_TORCH_SIGNATURE_H
#define TX_TORCH_SIGNATURE_H

#include "csrc/torch/stack.h"

/* forms: tx_signature of their dtypes and shapes. addresses: tx_signature of their addresses. 0: not checked. */
tx_status tx_check_signatures(const tx_value *params, int64_t forms, int64_t addresses, tx_error *error);

#endif
