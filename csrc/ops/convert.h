/* From any form of forms.def to any other: what casts, packing and unpacking are made of. */
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

#endif
