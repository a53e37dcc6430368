/* What adapters check of an operator's arguments, because only the torch side knows it: lengths of lists, shapes,
 * tables.
 */
#ifndef TX_TORCH_VALUE_CHECKS_H
#define TX_TORCH_VALUE_CHECKS_H

#include "csrc/torch/stack.h"

tx_status tx_values_same_length(const tx_value *a, const tx_value *b, tx_error *error);
/* Element i of one list belongs to element i of the other: equal shapes, or one of them flat. */
tx_status tx_values_paired(const tx_value *a, const tx_value *b, tx_error *error);
/* The same, where the second list may be empty. */
tx_status tx_values_paired_or_empty(const tx_value *a, const tx_value *b, tx_error *error);
tx_status tx_values_same_length_or_empty(const tx_value *a, const tx_value *b, tx_error *error);

/* The tensors of a list that may be empty: NULL then. */
const tx_tensor *tx_value_or_null(const tx_value *list);

/* A table is read as an array of C structs: `columns` values of one dtype to a row (columns == 0: a vector). Gives the
 * number of rows; 0 for a tensor without elements. */
tx_status tx_value_table_rows(const tx_value *value, tx_dtype dtype, const char *dtype_name, int64_t columns,
                              int64_t *rows, tx_error *error);
/* A table with one row for each tensor of a list. */
tx_status tx_value_table_of(const tx_value *list, const tx_value *table, tx_dtype dtype, const char *dtype_name,
                            int64_t columns, tx_error *error);
/* Its rows; NULL where it has no elements. */
tx_status tx_value_meta_rows(const tx_value *list, const tx_value *meta, const tx_meta **rows, tx_error *error);
tx_status tx_value_offset_rows(const tx_value *list, const tx_value *offsets, const int64_t **rows, tx_error *error);

/* Codes travel as int64; an int32 field must not wrap a nonsense value round to a legal one. Any value outside int32 is
 * as illegal as INT32_MAX, which the entry refuses. */
int32_t tx_value_code(const tx_value *value);

#endif
