/* What the bytes of a rank are added up from (tx_memory_plan). Sums that int64 does not hold stay at INT64_MAX, which
 * is noticed once, at the end. */
#ifndef TX_CORE_MEMORY_PARTS_H
#define TX_CORE_MEMORY_PARTS_H

#include "csrc/torch_ext_advanced.h"

/* sum + count * bytes, for what is not negative. */
int64_t tx_memory_add(int64_t sum, int64_t count, int64_t bytes);

/* How many parts of so many it is, the last one begun counting as one. */
int64_t tx_memory_parts_of(int64_t count, int64_t size);

/* 0 for TX_NONE. */
int64_t tx_memory_size_of(int32_t dtype);

/* Whether moments in this dtype have block scales. */
int tx_memory_is_scaled(int32_t dtype);

/* The first parameter of a buffer, whose dtypes are those of all; -1: none is there. */
int64_t tx_memory_first_in(const tx_memory_args *args, int64_t buffer);

/* Refuses arguments that are not legal; all below is for legal ones. */
tx_status tx_memory_check(const tx_memory_args *args, const tx_memory *memory, tx_error *error);

/* Adds what of a buffer stays. */
tx_status tx_memory_add_buffer(const tx_memory_args *args, int64_t buffer, tx_memory *memory, tx_error *error);

/* What a publisher keeps. */
int64_t tx_memory_changes(const tx_memory_args *args);

/* The most that buckets or units on their way take. */
int64_t tx_memory_transient(const tx_memory_args *args);

#endif
