#include "csrc/torch/signature.h"

#include "csrc/core/status.h"
#include "csrc/torch_ext.h"

/* Words of tx_signature, one by one: FNV-1a by words, so that lists which differ in one word never have one signature.
 */
static uint64_t signed_with(uint64_t signature, int64_t word) {
  return (signature ^ (uint64_t)word) * UINT64_C(0x100000001B3);
}

#define NO_WORDS UINT64_C(0xCBF29CE484222325)

/* Never 0, which asks for nothing. */
static int64_t closed(uint64_t signature) {
  return (int64_t)(signature ? signature : 1);
}

int64_t tx_signature(int64_t n, const int64_t *words) {
  uint64_t signature = NO_WORDS;
  for (int64_t i = 0; i < n; i++)
    signature = signed_with(signature, words[i]);
  return closed(signature);
}

static int64_t signature_of(const tx_value *list) {
  uint64_t signature = NO_WORDS;
  for (int64_t i = 0; i < list->n; i++) {
    const tx_shape *shape = &list->shapes[i];
    const bool any = list->tensors[i].numel > 0;
    signature = signed_with(signature, list->tensors[i].dtype);
    signature = signed_with(signature, any ? shape->dim : -1);
    for (int64_t d = 0; any && d < shape->dim; d++)
      signature = signed_with(signature, shape->sizes[d]);
  }
  return closed(signature);
}

tx_status tx_check_signatures(const tx_value *params, int64_t forms, int64_t addresses, tx_error *error) {
  if (forms && forms != signature_of(params))
    return tx_fail(error, TX_ERROR_SHAPE,
                   "params have other dtypes or shapes than those that slices were made for (signature)");
  uint64_t signature = NO_WORDS;
  for (int64_t i = 0; addresses && i < params->n; i++)
    signature = signed_with(signature, (int64_t)(intptr_t)params->tensors[i].data);
  if (addresses && addresses != closed(signature))
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "params have moved to other addresses than those that the call was made for (addresses)");
  return TX_OK;
}
