/* The adapters: each calls a C entry of the back end that can access the memory, with an operator's arguments in the
 * order of its schema. */
#ifndef TX_TORCH_ADAPTERS_H
#define TX_TORCH_ADAPTERS_H

#include "csrc/torch/backend.h"
#include "csrc/torch/stack.h"

/* One adapter per row of operators.def: tx_adapt_adamw ... It checks what only the torch side knows (lengths of lists,
 * shapes, tables); the entry checks the rest. */
#define X(entry, name, arguments) \
  tx_status tx_adapt_##entry(const tx_value *values, const tx_target *target, tx_error *error);
#include "csrc/torch/operators.def"
#undef X

#endif
