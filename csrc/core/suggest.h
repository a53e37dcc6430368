/* The nearest known name, which a message suggests in place of an unknown one. */
#ifndef TX_CORE_SUGGEST_H
#define TX_CORE_SUGGEST_H

#include <stdint.h>

/* Edit distance: insertions, deletions, substitutions and swaps of neighbours that turn `a` into `b` (optimal string
 * alignment). Only the first 63 bytes of each are looked at. */
int64_t tx_edit_distance(const char *a, const char *b);

/* The candidate at the least edit distance from `name`, the first among equals; NULL if there is none. */
const char *tx_nearest(const char *name, const char *const *candidates, int64_t n);

/* Translates another library's `word` for a value of `key` (csrc/core/other_names.def): returns our word, and in *what
 * the meaning of theirs. NULL if the table does not have the word. */
const char *tx_other_name(const char *key, const char *word, const char **what);

#endif
