#include "csrc/torch/adapters.h"

#include <stdint.h>
#include <stdlib.h>

#include "csrc/core/status.h"
#include "csrc/ops/tensor.h"

/* -- what the adapters check ----------------------------------------------------------------------------------------
 */

/* Two tensors of one index have one shape, unless one of them is flat (a shard, a range of a flat buffer) or none; how
 * many elements they have is compared by the entry. */
static bool shapes_agree(const tx_shape *a, const tx_shape *b) {
  if (a->dim <= 1 || b->dim <= 1) return true;
  if (a->dim != b->dim) return false;
  for (int64_t d = 0; d < a->dim; d++)
    if (a->sizes[d] != b->sizes[d]) return false;
  return true;
}

static tx_status same_length(const tx_value *a, const tx_value *b, tx_error *error) {
  if (a->n == b->n) return TX_OK;
  return tx_fail(error, TX_ERROR_SHAPE, "%s has %lld tensors and %s has %lld; they must have the same length",
                 a->argument->name, (long long)a->n, b->argument->name, (long long)b->n);
}

/* Element i of one list belongs to element i of the other. */
static tx_status paired(const tx_value *a, const tx_value *b, tx_error *error) {
  TX_FORWARD(same_length(a, b, error));
  for (int64_t i = 0; i < a->n; i++)
    if (!shapes_agree(&a->shapes[i], &b->shapes[i]))
      return tx_fail(error, TX_ERROR_SHAPE,
                     "%s[%lld] and %s[%lld] differ in shape; pass equal shapes, or one of them flat", a->argument->name,
                     (long long)i, b->argument->name, (long long)i);
  return TX_OK;
}

/* The tensors of a list that may be empty: NULL then. */
static const tx_tensor *or_null(const tx_value *list) {
  return list->n ? list->tensors : NULL;
}

static tx_status paired_or_empty(const tx_value *a, const tx_value *b, tx_error *error) {
  return b->n == 0 ? TX_OK : paired(a, b, error);
}

static tx_status same_length_or_empty(const tx_value *a, const tx_value *b, tx_error *error) {
  return b->n == 0 ? TX_OK : same_length(a, b, error);
}

/* A table is read as an array of C structs: `columns` values of one dtype to a row (columns == 0: a vector). Gives the
 * number of rows; 0 for a tensor without elements. */
static tx_status table_rows(const tx_value *value, tx_dtype dtype, const char *dtype_name, int64_t columns,
                            int64_t *rows, tx_error *error) {
  const tx_tensor *table = value->tensors;
  const tx_shape *shape = value->shapes;
  *rows = 0;
  if (table->numel == 0) return TX_OK;
  const bool shaped = columns ? shape->dim == 2 && shape->sizes[1] == columns : shape->dim == 1;
  if (table->dtype != dtype || !shaped) {
    if (columns)
      return tx_fail(error, TX_ERROR_SHAPE, "%s must be a table of %s with shape [rows, %lld]", value->argument->name,
                     dtype_name, (long long)columns);
    return tx_fail(error, TX_ERROR_SHAPE, "%s must be a vector of %s with shape [n]", value->argument->name,
                   dtype_name);
  }
  if ((uintptr_t)table->data % sizeof(int64_t))
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "%s must begin at a multiple of 8 bytes", value->argument->name);
  *rows = shape->sizes[0];
  return TX_OK;
}

/* A table with one row for each tensor of a list. */
static tx_status table_of(const tx_value *list, const tx_value *table, tx_dtype dtype, const char *dtype_name,
                          int64_t columns, tx_error *error) {
  int64_t rows = 0;
  TX_FORWARD(table_rows(table, dtype, dtype_name, columns, &rows, error));
  if (rows == list->n) return TX_OK;
  return tx_fail(error, TX_ERROR_SHAPE, "%s has %lld rows for the %lld tensors of %s", table->argument->name,
                 (long long)rows, (long long)list->n, list->argument->name);
}

