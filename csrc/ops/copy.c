#include <string.h>

#include "csrc/torch_ext.h"

#define LINE ((int64_t)64)
#define AHEAD (16 * LINE)

void tx_copy(void *to, const void *from, int64_t bytes) {
  char *target = to;
  const char *source = from;
  int64_t at = 0;
  /* Fixed sizes: the compiler copies a line in registers. A processor fetches what is read by itself; what is written
   * has to be fetched as well, and for that it waits. */
  for (; at + AHEAD + LINE <= bytes; at += LINE) {
    __builtin_prefetch(target + at + AHEAD);
    memcpy(target + at, source + at, LINE);
  }
  if (at < bytes) memcpy(target + at, source + at, (size_t)(bytes - at));
}
