/* The checks that each operator of torch_ext.h makes before it writes anything, whichever back end runs it. They do not
 * read the memory of tensors unless a parameter says so. `error` may be NULL. */
#ifndef TX_OPS_OPERATOR_CHECKS_H
#define TX_OPS_OPERATOR_CHECKS_H

#include "csrc/torch_ext.h"

/* reads_values: 1: steps and lrs are in host memory, and their values are checked too. 0: they are on a device. */
tx_status tx_check_adamw(const tx_adamw_args *args, int reads_values, tx_error *error);

tx_status tx_check_grad_stats(int64_t n, const tx_tensor *grads, tx_tensor stats, tx_tensor first_bad, tx_error *error);
tx_status tx_check_grad_norm(tx_tensor stats, tx_tensor grad_scale, double max_norm, tx_tensor norm,
                             tx_tensor clip_coef, tx_tensor found_inf, tx_error *error);

tx_status tx_check_bucket_pack(const tx_bucket_pack_args *args, tx_error *error);
tx_status tx_check_bucket_accumulate(int64_t n, const tx_tensor *main_grads, const tx_tensor *grads, tx_error *error);
tx_status tx_check_bucket_reduce(const tx_bucket_reduce_args *args, tx_error *error);
tx_status tx_check_bucket_unpack(tx_tensor bucket, tx_tensor scales, int64_t n, const int64_t *offsets,
                                 const tx_tensor *tensors, tx_error *error);

tx_status tx_check_cast(const tx_cast_args *args, tx_error *error);

/* reads_values: 1: steps are in host memory, and their values are checked too. */
tx_status tx_check_muon_momentum(const tx_muon_momentum_args *args, int reads_values, tx_error *error);
tx_status tx_check_muon_update(const tx_muon_update_args *args, int reads_values, tx_error *error);
tx_status tx_check_muon_mirror(tx_tensor square, int64_t n, int64_t panel, tx_error *error);

tx_status tx_check_master_encode(int64_t n, const tx_tensor *masters, const tx_tensor *params,
                                 const tx_tensor *remainders, tx_error *error);
tx_status tx_check_master_decode(int64_t n, const tx_tensor *params, const tx_tensor *remainders,
                                 const tx_tensor *masters, tx_error *error);
tx_status tx_check_master_resync(int64_t n, const tx_tensor *params, const tx_tensor *masters, int32_t mode,
                                 tx_tensor changed, tx_error *error);
tx_status tx_check_master_checksum(int64_t n, const tx_tensor *params, const tx_tensor *masters,
                                   const tx_tensor *checksums, int32_t mode, tx_tensor stale, tx_error *error);

/* Checks that a step in host memory is a whole number below 2^24. */
tx_status tx_check_step_value(tx_tensor step, int64_t i, tx_error *error);

/* Checks that a number is a tx_external_write. */
tx_status tx_check_external(const char *name, int32_t on_external_write, tx_error *error);

/* Checks that parameter i has no checksums, or as many as its master requires. */
tx_status tx_check_checksums(const tx_tensor *masters, const tx_tensor *checksums, int64_t i, tx_error *error);

/* Fails with TX_ERROR_BAD_STATE: TX_EXTERNAL_CHECK found `stale` elements of parameter i that were written from
 * outside. */
tx_status tx_fail_written(int64_t i, int64_t stale, tx_error *error);

#endif