static tx_status meta_rows(const tx_value *list, const tx_value *meta, const tx_meta **rows, tx_error *error) {
  *rows = NULL;
  if (meta->tensors->numel == 0) return TX_OK;
  TX_FORWARD(table_of(list, meta, TX_I64, "int64", sizeof(tx_meta) / sizeof(int64_t), error));
  *rows = meta->tensors->data;
  return TX_OK;
}

static tx_status offset_rows(const tx_value *list, const tx_value *offsets, const int64_t **rows, tx_error *error) {
  TX_FORWARD(table_of(list, offsets, TX_I64, "int64", 0, error));
  *rows = offsets->tensors->data;
  return TX_OK;
}

/* Codes travel as int64; an int32 field must not wrap a nonsense value round to a legal one. Any value outside int32 is
 * as illegal as INT32_MAX, which the entry refuses. */
static int32_t code(const tx_value *value) {
  return value->integer < INT32_MIN || value->integer > INT32_MAX ? INT32_MAX : (int32_t)value->integer;
}

/* -- one function per operator: the enum is the order of its schema ---------------------------------------------------
 */

/* The arguments from lrs on, which both forms of the step share. */
enum {
  LRS,
  GROUPS,
  META,
  GRAD_SCALE,
  CLIP_COEF,
  FOUND_INF,
  SKIPPED,
  SEED,
  MOMENT_ROUNDING,
  WEIGHT_ROUNDING,
  ADAMW_TAIL
};

/* v begins with lrs. */
static tx_status adamw_tail(const tx_value *params, const tx_value *v, tx_adamw_args *args, tx_error *error) {
  TX_FORWARD(
      table_rows(&v[GROUPS], TX_F64, "float64", sizeof(tx_adamw_group) / sizeof(double), &args->n_groups, error));
  TX_FORWARD(meta_rows(params, &v[META], &args->meta, error));
  if (v[LRS].n && v[LRS].n != args->n_groups)
    return tx_fail(error, TX_ERROR_SHAPE, "lrs has %lld tensors for the %lld rows of groups; pass one each, or none",
                   (long long)v[LRS].n, (long long)args->n_groups);
  args->groups = v[GROUPS].tensors->data;
  args->lrs = or_null(&v[LRS]);
  args->grad_scale = *v[GRAD_SCALE].tensors;
  args->clip_coef = *v[CLIP_COEF].tensors;
  args->found_inf = *v[FOUND_INF].tensors;
  args->skipped = *v[SKIPPED].tensors;
  args->seed = (uint64_t)v[SEED].integer;
  args->moment_rounding = code(&v[MOMENT_ROUNDING]);
  args->weight_rounding = code(&v[WEIGHT_ROUNDING]);
  return TX_OK;
}

tx_status tx_adapt_adamw(const tx_value *v, const tx_target *target, tx_error *error) {
  enum { PARAMS, GRADS, EXP_AVGS, EXP_AVG_SQS, MASTERS, SCALES, STEPS, TAIL };
  tx_adamw_args args = TX_ADAMW_ARGS_INIT;
  TX_FORWARD(paired(&v[PARAMS], &v[GRADS], error));
  TX_FORWARD(paired(&v[PARAMS], &v[EXP_AVGS], error));
  TX_FORWARD(paired(&v[PARAMS], &v[EXP_AVG_SQS], error));
  TX_FORWARD(paired_or_empty(&v[PARAMS], &v[MASTERS], error));
  TX_FORWARD(same_length_or_empty(&v[PARAMS], &v[SCALES], error));
  TX_FORWARD(same_length(&v[PARAMS], &v[STEPS], error));
  TX_FORWARD(adamw_tail(&v[PARAMS], &v[TAIL], &args, error));
  args.n = v[PARAMS].n;
  args.params = v[PARAMS].tensors;
  args.grads = v[GRADS].tensors;
  args.exp_avgs = v[EXP_AVGS].tensors;
  args.exp_avg_sqs = v[EXP_AVG_SQS].tensors;
  args.masters = or_null(&v[MASTERS]);
  args.scales = or_null(&v[SCALES]);
  args.steps = v[STEPS].tensors;
  return target->backend->adamw(&args, target, error);
}

