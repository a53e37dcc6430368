#include "csrc/ops/external_writes.h"

#include <stdlib.h>

#include "csrc/core/status.h"
#include "csrc/cpu/kernels.h"
#include "csrc/math/weight_change.h"
#include "csrc/ops/operator_checks.h"
#include "csrc/ops/parallel.h"
#include "csrc/ops/tensor.h"

static int has(const tx_tensor *checksums, const tx_tensor *masters, int64_t i, tx_dtype dtype) {
  return tx_at_or_none(checksums, i).numel > 0 && masters[i].dtype == dtype;
}

/* -- one pass over all checksums of one kind -------------------------------------------------------------------- */

typedef struct pass {
  const tx_kernels *kernels;
  int64_t n;
  const tx_tensor *params, *masters, *checksums;
  tx_dtype master; /* dtype of the masters that this pass handles */
  int32_t mode;
  int64_t *stale; /* [n], added to: weights in blocks (I16), or samples (F32), whose checksum differs */
  const tx_work_room *room;
} pass;

static void pass_piece(void *ctx, void *local, int64_t i, int64_t begin, int64_t count) {
  const pass *p = ctx;
  int64_t *stale = local;
  void *const param = tx_advanced(p->params[i], begin);
  const int64_t block = p->master == TX_I16 ? TX_CHECKSUM : TX_SAMPLED;
  void *const checksums = tx_advanced(p->checksums[i], begin / block);
  if (p->master == TX_I16) {
    stale[i] += p->kernels->checksum(param, tx_advanced(p->masters[i], begin), checksums, count, p->mode);
  } else {
    stale[i] += p->kernels->sample(param, checksums, count, p->params[i].numel <= TX_SAMPLED, p->mode);
  }
}

static void pass_merge(void *ctx, const void *local) {
  const pass *p = ctx;
  const int64_t *stale = local;
  for (int64_t i = 0; i < p->n; i++)
    p->stale[i] += stale[i];
}

/* Below this many elements, waking other threads takes longer than checking their samples. */
#define ALONE ((int64_t)1 << 20)

/* Runs a pass over the tensors with masters of p->master. selected_tensors: workspace of n tensors. */
static tx_status run_pass(const pass *p, tx_tensor *selected_tensors, const tx_parallel *parallel, tx_error *error) {
  int64_t total = 0;
  for (int64_t i = 0; i < p->n; i++) {
    selected_tensors[i] = has(p->checksums, p->masters, i, p->master) ? p->params[i] : tx_none();
    total += selected_tensors[i].numel;
  }
  if (total == 0) return TX_OK;
  pass context = *p;
  const tx_parallel_work work = {.n = p->n,
                                 .tensors = selected_tensors,
                                 .piece = pass_piece,
                                 .merge = pass_merge,
                                 .local_bytes = tx_external_writes_bytes(p->n),
                                 .alignment = TX_SAMPLED,
                                 .ctx = &context,
                                 .room = *p->room};
  return tx_parallel_work_run(&work, total < ALONE ? NULL : parallel, error);
}

/* -- checks ------------------------------------------------------------------------------------------------------- */

/* The workspace of one check, in one allocation. */
typedef struct comparison {
  int64_t *counts;    /* [n]: elements whose masters do not match */
  int64_t *suspect;   /* [n]: non-zero if the checksum of a sample differs */
  tx_tensor *masters; /* [n]: workspace */
} comparison;

static tx_status comparison_begin(comparison *found, int64_t n, tx_error *error) {
  char *memory = calloc((size_t)n + 1, 2 * sizeof(int64_t) + sizeof(tx_tensor));
  if (!memory) {
    return tx_fail(error, TX_ERROR_OUT_OF_MEMORY, "no memory to compare %lld params with their masters", (long long)n);
  }
  found->counts = (int64_t *)(void *)memory;
  found->suspect = found->counts + n;
  found->masters = (tx_tensor *)(void *)(found->suspect + n);
  return TX_OK;
}

