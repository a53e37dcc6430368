/* Loops over planes (csrc/math/planes.h) and over the entropy code of a plane. */
#ifndef TX_CPU_PLANES_LOOPS_H
#define TX_CPU_PLANES_LOOPS_H

#include "csrc/math/planes.h"

/* Splits n values of 1, 2 or 4 bytes into planes of n bytes each, and merges them. rotate: whether they are floats. */
typedef void (*tx_split_loop)(const void *values, int64_t n, int rotate, uint8_t *const *planes);
typedef void (*tx_merge_loop)(const uint8_t *const *planes, int64_t n, int rotate, void *values);

/* Sets 256 counts to how often each symbol occurs in a sample: runs of TX_COUNT_RUN symbols, one at each multiple of
 * stride >= TX_COUNT_RUN. Returns how many symbols were counted. */
#define TX_COUNT_RUN 64
typedef uint32_t (*tx_count_bytes_loop)(const uint8_t *symbols, int64_t n, int64_t stride, uint32_t *counts);
/* Whether one of the n symbols is 0. *least, *greatest: of the other symbols; 255 and 0 if there are none. */
typedef int (*tx_range_of_bytes_loop)(const uint8_t *symbols, int64_t n, uint8_t *least, uint8_t *greatest);
/* A checksum of n bytes. */
typedef uint32_t (*tx_planes_sum_loop)(const uint8_t *bytes, int64_t n);

/* Encodes n symbols: writes words from `to` on, and TX_RANS_LANES states. Returns where the words end; NULL if that
 * would be less than TX_RANS_ROW_BYTES before `limit`. Bytes between the end and `limit` may be overwritten. */
#define TX_RANS_ROW_BYTES (2 * TX_RANS_LANES + 32)
typedef uint8_t *(*tx_rans_encode_loop)(const tx_rans_encoder *encoder, uint32_t *states, const uint8_t *symbols,
                                        int64_t n, uint8_t *to, const uint8_t *limit);
/* Decodes n symbols from the words and the states that encoding ended with, each in
 * [TX_RANS_LEAST, TX_RANS_LEAST << 16). Reads up to 32 bytes from `end` on, too, without using them. Returns 0 if the
 * words and states are not those of n symbols. */
typedef int (*tx_rans_decode_loop)(const tx_rans_decoder *decoder, uint32_t *states, const uint8_t *begin,
                                   const uint8_t *end, int64_t n, uint8_t *symbols);

#endif
