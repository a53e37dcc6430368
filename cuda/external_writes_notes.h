/* Whether somebody else wrote to weights beside masters, on the device. */
#ifndef TX_CUDA_EXTERNAL_WRITES_NOTES_H
#define TX_CUDA_EXTERNAL_WRITES_NOTES_H

#include "cuda/adamw_table.h"

/* A call's workspace, zeroed on the stream: int64 [n] each. */
struct tx_external_notes {
  unsigned long long *counts;  /* elements that stray */
  unsigned long long *suspect; /* not 0 where a sample is another */
};

/* TX_ERROR_INVALID_ARGUMENT, naming both sizes, where the workspace is missing, too small or not aligned. `what` needs
 * it. */
tx_status tx_external_check_workspace(const tx_cuda_call *call, int64_t n, const char *what, tx_error *error);
tx_status tx_external_notes_begin(const tx_cuda_scope *scope, const tx_cuda_call *call, int64_t n,
                                  tx_external_notes *notes, tx_error *error);

/* Lists of n tensors, as tx_master_checksum takes them; entries without checksums are passed over. */
struct tx_external_lists {
  int64_t n;
  const tx_tensor *params, *masters, *checksums;
};

/* Whether parameter i has checksums beside a master of `master`. */
static inline bool tx_external_has(const tx_external_lists &lists, int64_t i, tx_dtype master) {
  return lists.checksums && lists.masters && lists.checksums[i].numel > 0 && lists.masters[i].dtype == master;
}
bool tx_external_has_any(const tx_external_lists &lists, tx_dtype master);

/* Samples beside fp32 masters: suspects become those of which one is another, or (TX_CHECKSUM_RENEW) the checksums
 * become theirs. */
tx_status tx_external_look_at_samples(const tx_cuda_scope *scope, const tx_external_lists &lists,
                                      const tx_external_notes *notes, int32_t mode, tx_error *error);
/* Checksums beside remainders. counts: int64, added to: of each parameter [n], or (each = 0) of all together; NULL:
 * nobody counts. */
tx_status tx_external_look_at_remainders(const tx_cuda_scope *scope, const tx_external_lists &lists,
                                         unsigned long long *counts, int32_t each, int32_t mode, tx_error *error);

/* tx_master_resync's pass. suspect: [n], parameters where it is 0 are passed over; NULL: none is. counts: of each
 * parameter [n], or (each = 0) of all together; NULL: nobody counts. */
tx_status tx_resync_masters(const tx_cuda_scope *scope, int64_t n, const tx_tensor *params, const tx_tensor *masters,
                            int32_t mode, const unsigned long long *suspect, unsigned long long *counts, int32_t each,
                            tx_error *error);

/* tx_master_checksum's work. stale, each: as counts, each above. */
tx_status tx_external_checksum(const tx_cuda_scope *scope, const tx_external_lists &lists, int32_t mode,
                               unsigned long long *stale, int32_t each, const tx_cuda_call *call, tx_error *error);

/* TX_EXTERNAL_CHECK: looks at everything, waits and says what was found. Not in a stream that is being captured. */
tx_status tx_external_refuse_written(const tx_cuda_scope *scope, const tx_external_lists &lists,
                                     const tx_cuda_call *call, tx_error *error);

#endif
