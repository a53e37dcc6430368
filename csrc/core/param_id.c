#include "csrc/core/hash.h"
#include "csrc/torch_ext.h"

int64_t tx_param_id(const char *name) {
  const char *text = name ? name : "";
  /* 63 bits: ids are passed in int64 tensors, and a negative one would look like an error. */
  return (int64_t)(tx_hash_end(tx_hash_bytes(tx_hash_begin(), text, strlen(text))) & INT64_MAX);
}
