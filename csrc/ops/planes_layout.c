#include "csrc/ops/planes_layout.h"

#include <string.h>

#include "csrc/core/dtype.h"
#include "csrc/core/status.h"
#include "csrc/cpu/coding_kernels.h"
#include "csrc/ops/check.h"

static const char kMagic[8] = {'T', 'X', 'P', 'L', 'A', 'N', 'E', 'S'};
static const uint32_t kVersion = 1;

int64_t tx_planes_width(int32_t dtype, int *rotate) {
  *rotate = dtype == TX_F32 || dtype == TX_BF16 || dtype == TX_F16;
  const int64_t bytes = tx_element_size((tx_dtype)dtype);
  return bytes <= (int64_t)sizeof(uint32_t) ? bytes : 0;
}

int64_t tx_planes_head_bytes(int64_t numel) {
  return (int64_t)sizeof(tx_planes_header) + tx_planes_blocks(numel) * (int64_t)sizeof(tx_planes_row);
}

/* The checksum of the header, without its own checksum field, and the rows. */
static uint32_t head_checksum(const uint8_t *message, int64_t numel) {
  const int64_t before = (int64_t)offsetof(tx_planes_header, checksum), after = (int64_t)sizeof(tx_planes_header);
  const uint32_t rows = tx_coding_kernels_selected()->planes_sum(message + after, tx_planes_head_bytes(numel) - after);
  return tx_coding_kernels_selected()->planes_sum(message, before) ^ (rows << 1 | rows >> 31);
}

void tx_planes_seal(uint8_t *message, int32_t dtype, int64_t numel) {
  tx_planes_header header = {.numel = numel, .dtype = (uint32_t)dtype, .version = kVersion};
  memcpy(header.magic, kMagic, sizeof kMagic);
  memcpy(message, &header, sizeof header);
  header.checksum = head_checksum(message, numel);
  memcpy(message, &header, sizeof header);
}

tx_planes_row tx_planes_row_at(const uint8_t *message, int64_t b) {
  tx_planes_row row;
  memcpy(&row, message + sizeof(tx_planes_header) + (size_t)b * sizeof row, sizeof row);
  return row;
}

/* Checks the header, and that all rows are there; does not look at blocks. */
static tx_status check_head(tx_tensor message, const tx_planes_header *header, tx_error *error) {
  int rotate;
  const int64_t numel = header->numel;
  if (memcmp(header->magic, kMagic, sizeof kMagic) != 0) {
    return tx_fail(error, TX_ERROR_BAD_STATE, "message does not begin as one that tx_planes_encode made");
  }
  if (header->version != kVersion) {
    return tx_fail(error, TX_ERROR_BAD_STATE, "message has version %u; this library reads version %u",
                   (unsigned)header->version, (unsigned)kVersion);
  }
  if (numel < 0 || numel / TX_PLANES_BLOCK >= message.numel || tx_planes_head_bytes(numel) > message.numel) {
    return tx_fail(error, TX_ERROR_BAD_STATE, "message has %lld bytes, and its header says %lld elements: truncated",
                   (long long)message.numel, (long long)numel);
  }
  if (!tx_planes_width((int32_t)header->dtype, &rotate) || head_checksum(message.data, numel) != header->checksum) {
    return tx_fail(error, TX_ERROR_BAD_STATE, "message is damaged: its header has another checksum");
  }
  return TX_OK;
}

tx_status tx_planes_open(tx_tensor message, tx_planes_message *opened, tx_error *error) {
  tx_planes_header header;
  if (message.numel < (int64_t)sizeof header) {
    return tx_fail(error, TX_ERROR_BAD_STATE, "message has %lld bytes; its header alone has %lld: truncated",
                   (long long)message.numel, (long long)sizeof header);
  }
  memcpy(&header, message.data, sizeof header);
  TX_FORWARD(check_head(message, &header, error));
  int64_t length = tx_planes_head_bytes(header.numel);
  for (int64_t b = 0; b < tx_planes_blocks(header.numel); b++)
    length += tx_planes_row_at(message.data, b).bytes;
  if (length > message.numel) {
    return tx_fail(error, TX_ERROR_BAD_STATE, "message has %lld bytes of %lld: truncated", (long long)message.numel,
                   (long long)length);
  }
  *opened = (tx_planes_message){message.data, header.numel, length, (int32_t)header.dtype};
  return TX_OK;
}
