/* torch_ext: optimizer steps and gradient buckets for mixed-precision training.
 *
 * The public C interface, for whoever trains; nothing is exported that is not in one of the public headers. It needs no
 * torch, no CUDA and no Python.
 *
 * How it reads:
 *   1. Conventions             status, messages, dtypes, tensors, threads
 *   2. Operators               the step, gradient statistics, buckets, casts, masters
 *   3. Decisions               dtypes by name, policy (the loader), scale (loss scale)
 *   4. torch                   registration of the operators under torch.ops.torch_ext
 *
 * Beside it:
 *   torch_ext_advanced.h       for the author of an engine: planning, compression, staging, NCCL
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
 * fails and leaves it alone when it succeeds. It is UTF-8 whatever it names: bytes of a name that are not, and what is
 * left of a character where a long name is cut, become '?'. */
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
 * 2. Operators
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

/* Muon (Jordan et al. 2024), in two passes over memory. Between them the caller orthogonalises each matrix, with whose
 * products a machine's own library is fastest:
 *   tx_muon_momentum   m = momentum * m + (1 - momentum) * g,  u = nesterov ? momentum * m + (1 - momentum) * g : m
 *   the caller         o = about the nearest matrix to u with orthonormal rows or columns
 *   tx_muon_update     p = p - (lr * o + decay * p)
 *
 * A parameter is one matrix or several that lie one after the other: a stack of experts, the parts of a fused
 * projection. Parts, rows of an int64 tensor [n, 2] in torch, say where matrices begin: in the order of their tensors
 * and in a tensor ascending, the first of each tensor at its first element. A tensor without elements has none. */
typedef struct tx_muon_part {
  int64_t tensor;
  int64_t begin;
} tx_muon_part;

/* g = grad * clip_coef / grad_scale, limited in size as tx_adamw's; the averages, in fp32, are taken from the side that
 * weighs more, and u from the m that is not yet rounded to its storage. Non-finite gradients give non-finite results.
 * The caller takes the norms of matrices from works, with tx_grad_stats: their owner has no more than these, rounded.
 *
 * Arrays have n entries; entries of one index have the same numel.
 *   grads      F32, BF16, F16
 *   momentums  F32, BF16; F16 and U8 (TX_FORMAT_MOMENTUM) with block scales
 *   scales     U8, the e8m0 scales of momentum's blocks where it is F16 or U8; none otherwise
 *   works      F32 or BF16: u, rounded to nearest
 *   steps      F32, one element: completed steps; thresholds are those of the next one. Not changed */
typedef struct tx_muon_momentum_args {
  uint64_t size;
  int64_t n;
  const tx_tensor *grads;     /* read */
  const tx_tensor *momentums; /* updated */
  const tx_tensor *scales;    /* updated; NULL: none has one */
  const tx_tensor *works;     /* written */
  const tx_tensor *steps;     /* read */
  const tx_meta *meta;        /* NULL: id = position, start = 0; groups are not looked at */
  tx_tensor grad_scale;       /* F32, one element or none */
  tx_tensor clip_coef;        /* F32, one element or none */
  double momentum;            /* in [0, 1] */
  uint64_t seed;
  int32_t nesterov;        /* 0 or 1 */
  int32_t moment_rounding; /* tx_rounding */
} tx_muon_momentum_args;
#define TX_MUON_MOMENTUM_ARGS_INIT \
  { .size = sizeof(tx_muon_momentum_args), .momentum = 0.95, .nesterov = 1, .moment_rounding = TX_DITHERED }
TX_API tx_status tx_muon_momentum(const tx_muon_momentum_args *args, const tx_parallel *parallel, tx_error *error);

/* What the update of one matrix is multiplied by; a row of a float64 tensor [n, 2] in torch. Both finite and >= 0. */
typedef struct tx_muon_rate {
  double lr;    /* of this matrix's shape (tx_muon_lr_ratio) */
  double decay; /* lr * weight_decay, of the group's lr */
} tx_muon_rate;

/* Arrays have n entries; entries of one index have the same numel. Params, masters and checksums are tx_adamw's, and
 * so is what the weight becomes beside a master, and what the step leaves behind, where somebody asked for it: changed,
 * moved, distances, emas, ema_lows and healths.
 *   updates    F32, BF16: o
 *   steps      F32, one element: completed steps. The call adds one */
