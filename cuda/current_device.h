/* The device that is current for the calling thread, while a call works on its own. */
#ifndef TX_CUDA_CURRENT_DEVICE_H
#define TX_CUDA_CURRENT_DEVICE_H

#include <cuda_runtime.h>

extern "C" {
#include "csrc/core/status.h"
}
#include "csrc/torch_ext_cuda.h"

/* Makes the device current; `before` was. */
tx_status tx_cuda_make_current(int32_t device, int32_t *before, tx_error *error);

/* Makes current what was before. Not where nothing has been done on that device in this process, as device 0 is said to
 * be current for a thread that never chose: choosing it now would make its context, some 0.5 GB of its memory for each
 * rank of a host. */
void tx_cuda_put_back(int32_t device, int32_t before);

#endif
