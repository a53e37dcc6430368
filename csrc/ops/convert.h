/* From any form of forms.def to any other: what casts, packing and unpacking are made of, and what they accept. */
#ifndef TX_OPS_CONVERT_H
#define TX_OPS_CONVERT_H

#include "csrc/cpu/kernels.h"
#include "csrc/ops/check.h"

/* A run of elements in some form; scales is NULL where the form has none, else the byte of the run's first block. */
typedef struct tx_run {
  int form;
  void *data;
  uint8_t *scales;
} tx_run;

/* The run that begins `begin` elements into a tensor; a multiple of TX_BLOCK where it is scaled. */
tx_run tx_run_at(int form, tx_tensor tensor, tx_tensor scales, int64_t begin);

/* n elements; noise: of the first one. Runs of the same form are copied as they are. */
void tx_convert(const tx_kernels *kernels, tx_run from, tx_run to, int64_t n, tx_noise noise, int32_t rounding);

/* n zeros, encoded as tx_convert would. */
void tx_convert_zeros(const tx_kernels *kernels, tx_run to, int64_t n);

/* The list is not absent, unless n is 0. */
tx_status tx_check_present(const char *name, const void *list, int64_t n, tx_error *error);

/* Each tensor that has elements is F32, BF16 or F16. */
tx_status tx_check_plain(const char *name, const tx_tensor *tensors, int64_t n, tx_error *error);

/* A tensor whose scales are given (none: it must be plain) has a form, and one uint8 of scale per block. An empty one
 * is fine in any dtype. index < 0: a single tensor, messages without an index. tx_check_wire is for data that travels:
 * plain, or U8 in TX_FORMAT_SIGNED. */
tx_status tx_check_form(const char *name, const char *scales_name, int64_t index, tx_tensor tensor, tx_tensor scales,
                        tx_format format, tx_error *error);
tx_status tx_check_wire(const char *name, const char *scales_name, int64_t index, tx_tensor tensor, tx_tensor scales,
                        tx_error *error);

/* The form itself; -1: there is none. */
static inline int tx_form_of(tx_tensor tensor, tx_tensor scales, tx_format format) {
  return scales.numel ? tx_form_scaled(tensor.dtype, format) : tx_form_plain(tensor.dtype);
}

#endif
