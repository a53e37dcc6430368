#include "csrc/core/status.h"

#include <stdarg.h>

#include "csrc/core/text.h"

tx_status tx_fail(tx_error *error, tx_status status, const char *format, ...) {
  if (error) {
    va_list arguments;
    va_start(arguments, format);
    tx_text_message(error->message, sizeof error->message, format, arguments);
    va_end(arguments);
  }
  return status;
}

tx_status tx_fail_of(const char *name, int64_t i, tx_status status, tx_error *error) {
  if (status == TX_OK || !error) return status;
  const tx_error of_entry = *error;
  return tx_fail(error, status, "%s[%lld]: %s", name, (long long)i, of_entry.message);
}

const char *tx_status_name(tx_status status) {
  switch (status) {
#define TX_STATUS_CASE(name) \
  case name:                 \
    return #name
    TX_STATUS_CASE(TX_OK);
    TX_STATUS_CASE(TX_ERROR_INVALID_ARGUMENT);
    TX_STATUS_CASE(TX_ERROR_UNKNOWN_KEY);
    TX_STATUS_CASE(TX_ERROR_UNKNOWN_DTYPE);
    TX_STATUS_CASE(TX_ERROR_ILLEGAL_VALUE);
    TX_STATUS_CASE(TX_ERROR_SHAPE);
    TX_STATUS_CASE(TX_ERROR_DTYPE);
    TX_STATUS_CASE(TX_ERROR_OVERLAP);
    TX_STATUS_CASE(TX_ERROR_CONFLICT);
    TX_STATUS_CASE(TX_ERROR_DEVICE);
    TX_STATUS_CASE(TX_ERROR_BAD_STATE);
    TX_STATUS_CASE(TX_ERROR_OUT_OF_MEMORY);
    TX_STATUS_CASE(TX_ERROR_UNAVAILABLE);
    TX_STATUS_CASE(TX_ERROR_MISMATCH);
#undef TX_STATUS_CASE
  }
  return "unknown status";
}

uint32_t tx_version(void) {
  return ((uint32_t)TX_VERSION_MAJOR << 16) | ((uint32_t)TX_VERSION_MINOR << 8) | (uint32_t)TX_VERSION_PATCH;
}
