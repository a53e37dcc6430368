/* How many bytes a rank needs. Sums that int64 does not hold stay at INT64_MAX, which is noticed once, at the end. */
#include <inttypes.h>

#include "csrc/core/dtype.h"
#include "csrc/core/muon_memory.h"
#include "csrc/core/status.h"
#include "csrc/torch_ext_advanced.h"

/* sum + count * bytes, for what is not negative. */
static int64_t add(int64_t sum, int64_t count, int64_t bytes) {
  int64_t product;
  return __builtin_mul_overflow(count, bytes, &product) || __builtin_add_overflow(sum, product, &sum) ? INT64_MAX : sum;
}

/* How many parts of so many it is, the last one begun counting as one. */
static int64_t parts_of(int64_t count, int64_t size) {
  return count / size + (count % size != 0);
}

/* 0 for TX_NONE. */
static int64_t size_of(int32_t dtype) {
  int64_t bytes = 0;
  return tx_dtype_size((tx_dtype)dtype, &bytes, NULL) == TX_OK ? bytes : 0;
}

static int is_scaled(int32_t dtype) {
  return dtype == TX_F16 || dtype == TX_U8;
}

/* -- checking --------------------------------------------------------------------------------------------------- */

static int is_moment(int32_t dtype) {
  return dtype == TX_F32 || dtype == TX_BF16 || is_scaled(dtype);
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
  const int dtypes = size_of(unit->param_dtype) > 0 && size_of(unit->reduce_dtype) > 0 && size_of(unit->wire_dtype) > 0;
  if (unit->trained >= 0 && unit->trained <= unit->numel && dtypes) return TX_OK;
  return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                 "memory: units[%" PRId64 "] has %" PRId64 " elements of %s, %" PRId64
                 " of them trained, reduced in %s, in %s on the wire; legal: >= 0, no more than all, of a dtype",
                 u, unit->numel, tx_dtype_name((tx_dtype)unit->param_dtype), unit->trained,
                 tx_dtype_name((tx_dtype)unit->reduce_dtype), tx_dtype_name((tx_dtype)unit->wire_dtype));
}

/* Whether `ends` are of messages of neighbours in a buffer, one after the other, all buckets' in the end. */
static int are_messages(const tx_memory_args *args) {
  int64_t first = 0;
  for (int64_t m = 0; args->ends && m < args->n_messages; first = args->ends[m++]) {
    const int64_t end = args->ends[m];
    if (end <= first || end > args->n_buckets || args->buckets[first].buffer != args->buckets[end - 1].buffer) return 0;
  }
  return !args->ends || (args->n_messages >= 0 && first == args->n_buckets);
}

/* That places and buckets are those of the layout, as far as anything below depends on it. */
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