/* Words of tx_signature, one by one: FNV-1a by words, so that lists which differ in one word never have one signature.
 */
static uint64_t signed_with(uint64_t signature, int64_t word) {
  return (signature ^ (uint64_t)word) * UINT64_C(0x100000001B3);
}

#define NO_WORDS UINT64_C(0xCBF29CE484222325)

/* Never 0, which asks for nothing. */
static int64_t closed(uint64_t signature) {
  return (int64_t)(signature ? signature : 1);
}

int64_t tx_signature(int64_t n, const int64_t *words) {
  uint64_t signature = NO_WORDS;
  for (int64_t i = 0; i < n; i++)
    signature = signed_with(signature, words[i]);
  return closed(signature);
}

static int64_t signature_of(const tx_value *list) {
  uint64_t signature = NO_WORDS;
  for (int64_t i = 0; i < list->n; i++) {
    const tx_shape *shape = &list->shapes[i];
    const bool any = list->tensors[i].numel > 0;
    signature = signed_with(signature, list->tensors[i].dtype);
    signature = signed_with(signature, any ? shape->dim : -1);
    for (int64_t d = 0; any && d < shape->dim; d++)
      signature = signed_with(signature, shape->sizes[d]);
  }
  return closed(signature);
}

/* Whether params are what Python made its tables for: words of tx_signature for each; 0: not asked. */
static tx_status check_signatures(const tx_value *params, int64_t forms, int64_t addresses, tx_error *error) {
  if (forms && forms != signature_of(params))
    return tx_fail(error, TX_ERROR_SHAPE,
                   "params have other dtypes or shapes than those that slices were made for (signature)");
  uint64_t signature = NO_WORDS;
  for (int64_t i = 0; addresses && i < params->n; i++)
    signature = signed_with(signature, (int64_t)(intptr_t)params->tensors[i].data);
  if (addresses && addresses != closed(signature))
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "params lie elsewhere than they did (addresses)");
  return TX_OK;
}

/* A row of `slices` of adamw_flat_ is one of these for each kind of state. */
enum { EXP_AVG, EXP_AVG_SQ, MASTER, SCALE, STEP, CHECKSUM, CHANGED, MOVED, DISTANCE, EMA, HEALTH, EMA_LOW, KINDS };
static const char *const kKinds[KINDS] = {"exp_avg", "exp_avg_sq", "master",   "scales", "step",   "checksums",
                                          "changed", "moved",      "distance", "ema",    "health", "ema_low"};
typedef struct slice {
  int64_t state;
  int64_t first;
  int64_t numel;
} slice;
#define WORDS ((int64_t)(sizeof(slice) / sizeof(int64_t)))

/* The slices of n parameters as lists of tensors: kind k of parameter i at [k * n + i]. kinds: slices in a row. Bit k
 * of *present: some parameter has that kind. */
static tx_status cut_slices(const tx_value *states, const slice *slices, int64_t n, int kinds, tx_tensor *tensors,
                            unsigned *present, tx_error *error) {
  *present = 0;
  for (int64_t i = 0; i < n; i++) {
    for (int k = 0; k < kinds; k++) {
      const slice *s = &slices[i * kinds + k];
      tx_tensor *tensor = &tensors[k * n + i];
      if (s->numel == 0) {
        *tensor = tx_none();
        continue;
      }
      const int known = s->state >= 0 && s->state < states->n;
      const int64_t numel = known ? states->tensors[s->state].numel : 0;
      if (!known || s->first < 0 || s->numel < 0 || s->numel > numel || s->first > numel - s->numel)
        return tx_fail(error, TX_ERROR_SHAPE,
                       "slices[%lld]: %s is %lld elements from %lld of states[%lld], which has %lld (of %lld states); "
                       "slices inside a state are legal",
                       (long long)i, kKinds[k], (long long)s->numel, (long long)s->first, (long long)s->state,
                       (long long)numel, (long long)states->n);
      *tensor = states->tensors[s->state];
      tensor->data = tx_advanced(*tensor, s->first);
      tensor->numel = s->numel;
      *present |= 1u << k;
    }
  }
  return TX_OK;
}

