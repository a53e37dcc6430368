/* What the checks of a call need not check again, because the last call passed the same tensors. */
#ifndef TX_OPS_REPEAT_CHECK_H
#define TX_OPS_REPEAT_CHECK_H

#include "csrc/ops/check.h"

/* Memory of the caller, zero at first and otherwise as the last call left it. NULL: nothing is noted. */
typedef struct tx_notes {
  void *memory;
  int64_t bytes;
} tx_notes;

enum { TX_NOTED_SPANS = 24 }; /* of which one call can note the tensors */

/* Whether the lists that the call writes are those that were noted: as many, each as long, with equal entries. */
int tx_notes_repeat(const tx_notes *notes, const tx_span *spans, int64_t n_spans);

/* If `tx_notes_repeat`: whether no byte that the call writes is also read, by any of the other lists. */
int tx_notes_reads_are_apart(const tx_notes *notes, const tx_span *spans, int64_t n_spans);

/* Notes the lists that an accepted call writes, and the memory of their tensors. Notes nothing if there is too little
 * room: 24 bytes are needed for each tensor that is written, 4 for each that is read, 16 for each range of memory that
 * is written, and 256. */
void tx_notes_take(const tx_notes *notes, const tx_span *spans, int64_t n_spans);

/* Forgets what was noted. */
void tx_notes_drop(const tx_notes *notes);

#endif
