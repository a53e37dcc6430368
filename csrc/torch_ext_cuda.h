/* torch_ext on the GPU: libtorch_ext_cuda.so has the operators of torch_ext.h for tensors in device memory, with the
 * same arguments, checks and messages. They give the same bits, except for the payload of fp32 NaNs, which the hardware
 * does not keep.
 *
 * A call launches its work on the caller's stream and returns. It does not synchronise and allocates nothing; memory
 * that the arguments point to must stay valid until the stream has passed. Device and host memory:
 *   - the memory of every tx_tensor is on the device call->device, also that of one-element tensors (steps, lrs,
 *     grad_scale, clip_coef, found_inf, skipped, stats ...);
 *   - structs and arrays (groups, meta, offsets, lists of tensors) are in host memory and read before the call
 *     returns.
 * The host does not read values in device memory: a step or an lr that torch_ext.h calls illegal is not rejected.
 *
 * Tables of tensors are passed by value as kernel parameters (32 KiB, CUDA 12.1 and newer). So a call needs no memory
 * of its own, and a captured graph owns all that it needs. One launch takes about 200 tensors of one dtype combination.
 *
 * Tensors need not be aligned, except int64 tensors that many blocks add to (stats, first_bad, changed, stale, skipped,
 * resynced): they must be aligned to 8 bytes, else TX_ERROR_INVALID_ARGUMENT.
 *
 * If other, earlier work left a CUDA error behind, the call reports it as that and not as its own. */
#ifndef TORCH_EXT_CUDA_H
#define TORCH_EXT_CUDA_H

#include "torch_ext_advanced.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The stream, device and workspace of a call. */
typedef struct tx_cuda_call {
  uint64_t size;
  void *stream;    /* cudaStream_t; NULL: the default stream */
  void *workspace; /* device memory for calls that need it, aligned to 8 bytes; reusable when the stream has passed */
  int64_t workspace_bytes;
  int32_t device; /* ordinal; made current for the call, after which the previous device is current again if it has a
                     context */
  int32_t reserved;
} tx_cuda_call;
#define TX_CUDA_CALL_INIT \
  { sizeof(tx_cuda_call), NULL, NULL, 0, 0, 0 }

/* tx_version() of the sources from which this library was built. */
TX_API uint32_t tx_cuda_version(void);

/* How this library was built, and which driver and devices it finds. Strings are NUL-terminated. */
typedef struct tx_cuda_about {
  uint64_t size;
  int32_t runtime_version; /* CUDA that it was built with: 13000 for CUDA 13.0 */
  int32_t driver_version;  /* newest CUDA that the driver supports; 0: no driver */
  int32_t n_devices;       /* 0 without a driver or device */
  int32_t reserved;
  char architectures[64]; /* "sm_80 sm_90 sm_100 and PTX of 10.0" */
  char why_not[1024];     /* why no device can be used; empty if one can */
} tx_cuda_about;
#define TX_CUDA_ABOUT_INIT \
  { .size = sizeof(tx_cuda_about) }
TX_API tx_status tx_cuda_about_this(tx_cuda_about *about, tx_error *error);

/* Checks that kernels of this library run on the device. TX_ERROR_UNAVAILABLE names the device's architecture and the
 * built ones, the CUDA of the driver and of the build, or the error that earlier work left behind. Every call below
 * makes this check, once per device. */
TX_API tx_status tx_cuda_check_device(int32_t device, tx_error *error);

/* Sets the calling thread's capture mode for CUDA graphs (cudaThreadExchangeStreamCaptureMode) to *mode, a
 * cudaStreamCaptureMode (2: relaxed), and writes the previous mode to *mode. For threads that query events: in any mode
 * but relaxed that could invalidate a capture of another thread. Creates no CUDA context. */
TX_API tx_status tx_cuda_exchange_capture_mode(int32_t *mode, tx_error *error);

/* Bytes of workspace for n tensors. Needed only for masters with checksums: masters of any dtype in tx_cuda_adamw and
 * tx_cuda_muon_update with TX_EXTERNAL_CHECK; fp32 masters in tx_cuda_master_checksum (unless it renews) and in
 * tx_cuda_muon_update with TX_EXTERNAL_RESYNC. No other call needs any. */
TX_API int64_t tx_cuda_workspace(int64_t n);

/* The operators; see torch_ext.h. If the stream is being captured, host values that change from step to step would keep
 * their captured values in every replay: TX_ERROR_BAD_STATE names what to pass as a tensor instead (tx_adamw_args.lrs).
 * TX_EXTERNAL_CHECK, which waits for the device, is rejected too. tx_cuda_adamw writes steps and counters on the
 * device. */
TX_API tx_status tx_cuda_adamw(const tx_adamw_args *args, const tx_cuda_call *call, tx_error *error);
TX_API tx_status tx_cuda_grad_stats(int64_t n, const tx_tensor *grads, tx_tensor stats, tx_tensor first_bad,
                                    const tx_cuda_call *call, tx_error *error);
TX_API tx_status tx_cuda_grad_norm(tx_tensor stats, tx_tensor grad_scale, double max_norm, tx_tensor norm,
                                   tx_tensor clip_coef, tx_tensor found_inf, const tx_cuda_call *call, tx_error *error);
TX_API tx_status tx_cuda_bucket_pack(const tx_bucket_pack_args *args, const tx_cuda_call *call, tx_error *error);
TX_API tx_status tx_cuda_bucket_accumulate(int64_t n, const tx_tensor *main_grads, const tx_tensor *grads,
                                           const tx_cuda_call *call, tx_error *error);
/* The most chunks of one call; their addresses are passed by value. */
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

/* Creates the copy functions for tx_adamw_offloaded between the host and the device. They use two of the device's
 * streams (cudaStream_t), one per direction. slots: of all threads together, >= 1. Host memory should be pinned;
 * otherwise copies block. The caller makes `down` wait for whatever wrote the gradients and weights before the call,
 * and makes whatever reads the weights wait for `up` after the call. A slot's mark is an event, created when the slot
 * first needs it. */
TX_API tx_status tx_cuda_copies_make(int32_t device, void *down, void *up, int64_t slots, tx_copy_ops *copy_ops,
                                     tx_error *error);
/* Frees copy_ops. Copies in flight are still completed. Does nothing for NULL, or for copy_ops that are already
 * freed. */
TX_API void tx_cuda_copies_free(tx_copy_ops *copy_ops);

#ifdef __cplusplus
}
#endif

#endif
