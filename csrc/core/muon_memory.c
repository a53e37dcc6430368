/* Memory of the step of Muon's matrices, in addition to states: workspace of the products, and what is in flight to the
 * owners and back. */
#include "csrc/core/muon_memory.h"

#include "csrc/core/dtype.h"
#include "csrc/core/status.h"

/* The most elements of all matrices together, so that a few times their bytes fit into an int64. */
#define LARGEST (INT64_C(1) << 54)
#define CACHE_LINE 64 /* bytes; a matrix that is multiplied in place must be aligned to it */

static int64_t most(int64_t a, int64_t b) {
  return a > b ? a : b;
}

static int64_t item_bytes(int32_t dtype) {
  return dtype == TX_BF16 ? 2 : 4;
}

static int64_t numel_of(const tx_muon_matrix *m) {
  return m->rows * m->columns;
}

typedef struct extent {
  int64_t n, numel, side; /* number of matrices, most elements of one, largest smaller dimension */
  int64_t whole; /* bytes of the largest parameter, up to its last such matrix, in the dtype in which it is sent */
  int copied;
} extent;

/* The extent of the matrices with products in one dtype. lanes: only of those that are multiplied several at a time. */
static extent extent_of(const tx_memory_args *args, int32_t dtype, int lanes) {
  extent e = {0};
  for (int64_t i = 0; i < args->n_matrices; i++) {
    const tx_muon_matrix *m = &args->matrices[i];
    if (m->product_dtype != dtype || (lanes && !tx_muon_lanes(m->rows, m->columns, dtype, args->threads))) continue;
    e.n++;
    e.numel = most(e.numel, numel_of(m));
    e.side = most(e.side, m->rows < m->columns ? m->rows : m->columns);
    e.copied |= m->wire_dtype != dtype || m->begin * item_bytes(dtype) % CACHE_LINE != 0;
    e.whole = most(e.whole, (m->begin + numel_of(m)) * item_bytes(m->wire_dtype));
  }
  return e;
}

static int64_t workspace(const extent *e, int copied, int32_t dtype) {
  return ((1 + copied) * e->numel + 4 * e->side * e->side) * item_bytes(dtype);
}

