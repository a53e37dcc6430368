/* The operators of torch_ext: the step of AdamW and Adam, gradient statistics, buckets, casts, master weights. Muon's
 * operators are in torch_ext_muon.h.
 *
 * Each operator makes one pass over memory, in one parallel region, for any number of tensors. torch.ops.torch_ext
 * offers the same operators under the same names (csrc/torch/operators.def). */
#ifndef TORCH_EXT_OPERATORS_H
#define TORCH_EXT_OPERATORS_H

#include "torch_ext_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How a value is rounded to fewer bits. Thresholds are a pure function of (seed, step, id, element index). */
typedef enum tx_rounding {
  TX_NEAREST = 0,   /* to nearest, ties to even */
  TX_DITHERED = 1,  /* threshold on a low-discrepancy lattice over steps and elements; default for moments */
  TX_STOCHASTIC = 2 /* threshold from a hash: unbiased, two to three times the error of dithered */
} tx_rounding;

/* Elements per block: of scaled states, of 8-bit wire data and of the norm. Blocks are counted from the first element
 * of the tensor that is passed. Shards that are cut at multiples of TX_BLOCK give the same bits as the whole tensor. */
#define TX_BLOCK 128

/* What the operators need to know about a tensor's parameter. `id` seeds the rounding thresholds: the hash of the fully
 * qualified name if that is known (tx_param_id), else the parameter's position. `start` is the index of the tensor's
 * first element in the logical parameter (0 unless the tensor is a shard). `group` is an index into the table of
 * hyper-parameters. Three int64: a row of an int64 tensor [n, 3] in torch. */
typedef struct tx_meta {
  int64_t id;
  int64_t start;
  int64_t group;
} tx_meta;

/* The id of a parameter: a 63-bit, non-negative hash (FNV-1a, finalised) of its fully qualified name. */
TX_API int64_t tx_param_id(const char *name);

/* Hyper-parameters of one parameter group. Seven doubles: a row of a float64 tensor [groups, 7] in torch. */
typedef struct tx_adamw_group {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double maximize;  /* 0 or 1: ascend the gradient */
  double decoupled; /* 1: AdamW; 0: weight decay is added to the gradient (Adam) */
} tx_adamw_group;

/* What a step does about weights with masters that were written from outside since the last step. Such writes are found
 * by 64-bit checksums of the weights as the last step left them.
 *   I16 masters  One checksum per TX_CHECKSUM weights. Every remainder is legal for every weight, so a write cannot be
 *                told from the remainders: if the checksum of a block differs, all remainders of the block become 0,
 *                which makes these weights their own masters.
 *   F32 masters  One checksum per TX_SAMPLED weights, of a sample of them: 32 of every 2048 (of a parameter with up to
 *                TX_SAMPLED: all). If one differs, all masters of the parameter are compared with the weights, and
 *                those that do not round to their weight become it. Writes outside the sample are not noticed. */
typedef enum tx_external_write {
  TX_EXTERNAL_IGNORE = 0, /* no check: the master overwrites the weight */
  TX_EXTERNAL_RESYNC = 1, /* masters of written weights become these weights, then the step is made */
  TX_EXTERNAL_CHECK = 2   /* checks only and steps nothing: TX_ERROR_BAD_STATE if a weight was written */
} tx_external_write;

/* Weights per checksum, for I16 and for F32 masters; counted from the first element of the tensor that is passed. */
#define TX_CHECKSUM ((int64_t)1024)
#define TX_SAMPLED ((int64_t)4096)

/* Length of a row of tx_adamw_args.healths, zeroed by the caller. */
#define TX_HEALTH_LEN 69

