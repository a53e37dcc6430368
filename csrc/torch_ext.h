/* torch_ext: optimizer steps and gradient buckets for mixed-precision training.
 *
 * This header is the whole public C interface; nothing else is exported. It needs no torch, no CUDA and no Python.
 *
 * How it reads:
 *   1. Conventions       status, messages, dtypes, tensors, threads
 *   2. Decisions         policy (the loader), layout (bucket planner), tracker (readiness), scale (loss scale)
 *   3. Operators         the step, gradient statistics, buckets, casts, masters
 *   4. torch             registration of the operators under torch.ops.torch_ext
 *
 * Habits. Every function that can fail returns a tx_status and fills a caller-owned tx_error (which may be NULL) with
 * what is wrong, where, and what would be legal; it validates everything before it writes the first byte, so a failed
 * call changes nothing. Argument structs begin with `size`, which the TX_*_INIT initialisers set: the library accepts
 * any size it has known in the past. Counts are int64_t and count elements unless a name says bytes. Pointers are
 * borrowed for the duration of the call unless a comment says otherwise. The library never prints, exits or aborts, and
 * keeps no global state besides the table of kernels chosen for this processor. */
#ifndef TORCH_EXT_H
#define TORCH_EXT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define TX_API __attribute__((visibility("default")))
#else
#define TX_API
#endif

#define TX_VERSION_MAJOR 0
#define TX_VERSION_MINOR 1
#define TX_VERSION_PATCH 0
/* (major << 16 | minor << 8 | patch) of the library that is running; compare with the macros above. */
TX_API uint32_t tx_version(void);

/* ---------------------------------------------------------------------------------------------------------------
 * 1. Conventions
 * ------------------------------------------------------------------------------------------------------------- */

/* Values are pinned for ever and grouped by the hundred. */
typedef enum tx_status {
  TX_OK = 0,
  /* 1xx: an argument by itself */
  TX_ERROR_INVALID_ARGUMENT = 100, /* a number, a pointer or a struct size that is never legal */
  TX_ERROR_UNKNOWN_KEY = 101,      /* a configuration key nobody knows; the message names the nearest */
  TX_ERROR_UNKNOWN_DTYPE = 102,    /* a dtype name or code nobody knows */
  TX_ERROR_ILLEGAL_VALUE = 103,    /* a known key with a value outside its set */
  /* 2xx: arguments against each other */
  TX_ERROR_SHAPE = 200,     /* list lengths or element counts that differ */
  TX_ERROR_DTYPE = 201,     /* a dtype combination that is not in the table */
  TX_ERROR_OVERLAP = 202,   /* memory written twice by one call */
  TX_ERROR_CONFLICT = 203,  /* two explicit settings that contradict each other; the message names both */
  TX_ERROR_DEVICE = 204,    /* tensors on devices that differ, or that this library cannot reach */
  TX_ERROR_BAD_STATE = 205, /* a call that is out of order (the message says which comes first) */
  /* 3xx: the world around */
  TX_ERROR_OUT_OF_MEMORY = 300,
  TX_ERROR_UNAVAILABLE = 301, /* something this machine or this torch does not have */
  TX_ERROR_MISMATCH = 302     /* ranks that do not agree */
} tx_status;

/* A message buffer owned by the caller. The library writes a NUL-terminated English sentence into it when a call
 * fails and leaves it alone when it succeeds. */
typedef struct tx_error {
  char message[1024];
} tx_error;

/* "TX_ERROR_SHAPE" for TX_ERROR_SHAPE; "unknown status" for a number that is none. Static storage. */
TX_API const char *tx_status_name(tx_status status);

/* Element types. Values are pinned; names, aliases and sizes are in csrc/core/dtypes.def. */
typedef enum tx_dtype {
  TX_NONE = 0, /* "auto": no dtype was decided */
  TX_F32 = 1,
  TX_F16 = 2,
  TX_BF16 = 3,
  TX_F64 = 4,
  TX_U8 = 5, /* 8-bit optimizer state and wire codes, torch's storage convention for fp8 */
  TX_I8 = 6,
  TX_I16 = 7,
  TX_I32 = 8,
  TX_I64 = 9,
  TX_BOOL = 10,
  TX_C32 = 11,
  TX_C64 = 12,
  TX_C128 = 13,
  TX_F8_E4M3 = 14, /* torch.float8_e4m3fn */
  TX_F8_E5M2 = 15  /* torch.float8_e5m2 */
} tx_dtype;

/* A flat run of elements in host memory (device memory for the CUDA library). `numel == 0` means "none" wherever an
 * argument is optional; `data` is then ignored. Elements need only the alignment of one byte. */
typedef struct tx_tensor {
  void *data;
  int64_t numel;
  tx_dtype dtype;
  int32_t reserved; /* 0 */
} tx_tensor;