tx_status tx_adapt_adamw_flat(const tx_value *v, const tx_target *target, tx_error *error) {
  enum {
    PARAMS,
    GRADS,
    STATES,
    SLICES,
    TAIL,
    ON_EXTERNAL_WRITE = TAIL + ADAMW_TAIL,
    SIGNATURE,
    EMA_DECAY,
    EMA_EVERY,
    ADDRESSES
  };
  tx_adamw_args args = TX_ADAMW_ARGS_INIT;
  const int64_t n = v[PARAMS].n;
  TX_FORWARD(check_signatures(&v[PARAMS], v[SIGNATURE].integer, v[ADDRESSES].integer, error));
  TX_FORWARD(paired(&v[PARAMS], &v[GRADS], error));
  const tx_shape *shape = v[SLICES].shapes;
  const int64_t columns = shape->dim == 2 ? shape->sizes[1] : 0;
  const int legal = columns % WORDS == 0 && columns > CHECKSUM * WORDS && columns <= KINDS * WORDS;
  const int kinds = legal ? (int)(columns / WORDS) : CHECKSUM;
  TX_FORWARD(table_of(&v[PARAMS], &v[SLICES], TX_I64, "int64", kinds * WORDS, error));
  TX_FORWARD(adamw_tail(&v[PARAMS], &v[TAIL], &args, error));
  if (args.skipped.numel == 2) { /* two counters */
    args.resynced = args.skipped;
    args.skipped.numel = args.resynced.numel = 1;
    args.resynced.data = (char *)args.skipped.data + sizeof(int64_t);
  }
  args.on_external_write = code(&v[ON_EXTERNAL_WRITE]);
  tx_tensor *tensors = malloc(((size_t)n * KINDS + 1) * sizeof *tensors);
  if (!tensors) return tx_fail(error, TX_ERROR_OUT_OF_MEMORY, "no memory for the states of %lld params", (long long)n);
  unsigned present;
  tx_status status = cut_slices(&v[STATES], v[SLICES].tensors->data, n, kinds, tensors, &present, error);
  if (status == TX_OK) {
    args.n = n;
    args.params = v[PARAMS].tensors;
    args.grads = v[GRADS].tensors;
    args.exp_avgs = tensors + EXP_AVG * n;
    args.exp_avg_sqs = tensors + EXP_AVG_SQ * n;
    args.masters = present & 1u << MASTER ? tensors + MASTER * n : NULL;
    args.scales = present & 1u << SCALE ? tensors + SCALE * n : NULL;
    args.steps = tensors + STEP * n;
    args.checksums = present & 1u << CHECKSUM ? tensors + CHECKSUM * n : NULL;
    args.changed = present & 1u << CHANGED ? tensors + CHANGED * n : NULL;
    args.moved = present & 1u << MOVED ? tensors + MOVED * n : NULL;
    args.distances = present & 1u << DISTANCE ? tensors + DISTANCE * n : NULL;
    args.emas = present & 1u << EMA ? tensors + EMA * n : NULL;
    args.ema_lows = present & 1u << EMA_LOW ? tensors + EMA_LOW * n : NULL;
    args.healths = present & 1u << HEALTH ? tensors + HEALTH * n : NULL;
    args.ema_decay = v[EMA_DECAY].real;
    args.ema_every = v[EMA_EVERY].integer;
    args.order = target->order;
    args.order_bytes = target->order_bytes;
    status = target->backend->adamw(&args, target, error);
  }
  free(tensors);
  return status;
}

tx_status tx_adapt_grad_stats(const tx_value *v, const tx_target *target, tx_error *error) {
  enum { GRADS, STATS, FIRST_BAD };
  return target->backend->grad_stats(v[GRADS].n, v[GRADS].tensors, *v[STATS].tensors, *v[FIRST_BAD].tensors, target,
                                     error);
}

