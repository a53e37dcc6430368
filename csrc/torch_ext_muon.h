/* Muon: its operators, which are two passes over memory, and what their caller decides between them. */
#ifndef TORCH_EXT_MUON_H
#define TORCH_EXT_MUON_H

#include "torch_ext_operators.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Muon (Jordan et al. 2024), in two passes over memory. Between them the caller orthogonalises each matrix, with the
 * matrix products of whichever library is fastest on the machine:
 *   tx_muon_momentum   m = momentum * m + (1 - momentum) * g,  u = nesterov ? momentum * m + (1 - momentum) * g : m
 *   the caller         o = about the nearest matrix to u with orthonormal rows or columns
 *   tx_muon_update     p = p - (lr * o + decay * p)
 *
 * A parameter is one matrix, or several that follow each other in memory: a stack of experts, the parts of a fused
 * projection. A tx_muon_part says where a matrix begins: in which tensor and at which element. Parts are in the order
 * of the tensors, and ascending within a tensor; the first of each tensor begins at its first element. A tensor without
 * elements has no part. In torch, parts are rows of an int64 tensor [n, 2]. */
typedef struct tx_muon_part {
  int64_t tensor;
  int64_t begin;
} tx_muon_part;

/* First pass: updates the momentum and computes u. g = grad * clip_coef / grad_scale, limited in size as in tx_adamw.
 * The averages are computed in fp32, starting from the operand with the larger weight, and u from m before it is
 * rounded to its storage. Non-finite gradients give non-finite results. The caller takes the norms of matrices from
 * updates, with tx_grad_stats, since the owner of a matrix has only these rounded values.
 *
 * Arrays have n entries; entries of one index have the same numel.
 *   grads      F32, BF16, F16
 *   momentums  F32, BF16; F16 and U8 (TX_FORMAT_MOMENTUM) with block scales
 *   scales     U8, the e8m0 scales of momentum's blocks if it is F16 or U8; none otherwise
 *   updates    F32 or BF16: u, rounded to nearest, which the caller replaces by o for tx_muon_update
 *   steps      F32, one element: completed steps; rounding thresholds are those of the next step. Not changed */
typedef struct tx_muon_momentum_args {
  uint64_t size;
  int64_t n;
  const tx_tensor *grads;     /* read */
  const tx_tensor *momentums; /* updated */
  const tx_tensor *scales;    /* updated; NULL: none has one */
  const tx_tensor *updates;   /* written */
  const tx_tensor *steps;     /* read */
  const tx_meta *meta;        /* NULL: id = position, start = 0; `group` is ignored */
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

/* The factors of one matrix's update. Both finite and >= 0. In torch a row of a float64 tensor [n, 2]. */
typedef struct tx_muon_rate {
  double lr;    /* learning rate for this matrix's shape (tx_muon_lr_ratio) */
  double decay; /* lr * weight_decay, with the group's lr */
} tx_muon_rate;

/* Second pass: applies the updates to masters and weights. Arrays have n entries; entries of one index have the same
 * numel. params, masters, checksums and the optional outputs changed, moved, distances, emas, ema_lows and healths are
 * as in tx_adamw, and so is the weight that results from a master.
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
  const tx_meta *meta;        /* as in tx_muon_momentum_args */
  int64_t n_parts;
  const tx_muon_part *parts;
  const tx_muon_rate *rates; /* n_parts */
  tx_tensor resynced;        /* I64, one element or none: counts the elements whose master became the weight */
  uint64_t seed;
  int32_t weight_rounding;   /* tx_rounding of a 16-bit weight without a master */
  int32_t on_external_write; /* tx_external_write */
  const tx_tensor *changed;  /* optional outputs, updated, as are the next five; NULL: no parameter has one */
  const tx_tensor *moved;
  const tx_tensor *distances;
  const tx_tensor *emas;
  const tx_tensor *ema_lows;
  const tx_tensor *healths;
  double ema_decay;  /* as in tx_adamw_args */
  int64_t ema_every; /* as in tx_adamw_args */
} tx_muon_update_args;
#define TX_MUON_UPDATE_ARGS_INIT \
  { .size = sizeof(tx_muon_update_args), .weight_rounding = TX_DITHERED, .ema_every = 1 }
