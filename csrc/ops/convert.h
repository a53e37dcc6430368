/* Conversion between any two forms of forms.def, for casts, packing and unpacking. */
#ifndef TX_OPS_CONVERT_H
#define TX_OPS_CONVERT_H

#include "csrc/cpu/kernels.h"
#include "csrc/ops/check.h"

/* A run of elements in some form. scales: the scale of its first block; NULL for a form without scales. */
typedef struct tx_run {
  int form;
  void *data;
  uint8_t *scales;
} tx_run;

/* The run that begins at element `begin` of a tensor, a multiple of TX_BLOCK if the form is scaled. */
tx_run tx_run_at(int form, tx_tensor tensor, tx_tensor scales, int64_t begin);

/* Converts n elements. noise: that of the first one. Runs of the same form are copied bit for bit. */
void tx_convert(const tx_kernels *kernels, tx_run from, tx_run to, int64_t n, tx_noise noise, int32_t rounding);

/* Writes n zeros, encoded as tx_convert would. */
void tx_convert_zeros(const tx_kernels *kernels, tx_run to, int64_t n);

#endif
