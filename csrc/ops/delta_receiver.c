/* Receivers of deltas: their table, their pieces, their version, and the plan of an apply. */
#include "csrc/ops/delta_receiver.h"

#include <inttypes.h>
#include <stdlib.h>

#include "csrc/core/status.h"
#include "csrc/ops/delta_cover.h"

void tx_delta_close(tx_delta_receiver *receiver) {
  if (!receiver) return;
  free(receiver->params);
  free(receiver->names);
  free(receiver->pieces);
  free(receiver->first_piece);
  free(receiver->links);
  free(receiver);
}

/* Copies the table and the pieces; returns 0 if out of memory. */
static int copy(tx_delta_receiver *r, const tx_delta_param *params, const tx_delta_piece *pieces) {
  size_t bytes = 1;
  for (int64_t i = 0; i < r->n_params; i++)
    bytes += strlen(params[i].name) + 1;
  r->params = malloc((size_t)(r->n_params + 1) * sizeof *r->params);
  r->names = malloc(bytes);
  r->pieces = malloc((size_t)(r->n_pieces + 1) * sizeof *r->pieces);
  r->first_piece = calloc((size_t)(r->n_params + 2), sizeof *r->first_piece);
  if (!r->params || !r->names || !r->pieces || !r->first_piece) return 0;
  char *name = r->names;
  for (int64_t i = 0; i < r->n_params; i++) {
    const size_t n = strlen(params[i].name) + 1;
    r->params[i] = params[i];
    r->params[i].name = memcpy(name, params[i].name, n);
    name += n;
  }
  if (r->n_pieces) memcpy(r->pieces, pieces, (size_t)r->n_pieces * sizeof *pieces);
  return 1;
}

tx_status tx_delta_open(int64_t n_params, const tx_delta_param *params, int64_t n_pieces, const tx_delta_piece *pieces,
                        tx_delta_receiver **receiver, tx_error *error) {
  if (!receiver) return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "receiver must not be NULL");
  if (n_pieces < 0 || (n_pieces > 0 && !pieces)) {
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "there are %" PRId64 " pieces; legal: >= 0, and no array NULL",
                   n_pieces);
  }
  uint64_t model;
  TX_FORWARD(tx_delta_model(n_params, params, &model, error));
  tx_delta_receiver *r = calloc(1, sizeof *r);
  if (r) {
    r->n_params = n_params;
    r->n_pieces = n_pieces;
    r->model = model;
  }
  if (!r || !copy(r, params, pieces)) {
    tx_delta_close(r);
    return tx_fail(error, TX_ERROR_OUT_OF_MEMORY, "no memory for a receiver of %" PRId64 " parameters", n_params);
  }
  const tx_status status = tx_delta_pieces_check(n_params, r->params, n_pieces, r->pieces, error);
  if (status != TX_OK) {
    tx_delta_close(r);
    return status;
  }
  for (int64_t i = 0; i < n_pieces; i++) {
    r->first_piece[r->pieces[i].param + 1] = i + 1;
    r->lacks |= !r->pieces[i].data;
  }
  for (int64_t p = 0; p < n_params; p++) {
    if (!r->first_piece[p + 1]) r->first_piece[p + 1] = r->first_piece[p];
  }
  *receiver = r;
  return TX_OK;
}

int64_t tx_delta_version(const tx_delta_receiver *receiver) {
  return receiver->version;
}

void tx_delta_chain_id(const tx_delta_receiver *receiver, uint64_t *id) {
  id[0] = receiver->id[0];
  id[1] = receiver->id[1];
}

/* -- versions --------------------------------------------------------------------------------------------------- */

/* Checks that all parts of the version at the start of the list are there. *n_of: their number. */
static tx_status check_complete(const tx_delta_part *parts, int64_t n, int64_t *n_of, tx_error *error) {
  int64_t found = 0;
  while (found < n && parts[found].version == parts[0].version && parts[found].kind == parts[0].kind &&
         parts[found].part == found)
    found++;
  if (found < parts[0].parts) {
    return tx_fail(error, TX_ERROR_BAD_STATE,
                   "part %" PRId64 " of %d of version %" PRId64 " is missing; legal: all parts of each version", found,
                   parts[0].parts, parts[0].version);
  }
  *n_of = found;
  return TX_OK;
}