typedef struct tx_muon_update_args {
  uint64_t size;
  int64_t n;
  const tx_tensor *params;    /* updated */
  const tx_tensor *updates;   /* read */
  const tx_tensor *masters;   /* updated; NULL: none has one */
  const tx_tensor *checksums; /* updated; NULL: none has one */
  const tx_tensor *steps;     /* updated */
  const tx_meta *meta;        /* as tx_muon_momentum_args' */
  int64_t n_parts;
  const tx_muon_part *parts;
  const tx_muon_rate *rates; /* n_parts */
  tx_tensor resynced;        /* I64, one element or none: counts the elements whose master became the weight */
  uint64_t seed;
  int32_t weight_rounding;   /* tx_rounding of a 16-bit weight without a master */
  int32_t on_external_write; /* tx_external_write */
  const tx_tensor *changed;  /* updated, as all that follow; NULL: nobody asked */
  const tx_tensor *moved;
  const tx_tensor *distances;
  const tx_tensor *emas;
  const tx_tensor *ema_lows;
  const tx_tensor *healths;
  double ema_decay;  /* as tx_adamw_args' */
  int64_t ema_every; /* likewise */
} tx_muon_update_args;
#define TX_MUON_UPDATE_ARGS_INIT \
  { .size = sizeof(tx_muon_update_args), .weight_rounding = TX_DITHERED, .ema_every = 1 }
TX_API tx_status tx_muon_update(const tx_muon_update_args *args, const tx_parallel *parallel, tx_error *error);

/* Hyper-parameters of one group, in torch.optim.Muon's words. */
typedef struct tx_muon_group {
  double lr;
  double weight_decay;
  double momentum;
  double ns_a; /* ns_coefficients */
  double ns_b;
  double ns_c;
  double eps;
  int64_t ns_steps;
} tx_muon_group;

/* Whether Muon takes them: lr, weight_decay and eps are finite and >= 0, momentum is in [0, 1], ns_steps in [1, 100),
 * and with these coefficients and as many steps no singular value from 0 to 1 leaves [0, 64], so that finite
 * matrices have finite products; else TX_ERROR_ILLEGAL_VALUE, with a message in torch.optim's words. where: how it
 * begins; may be NULL. */
TX_API tx_status tx_muon_check_group(const tx_muon_group *group, const char *where, tx_error *error);

/* Which iteration orthogonalises a matrix, and what for. */
typedef enum tx_muon_ns {
  TX_MUON_STANDARD = 0, /* iterates on the matrix */
  TX_MUON_GRAM = 1,     /* iterates on its Gram matrix, of the smaller dimension: fewer operations for oblong ones */
  TX_MUON_AUTO = 2      /* whichever takes fewer operations; the standard one where both take as many */
} tx_muon_ns;

/* The operations (multiplications and additions) of all products of one orthogonalisation. restart: after how many
 * steps the Gram iteration begins anew from the matrix, 0: never. panel: of symmetric products, 0: as one thread makes
 * them where there are no tiles, on whichever machine this runs. 0 where an argument is not legal. */
TX_API double tx_muon_operations(int64_t rows, int64_t columns, int64_t ns_steps, int32_t ns, int64_t restart,
                                 int64_t panel);

/* Columns of a panel of a symmetric product of n columns, all of whose factors are symmetric or each other's
 * transposes: of each panel the rows from its first column on are multiplied out, and tx_muon_mirror has the rest.
 * threads: that make one product. tiles: whether the processor multiplies bf16 in tiles (tx_isa_has_tiles). n: all at
 * once. A multiple of 64 where it is less. 0 where n < 1. */
TX_API int64_t tx_muon_panel(int64_t n, int32_t dtype, int64_t threads, int32_t tiles);

/* The elements to the right of the diagonal blocks of a matrix [n, n] become those on the other side: element (i, j), i
 * below j / panel * panel, becomes (j, i). square: F32, BF16 or F16. */
TX_API tx_status tx_muon_mirror(tx_tensor square, int64_t n, int64_t panel, const tx_parallel *parallel,
                                tx_error *error);

/* What lr is multiplied by for a matrix of this shape. match_rms_adamw: 0: sqrt(max(1, rows / columns)); 1: 0.2 *
 * sqrt(max(rows, columns)). */
TX_API double tx_muon_lr_ratio(int64_t rows, int64_t columns, int32_t match_rms_adamw);

