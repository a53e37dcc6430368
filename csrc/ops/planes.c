/* tx_planes_encode and tx_planes_decode: values as small as they get, in blocks. */
#include <stdlib.h>
#include <string.h>

#include "csrc/core/dtype.h"
#include "csrc/core/status.h"
#include "csrc/ops/check.h"
#include "csrc/ops/planes_block.h"

int64_t tx_planes_bound(tx_dtype dtype, int64_t numel) {
  int rotate;
  const int64_t width = tx_planes_width((int32_t)dtype, &rotate);
  if (!width || numel < 0 || numel > INT64_C(1) << 56) return 0;
  return tx_planes_head_bytes(numel) + tx_planes_blocks(numel) * width + numel * width;
}

static tx_status check_dtype(tx_tensor values, tx_error *error) {
  int rotate;
  if (tx_planes_width((int32_t)values.dtype, &rotate)) return TX_OK;
  return tx_fail(error, TX_ERROR_DTYPE, "values are %s; fp32, bf16, fp16, int16 and uint8 are legal",
                 tx_dtype_name(values.dtype));
}

static tx_status check_bytes(const char *name, tx_tensor bytes, tx_error *error) {
  const tx_span span = {name, &bytes, 1, 0};
  TX_FORWARD(tx_check_tensors(&span, 1, error));
  if (bytes.dtype == TX_U8) return TX_OK;
  return tx_fail(error, TX_ERROR_DTYPE, "%s is %s; uint8 is legal", name, tx_dtype_name(bytes.dtype));
}

static tx_status check_both(tx_tensor values, const char *name, tx_tensor bytes, int decodes, tx_error *error) {
  const tx_span spans[] = {{"values", &values, 1, decodes}, {name, &bytes, 1, !decodes}};
  TX_FORWARD(check_bytes(name, bytes, error));
  TX_FORWARD(tx_check_tensors(spans, 2, error));
  TX_FORWARD(check_dtype(values, error));
  return tx_check_overlap(spans, 2, error);
}

static tx_status work_of(tx_planes_work **work, tx_error *error) {
  *work = malloc(sizeof **work);
  if (*work) return TX_OK;
  return tx_fail(error, TX_ERROR_OUT_OF_MEMORY, "no memory for %lld bytes of planes", (long long)sizeof **work);
}

tx_status tx_planes_encode(tx_tensor values, tx_tensor out, int64_t *bytes, tx_error *error) {
  tx_planes_work *work;
  if (!bytes) return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "bytes must not be NULL");
  TX_FORWARD(check_both(values, "out", out, 0, error));
  if (out.numel < tx_planes_bound(values.dtype, values.numel)) {
    return tx_fail(error, TX_ERROR_SHAPE, "out has %lld bytes; tx_planes_bound of %lld %s elements, %lld, is legal",
                   (long long)out.numel, (long long)values.numel, tx_dtype_name(values.dtype),
                   (long long)tx_planes_bound(values.dtype, values.numel));
  }
  TX_FORWARD(work_of(&work, error));
  int rotate;
  const int64_t width = tx_planes_width((int32_t)values.dtype, &rotate);
  uint8_t *message = out.data, *at = message + tx_planes_head_bytes(values.numel);
  for (int64_t b = 0; b < tx_planes_blocks(values.numel); b++) {
    const int64_t n = tx_planes_block_numel(values.numel, b);
    const char *from = (const char *)values.data + b * TX_PLANES_BLOCK * width;
    uint8_t *end = tx_planes_put(work, from, n, width, rotate, at);
    const tx_planes_row row = {(uint32_t)(end - at), tx_coding_kernels_selected()->planes_sum(at, end - at)};
    memcpy(message + sizeof(tx_planes_header) + (size_t)b * sizeof row, &row, sizeof row);
    at = end;
  }
  tx_planes_seal(message, (int32_t)values.dtype, values.numel);
  *bytes = at - message;
  free(work);
  return TX_OK;
}

tx_status tx_planes_read(tx_tensor message, tx_planes *planes, tx_error *error) {
  tx_planes_message opened;
  if (!planes || planes->size != sizeof(tx_planes)) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "planes is NULL or was not made with TX_PLANES_INIT");
  }
  TX_FORWARD(check_bytes("message", message, error));
  TX_FORWARD(tx_planes_open(message, &opened, error));
  planes->numel = opened.numel;
  planes->bytes = opened.length;
  planes->n_blocks = tx_planes_blocks(opened.numel);
  planes->dtype = opened.dtype;
  return TX_OK;
}

/* Bytes of the message before block b. */
static int64_t offset_of(const tx_planes_message *message, int64_t b) {
  int64_t offset = tx_planes_head_bytes(message->numel);
  for (int64_t before = 0; before < b; before++)
    offset += tx_planes_row_at(message->bytes, before).bytes;
  return offset;
}

