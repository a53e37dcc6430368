/* tx_memory_plan: how many bytes a rank needs. */
#include "csrc/core/memory_parts.h"
#include "csrc/core/muon_memory.h"
#include "csrc/core/status.h"

int64_t tx_memory_add(int64_t sum, int64_t count, int64_t bytes) {
  int64_t product;
  return __builtin_mul_overflow(count, bytes, &product) || __builtin_add_overflow(sum, product, &sum) ? INT64_MAX : sum;
}

int64_t tx_memory_parts_of(int64_t count, int64_t size) {
  return count / size + (count % size != 0);
}

int64_t tx_memory_size_of(int32_t dtype) {
  int64_t bytes = 0;
  return tx_dtype_size((tx_dtype)dtype, &bytes, NULL) == TX_OK ? bytes : 0;
}

int tx_memory_is_scaled(int32_t dtype) {
  return dtype == TX_F16 || dtype == TX_U8;
}

int64_t tx_memory_first_in(const tx_memory_args *args, int64_t buffer) {
  for (int64_t i = 0; i < args->layout->n; i++) {
    if (args->places[i].buffer == buffer) return i;
  }
  return -1;
}

/* tx_memory.moving. whole: bytes of the trained parameters. */
static int64_t moving(const tx_memory_args *args, const tx_memory *sums, int64_t whole) {
  if (args->strategy == TX_OPTIM_GRADS_PARAMS) return whole > sums->params ? whole - sums->params : 0;
  const int learns = args->layout->world > 1 && args->n_buckets > 1 && args->strategy < TX_OPTIM_GRADS;
  const int64_t weights = args->strategy == TX_NO_SHARD ? 0 : sums->params, grads = learns ? sums->grads : 0;
  return weights > grads ? weights : grads;
}

/* Returns the bytes of the largest gradient; *whole: the bytes of all weights. */
static int64_t largest_gradient(const tx_memory_args *args, int64_t *whole) {
  int64_t most = 0;
  *whole = 0;
  for (int64_t i = 0; i < args->layout->n; i++) {
    const tx_layout_param *p = &args->layout->params[i];
    const int64_t bytes = p->tied == -1 ? tx_memory_add(0, p->numel, tx_memory_size_of(p->param_dtype)) : 0;
    *whole = tx_memory_add(*whole, 1, bytes);
    if (bytes > most) most = bytes;
  }
  return most;
}

tx_status tx_memory_plan(const tx_memory_args *args, tx_memory *memory, tx_error *error) {
  TX_FORWARD(tx_memory_check(args, memory, error));
  tx_memory sums = {0};
  for (int64_t b = 0; b < args->n_buckets; b++) {
    if (b == 0 || args->buckets[b].buffer != args->buckets[b - 1].buffer)
      TX_FORWARD(tx_memory_add_buffer(args, args->buckets[b].buffer, &sums, error));
  }
  int64_t whole;
  const int64_t gradient = largest_gradient(args, &whole);
  sums.moving = moving(args, &sums, whole);
  const int64_t world = args->strategy == TX_OPTIM_GRADS_PARAMS ? args->layout->world : 1;
  sums.params = tx_memory_add(sums.params, 1, tx_memory_parts_of(args->frozen_bytes, world));
  sums.transient = tx_memory_add(tx_memory_transient(args), args->strategy < TX_OPTIM_GRADS, gradient);
  sums.changes = tx_memory_changes(args);
  TX_FORWARD(tx_muon_memory(args, &sums.products, &sums.stepping, error));
  const int64_t parts[] = {sums.params, sums.grads, sums.masters, sums.moments, sums.scales,
                           sums.steps,  sums.emas,  sums.changes, sums.products};
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
    sums.total = tx_memory_add(sums.total, 1, parts[i]);
  const int64_t moment =
      tx_memory_add(tx_memory_add(tx_memory_add(sums.params, 1, sums.grads), 1, sums.steps), 1, sums.moving);
  sums.peak = tx_memory_add(sums.total, 1, sums.transient > sums.stepping ? sums.transient : sums.stepping);
  if (sums.peak < moment) sums.peak = moment;
  if (sums.peak == INT64_MAX) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "memory: more bytes than an int64 can count");
  }
  *memory = sums;
  return TX_OK;
}
