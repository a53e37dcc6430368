/* tx_adamw_offloaded: the step of parameters that are elsewhere (in a device's memory; without copy_ops in host memory
 * too), in batches that threads take from one queue.
 *
 * A thread copies a batch to a slot of its own, steps it there and sends the weights back; with several slots the next
 * batches are copied meanwhile. No thread waits for another one before all batches are done. */
#include "csrc/core/fp_mode.h"
#include "csrc/core/status.h"
#include "csrc/ops/copy.h"
#include "csrc/ops/operator_checks.h"
#include "csrc/ops/step.h"
#include "csrc/ops/tensor.h"
#include "csrc/torch_ext_advanced.h"

/* The most pieces of a batch, for small tensors. */
#define MOST_PIECES 128

typedef struct batch {
  int64_t n;
  tx_tensor_range pieces[MOST_PIECES];
  int64_t at[MOST_PIECES]; /* start of each piece in the slot's arrays, in elements */
} batch;

typedef struct staged {
  const tx_staging *staging;
  tx_step step;
  tx_work_units units;
  int64_t grad_bytes, param_bytes; /* bytes of the widest element */
  tx_error *error;
  int32_t status; /* atomic: that of the first failure */
} staged;

typedef struct task_local {
  tx_step_local step;
  tx_unit unit; /* the rest of the unit that was claimed */
  batch slots[TX_MAX_SLOTS];
} task_local;

/* -- addresses of a batch ---------------------------------------------------------------------------------------- */

static int64_t slot_bytes(const staged *s) {
  return s->staging->batch * (s->grad_bytes + s->param_bytes);
}

static char *grads_in(const staged *s, int64_t slot, int64_t at) {
  return (char *)s->staging->memory + slot * slot_bytes(s) + at * s->grad_bytes;
}

static char *params_in(const staged *s, int64_t slot, int64_t at) {
  return (char *)s->staging->memory + slot * slot_bytes(s) + s->staging->batch * s->grad_bytes + at * s->param_bytes;
}

static int is_copied_down(const tx_adamw_args *a, int64_t tensor) {
  return tx_master_dtype(a, tensor) != TX_F32; /* the weight is its own master, or its master's upper half */
}

/* -- copies ------------------------------------------------------------------------------------------------------ */

typedef enum way { DOWN = 0, UP = 1 } way;

/* Copies within host memory, at once. Prefetches beyond the batch: the next batch mostly begins where this one ends. */
static void copy_here(char *to, const char *from, int64_t bytes) {
  const int64_t at = tx_copy_lines(to, from, bytes);
  memcpy(to + at, from + at, (size_t)(bytes - at));
}

static tx_status copy(const staged *s, way way, void *to, const void *from, int64_t bytes, tx_error *error) {
  const tx_copy_ops *copy_ops = s->staging->copy_ops;
  if (copy_ops) return copy_ops->copy(copy_ops->ctx, (int32_t)way, to, from, bytes, error);
  copy_here(to, from, bytes);
  return TX_OK;
}

static tx_status mark(const staged *s, way way, int64_t slot, tx_error *error) {
  const tx_copy_ops *copy_ops = s->staging->copy_ops;
  return copy_ops ? copy_ops->mark(copy_ops->ctx, (int32_t)way, slot, error) : TX_OK;
}

static tx_status wait(const staged *s, way way, int64_t slot, tx_error *error) {
  const tx_copy_ops *copy_ops = s->staging->copy_ops;
  return copy_ops ? copy_ops->wait(copy_ops->ctx, (int32_t)way, slot, error) : TX_OK;
}

static tx_status follow(const staged *s, int64_t slot, tx_error *error) {
  const tx_copy_ops *copy_ops = s->staging->copy_ops;
  return copy_ops ? copy_ops->follow(copy_ops->ctx, slot, error) : TX_OK;
}

/* -- the steps of a batch ---------------------------------------------------------------------------------------- */

