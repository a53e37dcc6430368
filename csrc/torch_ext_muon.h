/* Muon: its operators, two passes over memory, and what their caller decides between them. */
#ifndef TORCH_EXT_MUON_H
#define TORCH_EXT_MUON_H

#include "torch_ext_operators.h"

#ifdef __cplusplus
extern "C" {
#endif

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

#ifdef __cplusplus
}
#endif

#endif