/* Checks that changes follow the receiver's version. */
static tx_status check_first(const tx_delta_receiver *r, const tx_delta_part *p, tx_error *error) {
  char a[17], b[17];
  const int fresh = !(r->id[0] || r->id[1]);
  if (!fresh && (p->id[0] != r->id[0] || p->id[1] != r->id[1] || p->parts != r->parts)) {
    return tx_fail(
        error, TX_ERROR_MISMATCH,
        "the delta is of chain %s (%d parts), the receiver follows %s (%d parts); legal: its own chain, or a "
        "full message that begins another",
        tx_delta_id_text(p->id, a), p->parts, tx_delta_id_text(r->id, b), r->parts);
  }
  if (p->version <= r->version) {
    return tx_fail(error, TX_ERROR_BAD_STATE,
                   "version %" PRId64 " was applied already: the receiver is at %" PRId64 "; legal: version %" PRId64
                   ", or a full message",
                   p->version, r->version, r->version + 1);
  }
  if (p->version > r->version + 1) {
    return tx_fail(error, TX_ERROR_BAD_STATE,
                   "version %" PRId64 " comes on top of %" PRId64 ", the receiver is at %" PRId64
                   ": versions between were lost, or come later; legal: version %" PRId64 ", or a full message",
                   p->version, p->version - 1, r->version, r->version + 1);
  }
  return TX_OK;
}

tx_status tx_delta_follows(const tx_delta_receiver *r, const tx_delta_part *parts, int64_t n, tx_error *error) {
  if (parts[0].model != r->model) {
    return tx_fail(error, TX_ERROR_MISMATCH,
                   "the delta is of another model (names, dtypes or sizes of its parameters differ from the %" PRId64
                   " of the receiver); legal: the receiver's own",
                   r->n_params);
  }
  TX_FORWARD(tx_delta_parts_check(parts, n, error));
  if (parts[0].kind == TX_DELTA_CHANGES) TX_FORWARD(check_first(r, &parts[0], error));
  int64_t at = 0, n_of = 0;
  for (int64_t before = -1; at < n; before = at, at += n_of) {
    TX_FORWARD(check_complete(parts + at, n - at, &n_of, error));
    for (int64_t i = at; parts[at].kind == TX_DELTA_CHANGES && i < at + n_of; i++) {
      const tx_delta_part *p = &parts[i];
      const uint64_t link = before >= 0 ? tx_delta_link(&parts[before + (i - at)])
                            : r->parts  ? r->links[p->part]
                                        : tx_delta_first_link(p->id, r->model, p->part, p->parts);
      if (link == p->link) continue;
      return tx_fail(error, TX_ERROR_MISMATCH,
                     "part %d of version %" PRId64
                     " has another history than the receiver; legal: on top of the same "
                     "version %" PRId64 ", or a full message",
                     p->part, p->version, p->version - 1);
    }
  }
  return TX_OK;
}

/* -- plans ------------------------------------------------------------------------------------------------------ */

void tx_delta_plan_free(tx_delta_plan *plan) {
  free(plan->runs);
  free(plan->changes);
  free(plan->groups);
}

static tx_status malformed(const tx_delta_part *part, tx_error *error) {
  return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                 "part %d of version %" PRId64
                 " contradicts itself (no publisher made it); legal: what tx_delta_encode made",
                 part->part, part->version);
}

