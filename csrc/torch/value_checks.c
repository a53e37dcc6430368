#include "csrc/torch/value_checks.h"

#include <stdint.h>

#include "csrc/core/status.h"

/* Whether two tensors of one index have the same shape, or one of them is flat (a shard, a range of a flat buffer) or
 * none. The entry compares their numbers of elements. */
static bool shapes_agree(const tx_shape *a, const tx_shape *b) {
  if (a->dim <= 1 || b->dim <= 1) return true;
  if (a->dim != b->dim) return false;
  for (int64_t d = 0; d < a->dim; d++)
    if (a->sizes[d] != b->sizes[d]) return false;
  return true;
}

tx_status tx_values_same_length(const tx_value *a, const tx_value *b, tx_error *error) {
  if (a->n == b->n) return TX_OK;
  return tx_fail(error, TX_ERROR_SHAPE, "%s has %lld tensors and %s has %lld; they must have the same length",
                 a->argument->name, (long long)a->n, b->argument->name, (long long)b->n);
}

tx_status tx_values_paired(const tx_value *a, const tx_value *b, tx_error *error) {
  TX_FORWARD(tx_values_same_length(a, b, error));
  for (int64_t i = 0; i < a->n; i++)
    if (!shapes_agree(&a->shapes[i], &b->shapes[i]))
      return tx_fail(error, TX_ERROR_SHAPE,
                     "%s[%lld] and %s[%lld] differ in shape; pass equal shapes, or one of them flat", a->argument->name,
                     (long long)i, b->argument->name, (long long)i);
  return TX_OK;
}

const tx_tensor *tx_value_or_null(const tx_value *list) {
  return list->n ? list->tensors : NULL;
}

tx_status tx_values_paired_or_empty(const tx_value *a, const tx_value *b, tx_error *error) {
  return b->n == 0 ? TX_OK : tx_values_paired(a, b, error);
}

tx_status tx_values_same_length_or_empty(const tx_value *a, const tx_value *b, tx_error *error) {
  return b->n == 0 ? TX_OK : tx_values_same_length(a, b, error);
}

tx_status tx_value_table_rows(const tx_value *value, tx_dtype dtype, const char *dtype_name, int64_t columns,
                              int64_t *rows, tx_error *error) {
  const tx_tensor *table = value->tensors;
  const tx_shape *shape = value->shapes;
  *rows = 0;
  if (table->numel == 0) return TX_OK;
  const bool shaped = columns ? shape->dim == 2 && shape->sizes[1] == columns : shape->dim == 1;
  if (table->dtype != dtype || !shaped) {
    if (columns)
      return tx_fail(error, TX_ERROR_SHAPE, "%s must be a table of %s with shape [rows, %lld]", value->argument->name,
                     dtype_name, (long long)columns);
    return tx_fail(error, TX_ERROR_SHAPE, "%s must be a vector of %s with shape [n]", value->argument->name,
                   dtype_name);
  }
  if ((uintptr_t)table->data % sizeof(int64_t))
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "%s must begin at a multiple of 8 bytes", value->argument->name);
  *rows = shape->sizes[0];
  return TX_OK;
}

tx_status tx_value_table_of(const tx_value *list, const tx_value *table, tx_dtype dtype, const char *dtype_name,
                            int64_t columns, tx_error *error) {
  int64_t rows = 0;
  TX_FORWARD(tx_value_table_rows(table, dtype, dtype_name, columns, &rows, error));
  if (rows == list->n) return TX_OK;
  return tx_fail(error, TX_ERROR_SHAPE, "%s has %lld rows for the %lld tensors of %s", table->argument->name,
                 (long long)rows, (long long)list->n, list->argument->name);
}

tx_status tx_value_meta_rows(const tx_value *list, const tx_value *meta, const tx_meta **rows, tx_error *error) {
  *rows = NULL;
  if (meta->tensors->numel == 0) return TX_OK;
  TX_FORWARD(tx_value_table_of(list, meta, TX_I64, "int64", sizeof(tx_meta) / sizeof(int64_t), error));
  *rows = meta->tensors->data;
  return TX_OK;
}

tx_status tx_value_offset_rows(const tx_value *list, const tx_value *offsets, const int64_t **rows, tx_error *error) {
  TX_FORWARD(tx_value_table_of(list, offsets, TX_I64, "int64", 0, error));
  *rows = offsets->tensors->data;
  return TX_OK;
}

int32_t tx_value_code(const tx_value *value) {
  return value->integer < INT32_MIN || value->integer > INT32_MAX ? INT32_MAX : (int32_t)value->integer;
}
