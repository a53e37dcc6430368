/* Muon's second pass on the device with extra outputs: changes, EMA, health.
 *
 * The extra outputs are stored in bits of bytes and by block, which several matrices can share, since a matrix may
 * begin anywhere. So an entry is a whole parameter, or a piece of it that begins at a checksum's block, and the rates
 * of its matrices are looked up. */
#include "csrc/math/weight_change.h"
#include "cuda/external_writes_notes.h"
#include "cuda/extras_entry.h"
#include "cuda/extras_vector.h"
#include "cuda/muon_entry.h"
#include "cuda/warp_checksum.h"

namespace {

/* Consecutive matrices with the same rate. begin: the first one's first element, in the entry. */
struct run {
  int64_t begin;
  tx_muon_rate_f32 rate;
};

struct entry : tx_muon_entry {
  const void *checksums; /* of blocks with remainders; NULL: none */
  int32_t first_run, n_runs;
  tx_entry_extras extras;
};

#define TX_RUNS TX_CHECKSUM /* so that a checksum's block of matrices of one element each fits */
struct common {
  tx_muon_rounding rounding;
  float ema_weight; /* 1 - ema_decay */
  int64_t ema_every;
  unsigned long long *resynced; /* NULL: not wanted */
  int32_t resyncs;              /* whether remainders of blocks with a changed checksum are dropped */
  int32_t n_runs;
  run runs[TX_RUNS];
};
typedef tx_table<common, entry> table;
static_assert(table::kCapacity >= 64, "a model of 64 matrices is one launch");

/* -- on the device ------------------------------------------------------------------------------------------------ */

struct rates_of_runs {
  const run *runs;
  int64_t first; /* the element that of(0) stands for */
  int32_t n, at;

