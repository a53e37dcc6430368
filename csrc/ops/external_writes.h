/* Noticing, before a step, what somebody else wrote to weights beside masters. */
#ifndef TX_OPS_EXTERNAL_WRITES_H
#define TX_OPS_EXTERNAL_WRITES_H

#include "csrc/ops/parallel.h"

/* The weights of a step that have masters, as its args have them. */
typedef struct tx_weights_beside {
  int64_t n;
  const tx_tensor *params;
  const tx_tensor *masters;
  const tx_tensor *checksums;
  int32_t on_external_write;
  const tx_tensor *moved; /* tx_adamw_args.moved, marked where masters are resynced; NULL: nobody asked */
} tx_weights_beside;

/* Before a step whose args are valid, by on_external_write: RESYNC looks at the samples beside fp32 masters and
 * resyncs parameters whose sample is another (remainders are left to the step, which looks at them on its way), and
 * adds the elements to *resynced; CHECK looks at everything and fails where a weight was written. room: enough for
 * the params and tasks of tx_notice_bytes. Where it fails nothing is written. */
tx_status tx_notice_external(const tx_weights_beside *args, int64_t *resynced, const tx_work_room *room,
                             const tx_parallel *parallel, tx_error *error);

/* Of a task, for n tensors. */
static inline size_t tx_notice_bytes(int64_t n) {
  return (size_t)n * sizeof(int64_t);
}

/* tx_master_resync of arguments that are valid; room: likewise, or all zero. */
tx_status tx_resync_run(int64_t n, const tx_tensor *params, const tx_tensor *masters, int32_t mode, tx_tensor changed,
                        const tx_work_room *room, const tx_parallel *parallel, tx_error *error);

#endif
