/* The operators of torch_ext: the step of AdamW and Adam, gradient statistics, buckets, casts, masters. Muon's are in
 * torch_ext_muon.h.
 *
 * One pass over memory and one parallel region each, for any number of tensors. What torch.ops.torch_ext offers is the
 * same entries with the same names (csrc/torch/operators.def). */
#ifndef TORCH_EXT_OPERATORS_H
#define TORCH_EXT_OPERATORS_H

#include "torch_ext_types.h"

#ifdef __cplusplus
extern "C" {
#endif

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

/* What to do about weights beside masters that somebody else wrote to since the last step. Checksums, 64-bit checksums
 * of the weights as the last step left them, tell.
 *   I16 masters  One for each TX_CHECKSUM weights. Every remainder is legal beside every weight, so where a checksum is
 *                another one the remainders of its block become 0, which makes these weights their own masters.
 *   F32 masters  One for each TX_SAMPLED weights, of a sample: 32 of every 2048 (a parameter with up to TX_SAMPLED
 *                weights: all of them). Where one is another, the whole parameter's masters are compared with its
 *                weights, and those that don't round to them become them. Writes between the samples are not seen. */
typedef enum tx_external_write {
  TX_EXTERNAL_IGNORE = 0, /* nobody looks: the master overwrites the weight */
  TX_EXTERNAL_RESYNC = 1, /* masters become the weights before they are stepped */
  TX_EXTERNAL_CHECK = 2   /* looks, and steps nothing: TX_ERROR_BAD_STATE where a weight was written */
} tx_external_write;

/* Counted from the first element of the tensor that is passed. */
#define TX_CHECKSUM ((int64_t)1024)
#define TX_SAMPLED ((int64_t)4096)

/* Length of a row of tx_adamw_args.healths, zeroed by the caller. */
#define TX_HEALTH_LEN 69

/* One AdamW (or Adam) step over n tensors; Loshchilov & Hutter 2019, Algorithm 2, with
 *   g  = grad * clip_coef / grad_scale   (negated for maximize; + weight_decay * p where not decoupled)
 *   m  = m + (1 - beta1) * (g - m),  v = v + (1 - beta2) * (g * g - v)
 *   p  = p - (lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps) + lr * weight_decay * p)
 * in fp32 (the averages taken from the side that weighs more), bias corrections in double; the update reads m and v
 * before they are rounded to their storage. What comes of finite numbers is limited before it becomes g, to 31 * 2^59
 * (1.8e19) in size: no finite gradient makes a state non-finite. Inf and NaN propagate. Where v is in dithered 8-bit
 * codes 1 - beta2 is up to 2.8 % less, which makes up for what such codes follow too fast (csrc/math/dither_lag.h). p
 * is the master where there is one; the weight is then the master rounded to nearest even.
 *
 * Arrays have n entries; entries of one index have the same numel. Legal dtypes are the rows of csrc/core/combos.def:
 *   params       F32, BF16, F16
 *   grads        F32, BF16, F16
 *   exp_avgs     F32, BF16; F16 and U8 (e4m3) with block scales
 *   exp_avg_sqs  F32, BF16; F16 and U8 (unsigned e4m4) with block scales hold sqrt(v)
 *   masters      none; F32 beside BF16 and F16; I16 remainders beside BF16
 *   scales       U8, the e8m0 scales of exp_avg's blocks, then of exp_avg_sq's: ceil(numel / 128) for each of the two
 *                that is F16 or U8; none otherwise
 *   steps        F32, one element: completed steps. The call adds one and steps with the sum
 *   checksums    none; I64 beside masters: ceil(numel / TX_CHECKSUM) beside I16, ceil(numel / TX_SAMPLED)
 *                beside F32, as tx_master_checksum made them; the step renews them
 * and, each entry none where nobody asked for it, what the step leaves behind:
 *   changed      U8, ceil(numel / 8): bit i % 8 (the least significant is the first) of byte i / 8 is set where the
 *                step changes the bits of weight i. The others stay: whoever reads them zeroes them
 *   moved        BF16, ceil(numel / TX_BLOCK), >= 0, beside changed only: to each block's is added, rounded up, the
 *                most that the step changes one of its masters by (a weight, where there is no master): an upper
 *                bound over many steps. +Inf, for good: weights or masters of the block were written by others (in a
 *                parameter with fp32 masters that are resynced: of all blocks), or are not finite
 *   distances    U8, ceil(numel / 2), beside changed only: 4 bits of each weight, the low half of a byte first, in
 *                two's complement: to it is added by how many ulps the step changes the weight (tx_ordered_16 and _32
 *                of csrc/math/weight_change.h). -8, for good: further than 7 either way
 *   emas         BF16, F32, or BF16 with the 8 bits that follow in ema_lows: an average of the masters (of the weights,
 *                where these are F32), as tx_adamw_args.ema_decay says
 *   ema_lows     U8, numel, beside emas of BF16 only, which are then the upper 16 of 24 bits, cut off
 *   healths      I64, TX_HEALTH_LEN, at a multiple of 8 bytes: sums of the step are added to it (tx_health_of)
 * A non-zero found_inf makes the call write nothing at all except `skipped += 1`, and so does a clip_coef / grad_scale
 * that is not finite. */
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
  tx_tensor found_inf;  /* F32, one element or none: non-zero, NaN too, skips the step */
  tx_tensor skipped;    /* I64, one element or none: counts the steps skipped */
  uint64_t seed;
  int32_t moment_rounding;    /* tx_rounding of exp_avg and exp_avg_sq */
  int32_t weight_rounding;    /* tx_rounding of a 16-bit weight without a master */
  const tx_tensor *checksums; /* updated; NULL: none has one */
  tx_tensor resynced;         /* I64, one element or none: counts the elements whose master became the weight */
  int32_t on_external_write;  /* tx_external_write */
  int32_t reserved;
  const tx_tensor *changed; /* updated, as all that follow; NULL: nobody asked */
  const tx_tensor *moved;
  const tx_tensor *distances;
  const tx_tensor *emas;
  const tx_tensor *ema_lows;
  const tx_tensor *healths;
  double ema_decay;  /* ema += (1 - ema_decay) * (master - ema), in fp32, to 16 or 24 bits by dithering; in [0, 1) */
  int64_t ema_every; /* of the steps whose number is a multiple of it, >= 1; in the first of these ema = master */
  void *order; /* int32, order_bytes bytes, zeros at first; or NULL. One call (one that is refused, and tx_adamw_check,
                  too) notes in it in which order its tensors lie in memory, so that the next, of tensors that lie
                  alike, checks them in less time. Any content is legal; of one call at a time */
  int64_t order_bytes; /* 64 for each parameter are enough */
} tx_adamw_args;
#define TX_ADAMW_ARGS_INIT \
  { .size = sizeof(tx_adamw_args), .moment_rounding = TX_DITHERED, .weight_rounding = TX_DITHERED, .ema_every = 1 }
