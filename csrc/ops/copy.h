/* Copies in host memory, a cache line at a time, with prefetches of both sides. */
#ifndef TX_OPS_COPY_H
#define TX_OPS_COPY_H

#include <stdint.h>
#include <string.h>

#define TX_LINE ((int64_t)64)
#define TX_COPY_AHEAD (32 * TX_LINE) /* distance for the target; twice that for the source */

/* Copies whole lines of the first `bytes`; returns how many bytes that was. Prefetches memory beyond them, too.
 *
 * The size of a line is a constant, so that the compiler copies it in registers. The target must be fetched before it
 * is written, and the processor waits for that. It prefetches the source by itself, but starts over at each page. */
static inline int64_t tx_copy_lines(char *target, const char *source, int64_t bytes) {
  int64_t at = 0;
  for (; at + TX_LINE <= bytes; at += TX_LINE) {
    __builtin_prefetch(source + at + 2 * TX_COPY_AHEAD);
    __builtin_prefetch(target + at + TX_COPY_AHEAD);
    memcpy(target + at, source + at, TX_LINE);
  }
  return at;
}

#endif