/* Bytes that tx_plan_owners works in. 0 where an argument is not legal. */
TX_API int64_t tx_plan_owners_bytes(int64_t n, int64_t ranks);

/* Which of `ranks` ranks owns each of n pieces of work, so that the most that one of them has to do is little more than
 * what no plan can be below. sizes: finite, >= 0; of matrices tx_muon_operations. room: tx_plan_owners_bytes, at a
 * multiple of 8; the caller's again afterwards. owners: n, written. fingerprint: written, may be NULL: a number of
 * sizes, ranks and owners, for ranks to compare. Equal arguments have equal plans on every machine. */
TX_API tx_status tx_plan_owners(int64_t n, const double *sizes, int64_t ranks, void *room, int32_t *owners,
                                int64_t *fingerprint, tx_error *error);

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

/* The instruction sets this library was built for and this processor has, slowest first; index into it with i, NULL
 * past the end. tx_isa_select picks one by name ("base", ...; NULL: the fastest, or what TORCH_EXT_ISA says) for calls
 * that begin afterwards, of all threads; TX_ERROR_UNAVAILABLE for a name that is none of them. A TORCH_EXT_ISA that is
 * none is passed over until somebody asks for NULL. */
TX_API const char *tx_isa_name(int32_t i);
TX_API const char *tx_isa_selected(void);
TX_API tx_status tx_isa_select(const char *name, tx_error *error);

/* Whether the processor multiplies matrices of bf16 in tiles (AMX), whichever loops run. */
TX_API int32_t tx_isa_has_tiles(void);

/* ---------------------------------------------------------------------------------------------------------------
 * 3. Decisions
 * ------------------------------------------------------------------------------------------------------------- */

/* -- dtypes (names, aliases, sizes: csrc/core/dtypes.def) ------------------------------------------------------- */

/* A dtype from its name: surrounding white space and case do not matter. fp32|float32|float, bf16|bfloat16,
 * fp16|float16|half, fp8|float8|uint8 (all TX_U8); "auto" gives TX_NONE. Any other name is TX_ERROR_UNKNOWN_DTYPE, and
 * the message lists the legal ones. */
TX_API tx_status tx_dtype_parse(const char *text, tx_dtype *dtype, tx_error *error);

/* The value of a configuration key whose name ends in "_dtype": tx_dtype_parse, then tx_dtype_check_key; both messages
 * name the key, the value and the legal names. */
TX_API tx_status tx_dtype_coerce(const char *key, const char *text, tx_dtype *dtype, tx_error *error);

/* main_params_dtype is fp32 or fp16; exp_avg_dtype and exp_avg_sq_dtype are fp32, fp16, bf16 or uint8; else
 * TX_ERROR_ILLEGAL_VALUE. TX_NONE is legal everywhere, and other keys take any dtype. */
TX_API tx_status tx_dtype_check_key(const char *key, tx_dtype dtype, tx_error *error);

/* "fp32" for TX_F32, "none" for TX_NONE, "unknown dtype" for a code that is none. Static storage. */
TX_API const char *tx_dtype_name(tx_dtype dtype);
/* The attribute of the torch module: "float32" for TX_F32; NULL for TX_NONE and for unknown codes. The codes are
 * 1, 2, ... up to the first NULL. Static storage. */
TX_API const char *tx_dtype_torch_name(tx_dtype dtype);
/* 1 for real floating-point types, 0 for all others (TX_U8 too: it holds codes). */
TX_API int32_t tx_dtype_is_floating(tx_dtype dtype);
/* Bytes per element. TX_NONE and unknown codes are TX_ERROR_UNKNOWN_DTYPE, never a default. */
TX_API tx_status tx_dtype_size(tx_dtype dtype, int64_t *bytes, tx_error *error);

/* -- policy (the loader) ---------------------------------------------------------------------------------------- */

/* Which configuration a key belongs to: that of the optimizer, that of the data-parallel buckets, or both. */
typedef enum tx_side { TX_SIDE_OPTIMIZER = 1, TX_SIDE_DDP = 2 } tx_side;

