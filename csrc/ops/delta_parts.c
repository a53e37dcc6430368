/* Reads the parts of several messages into one list. */
#include "csrc/ops/delta_parts.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "csrc/core/status.h"

/* Reads the parts of one message: counts them and, if `to` is not NULL, appends them to it. */
static tx_status read_message(const tx_tensor *messages, int64_t i, tx_delta_part *to, int64_t *n, tx_error *error) {
  char what[40];
  (void)snprintf(what, sizeof what, "message %" PRId64, i);
  const tx_tensor message = messages[i];
  if (message.numel < 0 || message.numel > INT64_C(1) << 56 || (message.numel > 0 && !message.data) ||
      message.dtype != TX_U8) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "%s is %" PRId64 " %s; bytes (uint8) are legal", what,
                   message.numel, tx_dtype_name(message.dtype));
  }
  int64_t at = 0;
  do {
    tx_delta_part part;
    TX_FORWARD(tx_delta_part_read(what, message.data, at, message.numel, &part, error));
    if (to) to[*n] = part;
    *n += 1;
    at += part.n_bytes;
  } while (at < message.numel);
  return TX_OK;
}

tx_status tx_delta_parts_read(const tx_tensor *messages, int64_t n, tx_delta_part **parts, int64_t *n_parts,
                              tx_error *error) {
  if (n < 1 || !messages) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "there are %" PRId64 " messages; at least one is legal", n);
  }
  int64_t capacity = n, found = 0;
  tx_delta_part *list = malloc((size_t)capacity * sizeof *list);
  for (int64_t i = 0; list && i < n; i++) {
    int64_t here = 0;
    tx_status status = read_message(messages, i, NULL, &here, error);
    if (status == TX_OK && found + here > capacity) {
      capacity = 2 * (found + here);
      tx_delta_part *larger = realloc(list, (size_t)capacity * sizeof *list);
      if (!larger) break;
      list = larger;
    }
    if (status == TX_OK) status = read_message(messages, i, list, &found, error);
    if (status != TX_OK) {
      free(list);
      return status;
    }
    if (i + 1 == n) {
      *parts = list;
      *n_parts = found;
      return TX_OK;
    }
  }
  free(list);
  return tx_fail(error, TX_ERROR_OUT_OF_MEMORY, "no memory for the headers of %" PRId64 " messages", n);
}
