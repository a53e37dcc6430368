/* The nearest name: what a message suggests in place of one that nobody knows. */
#ifndef TX_CORE_SUGGEST_H
#define TX_CORE_SUGGEST_H

#include <stdint.h>

/* Edit distance: insertions, deletions, substitutions and swaps of neighbours that turn `a` into `b` (optimal string
 * alignment). Only the first 63 bytes of each are looked at. */
int64_t tx_edit_distance(const char *a, const char *b);

/* The candidate at the least edit distance from `name`, the first among equals; NULL where there is none. */
const char *tx_nearest(const char *name, const char *const *candidates, int64_t n);

/* What others mean by `word` as a value of `key` (csrc/core/other_names.def): our word for it, and in *what what it is.
 * NULL where the table has no such word. */
const char *tx_other_name(const char *key, const char *word, const char **what);

#endif