TX_API tx_status tx_adamw(const tx_adamw_args *args, const tx_parallel *parallel, tx_error *error);

/* What a row of tx_adamw_args.healths says of the weights that measured steps stepped, since it was zeroed. */
typedef struct tx_health {
  uint64_t size;
  int64_t elements;  /* 0: none was measured; all that follows is 0 */
  double update_rms; /* of what masters changed by; NaN where a weight is not finite */
  double weight_rms; /* of masters */
  double moved;      /* the share of weights whose bits changed, in [0, 1] */
  double below;      /* the share of updates below half an ulp of their weight: a master keeps what is lost of them. Of
                        weights without a master, that of those which stayed */
  double largest;    /* |weight| */
} tx_health;
#define TX_HEALTH_INIT \
  { .size = sizeof(tx_health) }
/* health: I64, TX_HEALTH_LEN. Rows of several ranks are one row when all integers are added but the last, of which the
 * largest counts. *found: begun with TX_HEALTH_INIT. */
TX_API tx_status tx_health_of(tx_tensor health, tx_health *found, tx_error *error);

/* Whether tx_adamw, or tx_adamw_offloaded, would take these: refuses what they refuse of them. Writes nothing but
 * order, and reads steps and lrs only. For a step cut into several calls, none of which is to be refused when others
 * are done. */
TX_API tx_status tx_adamw_check(const tx_adamw_args *args, tx_error *error);

