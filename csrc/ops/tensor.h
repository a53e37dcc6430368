/* Looking into the tensors of a call. Elements have no alignment, so single values move through memcpy. */
#ifndef TX_OPS_TENSOR_H
#define TX_OPS_TENSOR_H

#include <string.h>

#include "csrc/ops/check.h"

static inline tx_tensor tx_none(void) {
  return (tx_tensor){NULL, 0, TX_NONE, 0};
}

/* Entry i of a list that may be absent. */
static inline tx_tensor tx_at_or_none(const tx_tensor *tensors, int64_t i) {
  return tensors ? tensors[i] : tx_none();
}

/* Row i of a table that may be absent. */
static inline tx_meta tx_meta_of(const tx_meta *meta, int64_t i) {
  return meta ? meta[i] : (tx_meta){i, 0, 0};
}

/* Address of element `begin`; NULL for none. */
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

static inline float tx_get_f32(tx_tensor tensor, float otherwise) {
  float value = otherwise;
  if (tensor.numel) memcpy(&value, tensor.data, sizeof value);
  return value;
}

/* One value into a tensor of one element, F32 or F64; nothing where it is none. */
static inline void tx_set_float(tx_tensor tensor, double value) {
  if (!tensor.numel) return;
  const float narrow = (float)value;
  if (tensor.dtype == TX_F64) {
    memcpy(tensor.data, &value, sizeof value);
  } else {
    memcpy(tensor.data, &narrow, sizeof narrow);
  }
}

#endif
