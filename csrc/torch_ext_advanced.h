/* torch_ext for the author of an engine: what stands between backward and the step, where neither torch's
 * DistributedDataParallel nor torch_ext's own parallelize does it. Who only steps needs torch_ext.h alone, whose habits
 * are those of this header, too.
 *
 * This header is torch_ext.h and these:
 *   torch_ext_plan.h           which bucket a parameter is in, and which buckets are one message
 *   torch_ext_memory.h         bytes per rank
 *   torch_ext_muon_exchange.h  Muon's matrices that are cut over ranks: who does what when
 *   torch_ext_compress.h       bf16 messages in three quarters of their bytes; states and weights as small as they get
 *   torch_ext_staging.h        the step of parameters that are not in host memory
 *   torch_ext_nccl.h           buckets between GPUs over a communicator of our own
 *
 * What happens to gradients between and during backwards is in torch_ext_cycle.h. */
#ifndef TORCH_EXT_ADVANCED_H
#define TORCH_EXT_ADVANCED_H

#include "torch_ext.h"
#include "torch_ext_compress.h"
#include "torch_ext_memory.h"
#include "torch_ext_muon_exchange.h"
#include "torch_ext_nccl.h"
#include "torch_ext_plan.h"
#include "torch_ext_staging.h"

#endif
