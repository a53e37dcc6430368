/* Access to the tensors of a call. Elements need no alignment, so single values are read and written with memcpy. */
#ifndef TX_OPS_TENSOR_H
#define TX_OPS_TENSOR_H

#include <string.h>

#include "csrc/core/forms.h"
#include "csrc/ops/check.h"

static inline tx_tensor tx_none(void) {
  return (tx_tensor){NULL, 0, TX_NONE, 0};
}

/* Entry i of a list that may be NULL. */
static inline tx_tensor tx_at_or_none(const tx_tensor *tensors, int64_t i) {
  return tensors ? tensors[i] : tx_none();
}

/* The form of a tensor (forms.def); -1 if there is none. */
static inline int tx_form_of(tx_tensor tensor, tx_tensor scales, tx_format format) {
  return scales.numel ? tx_form_scaled(tensor.dtype, format) : tx_form_plain(tensor.dtype);
}

/* Row i of a table that may be NULL. */
static inline tx_meta tx_meta_of(const tx_meta *meta, int64_t i) {
  return meta ? meta[i] : (tx_meta){i, 0, 0};
}

/* The index of element `begin` in the logical parameter, for rounding thresholds. Modulo 2^64, since any start is
 * legal. */
static inline int64_t tx_element_at(tx_meta meta, int64_t begin) {
  return (int64_t)((uint64_t)meta.start + (uint64_t)begin);
}

/* The address of element `begin`; NULL if the tensor is none. */
static inline void *tx_advanced(tx_tensor tensor, int64_t begin) {
  return tensor.numel ? (char *)tensor.data + begin * tx_element_size(tensor.dtype) : NULL;
}

static inline int64_t tx_get_i64(tx_tensor tensor, int64_t i) {
  int64_t value;
  memcpy(&value, (const char *)tensor.data + i * (int64_t)sizeof value, sizeof value);
  return value;
}

static inline void tx_set_i64(tx_tensor tensor, int64_t i, int64_t value) {
  memcpy((char *)tensor.data + i * (int64_t)sizeof value, &value, sizeof value);
}

/* count + by, for by >= 0, saturating; count may be any number. */
static inline int64_t tx_counted(int64_t count, int64_t by) {
  int64_t sum;
  return __builtin_add_overflow(count, by, &sum) ? INT64_MAX : sum;
}

/* Adds to entry i of a tensor of counts. */
static inline void tx_add_count(tx_tensor counts, int64_t i, int64_t by) {
  tx_set_i64(counts, i, tx_counted(tx_get_i64(counts, i), by));
}

static inline float tx_get_f32(tx_tensor tensor, float otherwise) {
  float value = otherwise;
  if (tensor.numel) memcpy(&value, tensor.data, sizeof value);
  return value;
}

/* Writes a value to a tensor of one element, F32 or F64; does nothing if it is none. */
static inline void tx_set_float(tx_tensor tensor, double value) {
  if (!tensor.numel) return;
  const float narrow = (float)value;
  if (tensor.dtype == TX_F64) {
    memcpy(tensor.data, &value, sizeof value);
  } else {
    memcpy(tensor.data, &narrow, sizeof narrow);
  }
}

/* The learning rate of a group. Reads a.lrs, which must be in host memory. */
static inline double tx_lr_of(const tx_adamw_args *a, int64_t group) {
  if (!a->lrs) return a->groups[group].lr;
  if (a->lrs[group].dtype == TX_F32) return (double)tx_get_f32(a->lrs[group], 0.0f);
  double lr;
  memcpy(&lr, a->lrs[group].data, sizeof lr);
  return lr;
}

/* TX_NONE: parameter i has no master. */
static inline tx_dtype tx_master_dtype(const tx_adamw_args *a, int64_t i) {
  const tx_tensor master = tx_at_or_none(a->masters, i);
  return master.numel ? master.dtype : TX_NONE;
}

#endif