/* How a field of tx_policy is stored. "None" is NaN in an F64 and TX_NO_INT in an I64. */
typedef enum tx_field_type {
  TX_FIELD_F64 = 0,   /* double */
  TX_FIELD_I64 = 1,   /* int64_t */
  TX_FIELD_DTYPE = 2, /* int32_t, a tx_dtype */
  TX_FIELD_BOOL = 3,  /* int32_t, 0 or 1 */
  TX_FIELD_ENUM = 4,  /* int32_t, the position in `legal`; "None" is 0 where `legal` begins with "none" */
  TX_FIELD_TEXT = 5,  /* char[TX_TEXT_CAPACITY], NUL-terminated */
  TX_FIELD_I32 = 6    /* int32_t, a number */
} tx_field_type;
#define TX_NO_INT INT64_MIN
#define TX_TEXT_CAPACITY 32

/* What a model trains with: one field per row of csrc/policy.def, under the key's name and in that order, widest
 * first, so that there is no padding. Plain data: copy it, compare it, keep it. */
#define TX_MEMBER_F64(name) double name;
#define TX_MEMBER_I64(name) int64_t name;
#define TX_MEMBER_I32(name) int32_t name;
#define TX_MEMBER_DTYPE(name) int32_t name;
#define TX_MEMBER_BOOL(name) int32_t name;
#define TX_MEMBER_ENUM(name) int32_t name;
#define TX_MEMBER_TEXT(name) char name[TX_TEXT_CAPACITY];
typedef struct tx_policy {
  uint64_t size;
#define TX_ROW(type, name, sides, initial, legal) TX_MEMBER_##type(name)
#include "policy.def"
#undef TX_ROW
  int32_t reserved; /* 0; there so that the number of 4-byte fields is even */
} tx_policy;
#undef TX_MEMBER_F64
#undef TX_MEMBER_I64
#undef TX_MEMBER_I32
#undef TX_MEMBER_DTYPE
#undef TX_MEMBER_BOOL
#undef TX_MEMBER_ENUM
#undef TX_MEMBER_TEXT
#define TX_POLICY_INIT \
  { .size = sizeof(tx_policy) }

/* TX_POLICY_lr ...: the position of each field; TX_POLICY_FIELDS is their number. */
typedef enum tx_policy_key {
#define TX_ROW(type, name, sides, initial, legal) TX_POLICY_##name,
#include "policy.def"
#undef TX_ROW
  TX_POLICY_FIELDS
} tx_policy_key;

/* Row i of the table, for bindings that build their mirror of tx_policy from it; NULL past the end. Static storage. */
typedef struct tx_policy_field {
  const char *name;  /* the key */
  const char *legal; /* "fp32, fp16", "no_shard, optim, ...", "[0, inf)"; a leading "none, " where None is legal */
  int64_t offset;    /* in tx_policy */
  int64_t bytes;
  int32_t type; /* tx_field_type */
  int32_t side; /* tx_side bits: which of the two configurations shows it; 0: none, it cannot be set */
} tx_policy_field;
TX_API const tx_policy_field *tx_policy_field_at(int32_t i);

/* How gradients, masters and parameters are sharded; the values of data_parallel_sharding_strategy, which takes the
 * name ("optim_grads") or the number. */
typedef enum tx_strategy {
  TX_NO_SHARD = 0,
  TX_OPTIM = 1,             /* masters and optimizer states */
  TX_OPTIM_GRADS = 2,       /* gradients too */
  TX_OPTIM_GRADS_PARAMS = 3 /* parameters too */
} tx_strategy;

/* *strategy: the tx_strategy of this name ("optim"). TX_ERROR_ILLEGAL_VALUE for another, with the legal ones; where it
 * is what others call one of them ("zero2", "fsdp"), with its name here. `where` begins the message, as it is
 * ("strategy="). */
TX_API tx_status tx_strategy_find(const char *where, const char *name, int32_t *strategy, tx_error *error);

/* One word for the dtypes of all optimizer states; the values of `states`, which takes the name ("8bit") or the number.
 * Bytes: of weight, gradient, moments and master per parameter, beside weights and gradients in bf16.
 *
 *   word            moments   master of a 16-bit weight                   bytes
 *   fp32            fp32      fp32                                        16
 *   bf16            bf16      fp32                                        12
 *   bf16_remainder  bf16      16-bit remainder; bf16 weights only         10
 *   8bit            8 bits    16-bit remainder beside bf16, else fp32     8.02
 *
 * fp32 weights are their own masters, those that FSDP2 computes in 16 bits included. */
