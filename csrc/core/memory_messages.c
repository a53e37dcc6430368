/* Transient memory: buckets and units while they are exchanged. */
#include "csrc/core/dtype.h"
#include "csrc/core/memory_parts.h"

/* Bytes that a bucket takes while it is exchanged. */
typedef struct bucket_bytes {
  int64_t received, packed, gathered;
  int64_t messages; /* compressed messages, both directions */
} bucket_bytes;

/* Bytes of a compressed message of `blocks` blocks; 0 if such messages are sent uncompressed. */
static int64_t compressed(const tx_memory_args *args, int32_t dtype, int64_t blocks) {
  return args->compressed && dtype == TX_BF16 ? tx_compressed_bytes(tx_memory_add(0, blocks, TX_BLOCK)) : 0;
}

/* like: a parameter of the bucket's buffer. joined: whether the bucket stands for several joined ones. */
static bucket_bytes bytes_of_bucket(const tx_memory_args *args, const tx_layout_param *like, int64_t numel,
                                    int joined) {
  const int32_t wire = like->wire_dtype;
  const int32_t gather = (int32_t)tx_gather_dtype((tx_dtype)args->gather_dtype, (tx_dtype)wire);
  /* A rank's parts of joined buckets are contiguous in the message, but not in the buffer. */
  const int not_contiguous = joined && args->strategy == TX_OPTIM;
  const int packed = args->strategy == TX_OPTIM_GRADS || wire != like->grad_dtype || not_contiguous;
  const int gathered = args->strategy == TX_NO_SHARD && gather != wire && gather != like->grad_dtype;
  const int64_t blocks = numel / TX_BLOCK;
  const int64_t wire_bytes = tx_wire_block_bytes((tx_dtype)wire), gather_bytes = tx_wire_block_bytes((tx_dtype)gather);
  const int whole =
      args->slots || (args->strategy == TX_NO_SHARD && tx_trades(args->layout->world, wire_bytes, gather_bytes));
  const int64_t received = whole ? blocks : blocks - blocks / args->layout->world;
  return (bucket_bytes){
      .received = tx_memory_add(0, received, wire_bytes),
      .packed = packed * tx_memory_add(0, blocks, wire_bytes),
      .gathered = gathered * tx_memory_add(0, blocks, gather_bytes),
      .messages = tx_memory_add(compressed(args, wire, tx_memory_add(0, received, 2)),
                                args->strategy == TX_NO_SHARD && !whole, compressed(args, gather, blocks)),
  };
}

static int64_t exchange_bytes(const tx_memory_args *args, const tx_layout_param *like, int64_t numel, int joined) {
  const bucket_bytes found = bytes_of_bucket(args, like, numel, joined);
  return tx_memory_add(tx_memory_add(tx_memory_add(found.received, 1, found.packed), 1, found.gathered), 1,
                       found.messages);
}

/* The size of the slot for `bytes`: the least of 512, 640, 768, 896, 1024, 1280, ... (four per doubling) that holds
 * them; 0 for 0 bytes. */
static int64_t size_class(int64_t bytes) {
  if (bytes <= 512) return bytes > 0 ? 512 : 0;
  int64_t step = 128;
  while (bytes > 8 * step && step < INT64_MAX / 16)
    step *= 2;
  return tx_memory_add(0, tx_memory_parts_of(bytes, step), step);
}

/* The first parameter of bucket b's buffer. */
static const tx_layout_param *like_of(const tx_memory_args *args, int64_t b) {
  return &args->layout->params[tx_memory_first_in(args, args->buckets[b].buffer)];
}

/* Bytes of bucket b's slot in a role: 0 received, 1 packed, 2 gathered. */
static int64_t slot_of(const tx_memory_args *args, int64_t b, int role) {
  const bucket_bytes found = bytes_of_bucket(args, like_of(args, b), args->buckets[b].size, 0);
  return size_class(role == 0 ? found.received : role == 1 ? found.packed : found.gathered);
}

static int64_t slots(const tx_memory_args *args) {
  int64_t sum = 0;
  for (int role = 0; role < 3; role++) {
    for (int64_t b = 0; b < args->n_buckets; b++) {
      const int64_t bytes = slot_of(args, b, role);
      int64_t before = 0; /* earlier buckets of its size class */
      for (int64_t a = 0; a < b && before < 2; a++)
        before += slot_of(args, a, role) == bytes;
      if (before < 2) sum = tx_memory_add(sum, 1, bytes);
    }
  }
  return sum;
}

/* Returns the bytes of the in_flight buckets that take most, found one after the other. *filling: the most bytes of the
 * gradients of one bucket, as tensors of their own. */
static int64_t exchanged(const tx_memory_args *args, int64_t *filling) {
  int64_t sum = 0, last = -1, last_bytes = INT64_MAX;
  *filling = 0;
  for (int64_t taken = 0; taken < args->in_flight && taken < args->n_buckets; taken++) {
    const tx_layout_param *like = NULL;
    int64_t next = -1, next_bytes = -1;
    for (int64_t b = 0; b < args->n_buckets; b++) {
      const tx_layout_bucket *bucket = &args->buckets[b];
      if (b == 0 || bucket->buffer != args->buckets[b - 1].buffer)
        like = &args->layout->params[tx_memory_first_in(args, bucket->buffer)];
      const int64_t bytes = exchange_bytes(args, like, bucket->size, 0);
      if (bytes > next_bytes && (bytes < last_bytes || (bytes == last_bytes && b > last))) {
        next = b;
        next_bytes = bytes;
      }
      const int64_t grads = tx_memory_add(0, bucket->used, tx_memory_size_of(like->grad_dtype));
      if (grads > *filling) *filling = grads;
    }
    last = next;
    last_bytes = next_bytes;
    sum = tx_memory_add(sum, 1, next_bytes);
  }
  return sum;
}

