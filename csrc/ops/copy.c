#include "csrc/ops/copy.h"

#include "csrc/torch_ext_advanced.h"

void tx_copy(void *to, const void *from, int64_t bytes) {
  if (bytes <= 0) return;
  char *target = to;
  const char *source = from;
  const int64_t at = tx_copy_lines(target, source, bytes - 2 * TX_COPY_AHEAD);
  if (at < bytes) memcpy(target + at, source + at, (size_t)(bytes - at));
}
