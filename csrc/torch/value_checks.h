/* Checks of an operator's arguments that only the torch side can make: lengths of lists, shapes, tables. */
#ifndef TX_TORCH_VALUE_CHECKS_H
#define TX_TORCH_VALUE_CHECKS_H

#include "csrc/torch/stack.h"

tx_status tx_values_same_length(const tx_value *a, const tx_value *b, tx_error *error);
/* The lists have the same length, and element i of one has the shape of element i of the other, or one of them is
 * flat. */
tx_status tx_values_paired(const tx_value *a, const tx_value *b, tx_error *error);
/* The same checks, but the second list may be empty. */
tx_status tx_values_paired_or_empty(const tx_value *a, const tx_value *b, tx_error *error);
tx_status tx_values_same_length_or_empty(const tx_value *a, const tx_value *b, tx_error *error);

/* The tensors of a list; NULL if it is empty. */
const tx_tensor *tx_value_or_null(const tx_value *list);

/* Checks a table, which is read as an array of C structs: `columns` values of one dtype per row (columns == 0: a
 * vector). *rows: the number of rows; 0 for a tensor without elements. */
tx_status tx_value_table_rows(const tx_value *value, tx_dtype dtype, const char *dtype_name, int64_t columns,
                              int64_t *rows, tx_error *error);
/* Checks a table with one row per tensor of a list. */
tx_status tx_value_table_of(const tx_value *list, const tx_value *table, tx_dtype dtype, const char *dtype_name,
                            int64_t columns, tx_error *error);
/* Check such a table and return its rows; NULL if it has no elements. */
tx_status tx_value_meta_rows(const tx_value *list, const tx_value *meta, const tx_meta **rows, tx_error *error);
tx_status tx_value_offset_rows(const tx_value *list, const tx_value *offsets, const int64_t **rows, tx_error *error);

/* A code, which is passed as int64, as int32. A number outside int32 must not wrap round to a legal code: it becomes
 * INT32_MAX, which the entry rejects. */
int32_t tx_value_code(const tx_value *value);

#endif
