// The memory of a rank, for layouts that were planned and for invalid ones; and what the exchange decides from numbers
// that other ranks measured.
#include <cmath>

#include "tests/fuzz/layout_input.h"

namespace {

// A plan, in which some numbers may be wrong.
struct Plan {
  fuzz::Layout layout;
  std::vector<tx_layout_place> places;
  std::vector<tx_layout_bucket> buckets;
  tx_layout_summary summary = {};
  bool is_planned;

  explicit Plan(fuzz::Input *input) : layout(input, 250), places(layout.params.size()), buckets(layout.params.size()) {
    is_planned = tx_layout_plan(&layout.args, places.data(), buckets.data(), static_cast<int64_t>(buckets.size()),
                                &summary, nullptr) == TX_OK;
  }
  void MakeOdd(fuzz::Input *input) {
    if (buckets.empty()) return;
    tx_layout_bucket &b = buckets[input->Below(static_cast<uint32_t>(buckets.size()))];
    int64_t *const kNumbers[] = {&b.buffer,         &b.offset,         &b.size,          &b.used,           &b.n_params,
                                 &places[0].buffer, &places[0].bucket, &places[0].start, &summary.n_buckets};
    *input->Of(kNumbers) = input->I64();
    if (summary.n_buckets > static_cast<int64_t>(buckets.size())) summary.n_buckets = -1;
  }
};

// Muon's matrices: whole parameters or halves of them, in which some numbers may be wrong; and their workspace.
struct Matrices {
  std::vector<tx_muon_matrix> all;
  std::vector<int64_t> room;

