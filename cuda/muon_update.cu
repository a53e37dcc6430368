/* Muon's second pass on the device; see tx_muon_update. Each matrix is an entry, since it has its own rate and may
 * begin anywhere. */
#include "cuda/external_writes_notes.h"
#include "cuda/extras_entry.h"
#include "cuda/muon_entry.h"

namespace {

struct entry : tx_muon_entry {
  tx_muon_one_rate rate;
};
typedef tx_table<tx_muon_rounding, entry> table;

__global__ void __launch_bounds__(TX_BLOCK_THREADS) update(const __grid_constant__ table t) {
  tx_each_vector(t, [&](const entry &e, int64_t first, int32_t count) {
    tx_muon_stored was, is;
    tx_muon_read(was, e, first, count);
    tx_muon_step_vector(is, was, e, t.common, e.rate, first, count);
    tx_muon_write(is, e, first, count);
  });
}

/* -- counting steps, after every kernel has read them ------------------------------------------------------------- */

#define TX_COUNTED 512
struct counted {
  int32_t n;
  void *steps[TX_COUNTED];
};

__global__ void count(const __grid_constant__ counted c) {
  for (int32_t i = (int32_t)threadIdx.x; i < c.n; i += (int32_t)blockDim.x)
    tx_write_value(c.steps[i], tx_read_value<float>(c.steps[i]) + 1.0f);
}

tx_status count_steps(const tx_cuda_scope *scope, const tx_muon_update_args *a, tx_error *error) {
  counted c;
  for (int64_t first = 0; first < a->n; first += TX_COUNTED) {
    c.n = (int32_t)(a->n - first < TX_COUNTED ? a->n - first : TX_COUNTED);
    for (int32_t i = 0; i < c.n; i++)
      c.steps[i] = a->steps[first + i].data;
    TX_FORWARD(tx_cuda_launch_one(scope, count, c, TX_BLOCK_THREADS, "counting Muon's steps", error));
  }
  return TX_OK;
}

/* -- the call ----------------------------------------------------------------------------------------------------- */

tx_status step_all(const tx_cuda_scope *scope, const tx_muon_update_args *a, tx_error *error) {
  static const char name[] = "Muon's update";
  table t;
  t.common = tx_muon_rounding_of(a);
  const auto launch = [&] { return tx_cuda_launch(scope, update, t, name, error); };
  const auto entry_of = [&](int64_t k) {
    entry e = {};
    static_cast<tx_muon_entry &>(e) =
        tx_muon_entry_of(a, a->parts[k].tensor, a->parts[k].begin, tx_muon_part_end(a, k));
    e.rate.rate = tx_muon_rate_at(a, k);
    return e;
  };
  TX_FORWARD(tx_table_fill(&t, 4 * TX_ROUND, a->n_parts, entry_of, launch));
  return launch();
}

/* Resyncs the masters of externally written weights if the call asks for it, and steps. */
tx_status step(const tx_cuda_scope *scope, const tx_muon_update_args *a, const tx_external_lists &lists,
               const tx_cuda_call *call, tx_error *error) {
  unsigned long long *const resynced = (unsigned long long *)(a->resynced.numel ? a->resynced.data : NULL);
  const tx_step_outputs outputs = TX_STEP_OUTPUTS_OF(a);
  for (int64_t i = 0; i < a->n; i++)
    if (tx_has_extras(outputs, i)) return tx_muon_step_with_extras(scope, a, call, error);
  if (a->on_external_write == TX_EXTERNAL_RESYNC)
    TX_FORWARD(tx_external_checksum(scope, lists, TX_CHECKSUM_RESYNC, resynced, 0, call, error));
  return step_all(scope, a, error);
}

tx_status run(const tx_cuda_scope *scope, const tx_muon_update_args *a, const tx_cuda_call *call, tx_error *error) {
  const tx_external_lists lists = {a->n, a->params, a->masters, a->checksums};
  if (scope->capturing)
    return tx_fail(error, TX_ERROR_BAD_STATE,
                   "the stream is being captured, and rates would stay what they are now in every replay; Muon's "
                   "update is not captured yet");
  if (a->on_external_write == TX_EXTERNAL_CHECK) return tx_external_refuse_written(scope, lists, call, error);
  TX_FORWARD(step(scope, a, lists, call, error));
  TX_FORWARD(count_steps(scope, a, error));
  return tx_external_checksum(scope, lists, TX_CHECKSUM_RENEW, NULL, 0, call, error);
}

}  // namespace

tx_status tx_cuda_muon_update(const tx_muon_update_args *args, const tx_cuda_call *call, tx_error *error) {
  tx_cuda_scope scope;
  TX_FORWARD(tx_check_muon_update(args, 0, error));
  TX_FORWARD(tx_cuda_check_counter("resynced", args->resynced, error));
  TX_FORWARD(tx_cuda_enter(call, &scope, error));
  return tx_cuda_leave(&scope, run(&scope, args, call, error));
}
