/* torch_ext for authors of training engines: what happens between backward and the step, if neither torch's
 * DistributedDataParallel nor torch_ext's own parallelize does it. A program that only steps needs just torch_ext.h.
 * The conventions in torch_ext.h (errors, structs, arguments, threads) hold for this header too.
 *
 * This header includes torch_ext.h and:
 *   torch_ext_plan.h           which bucket a parameter is in, and which buckets are one message
 *   torch_ext_memory.h         bytes per rank
 *   torch_ext_muon_exchange.h  Muon's matrices that are sharded over ranks: which rank does what, and when
 *   torch_ext_compress.h       lossless compression of bf16 messages, and of states and weights for files
 *   torch_ext_staging.h        the step of parameters that are not in host memory
 *   torch_ext_nccl.h           buckets between GPUs over a communicator of our own
 *
 * What happens to gradients during and between backwards is in torch_ext_cycle.h. */
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
