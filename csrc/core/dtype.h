/* What the rest of csrc/core wants to know about dtypes beyond the public functions. */
#ifndef TX_CORE_DTYPE_H
#define TX_CORE_DTYPE_H

#include "csrc/torch_ext.h"

/* The names that a configuration may use, for messages: "fp32|float32|float, ..., auto". Static storage. */
const char *tx_dtype_choices(void);

/* tx_dtype_parse without a message: 1 where the `length` bytes at `text` are a name, with *dtype written, else 0. */
int tx_dtype_find(const char *text, size_t length, tx_dtype *dtype);

/* 1 where the code is TX_NONE or a row of dtypes.def. */
int tx_dtype_is_known(int64_t code);

/* Bytes that TX_BLOCK elements take on the wire: TX_U8 brings its e8m0 scale along. 0 for what has no element size. */
int64_t tx_wire_block_bytes(tx_dtype dtype);

#endif
