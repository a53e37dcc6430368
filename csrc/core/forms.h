/* The numbers of the forms of forms.def. */
#ifndef TX_CORE_FORMS_H
#define TX_CORE_FORMS_H

#include "csrc/core/forms.def"
#include "csrc/torch_ext.h"

/* The form of a dtype without block scales; -1: there is none. */
static inline int tx_form_plain(tx_dtype dtype) {
#define TX_FORM_MATCH_(index, name, ...) \
  if (dtype == TX_##name) return index;
  TX_FOR_EACH_PLAIN(TX_FORM_MATCH_)
#undef TX_FORM_MATCH_
  return -1;
}

/* The form of a dtype with block scales; -1: there is none. */
static inline int tx_form_scaled(tx_dtype dtype, tx_format format) {
#define TX_FORM_MATCH_(index, name, format_name, ...) \
  if (dtype == TX_##name && format == TX_FORMAT_##format_name) return index;
  TX_FOR_EACH_SCALED(TX_FORM_MATCH_)
#undef TX_FORM_MATCH_
  return -1;
}

static inline int tx_form_is_scaled(int form) {
  return form >= TX_PLAINS;
}

#endif
