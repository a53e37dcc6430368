/* tx_grad_stats and tx_grad_norm: the global norm as integers, and the clip coefficient. */
#include "csrc/ops/stats.h"

#include "csrc/core/fp_mode.h"
#include "csrc/core/status.h"
#include "csrc/cpu/kernels.h"
#include "csrc/math/norm.h"
#include "csrc/ops/operator_checks.h"
#include "csrc/ops/parallel.h"
#include "csrc/ops/tensor.h"

void tx_stats_merge(tx_stats *to, const tx_stats *from) {
  tx_exact_merge(to->limbs, from->limbs);
  to->non_finite = tx_counted(to->non_finite, from->non_finite);
  if (from->first_bad && (!to->first_bad || from->first_bad < to->first_bad)) to->first_bad = from->first_bad;
}

void tx_stats_add_to(tx_tensor tensor, const tx_stats *stats) {
  if (!tensor.numel) return;
  tx_stats sum = {0};
  memcpy(sum.limbs, tensor.data, sizeof sum.limbs);
  sum.non_finite = tx_get_i64(tensor, TX_NORM_LIMBS);
  tx_stats_merge(&sum, stats);
  memcpy(tensor.data, sum.limbs, sizeof sum.limbs);
  tx_set_i64(tensor, TX_NORM_LIMBS, sum.non_finite);
}

/* -- tx_grad_stats -------------------------------------------------------------------------------------------- */

typedef struct stats_context {
  const tx_kernels *kernels;
  const tx_tensor *grads;
  tx_stats total;
} stats_context;

static void stats_piece(void *ctx, void *local, int64_t i, int64_t begin, int64_t count) {
  const stats_context *c = ctx;
  tx_stats *stats = local;
  const tx_stats_loop loop = c->kernels->stats[tx_form_plain(c->grads[i].dtype)];
  const int64_t non_finite = loop(tx_advanced(c->grads[i], begin), count, stats->limbs);
  if (non_finite && (!stats->first_bad || i + 1 < stats->first_bad)) stats->first_bad = i + 1;
  stats->non_finite += non_finite;
}

static void stats_merge(void *ctx, const void *local) {
  tx_stats_merge(&((stats_context *)ctx)->total, local);
}

tx_status tx_grad_stats(int64_t n, const tx_tensor *grads, tx_tensor stats, tx_tensor first_bad,
                        const tx_parallel *parallel, tx_error *error) {
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(tx_check_grad_stats(n, grads, stats, first_bad, error));
  stats_context context = {tx_kernels_selected(), grads, {{0}, 0, 0}};
  const tx_parallel_work work = {.n = n,
                                 .tensors = grads,
                                 .piece = stats_piece,
                                 .merge = stats_merge,
                                 .local_bytes = sizeof(tx_stats),
                                 .ctx = &context};
  TX_FORWARD(tx_parallel_work_run(&work, parallel, error));
  tx_stats_add_to(stats, &context.total);
  const int64_t bad = context.total.first_bad - 1;
  if (first_bad.numel && bad >= 0 && bad < tx_get_i64(first_bad, 0)) tx_set_i64(first_bad, 0, bad);
  return TX_OK;
}

/* -- tx_grad_norm --------------------------------------------------------------------------------------------- */

static void set_norm(tx_tensor stats, tx_tensor grad_scale, double max_norm, tx_tensor norm, tx_tensor clip_coef,
                     tx_tensor found_inf) {
  int64_t limbs[TX_NORM_LIMBS];
  memcpy(limbs, stats.data, sizeof limbs);
  const tx_norm n = tx_norm_of(limbs, tx_get_i64(stats, TX_NORM_LIMBS), (double)tx_get_f32(grad_scale, 1.0f), max_norm);
  tx_set_float(norm, n.norm);
  tx_set_float(clip_coef, n.clip_coef);
  tx_set_float(found_inf, n.found_inf);
}

tx_status tx_grad_norm(tx_tensor stats, tx_tensor grad_scale, double max_norm, tx_tensor norm, tx_tensor clip_coef,
                       tx_tensor found_inf, tx_error *error) {
  TX_FORWARD(tx_check_grad_norm(stats, grad_scale, max_norm, norm, clip_coef, found_inf, error));
  const tx_fp_mode saved = tx_fp_enter();
  set_norm(stats, grad_scale, max_norm, norm, clip_coef, found_inf);
  tx_fp_leave(saved);
  return TX_OK;
}
