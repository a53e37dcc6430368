// The planners: buckets, shards, slices, boxes, units of full sharding, offloaded state.
#include "tests/fuzz/layout_input.h"

namespace {

template <typename T>
T *Room(fuzz::Memory *memory, int64_t n) {
  return static_cast<T *>(memory->Take(n * static_cast<int64_t>(sizeof(T)), TX_U8, 0).data);
}

// Parameters are inside their buckets, aligned, and do not overlap; shards cover the buckets.
void CheckPlan(const tx_layout_args &args, const tx_layout_place *places, const tx_layout_bucket *buckets,
               const tx_layout_summary &summary) {
  CHECK(summary.n_buckets >= 0 && summary.n_buckets <= args.n && summary.n_buffers <= summary.n_buckets);
  int64_t placed = 0;
  for (int64_t b = 0; b < summary.n_buckets; b++) {
    const tx_layout_bucket &bucket = buckets[b];
    CHECK(bucket.used <= bucket.size && bucket.size % (args.world * TX_LAYOUT_ALIGNMENT) == 0);
    if (b > 0 && buckets[b - 1].buffer == bucket.buffer) {
      CHECK(buckets[b - 1].offset + buckets[b - 1].size == bucket.offset);
    }
    int64_t begin = 0, end = 0, before = bucket.offset;
    for (const int64_t rank : {int64_t{0}, args.world / 2, args.world - 1}) {
      CHECK(tx_layout_shard(&bucket, args.world, rank, &begin, &end, nullptr) == TX_OK);
      CHECK(begin >= before && begin <= end);
      before = begin;
    }
    CHECK(end == bucket.offset + bucket.size);
    placed += bucket.n_params;
  }
  for (int64_t i = 0; i < args.n; i++) {
    const tx_layout_param &p = args.params[i];
    const tx_layout_place &at = places[i];
    CHECK(at.bucket < summary.n_buckets && buckets[at.bucket].buffer == at.buffer);
    CHECK(at.start % TX_LAYOUT_ALIGNMENT == 0 && at.start >= buckets[at.bucket].offset);
    CHECK(at.start + p.numel <= buckets[at.bucket].offset + buckets[at.bucket].used);
    placed -= p.tied == -1;
    for (int64_t j = 0; j < i; j++) {
      if (p.tied != -1 || args.params[j].tied != -1 || places[j].buffer != at.buffer) continue;
      int64_t first;
      CHECK(tx_layout_intersect(at.start, p.numel, places[j].start, places[j].start + args.params[j].numel, &first) ==
            0);
    }
  }
  CHECK(placed == 0);
}

void Plan(fuzz::Input *input) {
  const fuzz::Layout layout(input);
  fuzz::Memory memory(input);
  const int64_t room = input->Odd(16) ? input->Below(3) : static_cast<int64_t>(layout.params.size());
  auto *places = Room<tx_layout_place>(&memory, static_cast<int64_t>(layout.params.size()));
  auto *buckets = Room<tx_layout_bucket>(&memory, room);
  auto *summary = Room<tx_layout_summary>(&memory, 1);
  if (fuzz::Answer(&memory, [&](tx_error *error) {
        return tx_layout_plan(&layout.args, places, buckets, room, summary, error);
      }) == TX_OK) {
    CheckPlan(layout.args, places, buckets, *summary);
    tx_layout_summary alone;
    CHECK(tx_layout_plan(&layout.args, nullptr, nullptr, 0, &alone, nullptr) == TX_OK);
    CHECK(alone.fingerprint == summary->fingerprint && alone.n_buckets == summary->n_buckets);
  }
}

void Shard(fuzz::Input *input) {
  const tx_layout_bucket bucket = {input->I64(), input->I64(), input->I64(), input->I64(), input->I64()};
  const int64_t world = input->I64(), rank = input->I64();
  fuzz::Memory memory(input);
  auto *edges = Room<int64_t>(&memory, 2);
  if (fuzz::Answer(&memory, [&](tx_error *error) {
        return tx_layout_shard(&bucket, world, rank, &edges[0], &edges[1], error);
      }) == TX_OK) {
    CHECK(edges[0] <= edges[1]);
  }
}

void Slices(fuzz::Input *input) {
  std::vector<tx_layout_slice> placed(input->Below(6));
  std::vector<tx_layout_range> ranges(input->Below(4));
  for (tx_layout_slice &s : placed)
    s = {input->I64(), input->I64(), input->I64(), input->I64()};
  for (tx_layout_range &r : ranges)
    r = {input->I64(), input->I64()};
  const auto n = static_cast<int64_t>(placed.size()), n_ranges = static_cast<int64_t>(ranges.size());
  const int64_t capacity = input->Odd(4) ? input->Below(20) : n + n_ranges;
  fuzz::Memory memory(input);
  auto *slices = Room<tx_layout_slice>(&memory, capacity);
  auto *n_slices = Room<int64_t>(&memory, 1);
  if (fuzz::Answer(&memory, [&](tx_error *error) {
        return tx_layout_slices(placed.data(), n, ranges.data(), n_ranges, slices, capacity, n_slices, error);
      }) == TX_OK) {
    CHECK(*n_slices >= 0 && *n_slices <= capacity);
    for (int64_t i = 0; i < *n_slices; i++)
      CHECK(slices[i].numel > 0 && slices[i].at >= 0);
  }
}

void Boxes(fuzz::Input *input) {
  const int64_t ndim = input->Below(5);
  std::vector<int64_t> shape, order;
  int64_t numel = 1;
  for (int64_t d = 0; d < ndim; d++) {
    shape.push_back(input->Odd(16) ? input->I64() : input->Below(8));
    order.push_back(input->Odd(8) ? input->I64() : ndim - 1 - d);
    if (__builtin_mul_overflow(numel, shape.back(), &numel)) numel = 0;
  }
  const int64_t start = input->I64(), span = input->Below(600);
  int64_t stop = start;
  if (__builtin_add_overflow(start, span, &stop)) stop = start;
  if (input->Odd(4) && numel <= 4096) stop = numel;
  const int64_t limit = input->Odd(2) ? input->I64() : INT64_MAX, capacity = input->Odd(8) ? 1 : 700;
  const int64_t *chosen = input->Odd(2) ? order.data() : nullptr;
  fuzz::Memory memory(input);
  auto *boxes = Room<int64_t>(&memory, capacity * 2 * ndim);
  auto *n_boxes = Room<int64_t>(&memory, 1);
  if (fuzz::Answer(&memory, [&](tx_error *error) {
        return tx_layout_boxes(shape.data(), chosen, ndim, start, stop, limit, boxes, capacity, n_boxes, error);
      }) != TX_OK) {
    return;
  }
  int64_t covered = 0;
  for (int64_t b = 0; b < *n_boxes; b++) {
    int64_t elements = 1;
    for (int64_t d = 0; d < ndim; d++) {
      const int64_t offset = boxes[b * 2 * ndim + d], size = boxes[b * 2 * ndim + ndim + d];
      CHECK(offset >= 0 && size >= 1 && offset + size <= shape[static_cast<size_t>(d)]);
      elements *= size;
    }
    CHECK(elements <= limit);
    covered += elements;
  }
  CHECK(covered == stop - start);
}

void Units(fuzz::Input *input) {
  std::vector<int64_t> numels(input->Below(9));
  for (int64_t &n : numels) {
    n = input->I64();
    if (n < 0) n = -(n + 1);
  }
  int64_t least = input->I64();
  if (least <= 0) least = TX_NO_INT;
  fuzz::Memory memory(input);
  const auto n = static_cast<int64_t>(numels.size());
  auto *ends = Room<int64_t>(&memory, n);
  const int64_t units = tx_fsdp_units(numels.data(), n, least, ends);
  CHECK(memory.GuardsAreWhole() && units <= n && (units > 0) == (n > 0));
  CHECK(units == 0 || ends[units - 1] == n);
}

void Offload(fuzz::Input *input) {
  std::vector<int64_t> bytes(input->Below(12));
  for (int64_t &b : bytes)
    b = input->I64();
  const double fraction = input->F64();
  const auto n = static_cast<int64_t>(bytes.size());
  fuzz::Memory memory(input);
  auto *heap = Room<int64_t>(&memory, n);
  auto *chosen = Room<int32_t>(&memory, n);
  if (fuzz::Answer(&memory, [&](tx_error *error) {
        return tx_offload_choose(bytes.data(), n, fraction, heap, chosen, error);
      }) != TX_OK) {
    return;
  }
  for (int64_t i = 0; i < n; i++) {
    CHECK(chosen[i] == 0 || chosen[i] == 1);
    if (fraction == 0) CHECK(chosen[i] == 0);
    if (fraction == 1) CHECK(chosen[i] == (bytes[static_cast<size_t>(i)] > 0));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  void (*const kPlanners[])(fuzz::Input *) = {Plan, Shard, Slices, Boxes, Units, Offload};
  input.Of(kPlanners)(&input);
  return 0;
}
