/* tx_compress and tx_expand: lossless compression of bf16 to three quarters of its bytes. */
#include "csrc/core/status.h"
#include "csrc/cpu/kernels.h"
#include "csrc/ops/check.h"
#include "csrc/torch_ext_advanced.h"

static const int64_t kHeader = (int64_t)sizeof(int64_t);

static tx_status check(tx_tensor values, tx_tensor message, int expands, const int64_t *rest, tx_error *error) {
  const tx_span spans[] = {{"values", &values, 1, expands}, {"message", &message, 1, !expands}};
  if (!rest) return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "rest must not be NULL");
  TX_FORWARD(tx_check_tensors(spans, 2, error));
  if (values.dtype != TX_BF16 || message.dtype != TX_U8) {
    return tx_fail(error, TX_ERROR_DTYPE, "values are %s and message is %s; bf16 and uint8 are legal",
                   tx_dtype_name(values.dtype), tx_dtype_name(message.dtype));
  }
  const int64_t bytes = tx_compressed_bytes(values.numel);
  if (bytes == 0 || message.numel != bytes) {
    return tx_fail(error, TX_ERROR_SHAPE,
                   "values have %lld elements and message has %lld bytes; a multiple of %d > 0 and "
                   "tx_compressed_bytes of it (%lld) are legal",
                   (long long)values.numel, (long long)message.numel, TX_BLOCK, (long long)bytes);
  }
  return tx_check_overlap(spans, 2, error);
}

tx_status tx_compress(tx_tensor values, tx_tensor message, int64_t *rest, tx_error *error) {
  TX_FORWARD(check(values, message, 0, rest, error));
  const tx_compressed to = tx_compressed_at(message.data, values.numel / TX_BLOCK);
  const int64_t escapes = tx_kernels_selected()->compress(values.data, &to);
  memcpy(message.data, &escapes, sizeof escapes);
  *rest = 0;
  if (escapes == TX_COMPRESSED_NOT) {
    memcpy((char *)message.data + kHeader, values.data, (size_t)(message.numel - kHeader));
    *rest = 2 * values.numel - (message.numel - kHeader);
  } else { /* so that the message does not contain previous content of the memory */
    memset(to.escapes + 2 * escapes, 0, (size_t)(2 * (to.most - escapes)));
  }
  return TX_OK;
}

/* Whether the blocks' counts add up to `escapes`, and each escape is at a position inside its block. */
static int is_whole(const tx_compressed *from, int64_t escapes) {
  int64_t sum = 0, outside = 0;
  for (int64_t b = 0; b < from->blocks; b++)
    sum += from->counts[b];
  if (sum != escapes || escapes > from->most) return 0;
  for (int64_t i = 0; i < escapes; i++)
    outside += from->escapes[2 * i] >= TX_BLOCK;
  return outside == 0;
}

tx_status tx_expand(tx_tensor message, tx_tensor values, int64_t *rest, tx_error *error) {
  TX_FORWARD(check(values, message, 1, rest, error));
  int64_t escapes;
  memcpy(&escapes, message.data, sizeof escapes);
  if (escapes == TX_COMPRESSED_NOT) {
    memcpy(values.data, (const char *)message.data + kHeader, (size_t)(message.numel - kHeader));
    *rest = 2 * values.numel - (message.numel - kHeader);
    return TX_OK;
  }
  const tx_compressed from = tx_compressed_at(message.data, values.numel / TX_BLOCK);
  if (!is_whole(&from, escapes)) {
    return tx_fail(error, TX_ERROR_BAD_STATE,
                   "message is not one that tx_compress made of %lld elements (it says %lld escapes)",
                   (long long)values.numel, (long long)escapes);
  }
  tx_kernels_selected()->expand(&from, values.data);
  *rest = 0;
  return TX_OK;
}
