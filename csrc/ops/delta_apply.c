/* tx_delta_apply: updates weights to the next version, in place.
 *
 * Note [Two passes]. The first pass decodes everything to verify it; the second pass writes. What the first pass
 * decoded is kept for the second one (tx_delta_records) if it is a segment of a single version and small compared with
 * the weights; everything else is decoded again. */
#include <inttypes.h>
#include <stdlib.h>

#include "csrc/core/status.h"
#include "csrc/ops/check.h"
#include "csrc/ops/delta_dense.h"
#include "csrc/ops/delta_parts.h"
#include "csrc/ops/delta_receiver.h"
#include "csrc/ops/delta_records.h"
#include "csrc/ops/delta_segment_code.h"
#include "csrc/ops/delta_tasks.h"
#include "csrc/ops/parallel.h"

/* The state of decoding one change, block by block. */
typedef struct version_state {
  tx_delta_segment segment;
  tx_delta_decoder decoder;
  tx_planes_message dense;
  int64_t dense_at; /* elements of dense blocks so far */
  int64_t left;     /* changed weights that are still to be decoded, at most */
} version_state;

typedef struct apply_room {
  version_state *states;
  uint8_t content[4 * TX_DELTA_BLOCK];
  uint8_t held[TX_DELTA_BLOCK];
  tx_delta_dense_room dense;
  tx_delta_rungs rungs[2];
  tx_delta_block block;
  uint16_t at[TX_DELTA_BLOCK];
  uint32_t weight[TX_DELTA_BLOCK];
} apply_room;

typedef struct apply_work {
  const tx_delta_receiver *receiver;
  tx_delta_plan *plan;
  apply_room *rooms;
  tx_delta_records records;
  int full, writes;
} apply_work;

/* A block of a parameter, where it is in memory, and its content. */
typedef struct block_view {
  const tx_delta_piece *pieces;
  int64_t n_pieces, begin, n, item;
  char *memory;  /* the address of its elements if they are contiguous; else NULL */
  void *content; /* the elements at the version reached so far */
  const uint8_t *held;
  int64_t n_held;
} block_view;

static void put_weight(void *to, uint32_t weight, int64_t item) {
  memcpy(to, &weight, (size_t)item);
}

static uint32_t get_weight(const void *from, int64_t at, int64_t item) {
  uint32_t weight = 0;
  memcpy(&weight, (const char *)from + at * item, (size_t)item);
  return weight;
}

/* Writes a whole block from a copy into memory. */
static void write_block(const block_view *v, const void *content) {
  if (v->memory) {
    if (v->memory != content) memcpy(v->memory, content, (size_t)(v->n * v->item));
    return;
  }
  for (int64_t i = 0; i < v->n; i++) {
    if (!v->held[i]) continue;
    char *to = tx_delta_find_element(v->pieces, v->n_pieces, v->begin + i, v->item);
    put_weight(to, get_weight(content, i, v->item), v->item);
  }
}

/* Finds the block's elements. They are used in place if they are contiguous and `copies` is 0; else they are copied to
 * the room. */
static block_view view_block(const apply_work *w, apply_room *room, const tx_delta_change *c, int64_t at, int copies) {
  const tx_delta_receiver *r = w->receiver;
  const int64_t left = c->numel - at;
  block_view v = {.pieces = r->pieces + r->first_piece[c->param],
                  .n_pieces = r->first_piece[c->param + 1] - r->first_piece[c->param],
                  .begin = c->at + at,
                  .n = left < TX_DELTA_BLOCK ? left : TX_DELTA_BLOCK,
                  .item = tx_delta_item((tx_dtype)r->params[c->param].dtype)};
  v.memory = tx_delta_together(v.pieces, v.n_pieces, v.begin, v.n, v.item);
  v.n_held = v.n;
  if (v.memory && !copies) {
    v.content = v.memory;
    return v;
  }
  v.content = room->content;
  if (v.memory) {
    memcpy(v.content, v.memory, (size_t)(v.n * v.item));
  } else {
    v.held = room->held;
    v.n_held = tx_delta_gather(v.pieces, v.n_pieces, v.begin, v.n, v.item, v.content, room->held);
  }
  return v;
}

