/* tx_delta_encode and tx_delta_renew: encode a rank's part of a version. */
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "csrc/core/delta_part.h"
#include "csrc/core/fp_mode.h"
#include "csrc/core/status.h"
#include "csrc/math/delta_value.h"
#include "csrc/ops/delta_segment_code.h"
#include "csrc/ops/delta_tasks.h"
#include "csrc/ops/parallel.h"
#include "csrc/ops/tensor.h"

static int64_t segments_of(int64_t numel) {
  return (numel + TX_DELTA_SEGMENT - 1) / TX_DELTA_SEGMENT;
}

static tx_status check_run_alone(const tx_delta_run *run, tx_error *error) {
  const int64_t n = run->weights.numel;
  const tx_span spans[] = {{"weights", &run->weights, 1, 0},
                           {"changed", &run->changed, 1, 1},
                           {"moved", &run->moved, 1, 1},
                           {"distances", &run->distances, 1, 1},
                           {"checksums", &run->checksums, 1, 1}};
  TX_FORWARD(tx_check_tensors(spans, 5, error));
  if (run->offset < 0 ||
      (run->weights.dtype != TX_BF16 && run->weights.dtype != TX_F16 && run->weights.dtype != TX_F32)) {
    return tx_fail(error, TX_ERROR_DTYPE, "%s weights at offset %" PRId64 "; bf16, fp16, fp32 are legal, from 0 on",
                   tx_dtype_name(run->weights.dtype), run->offset);
  }
  TX_FORWARD(tx_check_fixed("changed", run->changed, TX_U8, (n + 7) / 8, 0, error));
  TX_FORWARD(tx_check_fixed("moved", run->moved, TX_BF16, (n + TX_BLOCK - 1) / TX_BLOCK, 0, error));
  TX_FORWARD(tx_check_fixed("distances", run->distances, TX_U8, (n + 1) / 2, 0, error));
  TX_FORWARD(tx_check_fixed("checksums", run->checksums, TX_I64, (n + TX_CHECKSUM - 1) / TX_CHECKSUM, 0, error));
  if (run->distances.numel && run->weights.dtype == TX_F32) {
    return tx_fail(error, TX_ERROR_DTYPE, "distances for fp32 weights; bf16 and fp16 are legal");
  }
  return tx_check_overlap(spans, 5, error); /* in one run only: runs of frozen weights may share what they keep */
}

static tx_status check_run(const tx_delta_run *run, int64_t i, tx_error *error) {
  return tx_fail_of("runs", i, check_run_alone(run, error), error);
}

static void renew_run(const tx_delta_run *run, const uint64_t *sums) {
  if (run->changed.numel) memset(run->changed.data, 0, (size_t)run->changed.numel);
  if (run->moved.numel) memset(run->moved.data, 0, 2 * (size_t)run->moved.numel);
  if (run->distances.numel) memset(run->distances.data, 0, (size_t)run->distances.numel);
  if (run->checksums.numel) memcpy(run->checksums.data, sums, 8 * (size_t)run->checksums.numel);
}

/* -- the work: one item per segment -------------------------------------------------------------------------------- */

typedef struct segment_item {
  const tx_delta_run *run;
  int64_t begin, numel;
  uint64_t *sums; /* checksums of its blocks; NULL if none are kept */
  uint8_t *bytes;
  uint64_t sum; /* its part of the sum over all weights */
  tx_delta_segment_done done;
  int pending; /* something changed since the last version */
} segment_item;

typedef struct encode_work {
  segment_item *items;
  int64_t n_items;
  uint64_t *sums;
  tx_delta_scratch *scratch; /* one per task */
  int64_t n_tasks;
  tx_delta_way way;
  int whole;
  int sums_only;
  _Atomic int failed;
} encode_work;

/* Whether n weights of the run, from `at` on, whose checksum differs may have been written from outside, without a
 * changed bit: if there is no changed bit among all of them, or among those of one unknown bound. */
