/* tx_layout_plan: which parameter is where in which bucket. One function walks over the plan; it runs once to check
 * that every number fits, and once to write. */
#include <inttypes.h>

#include "csrc/core/dtype.h"
#include "csrc/core/hash.h"
#include "csrc/core/status.h"
#include "csrc/core/text.h"
#include "csrc/torch_ext_advanced.h"

/* The limit of offsets, so that offsets in bytes of the widest dtype (16) fit into int64 too. */
static const int64_t kLimit = INT64_MAX / 16;

/* Buckets per buffer that the default cap aims at: one of them is still being exchanged when backward has ended. */
static const int64_t kBucketsPerBuffer = 32;

static const int64_t kHighBandwidth = 1 << 16; /* NCCL's bus bandwidth is lower for sizes that are no multiple of it */

/* Appends "parameter 3 ('layers.0.weight')". */
static void add_param(tx_text *text, const tx_layout_args *args, int64_t i) {
  tx_text_add(text, "parameter %" PRId64, i);
  if (args->params[i].name) tx_text_add(text, " ('%.128s')", args->params[i].name);
}

static tx_status fail_param(const tx_layout_args *args, int64_t i, tx_status status, const char *what, int64_t number,
                            tx_error *error) {
  char name[192];
  tx_text text = tx_text_in(name, sizeof name);
  add_param(&text, args, i);
  return tx_fail(error, status, "layout: %s %s %" PRId64, name, what, number);
}

/* -- checking --------------------------------------------------------------------------------------------------- */

static tx_status check_param(const tx_layout_args *args, int64_t i, tx_error *error) {
  const tx_layout_param *p = &args->params[i];
  if (p->numel < 0 || p->numel > kLimit) {
    return fail_param(args, i, TX_ERROR_INVALID_ARGUMENT, "has a number of elements that is not legal:", p->numel,
                      error);
  }
  const int32_t dtypes[] = {p->param_dtype, p->grad_dtype, p->wire_dtype};
  for (int k = 0; k < 3; k++) {
    int64_t bytes;
    if (tx_dtype_size((tx_dtype)dtypes[k], &bytes, NULL) != TX_OK) {
      return fail_param(args, i, TX_ERROR_UNKNOWN_DTYPE, "has an unknown dtype code:", dtypes[k], error);
    }
  }
  if (p->tied != -1) {
    if (p->tied < 0 || p->tied >= i) {
      return fail_param(args, i, TX_ERROR_INVALID_ARGUMENT,
                        "is tied to a parameter that is not an earlier one:", p->tied, error);
    }
    const tx_layout_param *first = &args->params[p->tied];
    if (first->tied != -1 || first->numel != p->numel || first->param_dtype != p->param_dtype) {
      return fail_param(
          args, i, TX_ERROR_SHAPE,
          "differs in elements or dtype from the parameter that it is tied to, or that one is tied itself:", p->tied,
          error);
    }
  }
  if (!p->shape) return TX_OK;
  int64_t product = 1;
  for (int64_t d = 0; d < p->ndim; d++) {
    if (p->shape[d] < 0 || __builtin_mul_overflow(product, p->shape[d], &product)) {
      return fail_param(args, i, TX_ERROR_SHAPE, "has a size that is not legal:", p->shape[d], error);
    }
  }
  if (p->ndim < 0 || product != p->numel) {
    return fail_param(args, i, TX_ERROR_SHAPE, "has a shape whose product is not its number of elements,", p->numel,
                      error);
  }
  return TX_OK;
}