/* Threads supplied by the caller. `run` calls task(arg, i) once for each i in [0, n), in any order, on any threads, and
 * returns when all are done. A NULL tx_parallel, or num_threads <= 1, runs on the calling thread. Results never depend
 * on it: bits are the same for every number of threads. */
typedef struct tx_parallel {
  uint64_t size;
  int64_t num_threads;
  void *ctx;
  void (*run)(void *ctx, int64_t n, void (*task)(void *arg, int64_t i), void *arg);
} tx_parallel;
#define TX_PARALLEL_INIT \
  { sizeof(tx_parallel), 1, NULL, NULL }

/* ---------------------------------------------------------------------------------------------------------------
 * 2. Decisions
 * ------------------------------------------------------------------------------------------------------------- */

/* -- dtype, policy, layout, tracker, scale: csrc/core ---------------------------------------------------------- */

/* ---------------------------------------------------------------------------------------------------------------
 * 3. Operators
 *
 * One pass over memory and one parallel region each, for any number of tensors. What torch.ops.torch_ext offers is the
 * same entries with the same names (csrc/torch/operators.def).
 * ------------------------------------------------------------------------------------------------------------- */

/* How a value is brought to fewer bits. Thresholds are a pure function of (seed, step, id, element index). */
typedef enum tx_rounding {
  TX_NEAREST = 0,   /* to nearest, ties to even */
  TX_DITHERED = 1,  /* threshold on a low-discrepancy lattice over steps and elements: the default for moments */
  TX_STOCHASTIC = 2 /* threshold from a hash: unbiased, two to three times the error of dithered */
} tx_rounding;

/* Elements per block: of scaled states, of 8-bit wire data and of the norm. Blocks are counted from the first element
 * of the tensor that is passed; shards cut at multiples of it give the bits of the whole. */
#define TX_BLOCK 128

/* Where a tensor stands in the model. `id` seeds the rounding thresholds: the hash of the fully qualified name where it
 * is known (tx_param_id), else the position. `start` is the index of the tensor's first element in the logical
 * parameter (0 unless it is a shard). `group` is an index into the table of hyper-parameters. Three int64: a row of an
 * int64 tensor [n, 3] in torch. */
typedef struct tx_meta {
  int64_t id;
  int64_t start;
  int64_t group;
} tx_meta;

/* 63-bit, non-negative hash (FNV-1a, finalised) of a parameter's fully qualified name. */
TX_API int64_t tx_param_id(const char *name);

/* Hyper-parameters of one group; seven doubles: a row of a float64 tensor [groups, 7] in torch. */
typedef struct tx_adamw_group {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double maximize;  /* 0 or 1: ascend */
  double decoupled; /* 1: AdamW; 0: weight decay is added to the gradient (Adam) */
} tx_adamw_group;

/* One AdamW (or Adam) step over n tensors; Loshchilov & Hutter 2019, Algorithm 2, with
 *   g  = grad * clip_coef / grad_scale   (negated for maximize; + weight_decay * p where not decoupled)
 *   m  = m + (1 - beta1) * (g - m),  v = v + (1 - beta2) * (g * g - v)
 *   p  = p - (lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps) + lr * weight_decay * p)
 * in fp32, bias corrections in double; the update reads m and v before they are rounded to their storage. p is the
 * master where there is one; the weight is then the master rounded to nearest even.
 *
 * Arrays have n entries; entries of one index have the same numel. Legal dtypes are the rows of csrc/cpu/combos.def:
 *   params       F32, BF16, F16
 *   grads        F32, BF16, F16
 *   exp_avgs     F32, BF16; F16 and U8 (e4m3) with block scales
 *   exp_avg_sqs  F32, BF16; F16 and U8 (unsigned e4m4) with block scales hold sqrt(v)
 *   masters      none; F32 beside BF16 and F16; I16 remainders beside BF16
 *   scales       U8, the e8m0 scales of exp_avg's blocks, then of exp_avg_sq's: ceil(numel / 128) for each of the two
 *                that is F16 or U8; none otherwise
 *   steps        F32, one element: completed steps. The call adds one and steps with the sum
 * A non-zero found_inf makes the call write nothing at all except `skipped += 1`. */