typedef enum tx_states {
  TX_STATES_BY_KEY = 0, /* None: exp_avg_dtype, exp_avg_sq_dtype, store_param_remainders ... decide */
  TX_STATES_FP32 = 1,
  TX_STATES_BF16 = 2,
  TX_STATES_BF16_REMAINDER = 3,
  TX_STATES_8BIT = 4
} tx_states;

/* Whether gradients that travel in bf16 are compressed; the values of grad_comm_compression, which takes the name
 * ("auto") or the number. The key's former name, compress_below_gbps, is still taken, with a number of Gbit/s: 0 is
 * off, inf is on, any other is auto. */
typedef enum tx_grad_comm_compression {
  TX_COMPRESSION_AUTO = 0, /* where the wire is slow (TX_COMPRESS_BELOW_MBPS) */
  TX_COMPRESSION_OFF = 1,
  TX_COMPRESSION_ON = 2 /* always, whether the wire is measured or not */
} tx_grad_comm_compression;

/* One `key: value` of a configuration. A dtype may be given as a name (TX_VALUE_TEXT) or as a code. */
typedef enum tx_value_kind {
  TX_VALUE_NONE = 0,
  TX_VALUE_BOOL = 1,  /* integer: 0 or 1 */
  TX_VALUE_INT = 2,   /* integer */
  TX_VALUE_FLOAT = 3, /* number */
  TX_VALUE_TEXT = 4,  /* text */
  TX_VALUE_DTYPE = 5  /* integer: a tx_dtype */
} tx_value_kind;
typedef struct tx_setting {
  const char *key;
  const char *text;
  double number;
  int64_t integer;
  int32_t kind; /* tx_value_kind */
  int32_t reserved;
} tx_setting;

/* A hook sees the resolved policy and answers with settings that win over everything else: *settings points to *n
 * entries that the hook owns and keeps until tx_policy_resolve returns. A status other than TX_OK ends the resolution
 * with that status; `error` is where the hook may say why (never NULL). */
typedef tx_status (*tx_policy_hook)(void *ctx, const tx_policy *policy, const tx_setting **settings, int64_t *n,
                                    tx_error *error);

/* What the user sets on one side. A mapping, a hook, both, or (all zero) neither. */
typedef struct tx_policy_overrides {
  int64_t n;
  const tx_setting *settings;
  tx_policy_hook hook;
  void *hook_ctx;
} tx_policy_overrides;

typedef enum tx_preset {
  TX_PRESET_SEED = 0,        /* a bf16 model has bf16 moments, gradients and buckets, and fp32 masters */
  TX_PRESET_CONSERVATIVE = 1 /* every state is fp32 unless asked otherwise */
} tx_preset;

#define TX_UNSET (-1)
typedef struct tx_policy_args {
  uint64_t size;
  int64_t n_config;
  const tx_setting *config;      /* the optimizer's: lr, min_lr, optimizer, clip_grad, weight_decay ... pass verbatim */
  tx_policy_overrides optimizer; /* override_optimizer_config */
  tx_policy_overrides ddp;       /* override_ddp_config */
  int32_t model_dtype;           /* tx_dtype of most trainable elements: F32, F16 or BF16; TX_NONE: no model is given */
  int32_t bf16;                  /* 0, 1 or TX_UNSET */
  int32_t fp16;                  /* 0, 1 or TX_UNSET; wins over bf16 where both are 1 */
  int32_t preset;                /* tx_preset */
  int32_t full_shard;            /* 1: distributed optimizer, NaN check, optim_grads_params, overlap; overrides win */
  int32_t shard_dtype;           /* F32: of FSDP2's shards, beside a model_dtype that is computed in; or TX_NONE */
} tx_policy_args;
#define TX_POLICY_ARGS_INIT \
  { .size = sizeof(tx_policy_args), .bf16 = TX_UNSET, .fp16 = TX_UNSET }

/* Where a value came from, weakest first. */
typedef enum tx_source {
  TX_SOURCE_DEFAULT = 0,  /* the library's default */
  TX_SOURCE_CONFIG = 1,   /* the optimizer's configuration */
  TX_SOURCE_DTYPE = 2,    /* the model's dtype */
  TX_SOURCE_PRESET = 3,   /* the conservative preset, or full_shard */
  TX_SOURCE_FOLLOWS = 4,  /* gave way to the explicit value of another field: `cause` */
  TX_SOURCE_OVERRIDE = 5, /* override_optimizer_config, override_ddp_config, a flag */
  TX_SOURCE_HOOK = 6      /* a hook's answer */
} tx_source;
typedef struct tx_origin {
  int32_t source; /* tx_source */
  int32_t cause;  /* tx_policy_key whose value this one follows, or -1 */
} tx_origin;
/* "default", "config", "dtype", "preset", "follows", "override", "hook"; "unknown source" for a number that is none. */
TX_API const char *tx_source_name(tx_source source);