/* Checks that `order` has each of 0 ... n-1 once, without allocating: for a window of indices at a time. */
static tx_status check_order(const tx_layout_args *args, tx_error *error) {
  enum { WINDOW = 1 << 15 };
  for (int64_t base = 0; base < args->n; base += WINDOW) {
    unsigned char seen[WINDOW / 8] = {0};
    for (int64_t k = 0; k < args->n; k++) {
      const int64_t i = args->order[k];
      if (i < 0 || i >= args->n) {
        return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                       "layout: order[%" PRId64 "] is %" PRId64 "; legal: 0 ... %" PRId64 ", each once", k, i,
                       args->n - 1);
      }
      if (i < base || i - base >= WINDOW) continue;
      const unsigned char bit = (unsigned char)(1u << ((i - base) % 8));
      if (seen[(i - base) / 8] & bit) {
        return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "layout: order holds %" PRId64 " twice", i);
      }
      seen[(i - base) / 8] |= bit;
    }
  }
  return TX_OK;
}

static tx_status check_args(const tx_layout_args *args, tx_error *error) {
  if (!args || args->size != sizeof *args) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_layout_plan: args must begin with TX_LAYOUT_ARGS_INIT");
  }
  if (args->n < 0 || (args->n > 0 && !args->params)) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "layout: %" PRId64 " parameters at %p", args->n,
                   (const void *)args->params);
  }
  if (args->cap != TX_NO_INT && args->cap <= 0) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "layout: bucket cap %" PRId64 " is not legal; legal: > 0 elements",
                   args->cap);
  }
  if (args->world < 1 || args->world > INT64_C(1) << 31) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "layout: world size %" PRId64 " is not legal; legal: 1 ... 2^31",
                   args->world);
  }
  for (int64_t i = 0; i < args->n; i++)
    TX_FORWARD(check_param(args, i, error));
  return args->order ? check_order(args, error) : TX_OK;
}

/* -- the walk --------------------------------------------------------------------------------------------------- */

