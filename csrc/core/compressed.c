/* tx_compressed_bytes. */
#include "csrc/core/compressed.h"

#include "csrc/torch_ext_advanced.h"

int64_t tx_compressed_bytes(int64_t numel) {
  if (numel <= 0 || numel > INT64_MAX / 2 || numel % TX_BLOCK != 0) return 0;
  const int64_t blocks = numel / TX_BLOCK;
  return tx_compressed_fixed(blocks) + 2 * tx_compressed_most(blocks); /* less than 2 * numel for any of them */
}
