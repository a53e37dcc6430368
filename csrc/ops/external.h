/* Noticing, before a step, what somebody else wrote to weights beside masters. */
#ifndef TX_OPS_EXTERNAL_H
#define TX_OPS_EXTERNAL_H

#include "csrc/torch_ext.h"

/* Before a step whose args are valid, by args->on_external_write: RESYNC looks at the samples beside fp32 masters and
 * resyncs parameters whose sample is another (remainders are left to the step, which looks at them on its way), and
 * adds the elements to *resynced; CHECK looks at everything and fails where a weight was written. */
tx_status tx_notice_external(const tx_adamw_args *args, int64_t *resynced, const tx_parallel *parallel,
                             tx_error *error);

#endif
