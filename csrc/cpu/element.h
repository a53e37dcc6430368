/* Reads and writes single elements of a dtype known at compile time; the loops are built on it. Tensors may be aligned
 * to one byte only, so the element types say so, and they may alias anything. */
#ifndef TX_CPU_ELEMENT_H
#define TX_CPU_ELEMENT_H

#include <stdint.h>

#include "csrc/math/numeric.h"
#include "csrc/torch_ext.h"

typedef float tx_mem_f32 __attribute__((aligned(1), may_alias));
typedef uint16_t tx_mem_u16 __attribute__((aligned(1), may_alias));
typedef uint32_t tx_mem_u32 __attribute__((aligned(1), may_alias));

/* Put before a loop whose iterations do not depend on each other through memory, which the compiler cannot know. clang
 * warns where it does not vectorise such a loop, which is everywhere without -O2. */
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpass-failed"
#define TX_NO_ALIASES _Pragma("clang loop vectorize(assume_safety)")
#else
#define TX_NO_ALIASES _Pragma("GCC ivdep")
#endif

/* Element i of p as fp32; exact for every dtype. */
TX_FN float tx_load(const void *p, int64_t i, const tx_dtype dtype) {
  switch (dtype) {
    case TX_F32:
      return ((const tx_mem_f32 *)p)[i];
    case TX_BF16:
      return tx_f32_from_bf16(((const tx_mem_u16 *)p)[i]);
    case TX_F16:
      return tx_f32_from_f16(((const tx_mem_u16 *)p)[i]);
    default:
      __builtin_unreachable();
  }
}

/* Stores x rounded to nearest even. */
TX_FN void tx_store(void *p, int64_t i, const tx_dtype dtype, float x) {
  switch (dtype) {
    case TX_F32:
      ((tx_mem_f32 *)p)[i] = x;
      break;
    case TX_BF16:
      ((tx_mem_u16 *)p)[i] = tx_bf16_from_f32(x);
      break;
    case TX_F16:
      ((tx_mem_u16 *)p)[i] = tx_f16_from_f32(x);
      break;
    default:
      __builtin_unreachable();
  }
}

/* Stores x rounded by threshold u (numeric.h). */
TX_FN void tx_store_threshold(void *p, int64_t i, const tx_dtype dtype, float x, uint32_t u) {
  switch (dtype) {
    case TX_F32:
      ((tx_mem_f32 *)p)[i] = x;
      break;
    case TX_BF16:
      ((tx_mem_u16 *)p)[i] = tx_bf16_round(x, u);
      break;
    case TX_F16:
      ((tx_mem_u16 *)p)[i] = tx_f16_round(x, u);
      break;
    default:
      __builtin_unreachable();
  }
}

#endif
