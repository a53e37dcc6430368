#include "csrc/ops/external.h"

#include <stdlib.h>

#include "csrc/core/dtype.h"
#include "csrc/core/status.h"
#include "csrc/cpu/kernels.h"
#include "csrc/ops/convert.h"
#include "csrc/ops/tensor.h"
#include "csrc/ops/work.h"

/* -- what belongs together ------------------------------------------------------------------------------------ */

static int64_t witnesses_of(tx_tensor master) {
  const int64_t weights = master.dtype == TX_I16 ? TX_WITNESS : TX_SAMPLED;
  return master.dtype == TX_I16 || master.dtype == TX_F32 ? (master.numel + weights - 1) / weights : 0;
}

tx_status tx_check_witnesses(const tx_tensor *masters, const tx_tensor *witnesses, int64_t i, tx_error *error) {
  const tx_tensor witness = tx_at_or_none(witnesses, i), master = tx_at_or_none(masters, i);
  if (witness.numel == 0) return TX_OK;
  const int64_t wanted = witnesses_of(master);
  if (witness.dtype == TX_I64 && witness.numel == wanted) return TX_OK;
  return tx_fail(error, TX_ERROR_SHAPE,
                 "witnesses[%lld] is %lld elements of %s beside %lld masters in %s; none, or %lld of int64 are legal "
                 "(one for %d weights beside int16, for %d beside fp32)",
                 (long long)i, (long long)witness.numel, tx_dtype_name(witness.dtype), (long long)master.numel,
                 master.numel ? tx_dtype_name(master.dtype) : "none", (long long)wanted, (int)TX_WITNESS,
                 (int)TX_SAMPLED);
}

static int has(const tx_tensor *witnesses, const tx_tensor *masters, int64_t i, tx_dtype dtype) {
  return tx_at_or_none(witnesses, i).numel > 0 && masters[i].dtype == dtype;
}

/* -- one pass over all witnesses of one kind -------------------------------------------------------------------- */

typedef struct pass {
  const tx_kernels *kernels;
  int64_t n;
  const tx_tensor *params, *masters, *witnesses;
  tx_dtype master; /* of those that are looked at */
  int32_t mode;
  int64_t *strays; /* [n], added to: weights in blocks (I16), or samples (F32), that are others */
} pass;

static void pass_piece(void *ctx, void *local, int64_t i, int64_t begin, int64_t count) {
  const pass *p = ctx;
  int64_t *strays = local;
  void *const param = tx_advanced(p->params[i], begin);
  const int64_t block = p->master == TX_I16 ? TX_WITNESS : TX_SAMPLED;
  void *const witnesses = tx_advanced(p->witnesses[i], begin / block);
  if (p->master == TX_I16) {
    strays[i] += p->kernels->witness(param, tx_advanced(p->masters[i], begin), witnesses, count, p->mode);
  } else {
    strays[i] += p->kernels->sample(param, witnesses, count, p->params[i].numel <= TX_SAMPLED, p->mode);
  }
}

static void pass_merge(void *ctx, const void *local) {
  const pass *p = ctx;
  const int64_t *strays = local;
  for (int64_t i = 0; i < p->n; i++)
    p->strays[i] += strays[i];
}

/* Below so many elements waking other threads takes longer than a look at a sample of them. */
#define ALONE ((int64_t)1 << 20)

/* looked_at: scratch of n tensors. */
static tx_status run_pass(const pass *p, tx_tensor *looked_at, const tx_parallel *parallel, tx_error *error) {
  int64_t total = 0;
  for (int64_t i = 0; i < p->n; i++) {
    looked_at[i] = has(p->witnesses, p->masters, i, p->master) ? p->params[i] : tx_none();
    total += looked_at[i].numel;
  }
  if (total == 0) return TX_OK;
  pass context = *p;
  const tx_work work = {.n = p->n,
                        .tensors = looked_at,
                        .piece = pass_piece,
                        .merge = pass_merge,
                        .local_bytes = (size_t)p->n * sizeof(int64_t),
                        .alignment = TX_SAMPLED,
                        .ctx = &context};
  return tx_work_run(&work, total < ALONE ? NULL : parallel, error);
}

/* -- looking ---------------------------------------------------------------------------------------------------- */

/* What one look needs, in one allocation. */
typedef struct look {
  int64_t *counts;    /* [n]: elements that stray */
  int64_t *suspect;   /* [n]: non-zero where a sample is another */
  tx_tensor *masters; /* [n]: scratch */
} look;

static tx_status look_begin(look *l, int64_t n, tx_error *error) {
  char *memory = calloc((size_t)n + 1, 2 * sizeof(int64_t) + sizeof(tx_tensor));
  if (!memory) return tx_fail(error, TX_ERROR_OUT_OF_MEMORY, "no memory to look at %lld params", (long long)n);
  l->counts = (int64_t *)(void *)memory;
  l->suspect = l->counts + n;
  l->masters = (tx_tensor *)(void *)(l->suspect + n);
  return TX_OK;
}