tx_status tx_adapt_grad_norm(const tx_value *v, const tx_target *target, tx_error *error) {
  enum { STATS, GRAD_SCALE, MAX_NORM, NORM, CLIP_COEF, FOUND_INF };
  return target->backend->grad_norm(*v[STATS].tensors, *v[GRAD_SCALE].tensors, v[MAX_NORM].real, *v[NORM].tensors,
                                    *v[CLIP_COEF].tensors, *v[FOUND_INF].tensors, target, error);
}

tx_status tx_adapt_bucket_pack(const tx_value *v, const tx_target *target, tx_error *error) {
  enum { GRADS, OFFSETS, BUCKET, SCALES, SEED, STEP, ROUNDING };
  tx_bucket_pack_args args = TX_BUCKET_PACK_ARGS_INIT;
  TX_FORWARD(offset_rows(&v[GRADS], &v[OFFSETS], &args.offsets, error));
  args.n = v[GRADS].n;
  args.grads = v[GRADS].tensors;
  args.bucket = *v[BUCKET].tensors;
  args.scales = *v[SCALES].tensors;
  args.seed = (uint64_t)v[SEED].integer;
  args.step = v[STEP].integer;
  args.rounding = code(&v[ROUNDING]);
  return target->backend->bucket_pack(&args, target, error);
}

tx_status tx_adapt_bucket_accumulate(const tx_value *v, const tx_target *target, tx_error *error) {
  enum { MAIN_GRADS, GRADS };
  TX_FORWARD(paired(&v[MAIN_GRADS], &v[GRADS], error));
  return target->backend->bucket_accumulate(v[GRADS].n, v[MAIN_GRADS].tensors, v[GRADS].tensors, target, error);
}

tx_status tx_adapt_bucket_reduce(const tx_value *v, const tx_target *target, tx_error *error) {
  enum { CHUNKS, SCALES, SHARD, STATS, SCALE, ACCUMULATE };
  tx_bucket_reduce_args args = TX_BUCKET_REDUCE_ARGS_INIT;
  TX_FORWARD(same_length_or_empty(&v[CHUNKS], &v[SCALES], error));
  args.n = v[CHUNKS].n;
  args.chunks = v[CHUNKS].tensors;
  args.scales = or_null(&v[SCALES]);
  args.shard = *v[SHARD].tensors;
  args.stats = *v[STATS].tensors;
  args.scale = v[SCALE].real;
  args.accumulate = code(&v[ACCUMULATE]);
  return target->backend->bucket_reduce(&args, target, error);
}

tx_status tx_adapt_bucket_unpack(const tx_value *v, const tx_target *target, tx_error *error) {
  enum { BUCKET, SCALES, OFFSETS, TENSORS };
  const int64_t *offsets = NULL;
  TX_FORWARD(offset_rows(&v[TENSORS], &v[OFFSETS], &offsets, error));
  return target->backend->bucket_unpack(*v[BUCKET].tensors, *v[SCALES].tensors, v[TENSORS].n, offsets,
                                        v[TENSORS].tensors, target, error);
}

tx_status tx_adapt_cast(const tx_value *v, const tx_target *target, tx_error *error) {
  enum { SRCS, DSTS, SRC_SCALES, DST_SCALES, META, FORMAT, ROUNDING, SEED, STEP };
  tx_cast_args args = TX_CAST_ARGS_INIT;
  TX_FORWARD(paired(&v[SRCS], &v[DSTS], error));
  TX_FORWARD(same_length_or_empty(&v[SRCS], &v[SRC_SCALES], error));
  TX_FORWARD(same_length_or_empty(&v[SRCS], &v[DST_SCALES], error));
  TX_FORWARD(meta_rows(&v[SRCS], &v[META], &args.meta, error));
  args.n = v[SRCS].n;
  args.srcs = v[SRCS].tensors;
  args.dsts = v[DSTS].tensors;
  args.src_scales = or_null(&v[SRC_SCALES]);
  args.dst_scales = or_null(&v[DST_SCALES]);
  args.seed = (uint64_t)v[SEED].integer;
  args.step = v[STEP].integer;
  args.format = code(&v[FORMAT]);
  args.rounding = code(&v[ROUNDING]);
  return target->backend->cast(&args, target, error);
}

