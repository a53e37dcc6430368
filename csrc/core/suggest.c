#include "csrc/core/suggest.h"

#include <stddef.h>
#include <string.h>

enum { LIMIT = 63 };

/* strnlen is POSIX, not C11. */
static int64_t length_of(const char *text) {
  const char *end = memchr(text, 0, LIMIT);
  return end ? end - text : LIMIT;
}

static int64_t least(int64_t a, int64_t b) {
  return a < b ? a : b;
}

int64_t tx_edit_distance(const char *a, const char *b) {
  const int64_t rows = length_of(a);
  const int64_t columns = length_of(b);
  int64_t distance[3][LIMIT + 1]; /* rows i - 2, i - 1 and i of the table, by turns */
  for (int64_t j = 0; j <= columns; j++)
    distance[0][j] = j;
  for (int64_t i = 1; i <= rows; i++) {
    const int64_t *before = distance[(i + 1) % 3]; /* row i - 2; not read if i = 1 */
    const int64_t *above = distance[(i + 2) % 3];
    int64_t *row = distance[i % 3];
    row[0] = i;
    for (int64_t j = 1; j <= columns; j++) {
      row[j] = least(above[j - 1] + (a[i - 1] != b[j - 1]), least(above[j], row[j - 1]) + 1);
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) row[j] = least(row[j], before[j - 2] + 1);
    }
  }
  return distance[rows % 3][columns];
}

const char *tx_nearest(const char *name, const char *const *candidates, int64_t n) {
  const char *nearest = NULL;
  int64_t best = INT64_MAX;
  for (int64_t i = 0; i < n; i++) {
    const int64_t distance = tx_edit_distance(name, candidates[i]);
    if (distance < best) {
      best = distance;
      nearest = candidates[i];
    }
  }
  return nearest;
}

/* Whether `word`, in lower case and without -, _, dots and spaces, is `plain`. */
static int is_spelled(const char *word, const char *plain) {
  for (; *word; word++) {
    if (strchr("-_. ", *word)) continue;
    const char lower = *word >= 'A' && *word <= 'Z' ? (char)(*word - 'A' + 'a') : *word;
    if (lower != *plain++) return 0;
  }
  return *plain == 0;
}

const char *tx_other_name(const char *key, const char *word, const char **what) {
  static const struct {
    const char *key, *word, *what, *ours;
  } kNames[] = {
#define X(key, word, what, ours) {key, word, what, ours},
#include "csrc/core/other_names.def"
#undef X
  };
  for (size_t i = 0; i < sizeof kNames / sizeof *kNames; i++) {
    if (strcmp(kNames[i].key, key) != 0 || !is_spelled(word, kNames[i].word)) continue;
    *what = *kNames[i].what ? kNames[i].what : word;
    return kNames[i].ours;
  }
  return NULL;
}