typedef struct tx_adamw_args {
  uint64_t size;
  int64_t n;
  const tx_tensor *params;      /* updated */
  const tx_tensor *grads;       /* read */
  const tx_tensor *exp_avgs;    /* updated */
  const tx_tensor *exp_avg_sqs; /* updated */
  const tx_tensor *masters;     /* updated; NULL: none has one */
  const tx_tensor *scales;      /* updated; NULL: none has one */
  const tx_tensor *steps;       /* updated */
  int64_t n_groups;
  const tx_adamw_group *groups;
  const tx_tensor *lrs; /* NULL, or n_groups one-element F32/F64 tensors that stand for groups[].lr */
  const tx_meta *meta;  /* NULL: id = position, start = 0, group = 0 */
  tx_tensor grad_scale; /* F32, one element or none: gradients are divided by it (loss scale) */
  tx_tensor clip_coef;  /* F32, one element or none: gradients are multiplied by it */
  tx_tensor found_inf;  /* F32, one element or none: non-zero skips the step */
  tx_tensor skipped;    /* I64, one element or none: counts the steps skipped */
  uint64_t seed;
  int32_t moment_rounding; /* tx_rounding of exp_avg and exp_avg_sq */
  int32_t weight_rounding; /* tx_rounding of a 16-bit weight without a master */
} tx_adamw_args;
#define TX_ADAMW_ARGS_INIT \
  { .size = sizeof(tx_adamw_args), .moment_rounding = TX_DITHERED, .weight_rounding = TX_DITHERED }
TX_API tx_status tx_adamw(const tx_adamw_args *args, const tx_parallel *parallel, tx_error *error);

/* Statistics of gradients, in integers, so that any split and any order gives the same bits and ranks may add them.
 * stats[0 .. TX_NORM_LIMBS) are the limbs of the exact sum of the block sums of squares; stats[TX_NORM_LIMBS] counts
 * non-finite elements. A tensor of TX_STATS_LEN int64, zeroed by the caller before the first call; calls add to it. */
#define TX_NORM_LIMBS 20
#define TX_STATS_LEN (TX_NORM_LIMBS + 1)
/* grads: n tensors of F32, BF16, F16. first_bad: I64, one element: becomes min(first_bad, index of the first tensor
 * with a non-finite element); start it at INT64_MAX. May be none. */
TX_API tx_status tx_grad_stats(int64_t n, const tx_tensor *grads, tx_tensor stats, tx_tensor first_bad,
                               const tx_parallel *parallel, tx_error *error);

/* From (all-reduced) stats: norm = sqrt(sum of squares) / grad_scale; clip_coef = min(1, max_norm / (norm + 1e-6));
 * found_inf = 1 where an element or the norm is not finite (clip_coef is then 0), else 0. max_norm: > 0, INFINITY for
 * no clipping. grad_scale: F32 one element or none (1). norm: F32 or F64; clip_coef, found_inf: F32; one element each,
 * each may be none. */
TX_API tx_status tx_grad_norm(tx_tensor stats, tx_tensor grad_scale, double max_norm, tx_tensor norm,
                              tx_tensor clip_coef, tx_tensor found_inf, tx_error *error);

/* Gradients into a bucket of wire dtype. bucket: F32, BF16, F16, or U8 (e4m3 with one e8m0 scale per block in `scales`,
 * ceil(bucket.numel / 128) bytes; offsets are then multiples of 128). offsets[i]: where grads[i] begins in the bucket,
 * ascending, not overlapping. Every element of the bucket that no gradient covers is zeroed; a gradient of numel 0 is
 * "none". rounding applies to U8 buckets (thresholds from seed, step and the index in the bucket); others round to
 * nearest. */
typedef struct tx_bucket_pack_args {
  uint64_t size;
  int64_t n;
  const tx_tensor *grads; /* F32, BF16, F16 */
  const int64_t *offsets;
  tx_tensor bucket; /* written */
  tx_tensor scales; /* written; none unless bucket is U8 */
  uint64_t seed;
  int64_t step;
  int32_t rounding;
  int32_t reserved;
} tx_bucket_pack_args;
#define TX_BUCKET_PACK_ARGS_INIT \
  { .size = sizeof(tx_bucket_pack_args), .rounding = TX_DITHERED }
TX_API tx_status tx_bucket_pack(const tx_bucket_pack_args *args, const tx_parallel *parallel, tx_error *error);

/* main_grads[i] += grads[i]: any of F32, BF16, F16 on either side, one fp32 addition, rounded to nearest. */
TX_API tx_status tx_bucket_accumulate(int64_t n, const tx_tensor *main_grads, const tx_tensor *grads,
                                      const tx_parallel *parallel, tx_error *error);

/* shard = (chunks[0] + chunks[1] + ... + chunks[n-1]) * scale, added in that order in fp32, then rounded once to the
 * shard's dtype; accumulate: shard += that, in fp32. Chunks (F32, BF16, F16, or U8 with scales) all have the shard's
 * numel; shard is F32, BF16 or F16. stats (TX_STATS_LEN int64 or none) receives the statistics of what the shard holds
 * afterwards. */
