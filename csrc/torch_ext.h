/* torch_ext: optimizer steps and gradient buckets for mixed-precision training.
 *
 * The public C interface, for whoever trains; nothing is exported that is not in one of the public headers. It needs no
 * torch, no CUDA and no Python.
 *
 * This header is these:
 *   torch_ext_types.h          statuses, messages, dtypes, tensors, threads
 *   torch_ext_operators.h      the step, gradient statistics, buckets, casts, masters
 *   torch_ext_muon.h           the same for Muon
 *   torch_ext_policy.h         every dtype from the model's (the loader); the loss scale
 *   torch_ext_bindings.h       the operators under torch.ops.torch_ext; structs for other languages
 *
 * Beside it:
 *   torch_ext_advanced.h       for the author of an engine: planning, compression, staging, NCCL
 *   torch_ext_cycle.h          for the same: the protocol of gradients between and during backwards
 *   torch_ext_delta.h          what changed in a model's weights, for inference engines and who sends it to them
 *   torch_ext_cuda.h           the operators for device memory, in libtorch_ext_cuda.so
 *
 * Habits. Every function that can fail returns a tx_status and fills a caller-owned tx_error (which may be NULL) with
 * what is wrong, where, and what would be legal; it validates everything before it writes the first byte, so a failed
 * call changes nothing. Argument structs begin with `size`, which the TX_*_INIT initialisers set; a size that is not
 * that of the library's own header is TX_ERROR_INVALID_ARGUMENT, so a program that was compiled with the header of
 * another version (tx_version) is refused by name before any other field is read. Counts are int64_t and count elements
 * unless a name says bytes. Pointers are borrowed for the duration of the call unless a comment says otherwise. The
 * library never prints, exits or aborts, and keeps no global state besides the table of kernels chosen for this
 * processor and what torch has of it.
 *
 * Threads. It has none of its own (tx_parallel). Any number of threads may call at a time, with memory that none of
 * them writes meanwhile; a call takes less than 64 KiB of stack, on its thread and for each task. The floating-point
 * mode and the locale of a thread may be any and stay as they are. Not for signal handlers: calls allocate memory. */
#ifndef TORCH_EXT_H
#define TORCH_EXT_H

#include "torch_ext_bindings.h"
#include "torch_ext_muon.h"
#include "torch_ext_operators.h"
#include "torch_ext_policy.h"
#include "torch_ext_types.h"

#endif
