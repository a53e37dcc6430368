/* Converts runs of elements from any form (forms.def) to any other, many runs in one launch. Casts, packing and
 * unpacking are built on it. */
#ifndef TX_CUDA_CONVERSIONS_H
#define TX_CUDA_CONVERSIONS_H

extern "C" {
#include "csrc/core/forms.h"
}
#include "cuda/launch.h"
#include "cuda/vector_forms.h"

/* A form in addition to those of forms.def: zeros, which have no memory. */
#define TX_FORM_ZEROS TX_FORMS

/* A run of numel elements. Elements from `given` on become zeros: the padding of a last block. If both forms are the
 * same, bits are copied. */
typedef struct tx_conversion {
  int64_t numel;
  int64_t given;
  const void *from;
  void *to;
  const uint8_t *from_scales; /* of the run's first block; NULL if the form has no scales; likewise to_scales */
  uint8_t *to_scales;
  tx_noise noise; /* of the run's first element */
  uint8_t from_form, to_form;
  uint8_t from_alignment, to_alignment; /* filled in by tx_convert_add */
} tx_conversion;

typedef struct tx_convert_common {
  int32_t rounding;
} tx_convert_common;
typedef tx_table<tx_convert_common, tx_conversion> tx_convert_table;

/* For a call: tx_convert_begin, tx_convert_add for each run, tx_convert_end. A full table is launched by
 * tx_convert_add. */
void tx_convert_begin(tx_convert_table *table, int32_t rounding);
tx_status tx_convert_add(const tx_cuda_scope *scope, tx_convert_table *table, tx_conversion run, const char *name,
                         tx_error *error);
tx_status tx_convert_end(const tx_cuda_scope *scope, const tx_convert_table *table, const char *name, tx_error *error);

/* Bytes of an element; 0 for TX_FORM_ZEROS. */
TX_FN int tx_form_bytes(int form) {
#define TX_FORM_BYTES_(index, name, ...) \
  if (form == index) return TX_##name == TX_F32 ? 4 : TX_##name == TX_U8 ? 1 : 2;
  TX_FOR_EACH_PLAIN(TX_FORM_BYTES_)
  TX_FOR_EACH_SCALED(TX_FORM_BYTES_)
#undef TX_FORM_BYTES_
  return 0;
}

#endif