static int may_be_written(const tx_delta_run *run, int64_t at, int64_t n) {
  if (!run->changed.numel) return 1;
  const uint8_t *changed = (const uint8_t *)run->changed.data;
  if (tx_delta_is_zero(changed + at / 8, (n + 7) / 8)) return 1;
  if (!run->moved.numel) return 0;
  const char *moved_here = (const char *)run->moved.data + 2 * (at / TX_BLOCK);
  if (!tx_delta_any_unknown(moved_here, (n + TX_BLOCK - 1) / TX_BLOCK)) return 0;
  for (int64_t i = at; i < at + n; i += TX_BLOCK) {
    const int64_t left = at + n - i < TX_BLOCK ? at + n - i : TX_BLOCK;
    uint16_t moved;
    memcpy(&moved, (const char *)run->moved.data + 2 * (i / TX_BLOCK), sizeof moved);
    if (tx_delta_bound_code(moved) > TX_DELTA_BOUND_MOST && tx_delta_is_zero(changed + i / 8, (left + 7) / 8)) return 1;
  }
  return 0;
}

/* The blocks of the segment that were written from outside: their checksum differs, and steps do not explain that. all:
 * whatever the changed bits say. */
static uint32_t compare_sums(const segment_item *item, int all) {
  uint32_t written = 0;
  for (int64_t at = 0; at < item->numel; at += TX_CHECKSUM) {
    const int64_t n = item->numel - at < TX_CHECKSUM ? item->numel - at : TX_CHECKSUM;
    const uint64_t was = (uint64_t)tx_get_i64(item->run->checksums, (item->begin + at) / TX_CHECKSUM);
    const int same = item->sums[at / TX_CHECKSUM] == was;
    if (!same && (all || may_be_written(item->run, item->begin + at, n))) written |= 1u << (at / TX_DELTA_BLOCK);
  }
  return written;
}

static void encode_item(void *ctx, int64_t task, int64_t i) {
  encode_work *w = ctx;
  segment_item *item = &w->items[i];
  uint32_t written = 0;
  if (item->sums) {
    const int64_t size = tx_element_size(item->run->weights.dtype);
    tx_delta_sums((const char *)item->run->weights.data + item->begin * size, item->numel, item->run->weights.dtype,
                  item->sums);
    item->sum = tx_delta_sum_of(item->sums, (item->numel + TX_CHECKSUM - 1) / TX_CHECKSUM, item->begin / TX_CHECKSUM);
  }
  if (w->sums_only) return;
  tx_delta_run run = *item->run;
  if (item->sums) written = compare_sums(item, w->whole);
  if (w->whole) {
    const uint8_t *changed = run.changed.numel ? (const uint8_t *)run.changed.data + item->begin / 8 : NULL;
    item->pending = written != 0 || (changed && !tx_delta_is_zero(changed, (item->numel + 7) / 8));
    run.changed = run.moved = run.distances = tx_none();
  }
  tx_delta_scratch *scratch = &w->scratch[task];
  if (tx_delta_segment_encode(scratch, &run, item->begin, item->numel, written, w->way, &item->done, NULL) != TX_OK) {
    atomic_store(&w->failed, 1);
    return;
  }
  if (item->done.bytes == 0) return;
  item->bytes = malloc((size_t)item->done.bytes);
  if (!item->bytes) {
    atomic_store(&w->failed, 1);
    return;
  }
  memcpy(item->bytes, scratch->out, (size_t)item->done.bytes);
}

static void free_work(encode_work *w) {
  for (int64_t i = 0; w->items && i < w->n_items; i++)
    free(w->items[i].bytes);
  for (int64_t t = 0; w->scratch && t < w->n_tasks; t++)
    tx_delta_scratch_free(&w->scratch[t]);
  free(w->scratch);
  free(w->items);
  free(w->sums);
}

