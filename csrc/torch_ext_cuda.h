/* torch_ext on the GPU: libtorch_ext_cuda.so has the operators of torch_ext.h for tensors in device memory. Same
 * arguments, same checks, same messages, same bits (but for the payload of NaNs in fp32, which the hardware does not
 * keep).
 *
 * Work is launched on the caller's stream and the call returns: nothing is synchronised, nothing is allocated, and
 * memory that the arguments point to must stay until the stream has passed. What lies where:
 *   - the memory of every tx_tensor (also of one-element tensors: steps, lrs, grad_scale, clip_coef, found_inf,
 *     skipped, stats ...) is the device's, of call->device;
 *   - structs and arrays (groups, meta, offsets, lists of tensors) are the host's, read before the call returns.
 * Values in device memory are not seen before the call: a step or an lr that torch_ext.h calls illegal is not refused.
 *
 * Tables of tensors travel by value as kernel parameters (32 KiB, CUDA 12.1 and newer), so that a call needs no memory
 * of its own and a captured graph owns all it needs. One launch takes about 200 tensors of one dtype combination.
 *
 * Tensors need only the alignment of one byte, except those of int64 that many blocks add to (stats, first_bad,
 * changed, stale, skipped, resynced): multiples of 8, else TX_ERROR_INVALID_ARGUMENT.
 *
 * A CUDA error left behind by somebody else's earlier work is reported as such and not as this call's. */
#ifndef TORCH_EXT_CUDA_H
#define TORCH_EXT_CUDA_H

#include "torch_ext_advanced.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Where a call runs. */
typedef struct tx_cuda_call {
  uint64_t size;
  void *stream;    /* cudaStream_t; NULL: the default stream */
  void *workspace; /* device memory for calls that say so, aligned to 8 bytes; free again when the stream has passed */
  int64_t workspace_bytes;
  int32_t device; /* ordinal; made current for the call; what was current is again, where it has a context */
  int32_t reserved;
} tx_cuda_call;
#define TX_CUDA_CALL_INIT \
  { sizeof(tx_cuda_call), NULL, NULL, 0, 0, 0 }

/* tx_version() of the sources that this library was built from. */
TX_API uint32_t tx_cuda_version(void);

/* What this library is and what it finds. Strings are NUL-terminated. */
typedef struct tx_cuda_about {
  uint64_t size;
  int32_t runtime_version; /* built with: 13000 for CUDA 13.0 */
  int32_t driver_version;  /* newest CUDA that the driver runs; 0: there is no driver */
  int32_t n_devices;       /* 0 where there is no driver, or no device */
  int32_t reserved;
  char architectures[64]; /* "sm_80 sm_90 sm_100 and PTX of 10.0" */
  char why_not[1024];     /* why no device can be used; empty where one can */
} tx_cuda_about;
#define TX_CUDA_ABOUT_INIT \
  { .size = sizeof(tx_cuda_about) }
TX_API tx_status tx_cuda_about_this(tx_cuda_about *about, tx_error *error);

/* Whether kernels of this library run on the device: TX_ERROR_UNAVAILABLE names the device's architecture and those
 * built, the driver's CUDA and the one built with, or the error that some earlier work left behind. Every call below
 * makes this check, once per device. */
TX_API tx_status tx_cuda_check_device(int32_t device, tx_error *error);

/* Exchanges the calling thread's part in other threads' captures of CUDA graphs (cudaThreadExchangeStreamCaptureMode):
 * *mode, one of cudaStreamCaptureMode (2: relaxed), is set, and what was comes back. For threads that look at events,
 * which could end a capture of somebody else's while they are not relaxed. No context is made. */
TX_API tx_status tx_cuda_exchange_capture_mode(int32_t *mode, tx_error *error);

/* Bytes of workspace for n tensors, which are needed where masters have checksums: any by tx_cuda_adamw and
 * tx_cuda_muon_update with TX_EXTERNAL_CHECK, fp32 ones by tx_cuda_master_checksum (unless it renews) and by
 * tx_cuda_muon_update with TX_EXTERNAL_RESYNC. No other call needs any. */