/* fp32 masters of parameters whose sample is another, element by element. */
static tx_status look_at_samples(const pass *all, const look *l, const tx_parallel *parallel, tx_error *error) {
  pass p = *all;
  p.master = TX_F32;
  p.strays = l->suspect;
  TX_FORWARD(run_pass(&p, l->masters, parallel, error));
  if (p.mode == TX_WITNESS_RENEW) return TX_OK;
  int any = 0;
  for (int64_t i = 0; i < p.n; i++) {
    l->masters[i] = l->suspect[i] ? p.masters[i] : tx_none();
    any |= l->suspect[i] != 0;
  }
  if (!any) return TX_OK;
  const int32_t mode = p.mode == TX_WITNESS_CHECK ? TX_RESYNC_COUNT : TX_RESYNC_STRAYS;
  const tx_tensor counts = {l->counts, p.n, TX_I64, 0};
  TX_FORWARD(tx_master_resync(p.n, p.params, l->masters, mode, counts, parallel, error));
  if (p.mode == TX_WITNESS_CHECK) return TX_OK;
  p.mode = TX_WITNESS_RENEW;
  return run_pass(&p, l->masters, parallel, error);
}

static tx_status look_at_remainders(const pass *all, const look *l, const tx_parallel *parallel, tx_error *error) {
  pass p = *all;
  p.master = TX_I16;
  p.strays = l->counts;
  return run_pass(&p, l->masters, parallel, error);
}

tx_status tx_notice_external(const tx_adamw_args *args, int64_t *resynced, const tx_parallel *parallel,
                             tx_error *error) {
  if (!args->masters || !args->witnesses) return TX_OK;
  const int check = args->on_external_write == TX_EXTERNAL_CHECK;
  const pass all = {.kernels = tx_kernels_selected(),
                    .n = args->n,
                    .params = args->params,
                    .masters = args->masters,
                    .witnesses = args->witnesses,
                    .mode = check ? TX_WITNESS_CHECK : TX_WITNESS_RESYNC};
  look l;
  TX_FORWARD(look_begin(&l, args->n, error));
  tx_status status = look_at_samples(&all, &l, parallel, error);
  if (status == TX_OK && check) status = look_at_remainders(&all, &l, parallel, error);
  for (int64_t i = 0; status == TX_OK && i < args->n; i++) {
    if (check && l.counts[i]) {
      status = tx_fail(error, TX_ERROR_BAD_STATE,
                       "params[%lld]: %lld elements are not what their masters round to: somebody else wrote to them "
                       "since the last step; resync the masters first",
                       (long long)i, (long long)l.counts[i]);
    }
    *resynced += l.counts[i];
  }
  free(l.counts);
  return status;
}

/* -- tx_master_witness ------------------------------------------------------------------------------------------ */

static tx_status check_pair(const tx_tensor *params, const tx_tensor *masters, int64_t i, tx_error *error) {
  if (masters[i].numel == 0 || tx_combo_weight(params[i].dtype, masters[i].dtype) >= 0) return TX_OK;
  return tx_fail(
      error, TX_ERROR_DTYPE,
      "params[%lld] is %s and masters[%lld] is %s; bf16 beside fp32 or int16, and fp16 beside fp32 are legal",
      (long long)i, tx_dtype_name(params[i].dtype), (long long)i, tx_dtype_name(masters[i].dtype));
}

static tx_status check_witness_call(int64_t n, const tx_tensor *params, const tx_tensor *masters,
                                    const tx_tensor *witnesses, int32_t mode, tx_tensor strays,
                                    const tx_parallel *parallel, tx_error *error) {
  const tx_span spans[] = {{"params", params, n, 0},
                           {"masters", masters, n, mode == TX_WITNESS_RESYNC},
                           {"witnesses", witnesses, n, mode != TX_WITNESS_CHECK},
                           {"strays", &strays, 1, 1}};
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(tx_check_present("params", params, n, error));
  TX_FORWARD(tx_check_present("masters", masters, n, error));
  TX_FORWARD(tx_check_present("witnesses", witnesses, n, error));
  if (mode < TX_WITNESS_CHECK || mode > TX_WITNESS_RENEW) {
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "mode is %d; 0 (check), 1 (resync) and 2 (renew) are legal",
                   (int)mode);
  }
  TX_FORWARD(tx_check_tensors(spans, 4, error));
  TX_FORWARD(tx_check_fixed("strays", strays, TX_I64, n, 0, error));
  TX_FORWARD(tx_check_same_numel("masters", masters, "params", params, n, error));
  for (int64_t i = 0; i < n; i++) {
    TX_FORWARD(check_pair(params, masters, i, error));
    TX_FORWARD(tx_check_witnesses(masters, witnesses, i, error));
  }
  return tx_check_overlap(spans, 4, error);
}

tx_status tx_master_witness(int64_t n, const tx_tensor *params, const tx_tensor *masters, const tx_tensor *witnesses,
                            int32_t mode, tx_tensor strays, const tx_parallel *parallel, tx_error *error) {
  TX_FORWARD(check_witness_call(n, params, masters, witnesses, mode, strays, parallel, error));
  const pass all = {.kernels = tx_kernels_selected(),
                    .n = n,
                    .params = params,
                    .masters = masters,
                    .witnesses = witnesses,
                    .mode = mode};
  look l;
  TX_FORWARD(look_begin(&l, n, error));
  tx_status status = look_at_samples(&all, &l, parallel, error);
  if (status == TX_OK) status = look_at_remainders(&all, &l, parallel, error);
  for (int64_t i = 0; status == TX_OK && i < strays.numel; i++)
    tx_set_i64(strays, i, tx_get_i64(strays, i) + l.counts[i]);
  free(l.counts);
  return status;
}
