/* tx_cuda_adamw: splits a call into launches. */
#include "cuda/adamw_entry.h"
#include "cuda/external_writes_notes.h"
#include "cuda/last_block.h"

extern "C" {
#include "csrc/ops/check.h"
}

namespace {

constexpr int kInstances = TX_WEIGHTS * TX_MOMENT_KINDS;

template <class Table>
constexpr tx_step_launch<Table> kLaunches[TX_MOMENT_KINDS] = {tx_step_launch_f32, tx_step_launch_bf16,
                                                              tx_step_launch_u8, tx_step_launch_any};

int moments_of(tx_dtype exp_avg, tx_dtype exp_avg_sq) {
  if (exp_avg != exp_avg_sq || exp_avg == TX_F16) return TX_MOMENTS_ANY;
  return exp_avg == TX_F32 ? TX_MOMENTS_F32 : exp_avg == TX_BF16 ? TX_MOMENTS_BF16 : TX_MOMENTS_U8;
}

/* The instance of parameters without elements, which have no kernel: any launch may increment their step counts. */
constexpr int kEmpty = -1;

int instance_of(const tx_adamw_args *a, int64_t i) {
  if (a->params[i].numel == 0) return kEmpty;
  return weight_of(a, i) * TX_MOMENT_KINDS +
         moments_of((tx_dtype)a->exp_avgs[i].dtype, (tx_dtype)a->exp_avg_sqs[i].dtype);
}

unsigned long long *counter(tx_tensor tensor) {
  return (unsigned long long *)data_of(tensor);
}

tx_step_gate gate_of(const tx_adamw_args *a) {
  const tx_step_gate gate = {data_of(a->grad_scale), data_of(a->clip_coef), data_of(a->found_inf)};
  return gate;
}

/* The launches of one call; `table` is filled for each of them in turn. Table: tx_plain_table or tx_extras_table. */
template <class Table>
struct launches {
  const tx_cuda_scope *scope;
  const tx_adamw_args *args;
  bool samples;  /* whether some fp32 masters have checksums; a warp then has to work on all that a checksum covers */
  bool is_first; /* whether the next launch counts a skipped step, and increments the step counts of empty parameters */
  int instance;
  Table table;
};

template <class Table>
void begin(launches<Table> *l, int instance) {
  auto *const c = &l->table.common;
  const tx_adamw_args *a = l->args;
  const bool samples = l->samples && tx_master_of_weight(instance / TX_MOMENT_KINDS) == TX_F32;
  l->instance = instance;
  tx_table_begin(&l->table, samples ? TX_SAMPLED : TX_CHECKSUM);
  c->gate = gate_of(a);
  c->skipped = l->is_first ? counter(a->skipped) : NULL;
  c->resynced = counter(a->resynced);
  c->seed = a->seed;
  c->moment_rounding = a->moment_rounding;
  c->weight_rounding = a->weight_rounding;
  c->resyncs = a->on_external_write == TX_EXTERNAL_RESYNC;
  c->compares_samples = c->resyncs && samples;
  c->n_groups = 0;
  describe(*c, a);
}

/* The group's index in the launch's table, to which it is added if necessary; -1: no room. */
template <class Table>
int32_t place_of_group(launches<Table> *l, int64_t group, int64_t *places) {
  tx_plain_common *c = &l->table.common;
  for (int32_t i = c->n_groups; i-- > 0;)
    if (places[i] == group) return i;
  if (c->n_groups == TX_STEP_GROUPS) return -1;
  tx_step_group *g = &c->groups[c->n_groups];
  const tx_adamw_args *a = l->args;
  g->group = a->groups[group];
  g->lr = a->lrs ? a->lrs[group].data : NULL;
  g->lr_dtype = a->lrs ? a->lrs[group].dtype : TX_NONE;
  places[c->n_groups] = group;
  return c->n_groups++;
}

template <class Table>
bool add(launches<Table> *l, int64_t i, int64_t *places) {
  typename Table::entry e;
  describe(e, l->args, i, l->instance / TX_MOMENT_KINDS);
  const int32_t place = place_of_group(l, tx_meta_of(l->args->meta, i).group, places);
  if (place < 0) return false;
  e.group = (uint16_t)place;
  return tx_table_append(&l->table, e);
}

template <class Table>
tx_status launch(launches<Table> *l, tx_error *error) {
  l->is_first = false;
  return kLaunches<Table>[l->instance % TX_MOMENT_KINDS](l->scope, l->instance / TX_MOMENT_KINDS, l->table, error);
}

template <class Table>
tx_status step_some(launches<Table> *l, int instance, bool takes_empty, tx_error *error) {
  int64_t places[TX_STEP_GROUPS];
  begin(l, instance);
  for (int64_t i = 0; i < l->args->n; i++) {
    const int of = instance_of(l->args, i);
    if (of != instance && !(of == kEmpty && takes_empty)) continue;
    if (add(l, i, places)) continue;
    TX_FORWARD(launch(l, error));
    begin(l, instance);
    (void)add(l, i, places);
  }
  return launch(l, error);
}

template <class Table>
tx_status step_all(const tx_cuda_scope *scope, const tx_adamw_args *a, bool samples, tx_error *error) {
  launches<Table> l;
  uint32_t present = 0;
  static_assert(kInstances <= 32, "instances are bits");
  l.scope = scope;
  l.args = a;
  l.samples = samples;
  l.is_first = true;
  for (int64_t i = 0; i < a->n; i++)
    present |= a->params[i].numel ? 1u << instance_of(a, i) : 0u;
  /* No parameter has elements, but step counts and skipped steps are still counted. */
  if (!present && (a->n > 0 || a->skipped.numel > 0)) present = 1u << TX_MOMENTS_F32;
  for (int instance = 0; instance < kInstances; instance++)
    if (present >> instance & 1u) TX_FORWARD(step_some(&l, instance, l.is_first, error));
  return TX_OK;
}

tx_status run(const tx_cuda_scope *scope, const tx_adamw_args *a, const tx_cuda_call *call, tx_error *error) {
  const tx_external_lists lists = {a->n, a->params, a->masters, a->checksums};
  const bool samples = tx_external_has_any(lists, TX_F32);
  if (a->on_external_write == TX_EXTERNAL_CHECK) {
    if (scope->capturing)
      return tx_fail(error, TX_ERROR_BAD_STATE,
                     "on_external_write is 2 (check), which waits for the device, and the stream is being captured; 0 "
                     "(ignore) and 1 (resync) are legal there");
    return tx_external_refuse_written(scope, lists, call, error);
  }
  if (scope->capturing && !a->lrs)
    return tx_fail(error, TX_ERROR_BAD_STATE,
                   "the stream is being captured, and lr would stay what it is now in every replay; pass it as a "
                   "tensor in lrs");
  const tx_step_outputs outputs = TX_STEP_OUTPUTS_OF(a);
  for (int64_t i = 0; i < a->n; i++)
    if (tx_has_extras(outputs, i)) return step_all<tx_extras_table>(scope, a, samples, error);
  return step_all<tx_plain_table>(scope, a, samples, error);
}

}  // namespace

tx_status tx_cuda_adamw(const tx_adamw_args *args, const tx_cuda_call *call, tx_error *error) {
  tx_cuda_scope scope;
  TX_FORWARD(tx_check_adamw(args, 0, error));
  TX_FORWARD(tx_cuda_check_counter("skipped", args->skipped, error));
  TX_FORWARD(tx_cuda_check_counter("resynced", args->resynced, error));
  TX_FORWARD(tx_cuda_enter(call, &scope, error));
  return tx_cuda_leave(&scope, run(&scope, args, call, error));
}
