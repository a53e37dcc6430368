/* Lookups of dtypes in the lists of combos.def. */
#ifndef TX_CORE_COMBOS_H
#define TX_CORE_COMBOS_H

#include "csrc/core/combos.def"
#include "csrc/torch_ext.h"

/* Return the index in the list; -1: not in it. */
#define TX_COMBO_MATCH_(index, name, value) \
  if ((value) == TX_##name) return index;
static inline int tx_combo_grad(tx_dtype grad) {
  TX_FOR_EACH_GRAD(TX_COMBO_MATCH_, grad)
  return -1;
}
static inline int tx_combo_moment(tx_dtype moment) {
  TX_FOR_EACH_MOMENT(TX_COMBO_MATCH_, moment)
  return -1;
}
#undef TX_COMBO_MATCH_

/* master: TX_NONE if there is none. */
#define TX_COMBO_MATCH_(index, param_name, master_name, param, master) \
  if ((param) == TX_##param_name && (master) == TX_##master_name) return index;
static inline int tx_combo_weight(tx_dtype param, tx_dtype master) {
  TX_FOR_EACH_WEIGHT(TX_COMBO_MATCH_, param, master)
  return -1;
}
#undef TX_COMBO_MATCH_

/* F16 and U8 moments carry block scales. */
static inline int tx_moment_is_scaled(tx_dtype moment) {
  return moment == TX_F16 || moment == TX_U8;
}

#endif
