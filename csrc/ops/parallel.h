/* Cuts a call over many tensors into units of work and runs them in one parallel region.
 *
 * The tensors of a call are thought of as end to end, each padded to whole blocks, and cut into units: a large tensor
 * becomes many units, and a thousand tiny ones share a unit. Threads claim units from an atomic counter, so a thread
 * that loses its core does not delay the others. Results never depend on which thread runs which unit. */
#ifndef TX_OPS_PARALLEL_H
#define TX_OPS_PARALLEL_H

#include <stddef.h>

#include "csrc/torch_ext.h"

/* The elements of a unit are a multiple of TX_UNIT, which is large enough to hide the cost of the claim, and of
 * TX_BLOCK. Long units are better: prefetches, by the thread and by the processor, are lost if the next unit runs on
 * another thread; with short units that was a tenth of the step's time. But with several threads, units longer than
 * TX_UNIT have at most 1 / TX_UNIT_SHARE of a thread's part of the remaining elements, so that threads finish at about
 * the same time. */
#define TX_UNIT ((int64_t)16384)
#define TX_UNIT_MOST (32 * TX_UNIT)
#define TX_UNIT_SHARE 4

/* Processes a piece: elements [begin, begin + count) of tensor `tensor`. begin is a multiple of the work's alignment,
 * and so is count unless the piece ends the tensor. `local` is memory of the running task, zeroed before its first
 * piece; at most one piece uses it at a time. The floating-point mode is tx_fp_enter's. */
typedef void (*tx_tensor_range_fn)(void *ctx, void *local, int64_t tensor, int64_t begin, int64_t count);
/* Called once per task on the calling thread after all pieces are done, in an unspecified order. */
typedef void (*tx_merge_fn)(void *ctx, const void *local);

/* Memory for the tables of several runs, one after the other, so that no later run can fail after an earlier one has
 * written. All zero: there is none, and each run allocates its own. */
typedef struct tx_work_room {
  char *memory;
  size_t bytes;
} tx_work_room;

/* Allocates room for runs over these tensors, or some of them, with alignments that divide this one and with at most
 * this number of threads and of bytes per task. Fails only with TX_ERROR_OUT_OF_MEMORY. tx_work_room_free frees it. */
tx_status tx_work_room_make(tx_work_room *room, int64_t n, const tx_tensor *tensors, int64_t alignment, int64_t threads,
                            size_t local_bytes, tx_error *error);
void tx_work_room_free(tx_work_room *room);

typedef struct tx_parallel_work {
  int64_t n;
  const tx_tensor *tensors; /* only numel is read; tensors of numel 0 give no piece */
  tx_tensor_range_fn piece;
  tx_merge_fn merge;  /* NULL: nothing to merge */
  size_t local_bytes; /* per task; 0: local is NULL */
  void *ctx;
  int64_t alignment; /* of pieces in a tensor, in elements: divides TX_UNIT; 0: TX_BLOCK */
  tx_work_room room; /* all zero, or a room that is large enough */
} tx_parallel_work;

/* Runs all pieces. Fails only with TX_ERROR_OUT_OF_MEMORY, before any piece runs, and never with a room. */
tx_status tx_parallel_work_run(const tx_parallel_work *work, const tx_parallel *parallel, tx_error *error);

/* -- units, for callers that do more than call a function for each piece ------------------------------------------ */

/* A position: the start of a unit, or of its remaining part. */
typedef struct tx_unit_start {
  int64_t tensor;
  int64_t element;
} tx_unit_start;

/* The remaining part of a unit; all zero: nothing. */
typedef struct tx_unit {
  tx_unit_start at, end;
} tx_unit;

/* The units of n tensors, claimed by tasks. */
typedef struct tx_work_units {
  int64_t n;
  const tx_tensor *tensors;
  int64_t alignment;
  const tx_unit_start *starts; /* n_units + 1 entries; the last one is the end of everything */
  int64_t n_units;
  int64_t n_tasks; /* tasks worth running: one per thread, but not more than units; 0: no elements */
  int64_t next;    /* atomic */
  char *locals;    /* local_bytes per task, zeroed, each on its own cache lines */
  size_t local_stride;
  char *memory; /* to be freed; NULL if it is the caller's (a room's) */
} tx_work_units;

/* Cuts n tensors into units for this number of threads. alignment: as in tx_parallel_work, but not 0. Fails only with
 * TX_ERROR_OUT_OF_MEMORY. tx_work_units_free frees the memory. */
tx_status tx_work_units_cut(tx_work_units *units, int64_t n, const tx_tensor *tensors, int64_t alignment,
                            int64_t threads, size_t local_bytes, tx_error *error);
void tx_work_units_free(tx_work_units *units);

/* The number of threads that a call may use. */
static inline int64_t tx_threads_of(const tx_parallel *parallel) {
  return parallel && parallel->run && parallel->num_threads > 1 ? parallel->num_threads : 1;
}

/* The memory of a task. */
static inline void *tx_work_units_local(const tx_work_units *units, int64_t task) {
  return units->local_stride ? units->locals + (size_t)task * units->local_stride : NULL;
}

/* Claims the next unit; returns 0 if there is none. May be called from any thread. */
int tx_work_units_claim(tx_work_units *units, tx_unit *unit);

typedef struct tx_tensor_range {
  int64_t tensor, begin, count;
} tx_tensor_range;

/* Takes the first piece from the unit, at most `most` elements, a multiple of the alignment. Returns 0 if nothing is
 * left. */
int tx_unit_take(const tx_work_units *units, tx_unit *unit, int64_t most, tx_tensor_range *piece);

#endif
