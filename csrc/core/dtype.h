/* Facts about dtypes for csrc/core, in addition to the public functions. */
#ifndef TX_CORE_DTYPE_H
#define TX_CORE_DTYPE_H

#include "csrc/torch_ext.h"

/* The names that a configuration may use, for messages: "fp32|float32|float, ..., auto". Static storage. */
const char *tx_dtype_choices(void);

/* tx_dtype_parse without a message: returns 1 and writes *dtype if the `length` bytes at `text` are a name, else 0. */
int tx_dtype_find(const char *text, size_t length, tx_dtype *dtype);

/* Returns 1 if the code is TX_NONE or a row of dtypes.def. */
int tx_dtype_is_known(int64_t code);

/* Bytes of TX_BLOCK elements on the wire, for TX_U8 including the e8m0 scale. 0 for a code without an element size. */
int64_t tx_wire_block_bytes(tx_dtype dtype);

#endif