/* Cuts runs into items and allocates all memory that these need; TX_ERROR_OUT_OF_MEMORY. */
static tx_status cut_runs(encode_work *w, int64_t n_runs, const tx_delta_run *runs, int64_t threads, tx_error *error) {
  int64_t blocks = 0, longest = 0;
  for (int64_t r = 0; r < n_runs; r++) {
    const int64_t n = runs[r].weights.numel;
    w->n_items += segments_of(n);
    blocks += runs[r].checksums.numel;
    longest = n > longest ? n : longest;
  }
  longest = longest < TX_DELTA_SEGMENT ? longest : TX_DELTA_SEGMENT;
  w->n_tasks = threads < w->n_items ? threads : w->n_items;
  w->items = calloc((size_t)(w->n_items ? w->n_items : 1), sizeof *w->items);
  w->sums = malloc((size_t)(blocks ? blocks : 1) * sizeof *w->sums);
  w->scratch = calloc((size_t)(w->n_tasks ? w->n_tasks : 1), sizeof *w->scratch);
  int there = w->items && w->sums && w->scratch;
  for (int64_t t = 0; there && !w->sums_only && t < w->n_tasks; t++) {
    there = tx_delta_scratch_make(&w->scratch[t], longest);
    w->scratch[t].ahead = w->n_tasks * TX_DELTA_SEGMENT;
  }
  if (!there) {
    return tx_fail(error, TX_ERROR_OUT_OF_MEMORY, "no memory to encode %" PRId64 " segments", w->n_items);
  }
  int64_t at = 0;
  uint64_t *sums = w->sums;
  for (int64_t r = 0; r < n_runs; r++) {
    for (int64_t begin = 0; begin < runs[r].weights.numel; begin += TX_DELTA_SEGMENT) {
      const int64_t left = runs[r].weights.numel - begin;
      segment_item *item = &w->items[at++];
      *item =
          (segment_item){.run = &runs[r], .begin = begin, .numel = left < TX_DELTA_SEGMENT ? left : TX_DELTA_SEGMENT};
      if (!runs[r].checksums.numel) continue;
      item->sums = sums;
      sums += (item->numel + TX_CHECKSUM - 1) / TX_CHECKSUM;
    }
  }
  return TX_OK;
}

static void renew_runs(const encode_work *w, int64_t n_runs, const tx_delta_run *runs) {
  const uint64_t *sums = w->sums;
  for (int64_t r = 0; r < n_runs; r++) {
    renew_run(&runs[r], sums);
    sums += runs[r].checksums.numel;
  }
}

tx_status tx_delta_renew(int64_t n_runs, const tx_delta_run *runs, const tx_parallel *parallel, tx_error *error) {
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(tx_check_present("runs", runs, n_runs, error));
  for (int64_t r = 0; r < n_runs; r++)
    TX_FORWARD(check_run(&runs[r], r, error));
  encode_work w = {.sums_only = 1};
  const tx_status status = cut_runs(&w, n_runs, runs, tx_threads_of(parallel), error);
  if (status == TX_OK) {
    tx_delta_each(parallel, w.n_items, encode_item, &w);
    renew_runs(&w, n_runs, runs);
  }
  free_work(&w);
  return status;
}

/* -- the part --------------------------------------------------------------------------------------------------- */

static tx_status check_args(const tx_delta_encode_args *a, const tx_delta_chain *chain, tx_error *error) {
  if (!a || a->size != sizeof *a || !chain || chain->size != sizeof *chain) {
    return tx_fail(
        error, TX_ERROR_INVALID_ARGUMENT,
        "args.size or chain.size is not this library's; legal: TX_DELTA_ENCODE_ARGS_INIT, TX_DELTA_CHAIN_INIT");
  }
  if (a->kind < TX_DELTA_CHANGES || a->kind > TX_DELTA_WHOLE) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "kind is %d; legal: 0 (changes), 1 (whole)", a->kind);
  }
  /* A saved chain may be damaged. Receivers would reject the message, and the changes in it would be lost. */
  if (chain->part < 0 || chain->part >= chain->parts || chain->version < 0 || chain->version >= INT64_MAX - 1 ||
      !(chain->id[0] || chain->id[1])) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                   "the chain is at part %d of %d, version %" PRId64
                   "; legal: as tx_delta_chain_begin or the last tx_delta_encode left it",
                   chain->part, chain->parts, chain->version);
  }
  uint64_t model;
  TX_FORWARD(tx_delta_model(a->n_params, a->params, &model, error));
  if (model != chain->model) {
    return tx_fail(error, TX_ERROR_MISMATCH,
                   "the table of %" PRId64
                   " parameters is not the chain's (one was added, removed or changed since); "
                   "legal: the table that the chain began with, or a new chain",
                   a->n_params);
  }
  TX_FORWARD(tx_check_present("runs", a->runs, a->n_runs, error));
  for (int64_t r = 0; r < a->n_runs; r++) {
    const tx_delta_run *run = &a->runs[r], *before = r > 0 ? &a->runs[r - 1] : NULL;
    if (run->param < 0 || run->param >= a->n_params) {
      return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                     "runs[%" PRId64 "] is of parameter %" PRId64 "; 0 to %" PRId64 " is legal", r, run->param,
                     a->n_params - 1);
    }
    TX_FORWARD(check_run(run, r, error));
    const tx_delta_param *p = &a->params[run->param];
    if ((int32_t)run->weights.dtype != p->dtype || run->weights.numel > p->numel - run->offset) {
      return tx_fail(error, TX_ERROR_SHAPE,
                     "\"%s\": a run of %" PRId64 " %s weights from %" PRId64 " on; legal: %s, within its %" PRId64,
                     p->name, run->weights.numel, tx_dtype_name(run->weights.dtype), run->offset,
                     tx_dtype_name((tx_dtype)p->dtype), p->numel);
    }
    if (before && (before->param > run->param ||
                   (before->param == run->param && before->offset + before->weights.numel > run->offset))) {
      return tx_fail(error, TX_ERROR_OVERLAP,
                     "\"%s\": runs[%" PRId64
                     "] overlaps the one before it, or comes too late; legal: ascending, not overlapping",
                     p->name, r);
    }
  }
  return TX_OK;
}

