#include "csrc/ops/copy.h"

#include "csrc/cpu/stream_store.h"
#include "csrc/torch_ext_advanced.h"

void tx_copy(void *to, const void *from, int64_t bytes) {
  if (bytes <= 0) return;
  char *target = to;
  const char *source = from;
  const int64_t at = tx_copy_lines(target, source, bytes - 2 * TX_COPY_AHEAD);
  if (at < bytes) memcpy(target + at, source + at, (size_t)(bytes - at));
}

void tx_copy_nontemporal(void *to, const void *from, int64_t bytes) {
  if (bytes <= 0) return;
  char *target = to;
  const char *source = from;
  int64_t at = (int64_t)(-(uintptr_t)target % TX_LINE);
  if (at > bytes) at = bytes;
  memcpy(target, source, (size_t)at);
  for (; at + 2 * TX_COPY_AHEAD + TX_LINE <= bytes; at += TX_LINE) {
    __builtin_prefetch(source + at + 2 * TX_COPY_AHEAD);
    tx_store_nontemporal(source + at, target + at, TX_LINE);
  }
  tx_end_nontemporal();
  memcpy(target + at, source + at, (size_t)(bytes - at));
}