/* Whether tx_adamw takes these hyper-parameters of n groups: lr, eps and weight_decay are finite and >= 0, the betas
 * are in [0, 1), and the two flags are 0 or 1; else TX_ERROR_ILLEGAL_VALUE, with a message in torch.optim's words
 * ("group 3: betas[0] is 1.0; ..."). where: how it begins instead of with the group; may be NULL. */
TX_API tx_status tx_adamw_check_groups(const tx_adamw_group *groups, int64_t n, const char *where, tx_error *error);

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
 * found_inf = 1 where an element or the norm is not finite (clip_coef is then 0, and the norm NaN where an element is
 * not finite), else 0. max_norm: > 0, INFINITY for no clipping. grad_scale: F32 one element or none (1). norm: F32 or
 * F64; clip_coef, found_inf: F32; one element each, each may be none. */
TX_API tx_status tx_grad_norm(tx_tensor stats, tx_tensor grad_scale, double max_norm, tx_tensor norm,
                              tx_tensor clip_coef, tx_tensor found_inf, tx_error *error);

/* Gradients into a bucket of wire dtype. bucket: F32, BF16, F16, or U8 (e4m3 with one e8m0 scale per block in `scales`,
 * ceil(bucket.numel / 128) bytes; offsets are then multiples of 128). offsets[i]: where grads[i] begins in the bucket,
 * ascending, not overlapping, inside the bucket (of absent gradients too). Every element of the bucket that no gradient
 * covers is zeroed; a gradient of numel 0 is "none". rounding applies to U8 buckets (thresholds from seed, step and the
 * index in the bucket); others round to nearest. */
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
 * shard's dtype; accumulate: shard += that, in fp32. n >= 1. Chunks are of one dtype (F32, BF16, F16, or U8 with
 * scales) and have the shard's numel; shard is F32, BF16 or F16. Where it does not accumulate, one of the chunks may be
 * the shard: the same memory in the same dtype. stats (TX_STATS_LEN int64 or none) receives the
 * statistics of what the shard holds afterwards. */
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
  TX_FORMAT_SIGNED = 0,  /* U8: e4m3, F16: itself; times 2^scale: exp_avg and wire data */
  TX_FORMAT_SQRT = 1,    /* U8: unsigned e4m4, F16: itself; times 2^scale, squared: exp_avg_sq */
  TX_FORMAT_MOMENTUM = 2 /* U8: e3m4, F16: itself; times 2^scale: Muon's momentum_buffer */
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

typedef enum tx_resync_mode {
  TX_RESYNC_STALE = 0, /* masters that no longer round to their weight (-0 equals +0, NaN equals NaN) become it */
  TX_RESYNC_ALL = 1,   /* all become their weights */
  TX_RESYNC_COUNT = 2  /* as STALE, but only counts: masters are not written */
} tx_resync_mode;

/* masters: F32 beside BF16 or F16 params, or I16 remainders beside BF16 (every remainder is legal beside every weight,
 * so only TX_RESYNC_ALL changes them; who wrote to such weights, tx_master_checksum knows). changed: I64 [n], added to:
 * elements whose bits change; may be none. */
TX_API tx_status tx_master_resync(int64_t n, const tx_tensor *params, const tx_tensor *masters, int32_t mode,
                                  tx_tensor changed, const tx_parallel *parallel, tx_error *error);

typedef enum tx_checksum_mode {
  TX_CHECKSUM_CHECK = 0,  /* only counts */
  TX_CHECKSUM_RESYNC = 1, /* where a checksum is another one masters become weights, and it is renewed */
  TX_CHECKSUM_RENEW = 2   /* checksums become those of the weights as they are; masters stay */
} tx_checksum_mode;

/* Weights against their checksums (tx_external_write). params, masters, checksums: as of tx_adamw; an entry whose
 * checksums are none is passed over. stale: I64 [n], added to: the elements whose masters become, or would become,
 * their weights (beside I16: all of a block); may be none. */
TX_API tx_status tx_master_checksum(int64_t n, const tx_tensor *params, const tx_tensor *masters,
                                    const tx_tensor *checksums, int32_t mode, tx_tensor stale,
                                    const tx_parallel *parallel, tx_error *error);

#ifdef __cplusplus
}
#endif

#endif
