/* Whether there are AVX-512 loops in addition to the plain ones, and stubs if not. Included by step_moments.h. */
#ifndef TX_CPU_STEP_AVX512_H
#define TX_CPU_STEP_AVX512_H

#include "csrc/cpu/step_streams.h"

#if defined(__AVX512BW__) && defined(__AVX512DQ__)
#define TX_HAS_AVX512 1
#include "csrc/cpu/avx512_block.h"
#else
#define TX_HAS_AVX512 0
/* Plain loops keep nothing from one block to the next. */
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
