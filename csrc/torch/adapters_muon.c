/* The adapters of Muon's operators. Each enum lists the arguments in the order of the schema. */
#include "csrc/core/status.h"
#include "csrc/torch/adapters.h"
#include "csrc/torch/value_checks.h"

tx_status tx_adapt_muon_momentum(const tx_value *v, const tx_target *target, tx_error *error) {
  enum {
    GRADS,
    MOMENTUMS,
    SCALES,
    UPDATES,
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
  TX_FORWARD(tx_values_paired(&v[GRADS], &v[MOMENTUMS], error));
  TX_FORWARD(tx_values_same_length_or_empty(&v[GRADS], &v[SCALES], error));
  TX_FORWARD(tx_values_paired(&v[GRADS], &v[UPDATES], error));
  TX_FORWARD(tx_values_same_length(&v[GRADS], &v[STEPS], error));
  TX_FORWARD(tx_value_meta_rows(&v[GRADS], &v[META], &args.meta, error));
  args.n = v[GRADS].n;
  args.grads = v[GRADS].tensors;
  args.momentums = v[MOMENTUMS].tensors;
  args.scales = tx_value_or_null(&v[SCALES]);
  args.updates = v[UPDATES].tensors;
  args.steps = v[STEPS].tensors;
  args.grad_scale = *v[GRAD_SCALE].tensors;
  args.clip_coef = *v[CLIP_COEF].tensors;
  args.momentum = v[MOMENTUM].real;
  args.nesterov = tx_value_code(&v[NESTEROV]);
  args.seed = (uint64_t)v[SEED].integer;
  args.moment_rounding = tx_value_code(&v[MOMENT_ROUNDING]);
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
  TX_FORWARD(tx_values_paired(&v[PARAMS], &v[UPDATES], error));
  TX_FORWARD(tx_values_paired_or_empty(&v[PARAMS], &v[MASTERS], error));
  TX_FORWARD(tx_values_same_length_or_empty(&v[PARAMS], &v[CHECKSUMS], error));
  TX_FORWARD(tx_values_same_length(&v[PARAMS], &v[STEPS], error));
  for (int extra = CHANGED; extra <= HEALTHS; extra++)
    TX_FORWARD(tx_values_same_length_or_empty(&v[PARAMS], &v[extra], error));
  TX_FORWARD(tx_value_meta_rows(&v[PARAMS], &v[META], &args.meta, error));
  TX_FORWARD(
      tx_value_table_rows(&v[PARTS], TX_I64, "int64", sizeof(tx_muon_part) / sizeof(int64_t), &args.n_parts, error));
  TX_FORWARD(tx_value_table_rows(&v[RATES], TX_F64, "float64", sizeof(tx_muon_rate) / sizeof(double), &n_rates, error));
  if (n_rates != args.n_parts)
    return tx_fail(error, TX_ERROR_SHAPE, "rates has %lld rows for the %lld of parts; a row each is legal",
                   (long long)n_rates, (long long)args.n_parts);
  args.n = v[PARAMS].n;
  args.params = v[PARAMS].tensors;
  args.updates = v[UPDATES].tensors;
  args.masters = tx_value_or_null(&v[MASTERS]);
  args.checksums = tx_value_or_null(&v[CHECKSUMS]);
  args.steps = v[STEPS].tensors;
  args.parts = v[PARTS].tensors->data;
  args.rates = v[RATES].tensors->data;
  args.resynced = *v[RESYNCED].tensors;
  args.seed = (uint64_t)v[SEED].integer;
  args.weight_rounding = tx_value_code(&v[WEIGHT_ROUNDING]);
  args.on_external_write = tx_value_code(&v[ON_EXTERNAL_WRITE]);
  args.changed = tx_value_or_null(&v[CHANGED]);
  args.moved = tx_value_or_null(&v[MOVED]);
  args.distances = tx_value_or_null(&v[DISTANCES]);
  args.emas = tx_value_or_null(&v[EMAS]);
  args.ema_lows = tx_value_or_null(&v[EMA_LOWS]);
  args.healths = tx_value_or_null(&v[HEALTHS]);
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
