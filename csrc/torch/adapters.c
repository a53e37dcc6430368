/* One function per operator; those of the optimizers are in adapters_adamw.c and adapters_muon.c. Each enum lists the
 * arguments in the order of the schema. */
#include "csrc/torch/adapters.h"

#include "csrc/core/status.h"
#include "csrc/torch/value_checks.h"

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
  TX_FORWARD(tx_value_offset_rows(&v[GRADS], &v[OFFSETS], &args.offsets, error));
  args.n = v[GRADS].n;
  args.grads = v[GRADS].tensors;
  args.bucket = *v[BUCKET].tensors;
  args.scales = *v[SCALES].tensors;
  args.seed = (uint64_t)v[SEED].integer;
  args.step = v[STEP].integer;
  args.rounding = tx_value_code(&v[ROUNDING]);
  return target->backend->bucket_pack(&args, target, error);
}

tx_status tx_adapt_bucket_accumulate(const tx_value *v, const tx_target *target, tx_error *error) {
  enum { MAIN_GRADS, GRADS };
  TX_FORWARD(tx_values_paired(&v[MAIN_GRADS], &v[GRADS], error));
  return target->backend->bucket_accumulate(v[GRADS].n, v[MAIN_GRADS].tensors, v[GRADS].tensors, target, error);
}

tx_status tx_adapt_bucket_reduce(const tx_value *v, const tx_target *target, tx_error *error) {
  enum { CHUNKS, SCALES, SHARD, STATS, SCALE, ACCUMULATE };
  tx_bucket_reduce_args args = TX_BUCKET_REDUCE_ARGS_INIT;
  TX_FORWARD(tx_values_same_length_or_empty(&v[CHUNKS], &v[SCALES], error));
  args.n = v[CHUNKS].n;
  args.chunks = v[CHUNKS].tensors;
  args.scales = tx_value_or_null(&v[SCALES]);
  args.shard = *v[SHARD].tensors;
  args.stats = *v[STATS].tensors;
  args.scale = v[SCALE].real;
  args.accumulate = tx_value_code(&v[ACCUMULATE]);
  return target->backend->bucket_reduce(&args, target, error);
}

tx_status tx_adapt_bucket_unpack(const tx_value *v, const tx_target *target, tx_error *error) {
  enum { BUCKET, SCALES, OFFSETS, TENSORS };
  const int64_t *offsets = NULL;
  TX_FORWARD(tx_value_offset_rows(&v[TENSORS], &v[OFFSETS], &offsets, error));
  return target->backend->bucket_unpack(*v[BUCKET].tensors, *v[SCALES].tensors, v[TENSORS].n, offsets,
                                        v[TENSORS].tensors, target, error);
}

tx_status tx_adapt_cast(const tx_value *v, const tx_target *target, tx_error *error) {
  enum { SRCS, DSTS, SRC_SCALES, DST_SCALES, META, FORMAT, ROUNDING, SEED, STEP };
  tx_cast_args args = TX_CAST_ARGS_INIT;
  TX_FORWARD(tx_values_paired(&v[SRCS], &v[DSTS], error));
  TX_FORWARD(tx_values_same_length_or_empty(&v[SRCS], &v[SRC_SCALES], error));
  TX_FORWARD(tx_values_same_length_or_empty(&v[SRCS], &v[DST_SCALES], error));
  TX_FORWARD(tx_value_meta_rows(&v[SRCS], &v[META], &args.meta, error));
  args.n = v[SRCS].n;
  args.srcs = v[SRCS].tensors;
  args.dsts = v[DSTS].tensors;
  args.src_scales = tx_value_or_null(&v[SRC_SCALES]);
  args.dst_scales = tx_value_or_null(&v[DST_SCALES]);
  args.seed = (uint64_t)v[SEED].integer;
  args.step = v[STEP].integer;
  args.format = tx_value_code(&v[FORMAT]);
  args.rounding = tx_value_code(&v[ROUNDING]);
  return target->backend->cast(&args, target, error);
}

tx_status tx_adapt_master_encode(const tx_value *v, const tx_target *target, tx_error *error) {
  enum { MASTERS, PARAMS, REMAINDERS };
  TX_FORWARD(tx_values_paired(&v[MASTERS], &v[PARAMS], error));
  TX_FORWARD(tx_values_paired(&v[MASTERS], &v[REMAINDERS], error));
  return target->backend->master_encode(v[MASTERS].n, v[MASTERS].tensors, v[PARAMS].tensors, v[REMAINDERS].tensors,
                                        target, error);
}

tx_status tx_adapt_master_decode(const tx_value *v, const tx_target *target, tx_error *error) {
  enum { PARAMS, REMAINDERS, MASTERS };
  TX_FORWARD(tx_values_paired(&v[PARAMS], &v[REMAINDERS], error));
  TX_FORWARD(tx_values_paired(&v[PARAMS], &v[MASTERS], error));
  return target->backend->master_decode(v[PARAMS].n, v[PARAMS].tensors, v[REMAINDERS].tensors, v[MASTERS].tensors,
                                        target, error);
}

tx_status tx_adapt_master_resync(const tx_value *v, const tx_target *target, tx_error *error) {
  enum { PARAMS, MASTERS, CHANGED, FORCE, CHECK };
  TX_FORWARD(tx_values_paired(&v[PARAMS], &v[MASTERS], error));
  const int32_t mode = v[FORCE].integer ? TX_RESYNC_ALL : v[CHECK].integer ? TX_RESYNC_COUNT : TX_RESYNC_STALE;
  if (v[FORCE].integer && v[CHECK].integer)
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "force writes and check does not: one of them is legal");
  return target->backend->master_resync(v[PARAMS].n, v[PARAMS].tensors, v[MASTERS].tensors, mode, *v[CHANGED].tensors,
                                        target, error);
}

tx_status tx_adapt_master_checksum(const tx_value *v, const tx_target *target, tx_error *error) {
  enum { PARAMS, MASTERS, CHECKSUMS, STALE, MODE };
  TX_FORWARD(tx_values_paired(&v[PARAMS], &v[MASTERS], error));
  TX_FORWARD(tx_values_same_length(&v[PARAMS], &v[CHECKSUMS], error));
  return target->backend->master_checksum(v[PARAMS].n, v[PARAMS].tensors, v[MASTERS].tensors, v[CHECKSUMS].tensors,
                                          tx_value_code(&v[MODE]), *v[STALE].tensors, target, error);
}
