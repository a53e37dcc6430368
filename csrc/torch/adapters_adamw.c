/* The adapters of adamw_, and of adamw_flat_, whose states are slices of flat tensors. Each enum lists the arguments in
 * the order of the schema. */
#include <stdlib.h>

#include "csrc/core/status.h"
#include "csrc/ops/tensor.h"
#include "csrc/torch/adapters.h"
#include "csrc/torch/signature.h"
#include "csrc/torch/value_checks.h"

/* The arguments from lrs on, which both operators share. */
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

/* Reads the shared arguments; v[0] is lrs. */
static tx_status adamw_tail(const tx_value *params, const tx_value *v, tx_adamw_args *args, tx_error *error) {
  TX_FORWARD(tx_value_table_rows(&v[GROUPS], TX_F64, "float64", sizeof(tx_adamw_group) / sizeof(double),
                                 &args->n_groups, error));
  TX_FORWARD(tx_value_meta_rows(params, &v[META], &args->meta, error));
  if (v[LRS].n && v[LRS].n != args->n_groups)
    return tx_fail(error, TX_ERROR_SHAPE, "lrs has %lld tensors for the %lld rows of groups; pass one each, or none",
                   (long long)v[LRS].n, (long long)args->n_groups);
  args->groups = v[GROUPS].tensors->data;
  args->lrs = tx_value_or_null(&v[LRS]);
  args->grad_scale = *v[GRAD_SCALE].tensors;
  args->clip_coef = *v[CLIP_COEF].tensors;
  args->found_inf = *v[FOUND_INF].tensors;
  args->skipped = *v[SKIPPED].tensors;
  args->seed = (uint64_t)v[SEED].integer;
  args->moment_rounding = tx_value_code(&v[MOMENT_ROUNDING]);
  args->weight_rounding = tx_value_code(&v[WEIGHT_ROUNDING]);
  return TX_OK;
}

tx_status tx_adapt_adamw(const tx_value *v, const tx_target *target, tx_error *error) {
  enum { PARAMS, GRADS, EXP_AVGS, EXP_AVG_SQS, MASTERS, SCALES, STEPS, TAIL };
  tx_adamw_args args = TX_ADAMW_ARGS_INIT;
  TX_FORWARD(tx_values_paired(&v[PARAMS], &v[GRADS], error));
  TX_FORWARD(tx_values_paired(&v[PARAMS], &v[EXP_AVGS], error));
  TX_FORWARD(tx_values_paired(&v[PARAMS], &v[EXP_AVG_SQS], error));
  TX_FORWARD(tx_values_paired_or_empty(&v[PARAMS], &v[MASTERS], error));
  TX_FORWARD(tx_values_same_length_or_empty(&v[PARAMS], &v[SCALES], error));
  TX_FORWARD(tx_values_same_length(&v[PARAMS], &v[STEPS], error));
  TX_FORWARD(adamw_tail(&v[PARAMS], &v[TAIL], &args, error));
  args.n = v[PARAMS].n;
  args.params = v[PARAMS].tensors;
  args.grads = v[GRADS].tensors;
  args.exp_avgs = v[EXP_AVGS].tensors;
  args.exp_avg_sqs = v[EXP_AVG_SQS].tensors;
  args.masters = tx_value_or_null(&v[MASTERS]);
  args.scales = tx_value_or_null(&v[SCALES]);
  args.steps = v[STEPS].tensors;
  return target->backend->adamw(&args, target, error);
}

/* The kinds of state: a row of adamw_flat_'s `slices` has one `slice` for each. */
enum { EXP_AVG, EXP_AVG_SQ, MASTER, SCALE, STEP, CHECKSUM, CHANGED, MOVED, DISTANCE, EMA, HEALTH, EMA_LOW, KINDS };
static const char *const kKinds[KINDS] = {"exp_avg", "exp_avg_sq", "master",   "scales", "step",   "checksums",
                                          "changed", "moved",      "distance", "ema",    "health", "ema_low"};
