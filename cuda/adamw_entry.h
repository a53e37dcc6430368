/* Fills in the table entry of a parameter from the arguments of a call. Included by adamw.cu. */
#ifndef TX_CUDA_ADAMW_ENTRY_H
#define TX_CUDA_ADAMW_ENTRY_H

#include "cuda/adamw_table.h"
#include "cuda/extras_entry.h"
#include "cuda/vectors.h"

extern "C" {
#include "csrc/ops/operator_checks.h"
#include "csrc/ops/tensor.h"
}

namespace {

/* The data of a tensor; NULL for "none". */
void *data_of(tx_tensor tensor) {
  return tensor.numel ? tensor.data : NULL;
}

int weight_of(const tx_adamw_args *a, int64_t i) {
  const tx_tensor master = tx_at_or_none(a->masters, i);
  return tx_combo_weight((tx_dtype)a->params[i].dtype, master.numel ? (tx_dtype)master.dtype : TX_NONE);
}

/* Whether vectors of the stream are aligned to their size, or to 16 bytes if that is less. */
bool has_aligned_vectors(tx_tensor tensor) {
  const int64_t bytes = TX_VECTOR * tx_element_size((tx_dtype)tensor.dtype);
  return tensor.numel == 0 || (int64_t)tx_alignment_of(tensor.data) >= (bytes < 16 ? bytes : 16);
}

/* Whether full tiles of the tensor may be usual (adamw_usual.h), if its kernel has a path for those. */
bool may_be_usual(const tx_plain_entry &e, const tx_adamw_args *a) {
  return e.aligned && e.grad_dtype == TX_BF16 && a->moment_rounding == TX_DITHERED &&
         tx_alignment_of(e.checksums) >= sizeof(uint64_t);
}

/* weight: as weight_of(a, i), unless the parameter is empty. */
void describe(tx_plain_entry &e, const tx_adamw_args *a, int64_t i, int weight) {
  const tx_tensor param = a->params[i], grad = a->grads[i], m = a->exp_avgs[i], v = a->exp_avg_sqs[i];
  const tx_tensor master = tx_at_or_none(a->masters, i);
  const tx_meta meta = tx_meta_of(a->meta, i);
  e.numel = param.numel;
  e.param = param.data;
  e.grad = grad.data;
  e.exp_avg = m.data;
  e.exp_avg_sq = v.data;
  e.master = data_of(master);
  e.scales = (uint8_t *)data_of(tx_at_or_none(a->scales, i));
  e.root_scales = e.scales + (tx_moment_is_scaled((tx_dtype)m.dtype) ? (e.numel + TX_BLOCK - 1) / TX_BLOCK : 0);
  e.checksums = data_of(tx_at_or_none(a->checksums, i));
  e.step = a->steps[i].data;
  e.id = meta.id;
  e.start = (uint32_t)meta.start;
  e.group = 0;
  e.weight = (uint8_t)weight;
  e.aligned = has_aligned_vectors(param) && has_aligned_vectors(grad) && has_aligned_vectors(m) &&
              has_aligned_vectors(v) && has_aligned_vectors(master);
  e.grad_dtype = (uint8_t)grad.dtype;
  e.exp_avg_dtype = (uint8_t)m.dtype;
  e.exp_avg_sq_dtype = (uint8_t)v.dtype;
  e.param_alignment = (uint8_t)tx_alignment_of(param.data);
  e.grad_alignment = (uint8_t)tx_alignment_of(grad.data);
  e.exp_avg_alignment = (uint8_t)tx_alignment_of(m.data);
  e.exp_avg_sq_alignment = (uint8_t)tx_alignment_of(v.data);
  e.master_alignment = (uint8_t)tx_alignment_of(e.master);
  e.usual = may_be_usual(e, a);
}

void describe(tx_extras_entry &e, const tx_adamw_args *a, int64_t i, int weight) {
  const tx_step_outputs outputs = TX_STEP_OUTPUTS_OF(a);
  describe(static_cast<tx_plain_entry &>(e), a, i, weight);
  e.extras = tx_extras_of(outputs, i, 0);
}

/* Fills in the common fields that only launches with extra outputs have. */
void describe(tx_plain_common &, const tx_adamw_args *) {}
void describe(tx_extras_common &c, const tx_adamw_args *a) {
  c.ema_every = a->ema_every;
  c.ema_weight = (float)(1.0 - a->ema_decay);
}

}  // namespace

#endif