static int64_t in_lanes_of(const tx_memory_args *args, int32_t dtype) {
  const extent all = extent_of(args, dtype, 0), in_lanes = extent_of(args, dtype, 1);
  const int alone = args->layout->world == 1, cut = !alone && args->strategy != TX_NO_SHARD;
  const int64_t lanes = cut ? 0 : in_lanes.n < args->threads ? in_lanes.n : args->threads;
  const int64_t others = lanes > 1 ? (lanes - 1) * workspace(&in_lanes, all.copied, dtype) : 0;
  const int64_t slots = in_lanes.n < lanes * TX_MUON_PER_LANE ? in_lanes.n : lanes * TX_MUON_PER_LANE;
  const int64_t momenta = lanes > 1 ? slots * ((in_lanes.whole + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE) : 0;
  return workspace(&all, all.copied, dtype) + others + (alone ? most(all.whole, momenta) : 0);
}

/* The bytes of a parameter's momentum up to matrix i, from a cache line on. */
static int64_t momentum_bytes(const tx_muon_matrix *m) {
  const int64_t bytes = (m->begin + numel_of(m)) * item_bytes(m->wire_dtype);
  return (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
}

/* As much as all together need, at most `limit`, unless the largest needs more. */
static int64_t limited(int64_t largest, int64_t all, int64_t limit) {
  return most(largest, all < limit ? all : limit);
}

static int64_t in_stacks_of(const tx_memory_args *args, int32_t dtype) {
  const extent largest = extent_of(args, dtype, 0);
  const int alone = args->layout->world == 1, shared = !alone && args->strategy == TX_NO_SHARD;
  int64_t numel = 0, square = 0, momentum = 0, of_largest = 0;
  for (int64_t i = 0; i < args->n_matrices; i++) {
    const tx_muon_matrix *m = &args->matrices[i], *next = m + 1;
    if (m->product_dtype != dtype) continue;
    const int64_t side = m->rows < m->columns ? m->rows : m->columns;
    numel += numel_of(m);
    square += side * side;
    if (i + 1 < args->n_matrices && next->param == m->param) continue;
    momentum += momentum_bytes(m);
    of_largest = most(of_largest, momentum_bytes(m));
  }
  const int64_t stack = alone || shared ? TX_MUON_STACK : 0;
  numel = limited(largest.numel, numel, stack);
  square = limited(largest.side * largest.side, square, stack);
  return ((1 + (largest.copied || shared)) * numel + 4 * square) * item_bytes(dtype) +
         (alone ? limited(of_largest, momentum, TX_MUON_WINDOW) : 0);
}

static int64_t products_in(const tx_memory_args *args, int32_t dtype) {
  return args->threads > 0 ? in_lanes_of(args, dtype) : in_stacks_of(args, dtype);
}

/* Writes the elements of parameter i that each rank has. */
static void cut(const tx_memory_args *args, int64_t i, tx_muon_run *runs) {
  const tx_layout_param *p = &args->layout->params[i];
  const int64_t world = args->layout->world;
  if (args->strategy == TX_OPTIM_GRADS_PARAMS) { /* by rows, as torch.chunk */
    const int64_t rows = p->shape[0], each = rows / world + (rows % world != 0), columns = p->numel / rows;
    for (int64_t r = 0; r < world; r++) {
      const int64_t begin = r * each < rows ? r * each : rows;
      runs[r] = (tx_muon_run){begin * columns, (rows - begin < each ? rows : begin + each) * columns};
    }
    return;
  }
  const tx_layout_bucket *bucket = &args->buckets[args->places[i].bucket];
  const int64_t start = bucket->offset - args->places[i].start, each = bucket->size / world;
  for (int64_t r = 0; r < world; r++) {
    const int64_t begin = most(0, start + r * each), end = most(0, start + (r + 1) * each);
    runs[r] = (tx_muon_run){begin < p->numel ? begin : p->numel, end < p->numel ? end : p->numel};
  }
}

/* Whether parameter i is inside the bucket that `places` says it is in. */
static int is_placed(const tx_memory_args *args, int64_t i) {
  const tx_layout_place *place = &args->places[i];
  if (place->bucket < 0 || place->bucket >= args->n_buckets) return 0;
  const tx_layout_bucket *bucket = &args->buckets[place->bucket];
  int64_t at, left; /* elements of the bucket before the parameter, and from its start on */
  return !__builtin_sub_overflow(place->start, bucket->offset, &at) && at >= 0 &&
         !__builtin_sub_overflow(bucket->size, at, &left) && args->layout->params[i].numel <= left;
}

static tx_status check(const tx_memory_args *args, tx_error *error) {
  int64_t numel = 0;
  for (int64_t i = 0; i < args->n_matrices; i++) {
    const tx_muon_matrix *m = &args->matrices[i];
    const tx_layout_param *p = m->param >= 0 && m->param < args->layout->n ? &args->layout->params[m->param] : NULL;
    const int known = p && p->shape && p->ndim > 0 && p->shape[0] > 0 && is_placed(args, m->param);
    const int fits = known && m->rows > 0 && m->columns > 0 && m->begin >= 0 && m->rows <= p->numel / m->columns &&
                     m->begin <= p->numel - numel_of(m) && p->tied == -1 && (numel += numel_of(m)) <= LARGEST;
    if (fits && (m->wire_dtype == TX_F32 || m->wire_dtype == TX_BF16) &&
        (m->product_dtype == TX_F32 || m->product_dtype == TX_BF16))
      continue;
    return tx_fail(
        error, TX_ERROR_INVALID_ARGUMENT,
        "memory: matrices[%lld] is %lld x %lld from element %lld of parameter %lld; legal: within a parameter "
        "of the layout whose shape is given, in fp32 or bf16",
        (long long)i, (long long)m->rows, (long long)m->columns, (long long)m->begin, (long long)m->param);
  }
  return TX_OK;
}

static int64_t runs_bytes(const tx_memory_args *args) {
  return args->layout->n * args->layout->world * (int64_t)sizeof(tx_muon_run);
}

static tx_muon_exchange_args exchange_of(const tx_memory_args *args) {
  tx_muon_exchange_args found = TX_MUON_EXCHANGE_ARGS_INIT;
  found.n = args->n_matrices;
  found.matrices = args->matrices;
  found.n_params = args->layout->n;
  found.world = args->layout->world;
  found.runs = args->workspace;
  return found;
}

int64_t tx_memory_workspace_bytes(const tx_memory_args *args) {
  const int64_t largest = INT64_C(1) << 40;
  if (!args || args->size != sizeof *args || !args->layout || args->n_matrices < 1 || args->n_matrices > largest ||
      args->layout->n < 1 || args->layout->world < 1 || args->layout->n > largest / args->layout->world)
    return 0;
  const tx_muon_exchange_args exchange = exchange_of(args);
  return runs_bytes(args) + tx_muon_exchange_room(&exchange);
}

tx_status tx_muon_memory(const tx_memory_args *args, int64_t *products, int64_t *stepping, tx_error *error) {
  *products = *stepping = 0;
  if (args->n_matrices == 0) return TX_OK;
  if (args->threads < 0) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "memory: threads is %lld; >= 0 is legal",
                   (long long)args->threads);
  }
  if (!args->matrices || !args->workspace || (uintptr_t)args->workspace % sizeof(int64_t) ||
      tx_memory_workspace_bytes(args) == 0) {
    return tx_fail(
        error, TX_ERROR_INVALID_ARGUMENT,
        "memory: %lld matrices; legal: >= 0, with a workspace (tx_memory_workspace_bytes) where there are some",
        (long long)args->n_matrices);
  }
  TX_FORWARD(check(args, error));
  *products = products_in(args, TX_F32) + products_in(args, TX_BF16);
  if (args->layout->world == 1) return TX_OK;
  if (args->strategy == TX_NO_SHARD) {
    for (int64_t i = 0; i < args->n_matrices; i++)
      *stepping += numel_of(&args->matrices[i]) * item_bytes(args->matrices[i].wire_dtype);
    return TX_OK;
  }
  tx_muon_exchange_args exchange = exchange_of(args);
  for (int64_t i = 0; i < args->n_matrices; i++)
    cut(args, args->matrices[i].param, (tx_muon_run *)args->workspace + args->matrices[i].param * exchange.world);
  void *memory = (char *)args->workspace + runs_bytes(args);
  tx_muon_exchange *unused;
  TX_FORWARD(tx_muon_exchange_init(memory, &exchange, &unused, error));
  for (; exchange.rank < exchange.world; exchange.rank++)
    *stepping = most(*stepping, tx_muon_exchange_peak(&exchange, memory));
  return TX_OK;
}
