/* The bytes of a part of a version:
 *
 *   header     TX_DELTA_HEADER bytes, fields at the offsets below
 *   table      of parameters, in full messages and in version 1: for each its numel (varint), dtype (one byte) and
 *              name with its NUL
 *   runs       for each run the index of its parameter, offset and numel (varints), flags (one byte), the sum over the
 *              touched weights (4 bytes), the sum over all weights (4 bytes, if TX_DELTA_RUN_FULL), the bytes of all
 *              its segments (varint), then the segments, each preceded by its length (varint)
 *   checksum   XXH64 of everything before it
 *
 * The link of a part is a hash of its checksum and the previous link, so two chains that differed once have different
 * links forever. */
#ifndef TX_CORE_DELTA_PART_H
#define TX_CORE_DELTA_PART_H

#include "csrc/core/delta_bytes.h"
#include "csrc/torch_ext_delta.h"

#define TX_DELTA_MAGIC UINT64_C(0x0a1a41544c445854) /* "TXDLTA" and two bytes that do not occur in text */
#define TX_DELTA_FORMAT 1

enum {
  TX_DELTA_AT_FORMAT = 8,
  TX_DELTA_AT_KIND = 12,
  TX_DELTA_AT_BYTES = 16,
  TX_DELTA_AT_ID = 24,
  TX_DELTA_AT_VERSION = 40,
  TX_DELTA_AT_PART = 48,
  TX_DELTA_AT_PARTS = 52,
  TX_DELTA_AT_MODEL = 56,
  TX_DELTA_AT_LINK = 64,
  TX_DELTA_AT_CHANGED = 72,
  TX_DELTA_AT_RUNS = 80,
  TX_DELTA_AT_PARAMS = 84,
  TX_DELTA_AT_TABLE = 88, /* bytes of the table */
  TX_DELTA_HEADER = 96
};
#define TX_DELTA_CHECKSUM_BYTES 8

/* A part whose header is read and whose checksum is right. Pointers are into the message. */
typedef struct tx_delta_part {
  const uint8_t *bytes;
  int64_t n_bytes;
  uint64_t id[2], model, link, checksum;
  int64_t version, changed, n_runs, n_params;
  int32_t part, parts, kind;
  tx_bytes table, runs;
} tx_delta_part;

/* Reads the part at the start of bytes [at, n) of a message. `what` names the message in errors ("message 2"). */
tx_status tx_delta_part_read(const char *what, const uint8_t *message, int64_t at, int64_t n, tx_delta_part *part,
                             tx_error *error);

#define TX_DELTA_RUN_FULL 1
typedef struct tx_delta_piece_of {
  int64_t param, offset, numel;
  int32_t flags;
  uint32_t touched, full;
  tx_bytes segments;
} tx_delta_piece_of;

/* Reads the next run; sets runs->failed if there is none. */
tx_delta_piece_of tx_delta_run_next(tx_bytes *runs);

/* Sorts parts by version, then full messages before changes, then by part. */
void tx_delta_parts_sort(tx_delta_part *parts, int64_t n);

/* Checks that sorted parts are of one chain, that their versions follow each other, and that no part occurs twice. */
tx_status tx_delta_parts_check(const tx_delta_part *parts, int64_t n, tx_error *error);

/* The link that the next part of the same rank must name. */
uint64_t tx_delta_link(const tx_delta_part *part);
/* The link of version 0. */
uint64_t tx_delta_first_link(const uint64_t *id, uint64_t model, int32_t part, int32_t parts);

/* Checks a table of parameters and computes its fingerprint. */
tx_status tx_delta_model(int64_t n, const tx_delta_param *params, uint64_t *model, tx_error *error);

/* Writes the beginning of a chain's id, "3f2a...", into 17 bytes, and returns them. */
const char *tx_delta_id_text(const uint64_t *id, char *text);

#endif