/* One AdamW (or Adam) step over n tensors; Loshchilov & Hutter 2019, Algorithm 2, with
 *   g  = grad * clip_coef / grad_scale   (negated for maximize; + weight_decay * p where not decoupled)
 *   m  = m + (1 - beta1) * (g - m),  v = v + (1 - beta2) * (g * g - v)
 *   p  = p - (lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps) + lr * weight_decay * p)
 * in fp32, with bias corrections in double. Each average starts from the operand with the larger weight. The update
 * uses m and v before they are rounded to their storage dtype. p is the master if there is one; the weight is then the
 * master rounded to nearest even.
 *
 * If everything that g is computed from is finite, g is limited to 31 * 2^59 (1.8e19) in size, so that no finite
 * gradient makes a state non-finite. Inf and NaN propagate. If v is stored as dithered 8-bit codes, 1 - beta2 is
 * reduced by up to 2.8 %: such codes follow v too fast, and this compensates for it (csrc/math/dither_lag.h).
 *
 * Arrays have n entries; entries of one index have the same numel. Legal dtypes are the rows of csrc/core/combos.def:
 *   params       F32, BF16, F16
 *   grads        F32, BF16, F16
 *   exp_avgs     F32, BF16; F16 and U8 (e4m3) with block scales
 *   exp_avg_sqs  F32, BF16; F16 and U8 (unsigned e4m4) with block scales hold sqrt(v)
 *   masters      none; F32 for BF16 and F16 params; I16 remainders for BF16 params
 *   scales       U8: the e8m0 scales of exp_avg's blocks, then of exp_avg_sq's; ceil(numel / 128) for each of the two
 *                that is F16 or U8. None if neither is
 *   steps        F32, one element: completed steps. The call adds one and steps with the sum
 *   checksums    none; for params with masters I64: ceil(numel / TX_CHECKSUM) if the masters are I16,
 *                ceil(numel / TX_SAMPLED) if they are F32, as tx_master_checksum writes them; the step renews them
 * Optional outputs, for each parameter whose entry is not none:
 *   changed      U8, ceil(numel / 8): the step sets bit i % 8 (0 is the least significant) of byte i / 8 if it changes
 *                the bits of weight i. It clears no bit; the reader does
 *   moved        BF16, ceil(numel / TX_BLOCK), >= 0, only together with changed: one bound per block. The step adds,
 *                rounded up, the largest change of a master in the block (of a weight, without masters), so that the
 *                sum is an upper bound over many steps. +Inf, permanently, if weights or masters of the block were
 *                written from outside or are not finite; a resync of fp32 masters sets it in all of the parameter
 *   distances    U8, ceil(numel / 2), only together with changed: 4 bits per weight in two's complement, the first
 *                weight in the low half of a byte. The step adds the number of ulps by which it changes the weight
 *                (tx_ordered_16 and _32 of csrc/math/weight_change.h). -8, permanently: more than 7 either way
 *   emas         BF16, F32, or BF16 with 8 further bits in ema_lows: a moving average of the masters (of the weights,
 *                if these are F32); see ema_decay
 *   ema_lows     U8, numel, only together with emas of BF16, which are then the upper 16 of 24 bits, truncated
 *   healths      I64, TX_HEALTH_LEN, aligned to 8 bytes: the step adds its sums (tx_health_of)
 * If found_inf is not zero, or clip_coef / grad_scale is not finite, the call only adds 1 to `skipped` and writes
 * nothing else. */
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
  tx_tensor grad_scale; /* F32, one element or none: divides gradients (loss scale) */
  tx_tensor clip_coef;  /* F32, one element or none: multiplies gradients */
  tx_tensor found_inf;  /* F32, one element or none: non-zero (also NaN) skips the step */
  tx_tensor skipped;    /* I64, one element or none: counts skipped steps */
  uint64_t seed;
  int32_t moment_rounding;    /* tx_rounding of exp_avg and exp_avg_sq */
  int32_t weight_rounding;    /* tx_rounding of a 16-bit weight without a master */
  const tx_tensor *checksums; /* updated; NULL: none has one */
  tx_tensor resynced;         /* I64, one element or none: counts the elements whose master became the weight */
  int32_t on_external_write;  /* tx_external_write */
  int32_t reserved;
  const tx_tensor *changed; /* optional outputs, updated, as are the next five; NULL: no parameter has one */
  const tx_tensor *moved;
  const tx_tensor *distances;
  const tx_tensor *emas;
  const tx_tensor *ema_lows;
  const tx_tensor *healths;
  double ema_decay;  /* ema += (1 - ema_decay) * (master - ema), in fp32, dithered to 16 or 24 bits; in [0, 1) */
  int64_t ema_every; /* >= 1: the average is updated in steps whose number is a multiple of it; the first of these sets
                        ema = master */
  void *notes; /* NULL, or notes_bytes bytes, aligned to 8 and zero at first: an accepted call, and tx_adamw_check, note
                  the tensors that are written, so that a call that writes the same ones is checked in less time.
                  Everything is checked in any case. Only these calls may write to it; for one call at a time */
  int64_t notes_bytes; /* 512 and 320 per parameter are enough without optional outputs, 608 with all of them; where
                          there is too little room, nothing is noted */
} tx_adamw_args;
#define TX_ADAMW_ARGS_INIT \
  { .size = sizeof(tx_adamw_args), .moment_rounding = TX_DITHERED, .weight_rounding = TX_DITHERED, .ema_every = 1 }