/* Writes a run of the part; to NULL: only counts. Returns the number of bytes. */
static int64_t put_run(uint8_t *to, const tx_delta_run *run, const segment_item *items) {
  int64_t body = 0;
  uint64_t touched = 0, sum = 0;
  const int64_t n = segments_of(run->weights.numel);
  uint8_t small[TX_VARINT_MOST], head[64];
  int any = 0;
  for (int64_t i = 0; i < n; i++) {
    body += tx_put_varint(small, items[i].done.bytes) - small + items[i].done.bytes;
    any |= items[i].done.bytes > 0;
    touched += items[i].done.touched;
    sum += items[i].sum;
  }
  if (!any && !run->checksums.numel) return 0;
  if (!any) body = 0;
  uint8_t *h = tx_put_varint(head, run->param);
  h = tx_put_varint(tx_put_varint(h, run->offset), run->weights.numel);
  *h++ = run->checksums.numel ? TX_DELTA_RUN_FULL : 0;
  h = tx_put_u32(h, (uint32_t)(touched >> 32));
  if (run->checksums.numel) h = tx_put_u32(h, (uint32_t)(sum >> 32));
  h = tx_put_varint(h, body);
  if (!to) return h - head + body;
  memcpy(to, head, (size_t)(h - head));
  to += h - head;
  for (int64_t i = 0; any && i < n; i++) {
    to = tx_put_varint(to, items[i].done.bytes);
    if (items[i].done.bytes) memcpy(to, items[i].bytes, (size_t)items[i].done.bytes);
    to += items[i].done.bytes;
  }
  return h - head + body;
}

static int64_t put_table(uint8_t *to, const tx_delta_encode_args *a) {
  int64_t bytes = 0;
  for (int64_t i = 0; i < a->n_params; i++) {
    uint8_t small[TX_VARINT_MOST];
    const int64_t n = tx_put_varint(small, a->params[i].numel) - small;
    const int64_t name = (int64_t)strlen(a->params[i].name) + 1;
    if (to) {
      memcpy(to + bytes, small, (size_t)n);
      to[bytes + n] = (uint8_t)a->params[i].dtype;
      memcpy(to + bytes + n + 1, a->params[i].name, (size_t)name);
    }
    bytes += n + 1 + name;
  }
  return bytes;
}

static void put_header(uint8_t *to, const tx_delta_encode_args *a, const tx_delta_chain *chain, int64_t bytes,
                       int64_t table, int64_t changed, uint32_t n_runs) {
  tx_put_u64(to, TX_DELTA_MAGIC);
  tx_put_u32(to + TX_DELTA_AT_FORMAT, TX_DELTA_FORMAT);
  tx_put_u32(to + TX_DELTA_AT_KIND, (uint32_t)a->kind);
  tx_put_u64(to + TX_DELTA_AT_BYTES, (uint64_t)bytes);
  tx_put_u64(to + TX_DELTA_AT_ID, chain->id[0]);
  tx_put_u64(to + TX_DELTA_AT_ID + 8, chain->id[1]);
  tx_put_u64(to + TX_DELTA_AT_VERSION, (uint64_t)chain->version + (a->kind == TX_DELTA_CHANGES));
  tx_put_u32(to + TX_DELTA_AT_PART, (uint32_t)chain->part);
  tx_put_u32(to + TX_DELTA_AT_PARTS, (uint32_t)chain->parts);
  tx_put_u64(to + TX_DELTA_AT_MODEL, chain->model);
  tx_put_u64(to + TX_DELTA_AT_LINK, chain->link);
  tx_put_u64(to + TX_DELTA_AT_CHANGED, (uint64_t)changed);
  tx_put_u32(to + TX_DELTA_AT_RUNS, n_runs);
  tx_put_u32(to + TX_DELTA_AT_PARAMS, table ? (uint32_t)a->n_params : 0);
  tx_put_u64(to + TX_DELTA_AT_TABLE, (uint64_t)table);
}

