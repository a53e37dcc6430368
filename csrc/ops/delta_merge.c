/* tx_delta_merge: joins messages, without decoding weights. */
#include <inttypes.h>
#include <stdlib.h>

#include "csrc/core/status.h"
#include "csrc/ops/delta_parts.h"

tx_status tx_delta_merge(int64_t n, const tx_tensor *messages, tx_delta_message *merged, tx_error *error) {
  if (!merged) return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "merged must not be NULL");
  tx_delta_part *parts;
  int64_t n_parts, bytes = 0;
  TX_FORWARD(tx_delta_parts_read(messages, n, &parts, &n_parts, error));
  tx_delta_parts_sort(parts, n_parts);
  tx_status status = tx_delta_parts_check(parts, n_parts, error);
  for (int64_t i = 0; i < n_parts; i++)
    bytes += parts[i].n_bytes;
  uint8_t *data = status == TX_OK ? malloc((size_t)bytes) : NULL;
  if (status == TX_OK && !data) {
    status = tx_fail(error, TX_ERROR_OUT_OF_MEMORY, "no memory for a message of %" PRId64 " bytes", bytes);
  }
  if (status == TX_OK) {
    *merged = (tx_delta_message){data, bytes, NULL};
    for (int64_t i = 0; i < n_parts; i++) {
      memcpy(data, parts[i].bytes, (size_t)parts[i].n_bytes);
      data += parts[i].n_bytes;
    }
  }
  free(parts);
  return status;
}

void tx_delta_free(tx_delta_message *message) {
  if (!message) return;
  free(message->data);
  *message = (tx_delta_message){NULL, 0, NULL};
}