/* Decodes the changed weights of a block that is not dense. record: where they are kept; NULL: in the room. */
static tx_status decode_block(const apply_work *w, apply_room *room, version_state *s, const block_view *v, int copied,
                              tx_delta_record *record, int64_t block) {
  if (v->n_held < v->n && !(s->segment.flags & TX_DELTA_SLICEABLE)) return TX_ERROR_MISMATCH;
  const int64_t used = s->segment.changed - s->left, most = s->left < v->n ? s->left : v->n;
  const tx_delta_changes to = {record ? record->at + used : room->at, record ? record->weight + used : room->weight,
                               most};
  const int32_t n = tx_coding_kernels_selected()->delta_decode(&s->decoder, v->content, v->held, v->n, to);
  if (n < 0) return TX_ERROR_INVALID_ARGUMENT;
  s->left -= n;
  if (record) record->n_of[block] = n;
  for (int32_t i = 0; i < n && copied; i++)
    put_weight((char *)v->content + to.at[i] * v->item, to.weight[i], v->item);
  if (w->writes && !copied) tx_delta_record_write(v->pieces, v->n_pieces, v->begin, v->n, v->item, to.at, to.weight, n);
  return TX_OK;
}

/* Applies one version to one block. copied: the block is a copy in the room, which becomes its content at this
 * version. */
static tx_status change_block(const apply_work *w, apply_room *room, version_state *s, const tx_delta_change *c,
                              int64_t at, const block_view *v, int copied, tx_delta_record *record) {
  if (s->segment.dense >> (at / TX_DELTA_BLOCK) & 1u) {
    const void *dense = tx_delta_dense_at(&room->dense, &s->dense, s->dense_at, v->n);
    if (!dense) return TX_ERROR_INVALID_ARGUMENT;
    s->dense_at += v->n;
    if (copied) memcpy(v->content, dense, (size_t)(v->n * v->item));
    if (w->writes && !copied) write_block(v, dense);
    return TX_OK;
  }
  s->decoder.at = c->in_run + at;
  return decode_block(w, room, s, v, copied, record, at / TX_DELTA_BLOCK);
}

static void sum_block(tx_delta_change *c, int64_t at, const block_view *v, tx_dtype dtype) {
  uint64_t sums[TX_DELTA_BLOCK / TX_CHECKSUM];
  tx_delta_sums(v->content, v->n, dtype, sums);
  c->full += tx_delta_sum_of(sums, (v->n + TX_CHECKSUM - 1) / TX_CHECKSUM, (c->in_run + at) / TX_CHECKSUM);
}

/* Reads the segments of a group. */
static tx_status begin_group(const apply_work *w, apply_room *room, const tx_delta_change *changes, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    const tx_delta_change *c = &changes[i];
    const tx_dtype dtype = (tx_dtype)w->receiver->params[c->param].dtype;
    version_state *s = &room->states[i];
    memset(s, 0, sizeof *s);
    if (c->n_bytes == 0) continue;
    if (!tx_delta_segment_read(c->bytes, c->n_bytes, c->numel, dtype, &s->segment)) return TX_ERROR_INVALID_ARGUMENT;
    s->decoder = tx_delta_decoder_of(&s->segment, c->numel, dtype, room->rungs, &room->block);
    s->left = s->segment.changed;
    const int64_t dense = tx_delta_dense_numel(s->segment.dense, c->numel);
    const int whole = w->plan->runs[c->run].part->kind == TX_DELTA_WHOLE;
    if (whole && dense != c->numel) return TX_ERROR_INVALID_ARGUMENT;
    if (dense == 0) continue;
    if (!tx_delta_dense_open(&s->segment, dense, dtype, &s->dense)) return TX_ERROR_INVALID_ARGUMENT;
  }
  return TX_OK;
}

/* Whether the receiver holds any of the change's elements; if not, they need not be decoded. */
static int is_held(const tx_delta_receiver *r, const tx_delta_change *c) {
  if (!r->lacks) return 1;
  for (int64_t p = r->first_piece[c->param]; p < r->first_piece[c->param + 1]; p++) {
    const tx_delta_piece *piece = &r->pieces[p];
    const int64_t step = piece->rows > 1 ? piece->step : piece->columns;
    const int64_t end = c->at + c->numel;
    if (!piece->data || piece->first >= end) continue;
    int64_t row = c->at > piece->first ? (c->at - piece->first) / step : 0;
    for (; row < piece->rows && piece->first + row * step < end; row++) {
      if (piece->first + row * step + piece->columns > c->at) return 1;
    }
  }
  return 0;
}

/* Applies the changes of a group to one block after the other. record: NULL, or the record of the group's single
 * change. */