TX_API tx_status tx_adamw(const tx_adamw_args *args, const tx_parallel *parallel, tx_error *error);

/* Statistics of the updates, read from a row of tx_adamw_args.healths: of all weights in all measured steps since the
 * row was zeroed. */
typedef struct tx_health {
  uint64_t size;
  int64_t elements;  /* weights measured; 0: none, and all following fields are 0 */
  double update_rms; /* rms of the changes of masters; NaN if a weight is not finite */
  double weight_rms; /* rms of masters */
  double moved;      /* share of weights whose bits changed, in [0, 1] */
  double below;      /* share of updates below half an ulp of their weight, which only a master accumulates; for weights
                        without a master, the share of weights that did not change */
  double largest;    /* largest |weight| */
} tx_health;
#define TX_HEALTH_INIT \
  { .size = sizeof(tx_health) }
/* Reads the statistics. health: I64, TX_HEALTH_LEN. To combine rows of several ranks, add all integers except the last,
 * of which take the maximum. *found: initialised with TX_HEALTH_INIT, written. */
TX_API tx_status tx_health_of(tx_tensor health, tx_health *found, tx_error *error);

/* Checks whether tx_adamw or tx_adamw_offloaded would accept these arguments; fails as they would. Writes nothing
 * except `notes`, and reads only steps and lrs. For a step that is split into several calls: check all of them first,
 * so that none is rejected after others are done. */
TX_API tx_status tx_adamw_check(const tx_adamw_args *args, tx_error *error);

/* Checks the hyper-parameters of n groups: lr, eps and weight_decay must be finite and >= 0, the betas in [0, 1), and
 * the two flags 0 or 1; else TX_ERROR_ILLEGAL_VALUE, with a message in torch.optim's words ("group 3: betas[0] is 1.0;
 * ..."). where: the beginning of the message, in place of the group; may be NULL. */
TX_API tx_status tx_adamw_check_groups(const tx_adamw_group *groups, int64_t n, const char *where, tx_error *error);

/* Statistics of gradients, as integers: every split and every order gives the same bits, and ranks may add them.
 * stats[0 .. TX_NORM_LIMBS) are the limbs of the exact sum of the block sums of squares; stats[TX_NORM_LIMBS] counts
 * non-finite elements. stats: TX_STATS_LEN int64, zeroed by the caller before the first call; calls add to it. */
#define TX_NORM_LIMBS 20
#define TX_STATS_LEN (TX_NORM_LIMBS + 1)
/* grads: n tensors of F32, BF16, F16. first_bad: I64, one element, or none: becomes min(first_bad, index of the first
 * tensor with a non-finite element); initialise it to INT64_MAX. */
TX_API tx_status tx_grad_stats(int64_t n, const tx_tensor *grads, tx_tensor stats, tx_tensor first_bad,
                               const tx_parallel *parallel, tx_error *error);

/* Computes the gradient norm and the clip coefficient from (all-reduced) stats:
 * norm = sqrt(sum of squares) / grad_scale; clip_coef = min(1, max_norm / (norm + 1e-6)). found_inf = 1 if an element
 * or the norm is not finite, else 0. With found_inf = 1 clip_coef is 0, and the norm is NaN if an element is not
 * finite. max_norm: > 0, INFINITY for no clipping. grad_scale: F32, one element or none (1). norm: F32 or F64;
 * clip_coef, found_inf: F32; one element each; each may be none. */
TX_API tx_status tx_grad_norm(tx_tensor stats, tx_tensor grad_scale, double max_norm, tx_tensor norm,
                              tx_tensor clip_coef, tx_tensor found_inf, tx_error *error);

/* Copies gradients into a bucket of the wire dtype. bucket: F32, BF16, F16, or U8 (e4m3 with one e8m0 scale per block
 * in `scales`, ceil(bucket.numel / 128) bytes; offsets must then be multiples of 128). offsets[i]: position of grads[i]
 * in the bucket; ascending, not overlapping, inside the bucket (also for absent gradients, whose numel is 0). Elements
 * of the bucket that no gradient covers become zero. rounding applies to U8 buckets (thresholds from seed, step and the
 * index in the bucket); other dtypes round to nearest. */
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

/* main_grads[i] += grads[i]. Either side may be F32, BF16 or F16; one fp32 addition per element, rounded to nearest. */
TX_API tx_status tx_bucket_accumulate(int64_t n, const tx_tensor *main_grads, const tx_tensor *grads,
                                      const tx_parallel *parallel, tx_error *error);

