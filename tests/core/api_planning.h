// Makes legal random calls of the planning functions: layouts, messages, owners, memory, gradient cycles (see
// api_call.h).
#ifndef TESTS_CORE_API_PLANNING_H
#define TESTS_CORE_API_PLANNING_H

#include "csrc/torch_ext_cycle.h"
#include "tests/core/api_call.h"

namespace api {

inline tx_layout_args *MakeLayout(Call *call) {
  Random &random = call->random;
  auto *args = call->New<tx_layout_args>(1, TX_LAYOUT_ARGS_INIT);
  args->n = random.Below(6);
  args->world = 1 + random.Below(4);
  args->overlap = static_cast<int32_t>(random.Below(2));
  if (random.OneIn(2)) args->cap = 1 + random.Below(5000);
  auto *params = call->New<tx_layout_param>(args->n);
  auto *order = call->New<int64_t>(args->n);
  for (int64_t i = 0; i < args->n; i++) {
    params[i].name = "p";
    params[i].numel = Numel(random);
    params[i].tied = -1;
    params[i].param_dtype = params[i].grad_dtype = params[i].wire_dtype = random.OneIn(3) ? TX_F32 : TX_BF16;
    order[i] = args->n - 1 - i;
  }
  args->params = params;
  if (random.OneIn(2)) args->order = order;
  return args;
}

inline void NameLayout(Call *call, tx_layout_args *args) {
  auto *params = const_cast<tx_layout_param *>(args->params);
  call->Size("args", &args->size);
  call->Never<int64_t>("parameters", &args->n, {-1});
  call->Never<int64_t>("cap", &args->cap, {0, -1});
  call->Never<int64_t>("world", &args->world, {0, -1, int64_t{1} << 32});
  if (args->n < 1) return;
  call->Needed("parameters", &args->params);
  call->Never<int64_t>("parameter 0", &params[0].numel, {-1, std::numeric_limits<int64_t>::max()});
  call->Never<int64_t>("parameter 0", &params[0].tied, {0, 1, -2});
  for (int32_t *dtype : {&params[0].param_dtype, &params[0].grad_dtype, &params[0].wire_dtype})
    call->Never<int32_t>("parameter 0", dtype, {TX_NONE, -1, 99});
  if (args->order)
    call->Never<int64_t>("order", const_cast<int64_t *>(args->order),
                         {-1, args->n, std::numeric_limits<int64_t>::max()});
}

struct Plan {
  tx_layout_args *args;
  tx_layout_place *places;
  tx_layout_bucket *buckets;
  int64_t n;
  tx_layout_summary *summary;
};

inline Plan *MakePlan(Call *call) {
  auto *p = call->New<Plan>();
  tx_layout_args *args = MakeLayout(call);
  *p = {args, call->New<tx_layout_place>(args->n), call->New<tx_layout_bucket>(args->n), args->n,
        call->New<tx_layout_summary>()};
  return p;
}

inline void LayoutPlan(Call *call) {
  Plan *p = MakePlan(call);
  NameLayout(call, p->args);
  call->Needed("args", &p->args), call->Needed("summary", &p->summary);
  if (p->n) call->Needed("places", &p->places), call->Needed("buckets", &p->buckets);
  if (p->n) call->Never<int64_t>("buckets", &p->n, {0, -1});
  call->run = [=](tx_error *error) { return tx_layout_plan(p->args, p->places, p->buckets, p->n, p->summary, error); };
}

inline void LayoutShard(Call *call) {
  struct Values {
    tx_layout_bucket *bucket;
    int64_t world, rank, *begin, *end;
  };
  auto *a = call->New<Values>();
  *a = {call->New<tx_layout_bucket>(), 4, 1, call->New<int64_t>(), call->New<int64_t>()};
  *a->bucket = {0, 128 * static_cast<int64_t>(call->random.Below(9)), 4 * 128, 500, 1};
  call->Never<int64_t>("bucket of", &a->bucket->size, {-1, 5});
  call->Never<int64_t>("bucket of", &a->bucket->offset, {std::numeric_limits<int64_t>::max()});
  call->Needed("bucket", &a->bucket), call->Needed("begin", &a->begin), call->Needed("end", &a->end);
  call->Never<int64_t>("rank", &a->rank, {-1, 4});
  call->Never<int64_t>("rank", &a->world, {0, -1, 1});
  call->run = [=](tx_error *error) { return tx_layout_shard(a->bucket, a->world, a->rank, a->begin, a->end, error); };
}

inline void LayoutSlices(Call *call) {
  struct Values {
    const tx_layout_slice *placed;
    int64_t n;
    const tx_layout_range *ranges;
    int64_t n_ranges;
    tx_layout_slice *slices;
    int64_t capacity, *n_slices;
  };
  auto *a = call->New<Values>();
  const int64_t n = call->random.Below(5), n_ranges = 1 + call->random.Below(4);
  auto *placed = call->New<tx_layout_slice>(n);
  auto *ranges = call->New<tx_layout_range>(n_ranges);
  for (int64_t i = 0; i < n; i++)
    placed[i] = {i, 0, 100, 128 * i};
  for (int64_t r = 0; r < n_ranges; r++)
    ranges[r] = {150 * r, 150 * r + 150};
  *a = {placed, n, ranges, n_ranges, call->New<tx_layout_slice>(n + n_ranges), n + n_ranges, call->New<int64_t>()};
  if (n) call->Needed("slices", &a->placed);
  call->Needed("ranges", &a->ranges), call->Needed("NULL", &a->slices), call->Needed("NULL", &a->n_slices);
  call->Never<int64_t>("slices", &a->n, {-1});
  call->Never<int64_t>("ranges", &a->n_ranges, {-1});
  call->Never<int64_t>("ranges[0]", &ranges[0].end, {-1, std::numeric_limits<int64_t>::min()});
  int64_t needed = 0;
  std::vector<tx_layout_slice> found(static_cast<size_t>(n + n_ranges));
  EXPECT_EQ(tx_layout_slices(placed, n, ranges, n_ranges, found.data(), n + n_ranges, &needed, nullptr), TX_OK);
  if (needed) call->Never<int64_t>("room", &a->capacity, {0, needed - 1});
  call->run = [=](tx_error *error) {
    return tx_layout_slices(a->placed, a->n, a->ranges, a->n_ranges, a->slices, a->capacity, a->n_slices, error);
  };
}

inline void LayoutBoxes(Call *call) {
  struct Values {
    const int64_t *shape, *order;
    int64_t ndim, start, stop, limit, *boxes, capacity, *n_boxes;
  };
  auto *a = call->New<Values>();
  const int64_t ndim = call->random.Below(4);
  auto *shape = call->New<int64_t>(ndim), *order = call->New<int64_t>(ndim);
  int64_t numel = 1;
  for (int64_t d = 0; d < ndim; d++) {
    shape[d] = 1 + call->random.Below(9), order[d] = ndim - 1 - d;
    numel *= shape[d];
  }
  const int64_t start = call->random.Below(static_cast<uint32_t>(numel) + 1);
  const int64_t limit = call->random.OneIn(2) ? std::numeric_limits<int64_t>::max() : 1 + call->random.Below(20);
  *a = {shape,
        call->random.OneIn(2) ? order : nullptr,
        ndim,
        start,
        numel,
        limit,
        call->New<int64_t>(2 * ndim * 800),
        800,
        call->New<int64_t>()};
  if (ndim) call->Needed("shape", &a->shape);
  call->Absent("order", &a->order), call->Absent("boxes", &a->boxes), call->Needed("n_boxes", &a->n_boxes);
  call->Never<int64_t>("dimensions", &a->ndim, {-1});
  call->Never<int64_t>("elements", &a->start, {-1, numel + 1});
  call->Never<int64_t>("elements", &a->stop, {-1, numel + 1, std::numeric_limits<int64_t>::max()});
  call->Never<int64_t>("boxes", &a->limit, {0, -1});
  if (start < numel) call->Never<int64_t>("boxes", &a->capacity, {0});
  if (ndim) call->Never<int64_t>("shape[0]", &shape[0], {-1});
  if (ndim > 1) call->Never<int64_t>("shape[1]", &shape[1], {std::numeric_limits<int64_t>::min()});
  if (ndim && a->order) call->Never<int64_t>("order[", &order[0], {-1, ndim});
  call->run = [=](tx_error *error) {
    return tx_layout_boxes(a->shape, a->order, a->ndim, a->start, a->stop, a->limit, a->boxes, a->capacity, a->n_boxes,
                           error);
  };
}

inline void OffloadChoose(Call *call) {
  struct Values {
    const int64_t *bytes;
    int64_t n;
    double fraction;
    int64_t *heap;
    int32_t *chosen;
  };
  auto *a = call->New<Values>();
  const int64_t n = 1 + call->random.Below(9);
  auto *bytes = call->New<int64_t>(n);
  for (int64_t i = 0; i < n; i++)
    bytes[i] = call->random.Below(5000);
  *a = {bytes, n, 0.01 * call->random.Below(101), call->New<int64_t>(n), call->New<int32_t>(n)};
  call->Needed("NULL", &a->bytes), call->Needed("NULL", &a->heap), call->Needed("NULL", &a->chosen);
  call->Never<int64_t>("parameters", &a->n, {-1});
  call->Never<int64_t>("bytes[0]", &bytes[0], {-1});
  if (n > 1) call->Other<int64_t>("bytes[1]", &bytes[1], {std::numeric_limits<int64_t>::max()});
  call->Never<double>("fraction", &a->fraction, {kNan, -kTiny, 1.5, kInf});
  call->Other<double>("fraction", &a->fraction, {kTiny, 1e-300, 1 - 1e-16});
  call->run = [=](tx_error *error) {
    return tx_offload_choose(a->bytes, a->n, a->fraction, a->heap, a->chosen, error);
  };
}

inline void Coalesce(Call *call) {
  struct Values {
    tx_coalesce_args *args;
    int64_t *ends, *n;
  };
  auto *args = call->New<tx_coalesce_args>(1, TX_COALESCE_ARGS_INIT);
  auto *a = call->New<Values>();
  args->n_buckets = 1 + call->random.Below(20);
  auto *bytes = call->New<int64_t>(args->n_buckets), *buffer = call->New<int64_t>(args->n_buckets);
  for (int64_t b = 0; b < args->n_buckets; b++)
    bytes[b] = call->random.Below(1 << 20), buffer[b] = b / 7;
  args->bytes = bytes, args->buffer = buffer, args->world = 1 + call->random.Below(4);
  args->link_gbps = call->random.Of({0.0, 1.0, 10.0, 400.0});
  args->compressed = static_cast<int32_t>(call->random.Below(2));
  args->sharded = static_cast<int32_t>(call->random.Below(2));
  *a = {args, call->New<int64_t>(args->n_buckets), call->New<int64_t>()};
  call->Size("args", &args->size);
  call->Needed("args", &a->args), call->Needed("ends", &a->ends), call->Needed("n_messages", &a->n);
  call->Needed("bytes", &args->bytes), call->Needed("buffer", &args->buffer);
  call->Never<int64_t>("buckets", &args->n_buckets, {-1});
  call->Never<int64_t>("ranks", &args->world, {0, -1});
  call->Never<double>("link", &args->link_gbps, {kNan, -1.0, -kTiny});
  call->Other<double>("link", &args->link_gbps, {kInf, kTiny, 1e300});
  call->Never<int64_t>("bucket 0", &bytes[0], {-1});
  call->Other<int64_t>("bucket 0", &bytes[0], {std::numeric_limits<int64_t>::max()});
  call->run = [=](tx_error *error) { return tx_coalesce(a->args, a->ends, a->n, error); };
}

inline void PlanOwners(Call *call) {
  struct Values {
    int64_t n;
    const double *sizes;
    int64_t ranks;
    void *workspace;
    int32_t *owners;
    int64_t *fingerprint;
  };
  auto *a = call->New<Values>();
  const int64_t n = 1 + call->random.Below(20), ranks = 1 + call->random.Below(5);
  auto *sizes = call->New<double>(n);
  for (int64_t i = 0; i < n; i++)
    sizes[i] = call->random.Below(1000) / 7.0;
  char *workspace = call->Scratch(tx_plan_owners_bytes(n, ranks));
  *a = {n, sizes, ranks, workspace, call->New<int32_t>(n), call->New<int64_t>()};
  call->Needed("pieces", &a->sizes), call->Needed("workspace", &a->workspace), call->Needed("pieces", &a->owners);
  call->Absent("fingerprint", &a->fingerprint);
  call->Must("workspace", "odd", [=] { a->workspace = workspace + 4; });
  call->Never<int64_t>("pieces", &a->n, {-1, std::numeric_limits<int64_t>::max()});
  call->Never<int64_t>("ranks", &a->ranks, {0, -1, std::numeric_limits<int64_t>::max()});
  call->Never<double>("sizes[0]", &sizes[0], {kNan, kInf, -1.0, -kTiny});
  call->run = [=](tx_error *error) {
    return tx_plan_owners(a->n, a->sizes, a->ranks, a->workspace, a->owners, a->fingerprint, error);
  };
}

inline void MuonExchangeInit(Call *call) {
  struct Values {
    void *memory;
    tx_muon_exchange_args *args;
    tx_muon_exchange **exchange;
  };
  auto *args = call->New<tx_muon_exchange_args>(1, TX_MUON_EXCHANGE_ARGS_INIT);
  auto *a = call->New<Values>();
  args->world = 2, args->rank = 1, args->n = 2, args->n_params = 2;
  auto *matrices = call->New<tx_muon_matrix>(2);
  matrices[0] = {0, 0, 8, 16, 0, TX_F32, TX_BF16, 0}, matrices[1] = {1, 0, 4, 4, 1, TX_BF16, TX_BF16, 0};
  auto *runs = call->New<tx_muon_run>(4);
  runs[0] = {0, 64}, runs[1] = {64, 128}, runs[2] = {0, 16}, runs[3] = {16, 16};
  args->matrices = matrices, args->runs = runs;
  char *memory = call->Scratch(tx_muon_exchange_bytes(args));
  *a = {memory, args, call->New<tx_muon_exchange *>()};
  call->Size("args", &args->size);
  call->Needed("memory", &a->memory), call->Needed("args", &a->args), call->Needed("exchange", &a->exchange);
  call->Needed("matrices", &args->matrices), call->Needed("runs", &args->runs);
  call->Must("memory", "odd", [=] { a->memory = memory + 4; });
  call->Never<int64_t>("matrices", &args->n, {-1, std::numeric_limits<int64_t>::max()});
  call->Never<int64_t>("n_params", &args->n_params, {-1, std::numeric_limits<int64_t>::max()});
  call->Never<int64_t>("rank", &args->world, {0, -1, std::numeric_limits<int64_t>::max()});
  call->Never<int64_t>("rank", &args->rank, {-1, 2});
  call->Never<int64_t>("matrices[0]", &matrices[0].param, {-1, 2});
  call->Never<int64_t>("matrices[0]", &matrices[0].begin, {-1});
  call->Never<int64_t>("matrices[0]", &matrices[0].rows, {0, -1, std::numeric_limits<int64_t>::max()});
  call->Never<int32_t>("matrices[0]", &matrices[0].owner, {-1, 2});
  call->Never<int32_t>("matrices[0]", &matrices[0].wire_dtype, {TX_F16, 0, 99});
  call->Never<int32_t>("matrices[0]", &matrices[0].product_dtype, {TX_F16, 0, 99});
  call->Never<int64_t>("runs", &runs[0].begin, {-1, 65});
  call->run = [=](tx_error *error) {
    const tx_status status = tx_muon_exchange_init(a->memory, a->args, a->exchange, error);
    tx_muon_action action = {};
    for (int64_t step = 0; status == TX_OK && tx_muon_exchange_next(*a->exchange, &action); step++)
      EXPECT_LT(step, 100);
    return status;
  };
}

inline void MemoryPlan(Call *call) {
  struct Values {
    tx_memory_args *args;
    tx_memory *memory;
  };
  Plan *p = MakePlan(call);
  auto *args = call->New<tx_memory_args>(1, TX_MEMORY_ARGS_INIT);
  auto *a = call->New<Values>();
  EXPECT_EQ(tx_layout_plan(p->args, p->places, p->buckets, p->n, p->summary, nullptr), TX_OK);
  auto *states = call->New<tx_memory_state>(p->n, {TX_F32, TX_F32, TX_NONE, 0});
  args->layout = p->args, args->places = p->places, args->buckets = p->buckets;
  args->n_buckets = p->summary->n_buckets, args->states = states;
  args->strategy = static_cast<int32_t>(call->random.Below(3));
  *a = {args, call->New<tx_memory>()};
  call->Size("args", &args->size);
  call->Needed("args", &a->args), call->Needed("memory", &a->memory), call->Needed("layout", &args->layout);
  if (p->n) call->Needed("places", &args->places), call->Needed("buckets", &args->buckets);
  if (p->n) call->Needed("states", &args->states);
  call->Never<int64_t>("buckets", &args->n_buckets, {-1, args->n_buckets + 1});
  call->Never<int64_t>("n_units", &args->n_units, {-1, 1});
  call->Never<int64_t>("in_flight", &args->in_flight, {0, -1});
  call->Never<int64_t>("frozen_bytes", &args->frozen_bytes, {-1});
  call->Never<int32_t>("strategy", &args->strategy, {-1, 4});
  call->Other<int64_t>("threads", &args->threads, {0, -1});  // there are no matrices, so `threads` is not used
  call->Never<int64_t>("matrices", &args->n_matrices, {-1, 1});
  call->Never<int32_t>("ema_dtype", &args->ema_dtype, {TX_F16, -1});
  if (p->n) call->Never<int32_t>("states", &states[0].exp_avg_dtype, {TX_NONE, TX_I64, 99});
  if (p->n) call->Never<int32_t>("states", &states[0].master_dtype, {TX_BF16, 99});
  call->run = [=](tx_error *error) { return tx_memory_plan(a->args, a->memory, error); };
}

// -- cycles

struct Cycle {
  void *memory;
  int64_t bytes;
  tx_cycle_args *args;
  tx_cycle **cycle;
};

inline Cycle *MakeCycle(Call *call) {
  auto *args = call->New<tx_cycle_args>(1, TX_CYCLE_ARGS_INIT);
  auto *c = call->New<Cycle>();
  auto *bucket_of = call->New<int64_t>(4), *buffer_of = call->New<int64_t>(2);
  auto **names = call->New<const char *>(4, "name");
  bucket_of[2] = bucket_of[3] = 1;
  args->n_params = 4, args->n_buckets = 2, args->bucket_of = bucket_of;
  args->buffer_of = buffer_of, args->names = names, args->slots = 2, args->world = 2;
  args->kind = static_cast<int32_t>(call->random.Below(3));
  args->rank = static_cast<int32_t>(call->random.Below(2));
  char *memory = call->Scratch(tx_cycle_bytes(args));
  *c = {memory, tx_cycle_bytes(args), args, call->New<tx_cycle *>()};
  call->Size("args", &args->size);
  call->Needed("args", &c->args), call->Needed("memory", &c->memory), call->Needed("cycle", &c->cycle);
  call->Must("memory", "odd", [=] { c->memory = memory + 4; });
  call->Never<int64_t>("bytes", &c->bytes, {0, -1, c->bytes - 1});
  call->Never<int64_t>("param", &args->n_params, {-1, std::numeric_limits<int64_t>::max()});
  call->Never<int64_t>("bucket", &args->n_buckets, {-1, std::numeric_limits<int64_t>::max()});
  call->Needed("bucket_of", &args->bucket_of), call->Needed("buffer_of", &args->buffer_of);
  call->Needed("names", &args->names);
  call->Never<int64_t>("bucket ", &bucket_of[0], {-1, 2});
  call->Never<int64_t>("slots", &args->slots, {0, -1});
  call->Never<int32_t>("kind", &args->kind, {-1, 5});
  call->Never<int32_t>("rank", &args->rank, {-1, 2});
  call->Never<int32_t>("rank", &args->world, {0, -1});
  return c;
}
inline void CycleInit(Call *call) {
  Cycle *c = MakeCycle(call);
  call->run = [=](tx_error *error) { return tx_cycle_init(c->memory, c->bytes, c->args, c->cycle, error); };
}

}  // namespace api

#endif