/* Counts the runs and segments of a part and, if the plan has memory for them, adds them. */
static tx_status add_part(tx_delta_plan *plan, const tx_delta_receiver *r, const tx_delta_part *part, int64_t order,
                          int all, tx_error *error) {
  tx_bytes runs = part->runs;
  int64_t param = 0, end = 0;
  for (int64_t i = 0; i < part->n_runs; i++) {
    const tx_delta_piece_of run = tx_delta_run_next(&runs);
    if (runs.failed || run.param >= r->n_params || run.numel < 1 || run.param < param ||
        run.numel > r->params[run.param].numel || run.offset > r->params[run.param].numel - run.numel ||
        (run.param == param && run.offset < end)) {
      return malformed(part, error);
    }
    param = run.param;
    end = run.offset + run.numel;
    if (plan->runs) plan->runs[plan->n_runs] = (tx_delta_expected){.part = part, .run = run};
    tx_bytes segments = run.segments;
    const int none = segments.at == segments.end;
    for (int64_t at = 0; at < run.numel; at += TX_DELTA_SEGMENT) {
      const int64_t left = run.numel - at, bytes = none ? 0 : tx_take_varint(&segments);
      const uint8_t *from = tx_take_bytes(&segments, bytes);
      if (segments.failed) return malformed(part, error);
      if (bytes == 0 && !all) continue;
      if (plan->changes) {
        plan->changes[plan->n_changes] = (tx_delta_change){.param = run.param,
                                                           .at = run.offset + at,
                                                           .numel = left < TX_DELTA_SEGMENT ? left : TX_DELTA_SEGMENT,
                                                           .order = order,
                                                           .run = plan->n_runs,
                                                           .in_run = at,
                                                           .bytes = from,
                                                           .n_bytes = bytes};
      }
      plan->n_changes++;
    }
    if (segments.at != segments.end) return malformed(part, error);
    plan->n_runs++;
  }
  return runs.at == runs.end ? TX_OK : malformed(part, error);
}

static int by_place(const void *a, const void *b) {
  const tx_delta_change *x = a, *y = b;
  if (x->param != y->param) return x->param < y->param ? -1 : 1;
  if (x->at != y->at) return x->at < y->at ? -1 : 1;
  return x->order < y->order ? -1 : x->order > y->order;
}

static tx_status group_changes(tx_delta_plan *plan, const tx_delta_receiver *r, tx_error *error) {
  qsort(plan->changes, (size_t)plan->n_changes, sizeof *plan->changes, by_place);
  for (int64_t i = 0; i < plan->n_changes; i++) {
    const tx_delta_change *c = &plan->changes[i], *before = i > 0 ? c - 1 : NULL;
    const int follows = before && before->param == c->param;
    if (follows && before->at == c->at && before->numel == c->numel && before->order < c->order) continue;
    if (follows && before->at + before->numel > c->at) {
      return tx_fail(error, TX_ERROR_INVALID_ARGUMENT,
                     "\"%s\": element %" PRId64
                     " is in two runs (%s); legal: each element in one, and versions that cut "
                     "parameters alike, or one version at a time",
                     r->params[c->param].name, c->at,
                     before->order == c->order ? "of one version" : "which versions cut differently");
    }
    plan->groups[plan->n_groups++] = i;
  }
  plan->groups[plan->n_groups] = plan->n_changes;
  for (int64_t g = 0; g < plan->n_groups; g++) {
    const int64_t n = plan->groups[g + 1] - plan->groups[g];
    plan->longest = n > plan->longest ? n : plan->longest;
  }
  return TX_OK;
}

tx_status tx_delta_plan_make(tx_delta_plan *plan, const tx_delta_receiver *receiver, const tx_delta_part *parts,
                             int64_t n_parts, int all, tx_error *error) {
  for (int pass = 0; pass < 2; pass++) {
    plan->n_runs = plan->n_changes = 0;
    int64_t order = 0;
    for (int64_t i = 0; i < n_parts; i++) {
      if (i > 0 && parts[i].version != parts[i - 1].version) order++;
      TX_FORWARD(add_part(plan, receiver, &parts[i], order, all, error));
    }
    if (pass == 1) break;
    plan->runs = malloc((size_t)(plan->n_runs + 1) * sizeof *plan->runs);
    plan->changes = malloc((size_t)(plan->n_changes + 1) * sizeof *plan->changes);
    plan->groups = malloc((size_t)(plan->n_changes + 2) * sizeof *plan->groups);
    if (!plan->runs || !plan->changes || !plan->groups) {
      return tx_fail(error, TX_ERROR_OUT_OF_MEMORY, "no memory for %" PRId64 " segments", plan->n_changes);
    }
  }
  return group_changes(plan, receiver, error);
}