typedef struct tx_bucket_reduce_args {
  uint64_t size;
  int64_t n;
  const tx_tensor *chunks;
  const tx_tensor *scales; /* NULL unless chunks are U8: ceil(numel / 128) bytes each */
  tx_tensor shard;         /* written, or added to */
  tx_tensor stats;         /* added to; may be none */
  double scale;            /* 1 / world_size for a mean; applied in fp32 */
  int32_t accumulate;
  int32_t reserved;
} tx_bucket_reduce_args;
#define TX_BUCKET_REDUCE_ARGS_INIT \
  { .size = sizeof(tx_bucket_reduce_args), .scale = 1.0 }
TX_API tx_status tx_bucket_reduce(const tx_bucket_reduce_args *args, const tx_parallel *parallel, tx_error *error);

/* The bucket's ranges into tensors (F32, BF16, F16), rounded to nearest; a tensor of numel 0 is passed over. bucket and
 * scales as in tx_bucket_pack. */
TX_API tx_status tx_bucket_unpack(tx_tensor bucket, tx_tensor scales, int64_t n, const int64_t *offsets,
                                  const tx_tensor *tensors, const tx_parallel *parallel, tx_error *error);

/* What a tensor with block scales stands for. */
typedef enum tx_format {
  TX_FORMAT_SIGNED = 0, /* U8: e4m3, F16: itself; times 2^scale: exp_avg and wire data */
  TX_FORMAT_SQRT = 1    /* U8: unsigned e4m4, F16: itself; times 2^scale, squared: exp_avg_sq */
} tx_format;

/* srcs[i] -> dsts[i], element by element. A side whose scales entry is not none is block-scaled (U8 or F16) in
 * `format`; a plain side is F32, BF16 or F16. Rounding thresholds as in tx_adamw (meta may be NULL). */
typedef struct tx_cast_args {
  uint64_t size;
  int64_t n;
  const tx_tensor *srcs;
  const tx_tensor *dsts;       /* written */
  const tx_tensor *src_scales; /* NULL: all plain */
  const tx_tensor *dst_scales; /* written; NULL: all plain */
  const tx_meta *meta;
  uint64_t seed;
  int64_t step;
  int32_t format;   /* tx_format */
  int32_t rounding; /* tx_rounding */
} tx_cast_args;
#define TX_CAST_ARGS_INIT \
  { .size = sizeof(tx_cast_args) }
TX_API tx_status tx_cast(const tx_cast_args *args, const tx_parallel *parallel, tx_error *error);

/* F32 masters <-> (BF16 weight, I16 remainder). The weight is the master rounded to nearest even; exact but for one
 * pattern per even weight, whose upper tie is stored one fp32 ulp lower (csrc/math/numeric.h, remainders). */
TX_API tx_status tx_master_encode(int64_t n, const tx_tensor *masters, const tx_tensor *params,
                                  const tx_tensor *remainders, const tx_parallel *parallel, tx_error *error);
TX_API tx_status tx_master_decode(int64_t n, const tx_tensor *params, const tx_tensor *remainders,
                                  const tx_tensor *masters, const tx_parallel *parallel, tx_error *error);

/* Where a master no longer rounds to its weight (-0 equals +0, NaN equals NaN) it becomes the weight; with `force`,
 * everywhere. masters: F32 beside BF16 or F16 params, or I16 remainders beside BF16 (any remainder is legal beside any
 * weight, so only `force` changes them). changed: I64 [n], added to: elements that changed; may be none. */
TX_API tx_status tx_master_resync(int64_t n, const tx_tensor *params, const tx_tensor *masters, int32_t force,
                                  tx_tensor changed, const tx_parallel *parallel, tx_error *error);

/* The instruction sets this library was built for and this processor has, slowest first; index into it with i, NULL
 * past the end. tx_isa_select picks one by name ("base", ...; NULL: the fastest, or what TORCH_EXT_ISA says) for calls
 * that begin afterwards. */
TX_API const char *tx_isa_name(int32_t i);
TX_API const char *tx_isa_selected(void);
TX_API tx_status tx_isa_select(const char *name, tx_error *error);

/* ---------------------------------------------------------------------------------------------------------------
 * 4. torch
 * ------------------------------------------------------------------------------------------------------------- */

/* Registers every operator with the torch that is loaded in this process (>= 2.10), once; later calls do nothing and
 * succeed. Found through dlopen(RTLD_NOLOAD), so `import torch` comes first. A missing symbol is named together with
 * torch's version. */
TX_API tx_status tx_torch_register(tx_error *error);

/* The operator table: name ("adamw_") and schema ("adamw_(Tensor(a!)[] params, ...) -> ()") of row i; NULL past the
 * end. Static storage. */
TX_API const char *tx_operator_name(int32_t i);
TX_API const char *tx_operator_schema(int32_t i);

#ifdef __cplusplus
}
#endif

#endif
