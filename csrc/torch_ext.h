/* torch_ext: optimizer steps and gradient buckets for mixed-precision training.
 *
 * This is the public C interface for training. It needs no torch, no CUDA and no Python. The library exports only what
 * one of the public headers declares.
 *
 * This header includes:
 *   torch_ext_types.h          statuses, messages, dtypes, tensors, threads
 *   torch_ext_operators.h      the optimizer step, gradient statistics, buckets, casts, master weights
 *   torch_ext_muon.h           Muon's step: two operators, and the rules for what is between them
 *   torch_ext_policy.h         every dtype, decided from the model's dtype (the loader); the loss scale
 *   torch_ext_bindings.h       registration under torch.ops.torch_ext; struct layouts for other languages
 *
 * Further public headers:
 *   torch_ext_advanced.h       for authors of training engines: planning, compression, staging, NCCL
 *   torch_ext_cycle.h          for authors of training engines: the gradient protocol during and between backwards
 *   torch_ext_delta.h          deltas of a model's weights, for inference engines and the trainers that send to them
 *   torch_ext_cuda.h           the operators for device memory, in libtorch_ext_cuda.so
 *
 * Errors. Every function that can fail returns a tx_status and fills a caller-owned tx_error (which may be NULL). The
 * message says what is wrong, where, and what would be legal. A function validates everything before it writes the
 * first byte, so a failed call changes nothing.
 *
 * Structs. An argument struct begins with `size`, which its TX_*_INIT initialiser sets. If `size` differs from the size
 * in the library's own header, the call fails with TX_ERROR_INVALID_ARGUMENT before it reads any other field. A program
 * compiled against the header of another version (tx_version) is rejected this way, with a message that says so.
 *
 * Arguments. Counts are int64_t and count elements unless a name says bytes. Pointers are borrowed for the duration of
 * the call unless a comment says otherwise. The library never prints, exits or aborts. Its only global state is the
 * kernel table chosen for this processor and what it has found of torch in the process.
 *
 * Threads. The library has no threads of its own (tx_parallel). Any number of threads may call it at the same time, as
 * long as no thread writes memory that another call uses. A call takes less than 64 KiB of stack, on the calling thread
 * and for each task. Calls work under any floating-point mode and locale of the calling thread and leave both
 * unchanged. Do not call it from signal handlers: calls allocate memory. */
#ifndef TORCH_EXT_H
#define TORCH_EXT_H

#include "torch_ext_bindings.h"
#include "torch_ext_muon.h"
#include "torch_ext_operators.h"
#include "torch_ext_policy.h"
#include "torch_ext_types.h"

#endif