  __device__ __forceinline__ rates_of_runs(const table &t, const entry &e, int64_t element)
      : runs(t.common.runs + e.first_run), first(element), n(e.n_runs), at(0) {
    for (int32_t high = n; high - at > 1;) {
      const int32_t middle = at + (high - at) / 2;
      if (runs[middle].begin <= element) {
        at = middle;
      } else {
        high = middle;
      }
    }
  }
  __device__ __forceinline__ tx_muon_rate_f32 of(int i) {
    while (at + 1 < n && runs[at + 1].begin <= first + i)
      at++;
    return runs[at].rate;
  }
};

/* Whether a tile with remainders was written externally. Every lane of the warp has to call it. */
__device__ __forceinline__ bool is_written(const entry &e, const tx_tile &tile) {
  if (e.master_dtype != TX_I16 || !e.checksums) return false;
  const uint64_t stored = tx_stored_checksum((const char *)e.checksums + tile.begin / TX_CHECKSUM * 8);
  const void *const weights = (const char *)e.param + 2 * tile.begin;
  return stored != tx_checksum_of(weights, e.param_alignment, tile.count, tx_lane_id());
}

/* Returns how many weights are in a block whose remainders were dropped. */
__device__ __forceinline__ int64_t step_tile(const table &t, const tx_tile &tile, const tx_ema_turn &turn) {
  const entry &e = t.entries[tile.tensor];
  const bool written = is_written(e, tile), drops = written && t.common.resyncs;
  for (int32_t round = 0; round < tx_rounds(tile.count); round++) {
    const tx_share share = tx_share_of_tile(tile.count, round, tx_lane_id());
    const tx_lane_elements here = {tile.begin + share.first, share.count, 0, false};
    tx_muon_stored was = {}, is = {};
    rates_of_runs rates(t, e, here.first);
    tx_muon_read(was, e, here.first, here.count);
#pragma unroll
    for (int i = 0; i < TX_VECTOR / 2; i++)
      if (drops) was.master[i] = 0u;
    tx_muon_step_vector(is, was, e, t.common.rounding, rates, here.first, here.count);
    const tx_vector_weights before = {&was.weight, &was.master}, now = {&is.weight, &is.master};
    tx_store_extras_vector(e.extras, here, turn, t.common.ema_weight, written, before, now, (tx_dtype)e.param_dtype,
                           (tx_dtype)e.master_dtype);
    tx_muon_write(is, e, here.first, here.count);
  }
  return drops ? tile.count : 0;
}

/* The warp leaves an entry; -1: none. */
__device__ __forceinline__ void leave(const table &t, int32_t tensor) {
  if (tensor >= 0 && t.entries[tensor].extras.health) tx_health_flush(t.entries[tensor].extras.health);
}

__global__ void __launch_bounds__(TX_BLOCK_THREADS) update(const __grid_constant__ table t) {
  const int64_t tiles = tx_table_tiles(t);
  int32_t tensor = -1;
  int64_t resynced = 0;
  tx_ema_turn turn = {};
  tx_health_begin();
  for (int64_t number = tx_first_tile(); number < tiles; number += tx_tile_step()) {
    const tx_tile tile = tx_table_tile(t, number);
    if (tile.tensor != tensor) {
      leave(t, tensor);
      tensor = tile.tensor;
      const entry &e = t.entries[tensor];
      const int64_t step = (int64_t)tx_read_value<float>(e.step) + 1;
      if (e.extras.ema) turn = tx_ema_turn_at(t.common.rounding.seed, e.id, step, t.common.ema_every, e.start);
    }
    resynced += step_tile(t, tile, turn);
  }
  leave(t, tensor);
  if (tx_lane_id() == 0) tx_count(t.common.resynced, resynced);
}

/* -- fp32 masters of weights that were written externally --------------------------------------------------------- */

struct bounds {
  int64_t numel;
  void *moved;                                /* NULL: not wanted */
  const unsigned long long *resynced_masters; /* how many masters became their weights */
};
struct counter {
  unsigned long long *resynced;
};
typedef tx_table<counter, bounds> bounds_table;

/* Marks parameters whose masters were resynced: it is unknown how far their weights moved. */
__global__ void __launch_bounds__(TX_BLOCK_THREADS) mark_moved_unknown(const __grid_constant__ bounds_table t) {
  const int64_t tiles = tx_table_tiles(t);
  for (int64_t number = tx_first_tile(); number < tiles; number += tx_tile_step()) {
    const tx_tile tile = tx_table_tile(t, number);
    const bounds &b = t.entries[tile.tensor];
    const unsigned long long count = *b.resynced_masters;
    if (tile.begin == 0 && tx_lane_id() == 0) tx_count(t.common.resynced, (int64_t)count);
    for (int32_t i = (int32_t)tx_lane_id(); b.moved && count && i < tile.count; i += TX_WARP)
      tx_write_value((char *)b.moved + 2 * (tile.begin + i), TX_MOVED_UNKNOWN);
  }
}

tx_status mark_all(const tx_cuda_scope *scope, const tx_muon_update_args *a, const tx_external_notes &notes,
                   unsigned long long *resynced, tx_error *error) {
  static const char name[] = "marking weights that were written outside the optimizer";
  bounds_table t;
  t.common = counter{resynced};
  const auto launch = [&] { return tx_cuda_launch(scope, mark_moved_unknown, t, name, error); };
  const auto bounds_of = [&](int64_t i) {
    const tx_tensor moved = tx_at_or_none(a->moved, i);
    return bounds{(a->params[i].numel + TX_BLOCK - 1) / TX_BLOCK, moved.numel ? moved.data : NULL, notes.counts + i};
  };
  TX_FORWARD(tx_table_fill(&t, TX_ROUND, a->n, bounds_of, launch));
  return launch();
}

tx_status resync_written(const tx_cuda_scope *scope, const tx_muon_update_args *a, const tx_cuda_call *call,
                         unsigned long long *resynced, tx_error *error) {
  const tx_external_lists lists = {a->n, a->params, a->masters, a->checksums};
  tx_external_notes notes;
  if (!tx_external_has_any(lists, TX_F32)) return TX_OK;
  TX_FORWARD(tx_external_check_workspace(call, a->n, "comparing weights with fp32 masters", error));
  TX_FORWARD(tx_external_notes_begin(scope, call, a->n, &notes, error));
  TX_FORWARD(tx_external_compare_samples(scope, lists, &notes, TX_CHECKSUM_RESYNC, error));
  TX_FORWARD(
      tx_resync_masters(scope, a->n, a->params, a->masters, TX_RESYNC_STALE, notes.suspect, notes.counts, 1, error));
  return mark_all(scope, a, notes, resynced, error);
}

/* -- the call ----------------------------------------------------------------------------------------------------- */

void begin(table *t) {
  t->common.n_runs = 0;
  tx_table_begin(t, TX_CHECKSUM);
}

/* Adds a piece of parameter i from element `begin` on, as long as there is room for its runs. Returns where it ends: at
 * a checksum's block or at the parameter's end. *k: the row of a->parts that `begin` is in; becomes the row of the
 * end. */
int64_t add_piece(table *t, const tx_muon_update_args *a, const tx_step_outputs &outputs, int64_t i, int64_t begin,
                  int64_t *k) {
  common *const c = &t->common;
  const int32_t first_run = c->n_runs;
  int64_t end = begin;
  for (int64_t row = *k; end < a->params[i].numel; row++) {
    const tx_muon_rate_f32 rate = tx_muon_rate_at(a, row);
    const run *const last = c->n_runs > first_run ? &c->runs[c->n_runs - 1] : NULL;
    if (!last || last->rate.lr != rate.lr || last->rate.decay != rate.decay) {
      if (c->n_runs == TX_RUNS) break;
      c->runs[c->n_runs++] = run{end - begin, rate};
    }
    end = tx_muon_part_end(a, row);
  }
  if (end < a->params[i].numel) end -= (end - begin) % TX_CHECKSUM;
  while (*k < a->n_parts && tx_muon_part_end(a, *k) <= end && a->parts[*k].tensor == i)
    ++*k;
  const tx_tensor checksums = tx_at_or_none(a->checksums, i);
  entry e = {};
  static_cast<tx_muon_entry &>(e) = tx_muon_entry_of(a, i, begin, end);
  e.checksums = e.master_dtype == TX_I16 ? tx_advanced(checksums, begin / TX_CHECKSUM) : NULL;
  e.first_run = first_run;
  e.n_runs = c->n_runs - first_run;
  e.extras = tx_extras_of(outputs, i, begin);
  (void)tx_table_add(t, e);
  return end;
}

}  // namespace