tx_status tx_adapt_master_encode(const tx_value *v, const tx_target *target, tx_error *error) {
  enum { MASTERS, PARAMS, REMAINDERS };
  TX_FORWARD(paired(&v[MASTERS], &v[PARAMS], error));
  TX_FORWARD(paired(&v[MASTERS], &v[REMAINDERS], error));
  return target->backend->master_encode(v[MASTERS].n, v[MASTERS].tensors, v[PARAMS].tensors, v[REMAINDERS].tensors,
                                        target, error);
}

tx_status tx_adapt_master_decode(const tx_value *v, const tx_target *target, tx_error *error) {
  enum { PARAMS, REMAINDERS, MASTERS };
  TX_FORWARD(paired(&v[PARAMS], &v[REMAINDERS], error));
  TX_FORWARD(paired(&v[PARAMS], &v[MASTERS], error));
  return target->backend->master_decode(v[PARAMS].n, v[PARAMS].tensors, v[REMAINDERS].tensors, v[MASTERS].tensors,
                                        target, error);
}

tx_status tx_adapt_master_resync(const tx_value *v, const tx_target *target, tx_error *error) {
  enum { PARAMS, MASTERS, CHANGED, FORCE, CHECK };
  TX_FORWARD(paired(&v[PARAMS], &v[MASTERS], error));
  const int32_t mode = v[FORCE].integer ? TX_RESYNC_ALL : v[CHECK].integer ? TX_RESYNC_COUNT : TX_RESYNC_STALE;
  if (v[FORCE].integer && v[CHECK].integer)
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "force writes and check does not: one of them is legal");
  return target->backend->master_resync(v[PARAMS].n, v[PARAMS].tensors, v[MASTERS].tensors, mode, *v[CHANGED].tensors,
                                        target, error);
}

tx_status tx_adapt_master_checksum(const tx_value *v, const tx_target *target, tx_error *error) {
  enum { PARAMS, MASTERS, CHECKSUMES, STALE, MODE };
  TX_FORWARD(paired(&v[PARAMS], &v[MASTERS], error));
  TX_FORWARD(same_length(&v[PARAMS], &v[CHECKSUMES], error));
  return target->backend->master_checksum(v[PARAMS].n, v[PARAMS].tensors, v[MASTERS].tensors, v[CHECKSUMES].tensors,
                                          code(&v[MODE]), *v[STALE].tensors, target, error);
}

tx_status tx_adapt_muon_momentum(const tx_value *v, const tx_target *target, tx_error *error) {
  enum {
    GRADS,
    MOMENTUMS,
    SCALES,
    WORKS,
    STEPS,
    META,
    GRAD_SCALE,
    CLIP_COEF,
    MOMENTUM,
    NESTEROV,
    SEED,
    MOMENT_ROUNDING
  };
  tx_muon_momentum_args args = TX_MUON_MOMENTUM_ARGS_INIT;
  TX_FORWARD(paired(&v[GRADS], &v[MOMENTUMS], error));
  TX_FORWARD(same_length_or_empty(&v[GRADS], &v[SCALES], error));
  TX_FORWARD(paired(&v[GRADS], &v[WORKS], error));
  TX_FORWARD(same_length(&v[GRADS], &v[STEPS], error));
  TX_FORWARD(meta_rows(&v[GRADS], &v[META], &args.meta, error));
  args.n = v[GRADS].n;
  args.grads = v[GRADS].tensors;
  args.momentums = v[MOMENTUMS].tensors;
  args.scales = or_null(&v[SCALES]);
  args.works = v[WORKS].tensors;
  args.steps = v[STEPS].tensors;
  args.grad_scale = *v[GRAD_SCALE].tensors;
  args.clip_coef = *v[CLIP_COEF].tensors;
  args.momentum = v[MOMENTUM].real;
  args.nesterov = code(&v[NESTEROV]);
  args.seed = (uint64_t)v[SEED].integer;
  args.moment_rounding = code(&v[MOMENT_ROUNDING]);
  return target->backend->muon_momentum(&args, target, error);
}