static int64_t gcd(int64_t a, int64_t b) {
  while (b != 0) {
    const int64_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

/* x rounded up to a multiple of m > 0; a number beyond kLimit if that overflows. */
static int64_t round_up(int64_t x, int64_t m) {
  int64_t sum;
  return __builtin_add_overflow(x, m - 1, &sum) ? INT64_MAX : sum / m * m;
}

/* The k-th parameter to be placed. */
static int64_t nth(const tx_layout_args *args, int64_t k) {
  return args->order ? args->order[k] : args->n - 1 - k;
}

static int share_buffer(const tx_layout_param *a, const tx_layout_param *b) {
  return a->param_dtype == b->param_dtype && a->grad_dtype == b->grad_dtype && a->wire_dtype == b->wire_dtype &&
         a->device == b->device && a->key == b->key;
}

/* Whether the k-th parameter is the first of its buffer. Fast if there are few buffers: then a parameter of the same
 * buffer comes early. */
static int opens_buffer(const tx_layout_args *args, int64_t k) {
  const tx_layout_param *p = &args->params[nth(args, k)];
  if (p->tied != -1) return 0;
  for (int64_t j = 0; j < k; j++) {
    const tx_layout_param *q = &args->params[nth(args, j)];
    if (q->tied == -1 && share_buffer(p, q)) return 0;
  }
  return 1;
}

/* Least bytes of a bucket on the wire: below, the messages that it is cut into are too small for the link. */
static int64_t least_cap_bytes(int64_t world) {
  const int64_t beyond_node = world > 8 ? world - 8 : 0;
  return (INT64_C(1) << 19) + beyond_node * (INT64_C(3) << 18);
}

static int64_t megatron_cap_bytes(int64_t world) {
  const int64_t elements = world > 40 ? world * INT64_C(1000000) : INT64_C(40000000);
  return elements * 4;
}

/* The default bucket size in elements; the rule is described at tx_layout_args in the public header. `first` is the
 * first of the buffer's parameters. */
static int64_t default_cap(const tx_layout_args *args, int64_t first) {
  const tx_layout_param *like = &args->params[nth(args, first)];
  const int64_t block_bytes = tx_wire_block_bytes((tx_dtype)like->wire_dtype);
  int64_t blocks = 0;
  for (int64_t k = first; k < args->n; k++) {
    const tx_layout_param *p = &args->params[nth(args, k)];
    if (p->tied != -1 || !share_buffer(like, p)) continue;
    blocks += (p->numel + TX_LAYOUT_ALIGNMENT - 1) / TX_LAYOUT_ALIGNMENT;
    /* The plan will not fit either, and reports that. */
    if (blocks > kLimit / TX_LAYOUT_ALIGNMENT) return INT64_MAX;
  }
  int64_t bytes = blocks * block_bytes / kBucketsPerBuffer;
  if (bytes < least_cap_bytes(args->world)) bytes = least_cap_bytes(args->world);
  if (like->wire_dtype == TX_U8) bytes *= 2;
  if (bytes > megatron_cap_bytes(args->world)) bytes = megatron_cap_bytes(args->world);
  return bytes / block_bytes * TX_LAYOUT_ALIGNMENT;
}

/* The output of the walk; the pointers may be NULL. */
typedef struct output {
  tx_layout_place *places;
  tx_layout_bucket *buckets;
  tx_layout_summary summary;
  uint64_t hash;
} output;

static void close_bucket(output *out, tx_layout_bucket *bucket, int64_t end_alignment) {
  /* As Megatron-LM does, the bucket's end is padded, counted from the buffer's start. All ends are multiples, so sizes
   * are too. */
  bucket->size = round_up(bucket->offset + bucket->used, end_alignment) - bucket->offset;
  if (out->buckets) out->buckets[out->summary.n_buckets] = *bucket;
  out->hash = tx_hash_int(out->hash, bucket->buffer);
  out->hash = tx_hash_int(out->hash, bucket->offset);
  out->hash = tx_hash_int(out->hash, bucket->size);
  out->hash = tx_hash_int(out->hash, bucket->used);
  out->summary.n_buckets++;
}

static tx_status plan_buffer(const tx_layout_args *args, int64_t first, output *out, tx_error *error) {
  const tx_layout_param *like = &args->params[nth(args, first)];
  const int64_t shards = args->world * TX_LAYOUT_ALIGNMENT;
  const int64_t alignment = args->high_bandwidth ? shards / gcd(shards, kHighBandwidth) * kHighBandwidth : shards;
  const int64_t cap = !args->overlap ? INT64_MAX : args->cap != TX_NO_INT ? args->cap : default_cap(args, first);

  tx_layout_bucket bucket = {.buffer = out->summary.n_buffers};
  for (int64_t k = first; k < args->n; k++) {
    const int64_t i = nth(args, k);
    const tx_layout_param *p = &args->params[i];
    if (p->tied != -1 || !share_buffer(like, p)) continue;
    const int64_t start = round_up(bucket.offset + bucket.used, TX_LAYOUT_ALIGNMENT);
    if (round_up(start + p->numel, alignment) > kLimit) {
      return fail_param(args, i, TX_ERROR_INVALID_ARGUMENT, "ends beyond what an int64 of bytes can count:", start,
                        error);
    }
    if (out->places) out->places[i] = (tx_layout_place){bucket.buffer, out->summary.n_buckets, start};
    out->hash = tx_hash_int(out->hash, i);
    out->hash = tx_hash_int(out->hash, start);
    bucket.used = start + p->numel - bucket.offset;
    bucket.n_params++;
    if (bucket.used >= cap) {
      close_bucket(out, &bucket, alignment);
      bucket = (tx_layout_bucket){.buffer = bucket.buffer, .offset = bucket.offset + bucket.size};
    }
  }
  if (bucket.n_params > 0) close_bucket(out, &bucket, alignment);
  out->summary.n_buffers++;
  return TX_OK;
}

/* Hashes the arguments in which ranks must agree, and none in which they may differ. */
static uint64_t hash_args(const tx_layout_args *args) {
  uint64_t hash = tx_hash_int(tx_hash_begin(), (int64_t)tx_version());
  hash = tx_hash_int(hash, args->world);
  hash = tx_hash_int(hash, args->n);
  for (int64_t i = 0; i < args->n; i++) {
    const tx_layout_param *p = &args->params[i];
    hash = tx_hash_text(hash, p->name);
    hash = tx_hash_int(hash, p->shape ? p->ndim : -1);
    for (int64_t d = 0; p->shape && d < p->ndim; d++)
      hash = tx_hash_int(hash, p->shape[d]);
    hash = tx_hash_int(hash, p->numel);
    hash = tx_hash_int(hash, p->tied);
    hash = tx_hash_int(hash, p->param_dtype);
    hash = tx_hash_int(hash, p->grad_dtype);
    hash = tx_hash_int(hash, p->wire_dtype);
  }
  return hash;
}

static tx_status walk(const tx_layout_args *args, output *out, tx_error *error) {
  out->hash = hash_args(args);
  for (int64_t k = 0; k < args->n; k++) {
    if (opens_buffer(args, k)) TX_FORWARD(plan_buffer(args, k, out, error));
  }
  out->summary.fingerprint = tx_hash_end(out->hash);
  return TX_OK;
}

tx_status tx_layout_plan(const tx_layout_args *args, tx_layout_place *places, tx_layout_bucket *buckets,
                         int64_t n_buckets, tx_layout_summary *summary, tx_error *error) {
  TX_FORWARD(check_args(args, error));
  if (!summary || !places != !buckets) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "tx_layout_plan: summary must not be NULL, and places and buckets be both given or both NULL");
  }
  output count = {0};
  TX_FORWARD(walk(args, &count, error));
  if (places) {
    if (n_buckets < count.summary.n_buckets) {
      return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                     "tx_layout_plan: room for %" PRId64 " buckets; needed: %" PRId64
                     " (the number of parameters, %" PRId64 ", is always enough)",
                     n_buckets, count.summary.n_buckets, args->n);
    }
    output write = {.places = places, .buckets = buckets};
    TX_FORWARD(walk(args, &write, error));
    for (int64_t i = 0; i < args->n; i++) {
      if (args->params[i].tied != -1) places[i] = places[args->params[i].tied];
    }
  }
  *summary = count.summary;
  return TX_OK;
}