/* clang-format off */
/* The whole policy from the model's dtype, once, from everything merged. For each key, from weak to strong:
 *
 *   default < config < dtype < preset < overrides < hooks
 *
 * What is done, in this order:
 *
 *   1. resolve
 *   2. call each hook once
 *   3. merge the hooks' answers as explicit settings
 *   4. resolve again
 *   5. look for contradictions
 *
 * Only two explicit values can contradict each other (TX_ERROR_CONFLICT; both keys are named). The model's dtype and
 * the flags bf16 and fp16 count as explicit. Any other value gives way to an explicit one:
 *
 *   explicit                                     what follows it
 *   use_precision_aware_optimizer: off           exp_avg_dtype, exp_avg_sq_dtype: fp32
 *   exp_avg_dtype or exp_avg_sq_dtype: not fp32  use_precision_aware_optimizer: on
 *   grad_reduce_in_fp32                          main_grads_dtype, grad_comm_dtype: fp32 for on, param_dtype for off
 *   main_grads_dtype                             grad_comm_dtype, grad_reduce_in_fp32
 *   states                                       exp_avg_dtype, exp_avg_sq_dtype, main_params_dtype,
 *                                                store_param_remainders, as the word says (tx_states)
 *
 * In the result main_grads_dtype and grad_comm_dtype are decided; main_params_dtype TX_NONE means that the weights are
 * their own masters.
 *
 * policy: written (its size field must be set). origins: NULL, or n_origins entries (TX_POLICY_FIELDS), written. */
/* clang-format on */
TX_API tx_status tx_policy_resolve(const tx_policy_args *args, tx_policy *policy, tx_origin *origins, int64_t n_origins,
                                   tx_error *error);

/* The policy for those parameters of the model that have another dtype (fp32 norms in a bf16 model): explicit values of
 * `policy` stay, all others are those of a model in `dtype`. Where that is shard_dtype, parameters in it are the
 * masters of what is computed in param_dtype, and all values stay. policy, origins (TX_POLICY_FIELDS entries): as
 * tx_policy_resolve or tx_policy_with wrote them; they are not checked anew but for states. */
TX_API tx_status tx_policy_row(const tx_policy *policy, const tx_origin *origins, tx_dtype dtype, tx_policy *row,
                               tx_error *error);

/* `policy` with more settings of the optimizer's side, as explicit as overrides: those of the policy that were not
 * explicit give way, two explicit values that differ or contradict each other are TX_ERROR_CONFLICT, which names both
 * and calls the settings "the argument". origins, result_origins: TX_POLICY_FIELDS entries. result may not be `policy`.
 */
TX_API tx_status tx_policy_with(const tx_policy *policy, const tx_origin *origins, const tx_setting *list, int64_t n,
                                tx_policy *result, tx_origin *result_origins, tx_error *error);

/* The dtypes of the moments of one parameter: those of its row of the policy (tx_policy_row), but fp32 where
 * keep_32bit is 1, or where one of them is of 8 bits and the parameter has fewer than min_8bit_size elements. numel: of
 * the whole parameter, however it is cut. */
TX_API tx_status tx_policy_moments(const tx_policy *row, int64_t numel, int32_t keep_32bit, tx_dtype *exp_avg,
                                   tx_dtype *exp_avg_sq, tx_error *error);

/* The policy as a table for people: one line "key  value  origin" per field. Writes at most `capacity` bytes, a NUL
 * included, and returns the length of the whole text without its NUL, as snprintf does; -1 where an argument is not
 * legal. origins: NULL, or TX_POLICY_FIELDS entries. */
TX_API int64_t tx_policy_describe(const tx_policy *policy, const tx_origin *origins, char *buffer, int64_t capacity);

/* -- scale (dynamic loss scale) --------------------------------------------------------------------------------- */