  Matrices(fuzz::Input *input, tx_memory_args *args) {
    static const int32_t kDtypes[] = {TX_BF16, TX_F32};
    for (int64_t p = 0; p < args->layout->n; p++) {
      const tx_layout_param &param = args->layout->params[p];
      if (!input->Odd(2) || !param.shape || param.tied != -1) continue;
      const int64_t n = input->Odd(3) && param.numel % 2 == 0 ? 2 : 1, rows = param.numel / n;
      const int32_t wire_dtype = input->Of(kDtypes), product_dtype = input->Of(kDtypes);
      for (int64_t i = 0; i < n; i++) {
        const auto owner = static_cast<int32_t>(
            input->Below(static_cast<uint32_t>(args->layout->world < 99 ? args->layout->world : 99)));
        all.push_back({p, i * rows, rows, 1, owner, wire_dtype, product_dtype, 0});
      }
    }
    if (all.empty() || args->layout->world > 64) return; /* every rank's step is computed */
    if (input->Odd(16)) {
      tx_muon_matrix &m = all[input->Below(static_cast<uint32_t>(all.size()))];
      int64_t *const kNumbers[] = {&m.param, &m.begin, &m.rows, &m.columns};
      int32_t *const kCodes[] = {&m.owner, &m.wire_dtype, &m.product_dtype};
      if (input->Odd(2)) *input->Of(kNumbers) = input->I64();
      if (input->Odd(2)) *input->Of(kCodes) = input->I32();
    }
    args->threads = input->Odd(16) ? input->I64() : 1 + input->Below(5);
    args->n_matrices = input->Odd(32) ? input->I64() : static_cast<int64_t>(all.size());
    args->matrices = all.data();
    const int64_t bytes = tx_memory_workspace_bytes(args);
    CHECK(bytes >= 0 && bytes % 8 == 0);
    if (args->n_matrices > static_cast<int64_t>(all.size()) || bytes > 1 << 20) args->n_matrices = 0;
    room.resize(args->n_matrices > 0 ? static_cast<size_t>(bytes / 8) : 0);
    args->workspace = room.data();
  }
};

void Bytes(fuzz::Input *input) {
  static const int32_t kMoments[] = {TX_BF16, TX_F32, TX_U8, TX_F16}, kMasters[] = {TX_NONE, TX_F32, TX_I16};
  Plan plan(input);
  if (!plan.is_planned) return;
  if (input->Odd(8)) plan.MakeOdd(input);
  const int32_t master = input->Of(kMasters);
  std::vector<tx_memory_state> states;
  for (size_t i = 0; i < plan.places.size(); i++) {
    states.push_back({input->Of(kMoments), input->Of(kMoments), input->Odd(32) ? input->I32() : master, 0});
  }
  std::vector<tx_memory_unit> units(input->Below(4));
  for (tx_memory_unit &unit : units) {
    const int64_t numel = input->I64();
    unit = {numel, input->Odd(4) ? input->I64() : numel, input->Of(kMoments), TX_F32, input->Of(kMoments), 0};
  }
  tx_memory_args args = TX_MEMORY_ARGS_INIT;
  args.layout = &plan.layout.args;
  args.places = plan.places.data();
  args.buckets = plan.buckets.data();
  args.n_buckets = plan.summary.n_buckets;
  args.states = states.data();
  args.n_units = static_cast<int64_t>(units.size());
  args.units = units.data();
  args.frozen_bytes = input->I64();
  args.in_flight = input->Odd(4) ? input->I64() : 1 + input->Below(4);
  args.strategy = input->Odd(32) ? input->I32() : static_cast<int32_t>(input->Below(4));
  args.gather_dtype = input->Odd(32) ? input->I32() : input->Odd(2) ? TX_BF16 : TX_NONE;
  args.slots = static_cast<int32_t>(input->Below(2));
  args.compressed = static_cast<int32_t>(input->Below(2));
  args.ema_dtype = input->Odd(8) ? input->I32() : input->Odd(2) ? TX_BF16 : TX_NONE;
  args.ema_lows = static_cast<int32_t>(input->Below(2));
  args.publishes = static_cast<int32_t>(input->Below(2));
  args.distances = static_cast<int32_t>(input->Below(2));
  std::vector<int64_t> messages;
  for (int64_t b = 1; b <= plan.summary.n_buckets; b++)
    if (b == plan.summary.n_buckets || input->Odd(2)) messages.push_back(input->Odd(64) ? input->I64() : b);
  if (input->Odd(3)) args.ends = messages.data();
  args.n_messages = input->Odd(64) ? -1 : static_cast<int64_t>(messages.size());
  const Matrices matrices(input, &args);
  fuzz::Memory memory(input);
  const tx_tensor room = memory.Take(static_cast<int64_t>(sizeof(tx_memory)), TX_U8);
  if (fuzz::Answer(&memory, [&](tx_error *error) {
        return tx_memory_plan(&args, static_cast<tx_memory *>(room.data), error);
      }) != TX_OK) {
    return;
  }
  tx_memory found;
  std::memcpy(&found, room.data, sizeof found);
  CHECK(found.params >= 0 && found.grads >= 0 && found.masters >= 0 && found.moments >= 0 && found.scales >= 0);
  CHECK(found.transient >= 0 && found.moving >= 0 && found.steps >= 0);
  CHECK(found.emas >= 0 && found.changes >= 0 && found.products >= 0 && found.stepping >= 0);
  CHECK(found.total == found.params + found.grads + found.masters + found.moments + found.scales + found.steps +
                           found.emas + found.changes + found.products);
  CHECK(found.peak >= found.total);
}

// The messages over a link, and its measured speed.
void Messages(fuzz::Input *input) {
  const size_t n = input->Below(7);
  std::vector<int64_t> bytes(n), buffer(n);
  for (size_t b = 0; b < n; b++) {
    bytes[b] = input->Odd(16) ? input->I64() : int64_t{1000} * input->Below(9000);
    buffer[b] = b == 0 ? 0 : buffer[b - 1] + input->Odd(4);
  }
  tx_coalesce_args args = TX_COALESCE_ARGS_INIT;
  args.n_buckets = static_cast<int64_t>(n);
  args.bytes = bytes.data();
  args.buffer = buffer.data();
  args.world = input->Odd(16) ? input->I64() : 1 + input->Below(3);
  args.link_gbps = input->Odd(4) ? input->F64() : 0.1 * input->Byte();
  args.compressed = static_cast<int32_t>(input->Below(2));
  args.sharded = static_cast<int32_t>(input->Below(2));
  fuzz::Memory memory(input);
  const tx_tensor ends = memory.Take(args.n_buckets, TX_I64), n_messages = memory.I64s(1);
  if (fuzz::Answer(&memory, [&](tx_error *error) {
        return tx_coalesce(&args, static_cast<int64_t *>(ends.data), static_cast<int64_t *>(n_messages.data), error);
      }) == TX_OK) {
    int64_t messages, before = 0;
    std::memcpy(&messages, n_messages.data, sizeof messages);
    CHECK(messages <= args.n_buckets);
    for (int64_t m = 0; m < messages; m++) {
      int64_t end;
      std::memcpy(&end, static_cast<char *>(ends.data) + 8 * m, sizeof end);
      CHECK(end > before && end <= args.n_buckets);
      for (int64_t b = before + 1; b < end; b++)
        CHECK(buffer[static_cast<size_t>(b)] == buffer[static_cast<size_t>(b - 1)]);
      before = end;
    }
    CHECK(before == args.n_buckets);
  }
  CHECK((tx_compresses(input->I32(), args.link_gbps) & ~1) == 0);
  const int64_t part = tx_link_part_bytes(args.world);
  CHECK(part >= 0 && part % TX_BLOCK == 0);
  std::vector<int64_t> took(3 * TX_LINK_ROUNDS), waited(took);
  for (std::vector<int64_t> *times : {&took, &waited}) {
    for (int64_t &t : *times)
      t = input->Odd(16) ? input->I64() : int64_t{200} * input->Byte();
  }
  const int64_t ranks = 1 + input->Below(3);
  const double gbps = tx_link_gbps(took.data(), waited.data(), ranks);
  CHECK(gbps >= tx_link_gbps(took.data(), nullptr, ranks));
  const int64_t bucket = input->I64(), cuts = tx_coalesce_cuts(bucket, args.world, args.link_gbps, args.compressed);
  CHECK(cuts >= 1 && (cuts == 1 || bucket / (cuts - 1) >= 256 << 10));
}

// The costs of Muon's matrices, and their owners.
void Owners(fuzz::Input *input) {
  const int64_t rows = input->I64(), columns = input->I64(), steps = input->I64(), restart = input->I64();
  const auto dtype = static_cast<int32_t>(input->Below(4)), tiles = static_cast<int32_t>(input->Below(2));
  const int64_t panel = tx_muon_panel(rows, dtype, input->I64(), tiles);
  CHECK(rows < 1 ? panel == 0 : panel == rows || (panel < rows && panel % 64 == 0));
  for (const int64_t of : {int64_t{0}, panel, input->I64()}) {
    const double least = tx_muon_operations(rows, columns, steps, TX_MUON_AUTO, restart, of);
    CHECK(least >= 0);
    for (const int32_t ns : {TX_MUON_STANDARD, TX_MUON_GRAM})
      CHECK(least <= tx_muon_operations(rows, columns, steps, ns, restart, of));
  }
  CHECK(tx_muon_lr_ratio(1 + input->Below(9), 1 + input->Below(9), static_cast<int32_t>(input->Below(2))) > 0);
  double numbers[7];
  for (double &number : numbers)
    number = input->F64();
  const tx_muon_group group = {numbers[0], numbers[1], numbers[2], numbers[3],
                               numbers[4], numbers[5], numbers[6], input->I64()};
  tx_error error;
  CHECK(tx_muon_check_group(&group, "groups[0]", &error) == TX_OK || fuzz::IsSentence(error));

  const int64_t n = input->Odd(16) ? input->I64() : input->Below(40);
  const int64_t ranks = input->Odd(16) ? input->I64() : 1 + input->Below(9);
  const int64_t bytes = tx_plan_owners_bytes(n, ranks);
  CHECK(bytes >= 0);
  if (n < 0 || n > 5000 || bytes > 1 << 20) return;
  std::vector<double> sizes;
  for (int64_t i = 0; i < n; i++)
    sizes.push_back(input->Odd(4) ? input->F64() : input->Byte());
  fuzz::Memory memory(input);
  const tx_tensor owners = memory.Take(n, TX_I32), fingerprint = memory.I64s(1);
  std::vector<int64_t> room(static_cast<size_t>(bytes / 8 + 1));
  if (fuzz::Answer(&memory, [&](tx_error *why) {
        return tx_plan_owners(n, sizes.data(), ranks, room.data(), static_cast<int32_t *>(owners.data),
                              static_cast<int64_t *>(fingerprint.data), why);
      }) != TX_OK) {
    return;
  }
  for (int64_t i = 0; i < n; i++) {
    int32_t owner;
    std::memcpy(&owner, static_cast<char *>(owners.data) + 4 * i, sizeof owner);
    CHECK(owner >= 0 && owner < ranks && std::isfinite(sizes[static_cast<size_t>(i)]));
  }
}

void Rules(fuzz::Input *input) {
  const int64_t bytes = input->I64();
  CHECK(tx_coalesce_most(bytes, static_cast<int32_t>(input->Below(2)), static_cast<int32_t>(input->Below(2))) <=
        TX_COALESCE_BYTES);
  const int32_t answers[] = {tx_coalesce_whole(bytes), tx_trades(input->I64(), input->I64(), input->I64())};
  for (const int32_t answer : answers)
    CHECK(answer == 0 || answer == 1);
  const auto gather = static_cast<tx_dtype>(input->I32()), wire = static_cast<tx_dtype>(input->I32());
  CHECK(gather == TX_NONE || tx_gather_dtype(gather, wire) == gather);
  const int64_t compressed = tx_compressed_bytes(input->I64());
  CHECK(compressed >= 0);
  Owners(input);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  void (*const kDecisions[])(fuzz::Input *) = {Bytes, Messages, Rules};
  input.Of(kDecisions)(&input);
  return 0;
}
