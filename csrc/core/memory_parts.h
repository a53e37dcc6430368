/* The parts of tx_memory_plan. A sum that overflows int64 saturates at INT64_MAX, which is checked once, at the end. */
#ifndef TX_CORE_MEMORY_PARTS_H
#define TX_CORE_MEMORY_PARTS_H

#include "csrc/torch_ext_advanced.h"

/* sum + count * bytes, saturating, for numbers >= 0. */
int64_t tx_memory_add(int64_t sum, int64_t count, int64_t bytes);

/* count / size, rounded up. */
int64_t tx_memory_parts_of(int64_t count, int64_t size);

/* Bytes per element; 0 for TX_NONE. */
int64_t tx_memory_size_of(int32_t dtype);

/* Whether moments in this dtype have block scales. */
int tx_memory_is_scaled(int32_t dtype);

/* The first parameter of a buffer, all of which have the same dtypes; -1 if there is none. */
int64_t tx_memory_first_in(const tx_memory_args *args, int64_t buffer);

/* Rejects illegal arguments; all functions below require legal ones. */
tx_status tx_memory_check(const tx_memory_args *args, const tx_memory *memory, tx_error *error);

/* Adds the persistent bytes of a buffer: weights, gradients, states. */
tx_status tx_memory_add_buffer(const tx_memory_args *args, int64_t buffer, tx_memory *memory, tx_error *error);

/* Bytes that a publisher of weights keeps. */
int64_t tx_memory_changes(const tx_memory_args *args);

/* The most bytes that buckets or units take while they are exchanged. */
int64_t tx_memory_transient(const tx_memory_args *args);

#endif
