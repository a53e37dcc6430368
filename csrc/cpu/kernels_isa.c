/* All loops except those that encode and decode, for one instruction set. The build compiles this file once for each
 * row of isa.def with -DTX_ISA=<name> and the flags of bazel/isa.bzl; only the compiler's output differs. */
#include "csrc/cpu/isa.h"
#include "csrc/cpu/kernels.h"
#include "csrc/cpu/loop_adamw.h"
#include "csrc/cpu/loop_cast.h"
#include "csrc/cpu/loop_checksum.h"
#include "csrc/cpu/loop_compress.h"
#include "csrc/cpu/loop_master.h"
#include "csrc/cpu/loop_muon.h"
#include "csrc/cpu/loop_reduce.h"
#include "csrc/cpu/loop_sample.h"
#include "csrc/cpu/loop_stats.h"

const tx_kernels TX_OF_ISA(tx_kernels_) = {
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
    .muon_momentum = tx_muon_momentum_run,
    .muon_update = tx_muon_update_run,
};
