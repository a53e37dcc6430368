/* Dtypes as values of configuration keys. policy.def says which keys have a set of legal dtypes. */
#include <string.h>

#include "csrc/core/dtype.h"
#include "csrc/core/policy_fields.h"
#include "csrc/core/status.h"

/* The legal set of a key whose set is enforced whenever it is coerced (OPTIMIZER_COERCED), else NULL. */
static const char *legal_set(const char *key) {
  const int32_t field = tx_policy_find(key);
  return field < TX_POLICY_FIELDS && tx_policy_is_coerced(field) ? tx_policy_field_at(field)->legal : NULL;
}

static tx_status check(const char *key, const char *value, tx_dtype dtype, tx_error *error) {
  if (!tx_dtype_is_known(dtype)) {
    return tx_fail(error, TX_ERROR_UNKNOWN_DTYPE, "%.64s=%.64s (code %d) is not a dtype", key, value, (int)dtype);
  }
  const char *legal = legal_set(key);
  if (dtype != TX_NONE && legal && !tx_policy_dtype_is_legal(legal, dtype)) {
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "%.64s=%.64s is not legal; legal: %s", key, value, legal);
  }
  return TX_OK;
}

tx_status tx_dtype_check_key(const char *key, tx_dtype dtype, tx_error *error) {
  if (!key) return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_dtype_check_key: key must not be NULL");
  return check(key, tx_dtype_name(dtype), dtype, error);
}

tx_status tx_dtype_coerce(const char *key, const char *text, tx_dtype *dtype, tx_error *error) {
  if (!key || !text || !dtype) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_dtype_coerce: key, text and dtype must not be NULL");
  }
  tx_dtype parsed;
  if (!tx_dtype_find(text, strlen(text), &parsed)) {
    const char *legal = legal_set(key);
    return tx_fail(error, TX_ERROR_UNKNOWN_DTYPE, "%.64s='%.64s' is not a dtype; legal: %s%s%s", key, text,
                   legal ? legal : "", legal ? ", of the names " : "", tx_dtype_choices());
  }
  TX_FORWARD(check(key, text, parsed, error));
  *dtype = parsed;
  return TX_OK;
}
