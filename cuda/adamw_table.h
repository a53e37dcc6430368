/* The table of one launch of the step: what its kernels know of a call and of each tensor.
 *
 * A kernel is compiled for each row of weights combined with each common pair of moment dtypes, and one for all other
 * pairs. Everything else (the gradient's dtype, the rounding, whether the constants are usual) is a branch at run time:
 * it is the same for all lanes of a warp. */
#ifndef TX_CUDA_ADAMW_TABLE_H
#define TX_CUDA_ADAMW_TABLE_H

#include "cuda/launch.h"
#include "cuda/table.h"

#ifdef __cplusplus
extern "C" {
#endif
#include "csrc/core/combos.h"
#ifdef __cplusplus
}
#endif

/* Stands for a row of TX_FOR_EACH_WEIGHT that is only known at run time, from e.weight. */
#define TX_WEIGHT_ANY TX_WEIGHTS

/* The dtypes of a row of TX_FOR_EACH_WEIGHT. */
static __host__ __device__ constexpr tx_dtype tx_param_of_weight(int weight) {
#define TX_ENTRY_(index, param, master, ...) \
  if (weight == index) return TX_##param;
  TX_FOR_EACH_WEIGHT(TX_ENTRY_)
#undef TX_ENTRY_
  return TX_NONE;
}
static __host__ __device__ constexpr tx_dtype tx_master_of_weight(int weight) {
#define TX_ENTRY_(index, param, master, ...) \
  if (weight == index) return TX_##master;
  TX_FOR_EACH_WEIGHT(TX_ENTRY_)
#undef TX_ENTRY_
  return TX_NONE;
}

/* Pairs of moment dtypes that kernels are compiled for. */
enum tx_moments {
  TX_MOMENTS_F32 = 0,  /* both fp32 */
  TX_MOMENTS_BF16 = 1, /* both bf16 */
  TX_MOMENTS_U8 = 2,   /* both in 8 bits */
  TX_MOMENTS_ANY = 3,  /* every other pair, known at run time */
  TX_MOMENT_KINDS = 4
};

/* Hyper-parameters of one group. lr: NULL, or one fp32 or double in device memory that replaces group.lr. */
struct tx_step_group {
  tx_adamw_group group;
  const void *lr;
  int64_t lr_dtype;
};

struct tx_plain_entry {
  int64_t numel;
  /* The streams of a usual tile (adamw_copies.h), in this order. */
  const void *grad;
  void *master; /* NULL: none */
  void *exp_avg;
  void *exp_avg_sq;
  void *param;
  uint8_t *scales;      /* exp_avg's, then exp_avg_sq's */
  uint8_t *root_scales; /* exp_avg_sq's */
  void *checksums;      /* NULL: none */
  void *step;           /* one fp32 */
  int64_t id;
  uint32_t start;      /* the low half of tx_meta.start; thresholds depend on no more of it */
  uint16_t group;      /* index into the launch's table of groups */
  uint8_t weight;      /* row of TX_FOR_EACH_WEIGHT */
  uint8_t aligned : 1; /* whether vectors of every stream are aligned to their size, or to 16 bytes */
  uint8_t usual : 1;   /* whether full tiles may be usual (adamw_usual.h) */
  uint8_t grad_dtype, exp_avg_dtype, exp_avg_sq_dtype;
  uint8_t param_alignment, grad_alignment, exp_avg_alignment, exp_avg_sq_alignment, master_alignment;
};

/* Values in device memory that every kernel of a call reads first: they decide whether the step is skipped. NULL:
 * none. */
struct tx_step_gate {
  const void *grad_scale, *clip_coef, *found_inf; /* one fp32 each */
};

#define TX_STEP_GROUPS 64

struct tx_plain_common {
  tx_step_gate gate;
  unsigned long long *skipped; /* NULL: not counted; set in one launch of a call only */
  unsigned long long *resynced;
  uint64_t seed;
  int32_t moment_rounding, weight_rounding;
  int32_t resyncs; /* whether remainders of blocks with a changed checksum are dropped */
  int32_t n_groups;
  int32_t ticket;           /* the launch's ticket (last_block.h), from the file of its kernel */
  int32_t compares_samples; /* whether samples are compared first (adamw_suspects.h); tiles are TX_SAMPLED then */
  tx_step_group groups[TX_STEP_GROUPS];
};

typedef tx_table<tx_plain_common, tx_plain_entry> tx_plain_table;
static_assert(tx_plain_table::kCapacity >= 200, "a model of 200 tensors is one launch");

/* Where the extra outputs of one tensor go (tx_adamw_args); NULL: not requested. */
struct tx_entry_extras {
  uint8_t *changed;
  void *moved;
  uint8_t *distances;
  void *ema;
  uint8_t *ema_lows;
  unsigned long long *health;
  uint8_t ema_dtype, ema_alignment, ema_lows_alignment;
};

/* A launch with extra outputs. It has kernels of its own, so that the others need not carry the code. */
struct tx_extras_entry : tx_plain_entry {
  tx_entry_extras extras;
};
struct tx_extras_common : tx_plain_common {
  int64_t ema_every;
  float ema_weight; /* 1 - ema_decay */
};
typedef tx_table<tx_extras_common, tx_extras_entry> tx_extras_table;

/* The table of the including file's kernels; apart from this, adamw_*.cu and extras_*.cu are the same. */
#ifndef TX_STEP_EXTRAS
#define TX_STEP_EXTRAS 0
#endif
static constexpr bool kHasExtras = TX_STEP_EXTRAS != 0;
#if TX_STEP_EXTRAS
typedef tx_extras_entry tx_step_entry;
typedef tx_extras_table tx_step_table;
#else
typedef tx_plain_entry tx_step_entry;
typedef tx_plain_table tx_step_table;
#endif

/* Whether a row of weights and a pair of moments have a kernel of their own. With extra outputs, only the combinations
 * that `states=` gives have one: kernels for all of them would make up half of the library, hardly ever used. */
static constexpr bool tx_step_has_kernel(int weight, int moments) {
  const tx_dtype param = tx_param_of_weight(weight), master = tx_master_of_weight(weight);
  if (!TX_STEP_EXTRAS) return true;
  if (param == TX_F32) return moments == TX_MOMENTS_F32;
  if (param != TX_BF16 || moments == TX_MOMENTS_F32) return false;
  return master == TX_I16 || (master == TX_F32 && moments == TX_MOMENTS_BF16);
}

/* Launches the kernel for row `weight` of TX_FOR_EACH_WEIGHT; one function for each pair of moment dtypes, in a file of
 * its own. At least one block is launched, even if the table has no tiles. */
template <class Table>
using tx_step_launch = tx_status (*)(const tx_cuda_scope *scope, int weight, Table &table, tx_error *error);
#define TX_STEP_LAUNCHES_(Table)                                                                        \
  tx_status tx_step_launch_f32(const tx_cuda_scope *scope, int weight, Table &table, tx_error *error);  \
  tx_status tx_step_launch_bf16(const tx_cuda_scope *scope, int weight, Table &table, tx_error *error); \
  tx_status tx_step_launch_u8(const tx_cuda_scope *scope, int weight, Table &table, tx_error *error);   \
  tx_status tx_step_launch_any(const tx_cuda_scope *scope, int weight, Table &table, tx_error *error);
TX_STEP_LAUNCHES_(tx_plain_table)
TX_STEP_LAUNCHES_(tx_extras_table)
#undef TX_STEP_LAUNCHES_

#endif
