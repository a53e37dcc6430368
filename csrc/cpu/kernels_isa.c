/* Every loop, for one instruction set: the build compiles this file once per row of isa.def with -DTX_ISA=<name> and
 * the flags of bazel/isa.bzl. Nothing here differs between them but what the compiler makes of it. */
#include "csrc/cpu/kernels.h"
#include "csrc/cpu/loop_adamw.h"
#include "csrc/cpu/loop_cast.h"
#include "csrc/cpu/loop_checksum.h"
#include "csrc/cpu/loop_compress.h"
#include "csrc/cpu/loop_delta.h"
#include "csrc/cpu/loop_master.h"
#include "csrc/cpu/loop_muon.h"
#include "csrc/cpu/loop_planes.h"
#include "csrc/cpu/loop_reduce.h"
#include "csrc/cpu/loop_stats.h"

#define TX_JOIN_(a, b) a##b
#define TX_JOIN(a, b) TX_JOIN_(a, b)
#define TX_QUOTE_(name) #name
#define TX_QUOTE(name) TX_QUOTE_(name)

const tx_kernels TX_JOIN(tx_kernels_, TX_ISA) = {
    .name = TX_QUOTE(TX_ISA),
    .adamw = tx_adamw_run,
    .load = {TX_LOAD_LOOPS},
    .store = {TX_STORE_LOOPS},
    .stats = {TX_STATS_LOOPS},
    .reduce = {TX_REDUCE_LOOPS},
    .encode_master = tx_encode_loop,
    .decode_master = tx_decode_loop,
    .resync = {TX_RESYNC_LOOPS},
    .checksum = tx_checksum_run,
    .sample = tx_sample_run,
    .compress = tx_compress_run,
    .expand = tx_expand_run,
    .split = {tx_split_1, tx_split_2, tx_split_4},
    .merge = {tx_merge_1, tx_merge_2, tx_merge_4},
    .count_bytes = tx_count_bytes_run,
    .range_of_bytes = tx_range_of_bytes_run,
    .planes_sum = tx_planes_sum_run,
    .rans_encode = tx_rans_encode_run,
    .rans_decode = tx_rans_decode_run,
    .muon_momentum = tx_muon_momentum_run,
    .muon_update = tx_muon_update_run,
    .delta_encode = tx_delta_encode_run,
    .delta_decode = tx_delta_decode_run,
    .delta_ones = tx_delta_ones_run,
    .delta_differ = tx_delta_differ_run,
};
