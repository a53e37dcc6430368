/* Note [repeated checks]
 *
 * A step's call passes the same parameters and states as the one before; only gradients, and scalars that are read, are
 * new. To check a thousand small tensors takes as long as to read them from Python. So an accepted call notes what it
 * writes: a copy of the lists, and their memory as a few ascending ranges. A call whose lists equal the copy has been
 * checked, as far as only those lists matter. Of the tensors that it reads, each must lie between two of the ranges:
 * mostly the same two as the last time, which is noted, too. */
#include "csrc/ops/repeat_check.h"

#include <string.h>

typedef struct header {
  int64_t noted; /* whether the rest is set */
  int64_t n_written, n_ranges;
  int64_t lengths[TX_NOTED_SPANS]; /* of the lists that are written; -1: absent */
} header;

/* The parts of the notes. The ranges come last, since their number is known last. */
typedef struct parts {
  header *head;
  tx_tensor *written; /* [n_written] */
  int32_t *places;    /* for each tensor that is read, the range that it was before */
  tx_memory_range *ranges;
  int64_t room; /* for ranges */
} parts;

static int64_t length_of(const tx_span *span) {
  return span->tensors ? span->n : -1;
}

/* The number of tensors that are written, or read. -1 if there is no room to note them, or a length, which nobody has
 * checked yet, is negative. */
static int64_t count(const tx_notes *notes, const tx_span *spans, int64_t n_spans, int writes) {
  const int64_t most = notes->bytes < INT32_MAX ? notes->bytes : INT32_MAX;
  int64_t n = 0;
  for (int64_t s = 0; s < n_spans; s++) {
    const int64_t more = spans[s].writes == writes && spans[s].tensors ? spans[s].n : 0;
    if (more < 0 || more > most - n) return -1;
    n += more;
  }
  return n;
}

/* Returns whether there is room for everything but ranges. */
static int find_parts(const tx_notes *notes, int64_t n_written, int64_t n_read, parts *found) {
  if (n_written < 0 || n_read < 0) return 0;
  const int64_t places = (n_read + 1) / 2 * 2; /* so that ranges are aligned */
  const int64_t fixed = (int64_t)sizeof(header) + n_written * (int64_t)sizeof(tx_tensor) + places * 4;
  if (!notes->memory || (uintptr_t)notes->memory % sizeof(int64_t) || notes->bytes < fixed) return 0;
  found->head = notes->memory;
  found->written = (tx_tensor *)(void *)(found->head + 1);
  found->places = (int32_t *)(void *)(found->written + n_written);
  found->ranges = (tx_memory_range *)(void *)(found->places + places);
  found->room = (notes->bytes - fixed) / (int64_t)sizeof(tx_memory_range);
  return 1;
}

int tx_notes_repeat(const tx_notes *notes, const tx_span *spans, int64_t n_spans) {
  const int64_t n_written = count(notes, spans, n_spans, 1);
  parts p;
  if (!find_parts(notes, n_written, count(notes, spans, n_spans, 0), &p)) return 0;
  if (!p.head->noted || p.head->n_written != n_written) return 0;
  const tx_tensor *noted = p.written;
  for (int64_t s = 0; s < n_spans; s++) {
    if (!spans[s].writes) continue;
    const int64_t n = length_of(&spans[s]);
    if (p.head->lengths[s] != n) return 0;
    if (n > 0 && memcmp(noted, spans[s].tensors, (size_t)n * sizeof *noted) != 0) return 0;
    noted += n > 0 ? n : 0;
  }
  return 1;
}

/* Whether [begin, end) lies before range `place` and after the one before that. */
static int fits(const parts *p, int64_t place, uintptr_t begin, uintptr_t end) {
  return place >= 0 && place <= p->head->n_ranges && (place == 0 || p->ranges[place - 1].end <= begin) &&
         (place == p->head->n_ranges || end <= p->ranges[place].begin);
}

/* The number of ranges that begin before `begin`. */
static int64_t place_of(const parts *p, uintptr_t begin) {
  int64_t low = 0, high = p->head->n_ranges;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (p->ranges[middle].begin < begin) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

int tx_notes_reads_are_apart(const tx_notes *notes, const tx_span *spans, int64_t n_spans) {
  parts p;
  if (!find_parts(notes, count(notes, spans, n_spans, 1), count(notes, spans, n_spans, 0), &p)) return 0;
  int32_t *place = p.places;
  for (int64_t s = 0; s < n_spans; s++) {
    for (int64_t i = 0; !spans[s].writes && i < length_of(&spans[s]); i++, place++) {
      const tx_tensor *t = &spans[s].tensors[i];
      const uintptr_t begin = (uintptr_t)t->data, end = begin + (uintptr_t)(t->numel * tx_element_size(t->dtype));
      if (t->numel == 0 || fits(&p, *place, begin, end)) continue;
      *place = (int32_t)place_of(&p, begin);
      if (!fits(&p, *place, begin, end)) return 0;
    }
  }
  return 1;
}

void tx_notes_take(const tx_notes *notes, const tx_span *spans, int64_t n_spans) {
  const int64_t n_read = count(notes, spans, n_spans, 0);
  parts p;
  tx_notes_drop(notes);
  if (n_spans > TX_NOTED_SPANS || !find_parts(notes, count(notes, spans, n_spans, 1), n_read, &p)) return;
  header head = {.noted = 1};
  for (int64_t s = 0; s < n_spans; s++) {
    if (!spans[s].writes) continue;
    head.lengths[s] = length_of(&spans[s]);
    if (head.lengths[s] <= 0) continue;
    memcpy(p.written + head.n_written, spans[s].tensors, (size_t)head.lengths[s] * sizeof *p.written);
    head.n_written += head.lengths[s];
  }
  head.n_ranges = tx_written_ranges(spans, n_spans, p.ranges, p.room);
  if (head.n_ranges < 0) return;
  memset(p.places, 0, (size_t)n_read * sizeof *p.places);
  *p.head = head;
}

void tx_notes_drop(const tx_notes *notes) {
  parts p;
  if (find_parts(notes, 0, 0, &p)) p.head->noted = 0;
}
