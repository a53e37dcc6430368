/* Muon's second pass: its table entries, and the declaration of its variant with extra outputs. */
#ifndef TX_CUDA_MUON_ENTRY_H
#define TX_CUDA_MUON_ENTRY_H

#include "cuda/launch.h"
#include "cuda/muon_weights.h"

extern "C" {
#include "csrc/ops/operator_checks.h"
#include "csrc/ops/tensor.h"
}

/* The entry of elements [begin, end) of parameter i. */
static inline tx_muon_entry tx_muon_entry_of(const tx_muon_update_args *a, int64_t i, int64_t begin, int64_t end) {
  const tx_tensor master = tx_at_or_none(a->masters, i);
  const tx_meta meta = tx_meta_of(a->meta, i);
  tx_muon_entry e = {};
  e.numel = end - begin;
  e.param = tx_advanced(a->params[i], begin);
  e.master = tx_advanced(master, begin);
  e.update = tx_advanced(a->updates[i], begin);
  e.step = a->steps[i].data;
  e.id = meta.id;
  e.start = tx_element_at(meta, begin);
  e.param_dtype = (uint8_t)a->params[i].dtype;
  e.master_dtype = (uint8_t)(master.numel ? master.dtype : TX_NONE);
  e.update_dtype = (uint8_t)a->updates[i].dtype;
  e.param_alignment = (uint8_t)tx_alignment_of(e.param);
  e.master_alignment = (uint8_t)tx_alignment_of(e.master);
  e.update_alignment = (uint8_t)tx_alignment_of(e.update);
  return e;
}

static inline tx_muon_rounding tx_muon_rounding_of(const tx_muon_update_args *a) {
  return tx_muon_rounding{a->seed, a->weight_rounding};
}

/* The end, in its parameter, of the matrix in row k of a->parts. */
static inline int64_t tx_muon_part_end(const tx_muon_update_args *a, int64_t k) {
  const bool last = k + 1 == a->n_parts || a->parts[k + 1].tensor != a->parts[k].tensor;
  return last ? a->params[a->parts[k].tensor].numel : a->parts[k + 1].begin;
}

static inline tx_muon_rate_f32 tx_muon_rate_at(const tx_muon_update_args *a, int64_t k) {
  return tx_muon_rate_f32{(float)a->rates[k].lr, (float)a->rates[k].decay};
}

/* Steps all parameters of a call with extra outputs (muon_extras.cu), but does not increment step counts or renew
 * checksums afterwards. Resyncs the masters of externally written weights on the way, if the call asks for it. */
tx_status tx_muon_step_with_extras(const tx_cuda_scope *scope, const tx_muon_update_args *a, const tx_cuda_call *call,
                                   tx_error *error);

#endif
