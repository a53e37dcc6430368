/* What a schema says about an operator's arguments, parsed once at registration, so that reading a boxed stack needs no
 * code of its own per operator. */
#ifndef TX_TORCH_SCHEMA_H
#define TX_TORCH_SCHEMA_H

#include <stdbool.h>
#include <stdint.h>

#include "csrc/torch_ext.h"

typedef enum { TX_ARG_TENSOR, TX_ARG_TENSOR_LIST, TX_ARG_INT, TX_ARG_FLOAT, TX_ARG_BOOL } tx_argument_kind;

typedef struct tx_argument {
  tx_argument_kind kind;
  bool written; /* the schema marks it with "(x!)" */
  bool on_host; /* a table (groups, meta, slices, offsets, parts, rates): a CPU tensor, wherever the others are */
  char name[32];
} tx_argument;

#define TX_MAX_ARGUMENTS 24

/* Parses "Tensor(a!)[] params, Tensor grad_scale, int seed=0" into arguments[0 .. *n). Defaults are torch's business
 * and are passed over. Anything else a schema could contain is TX_ERROR_INVALID_ARGUMENT. */
tx_status tx_schema_parse(const char *text, tx_argument arguments[TX_MAX_ARGUMENTS], int32_t *n, tx_error *error);

#endif