static tx_status bring(const staged *s, const batch *b, int64_t slot, tx_error *error) {
  const tx_adamw_args *a = s->step.args;
  int weights = 0;
  for (int64_t i = 0; i < b->n; i++) {
    const tx_tensor_range p = b->pieces[i];
    const tx_tensor grad = a->grads[p.tensor];
    TX_FORWARD(copy(s, DOWN, grads_in(s, slot, b->at[i]), tx_advanced(grad, p.begin),
                    p.count * tx_element_size(grad.dtype), error));
    weights |= is_copied_down(a, p.tensor);
  }
  if (weights) TX_FORWARD(follow(s, slot, error)); /* previous weights may still be on their way out of this slot */
  for (int64_t i = 0; i < b->n; i++) {
    const tx_tensor_range p = b->pieces[i];
    const tx_tensor param = a->params[p.tensor];
    if (is_copied_down(a, p.tensor))
      TX_FORWARD(copy(s, DOWN, params_in(s, slot, b->at[i]), tx_advanced(param, p.begin),
                      p.count * tx_element_size(param.dtype), error));
  }
  return mark(s, DOWN, slot, error);
}

static tx_status send(const staged *s, const batch *b, int64_t slot, tx_error *error) {
  const tx_adamw_args *a = s->step.args;
  for (int64_t i = 0; i < b->n; i++) {
    const tx_tensor_range p = b->pieces[i];
    const tx_tensor param = a->params[p.tensor];
    TX_FORWARD(copy(s, UP, tx_advanced(param, p.begin), params_in(s, slot, b->at[i]),
                    p.count * tx_element_size(param.dtype), error));
  }
  return mark(s, UP, slot, error);
}

static tx_status step(const staged *s, task_local *local, const batch *b, int64_t slot, tx_error *error) {
  TX_FORWARD(wait(s, DOWN, slot, error));
  TX_FORWARD(wait(s, UP, slot, error)); /* for weights that are not copied to the slot, only written */
  const tx_fp_mode saved = tx_fp_enter();
  for (int64_t i = 0; i < b->n; i++)
    tx_step_piece(&s->step, &local->step, b->pieces[i], params_in(s, slot, b->at[i]), grads_in(s, slot, b->at[i]));
  tx_fp_leave(saved);
  return TX_OK;
}

/* -- the queue --------------------------------------------------------------------------------------------------- */

/* The most elements of the next piece of a batch that already has `used` elements. */
static int64_t room(const staged *s, int64_t used) {
  return (s->staging->batch - used) / s->units.alignment * s->units.alignment;
}

/* Fills a batch with the next pieces, all of one unit, so that they follow each other in memory. Returns 0 if there are
 * none. */
static int next_batch(staged *s, task_local *local, batch *b) {
  b->n = 0;
  do {
    int64_t used = 0;
    tx_tensor_range *piece = b->pieces;
    while (b->n < MOST_PIECES && room(s, used) > 0 && tx_unit_take(&s->units, &local->unit, room(s, used), piece)) {
      b->at[b->n++] = used;
      used += (piece++->count + TX_BLOCK - 1) / TX_BLOCK * TX_BLOCK;
    }
  } while (b->n == 0 && tx_work_units_claim(&s->units, &local->unit));
  return b->n > 0;
}

static int failed(staged *s) {
  return __atomic_load_n(&s->status, __ATOMIC_RELAXED) != TX_OK;
}

static void fail(staged *s, tx_status status, const tx_error *error) {
  int32_t none = TX_OK;
  if (__atomic_compare_exchange_n(&s->status, &none, (int32_t)status, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED) &&
      s->error)
    *s->error = *error;
}

static tx_status run_batches(staged *s, task_local *local, int64_t first_slot, tx_error *error) {
  const int64_t slots = s->staging->slots;
  int64_t coming = 0; /* batches being copied, in the slots from `head` on, cyclically */
  for (; coming < slots && next_batch(s, local, &local->slots[coming]); coming++)
    TX_FORWARD(bring(s, &local->slots[coming], first_slot + coming, error));
  for (int64_t head = 0; coming > 0 && !failed(s); head = (head + 1) % slots) {
    batch *b = &local->slots[head];
    const int64_t slot = first_slot + head;
    TX_FORWARD(step(s, local, b, slot, error));
    TX_FORWARD(send(s, b, slot, error));
    if (next_batch(s, local, b)) {
      TX_FORWARD(bring(s, b, slot, error));
    } else {
      coming--;
    }
  }
  return TX_OK;
}

static void run_task(void *arg, int64_t task) {
  staged *s = arg;
  tx_error error;
  const tx_status status = run_batches(s, tx_work_units_local(&s->units, task), task * s->staging->slots, &error);
  if (status != TX_OK) fail(s, status, &error);
}