TX_API int64_t tx_cuda_workspace(int64_t n);

/* The operators; see torch_ext.h. In a stream that is being captured, host values that change from step to step would
 * stay for ever what they are: TX_ERROR_BAD_STATE names what to pass as a tensor (tx_adamw_args.lrs), and
 * TX_EXTERNAL_CHECK, which waits for the device, is refused too. tx_cuda_adamw writes steps and counters itself. */
TX_API tx_status tx_cuda_adamw(const tx_adamw_args *args, const tx_cuda_call *call, tx_error *error);
TX_API tx_status tx_cuda_grad_stats(int64_t n, const tx_tensor *grads, tx_tensor stats, tx_tensor first_bad,
                                    const tx_cuda_call *call, tx_error *error);
TX_API tx_status tx_cuda_grad_norm(tx_tensor stats, tx_tensor grad_scale, double max_norm, tx_tensor norm,
                                   tx_tensor clip_coef, tx_tensor found_inf, const tx_cuda_call *call, tx_error *error);
TX_API tx_status tx_cuda_bucket_pack(const tx_bucket_pack_args *args, const tx_cuda_call *call, tx_error *error);
TX_API tx_status tx_cuda_bucket_accumulate(int64_t n, const tx_tensor *main_grads, const tx_tensor *grads,
                                           const tx_cuda_call *call, tx_error *error);
/* Chunks of one call: their addresses travel by value. */
#define TX_CUDA_MAX_CHUNKS 2000
TX_API tx_status tx_cuda_bucket_reduce(const tx_bucket_reduce_args *args, const tx_cuda_call *call, tx_error *error);
TX_API tx_status tx_cuda_bucket_unpack(tx_tensor bucket, tx_tensor scales, int64_t n, const int64_t *offsets,
                                       const tx_tensor *tensors, const tx_cuda_call *call, tx_error *error);
TX_API tx_status tx_cuda_cast(const tx_cast_args *args, const tx_cuda_call *call, tx_error *error);
TX_API tx_status tx_cuda_master_encode(int64_t n, const tx_tensor *masters, const tx_tensor *params,
                                       const tx_tensor *remainders, const tx_cuda_call *call, tx_error *error);
TX_API tx_status tx_cuda_master_decode(int64_t n, const tx_tensor *params, const tx_tensor *remainders,
                                       const tx_tensor *masters, const tx_cuda_call *call, tx_error *error);
TX_API tx_status tx_cuda_master_resync(int64_t n, const tx_tensor *params, const tx_tensor *masters, int32_t mode,
                                       tx_tensor changed, const tx_cuda_call *call, tx_error *error);
TX_API tx_status tx_cuda_master_checksum(int64_t n, const tx_tensor *params, const tx_tensor *masters,
                                         const tx_tensor *checksums, int32_t mode, tx_tensor stale,
                                         const tx_cuda_call *call, tx_error *error);

TX_API tx_status tx_cuda_muon_momentum(const tx_muon_momentum_args *args, const tx_cuda_call *call, tx_error *error);
TX_API tx_status tx_cuda_muon_update(const tx_muon_update_args *args, const tx_cuda_call *call, tx_error *error);

/* Copies for tx_adamw_offloaded between the host and the device, over two of its streams (cudaStream_t), one for each
 * way; slots: of all threads, >= 1. Host memory should be pinned, or copies wait. The caller lets `down` wait for what
 * wrote the gradients and weights before the call, and whoever reads weights for `up` after it. A mark is an event,
 * made by the slot's first. */
TX_API tx_status tx_cuda_copies_make(int32_t device, void *down, void *up, int64_t slots, tx_copy_ops *copy_ops,
                                     tx_error *error);
/* Copies may still be under way, and are made. NULL, or copy_ops that are freed already: nothing. */
TX_API void tx_cuda_copies_free(tx_copy_ops *copy_ops);

#ifdef __cplusplus
}
#endif

#endif
