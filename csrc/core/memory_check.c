/* Checks the arguments of tx_memory_plan. */
#include <inttypes.h>

#include "csrc/core/dtype.h"
#include "csrc/core/memory_parts.h"
#include "csrc/core/status.h"

static int is_moment(int32_t dtype) {
  return dtype == TX_F32 || dtype == TX_BF16 || tx_memory_is_scaled(dtype);
}

static tx_status check_state(const tx_memory_args *args, int64_t i, tx_error *error) {
  const tx_memory_state *state = &args->states[i];
  if (!is_moment(state->exp_avg_dtype) || (!is_moment(state->exp_avg_sq_dtype) && state->exp_avg_sq_dtype != TX_NONE)) {
    return tx_fail(error, TX_ERROR_DTYPE,
                   "memory: states[%" PRId64 "] has moments in %s and %s; legal: fp32, bf16, fp16, uint8", i,
                   tx_dtype_name((tx_dtype)state->exp_avg_dtype), tx_dtype_name((tx_dtype)state->exp_avg_sq_dtype));
  }
  if (state->master_dtype != TX_NONE && state->master_dtype != TX_F32 && state->master_dtype != TX_I16) {
    return tx_fail(error, TX_ERROR_DTYPE, "memory: states[%" PRId64 "] has a master in %s; legal: none, fp32, int16", i,
                   tx_dtype_name((tx_dtype)state->master_dtype));
  }
  return TX_OK;
}

static tx_status check_unit(const tx_memory_args *args, int64_t u, tx_error *error) {
  const tx_memory_unit *unit = &args->units[u];
  const int dtypes = tx_memory_size_of(unit->param_dtype) > 0 && tx_memory_size_of(unit->reduce_dtype) > 0 &&
                     tx_memory_size_of(unit->wire_dtype) > 0;
  if (unit->trained >= 0 && unit->trained <= unit->numel && dtypes) return TX_OK;
  return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                 "memory: units[%" PRId64 "] has %" PRId64 " elements of %s, %" PRId64
                 " of them trained, reduced in %s, in %s on the wire; legal: >= 0, no more than all, of a dtype",
                 u, unit->numel, tx_dtype_name((tx_dtype)unit->param_dtype), unit->trained,
                 tx_dtype_name((tx_dtype)unit->reduce_dtype), tx_dtype_name((tx_dtype)unit->wire_dtype));
}

/* Whether `ends` describe messages of neighbouring buckets of one buffer each, which together cover all buckets. */
static int are_messages(const tx_memory_args *args) {
  int64_t first = 0;
  for (int64_t m = 0; args->ends && m < args->n_messages; first = args->ends[m++]) {
    const int64_t end = args->ends[m];
    if (end <= first || end > args->n_buckets || args->buckets[first].buffer != args->buckets[end - 1].buffer) return 0;
  }
  return !args->ends || (args->n_messages >= 0 && first == args->n_buckets);
}

/* Checks that places and buckets are those of the layout, as far as the planning depends on it. */
static tx_status check_plan(const tx_memory_args *args, tx_error *error) {
  const tx_layout_args *layout = args->layout;
  tx_layout_summary summary;
  TX_FORWARD(tx_layout_plan(layout, NULL, NULL, 0, &summary, error));
  int fits = args->n_buckets == summary.n_buckets;
  for (int64_t b = 0; fits && b < args->n_buckets; b++) {
    const tx_layout_bucket *bucket = &args->buckets[b];
    const int64_t before = b == 0 ? -1 : args->buckets[b - 1].buffer;
    fits = bucket->size >= 0 && bucket->size % (layout->world * TX_LAYOUT_ALIGNMENT) == 0 && bucket->used >= 0 &&
           bucket->used <= bucket->size && (bucket->buffer == before || bucket->buffer == before + 1);
  }
  if (fits && args->n_buckets > 0) fits = args->buckets[args->n_buckets - 1].buffer + 1 == summary.n_buffers;
  for (int64_t i = 0; fits && i < layout->n; i++)
    fits = args->places[i].buffer >= 0 && args->places[i].buffer < summary.n_buffers;
  if (fits) return TX_OK;
  return tx_fail(error, TX_ERROR_MISMATCH,
                 "memory: places and buckets are not what tx_layout_plan makes of this layout (%" PRId64
                 " buckets in %" PRId64 " buffers)",
                 summary.n_buckets, summary.n_buffers);
}

tx_status tx_memory_check(const tx_memory_args *args, const tx_memory *memory, tx_error *error) {
  if (!args || args->size != sizeof *args || !memory) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "tx_memory_plan: args must begin with TX_MEMORY_ARGS_INIT, and memory must not be NULL");
  }
  const tx_layout_args *layout = args->layout;
  if (!layout || (layout->n > 0 && (!args->places || !args->buckets || !args->states)) || args->n_units < 0 ||
      (args->n_units > 0 && !args->units)) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "tx_memory_plan: layout, places, buckets, states and units (of n_units >= 0) must not be NULL");
  }
  if (args->strategy < TX_NO_SHARD || args->strategy > TX_OPTIM_GRADS_PARAMS) {
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE, "memory: strategy %" PRId32 " is not legal; legal: 0 ... 3 (%s)",
                   args->strategy, tx_policy_field_at(TX_POLICY_data_parallel_sharding_strategy)->legal);
  }
  if (!tx_dtype_is_known(args->gather_dtype)) {
    return tx_fail(error, TX_ERROR_UNKNOWN_DTYPE, "memory: gather_dtype has an unknown dtype code: %" PRId32,
                   args->gather_dtype);
  }
  if (args->in_flight < 1 || args->frozen_bytes < 0) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "memory: in_flight %" PRId64 ", frozen_bytes %" PRId64 "; legal: >= 1, >= 0", args->in_flight,
                   args->frozen_bytes);
  }
  const int narrow = args->ema_dtype == TX_BF16, wide = args->ema_dtype == TX_NONE || args->ema_dtype == TX_F32;
  if (!narrow && (!wide || args->ema_lows)) {
    return tx_fail(error, TX_ERROR_DTYPE, "memory: ema_dtype is %s%s; legal: none, fp32, bf16, and bf16 with ema_lows",
                   tx_dtype_name((tx_dtype)args->ema_dtype), args->ema_lows ? " with ema_lows" : "");
  }
  for (int64_t u = 0; u < args->n_units; u++)
    TX_FORWARD(check_unit(args, u, error));
  TX_FORWARD(check_plan(args, error));
  if (!are_messages(args)) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "memory: ends are not those of %" PRId64 " messages of %" PRId64
                   " buckets; legal: ascending, within a buffer, the last one the number of buckets",
                   args->n_messages, args->n_buckets);
  }
  for (int64_t i = 0; i < layout->n; i++)
    TX_FORWARD(check_state(args, i, error));
  return TX_OK;
}
