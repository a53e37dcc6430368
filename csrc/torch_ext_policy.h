/* The training policy: every dtype, decided from the model's dtype and the user's settings (tx_policy_resolve), and the
 * dynamic loss scale. */
#ifndef TORCH_EXT_POLICY_H
#define TORCH_EXT_POLICY_H

#include "torch_ext_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The configuration that a key belongs to: the optimizer's, the data-parallel buckets', or both (bits). */
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
#define TX_TEXT_CAPACITY 32

/* The policy: one field per row of csrc/policy.def, with the key's name, in the order of the rows. The widest
 * fields come first, so that the struct has no padding. Plain data: copy it, compare it, store it. */
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
  int32_t reserved; /* 0; makes the number of 4-byte fields even */
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

/* TX_POLICY_lr ...: the position of each field. TX_POLICY_FIELDS is the number of fields. */
typedef enum tx_policy_key {
#define TX_ROW(type, name, sides, initial, legal) TX_POLICY_##name,
#include "policy.def"
#undef TX_ROW
  TX_POLICY_FIELDS
} tx_policy_key;

/* Row i of the table of fields; NULL past the end. For bindings that build their mirror of tx_policy from it. Static
 * storage. */
typedef struct tx_policy_field {
  const char *name;  /* the key */
  const char *legal; /* "fp32, fp16", "no_shard, optim, ...", "[0, inf)"; a leading "none, " where None is legal */
  int64_t offset;    /* in tx_policy */
  int64_t bytes;
  int32_t type; /* tx_field_type */
  int32_t side; /* tx_side bits: the configurations that have this key; 0: none, so that it cannot be set */
} tx_policy_field;
TX_API const tx_policy_field *tx_policy_field_at(int32_t i);

/* What is sharded over the ranks: the values of data_parallel_sharding_strategy, which takes the name ("optim_grads")
 * or the number. */
typedef enum tx_strategy {
  TX_NO_SHARD = 0,
  TX_OPTIM = 1,             /* masters and optimizer states */
  TX_OPTIM_GRADS = 2,       /* gradients too */
  TX_OPTIM_GRADS_PARAMS = 3 /* parameters too */
} tx_strategy;

/* Finds the tx_strategy with this name ("optim"). Any other name is TX_ERROR_ILLEGAL_VALUE, and the message lists the
 * legal ones. If the name is another library's for one of them ("zero2", "fsdp"), the message says which one it is
 * here. `where` is put in front of the message as it is ("strategy="). */
TX_API tx_status tx_strategy_find(const char *where, const char *name, int32_t *strategy, tx_error *error);

/* One word for the dtypes of all optimizer states: the values of `states`, which takes the name ("8bit") or the number.
 * Bytes are those of weight, gradient, moments and master weight per parameter, if weights and gradients are bf16.
 *
 *   word            moments   master of a 16-bit weight                      bytes
 *   fp32            fp32      fp32                                           16
 *   bf16            bf16      fp32                                           12
 *   bf16_remainder  bf16      16-bit remainder; bf16 weights only            10
 *   8bit            8 bits    16-bit remainder for bf16 weights, else fp32   8.02
 *
 * An fp32 weight is its own master, also where FSDP2 computes with a 16-bit copy of it. */
typedef enum tx_states {
  TX_STATES_BY_KEY = 0, /* None: exp_avg_dtype, exp_avg_sq_dtype, store_param_remainders ... decide */
  TX_STATES_FP32 = 1,
  TX_STATES_BF16 = 2,
  TX_STATES_BF16_REMAINDER = 3,
  TX_STATES_8BIT = 4
} tx_states;

/* Whether bf16 gradients are compressed for sending: the values of grad_comm_compression, which takes the name ("auto")
 * or the number. The key's former name, compress_below_gbps, is still accepted, with a number of Gbit/s: 0 is off, inf
 * is on, any other number is auto. */