static tx_status put_part(const tx_delta_encode_args *a, const tx_delta_chain *chain, const encode_work *w,
                          tx_delta_message *message, tx_error *error) {
  const int has_table = a->kind == TX_DELTA_WHOLE || chain->version == 0;
  const int64_t table = has_table ? put_table(NULL, a) : 0;
  int64_t bytes = TX_DELTA_HEADER + table + TX_DELTA_CHECKSUM_BYTES, changed = 0;
  uint32_t n_runs = 0;
  const segment_item *item = w->items;
  for (int64_t r = 0; r < a->n_runs; item += segments_of(a->runs[r].weights.numel), r++) {
    const int64_t n = put_run(NULL, &a->runs[r], item);
    bytes += n;
    n_runs += n > 0;
  }
  for (int64_t i = 0; i < w->n_items; i++)
    changed += w->items[i].done.changed;
  uint8_t *data = malloc((size_t)bytes);
  if (!data) return tx_fail(error, TX_ERROR_OUT_OF_MEMORY, "no memory for a part of %" PRId64 " bytes", bytes);
  put_header(data, a, chain, bytes, table, changed, n_runs);
  uint8_t *to = data + TX_DELTA_HEADER;
  if (has_table) to += put_table(to, a);
  item = w->items;
  for (int64_t r = 0; r < a->n_runs; item += segments_of(a->runs[r].weights.numel), r++)
    to += put_run(to, &a->runs[r], item);
  tx_put_u64(to, tx_xxh64(data, bytes - TX_DELTA_CHECKSUM_BYTES));
  *message = (tx_delta_message){data, bytes, NULL};
  return TX_OK;
}

static tx_status refuse_pending(const tx_delta_encode_args *a, const tx_delta_chain *chain, const encode_work *w,
                                tx_error *error) {
  for (int64_t i = 0; i < w->n_items; i++) {
    if (!w->items[i].pending) continue;
    return tx_fail(error, TX_ERROR_BAD_STATE,
                   "\"%s\" has changed since version %" PRId64 "; legal: a full message right after a publish",
                   a->params[w->items[i].run->param].name, chain->version);
  }
  return TX_OK;
}

tx_status tx_delta_encode(const tx_delta_encode_args *args, tx_delta_chain *chain, const tx_parallel *parallel,
                          tx_delta_message *message, tx_error *error) {
  if (!message) return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "message must not be NULL");
  TX_FORWARD(tx_check_parallel(parallel, error));
  TX_FORWARD(check_args(args, chain, error));
  const int whole = args->kind == TX_DELTA_WHOLE;
  encode_work w = {.whole = whole, .way = {args->sliceable != 0, args->steps != 1}};
  tx_status status = cut_runs(&w, args->n_runs, args->runs, tx_threads_of(parallel), error);
  tx_delta_message made = {NULL, 0, NULL};
  if (status == TX_OK) {
    tx_delta_each(parallel, w.n_items, encode_item, &w);
    if (whole) status = refuse_pending(args, chain, &w, error);
    if (status == TX_OK && atomic_load(&w.failed)) {
      status = tx_fail(error, TX_ERROR_OUT_OF_MEMORY, "no memory to encode %" PRId64 " segments", w.n_items);
    }
  }
  if (status == TX_OK) status = put_part(args, chain, &w, &made, error);
  if (status == TX_OK) {
    *message = made;
    if (!whole) {
      const uint8_t *end = (const uint8_t *)made.data + made.bytes;
      const tx_delta_part part = {.link = chain->link, .checksum = tx_get_u64(end - TX_DELTA_CHECKSUM_BYTES)};
      chain->link = tx_delta_link(&part);
      chain->version++;
      renew_runs(&w, args->n_runs, args->runs);
    }
  }
  free_work(&w);
  return status;
}