typedef struct slice {
  int64_t state;
  int64_t first;
  int64_t numel;
} slice;
#define WORDS ((int64_t)(sizeof(slice) / sizeof(int64_t)))

static tx_status fail_slice(const tx_value *states, const slice *s, int64_t i, int k, tx_error *error) {
  const int known = s->state >= 0 && s->state < states->n;
  return tx_fail(error, TX_ERROR_SHAPE,
                 "slices[%lld]: %s is %lld elements from %lld of states[%lld], which has %lld (of %lld states); "
                 "slices inside a state are legal",
                 (long long)i, kKinds[k], (long long)s->numel, (long long)s->first, (long long)s->state,
                 (long long)(known ? states->tensors[s->state].numel : 0), (long long)states->n);
}

/* Makes a list of tensors from slices k of n parameters. kinds: slices per row. Returns the index of the first that is
 * not legal; n if there is none. *present: whether some parameter has that kind. Lists are made kind by kind, since the
 * slices of a kind are mostly of one state. */
static int64_t cut_kind(const tx_value *states, const slice *slices, int64_t n, int kinds, int k, tx_tensor *tensors,
                        int *present) {
  int64_t at = -1, size = 0;
  tx_tensor state = tx_none();
  *present = 0;
  for (int64_t i = 0; i < n; i++) {
    const slice *s = &slices[i * kinds + k];
    tensors[i] = tx_none();
    if (s->numel == 0) continue;
    if (s->state != at) {
      if (s->state < 0 || s->state >= states->n) return i;
      at = s->state;
      state = states->tensors[at];
      size = tx_element_size(state.dtype);
    }
    if (s->first < 0 || s->numel < 0 || s->numel > state.numel || s->first > state.numel - s->numel) return i;
    tensors[i] = (tx_tensor){(char *)state.data + s->first * size, s->numel, state.dtype, state.reserved};
    *present = 1;
  }
  return n;
}

/* Makes lists of tensors from the slices of n parameters: kind k of parameter i is at [k * n + i]. Bit k of *present:
 * some parameter has that kind. */
static tx_status cut_slices(const tx_value *states, const slice *slices, int64_t n, int kinds, tx_tensor *tensors,
                            unsigned *present, tx_error *error) {
  *present = 0;
  for (int k = 0; k < kinds; k++) {
    int found;
    const int64_t legal = cut_kind(states, slices, n, kinds, k, &tensors[k * n], &found);
    if (legal < n) return fail_slice(states, &slices[legal * kinds + k], legal, k, error);
    *present |= (unsigned)found << k;
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
  TX_FORWARD(tx_check_signatures(&v[PARAMS], v[SIGNATURE].integer, v[ADDRESSES].integer, error));
  TX_FORWARD(tx_values_paired(&v[PARAMS], &v[GRADS], error));
  const tx_shape *shape = v[SLICES].shapes;
  const int64_t columns = shape->dim == 2 ? shape->sizes[1] : 0;
  const int legal = columns % WORDS == 0 && columns > CHECKSUM * WORDS && columns <= KINDS * WORDS;
  const int kinds = legal ? (int)(columns / WORDS) : CHECKSUM;
  TX_FORWARD(tx_value_table_of(&v[PARAMS], &v[SLICES], TX_I64, "int64", kinds * WORDS, error));
  TX_FORWARD(adamw_tail(&v[PARAMS], &v[TAIL], &args, error));
  if (args.skipped.numel == 2) { /* two counters */
    args.resynced = args.skipped;
    args.skipped.numel = args.resynced.numel = 1;
    args.resynced.data = (char *)args.skipped.data + sizeof(int64_t);
  }
  args.on_external_write = tx_value_code(&v[ON_EXTERNAL_WRITE]);
  tx_tensor *tensors = malloc(((size_t)n * (size_t)kinds + 1) * sizeof *tensors);
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
    args.notes = target->notes;
    args.notes_bytes = target->notes_bytes;
    status = target->backend->adamw(&args, target, error);
  }
  free(tensors);
  return status;
}
