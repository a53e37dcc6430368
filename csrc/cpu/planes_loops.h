/* Loops over planes (csrc/math/planes.h) and over the entropy code of one. */
#ifndef TX_CPU_PLANES_LOOPS_H
#define TX_CPU_PLANES_LOOPS_H

#include "csrc/math/planes.h"

/* n values of 1, 2 or 4 bytes to and from their planes, each of n bytes (csrc/math/planes.h). rotate: they are floats.
 */
typedef void (*tx_split_loop)(const void *values, int64_t n, int rotate, uint8_t *const *planes);
typedef void (*tx_merge_loop)(const uint8_t *const *planes, int64_t n, int rotate, void *values);

/* Sets 256 counts to how often each symbol is there in runs of TX_COUNT_RUN, of which one begins at each multiple of
 * stride >= TX_COUNT_RUN. Returns how many were counted. */
#define TX_COUNT_RUN 64
typedef uint32_t (*tx_count_bytes_loop)(const uint8_t *symbols, int64_t n, int64_t stride, uint32_t *counts);
/* Whether one of the n symbols is 0; the least and the greatest of the others, 255 and 0 where there is none. */
typedef int (*tx_range_of_bytes_loop)(const uint8_t *symbols, int64_t n, uint8_t *least, uint8_t *greatest);
/* A checksum of n bytes. */
typedef uint32_t (*tx_planes_sum_loop)(const uint8_t *bytes, int64_t n);

/* Encodes n symbols: words from `to` on, and TX_RANS_LANES states. Returns where the words end; NULL, where that would
 * be less than TX_RANS_ROW_BYTES before `limit`. What lies between the two may be written, too. */
#define TX_RANS_ROW_BYTES (2 * TX_RANS_LANES + 32)
typedef uint8_t *(*tx_rans_encode_loop)(const tx_rans_encoder *encoder, uint32_t *states, const uint8_t *symbols,
                                        int64_t n, uint8_t *to, const uint8_t *limit);
/* The other way, with the states that encoding ended with, each in [TX_RANS_LEAST, TX_RANS_LEAST << 16). Up to 32 bytes
 * from `end` on are read, too, and not used. 0: these words and states are not what n symbols were encoded to. */
typedef int (*tx_rans_decode_loop)(const tx_rans_decoder *decoder, uint32_t *states, const uint8_t *begin,
                                   const uint8_t *end, int64_t n, uint8_t *symbols);

#endif
