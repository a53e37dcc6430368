#include <string.h>

#include "csrc/torch_ext.h"

#define LINE ((int64_t)64)
#define AHEAD (32 * LINE) /* of what is written; twice as far of what is read */

void tx_copy(void *to, const void *from, int64_t bytes) {
  char *target = to;
  const char *source = from;
  int64_t at = 0;
  /* Fixed sizes: the compiler copies a line in registers. What is written has to be fetched as well, and for that a
   * processor waits; what is read it fetches by itself, but begins anew at each page. */
  for (; at + 2 * AHEAD + LINE <= bytes; at += LINE) {
    __builtin_prefetch(source + at + 2 * AHEAD);
    __builtin_prefetch(target + at + AHEAD);
    memcpy(target + at, source + at, LINE);
  }
  if (at < bytes) memcpy(target + at, source + at, (size_t)(bytes - at));
}