TX_API tx_status tx_muon_update(const tx_muon_update_args *args, const tx_parallel *parallel, tx_error *error);

/* Hyper-parameters of one parameter group, under torch.optim.Muon's names. */
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

/* Checks the hyper-parameters of a group, else TX_ERROR_ILLEGAL_VALUE, with a message in torch.optim's words. lr,
 * weight_decay and eps must be finite and >= 0, momentum in [0, 1], ns_steps in [1, 100). With these coefficients and
 * this number of steps no singular value from 0 to 1 may leave [0, 64], so that finite matrices have finite products.
 * where: the beginning of the message; may be NULL. */
TX_API tx_status tx_muon_check_group(const tx_muon_group *group, const char *where, tx_error *error);

/* The iteration that orthogonalises a matrix. */
typedef enum tx_muon_ns {
  TX_MUON_STANDARD = 0, /* iterates on the matrix */
  TX_MUON_GRAM = 1, /* iterates on its Gram matrix, of the smaller dimension: fewer operations for oblong matrices */
  TX_MUON_AUTO = 2  /* whichever takes fewer operations; on a tie the standard one */
} tx_muon_ns;

/* The operations (multiplications and additions) of all products of one orthogonalisation. restart: the number of steps
 * after which the Gram iteration restarts from the matrix; 0: never. panel: columns per panel of symmetric products
 * (tx_muon_panel); 0: the panel for one thread without tiles, whichever machine this runs on. Returns 0 if an argument
 * is not legal. */
TX_API double tx_muon_operations(int64_t rows, int64_t columns, int64_t ns_steps, int32_t ns, int64_t restart,
                                 int64_t panel);

/* Columns per panel of a symmetric product of n columns (whose factors are symmetric, or each other's transposes). Of
 * each panel only the rows from its first column on are multiplied; tx_muon_mirror fills in the rest. threads: that
 * compute one product. tiles: whether the processor multiplies bf16 in tiles (tx_isa_has_tiles). Returns n for a single
 * panel, else a multiple of 64; 0 if n < 1. */
TX_API int64_t tx_muon_panel(int64_t n, int32_t dtype, int64_t threads, int32_t tiles);

/* Fills in the elements of a symmetric matrix [n, n] to the right of its diagonal blocks: element (i, j), where
 * i < j / panel * panel, becomes element (j, i). square: F32, BF16 or F16. */
TX_API tx_status tx_muon_mirror(tx_tensor square, int64_t n, int64_t panel, const tx_parallel *parallel,
                                tx_error *error);

/* The factor of lr for a matrix of this shape. match_rms_adamw: 0: sqrt(max(1, rows / columns));
 * 1: 0.2 * sqrt(max(rows, columns)). */
TX_API double tx_muon_lr_ratio(int64_t rows, int64_t columns, int32_t match_rms_adamw);

/* Bytes of workspace for tx_plan_owners. 0 if an argument is not legal. */
TX_API int64_t tx_plan_owners_bytes(int64_t n, int64_t ranks);

/* Assigns n pieces of work to `ranks` ranks so that the largest load of a rank is little more than the lower bound of
 * every plan. sizes: finite, >= 0; for matrices tx_muon_operations. workspace: tx_plan_owners_bytes, aligned to 8
 * bytes; not used after the call. owners: n entries, written. fingerprint: written, may be NULL: a hash of sizes, ranks
 * and owners, for ranks to compare. Equal arguments give equal plans on every machine. */
TX_API tx_status tx_plan_owners(int64_t n, const double *sizes, int64_t ranks, void *workspace, int32_t *owners,
                                int64_t *fingerprint, tx_error *error);

#ifdef __cplusplus
}
#endif

#endif
