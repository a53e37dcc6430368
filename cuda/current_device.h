/* Making a call's device current for the calling thread, and restoring the one before. */
#ifndef TX_CUDA_CURRENT_DEVICE_H
#define TX_CUDA_CURRENT_DEVICE_H

#include <cuda_runtime.h>

extern "C" {
#include "csrc/core/status.h"
}
#include "csrc/torch_ext_cuda.h"

/* Makes the device current. *before: the device that was current. */
tx_status tx_cuda_make_current(int32_t device, int32_t *before, tx_error *error);

/* Makes `before` current again, unless this process has no context on it. CUDA reports device 0 as current for a thread
 * that never chose a device. Choosing it would create a context there: about 0.5 GB of device 0's memory for each rank
 * of a host. */
void tx_cuda_put_back(int32_t device, int32_t before);

#endif