static tx_status check_args(const tx_memory_args *args, const tx_memory *memory, tx_error *error) {
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
    return tx_fail(error, TX_ERROR_DTYPE,
                   "memory: averages are in %s%s; legal: none, fp32, bf16, and bf16 with 8 bits more",
                   tx_dtype_name((tx_dtype)args->ema_dtype), args->ema_lows ? " with 8 bits more" : "");
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

/* -- what stays ------------------------------------------------------------------------------------------------- */

/* A buffer in elements. */
typedef struct extent {
  int64_t n_params;
  int64_t numel;  /* of the parameters themselves */
  int64_t blocks; /* of each parameter, the last one begun counting as one */
  int64_t padded; /* of the whole buffer */
  int64_t moment_bytes, scale_bytes;
  int mixed; /* whether moments differ */
} extent;

/* The first parameter of a buffer, whose dtypes are those of all; -1: none is there. */
static int64_t first_in(const tx_memory_args *args, int64_t buffer) {
  for (int64_t i = 0; i < args->layout->n; i++) {
    if (args->places[i].buffer == buffer) return i;
  }
  return -1;
}

/* Of an element. */
static int64_t moment_bytes(const tx_memory_state *state) {
  return size_of(state->exp_avg_dtype) + size_of(state->exp_avg_sq_dtype);
}

/* Of a block. */
static int64_t scale_bytes(const tx_memory_state *state) {
  return is_scaled(state->exp_avg_dtype) + is_scaled(state->exp_avg_sq_dtype);
}

static tx_status measure(const tx_memory_args *args, int64_t buffer, int64_t like, extent *whole, tx_error *error) {
  *whole = (extent){0};
  for (int64_t b = 0; b < args->n_buckets; b++) {
    if (args->buckets[b].buffer == buffer) whole->padded = add(whole->padded, 1, args->buckets[b].size);
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
    const int64_t blocks = parts_of(p->numel, TX_BLOCK);
    whole->mixed |= a->exp_avg_dtype != b->exp_avg_dtype || a->exp_avg_sq_dtype != b->exp_avg_sq_dtype;
    whole->n_params++;
    whole->numel = add(whole->numel, 1, p->numel);
    whole->blocks = add(whole->blocks, 1, blocks);
    whole->moment_bytes = add(whole->moment_bytes, p->numel, moment_bytes(b));
    whole->scale_bytes = add(whole->scale_bytes, blocks, scale_bytes(b));
  }
  return TX_OK;
}

static tx_status add_buffer(const tx_memory_args *args, int64_t buffer, tx_memory *memory, tx_error *error) {
  const int64_t like = first_in(args, buffer);
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
  memory->params = add(memory->params, params, size_of(param->param_dtype));
  memory->grads = add(memory->grads, grads, size_of(param->grad_dtype));
  memory->masters = add(memory->masters, stepped, size_of(state->master_dtype));
  memory->emas = add(memory->emas, stepped, size_of(args->ema_dtype) + (args->ema_lows != 0));
  if (own || whole.mixed) {
    const int64_t ranks = own ? 1 : args->layout->world;
    memory->moments = add(memory->moments, 1, parts_of(whole.moment_bytes, ranks));
    memory->scales = add(memory->scales, 1, parts_of(whole.scale_bytes, ranks));
  } else {
    memory->moments = add(memory->moments, shard, moment_bytes(state));
    memory->scales = add(memory->scales, shard / TX_BLOCK, scale_bytes(state));
  }
  memory->steps = add(memory->steps, whole.n_params, size_of(TX_F32));
  return TX_OK;
}

/* What a publisher keeps. */
static int64_t changes(const tx_memory_args *args) {
  if (!args->publishes) return 0;
  int64_t noted = 0, checksums = 0;
  for (int64_t i = 0; i < args->layout->n; i++) {
    const tx_layout_param *p = &args->layout->params[i];
    if (p->tied != -1) continue;
    const int far = args->distances && p->param_dtype != TX_F32;
    noted = add(noted, 1, parts_of(p->numel, 8) + far * parts_of(p->numel, 2));
    noted = add(noted, parts_of(p->numel, TX_BLOCK), size_of(TX_BF16));
    checksums = add(checksums, 1, parts_of(p->numel, TX_CHECKSUM));
  }
  const int64_t world = args->layout->world;
  return add(parts_of(noted, args->strategy == TX_NO_SHARD ? 1 : world), parts_of(checksums, world), size_of(TX_I64));
}

/* -- what comes and goes ---------------------------------------------------------------------------------------- */

/* What a bucket takes while it travels. */
typedef struct travel {
  int64_t received, packed, gathered;
  int64_t messages; /* compressed ones, both ways */
} travel;

/* Messages of so many blocks of a dtype; 0: they are sent as they are. */
static int64_t compressed(const tx_memory_args *args, int32_t dtype, int64_t blocks) {
  return args->compressed && dtype == TX_BF16 ? tx_compressed_bytes(add(0, blocks, TX_BLOCK)) : 0;
}

/* like: a parameter of its buffer. joined: whether it stands for joined ones. */
static travel of_bucket(const tx_memory_args *args, const tx_layout_param *like, int64_t numel, int joined) {
  const int32_t wire = like->wire_dtype;
  const int32_t gather = (int32_t)tx_gather_dtype((tx_dtype)args->gather_dtype, (tx_dtype)wire);
  const int ranks_lie_apart = joined && args->strategy == TX_OPTIM; /* in the buffer, not in the message */
  const int packed = args->strategy == TX_OPTIM_GRADS || wire != like->grad_dtype || ranks_lie_apart;
  const int gathered = args->strategy == TX_NO_SHARD && gather != wire && gather != like->grad_dtype;
  const int64_t blocks = numel / TX_BLOCK;
  const int64_t wire_bytes = tx_wire_block_bytes((tx_dtype)wire), gather_bytes = tx_wire_block_bytes((tx_dtype)gather);
  const int whole =
      args->slots || (args->strategy == TX_NO_SHARD && tx_trades(args->layout->world, wire_bytes, gather_bytes));
  const int64_t received = whole ? blocks : blocks - blocks / args->layout->world;
  return (travel){
      .received = add(0, received, wire_bytes),
      .packed = packed * add(0, blocks, wire_bytes),
      .gathered = gathered * add(0, blocks, gather_bytes),
      .messages = add(compressed(args, wire, add(0, received, 2)), args->strategy == TX_NO_SHARD && !whole,
                      compressed(args, gather, blocks)),
  };
}

static int64_t travelling(const tx_memory_args *args, const tx_layout_param *like, int64_t numel, int joined) {
  const travel found = of_bucket(args, like, numel, joined);
  return add(add(add(found.received, 1, found.packed), 1, found.gathered), 1, found.messages);
}

/* The least of 512, 640, 768, 896, 1024, 1280, ... (four in each doubling) that is not less: that of a slot; 0 of 0. */
static int64_t size_class(int64_t bytes) {
  if (bytes <= 512) return bytes > 0 ? 512 : 0;
  int64_t step = 128;
  while (bytes > 8 * step && step < INT64_MAX / 16)
    step *= 2;
  return add(0, parts_of(bytes, step), step);
}

/* The first parameter of bucket b's buffer. */
static const tx_layout_param *like_of(const tx_memory_args *args, int64_t b) {
  return &args->layout->params[first_in(args, args->buckets[b].buffer)];
}

/* Of bucket b's slot in a role: 0 received, 1 packed, 2 gathered. */
static int64_t slot_of(const tx_memory_args *args, int64_t b, int role) {
  const travel found = of_bucket(args, like_of(args, b), args->buckets[b].size, 0);
  return size_class(role == 0 ? found.received : role == 1 ? found.packed : found.gathered);
}

static int64_t slots(const tx_memory_args *args) {
  int64_t sum = 0;
  for (int role = 0; role < 3; role++) {
    for (int64_t b = 0; b < args->n_buckets; b++) {
      const int64_t bytes = slot_of(args, b, role);
      int64_t before = 0; /* of its class */
      for (int64_t a = 0; a < b && before < 2; a++)
        before += slot_of(args, a, role) == bytes;
      if (before < 2) sum = add(sum, 1, bytes);
    }
  }
  return sum;
}

/* The sum over the in_flight buckets that take most, found one after the other; and in *filling the most that the
 * gradients of one bucket take in tensors of their own. */
static int64_t exchanged(const tx_memory_args *args, int64_t *filling) {
  int64_t sum = 0, last = -1, last_bytes = INT64_MAX;
  *filling = 0;
  for (int64_t taken = 0; taken < args->in_flight && taken < args->n_buckets; taken++) {
    const tx_layout_param *like = NULL;
    int64_t next = -1, next_bytes = -1;
    for (int64_t b = 0; b < args->n_buckets; b++) {
      const tx_layout_bucket *bucket = &args->buckets[b];
      if (b == 0 || bucket->buffer != args->buckets[b - 1].buffer)
        like = &args->layout->params[first_in(args, bucket->buffer)];
      const int64_t bytes = travelling(args, like, bucket->size, 0);
      if (bytes > next_bytes && (bytes < last_bytes || (bytes == last_bytes && b > last))) {
        next = b;
        next_bytes = bytes;
      }
      const int64_t grads = add(0, bucket->used, size_of(like->grad_dtype));
      if (grads > *filling) *filling = grads;
    }
    last = next;
    last_bytes = next_bytes;
    sum = add(sum, 1, next_bytes);
  }
  return sum;
}

/* What the two messages of joined buckets that take most need (tx_coalesce; two at a time are under way). And *filling
 * as of `exchanged`, where the gradients of joined ones are more. */
static int64_t joined(const tx_memory_args *args, int64_t *filling) {
  int64_t most = 0, next = 0;
  for (int64_t m = 0, first = 0; m < args->n_messages; first = args->ends[m++]) {
    if (args->ends[m] - first < 2) continue;
    int64_t numel = 0, used = 0;
    for (int64_t b = first; b < args->ends[m]; b++) {
      numel = add(numel, 1, args->buckets[b].size);
      used = add(used, 1, args->buckets[b].used);
    }
    const tx_layout_param *like = like_of(args, first);
    const int64_t bytes = travelling(args, like, numel, 1), grads = add(0, used, size_of(like->grad_dtype));
    if (grads > *filling) *filling = grads;
    next = bytes > most ? most : bytes > next ? bytes : next;
    if (bytes > most) most = bytes;
  }
  return add(most, 1, next);
}

/* The most that joined buckets may take, where the link is not known and nobody gave buckets a size. Else as of
 * `joined`. */
static int64_t joined_at_most(const tx_memory_args *args, int64_t *filling) {
  if (args->layout->cap != TX_NO_INT || !args->layout->overlap || args->layout->world == 1) return 0;
  const int32_t sharded = args->strategy != TX_NO_SHARD;
  int64_t most = 0;
  for (int64_t first = 0, b = 0; b < args->n_buckets; first = b) {
    int64_t numel = 0, pair = INT64_MAX; /* the smallest neighbours */
    for (; b < args->n_buckets && args->buckets[b].buffer == args->buckets[first].buffer; b++) {
      numel = add(numel, 1, args->buckets[b].size);
      const int64_t with = b > first ? add(args->buckets[b - 1].size, 1, args->buckets[b].size) : INT64_MAX;
      if (with < pair) pair = with;
    }
    const tx_layout_param *like = like_of(args, first);
    const int64_t all = numel, blocks = all / TX_BLOCK, messages = compressed(args, like->wire_dtype, blocks);
    const int64_t bytes = messages > 0 ? messages : add(0, blocks, tx_wire_block_bytes((tx_dtype)like->wire_dtype));
    if (blocks > 0) numel = tx_coalesce_most(bytes, sharded, messages > 0) / (bytes / blocks) * TX_BLOCK;
    const int64_t largest = messages == 0 && tx_coalesce_whole(bytes) ? all : numel;
    if (pair > largest) continue;
    const int64_t two = add(0, 2, travelling(args, like, numel, 1));
    const int64_t grads = add(0, largest, size_of(like->grad_dtype));
    if (two > most) most = two;
    if (grads > *filling) *filling = grads;
  }
  return most;
}

/* What is reduced of a unit, packed and received. */
static int64_t reduced(const tx_memory_args *args, const tx_memory_unit *unit) {
  const int64_t given = add(0, unit->trained, size_of(unit->reduce_dtype));
  const int narrow = size_of(unit->wire_dtype) < size_of(unit->reduce_dtype);
  const int64_t blocks = parts_of(unit->trained, TX_BLOCK);
  const int64_t wire = narrow ? add(0, blocks, tx_wire_block_bytes((tx_dtype)unit->wire_dtype)) : given;
  return add(add(given, narrow, wire), 1, wire - wire / args->layout->world);
}

static int64_t gathered(const tx_memory_args *args) {
  const tx_memory_unit none = {0}, *first = &none, *second = &none;
  int64_t most = 0, next = 0;
  for (int64_t u = 0; u < args->n_units; u++) {
    const tx_memory_unit *unit = &args->units[u];
    const int64_t bytes = add(0, unit->numel, size_of(unit->param_dtype));
    if (bytes > most) {
      second = first;
      next = most;
      first = unit;
      most = bytes;
    } else if (bytes > next) {
      second = unit;
      next = bytes;
    }
  }
  const int64_t sum = add(add(most, 2, next), first->trained, size_of(first->param_dtype));
  return add(add(sum, 1, reduced(args, first)), 1, reduced(args, second));
}

static int64_t transient(const tx_memory_args *args) {
  if (args->strategy == TX_OPTIM_GRADS_PARAMS) return gathered(args);
  int64_t filling;
  int64_t exchange = exchanged(args, &filling);
  if (args->slots) {
    exchange = slots(args);
  } else {
    const int64_t together = args->ends ? joined(args, &filling) : joined_at_most(args, &filling);
    if (together > exchange) exchange = together;
  }
  return args->strategy == TX_OPTIM_GRADS ? add(exchange, 1, filling) : exchange;
}

/* -- both ------------------------------------------------------------------------------------------------------- */

/* See tx_memory. whole: bytes of the trained parameters. */
static int64_t moving(const tx_memory_args *args, const tx_memory *sums, int64_t whole) {
  if (args->strategy == TX_OPTIM_GRADS_PARAMS) return whole > sums->params ? whole - sums->params : 0;
  const int learns = args->layout->world > 1 && args->n_buckets > 1 && args->strategy < TX_OPTIM_GRADS;
  const int64_t weights = args->strategy == TX_NO_SHARD ? 0 : sums->params, grads = learns ? sums->grads : 0;
  return weights > grads ? weights : grads;
}

/* The largest gradient, and the bytes of all weights in *whole. */
static int64_t of_params(const tx_memory_args *args, int64_t *whole) {
  int64_t most = 0;
  *whole = 0;
  for (int64_t i = 0; i < args->layout->n; i++) {
    const tx_layout_param *p = &args->layout->params[i];
    const int64_t bytes = p->tied == -1 ? add(0, p->numel, size_of(p->param_dtype)) : 0;
    *whole = add(*whole, 1, bytes);
    if (bytes > most) most = bytes;
  }
  return most;
}

tx_status tx_memory_plan(const tx_memory_args *args, tx_memory *memory, tx_error *error) {
  TX_FORWARD(check_args(args, memory, error));
  tx_memory sums = {0};
  for (int64_t b = 0; b < args->n_buckets; b++) {
    if (b == 0 || args->buckets[b].buffer != args->buckets[b - 1].buffer)
      TX_FORWARD(add_buffer(args, args->buckets[b].buffer, &sums, error));
  }
  int64_t whole;
  const int64_t gradient = of_params(args, &whole);
  sums.moving = moving(args, &sums, whole);
  const int64_t world = args->strategy == TX_OPTIM_GRADS_PARAMS ? args->layout->world : 1;
  sums.params = add(sums.params, 1, parts_of(args->frozen_bytes, world));
  sums.transient = add(transient(args), args->strategy < TX_OPTIM_GRADS, gradient);
  sums.changes = changes(args);
  TX_FORWARD(tx_muon_memory(args, &sums.products, &sums.stepping, error));
  const int64_t parts[] = {sums.params, sums.grads, sums.masters, sums.moments, sums.scales,
                           sums.steps,  sums.emas,  sums.changes, sums.products};
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
    sums.total = add(sums.total, 1, parts[i]);
  const int64_t moment = add(add(add(sums.params, 1, sums.grads), 1, sums.steps), 1, sums.moving);
  sums.peak = add(sums.total, 1, sums.transient > sums.stepping ? sums.transient : sums.stepping);
  if (sums.peak < moment) sums.peak = moment;
  if (sums.peak == INT64_MAX) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "memory: more bytes than an int64 can count");
  }
  *memory = sums;
  return TX_OK;
}
