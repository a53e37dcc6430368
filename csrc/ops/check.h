/* Checks that operators make before they write. Messages name the argument and the index. */
#ifndef TX_OPS_CHECK_H
#define TX_OPS_CHECK_H

#include "csrc/torch_ext.h"

/* An argument of a call: a list of tensors (or a single tensor, n = 1), and whether the call writes it. */
typedef struct tx_span {
  const char *name;
  const tx_tensor *tensors; /* NULL: the list is absent */
  int64_t n;
  int writes;
} tx_span;

/* Checks for every tensor: numel >= 0, data not NULL unless numel is 0, dtype known. */
tx_status tx_check_tensors(const tx_span *spans, int64_t n_spans, tx_error *error);

/* Checks that no byte is written through two tensors, or written through one and read through another. O(n log n) at
 * worst, O(n) if lists are in address order. */
tx_status tx_check_overlap(const tx_span *spans, int64_t n_spans, tx_error *error);

/* Bytes [begin, end) of memory. */
typedef struct tx_memory_range {
  uintptr_t begin, end;
} tx_memory_range;

/* Puts the memory that is written into `ranges`, ascending, neighbours that touch as one. The lists must have passed
 * tx_check_overlap. Returns how many there are; -1 if there is no room for them, or no memory to sort them. */
int64_t tx_written_ranges(const tx_span *spans, int64_t n_spans, tx_memory_range *ranges, int64_t room);

/* tx_check_overlap without one entry of a list; NULL: with all. */
tx_status tx_check_overlap_but(const tx_span *spans, int64_t n_spans, const tx_tensor *left_out, tx_error *error);

/* Checks that a list is not NULL unless n is 0. */
tx_status tx_check_present(const char *name, const void *list, int64_t n, tx_error *error);

/* Checks that `tensor` is none, or has exactly `numel` elements of `dtype`. required: it must not be none. */
tx_status tx_check_fixed(const char *name, tx_tensor tensor, tx_dtype dtype, int64_t numel, int required,
                         tx_error *error);

/* Checks that a[i].numel == b[i].numel for all i; messages name both. */
tx_status tx_check_same_numel(const char *a_name, const tx_tensor *a, const char *b_name, const tx_tensor *b, int64_t n,
                              tx_error *error);

/* Checks that each tensor that has elements is F32, BF16 or F16. */
tx_status tx_check_plain(const char *name, const tx_tensor *tensors, int64_t n, tx_error *error);

/* Checks wire data: plain, or U8 in TX_FORMAT_SIGNED with one uint8 scale per block. An empty tensor may have any
 * dtype. index < 0: a single tensor, messages without an index. */
tx_status tx_check_wire(const char *name, const char *scales_name, int64_t index, tx_tensor tensor, tx_tensor scales,
                        tx_error *error);

/* Checks that parallel is NULL, or a struct of the right size that has a `run` if it has more than one thread. */
tx_status tx_check_parallel(const tx_parallel *parallel, tx_error *error);

/* Checks a rounding: 0 nearest, 1 dithered, 2 stochastic. */
tx_status tx_check_rounding(const char *name, int32_t rounding, tx_error *error);

/* Bytes per element of a dtype that operators take; 0 for any other dtype. */
int64_t tx_element_size(tx_dtype dtype);

static inline int64_t tx_blocks(int64_t numel) {
  return (numel + TX_BLOCK - 1) / TX_BLOCK;
}

#endif
