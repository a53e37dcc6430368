/* Persistent memory: weights, gradients, states, and what a publisher keeps. */
#include <inttypes.h>

#include "csrc/core/memory_parts.h"
#include "csrc/core/status.h"

/* The size of a buffer. */
typedef struct extent {
  int64_t n_params;
  int64_t numel;  /* elements of the parameters, without padding */
  int64_t blocks; /* blocks of all parameters, each rounded up */
  int64_t padded; /* elements of the whole buffer */
  int64_t moment_bytes, scale_bytes;
  int mixed; /* whether parameters have different moments */
} extent;

/* Bytes per element. */
static int64_t moment_bytes(const tx_memory_state *state) {
  return tx_memory_size_of(state->exp_avg_dtype) + tx_memory_size_of(state->exp_avg_sq_dtype);
}

/* Bytes per block. */
static int64_t scale_bytes(const tx_memory_state *state) {
  return tx_memory_is_scaled(state->exp_avg_dtype) + tx_memory_is_scaled(state->exp_avg_sq_dtype);
}

static tx_status measure(const tx_memory_args *args, int64_t buffer, int64_t like, extent *whole, tx_error *error) {
  *whole = (extent){0};
  for (int64_t b = 0; b < args->n_buckets; b++) {
    if (args->buckets[b].buffer == buffer) whole->padded = tx_memory_add(whole->padded, 1, args->buckets[b].size);
  }
  const tx_memory_state *a = &args->states[like];
  for (int64_t i = like; i < args->layout->n; i++) {
    const tx_layout_param *p = &args->layout->params[i];
    if (args->places[i].buffer != buffer || p->tied != -1) continue;
    const tx_memory_state *b = &args->states[i];
    if (a->master_dtype != b->master_dtype) {
      return tx_fail(
          error, TX_ERROR_CONFLICT,
          "memory: the masters of states[%" PRId64 "] and states[%" PRId64
          "] differ, but their parameters share a buffer; legal: equal ones, or different keys in the layout",
          like, i);
    }
    const int64_t blocks = tx_memory_parts_of(p->numel, TX_BLOCK);
    whole->mixed |= a->exp_avg_dtype != b->exp_avg_dtype || a->exp_avg_sq_dtype != b->exp_avg_sq_dtype;
    whole->n_params++;
    whole->numel = tx_memory_add(whole->numel, 1, p->numel);
    whole->blocks = tx_memory_add(whole->blocks, 1, blocks);
    whole->moment_bytes = tx_memory_add(whole->moment_bytes, p->numel, moment_bytes(b));
    whole->scale_bytes = tx_memory_add(whole->scale_bytes, blocks, scale_bytes(b));
  }
  return TX_OK;
}

tx_status tx_memory_add_buffer(const tx_memory_args *args, int64_t buffer, tx_memory *memory, tx_error *error) {
  const int64_t like = tx_memory_first_in(args, buffer);
  if (like == -1) {
    return tx_fail(error, TX_ERROR_MISMATCH, "memory: places has no parameter in buffer %" PRId64 " of the layout",
                   buffer);
  }
  extent whole;
  TX_FORWARD(measure(args, buffer, like, &whole, error));
  const tx_memory_state *state = &args->states[like];
  const tx_layout_param *param = &args->layout->params[like];
  const int64_t shard = whole.padded / args->layout->world;
  const int own = args->strategy == TX_NO_SHARD;
  const int64_t stepped = own ? whole.numel : shard;
  const int64_t params = own ? whole.numel : args->strategy == TX_OPTIM_GRADS_PARAMS ? shard : whole.padded;
  const int64_t grads = args->strategy >= TX_OPTIM_GRADS ? shard : whole.padded;
  memory->params = tx_memory_add(memory->params, params, tx_memory_size_of(param->param_dtype));
  memory->grads = tx_memory_add(memory->grads, grads, tx_memory_size_of(param->grad_dtype));
  memory->masters = tx_memory_add(memory->masters, stepped, tx_memory_size_of(state->master_dtype));
  memory->emas = tx_memory_add(memory->emas, stepped, tx_memory_size_of(args->ema_dtype) + (args->ema_lows != 0));
  if (own || whole.mixed) {
    const int64_t ranks = own ? 1 : args->layout->world;
    memory->moments = tx_memory_add(memory->moments, 1, tx_memory_parts_of(whole.moment_bytes, ranks));
    memory->scales = tx_memory_add(memory->scales, 1, tx_memory_parts_of(whole.scale_bytes, ranks));
  } else {
    memory->moments = tx_memory_add(memory->moments, shard, moment_bytes(state));
    memory->scales = tx_memory_add(memory->scales, shard / TX_BLOCK, scale_bytes(state));
  }
  memory->steps = tx_memory_add(memory->steps, whole.n_params, tx_memory_size_of(TX_F32));
  return TX_OK;
}

int64_t tx_memory_changes(const tx_memory_args *args) {
  if (!args->publishes) return 0;
  int64_t noted = 0, checksums = 0;
  for (int64_t i = 0; i < args->layout->n; i++) {
    const tx_layout_param *p = &args->layout->params[i];
    if (p->tied != -1) continue;
    const int far = args->distances && p->param_dtype != TX_F32;
    noted = tx_memory_add(noted, 1, tx_memory_parts_of(p->numel, 8) + far * tx_memory_parts_of(p->numel, 2));
    noted = tx_memory_add(noted, tx_memory_parts_of(p->numel, TX_BLOCK), tx_memory_size_of(TX_BF16));
    checksums = tx_memory_add(checksums, 1, tx_memory_parts_of(p->numel, TX_CHECKSUM));
  }
  const int64_t world = args->layout->world;
  return tx_memory_add(tx_memory_parts_of(noted, args->strategy == TX_NO_SHARD ? 1 : world),
                       tx_memory_parts_of(checksums, world), tx_memory_size_of(TX_I64));
}
