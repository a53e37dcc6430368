/* The records of what was exchanged, which ranks compare. Collectives have no tags, so ranks that are at different
 * operations would receive each other's bytes, or wait forever. */
#include <stdio.h>
#include <string.h>

#include "csrc/core/hash.h"
#include "csrc/core/status.h"
#include "csrc/nccl/nccl_comm.h"

void tx_nccl_note(tx_nccl_comm *comm, const char *kind, const char *bucket, int64_t n,
                  const tx_nccl_message *messages) {
  uint64_t hash = tx_hash_text(tx_hash_text(tx_hash_begin(), kind), bucket);
  for (int64_t i = 0; i < n; i++)
    hash = tx_hash_int(hash, messages[i].bytes);
  tx_nccl_record *record = &comm->records[comm->count % TX_NCCL_RECORDS];
  memset(record, 0, sizeof *record);
  record->operation = ++comm->count;
  record->hash = tx_hash_end(tx_hash_int(hash, comm->n_ranks));
  (void)snprintf(record->what, sizeof record->what, "%s of %s", kind, bucket);
  comm->digest = tx_hash_end(tx_hash_int(tx_hash_int(tx_hash_begin(), (int64_t)comm->digest), (int64_t)record->hash));
}

tx_status tx_nccl_digest(const tx_nccl_comm *comm, int64_t *count, uint64_t *digest, tx_error *error) {
  if (!comm || !count || !digest)
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_nccl_digest: comm, count or digest is NULL");
  *count = comm->count;
  *digest = comm->digest;
  return TX_OK;
}

tx_status tx_nccl_records(const tx_nccl_comm *comm, tx_nccl_record *records, tx_error *error) {
  if (!comm || !records) return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_nccl_records: comm or records is NULL");
  memcpy(records, comm->records, sizeof comm->records);
  return TX_OK;
}

/* A rank's record of an operation; NULL if it has none, or has it no longer. */
static const tx_nccl_record *find(const tx_nccl_record *records, int64_t operation) {
  const tx_nccl_record *record = &records[(operation - 1) % TX_NCCL_RECORDS];
  return record->operation == operation ? record : NULL;
}

static int64_t newest(const tx_nccl_record *records) {
  int64_t found = 0;
  for (int i = 0; i < TX_NCCL_RECORDS; i++)
    if (records[i].operation > found) found = records[i].operation;
  return found;
}

static tx_status report(int64_t operation, int64_t rank, const tx_nccl_record *theirs, int64_t first,
                        const tx_nccl_record *mine, tx_error *error) {
  char one[160], other[160];
  const struct {
    char *text;
    const tx_nccl_record *record;
  } sides[] = {{one, theirs}, {other, mine}};
  for (int i = 0; i < 2; i++) {
    const tx_nccl_record *record = sides[i].record;
    if (record)
      (void)snprintf(sides[i].text, sizeof one, "%.100s (hash %016llx)", record->what,
                     (unsigned long long)record->hash);
    else
      (void)snprintf(sides[i].text, sizeof one, "nothing");
  }
  return tx_fail(error, TX_ERROR_MISMATCH,
                 "ranks exchange different things: operation %lld is %s on rank %lld and %s on rank %lld. Every rank "
                 "must run the same program on the same model",
                 (long long)operation, one, (long long)rank, other, (long long)first);
}

tx_status tx_nccl_compare(int64_t n_ranks, const tx_nccl_record *records, tx_error *error) {
  if (n_ranks < 1 || !records)
    return tx_fail(error, TX_ERROR_INVALID_ARGUMENT, "tx_nccl_compare: records is NULL or n_ranks is not > 0");
  int64_t last = 0;
  for (int64_t rank = 0; rank < n_ranks; rank++) {
    const int64_t of_rank = newest(records + rank * TX_NCCL_RECORDS);
    if (of_rank > last) last = of_rank;
  }
  const int64_t n = last < TX_NCCL_RECORDS ? last : TX_NCCL_RECORDS;
  for (int64_t i = 0; i < n; i++) {
    const int64_t operation = last - n + 1 + i; /* may be INT64_MAX, since records come from other ranks */
    const tx_nccl_record *mine = find(records, operation);
    for (int64_t rank = 1; rank < n_ranks; rank++) {
      const tx_nccl_record *theirs = find(records + rank * TX_NCCL_RECORDS, operation);
      if ((mine != NULL) != (theirs != NULL) || (mine && theirs && mine->hash != theirs->hash))
        return report(operation, rank, theirs, 0, mine, error);
    }
  }
  return TX_OK;
}
