/* Cutting a call over many tensors into units, and running them in one parallel region.
 *
 * The tensors of a call are laid end to end, each padded to whole blocks, and cut into units: a large tensor becomes
 * many units and a thousand tiny ones share a unit. Threads claim units from an atomic counter, so a thread that loses
 * its core delays nobody; results never depend on who takes which. */
#ifndef TX_OPS_PARALLEL_H
#define TX_OPS_PARALLEL_H

#include <stddef.h>

#include "csrc/torch_ext.h"

/* Elements in a unit are a multiple of TX_UNIT, which is large enough to hide the claim, and of TX_BLOCK. Long units
 * are better: what a thread asks for ahead, and what the processor fetches by itself, is lost where the next unit is
 * another thread's; with short ones it was a tenth of the step's time. But where there are several threads none beyond
 * TX_UNIT is longer than a TX_UNIT_SHARE-th of a thread's part of what is left, so that threads end together. */
#define TX_UNIT ((int64_t)16384)
#define TX_UNIT_MOST (32 * TX_UNIT)
#define TX_UNIT_SHARE 4

/* Elements [begin, begin + count) of tensor `tensor`; begin is a multiple of the work's alignment and so is count
 * unless the piece ends the tensor. `local` is memory of the running task, zeroed before its first piece; at most one
 * piece uses it at a time. The floating-point mode is tx_fp_enter's. */
typedef void (*tx_tensor_range_fn)(void *ctx, void *local, int64_t tensor, int64_t begin, int64_t count);
/* Called once per task on the calling thread after all pieces are done, in an unspecified order. */
typedef void (*tx_merge_fn)(void *ctx, const void *local);

/* Memory for the tables of several runs, one after the other, so that none of them can fail when another has written
 * already. All zero: none, and each run takes its own. */
typedef struct tx_work_room {
  char *memory;
  size_t bytes;
} tx_work_room;

/* Enough for runs over these tensors or some of them, whose alignments divide this one, by at most so many threads and
 * with at most so many bytes of a task. Fails only with TX_ERROR_OUT_OF_MEMORY. tx_work_room_free frees it. */
tx_status tx_work_room_make(tx_work_room *room, int64_t n, const tx_tensor *tensors, int64_t alignment, int64_t threads,
                            size_t local_bytes, tx_error *error);
void tx_work_room_free(tx_work_room *room);

typedef struct tx_parallel_work {
  int64_t n;
  const tx_tensor *tensors; /* only numel is read; a numel of 0 yields no piece */
  tx_tensor_range_fn piece;
  tx_merge_fn merge;  /* NULL: nothing to merge */
  size_t local_bytes; /* of one task; 0: local is NULL */
  void *ctx;
  int64_t alignment; /* of pieces in a tensor, in elements: divides TX_UNIT; 0: TX_BLOCK */
  tx_work_room room; /* all zero, or one that is enough */
} tx_parallel_work;

/* Runs all pieces. Fails only with TX_ERROR_OUT_OF_MEMORY, before any piece ran, and never with a room. */
tx_status tx_parallel_work_run(const tx_parallel_work *work, const tx_parallel *parallel, tx_error *error);

/* -- the units themselves, for who does more with one than call a function for each piece ------------------------- */

/* Where a unit begins, or what is left of one does: a tensor and an element of it. */
typedef struct tx_unit_start {
  int64_t tensor;
  int64_t element;
} tx_unit_start;

/* What is left of a unit; all zero: nothing. */
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
  int64_t n_tasks; /* that are worth running: one for each thread, but not more than there are units; 0: no elements */
  int64_t next;    /* atomic */
  char *locals;    /* local_bytes of each task, zeroed, on cache lines of its own */
  size_t local_stride;
  char *memory; /* to be freed; NULL where it is somebody else's */
} tx_work_units;

/* Cuts n tensors for so many threads; alignment: as of tx_parallel_work, but not 0. Fails only with
 * TX_ERROR_OUT_OF_MEMORY. tx_work_units_free frees what it took. */
tx_status tx_work_units_cut(tx_work_units *units, int64_t n, const tx_tensor *tensors, int64_t alignment,
                            int64_t threads, size_t local_bytes, tx_error *error);
void tx_work_units_free(tx_work_units *units);

/* Threads that a call may use. */
static inline int64_t tx_threads_of(const tx_parallel *parallel) {
  return parallel && parallel->run && parallel->num_threads > 1 ? parallel->num_threads : 1;
}

/* The memory of a task. */
static inline void *tx_work_units_local(const tx_work_units *units, int64_t task) {
  return units->local_stride ? units->locals + (size_t)task * units->local_stride : NULL;
}

/* Claims the next unit. 0: there is none. Any thread. */
int tx_work_units_claim(tx_work_units *units, tx_unit *unit);

typedef struct tx_tensor_range {
  int64_t tensor, begin, count;
} tx_tensor_range;

/* Takes the first piece off the unit, of `most` elements at most, a multiple of the alignment. 0: nothing is left. */
int tx_unit_take(const tx_work_units *units, tx_unit *unit, int64_t most, tx_tensor_range *piece);

#endif