/* Checks the samples of weights with fp32 masters; compares parameters whose sample differs element by element. */
static tx_status compare_samples(const pass *all, const comparison *found, const tx_parallel *parallel,
                                 tx_error *error) {
  pass p = *all;
  p.master = TX_F32;
  p.stale = found->suspect;
  TX_FORWARD(run_pass(&p, found->masters, parallel, error));
  if (p.mode == TX_CHECKSUM_RENEW) return TX_OK;
  int any = 0;
  for (int64_t i = 0; i < p.n; i++) {
    found->masters[i] = found->suspect[i] ? p.masters[i] : tx_none();
    any |= found->suspect[i] != 0;
  }
  if (!any) return TX_OK;
  const int32_t mode = p.mode == TX_CHECKSUM_CHECK ? TX_RESYNC_COUNT : TX_RESYNC_STALE;
  const tx_tensor counts = {found->counts, p.n, TX_I64, 0};
  TX_FORWARD(tx_resync_run(p.n, p.params, found->masters, mode, counts, p.room, parallel, error));
  if (p.mode == TX_CHECKSUM_CHECK) return TX_OK;
  p.mode = TX_CHECKSUM_RENEW;
  return run_pass(&p, found->masters, parallel, error);
}

static tx_status compare_remainders(const pass *all, const comparison *found, const tx_parallel *parallel,
                                    tx_error *error) {
  pass p = *all;
  p.master = TX_I16;
  p.stale = found->counts;
  return run_pass(&p, found->masters, parallel, error);
}

/* Marks in `moved` that it is unknown how far the weights of parameter i moved. */
static void mark_moved_unknown(const tx_weights_and_masters *args, int64_t i) {
  const tx_tensor moved = tx_at_or_none(args->moved, i);
  for (int64_t b = 0; b < moved.numel; b++)
    memcpy((char *)moved.data + b * (int64_t)sizeof(uint16_t), &(const uint16_t){TX_MOVED_UNKNOWN}, sizeof(uint16_t));
}

tx_status tx_handle_external_writes(const tx_weights_and_masters *args, int64_t *resynced, const tx_work_room *room,
                                    const tx_parallel *parallel, tx_error *error) {
  if (!args->masters || !args->checksums) return TX_OK;
  const int check = args->on_external_write == TX_EXTERNAL_CHECK;
  const pass all = {.kernels = tx_kernels_selected(),
                    .n = args->n,
                    .params = args->params,
                    .masters = args->masters,
                    .checksums = args->checksums,
                    .mode = check ? TX_CHECKSUM_CHECK : TX_CHECKSUM_RESYNC,
                    .room = room};
  comparison found;
  TX_FORWARD(comparison_begin(&found, args->n, error));
  tx_status status = compare_samples(&all, &found, parallel, error);
  if (status == TX_OK && check) status = compare_remainders(&all, &found, parallel, error);
  for (int64_t i = 0; status == TX_OK && i < args->n; i++) {
    if (check && found.counts[i]) status = tx_fail_written(i, found.counts[i], error);
    if (!check && found.counts[i]) mark_moved_unknown(args, i);
    *resynced += found.counts[i];
  }
  free(found.counts);
  return status;
}

/* -- tx_master_checksum ------------------------------------------------------------------------------------------ */

tx_status tx_master_checksum(int64_t n, const tx_tensor *params, const tx_tensor *masters, const tx_tensor *checksums,
                             int32_t mode, tx_tensor stale, const tx_parallel *parallel, tx_error *error) {
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(tx_check_master_checksum(n, params, masters, checksums, mode, stale, error));
  tx_work_room room;
  TX_FORWARD(
      tx_work_room_make(&room, n, params, TX_SAMPLED, tx_threads_of(parallel), tx_external_writes_bytes(n), error));
  const pass all = {.kernels = tx_kernels_selected(),
                    .n = n,
                    .params = params,
                    .masters = masters,
                    .checksums = checksums,
                    .mode = mode,
                    .room = &room};
  comparison found = {NULL, NULL, NULL};
  tx_status status = comparison_begin(&found, n, error);
  if (status == TX_OK) status = compare_samples(&all, &found, parallel, error);
  if (status == TX_OK) status = compare_remainders(&all, &found, parallel, error);
  for (int64_t i = 0; status == TX_OK && i < stale.numel; i++)
    tx_add_count(stale, i, found.counts[i]);
  free(found.counts);
  tx_work_room_free(&room);
  return status;
}
