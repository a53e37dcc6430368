/* Detects, before a step, weights with masters that were written from outside. */
#ifndef TX_OPS_EXTERNAL_WRITES_H
#define TX_OPS_EXTERNAL_WRITES_H

#include "csrc/ops/parallel.h"

/* The weights and masters of a step, from its args. */
typedef struct tx_weights_and_masters {
  int64_t n;
  const tx_tensor *params;
  const tx_tensor *masters;
  const tx_tensor *checksums;
  int32_t on_external_write;
  const tx_tensor *moved; /* tx_adamw_args.moved, marked if masters are resynced; may be NULL */
} tx_weights_and_masters;

/* To be called before a step whose args are valid. What it does depends on on_external_write. RESYNC: checks the
 * samples of weights with fp32 masters, resyncs the masters of parameters whose sample differs, and adds the number of
 * elements to *resynced; weights with remainders are left to the step itself. CHECK: checks everything, and fails if a
 * weight was written. room: large enough for the params and for tasks of tx_external_writes_bytes. If the call fails
 * nothing is written. */
tx_status tx_handle_external_writes(const tx_weights_and_masters *args, int64_t *resynced, const tx_work_room *room,
                                    const tx_parallel *parallel, tx_error *error);

/* Bytes that a task needs for n tensors. */
static inline size_t tx_external_writes_bytes(int64_t n) {
  return (size_t)n * sizeof(int64_t);
}

/* tx_master_resync for valid arguments. room: as above, or all zero. */
tx_status tx_resync_run(int64_t n, const tx_tensor *params, const tx_tensor *masters, int32_t mode, tx_tensor changed,
                        const tx_work_room *room, const tx_parallel *parallel, tx_error *error);

#endif
