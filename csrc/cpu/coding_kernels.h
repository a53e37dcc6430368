/* The table of the loops of one instruction set that encode and decode deltas and planes. libtorch_ext_delta.so has
 * only these; the others are in kernels.h. coding_kernels_isa.c fills in one for each row of isa.def. */
#ifndef TX_CPU_CODING_KERNELS_H
#define TX_CPU_CODING_KERNELS_H

#include "csrc/cpu/delta_loops.h"
#include "csrc/cpu/kernels.h"
#include "csrc/cpu/planes_loops.h"

typedef struct tx_coding_kernels {
  tx_checksum_loop checksum;
  tx_delta_encode_loop delta_encode;
  tx_delta_decode_loop delta_decode;
  tx_delta_ones_loop delta_ones;
  tx_delta_round_loop delta_round;
  tx_delta_differ_loop delta_differ;
  tx_split_loop split[3]; /* by log2 of the bytes of a value */
  tx_merge_loop merge[3];
  tx_count_bytes_loop count_bytes;
  tx_range_of_bytes_loop range_of_bytes;
  tx_planes_sum_loop planes_sum;
  tx_rans_encode_loop rans_encode;
  tx_rans_decode_loop rans_decode;
} tx_coding_kernels;

/* The table in use; never NULL. */
const tx_coding_kernels *tx_coding_kernels_selected(void);

#endif
