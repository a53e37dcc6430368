/* One launch of the step: what its kernels know of a call and of each tensor.
 *
 * Kernels are compiled for each row of weights and each pair of moments that many have, and one for all others;
 * everything else (the gradient's dtype, rounding, whether the constants are usual) is the same for all lanes of a warp
 * and branched on as they run. */
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

/* What stands in the place of a row of TX_FOR_EACH_WEIGHT where it is told apart as the kernel runs, by e.weight. */
#define TX_WEIGHT_ANY TX_WEIGHTS

/* The dtypes of a row. */
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

/* Kinds of moments that kernels are compiled for. */
enum tx_moments {
  TX_MOMENTS_F32 = 0,  /* both */
  TX_MOMENTS_BF16 = 1, /* both */
  TX_MOMENTS_U8 = 2,   /* both */
  TX_MOMENTS_ANY = 3,  /* everything else, told apart as it runs */
  TX_MOMENT_KINDS = 4
};

/* Hyper-parameters of one group; lr, where it is not NULL, is one fp32 or double in device memory that stands for
 * group.lr. */
struct tx_step_group {
  tx_adamw_group group;
  const void *lr;
  int64_t lr_dtype;
};

struct tx_plain_entry {
  int64_t numel;
  void *param;
  const void *grad;
  void *exp_avg;
  void *exp_avg_sq;
  void *master;    /* NULL without */
  uint8_t *scales; /* exp_avg's, then exp_avg_sq's */
  void *checksums; /* NULL without */
  void *step;      /* one fp32 */
  int64_t id;
  uint32_t start;  /* the low half of tx_meta.start: thresholds hang on no more of it */
  uint16_t group;  /* of those in the launch's table */
  uint8_t weight;  /* row of TX_FOR_EACH_WEIGHT */
  uint8_t aligned; /* whole vectors of every stream are aligned to their size */
  uint8_t grad_dtype, exp_avg_dtype, exp_avg_sq_dtype;
  uint8_t param_alignment, grad_alignment, exp_avg_alignment, exp_avg_sq_alignment, master_alignment;
};

/* Values in device memory that every kernel of a call reads before anything else; NULL where there is none. */
struct tx_step_gate {
  const void *grad_scale, *clip_coef, *found_inf; /* one fp32 each */
};

#define TX_STEP_GROUPS 64

struct tx_plain_common {
  tx_step_gate gate;
  unsigned long long *skipped; /* NULL in all launches of a call but one, or where nobody counts */
  unsigned long long *resynced;
  uint64_t seed;
  int32_t moment_rounding, weight_rounding;
  int32_t resyncs; /* remainders of blocks whose checksum is another are dropped */
  int32_t n_groups;
  int32_t ticket; /* the launch's own, taken where its kernel is */
  int32_t looks;  /* samples beside fp32 masters are compared first (adamw_suspects.h); tiles are TX_SAMPLED then */
  tx_step_group groups[TX_STEP_GROUPS];
};

typedef tx_table<tx_plain_common, tx_plain_entry> tx_plain_table;
static_assert(tx_plain_table::kCapacity >= 200, "a model of 200 tensors is one launch");

/* Of one tensor, what the step leaves behind beside states (tx_adamw_args): each NULL where nobody asked. */
struct tx_entry_extras {
  uint8_t *changed;
  void *moved;
  uint8_t *distances;
  void *ema;
  uint8_t *ema_lows;
  unsigned long long *health;
  uint8_t ema_dtype, ema_alignment, ema_lows_alignment;
};

/* A launch in which somebody asked for something: kernels of their own, so that all others are what they were. */
struct tx_extras_entry : tx_plain_entry {
  tx_entry_extras extras;
};
struct tx_extras_common : tx_plain_common {
  int64_t ema_every;
  float ema_weight; /* 1 - ema_decay */
};
typedef tx_table<tx_extras_common, tx_extras_entry> tx_extras_table;

/* What the kernels of the including file work on: adamw_*.cu and extras_*.cu are the same but for it. */
#ifndef TX_STEP_EXTRAS
#define TX_STEP_EXTRAS 0
#endif
#if TX_STEP_EXTRAS
typedef tx_extras_entry tx_step_entry;
typedef tx_extras_table tx_step_table;
#else
typedef tx_plain_entry tx_step_entry;
typedef tx_plain_table tx_step_table;
#endif

/* Whether a row of weights has a kernel of its own beside moments of that kind. Of steps that leave something behind
 * only what `states=` makes of a model has: half of the library's bytes would be kernels that nobody calls. */
static constexpr bool tx_step_has_kernel(int weight, int moments) {
  const tx_dtype param = tx_param_of_weight(weight), master = tx_master_of_weight(weight);
  if (!TX_STEP_EXTRAS) return true;
  if (param == TX_F32) return moments == TX_MOMENTS_F32;
  if (param != TX_BF16 || moments == TX_MOMENTS_F32) return false;
  return master == TX_I16 || (master == TX_F32 && moments == TX_MOMENTS_BF16);
}

/* Launches the kernel for row `weight` of TX_FOR_EACH_WEIGHT and one kind of moments, each in a file of its own. There
 * is at least one block, also where the table has no tiles. */
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