/* Sums the chunks of n ranks: shard = (chunks[0] + chunks[1] + ... + chunks[n-1]) * scale, added in that order in fp32,
 * then rounded once to the shard's dtype. With `accumulate`: shard += that, in fp32. n >= 1. Chunks are of one dtype
 * (F32, BF16, F16, or U8 with scales) and have the shard's numel; shard is F32, BF16 or F16. Without `accumulate` one
 * of the chunks may be the shard itself: the same memory, the same dtype. stats (TX_STATS_LEN int64, or none) receives
 * the statistics of the shard's final content. */
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

/* Copies ranges of the bucket into tensors (F32, BF16, F16), rounded to nearest; tensors of numel 0 are skipped.
 * bucket, scales and offsets as in tx_bucket_pack. */
TX_API tx_status tx_bucket_unpack(tx_tensor bucket, tx_tensor scales, int64_t n, const int64_t *offsets,
                                  const tx_tensor *tensors, const tx_parallel *parallel, tx_error *error);

/* How the values of a block-scaled tensor are encoded. */
typedef enum tx_format {
  TX_FORMAT_SIGNED = 0,  /* U8: e4m3, F16: itself; times 2^scale: exp_avg and wire data */
  TX_FORMAT_SQRT = 1,    /* U8: unsigned e4m4, F16: itself; times 2^scale, squared: exp_avg_sq */
  TX_FORMAT_MOMENTUM = 2 /* U8: e3m4, F16: itself; times 2^scale: Muon's momentum_buffer */
} tx_format;

/* Converts srcs[i] to dsts[i], element by element. A side is block-scaled (U8 or F16) in `format` if its scales entry
 * is not none; else it is plain F32, BF16 or F16. Rounding thresholds as in tx_adamw (meta may be NULL). */
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

/* Convert F32 masters to (BF16 weight, I16 remainder) and back. The weight is the master rounded to nearest even. The
 * conversion is exact except for one pattern per even weight: the upper tie is stored one fp32 ulp lower
 * (csrc/math/numeric.h, remainders). */
TX_API tx_status tx_master_encode(int64_t n, const tx_tensor *masters, const tx_tensor *params,
                                  const tx_tensor *remainders, const tx_parallel *parallel, tx_error *error);
TX_API tx_status tx_master_decode(int64_t n, const tx_tensor *params, const tx_tensor *remainders,
                                  const tx_tensor *masters, const tx_parallel *parallel, tx_error *error);

typedef enum tx_resync_mode {
  TX_RESYNC_STALE = 0, /* masters that no longer round to their weight (+0 = -0, NaN = NaN) become it */
  TX_RESYNC_ALL = 1,   /* all masters become their weights */
  TX_RESYNC_COUNT = 2  /* counts what TX_RESYNC_STALE would change; writes no master */
} tx_resync_mode;

/* Sets masters to their weights, as `mode` (tx_resync_mode) says. masters: F32 for BF16 or F16 params, or I16
 * remainders for BF16 params. Every remainder is legal for every weight, so only TX_RESYNC_ALL changes remainders;
 * tx_master_checksum finds which of their weights were written. changed: I64 [n], or none: the number of elements whose
 * bits change is added. */
TX_API tx_status tx_master_resync(int64_t n, const tx_tensor *params, const tx_tensor *masters, int32_t mode,
                                  tx_tensor changed, const tx_parallel *parallel, tx_error *error);

typedef enum tx_checksum_mode {
  TX_CHECKSUM_CHECK = 0,  /* only counts */
  TX_CHECKSUM_RESYNC = 1, /* where a checksum differs, masters become their weights and the checksum is renewed */
  TX_CHECKSUM_RENEW = 2   /* all checksums are recomputed from the current weights; masters are not changed */
} tx_checksum_mode;

/* Compares weights with their checksums (tx_external_write). params, masters, checksums: as in tx_adamw; entries whose
 * checksums are none are skipped. mode: tx_checksum_mode. stale: I64 [n], or none: the number of elements whose masters
 * become their weights, or would with TX_CHECKSUM_RESYNC, is added (for I16 masters all elements of a block). */
TX_API tx_status tx_master_checksum(int64_t n, const tx_tensor *params, const tx_tensor *masters,
                                    const tx_tensor *checksums, int32_t mode, tx_tensor stale,
                                    const tx_parallel *parallel, tx_error *error);

#ifdef __cplusplus
}
#endif

#endif
