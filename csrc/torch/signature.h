/* Whether parameters are those that Python made its tables for. */
#ifndef TX_TORCH_SIGNATURE_H
#define TX_TORCH_SIGNATURE_H

#include "csrc/torch/stack.h"

/* forms: tx_signature of their dtypes and shapes. addresses: of where they lie. 0: not asked. */
tx_status tx_check_signatures(const tx_value *params, int64_t forms, int64_t addresses, tx_error *error);

#endif