/* -- the call ---------------------------------------------------------------------------------------------------- */

static int64_t widest(const tx_tensor *tensors, int64_t n) {
  int64_t most = 0;
  for (int64_t i = 0; i < n; i++) {
    const int64_t bytes = tensors[i].numel ? tx_element_size(tensors[i].dtype) : 0;
    if (bytes > most) most = bytes;
  }
  return most;
}

static tx_status check(const tx_adamw_args *args, const tx_staging *g, tx_error *error) {
  if (!g || g->size != sizeof *g) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "staging.size is %llu; %llu is legal (use TX_STAGING_INIT)",
                   (unsigned long long)(g ? g->size : 0), (unsigned long long)sizeof *g);
  }
  if (g->batch < 1 || g->batch % TX_SAMPLED || g->slots < 1 || g->slots > TX_MAX_SLOTS) {
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE,
                   "staging has batch %lld and slots %d; a multiple of %lld and 1 to %d are legal", (long long)g->batch,
                   (int)g->slots, (long long)TX_SAMPLED, TX_MAX_SLOTS);
  }
  const tx_copy_ops *copy_ops = g->copy_ops;
  if (copy_ops && (copy_ops->size != sizeof *copy_ops || !copy_ops->copy || !copy_ops->mark || !copy_ops->wait ||
                   !copy_ops->follow)) {
    return tx_fail(
        error, TX_ERROR_INVALID_ARGUMENT,
        "staging.copy_ops has size %llu, or lacks a function; %llu (TX_COPY_OPS_INIT) and all four are legal",
        (unsigned long long)copy_ops->size, (unsigned long long)sizeof *copy_ops);
  }
  if (args->on_external_write == TX_EXTERNAL_CHECK) {
    return tx_fail(error, TX_ERROR_ILLEGAL_VALUE,
                   "on_external_write is 2 (check); 0 (ignore) and 1 (resync) are legal where weights are elsewhere");
  }
  return TX_OK;
}

/* Bytes of all slots; INT64_MAX if that overflows. */
static int64_t wanted_bytes(const staged *s) {
  int64_t bytes;
  if (__builtin_mul_overflow(s->staging->batch, s->grad_bytes + s->param_bytes, &bytes) ||
      __builtin_mul_overflow(bytes, s->units.n_tasks * s->staging->slots, &bytes))
    return INT64_MAX;
  return bytes;
}

static tx_status check_memory(const staged *s, tx_error *error) {
  const tx_staging *g = s->staging;
  const int64_t wanted = wanted_bytes(s);
  if (wanted == 0) return TX_OK;
  if (wanted < INT64_MAX && g->memory && (uintptr_t)g->memory % TX_LINE == 0 && g->bytes >= wanted) return TX_OK;
  return tx_fail(error, TX_ERROR_SHAPE,
                 "staging.memory has %lld bytes at %p; %lld, aligned to %d, are legal for %lld threads of %d slots of "
                 "%lld elements",
                 (long long)g->bytes, g->memory, (long long)wanted, (int)TX_LINE, (long long)s->units.n_tasks,
                 (int)g->slots, (long long)g->batch);
}

tx_status tx_adamw_offloaded(const tx_adamw_args *args, const tx_staging *staging, const tx_parallel *parallel,
                             tx_error *error) {
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(tx_check_adamw(args, 1, error));
  TX_FORWARD(check(args, staging, error));
  staged s = {.staging = staging,
              .grad_bytes = widest(args->grads, args->n),
              .param_bytes = widest(args->params, args->n),
              .error = error};
  TX_FORWARD(tx_work_units_cut(&s.units, args->n, args->params, tx_step_alignment(args), tx_threads_of(parallel),
                               sizeof(task_local), error));
  tx_status status = check_memory(&s, error);
  if (status == TX_OK && tx_step_begin(args, &s.step)) {
    if (s.units.n_tasks > 1) {
      parallel->run(parallel->ctx, s.units.n_tasks, run_task, &s);
    } else if (s.units.n_tasks == 1) {
      run_task(&s, 0);
    }
    status = (tx_status)s.status;
    for (int64_t i = 0; i < s.units.n_tasks; i++)
      tx_step_merge(&s.step, &((const task_local *)tx_work_units_local(&s.units, i))->step);
    if (status == TX_OK) tx_step_end(&s.step);
  }
  tx_work_units_free(&s.units);
  return status;
}
