// The AdamW step of one element, from the functions of csrc/math/adamw.h that work for any constants.
#ifndef TESTS_CORE_ADAMW_ELEMENT_H
#define TESTS_CORE_ADAMW_ELEMENT_H

#include "csrc/math/adamw.h"

struct Stepped {
  float p, m, v, root;
};

inline Stepped Element(tx_adamw_constants c, float grad, float p, float m, float v) {
  const tx_adamw_moments r = tx_adamw_average(c, grad, p, m, v);
  return {tx_adamw_update(c, p, r.m, r.root), r.m, r.v, r.root};
}

#endif
