/* The arguments of an operator, parsed from its schema once, at registration, so that one function can read the boxed
 * stack of every operator. */
#ifndef TX_TORCH_SCHEMA_H
#define TX_TORCH_SCHEMA_H

#include <stdbool.h>
#include <stdint.h>

#include "csrc/torch_ext.h"

typedef enum { TX_ARG_TENSOR, TX_ARG_TENSOR_LIST, TX_ARG_INT, TX_ARG_FLOAT, TX_ARG_BOOL } tx_argument_kind;

typedef struct tx_argument {
  tx_argument_kind kind;
  bool written; /* marked with "(x!)" in the schema */
  bool on_host; /* a table (groups, meta, slices, offsets, parts, rates): always a CPU tensor */
  char name[32];
} tx_argument;

#define TX_MAX_ARGUMENTS 24

/* Parses "Tensor(a!)[] params, Tensor grad_scale, int seed=0" into arguments[0 .. *n). Defaults are handled by torch
 * and skipped. Any other content of a schema is TX_ERROR_INVALID_ARGUMENT. */
tx_status tx_schema_parse(const char *text, tx_argument arguments[TX_MAX_ARGUMENTS], int32_t *n, tx_error *error);

#endif