static tx_status check_blocks(const tx_planes_message *message, int64_t begin, int64_t end, tx_error *error) {
  const uint8_t *at = message->bytes + offset_of(message, begin);
  for (int64_t b = begin; b < end; b++) {
    const tx_planes_row row = tx_planes_row_at(message->bytes, b);
    if (tx_coding_kernels_selected()->planes_sum(at, row.bytes) != row.checksum) {
      return tx_fail(
          error, TX_ERROR_BAD_STATE,
          "message is damaged: block %lld, elements from %lld on in bytes from %lld on, has another checksum",
          (long long)b, (long long)(b * TX_PLANES_BLOCK), (long long)(at - message->bytes));
    }
    at += row.bytes;
  }
  return TX_OK;
}

tx_status tx_planes_check(tx_tensor message, int64_t begin, int64_t end, tx_error *error) {
  tx_planes_message opened;
  TX_FORWARD(check_bytes("message", message, error));
  TX_FORWARD(tx_planes_open(message, &opened, error));
  if (begin < 0 || begin > end || end > tx_planes_blocks(opened.numel)) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "blocks [%lld, %lld) of a message that has %lld", (long long)begin,
                   (long long)end, (long long)tx_planes_blocks(opened.numel));
  }
  return check_blocks(&opened, begin, end, error);
}

/* A block into `to`, or of it the elements [skip, skip + count). */
static int get_block(tx_planes_work *work, const uint8_t *from, int64_t bytes, int64_t n, int32_t dtype, int64_t skip,
                     int64_t count, void *to) {
  int rotate;
  const int64_t width = tx_planes_width(dtype, &rotate);
  const int whole = count == n;
  if (!tx_planes_get(work, from, bytes, n, width, rotate, whole ? to : work->values)) return 0;
  if (!whole) memcpy(to, work->values + skip * width, (size_t)(count * width));
  return 1;
}

/* Elements [begin, begin + values.numel), at least one, of checked blocks. */
static tx_status decode_blocks(const tx_planes_message *message, int64_t begin, tx_tensor values, tx_planes_work *work,
                               tx_error *error) {
  const int64_t first = begin / TX_PLANES_BLOCK, stop = begin + values.numel;
  const uint8_t *at = message->bytes + offset_of(message, first);
  char *to = values.data;
  int rotate;
  const int64_t width = tx_planes_width(message->dtype, &rotate);
  for (int64_t b = first; b * TX_PLANES_BLOCK < stop; b++) {
    const int64_t n = tx_planes_block_numel(message->numel, b), from = b * TX_PLANES_BLOCK;
    const int64_t skip = begin > from ? begin - from : 0, end = stop < from + n ? stop - from : n;
    const int64_t bytes = tx_planes_row_at(message->bytes, b).bytes;
    if (!get_block(work, at, bytes, n, message->dtype, skip, end - skip, to)) {
      return tx_fail(error, TX_ERROR_BAD_STATE,
                     "message is not one that tx_planes_encode made: its block %lld cannot be decoded", (long long)b);
    }
    to += (end - skip) * width;
    at += bytes;
  }
  return TX_OK;
}

tx_status tx_planes_decode_range(tx_tensor message, int64_t begin, tx_tensor values, tx_error *error) {
  tx_planes_message opened;
  TX_FORWARD(check_both(values, "message", message, 1, error));
  TX_FORWARD(tx_planes_open(message, &opened, error));
  if (opened.dtype != (int32_t)values.dtype || begin < 0 || begin > opened.numel - values.numel) {
    return tx_fail(error, TX_ERROR_SHAPE, "values are %lld %s elements from %lld on; the message has %lld in %s",
                   (long long)values.numel, tx_dtype_name(values.dtype), (long long)begin, (long long)opened.numel,
                   tx_dtype_name((tx_dtype)opened.dtype));
  }
  if (values.numel == 0) return TX_OK;
  TX_FORWARD(check_blocks(&opened, begin / TX_PLANES_BLOCK, tx_planes_blocks(begin + values.numel), error));
  tx_planes_work *work;
  TX_FORWARD(work_of(&work, error));
  const tx_status status = decode_blocks(&opened, begin, values, work, error);
  free(work);
  return status;
}

tx_status tx_planes_decode(tx_tensor message, tx_tensor values, tx_error *error) {
  tx_planes_message opened;
  TX_FORWARD(check_both(values, "message", message, 1, error));
  TX_FORWARD(tx_planes_open(message, &opened, error));
  if (opened.dtype != (int32_t)values.dtype || opened.numel != values.numel) {
    return tx_fail(error, TX_ERROR_SHAPE, "values are %lld %s elements; the message has %lld in %s",
                   (long long)values.numel, tx_dtype_name(values.dtype), (long long)opened.numel,
                   tx_dtype_name((tx_dtype)opened.dtype));
  }
  return tx_planes_decode_range(message, 0, values, error);
}