tx_status tx_adapt_muon_update(const tx_value *v, const tx_target *target, tx_error *error) {
  enum {
    PARAMS,
    UPDATES,
    MASTERS,
    CHECKSUMS,
    STEPS,
    META,
    PARTS,
    RATES,
    RESYNCED,
    CHANGED,
    MOVED,
    DISTANCES,
    EMAS,
    EMA_LOWS,
    HEALTHS,
    SEED,
    WEIGHT_ROUNDING,
    ON_EXTERNAL_WRITE,
    EMA_DECAY,
    EMA_EVERY
  };
  tx_muon_update_args args = TX_MUON_UPDATE_ARGS_INIT;
  int64_t n_rates = 0;
  TX_FORWARD(paired(&v[PARAMS], &v[UPDATES], error));
  TX_FORWARD(paired_or_empty(&v[PARAMS], &v[MASTERS], error));
  TX_FORWARD(same_length_or_empty(&v[PARAMS], &v[CHECKSUMS], error));
  TX_FORWARD(same_length(&v[PARAMS], &v[STEPS], error));
  for (int extra = CHANGED; extra <= HEALTHS; extra++)
    TX_FORWARD(same_length_or_empty(&v[PARAMS], &v[extra], error));
  TX_FORWARD(meta_rows(&v[PARAMS], &v[META], &args.meta, error));
  TX_FORWARD(table_rows(&v[PARTS], TX_I64, "int64", sizeof(tx_muon_part) / sizeof(int64_t), &args.n_parts, error));
  TX_FORWARD(table_rows(&v[RATES], TX_F64, "float64", sizeof(tx_muon_rate) / sizeof(double), &n_rates, error));
  if (n_rates != args.n_parts)
    return tx_fail(error, TX_ERROR_SHAPE, "rates has %lld rows for the %lld of parts; a row each is legal",
                   (long long)n_rates, (long long)args.n_parts);
  args.n = v[PARAMS].n;
  args.params = v[PARAMS].tensors;
  args.updates = v[UPDATES].tensors;
  args.masters = or_null(&v[MASTERS]);
  args.checksums = or_null(&v[CHECKSUMS]);
  args.steps = v[STEPS].tensors;
  args.parts = v[PARTS].tensors->data;
  args.rates = v[RATES].tensors->data;
  args.resynced = *v[RESYNCED].tensors;
  args.seed = (uint64_t)v[SEED].integer;
  args.weight_rounding = code(&v[WEIGHT_ROUNDING]);
  args.on_external_write = code(&v[ON_EXTERNAL_WRITE]);
  args.changed = or_null(&v[CHANGED]);
  args.moved = or_null(&v[MOVED]);
  args.distances = or_null(&v[DISTANCES]);
  args.emas = or_null(&v[EMAS]);
  args.ema_lows = or_null(&v[EMA_LOWS]);
  args.healths = or_null(&v[HEALTHS]);
  args.ema_decay = v[EMA_DECAY].real;
  args.ema_every = v[EMA_EVERY].integer;
  return target->backend->muon_update(&args, target, error);
}

tx_status tx_adapt_muon_mirror(const tx_value *v, const tx_target *target, tx_error *error) {
  enum { SQUARE, PANEL };
  const tx_shape *shape = v[SQUARE].shapes;
  if (v[SQUARE].tensors->numel && (shape->dim != 2 || shape->sizes[0] != shape->sizes[1]))
    return tx_fail(error, TX_ERROR_SHAPE, "square must have shape [n, n]");
  const int64_t n = v[SQUARE].tensors->numel ? shape->sizes[0] : 0;
  return target->backend->muon_mirror(*v[SQUARE].tensors, n, v[PANEL].integer, target, error);
}
