#include "csrc/torch/schema.h"

#include <string.h>

#include "csrc/core/status.h"

static bool take(const char **cursor, const char *word) {
  const size_t length = strlen(word);
  if (strncmp(*cursor, word, length) != 0) return false;
  *cursor += length;
  return true;
}

/* "Tensor", "Tensor(a!)", "Tensor[]", "Tensor(a!)[]", "int", "float", "bool" */
static bool take_type(const char **cursor, tx_argument *argument) {
  if (take(cursor, "int")) return argument->kind = TX_ARG_INT, true;
  if (take(cursor, "float")) return argument->kind = TX_ARG_FLOAT, true;
  if (take(cursor, "bool")) return argument->kind = TX_ARG_BOOL, true;
  if (!take(cursor, "Tensor")) return false;
  if (take(cursor, "(")) {
    *cursor += strspn(*cursor, "abcdefghijklmnopqrstuvwxyz");
    if (!take(cursor, "!)")) return false;
    argument->written = true;
  }
  argument->kind = take(cursor, "[]") ? TX_ARG_TENSOR_LIST : TX_ARG_TENSOR;
  return true;
}

/* Whether an argument is a table that the host reads (see operators.def). */
static bool is_table(const char *name) {
  static const char *const kTables[] = {"groups", "meta", "slices", "offsets", "parts", "rates"};
  for (size_t i = 0; i < sizeof kTables / sizeof *kTables; i++)
    if (strcmp(name, kTables[i]) == 0) return true;
  return false;
}

tx_status tx_schema_parse(const char *text, tx_argument arguments[TX_MAX_ARGUMENTS], int32_t *n, tx_error *error) {
  const char *cursor = text;
  for (*n = 0; *cursor; (*n)++) {
    if (*n == TX_MAX_ARGUMENTS)
      return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "a schema with more than %d arguments: %s", TX_MAX_ARGUMENTS,
                     text);
    tx_argument *argument = &arguments[*n];
    memset(argument, 0, sizeof *argument);
    if (!take_type(&cursor, argument) || !take(&cursor, " "))
      return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                     "a schema's type that is not Tensor, Tensor[], int, float or bool: %s", cursor);
    const size_t length = strcspn(cursor, "=,");
    if (length == 0 || length >= sizeof argument->name)
      return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "an argument's name of %d characters in a schema: %s",
                     (int)length, text);
    memcpy(argument->name, cursor, length);
    argument->on_host = is_table(argument->name);
    cursor += length + strcspn(cursor + length, ",");
    (void)take(&cursor, ", ");
  }
  return TX_OK;
}