/* Returns the bytes of the two largest messages of joined buckets (tx_coalesce; two at a time are in flight). *filling:
 * as in `exchanged`, raised to the gradients of joined buckets if these are more. */
static int64_t joined(const tx_memory_args *args, int64_t *filling) {
  int64_t most = 0, next = 0;
  for (int64_t m = 0, first = 0; m < args->n_messages; first = args->ends[m++]) {
    if (args->ends[m] - first < 2) continue;
    int64_t numel = 0, used = 0;
    for (int64_t b = first; b < args->ends[m]; b++) {
      numel = tx_memory_add(numel, 1, args->buckets[b].size);
      used = tx_memory_add(used, 1, args->buckets[b].used);
    }
    const tx_layout_param *like = like_of(args, first);
    const int64_t bytes = exchange_bytes(args, like, numel, 1),
                  grads = tx_memory_add(0, used, tx_memory_size_of(like->grad_dtype));
    if (grads > *filling) *filling = grads;
    next = bytes > most ? most : bytes > next ? bytes : next;
    if (bytes > most) most = bytes;
  }
  return tx_memory_add(most, 1, next);
}

/* Returns the most bytes that joined buckets may take, if the link speed is not known and the bucket size is the
 * default. *filling: as in `joined`. */
static int64_t joined_at_most(const tx_memory_args *args, int64_t *filling) {
  if (args->layout->cap != TX_NO_INT || !args->layout->overlap || args->layout->world == 1) return 0;
  const int32_t sharded = args->strategy != TX_NO_SHARD;
  int64_t most = 0;
  for (int64_t first = 0, b = 0; b < args->n_buckets; first = b) {
    int64_t numel = 0, pair = INT64_MAX; /* elements of the smallest two neighbours */
    for (; b < args->n_buckets && args->buckets[b].buffer == args->buckets[first].buffer; b++) {
      numel = tx_memory_add(numel, 1, args->buckets[b].size);
      const int64_t with = b > first ? tx_memory_add(args->buckets[b - 1].size, 1, args->buckets[b].size) : INT64_MAX;
      if (with < pair) pair = with;
    }
    const tx_layout_param *like = like_of(args, first);
    const int64_t all = numel, blocks = all / TX_BLOCK, messages = compressed(args, like->wire_dtype, blocks);
    const int64_t bytes =
        messages > 0 ? messages : tx_memory_add(0, blocks, tx_wire_block_bytes((tx_dtype)like->wire_dtype));
    if (blocks > 0) numel = tx_coalesce_most(bytes, sharded, messages > 0) / (bytes / blocks) * TX_BLOCK;
    const int64_t largest = messages == 0 && tx_coalesce_whole(bytes) ? all : numel;
    if (pair > largest) continue;
    const int64_t two = tx_memory_add(0, 2, exchange_bytes(args, like, numel, 1));
    const int64_t grads = tx_memory_add(0, largest, tx_memory_size_of(like->grad_dtype));
    if (two > most) most = two;
    if (grads > *filling) *filling = grads;
  }
  return most;
}

/* Bytes of a unit's gradients that are reduced, packed and received. */
static int64_t reduced(const tx_memory_args *args, const tx_memory_unit *unit) {
  const int64_t given = tx_memory_add(0, unit->trained, tx_memory_size_of(unit->reduce_dtype));
  const int narrow = tx_memory_size_of(unit->wire_dtype) < tx_memory_size_of(unit->reduce_dtype);
  const int64_t blocks = tx_memory_parts_of(unit->trained, TX_BLOCK);
  const int64_t wire = narrow ? tx_memory_add(0, blocks, tx_wire_block_bytes((tx_dtype)unit->wire_dtype)) : given;
  return tx_memory_add(tx_memory_add(given, narrow, wire), 1, wire - wire / args->layout->world);
}

static int64_t gathered(const tx_memory_args *args) {
  const tx_memory_unit none = {0}, *first = &none, *second = &none;
  int64_t most = 0, next = 0;
  for (int64_t u = 0; u < args->n_units; u++) {
    const tx_memory_unit *unit = &args->units[u];
    const int64_t bytes = tx_memory_add(0, unit->numel, tx_memory_size_of(unit->param_dtype));
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
  const int64_t sum =
      tx_memory_add(tx_memory_add(most, 2, next), first->trained, tx_memory_size_of(first->param_dtype));
  return tx_memory_add(tx_memory_add(sum, 1, reduced(args, first)), 1, reduced(args, second));
}

int64_t tx_memory_transient(const tx_memory_args *args) {
  if (args->strategy == TX_OPTIM_GRADS_PARAMS) return gathered(args);
  int64_t filling;
  int64_t exchange = exchanged(args, &filling);
  if (args->slots) {
    exchange = slots(args);
  } else {
    const int64_t together = args->ends ? joined(args, &filling) : joined_at_most(args, &filling);
    if (together > exchange) exchange = together;
  }
  return args->strategy == TX_OPTIM_GRADS ? tx_memory_add(exchange, 1, filling) : exchange;
}