tx_status tx_muon_step_with_extras(const tx_cuda_scope *scope, const tx_muon_update_args *a, const tx_cuda_call *call,
                                   tx_error *error) {
  static const char name[] = "Muon's update";
  const tx_step_outputs outputs = TX_STEP_OUTPUTS_OF(a);
  table t;
  t.common.rounding = tx_muon_rounding_of(a);
  t.common.ema_weight = (float)(1.0 - a->ema_decay);
  t.common.ema_every = a->ema_every;
  t.common.resynced = (unsigned long long *)(a->resynced.numel ? a->resynced.data : NULL);
  t.common.resyncs = a->on_external_write == TX_EXTERNAL_RESYNC;
  if (t.common.resyncs) TX_FORWARD(resync_written(scope, a, call, t.common.resynced, error));
  begin(&t);
  for (int64_t k = 0; k < a->n_parts;) {
    const int64_t i = a->parts[k].tensor, numel = a->params[i].numel;
    for (int64_t at = 0; at < numel;) {
      const bool full = t.n == table::kCapacity || t.common.n_runs == TX_RUNS;
      if (!full) at = add_piece(&t, a, outputs, i, at, &k);
      if (at == numel) break;
      TX_FORWARD(tx_cuda_launch(scope, update, t, name, error));
      begin(&t);
    }
    while (k < a->n_parts && a->parts[k].tensor == i)
      k++; /* of a parameter without elements */
  }
  return tx_cuda_launch(scope, update, t, name, error);
}
