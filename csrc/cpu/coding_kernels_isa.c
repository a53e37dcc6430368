/* The loops that encode and decode, for one instruction set; the others are in kernels_isa.c. */
#include "csrc/cpu/coding_kernels.h"
#include "csrc/cpu/isa.h"
#include "csrc/cpu/loop_checksum.h"
#include "csrc/cpu/loop_delta.h"
#include "csrc/cpu/loop_planes.h"

const tx_coding_kernels TX_OF_ISA(tx_coding_kernels_) = {
    .checksum = tx_checksum_run,
    .delta_encode = tx_delta_encode_run,
    .delta_decode = tx_delta_decode_run,
    .delta_ones = tx_delta_ones_run,
    .delta_round = tx_delta_round_run,
    .delta_differ = tx_delta_differ_run,
    .split = {tx_split_1, tx_split_2, tx_split_4},
    .merge = {tx_merge_1, tx_merge_2, tx_merge_4},
    .count_bytes = tx_count_bytes_run,
    .range_of_bytes = tx_range_of_bytes_run,
    .planes_sum = tx_planes_sum_run,
    .rans_encode = tx_rans_encode_run,
    .rans_decode = tx_rans_decode_run,
};