static void change_blocks(const apply_work *w, apply_room *room, tx_delta_change *changes, int64_t n,
                          tx_delta_record *record) {
  const tx_dtype dtype = (tx_dtype)w->receiver->params[changes->param].dtype;
  const int copies = n > 1 || w->full;
  for (int64_t at = 0; at < changes->numel && changes->status == TX_OK; at += TX_DELTA_BLOCK) {
    const block_view v = view_block(w, room, changes, at, copies);
    const int copied = copies || (!v.memory && !record);
    for (int64_t i = 0; i < n && changes->status == TX_OK; i++) {
      changes[i].partly |= v.n_held < v.n;
      if (changes[i].n_bytes) {
        changes->status = change_block(w, room, &room->states[i], &changes[i], at, &v, copied, record);
      }
      if (w->full) sum_block(&changes[i], at, &v, dtype);
    }
    if (w->writes && changes->status == TX_OK && copied) write_block(&v, v.content);
  }
}

static void write_record(const tx_delta_receiver *r, const tx_delta_change *c, const tx_delta_record *record) {
  const int64_t first = r->first_piece[c->param], n_pieces = r->first_piece[c->param + 1] - first;
  int64_t done = 0;
  for (int64_t at = 0; at < c->numel; at += TX_DELTA_BLOCK) {
    const int64_t n = c->numel - at < TX_DELTA_BLOCK ? c->numel - at : TX_DELTA_BLOCK;
    const int32_t n_at = record->n_of[at / TX_DELTA_BLOCK];
    tx_delta_record_write(r->pieces + first, n_pieces, c->at + at, n,
                          tx_delta_item((tx_dtype)r->params[c->param].dtype), record->at + done, record->weight + done,
                          n_at);
    done += n_at;
  }
}

static void apply_group(void *ctx, int64_t task, int64_t g) {
  apply_work *w = ctx;
  apply_room *room = &w->rooms[task];
  tx_delta_change *changes = w->plan->changes + w->plan->groups[g];
  const int64_t n = w->plan->groups[g + 1] - w->plan->groups[g];
  tx_delta_record *record = w->records.of_group[g].at ? &w->records.of_group[g] : NULL;
  if (w->writes && record) {
    write_record(w->receiver, changes, record);
    return;
  }
  for (int64_t i = 0; i < n; i++)
    changes[i].touched = changes[i].full = 0;
  if (!is_held(w->receiver, changes)) {
    for (int64_t i = 0; i < n; i++)
      changes[i].partly = 1;
    return;
  }
  changes->status = begin_group(w, room, changes, n);
  change_blocks(w, room, changes, n, record);
  for (int64_t i = 0; i < n; i++)
    changes[i].touched = room->states[i].decoder.touched;
}

/* Checks what the first pass found. */
static tx_status judge(const tx_delta_receiver *r, tx_delta_plan *plan, int full, tx_error *error) {
  for (int64_t i = 0; i < plan->n_changes; i++) {
    const tx_delta_change *c = &plan->changes[i];
    tx_delta_expected *run = &plan->runs[c->run];
    const char *name = r->params[c->param].name;
    if (c->status == TX_ERROR_MISMATCH) {
      return tx_fail(error, TX_ERROR_MISMATCH,
                     "\"%s\": elements from %" PRId64
                     " on are coded against weights that this receiver does not hold "
                     "(part %d of version %" PRId64 "); legal: a publisher that makes sliceable deltas",
                     name, c->at, run->part->part, run->part->version);
    }
    if (c->status != TX_OK) {
      return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                     "\"%s\": elements from %" PRId64 " on are no segment of a delta (part %d of version %" PRId64 ")",
                     name, c->at, run->part->part, run->part->version);
    }
    run->touched += c->touched;
    run->full += c->full;
    run->partly |= c->partly;
  }
  for (int64_t i = 0; i < plan->n_runs; i++) {
    const tx_delta_expected *e = &plan->runs[i];
    if (e->partly) continue;
    const int touched = (uint32_t)(e->touched >> 32) == e->run.touched;
    const int all = !full || !(e->run.flags & TX_DELTA_RUN_FULL) || (uint32_t)(e->full >> 32) == e->run.full;
    if (touched && all) continue;
    return tx_fail(error, TX_ERROR_MISMATCH,
                   "\"%s\": elements [%" PRId64 ", %" PRId64 ") are not those of version %" PRId64
                   " (they were written after it was applied; part %d of version %" PRId64
                   "); legal: begin with a full message",
                   r->params[e->run.param].name, e->run.offset, e->run.offset + e->run.numel, e->part->version - 1,
                   e->part->part, e->part->version);
  }
  return TX_OK;
}

/* Checks that a full message covers all elements of the model. full: checks also that the last version's sums over all
 * weights do, and that the receiver holds all elements. */
