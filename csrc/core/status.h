/* Failing with a message: the only way in which the library reports an error. */
#ifndef TX_CORE_STATUS_H
#define TX_CORE_STATUS_H

#include "csrc/torch_ext.h"

/* Formats the message into `error` (which may be NULL) and returns `status`, so that callers write
 * `return tx_fail(error, TX_ERROR_SHAPE, "...")`. Long messages are truncated. */
tx_status tx_fail(tx_error *error, tx_status status, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Returns `status`; if it is a failure, puts "name[i]: " in front of its message. */
tx_status tx_fail_of(const char *name, int64_t i, tx_status status, tx_error *error);

/* Returns from the calling function when `expression` is not TX_OK. */
#define TX_FORWARD(expression)                    \
  do {                                            \
    const tx_status tx_forward_ = (expression);   \
    if (tx_forward_ != TX_OK) return tx_forward_; \
  } while (0)

#endif
