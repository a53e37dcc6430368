/* Buckets between GPUs over a communicator of our own. */
#ifndef TORCH_EXT_NCCL_H
#define TORCH_EXT_NCCL_H

#include "torch_ext_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sends bytes between GPUs without torch.distributed. NCCL is looked up in the process and called through function
 * pointers; nothing is linked to it. A communicator is used by one thread at a time, and all ranks make the same calls
 * in the same order. No call waits for the device, and none waits for other ranks longer than timeout_seconds. If that
 * time is exceeded, or NCCL reports an error, the communicator is aborted (once), the call says why
 * (TX_ERROR_UNAVAILABLE), and later calls repeat the reason (TX_ERROR_BAD_STATE). */
typedef struct tx_nccl tx_nccl;           /* the loaded NCCL library */
typedef struct tx_nccl_comm tx_nccl_comm; /* one rank's communicator */

/* Opens NCCL: the libnccl.so.2 that the process has loaded (torch's); if there is none, `path`; if that is NULL, what
 * the dynamic linker finds. TX_ERROR_UNAVAILABLE if there is no NCCL, it is older than 2.19, or lacks a symbol that is
 * needed; the message says what was found where, what is needed and what to do. Close it after its communicators. */
TX_API tx_status tx_nccl_open(const char *path, tx_nccl **library, tx_error *error);
TX_API void tx_nccl_close(tx_nccl *library);

typedef struct tx_nccl_about {
  uint64_t size;
  int32_t version; /* 22809 for 2.28.9 */
  int32_t windows; /* 1: this NCCL can register symmetric memory windows (2.27 and newer) */
  char path[512];  /* path of the library file */
} tx_nccl_about;
#define TX_NCCL_ABOUT_INIT \
  { .size = sizeof(tx_nccl_about) }
TX_API tx_status tx_nccl_about_this(const tx_nccl *library, tx_nccl_about *about, tx_error *error);

/* Creates the id of a communicator. One rank creates it (id: TX_NCCL_ID_BYTES bytes), and the caller sends it to the
 * other ranks. */
#define TX_NCCL_ID_BYTES 128
TX_API tx_status tx_nccl_unique_id(const tx_nccl *library, char *id, tx_error *error);

typedef struct tx_nccl_comm_args {
  uint64_t size;
  const tx_nccl *library;
  const char *id; /* TX_NCCL_ID_BYTES bytes */
  int32_t rank, n_ranks;
  double timeout_seconds;
  int32_t copy_engines; /* 1: copy engines move the data of windows if NCCL can do that (2.28 and newer), so that no SM
                           is used */
  int32_t multiprocessors; /* number of the device's SMs; with a gather_id the kernels of each communicator use at most
                              a quarter of them, so that both always fit. 0: NCCL decides alone */
  const char *gather_id;   /* NULL, or a second id: all-gathers get a communicator of their own and do not wait for
                              earlier all-to-alls. It is created, checked, aborted and freed with the first one. NCCL
                              keeps twice the memory for itself */
} tx_nccl_comm_args;
#define TX_NCCL_COMM_ARGS_INIT \
  { sizeof(tx_nccl_comm_args), NULL, NULL, 0, 0, 600.0, 0, 0, NULL }

/* Creates a communicator on the current CUDA device; returns when every rank has joined. Sets *comm to NULL on
 * failure. */
TX_API tx_status tx_nccl_comm_new(const tx_nccl_comm_args *args, tx_nccl_comm **comm, tx_error *error);
/* Frees a communicator. Waits for the other ranks' tx_nccl_comm_free unless the communicator was aborted. */
TX_API void tx_nccl_comm_free(tx_nccl_comm *comm);
/* Checks that what was issued has not failed so far. May be called from any thread. */
TX_API tx_status tx_nccl_comm_check(tx_nccl_comm *comm, tx_error *error);
/* Aborts everything in flight on this rank. Only the first call has an effect. why: what later calls on the
 * communicator report. May be called from any thread. */
TX_API void tx_nccl_comm_abort(tx_nccl_comm *comm, const char *why);

/* One transfer, in device memory. all-to-all: `send` and `receive` hold n_ranks parts of `bytes` each; part r of `send`
 * goes to rank r, part r of `receive` came from it. all-gather: `send` is this rank's part, `receive` holds all ranks'
 * parts; `send` may be its own place inside `receive`. */
typedef struct tx_nccl_message {
  const void *send;
  void *receive;
  int64_t bytes;
} tx_nccl_message;

/* Issues n messages as one operation on `stream` (cudaStream_t). bucket: a name for error messages and records, the
 * same on all ranks. With a gather_id, all-to-alls and all-gathers must each always use the same stream, one of their
 * own. */
TX_API tx_status tx_nccl_all_to_all(tx_nccl_comm *comm, const char *bucket, int64_t n, const tx_nccl_message *messages,
                                    void *stream, tx_error *error);
TX_API tx_status tx_nccl_all_gather(tx_nccl_comm *comm, const char *bucket, int64_t n, const tx_nccl_message *messages,
                                    void *stream, tx_error *error);

/* Device memory, registered as a symmetric window if NCCL supports that. All ranks allocate theirs in the same order
 * and of the same size. */
typedef struct tx_nccl_memory {
  uint64_t size;
  int64_t bytes;
  void *data;          /* aligned to 4096 bytes */
  void *window;        /* NULL: it is not a window */
  void *gather_window; /* window of the all-gathers' communicator; NULL: there is none */
} tx_nccl_memory;
#define TX_NCCL_MEMORY_INIT \
  { sizeof(tx_nccl_memory), 0, NULL, NULL, NULL }
TX_API tx_status tx_nccl_memory_new(tx_nccl_comm *comm, tx_nccl_memory *memory, tx_error *error);
TX_API void tx_nccl_memory_free(tx_nccl_comm *comm, tx_nccl_memory *memory);

/* The record of one operation. Operations are counted from 1 and recorded with a hash of their kind, bucket name and
 * sizes. The ranks compare their digests from time to time, by the caller's own means; if digests differ, the last
 * records show where the ranks diverged. */
typedef struct tx_nccl_record {
  int64_t operation; /* counted from 1; 0: no record */
  uint64_t hash;
  char what[112]; /* "all-to-all of bucket 3 ..." */
} tx_nccl_record;
#define TX_NCCL_RECORDS 64
TX_API tx_status tx_nccl_digest(const tx_nccl_comm *comm, int64_t *count, uint64_t *digest, tx_error *error);
/* Copies this rank's last records. records: TX_NCCL_RECORDS entries, written. */
TX_API tx_status tx_nccl_records(const tx_nccl_comm *comm, tx_nccl_record *records, tx_error *error);
/* Compares the records of all ranks. records: TX_NCCL_RECORDS entries of each rank, by rank. TX_ERROR_MISMATCH names
 * the first operation that differs, what it is on two ranks, and both hashes. */
TX_API tx_status tx_nccl_compare(int64_t n_ranks, const tx_nccl_record *records, tx_error *error);

#ifdef __cplusplus
}
#endif

#endif
