/* Whether there are loops for AVX-512 beside the plain ones, and what stands in their place where there are none.
 * Included by step_moments.h. */
#ifndef TX_CPU_STEP_AVX512_H
#define TX_CPU_STEP_AVX512_H

#include "csrc/cpu/step_streams.h"

#if defined(__AVX512BW__) && defined(__AVX512DQ__)
#define TX_HAS_AVX512 1
#include "csrc/cpu/avx512_block.h"
#else
#define TX_HAS_AVX512 0
/* Other loops have nothing to keep from one block to the next. */
typedef struct tx_measured_blocks {
  char none;
} tx_measured_blocks;
TX_FN void tx_measured_begin(tx_measured_blocks *m) {
  (void)m;
}
TX_FN void tx_measured_end(tx_measured_blocks *m, int64_t *row) {
  (void)m, (void)row;
}
#endif

#endif