typedef enum tx_grad_comm_compression {
  TX_COMPRESSION_AUTO = 0, /* if the link is slow (TX_COMPRESS_BELOW_MBPS) */
  TX_COMPRESSION_OFF = 1,
  TX_COMPRESSION_ON = 2 /* always, even if the speed of the link is not known */
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

/* A hook receives the resolved policy and answers with settings that win over all others. It sets *settings to an array
 * of *n entries, which it owns and must keep until tx_policy_resolve returns. If it returns a status other than TX_OK,
 * the resolution ends with that status; the hook may write the reason into `error`, which is never NULL. */
typedef tx_status (*tx_policy_hook)(void *ctx, const tx_policy *policy, const tx_setting **settings, int64_t *n,
                                    tx_error *error);

/* The user's settings for one side: a mapping, a hook, both, or (all zero) neither. */
typedef struct tx_policy_overrides {
  int64_t n;
  const tx_setting *settings;
  tx_policy_hook hook;
  void *hook_ctx;
} tx_policy_overrides;

typedef enum tx_preset {
  TX_PRESET_SEED = 0,        /* bf16 models get bf16 moments, gradients and buckets, and fp32 masters */
  TX_PRESET_CONSERVATIVE = 1 /* every state is fp32 unless asked otherwise */
} tx_preset;

#define TX_UNSET (-1)
typedef struct tx_policy_args {
  uint64_t size;
  int64_t n_config;
  const tx_setting *config;      /* the optimizer's: lr, min_lr, optimizer, clip_grad, weight_decay ... pass verbatim */
  tx_policy_overrides optimizer; /* override_optimizer_config */
  tx_policy_overrides ddp;       /* override_ddp_config */
  int32_t model_dtype;           /* tx_dtype of most trainable elements: F32, F16 or BF16; TX_NONE: no model */
  int32_t bf16;                  /* 0, 1 or TX_UNSET */
  int32_t fp16;                  /* 0, 1 or TX_UNSET; wins over bf16 if both are 1 */
  int32_t preset;                /* tx_preset */
  int32_t full_shard;            /* 1: distributed optimizer, NaN check, optim_grads_params, overlap; overrides win */
  int32_t shard_dtype; /* F32: the dtype of FSDP2's shards, if model_dtype is what it computes in; else TX_NONE */
} tx_policy_args;
#define TX_POLICY_ARGS_INIT \
  { .size = sizeof(tx_policy_args), .bf16 = TX_UNSET, .fp16 = TX_UNSET }

/* Where a value came from, weakest first. */
typedef enum tx_source {
  TX_SOURCE_DEFAULT = 0,  /* the library's default */
  TX_SOURCE_CONFIG = 1,   /* the optimizer's configuration */
  TX_SOURCE_DTYPE = 2,    /* the model's dtype */
  TX_SOURCE_PRESET = 3,   /* the conservative preset, or full_shard */
  TX_SOURCE_FOLLOWS = 4,  /* derived from the explicit value of another field: `cause` */
  TX_SOURCE_OVERRIDE = 5, /* override_optimizer_config, override_ddp_config, a flag */
  TX_SOURCE_HOOK = 6      /* a hook's answer */
} tx_source;
typedef struct tx_origin {
  int32_t source; /* tx_source */
  int32_t cause;  /* tx_policy_key of the field that this value follows, or -1 */
} tx_origin;
/* The name of a source: "default", "config", "dtype", "preset", "follows", "override", "hook"; "unknown source" for a
 * number that is none. */
TX_API const char *tx_source_name(tx_source source);

/* clang-format off */
/* Resolves the whole policy from the model's dtype and all settings merged. For each key, from weak to strong:
 *
 *   default < config < dtype < preset < overrides < hooks
 *
 * The steps, in this order:
 *
 *   1. resolve
 *   2. call each hook once
 *   3. merge the hooks' answers as explicit settings
 *   4. resolve again
 *   5. look for contradictions
 *
 * Only two explicit values can contradict each other (TX_ERROR_CONFLICT; the message names both keys). The model's
 * dtype and the flags bf16 and fp16 count as explicit. A value that is not explicit gives way to an explicit one:
 *
 *   explicit                                     what follows it
 *   use_precision_aware_optimizer: off           exp_avg_dtype, exp_avg_sq_dtype: fp32
 *   exp_avg_dtype or exp_avg_sq_dtype: not fp32  use_precision_aware_optimizer: on
 *   grad_reduce_in_fp32                          main_grads_dtype, grad_comm_dtype: fp32 for on, param_dtype for off
 *   main_grads_dtype                             grad_comm_dtype, grad_reduce_in_fp32
 *   states                                       exp_avg_dtype, exp_avg_sq_dtype, main_params_dtype,
 *                                                store_param_remainders, as the word says (tx_states)
 *
 * In the result main_grads_dtype and grad_comm_dtype are never TX_NONE. main_params_dtype TX_NONE means that the
 * weights are their own masters.
 *
 * policy: written (its size field must be set). origins: NULL, or n_origins entries (TX_POLICY_FIELDS), written. */
/* clang-format on */
TX_API tx_status tx_policy_resolve(const tx_policy_args *args, tx_policy *policy, tx_origin *origins, int64_t n_origins,
                                   tx_error *error);

/* The policy for the model's parameters of another dtype (fp32 norms in a bf16 model). Explicit values of `policy`
 * stay; all others become those of a model in `dtype`. If `dtype` is shard_dtype, these parameters are the masters of
 * what is computed in param_dtype, and all values stay. policy and origins (TX_POLICY_FIELDS entries) must be as
 * tx_policy_resolve or tx_policy_with wrote them; apart from states, they are not checked again. */
TX_API tx_status tx_policy_row(const tx_policy *policy, const tx_origin *origins, tx_dtype dtype, tx_policy *row,
                               tx_error *error);

/* `policy` with further settings of the optimizer's side, which count as explicit, like overrides. Values of the policy
 * that are not explicit give way to them. If two explicit values differ or contradict each other, that is
 * TX_ERROR_CONFLICT: the message names both and calls the new settings "the argument". origins, result_origins:
 * TX_POLICY_FIELDS entries. result must not be `policy`. */
TX_API tx_status tx_policy_with(const tx_policy *policy, const tx_origin *origins, const tx_setting *list, int64_t n,
                                tx_policy *result, tx_origin *result_origins, tx_error *error);

/* The dtypes of one parameter's moments. They are those of its row of the policy (tx_policy_row), with two exceptions,
 * which get fp32: keep_32bit is 1; or one of the moments is 8-bit and the parameter has fewer than min_8bit_size
 * elements. numel counts the whole parameter, however it is sharded. */
TX_API tx_status tx_policy_moments(const tx_policy *row, int64_t numel, int32_t keep_32bit, tx_dtype *exp_avg,
                                   tx_dtype *exp_avg_sq, tx_error *error);

/* Writes the policy as a table to read: one line "key  value  origin" per field. Writes at most `capacity` bytes, a NUL
 * included. Like snprintf it returns the length of the whole text without its NUL; -1 if an argument is not legal.
 * origins: NULL, or TX_POLICY_FIELDS entries. */
TX_API int64_t tx_policy_describe(const tx_policy *policy, const tx_origin *origins, char *buffer, int64_t capacity);

/* -- scale (dynamic loss scale) ------------------------------------------------------------------------------------ */

/* State of the dynamic loss scale. Plain data: save it and load it as it is. The fields up to `hysteresis` are the
 * configuration; the last three change from step to step. */
typedef struct tx_scale {
  uint64_t size;
  double growth_factor;    /* > 1 */
  double backoff_factor;   /* in (0, 1) */
  double min_scale;        /* > 0: the least scale */
  int64_t growth_interval; /* >= 1: clean steps in a row before the scale grows */
  int64_t hysteresis;      /* >= 1: overflows since the last growth (or the start) until the scale falls */
  double scale;            /* the factor of the loss; >= min_scale, finite as fp32 */
  int64_t clean_steps;     /* clean steps in a row so far, < growth_interval */
  int64_t hysteresis_left; /* overflows until the scale falls; <= hysteresis */
} tx_scale;
#define TX_SCALE_INIT                                                                                                 \
  {                                                                                                                   \
    .size = sizeof(tx_scale), .growth_factor = 2.0, .backoff_factor = 0.5, .min_scale = 1.0, .growth_interval = 1000, \
    .hysteresis = 2, .scale = 32768.0, .hysteresis_left = 2                                                           \
  }

/* Initialises a scale with the policy's initial_loss_scale, min_loss_scale, loss_scale_window, hysteresis and
 * factors. */
TX_API tx_status tx_scale_from_policy(const tx_policy *policy, tx_scale *scale, tx_error *error);

/* Updates the scale after a step. found_inf must be agreed across ranks. Non-zero means that the step was skipped: the
 * count of clean steps restarts at 0, and once `hysteresis` overflows are used up, each overflow multiplies the scale
 * by backoff_factor, down to min_scale at most. Zero means a clean step: after growth_interval of them in a row the
 * scale is multiplied by growth_factor (unless fp32 could not hold the result), and the full hysteresis is restored. A
 * state that is not legal (a damaged checkpoint) is an error and is left unchanged. */
TX_API tx_status tx_scale_update(tx_scale *scale, int32_t found_inf, tx_error *error);

#ifdef __cplusplus
}
#endif

#endif