/* Plain data: save it and load it as it is. The first six fields configure, the last three move. */
typedef struct tx_scale {
  uint64_t size;
  double growth_factor;    /* > 1 */
  double backoff_factor;   /* in (0, 1) */
  double min_scale;        /* > 0: the scale never falls below */
  int64_t growth_interval; /* >= 1: clean steps in a row before the scale grows */
  int64_t hysteresis;      /* >= 1: overflows since the last growth (or the start) before the scale falls */
  double scale;            /* the loss is multiplied by it; >= min_scale, finite as fp32 */
  int64_t clean_steps;     /* in a row, < growth_interval */
  int64_t hysteresis_left; /* overflows until the scale falls; <= hysteresis */
} tx_scale;
#define TX_SCALE_INIT                                                                                                 \
  {                                                                                                                   \
    .size = sizeof(tx_scale), .growth_factor = 2.0, .backoff_factor = 0.5, .min_scale = 1.0, .growth_interval = 1000, \
    .hysteresis = 2, .scale = 32768.0, .hysteresis_left = 2                                                           \
  }

/* A fresh scale with the policy's initial_loss_scale, min_loss_scale, loss_scale_window, hysteresis and factors. */
TX_API tx_status tx_scale_from_policy(const tx_policy *policy, tx_scale *scale, tx_error *error);

/* After a step. found_inf, agreed across ranks, non-zero: the step was skipped; the clean steps start again, and once
 * `hysteresis` overflows are used up each one multiplies the scale by backoff_factor, not below min_scale. Zero: after
 * growth_interval clean steps the scale is multiplied by growth_factor (unless fp32 could not hold it), and the
 * hysteresis is whole again. A state that is not legal (a damaged checkpoint) is an error and stays as it is. */
TX_API tx_status tx_scale_update(tx_scale *scale, int32_t found_inf, tx_error *error);

/* ---------------------------------------------------------------------------------------------------------------
 * 4. torch
 * ------------------------------------------------------------------------------------------------------------- */

/* Registers every operator with the torch that is loaded in this process (>= 2.10), once; later calls do nothing and
 * succeed. Found through dlopen(RTLD_NOLOAD), so `import torch` comes first. A missing symbol is named together with
 * torch's version. */
TX_API tx_status tx_torch_register(tx_error *error);

/* torch's threads, for calls past its operators: as many as torch has now. TX_ERROR_BAD_STATE before tx_torch_register.
 */
TX_API tx_status tx_torch_parallel(tx_parallel *parallel, tx_error *error);

/* For the Python package, which holds Python's lock in both: operators called past torch's dispatcher. objects: how
 * Python's objects are read, once; exchange is what the capsule torch.Tensor.__dlpack_c_exchange_api__ holds, types are
 * the classes of tensors that may be read so. TX_ERROR_UNAVAILABLE where they cannot be. call: operator i of the table
 * below with a tuple of all its arguments; other threads have Python's lock while it runs. order, order_bytes: as in
 * tx_adamw_args. *taken is 0, and nothing has happened, where torch's dispatcher has to be asked. */
TX_API tx_status tx_torch_objects(const void *exchange, void *const *types, int64_t n_types, tx_error *error);
TX_API tx_status tx_torch_call(int32_t i, void *arguments, void *order, int64_t order_bytes, int32_t *taken,
                               tx_error *error);

/* Where libtorch_ext_cuda.so is, which has the operators for tensors on GPUs: beside this library, or what the
 * environment variable TORCH_EXT_CUDA_LIBRARY names. It is loaded by this call or by the first operator that meets a
 * tensor on a GPU, and never otherwise. path: `size` bytes, gets a NUL-terminated name. TX_ERROR_UNAVAILABLE says where
 * it was looked for and how to get it, or which version was found. */
TX_API tx_status tx_torch_cuda_library(char *path, int64_t size, tx_error *error);

/* The operator table: name ("adamw_") and schema ("adamw_(Tensor(a!)[] params, ...) -> ()") of row i; NULL past the
 * end. Static storage. */
TX_API const char *tx_operator_name(int32_t i);
TX_API const char *tx_operator_schema(int32_t i);

/* What a list of tensors is, or where, as one number that adamw_flat_ compares with what it gets. signature: of each
 * tensor in turn its tx_dtype, the number of its dimensions (-1 where it has no elements) and its sizes (where it has
 * some). addresses: of each tensor its address (0 where it has no elements). Never 0. words: n of them, host. */
TX_API int64_t tx_signature(int64_t n, const int64_t *words);

#ifdef __cplusplus
}
#endif

#endif
