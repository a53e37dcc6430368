/* Buckets between GPUs over a communicator of our own. */
#ifndef TORCH_EXT_NCCL_H
#define TORCH_EXT_NCCL_H

#include "torch_ext_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes between GPUs without torch.distributed. NCCL is looked up in the process and called through pointers; nothing
 * is linked to it. A communicator is used by one thread at a time, and all ranks make the same calls in the same order.
 * No call waits for the device, and none waits for other ranks longer than timeout_seconds: then, and where NCCL
 * reports an error, the communicator is aborted (once), the call says why (TX_ERROR_UNAVAILABLE), and later calls
 * repeat it (TX_ERROR_BAD_STATE). */
typedef struct tx_nccl tx_nccl;           /* the library, loaded */
typedef struct tx_nccl_comm tx_nccl_comm; /* of one rank */

/* The libnccl.so.2 that the process has loaded (torch's); else `path`; else, where that is NULL, what the dynamic
 * linker finds. TX_ERROR_UNAVAILABLE: none, one older than 2.19, or one without a symbol that is needed; the message
 * says what was found where, what is needed and what to do. Close it after its communicators. */
TX_API tx_status tx_nccl_open(const char *path, tx_nccl **library, tx_error *error);
TX_API void tx_nccl_close(tx_nccl *library);

typedef struct tx_nccl_about {
  uint64_t size;
  int32_t version; /* 22809 for 2.28.9 */
  int32_t windows; /* 1 where memory becomes a symmetric window (2.27 and newer) */
  char path[512];  /* of the file */
} tx_nccl_about;
#define TX_NCCL_ABOUT_INIT \
  { .size = sizeof(tx_nccl_about) }
TX_API tx_status tx_nccl_about_this(const tx_nccl *library, tx_nccl_about *about, tx_error *error);

/* What the ranks of one communicator have in common: one of them makes it (id: TX_NCCL_ID_BYTES bytes), the caller
 * brings it to the others. */
#define TX_NCCL_ID_BYTES 128
TX_API tx_status tx_nccl_unique_id(const tx_nccl *library, char *id, tx_error *error);

typedef struct tx_nccl_comm_args {
  uint64_t size;
  const tx_nccl *library;
  const char *id; /* TX_NCCL_ID_BYTES bytes */
  int32_t rank, n_ranks;
  double timeout_seconds;
  int32_t copy_engines;    /* 1: copy engines move windows, where NCCL can (2.28), so that no SM does */
  int32_t multiprocessors; /* of the device; beside gather_id each communicator's kernels use a quarter of them at most,
                              so that both always fit. 0: NCCL decides alone */
  const char *gather_id;   /* NULL, or another id: all-gathers have a communicator of their own, made, checked, aborted
                              and ended with the first one, and wait for no all-to-all that was issued before them.
                              NCCL keeps twice the memory for itself */
} tx_nccl_comm_args;
#define TX_NCCL_COMM_ARGS_INIT \
  { sizeof(tx_nccl_comm_args), NULL, NULL, 0, 0, 600.0, 0, 0, NULL }

/* On the current CUDA device; returns when every rank has come. NULL in *comm where it fails. */
TX_API tx_status tx_nccl_comm_new(const tx_nccl_comm_args *args, tx_nccl_comm **comm, tx_error *error);
/* Waits for the other ranks' tx_nccl_comm_free, unless it was aborted. */
TX_API void tx_nccl_comm_free(tx_nccl_comm *comm);
/* Whether what was issued is well so far. Any thread. */
TX_API tx_status tx_nccl_comm_check(tx_nccl_comm *comm, tx_error *error);
/* Ends what is under way on this rank; once, later calls do nothing. why: what later calls say. Any thread. */
TX_API void tx_nccl_comm_abort(tx_nccl_comm *comm, const char *why);

/* all-to-all: `send` and `receive` hold n_ranks parts of `bytes` each; part r is sent to rank r, or came from it.
 * all-gather: `send` is this rank's part, `receive` holds all ranks'; send may lie in its place there. Device memory.
 */
typedef struct tx_nccl_message {
  const void *send;
  void *receive;
  int64_t bytes;
} tx_nccl_message;

/* n messages as one operation, issued to `stream` (cudaStream_t). bucket: its name, for messages and records; the same
 * on all ranks. With a gather_id each of the two kinds has a stream of its own, always the same. */
TX_API tx_status tx_nccl_all_to_all(tx_nccl_comm *comm, const char *bucket, int64_t n, const tx_nccl_message *messages,
                                    void *stream, tx_error *error);
TX_API tx_status tx_nccl_all_gather(tx_nccl_comm *comm, const char *bucket, int64_t n, const tx_nccl_message *messages,
                                    void *stream, tx_error *error);

/* Device memory that is a symmetric window where NCCL has them; all ranks make theirs in the same order, of one size.
 */
typedef struct tx_nccl_memory {
  uint64_t size;
  int64_t bytes;
  void *data;          /* aligned to 4096 bytes */
  void *window;        /* NULL: it is none */
  void *gather_window; /* of the gathers' communicator; NULL: it is none */
} tx_nccl_memory;
#define TX_NCCL_MEMORY_INIT \
  { sizeof(tx_nccl_memory), 0, NULL, NULL, NULL }
TX_API tx_status tx_nccl_memory_new(tx_nccl_comm *comm, tx_nccl_memory *memory, tx_error *error);
TX_API void tx_nccl_memory_free(tx_nccl_comm *comm, tx_nccl_memory *memory);

/* Each operation is noted, counted from 1, with a hash of its kind, its bucket's name and its sizes. Ranks compare
 * their digests now and then, by means of the caller's; where they differ, their last records say where they parted. */
typedef struct tx_nccl_record {
  int64_t operation; /* 0: none */
  uint64_t hash;
  char what[112]; /* "all-to-all of bucket 3 ..." */
} tx_nccl_record;
#define TX_NCCL_RECORDS 64
TX_API tx_status tx_nccl_digest(const tx_nccl_comm *comm, int64_t *count, uint64_t *digest, tx_error *error);
/* records: TX_NCCL_RECORDS of them. */
TX_API tx_status tx_nccl_records(const tx_nccl_comm *comm, tx_nccl_record *records, tx_error *error);
/* records: TX_NCCL_RECORDS of each rank, by rank. TX_ERROR_MISMATCH names the first operation that differs, what it is
 * on two ranks, and both hashes. */
TX_API tx_status tx_nccl_compare(int64_t n_ranks, const tx_nccl_record *records, tx_error *error);

#ifdef __cplusplus
}
#endif

#endif
