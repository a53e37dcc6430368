/* Copies between host memories, a line at a time, with both sides asked for ahead. */
#ifndef TX_OPS_COPY_H
#define TX_OPS_COPY_H

#include <stdint.h>
#include <string.h>

#define TX_LINE ((int64_t)64)
#define TX_COPY_AHEAD (32 * TX_LINE) /* of what is written; twice as far of what is read */

/* Whole lines of the first `bytes`; returns how many bytes those are. Asks for memory beyond them, too.
 *
 * Fixed sizes: the compiler copies a line in registers. What is written has to be fetched as well, and for that a
 * processor waits; what is read it fetches by itself, but begins anew at each page. */
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
