/* Detection of external writes to weights with masters, on the device. */
#ifndef TX_CUDA_EXTERNAL_WRITES_NOTES_H
#define TX_CUDA_EXTERNAL_WRITES_NOTES_H

#include "cuda/adamw_table.h"

/* A call's workspace, zeroed on the stream; two arrays of n int64. */
struct tx_external_notes {
  unsigned long long *counts;  /* elements that no longer agree with their masters */
  unsigned long long *suspect; /* not 0 if the checksum of one of the parameter's samples differs */
};

/* tx_external_check_workspace returns TX_ERROR_INVALID_ARGUMENT, naming both sizes, if the workspace is missing, too
 * small or not aligned. what: the operation that needs it, for the message. */
tx_status tx_external_check_workspace(const tx_cuda_call *call, int64_t n, const char *what, tx_error *error);
tx_status tx_external_notes_begin(const tx_cuda_scope *scope, const tx_cuda_call *call, int64_t n,
                                  tx_external_notes *notes, tx_error *error);

/* Lists of n tensors as for tx_master_checksum; entries without checksums are ignored. */
struct tx_external_lists {
  int64_t n;
  const tx_tensor *params, *masters, *checksums;
};

/* Whether parameter i has checksums and a master of dtype `master`. */
static inline bool tx_external_has(const tx_external_lists &lists, int64_t i, tx_dtype master) {
  return lists.checksums && lists.masters && lists.checksums[i].numel > 0 && lists.masters[i].dtype == master;
}
bool tx_external_has_any(const tx_external_lists &lists, tx_dtype master);

/* Processes the samples of parameters with fp32 masters: marks those with a differing checksum as suspects, or
 * (TX_CHECKSUM_RENEW) renews the checksums. */
tx_status tx_external_compare_samples(const tx_cuda_scope *scope, const tx_external_lists &lists,
                                      const tx_external_notes *notes, int32_t mode, tx_error *error);
/* Processes the checksums of weights with remainders. counts: int64, added to; one for each parameter [n], or
 * (each = 0) one for all; NULL: not wanted. */
tx_status tx_external_compare_remainders(const tx_cuda_scope *scope, const tx_external_lists &lists,
                                         unsigned long long *counts, int32_t each, int32_t mode, tx_error *error);

/* The kernel of tx_master_resync. suspect: [n], parameters for which it is 0 are left out; NULL: none is left out.
 * counts: one for each parameter [n], or (each = 0) one for all; NULL: not wanted. */
tx_status tx_resync_masters(const tx_cuda_scope *scope, int64_t n, const tx_tensor *params, const tx_tensor *masters,
                            int32_t mode, const unsigned long long *suspect, unsigned long long *counts, int32_t each,
                            tx_error *error);

/* The work of tx_master_checksum. stale, each: like counts and each above. */
tx_status tx_external_checksum(const tx_cuda_scope *scope, const tx_external_lists &lists, int32_t mode,
                               unsigned long long *stale, int32_t each, const tx_cuda_call *call, tx_error *error);

/* TX_EXTERNAL_CHECK: compares everything, waits for the device and reports what was found. Not allowed on a stream that
 * is being captured. */
tx_status tx_external_refuse_written(const tx_cuda_scope *scope, const tx_external_lists &lists,
                                     const tx_cuda_call *call, tx_error *error);

#endif