/* -- shards ----------------------------------------------------------------------------------------------------- */

tx_status tx_layout_shard(const tx_layout_bucket *bucket, int64_t world, int64_t rank, int64_t *begin, int64_t *end,
                          tx_error *error) {
  if (!bucket || !begin || !end) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_layout_shard: bucket, begin and end must not be NULL");
  }
  if (world < 1 || rank < 0 || rank >= world) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "tx_layout_shard: rank %" PRId64 " of %" PRId64 " is not legal; legal: 0 ... world - 1", rank,
                   world);
  }
  if (bucket->size < 0 || bucket->size % world != 0) {
    return tx_fail(error, TX_ERROR_MISMATCH,
                   "tx_layout_shard: a bucket of %" PRId64 " elements was not planned for %" PRId64 " ranks",
                   bucket->size, world);
  }
  const int64_t share = bucket->size / world;
  int64_t first, last;
  if (__builtin_add_overflow(bucket->offset, share * rank, &first) || __builtin_add_overflow(first, share, &last)) {
    return tx_fail(error, TX_ERROR_MISMATCH,
                   "tx_layout_shard: a bucket of %" PRId64 " elements from %" PRId64
                   " on ends beyond what an int64 counts",
                   bucket->size, bucket->offset);
  }
  *begin = first;
  *end = last;
  return TX_OK;
}

int64_t tx_layout_intersect(int64_t start, int64_t numel, int64_t begin, int64_t end, int64_t *first) {
  int64_t stop; /* saturated on overflow, beyond any `end` */
  if (__builtin_add_overflow(start, numel, &stop)) stop = numel < 0 ? INT64_MIN : INT64_MAX;
  const int64_t from = start > begin ? start : begin;
  const int64_t to = stop < end ? stop : end;
  *first = from < to ? from - start : 0;
  return from < to ? to - from : 0;
}
