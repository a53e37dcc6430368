/* Finds memory that a call would write twice, or write and read. */
#include <stdlib.h>

#include "csrc/core/status.h"
#include "csrc/ops/check.h"

typedef struct range {
  uintptr_t begin, end;
  int32_t span, writes;
  int64_t index;
} range;

enum { FEW = 8 }; /* tensors up to which nothing is allocated: enough for tx_compress, and for one cast */

/* Merges two ascending neighbours [a, b) and [b, c) of `from` into `to`. */
static void merge(const range *from, range *to, int64_t a, int64_t b, int64_t c) {
  int64_t i = a, j = b;
  for (int64_t k = a; k < c; k++) {
    if (i < b && (j >= c || from[i].begin <= from[j].begin)) {
      to[k] = from[i++];
    } else {
      to[k] = from[j++];
    }
  }
}

static int64_t run_end(const range *r, int64_t at, int64_t n) {
  while (at + 1 < n && r[at].begin <= r[at + 1].begin)
    at++;
  return at + 1 < n ? at + 1 : n;
}

/* A natural merge sort: tensors are mostly in address order, and then one pass is enough. Returns whichever of the two
 * buffers is sorted. */
static const range *sort(range *r, range *spare, int64_t n) {
  for (;;) {
    int64_t runs = 0;
    for (int64_t a = 0; a < n; runs++) {
      const int64_t b = run_end(r, a, n);
      const int64_t c = b < n ? run_end(r, b, n) : n;
      if (a == 0 && b == n) return r;
      merge(r, spare, a, b, c);
      a = c;
    }
    range *other = r;
    r = spare;
    spare = other;
  }
}

/* Collects the memory of every tensor, in the order of the lists. join: neighbours in a list that touch become one
 * range, named after the first. Returns the number of ranges. */
static int64_t collect(const tx_span *spans, int64_t n_spans, const tx_tensor *left_out, int join, range *ranges) {
  int64_t n = 0;
  for (int64_t s = 0; s < n_spans; s++) {
    const int64_t first = n;
    for (int64_t i = 0; spans[s].tensors && i < spans[s].n; i++) {
      const tx_tensor *t = &spans[s].tensors[i];
      if (t->numel == 0 || t == left_out) continue;
      const uintptr_t begin = (uintptr_t)t->data;
      const uintptr_t end = begin + (uintptr_t)(t->numel * tx_element_size(t->dtype));
      if (join && n > first && ranges[n - 1].end == begin) {
        ranges[n - 1].end = end;
      } else {
        ranges[n] = (range){begin, end, (int32_t)s, spans[s].writes, i};
        n++;
      }
    }
  }
  return n;
}

/* Looks for two ranges that share memory that is written. */
static int find_overlap(range *memory, int64_t n, range found[2]) {
  const range *r = n ? sort(memory, memory + n, n) : memory;
  const range *written = NULL, *any = NULL; /* of the ranges so far, the one with the largest end */
  for (int64_t i = 0; i < n; i++) {
    const range *before = r[i].writes ? any : written;
    if (before && r[i].begin < before->end) {
      found[0] = *before;
      found[1] = r[i];
      return 1;
    }
    if (!any || r[i].end > any->end) any = &r[i];
    if (r[i].writes && (!written || r[i].end > written->end)) written = &r[i];
  }
  return 0;
}

static tx_status check(const tx_span *spans, int64_t n_spans, const tx_tensor *left_out, tx_error *error) {
  int64_t capacity = 0;
  for (int64_t s = 0; s < n_spans; s++)
    capacity += spans[s].tensors ? spans[s].n : 0;
  if (capacity == 0) return TX_OK;
  range few[2 * FEW];
  range *memory = capacity <= FEW ? few : malloc(2 * (size_t)capacity * sizeof(range));
  if (!memory) return tx_fail(error, TX_ERROR_OUT_OF_MEMORY, "no memory to check %lld tensors", (long long)capacity);
  /* Joined, flat states are only a few ranges. If there is overlap, search again without joining, to name the
   * tensors. */
  range found[2];
  tx_status status = TX_OK;
  if (find_overlap(memory, collect(spans, n_spans, left_out, 1, memory), found) &&
      find_overlap(memory, collect(spans, n_spans, left_out, 0, memory), found)) {
    status = tx_fail(error, TX_ERROR_OVERLAP,
                     "%s[%lld] and %s[%lld] share memory; each tensor that is written needs memory of its own",
                     spans[found[0].span].name, (long long)found[0].index, spans[found[1].span].name,
                     (long long)found[1].index);
  }
  if (memory != few) free(memory);
  return status;
}

tx_status tx_check_overlap(const tx_span *spans, int64_t n_spans, tx_error *error) {
  return check(spans, n_spans, NULL, error);
}

tx_status tx_check_overlap_but(const tx_span *spans, int64_t n_spans, const tx_tensor *left_out, tx_error *error) {
  return check(spans, n_spans, left_out, error);
}

int64_t tx_written_ranges(const tx_span *spans, int64_t n_spans, tx_memory_range *ranges, int64_t room) {
  int64_t capacity = 0;
  for (int64_t s = 0; s < n_spans; s++)
    capacity += spans[s].writes && spans[s].tensors ? spans[s].n : 0;
  if (capacity == 0) return 0;
  range *memory = malloc(2 * (size_t)capacity * sizeof *memory);
  if (!memory) return -1;
  int64_t n = 0, found = 0;
  for (int64_t s = 0; s < n_spans; s++)
    n += spans[s].writes ? collect(&spans[s], 1, NULL, 1, memory + n) : 0;
  const range *r = n ? sort(memory, memory + n, n) : memory;
  for (int64_t i = 0; i < n && found >= 0; i++) {
    if (found && ranges[found - 1].end == r[i].begin) {
      ranges[found - 1].end = r[i].end;
    } else if (found < room) {
      ranges[found++] = (tx_memory_range){r[i].begin, r[i].end};
    } else {
      found = -1;
    }
  }
  free(memory);
  return found;
}
