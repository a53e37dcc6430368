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

/* The form of name[i] given its scales (none: a plain form), which must be one uint8 per block. An empty tensor is fine
 * in any dtype: *form is then 0. index < 0: a single tensor, messages without an index. */
tx_status tx_check_form(const char *name, const char *scales_name, int64_t index, tx_tensor tensor, tx_tensor scales,
                        tx_format format, int *form, tx_error *error);

#endif
