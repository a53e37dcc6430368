// The simulation behind Predict: a case's plan of buckets, the program that each rank runs, and the world.
#include "tests/core/cycle_cost.h"

#include <algorithm>
#include <stdexcept>

#include "tests/core/cycle_cost_rank.h"

extern "C" {
#include "csrc/core/dtype.h"
}

namespace cycle_cost {
namespace {

int64_t RoundUp(int64_t x, int64_t multiple) {
  return (x + multiple - 1) / multiple * multiple;
}

int64_t WireBytes(int64_t numel, int32_t dtype) {
  return numel / TX_BLOCK * tx_wire_block_bytes(static_cast<tx_dtype>(dtype));
}

int64_t DtypeBytes(int32_t dtype) {
  int64_t bytes = 0;
  if (tx_dtype_size(static_cast<tx_dtype>(dtype), &bytes, nullptr) != TX_OK) throw std::invalid_argument("a dtype");
  return bytes;
}

// Bytes of the sums of a bucket, for strategies in which every rank gets all of them.
int64_t GatheredBytes(const Case &given, int64_t numel) {
  const auto wire = static_cast<tx_dtype>(given.model.wire_dtype);
  return WireBytes(numel, tx_gather_dtype(static_cast<tx_dtype>(given.model.gather_dtype), wire));
}

// Memory while a bucket is reduced, by the rules of tx_memory_plan: received parts, the packed bucket, and sums that
// are gathered into memory of their own.
int64_t MemoryOf(const Case &given, const Bucket &bucket) {
  const Model &model = given.model;
  const bool trades = bucket.gathered_bytes > 0 && tx_trades(given.world, bucket.wire_bytes, bucket.gathered_bytes);
  const int64_t received = trades ? bucket.wire_bytes : bucket.wire_bytes / given.world * (given.world - 1);
  const bool packs = given.kind == TX_CYCLE_OPTIM_GRADS || model.wire_dtype != model.grad_dtype;
  const auto sums = tx_gather_dtype(static_cast<tx_dtype>(model.gather_dtype), static_cast<tx_dtype>(model.wire_dtype));
  const bool apart = bucket.gathered_bytes > 0 && sums != model.wire_dtype && sums != model.grad_dtype;
  return received + (packs ? bucket.wire_bytes : 0) + (apart ? bucket.gathered_bytes : 0);
}

void PlanMemory(const Case &given, const tx_layout_args &layout, const std::vector<tx_layout_place> &places,
                const std::vector<tx_layout_bucket> &buckets, Plan *plan) {
  std::vector<tx_memory_state> states(places.size());
  for (tx_memory_state &state : states)
    state = {TX_BF16, TX_BF16, TX_F32, 0};
  tx_memory_args args = TX_MEMORY_ARGS_INIT;
  args.layout = &layout;
  args.places = places.data();
  args.buckets = buckets.data();
  args.n_buckets = static_cast<int64_t>(plan->buckets.size());
  args.states = states.data();
  args.in_flight = given.cluster.in_flight;
  args.strategy = given.kind;  // strategies and kinds have the same numbers
  args.gather_dtype = given.model.gather_dtype;
  tx_memory memory;
  tx_error error;
  if (tx_memory_plan(&args, &memory, &error) != TX_OK) throw std::invalid_argument(error.message);
  plan->planned_bytes = memory.transient;
}

// Uses the planner's buckets.
void PlanBuckets(const Case &given, Plan *plan) {
  const Model &model = given.model;
  std::vector<tx_layout_param> params(model.params.size());
  for (size_t i = 0; i < params.size(); i++) {
    params[i] = {};
    params[i].numel = model.params[i].numel;
    params[i].tied = -1;
    params[i].param_dtype = model.param_dtype;
    params[i].grad_dtype = model.grad_dtype;
    params[i].wire_dtype = model.wire_dtype;
  }
  tx_layout_args args = TX_LAYOUT_ARGS_INIT;
  args.n = static_cast<int64_t>(params.size());
  args.params = params.data();
  args.cap = given.cap;
  args.world = given.world;
  std::vector<tx_layout_place> places(params.size());
  std::vector<tx_layout_bucket> buckets(params.size());
  tx_layout_summary summary;
  tx_error error;
  if (tx_layout_plan(&args, places.data(), buckets.data(), args.n, &summary, &error) != TX_OK) {
    throw std::invalid_argument(error.message);
  }
  for (const tx_layout_place &place : places)
    plan->bucket_of.push_back(place.bucket);
  for (int64_t b = 0; b < summary.n_buckets; b++) {
    const tx_layout_bucket &planned = buckets[static_cast<size_t>(b)];
    Bucket bucket;
    bucket.numel = planned.size;
    bucket.wire_bytes = WireBytes(planned.size, model.wire_dtype);
    if (given.kind == TX_CYCLE_NO_SHARD) {
      bucket.gathered_bytes = GatheredBytes(given, planned.size);
    } else {
      bucket.weight_bytes = planned.size * DtypeBytes(model.param_dtype);
    }
    bucket.memory = MemoryOf(given, bucket);
    plan->buckets.push_back(bucket);
    plan->buffer_of.push_back(planned.buffer);
  }
  PlanMemory(given, args, places, buckets, plan);
}

// Uses the units of FSDP2, which shards each parameter's first dimension into equal, padded parts; or the buckets of
// DistributedDataParallel, in which the hook aligns each parameter to a block.
void TakeBuckets(const Case &given, Plan *plan) {
  const Model &model = given.model;
  const bool units = given.kind == TX_CYCLE_UNITS;
  for (const Param &param : model.params) {
    const int64_t bucket = units ? param.unit : param.bucket;
    plan->bucket_of.push_back(bucket);
    if (static_cast<size_t>(bucket) >= plan->buckets.size()) plan->buckets.resize(static_cast<size_t>(bucket) + 1);
    plan->buckets[static_cast<size_t>(bucket)].numel +=
        units ? param.numel / param.rows * RoundUp(param.rows, given.world) : RoundUp(param.numel, TX_BLOCK);
  }
  for (Bucket &bucket : plan->buckets) {
    const int64_t world = given.world;
    if (units) {
      const bool narrower = DtypeBytes(model.wire_dtype) < DtypeBytes(model.grad_dtype);
      const int64_t part = bucket.numel / world;
      bucket.wire_bytes = !narrower                   ? bucket.numel * DtypeBytes(model.grad_dtype)
                          : model.wire_dtype != TX_U8 ? bucket.numel * DtypeBytes(model.wire_dtype)
                                                      : WireBytes(RoundUp(part, TX_BLOCK) * world, TX_U8);
      bucket.weight_bytes = bucket.numel * DtypeBytes(model.param_dtype);
      continue;
    }
    bucket.numel = RoundUp(std::max<int64_t>(bucket.numel, 1), TX_BLOCK * world);
    bucket.wire_bytes = WireBytes(bucket.numel, model.wire_dtype);
    bucket.gathered_bytes = GatheredBytes(given, bucket.numel);
  }
  plan->buffer_of.assign(plan->buckets.size(), 0);
}

}  // namespace

Plan MakePlan(const Case &given) {
  if (given.model.params.empty() || given.world < 1) throw std::invalid_argument("no parameters, or no ranks");
  Plan plan;
  if (given.kind <= TX_CYCLE_OPTIM_GRADS) {
    PlanBuckets(given, &plan);
  } else {
    TakeBuckets(given, &plan);
  }
  for (size_t i = 0; i < given.model.params.size(); i++)
    plan.names.push_back("p" + std::to_string(i));
  for (size_t b = 0; b < plan.buckets.size(); b++)
    plan.units.push_back("unit " + std::to_string(b));
  for (const std::string &name : plan.names)
    plan.name_pointers.push_back(name.c_str());
  for (const std::string &unit : plan.units)
    plan.unit_pointers.push_back(unit.c_str());
  return plan;
}

namespace {

double SecondsOf(const Model &model, int64_t numel, double all) {
  double total = 0;
  for (const Param &param : model.params)
    total += static_cast<double>(param.numel);
  return all * static_cast<double>(numel) / total;
}

// A step under FSDP2: each unit's weights are all-gathered while the previous unit runs. This happens in forward, and
// again in backward except for the root's, which stay unsharded.
void AddUnits(const Case &given, const Plan &plan, std::vector<Op> *ops) {
  const Model &model = given.model;
  const auto n = static_cast<int64_t>(plan.buckets.size());
  std::vector<double> numel(plan.buckets.size());
  for (const Param &param : model.params)
    numel[static_cast<size_t>(param.unit)] += static_cast<double>(param.numel);
  const bool gathers = given.world > 1;
  const auto run = [&](int64_t unit, double all) {
    ops->push_back({Op::kCompute, SecondsOf(model, static_cast<int64_t>(numel[static_cast<size_t>(unit)]), all), 0});
  };
  int64_t started = 0, needed = 0;
  const auto gather = [&](int64_t unit) {
    if (gathers && unit >= 0 && unit < n) ops->push_back({Op::kGather, 0, unit}), started++;
  };
  const auto wait = [&] {
    if (gathers) ops->push_back({Op::kWaitGather, 0, needed++});
  };
  gather(0);
  for (int64_t u = 0; u < n; u++) {
    wait();
    gather(u + 1);
    run(u, model.forward_seconds);
  }
  ops->push_back({Op::kBegin, 0, 0});
  if (n > 1) gather(n - 1);
  for (int64_t u = n - 1; u >= 0; u--) {
    if (u > 0) wait();
    if (u > 1) gather(u - 1);
    run(u, model.backward_seconds);
    ops->push_back({Op::kGive, 0, u});
    for (size_t i = 0; i < model.params.size(); i++)
      if (model.params[i].unit == u) ops->push_back({Op::kReady, 0, static_cast<int64_t>(i)});
  }
  ops->push_back({Op::kEnd, 0, 0});
}

void AddGradients(const Case &given, const Plan &plan, std::vector<Op> *ops) {
  const Model &model = given.model;
  const bool hook = given.kind == TX_CYCLE_DDP_HOOK;
  std::vector<int64_t> missing(plan.buckets.size());
  for (int64_t bucket : plan.bucket_of)
    missing[static_cast<size_t>(bucket)]++;
  ops->push_back({Op::kCompute, model.forward_seconds, 0});
  ops->push_back({Op::kBegin, 0, 0});
  int64_t given_next = 0;
  for (auto i = static_cast<int64_t>(model.params.size()); i-- > 0;) {
    const auto at = static_cast<size_t>(i);
    ops->push_back({Op::kCompute, SecondsOf(model, model.params[at].numel, model.backward_seconds), 0});
    if (!hook) {
      ops->push_back({Op::kReady, 0, i});
      continue;
    }
    missing[static_cast<size_t>(plan.bucket_of[at])]--;
    for (; given_next < static_cast<int64_t>(missing.size()) && !missing[static_cast<size_t>(given_next)]; given_next++)
      ops->push_back({Op::kGive, 0, given_next});
  }
  if (!hook) ops->push_back({Op::kEnd, 0, 0});
}

}  // namespace

std::vector<Op> MakeProgram(const Case &given, const Plan &plan) {
  std::vector<Op> ops;
  for (int s = 0; s < given.steps; s++) {
    if (given.kind == TX_CYCLE_UNITS) {
      AddUnits(given, plan, &ops);
    } else {
      AddGradients(given, plan, &ops);
    }
    ops.push_back({Op::kStep, 0, 0});
    if (given.model.step_seconds > 0) ops.push_back({Op::kCompute, given.model.step_seconds, 0});
    const bool gathers = (given.kind == TX_CYCLE_OPTIM || given.kind == TX_CYCLE_OPTIM_GRADS) && given.world > 1;
    for (int start = 1; start >= 0 && gathers; start--)
      for (size_t b = 0; b < plan.buckets.size(); b++)
        ops.push_back({start ? Op::kGather : Op::kWaitGather, 0, static_cast<int64_t>(b)});
    ops.push_back({Op::kEndOfStep, 0, 0});
  }
  return ops;
}

World::World(const Case &one)
    : given(one),
      plan(MakePlan(one)),
      program(MakeProgram(one, plan)),
      network(one.cluster, one.world, one.every_node ? 0 : 1, &clock) {
  for (int r = 0; r < network.simulated(); r++)
    ranks.push_back(std::make_unique<Rank>(this, r));
}

Cost World::Run() {
  for (const auto &rank : ranks)
    clock.At(0, [&rank] { rank->Run(); });
  clock.Run();
  const auto last = static_cast<size_t>(given.steps) - 1;
  const auto in_last = [&](const Rank &rank, auto Rank::Sent::*what) {
    return rank.ends[last].*what - (last > 0 ? rank.ends[last - 1].*what : 0);
  };
  Cost cost;
  for (const auto &rank : ranks) {
    if (rank->ends.size() != last + 1) throw std::logic_error("a rank waits for ever");
    cost.seconds = std::max(cost.seconds, in_last(*rank, &Rank::Sent::time));
    cost.in_flight_bytes = std::max(cost.in_flight_bytes, rank->most_in_flight);
  }
  const Rank &first = *ranks[0];
  cost.compute_seconds = given.model.forward_seconds + given.model.backward_seconds + given.model.step_seconds;
  cost.gradient_bytes = in_last(first, &Rank::Sent::gradient_bytes);
  cost.weight_bytes = in_last(first, &Rank::Sent::weight_bytes);
  cost.report_bytes = in_last(first, &Rank::Sent::report_bytes);
  for (int r = 0; r < network.ranks_per_node(); r++)
    cost.node_bytes += in_last(*ranks[static_cast<size_t>(r)], &Rank::Sent::to_other_nodes);
  cost.messages = in_last(first, &Rank::Sent::messages);
  cost.buckets = static_cast<int64_t>(plan.buckets.size());
  for (const Bucket &bucket : plan.buckets)
    cost.largest_message = std::max(cost.largest_message, bucket.wire_bytes / given.world);
  cost.planned_bytes = plan.planned_bytes;
  cost.events = clock.events();
  return cost;
}

Cost Predict(const Case &given) {
  return World(given).Run();
}

}  // namespace cycle_cost