static tx_status check_extent(const tx_delta_receiver *r, const tx_delta_plan *plan, const tx_delta_part *first,
                              int full, tx_error *error) {
  int64_t all = 0, with_sum = 0, of_first = 0;
  const int64_t last = plan->n_runs ? plan->runs[plan->n_runs - 1].part->version : 0;
  for (int64_t p = 0; p < r->n_params; p++)
    all += r->params[p].numel;
  for (int64_t i = 0; i < plan->n_runs; i++) {
    const tx_delta_expected *e = &plan->runs[i];
    if (e->part->version == first->version) of_first += e->run.numel;
    if (e->part->version == last && e->run.flags & TX_DELTA_RUN_FULL) with_sum += e->run.numel;
  }
  if (first->kind == TX_DELTA_WHOLE && of_first != all) {
    return tx_fail(error, TX_ERROR_MISMATCH,
                   "the full message has %" PRId64 " of the model's %" PRId64 " elements; legal: all", of_first, all);
  }
  if (full && (with_sum != all || r->lacks)) {
    return tx_fail(
        error, TX_ERROR_BAD_STATE,
        "all weights cannot be verified: %s; legal: TX_DELTA_TOUCHED, or a publisher that keeps checksums and a "
        "receiver that holds everything",
        r->lacks ? "the receiver does not hold all of them" : "the delta has no checksums of all");
  }
  return TX_OK;
}

static tx_status run_plan(tx_delta_receiver *r, tx_delta_plan *plan, int full, const tx_parallel *parallel,
                          tx_error *error) {
  const int64_t threads = tx_threads_of(parallel), tasks = threads < plan->n_groups ? threads : plan->n_groups;
  apply_work w = {.receiver = r, .plan = plan, .full = full};
  const int64_t each = plan->longest > 0 ? plan->longest : 1;
  w.rooms = malloc((size_t)(tasks + 1) * sizeof *w.rooms);
  version_state *states = malloc((size_t)((tasks + 1) * each) * sizeof *states);
  tx_status status = TX_OK;
  if (!w.rooms || !states || !tx_delta_records_make(&w.records, r, plan))
    status = tx_fail(error, TX_ERROR_OUT_OF_MEMORY, "no memory to apply with %" PRId64 " threads", tasks);
  for (int64_t t = 0; status == TX_OK && t < tasks; t++) {
    apply_room *room = &w.rooms[t];
    room->states = states + t * each;
    room->dense.block = NULL;
    room->rungs[0].first = room->rungs[1].first = 0;
  }
  if (status == TX_OK) {
    tx_delta_each(parallel, plan->n_groups, apply_group, &w);
    status = judge(r, plan, full, error);
  }
  if (status == TX_OK) {
    w.writes = 1;
    w.full = 0;
    tx_delta_each(parallel, plan->n_groups, apply_group, &w);
  }
  tx_delta_records_free(&w.records);
  free(states);
  free(w.rooms);
  return status;
}

tx_status tx_delta_apply(tx_delta_receiver *receiver, int64_t n, const tx_tensor *messages, int32_t verify,
                         const tx_parallel *parallel, tx_error *error) {
  if (!receiver || (verify != TX_DELTA_TOUCHED && verify != TX_DELTA_FULL)) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "verify is %d; legal: 0 (touched), 1 (full), and a receiver",
                   verify);
  }
  TX_FORWARD(tx_check_parallel(parallel, error));
  tx_delta_part *parts;
  int64_t n_parts;
  TX_FORWARD(tx_delta_parts_read(messages, n, &parts, &n_parts, error));
  tx_delta_parts_sort(parts, n_parts);
  tx_delta_plan plan = {0};
  uint64_t *links = NULL;
  tx_status status = tx_delta_follows(receiver, parts, n_parts, error);
  if (status == TX_OK) {
    status = tx_delta_plan_make(&plan, receiver, parts, n_parts, verify == TX_DELTA_FULL, error);
  }
  if (status == TX_OK) status = check_extent(receiver, &plan, &parts[0], verify == TX_DELTA_FULL, error);
  if (status == TX_OK) {
    links = malloc((size_t)parts[0].parts * sizeof *links);
    if (!links) status = tx_fail(error, TX_ERROR_OUT_OF_MEMORY, "no memory for %d parts", parts[0].parts);
  }
  if (status == TX_OK) status = run_plan(receiver, &plan, verify == TX_DELTA_FULL, parallel, error);
  if (status == TX_OK) {
    const tx_delta_part *last = &parts[n_parts - parts[0].parts];
    for (int32_t p = 0; p < parts[0].parts; p++)
      links[p] = tx_delta_link(&last[p]);
    free(receiver->links);
    receiver->links = links;
    receiver->parts = last->parts;
    receiver->version = last->version;
    memcpy(receiver->id, last->id, sizeof receiver->id);
  } else {
    free(links);
  }
  tx_delta_plan_free(&plan);
  free(parts);
  return status;
}
